//! Calls of copyrpc, plain and typed. Their cost does not depend on the number of connections.

use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};

use crosstie::copyrpc::service::{Call, Client, Driver, Handlers, Method, Service};
use crosstie::copyrpc::{Config, Connection, ConnectionConfig, Context};
use crosstie::device::{Access, ConnectConfig, Device, Mr, RemoteMemory, software};
use crosstie_testkit::{allocations, callgrind, child, seccomp};

fn context<U>() -> Context<U> {
    // Valgrind limits the address space.
    let device = Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
    Context::new(device, &Config::default()).unwrap()
}

fn rings(ring: usize, bulk: usize) -> ConnectionConfig {
    ConnectionConfig { ring, credit: ring / 4, pending_calls: DEPTH, bulk, ..ConnectionConfig::default() }
}

/// Two contexts and the connections between them.
struct Pair {
    client: Context<u32>,
    server: Context<u32>,
    here: Vec<Connection<u32>>,
    #[expect(dead_code, reason = "keeps the connections open")]
    there: Vec<Connection<u32>>,
}

impl Pair {
    fn new(connections: usize, ring: usize) -> Pair {
        Pair::with_bulk(connections, ring, 0)
    }

    fn with_bulk(connections: usize, ring: usize, bulk: usize) -> Pair {
        let (client, server, config) = (context(), context(), rings(ring, bulk));
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..connections {
            let (near, far) =
                (client.create_connection(&config).unwrap(), server.create_connection(&config).unwrap());
            near.connect(&far.address(), &ConnectConfig::default()).unwrap();
            far.connect(&near.address(), &ConnectConfig::default()).unwrap();
            here.push(near);
            there.push(far);
        }
        Pair { client, server, here, there }
    }

    /// `rounds` times: makes `depth` calls, spread over the connections, and waits for their responses. The server takes the requests from
    /// its queue.
    fn exchange(&self, rounds: u32, depth: usize) {
        let mut buffer = [0; 64];
        self.exchange_with(rounds, depth, || {
            self.server.poll(|_, _| ());
            while let Some(request) = self.server.recv() {
                let len = request.data().copy_to(&mut buffer);
                assert!(request.reply(&buffer[..len]).is_ok());
            }
        });
    }

    fn exchange_with(&self, rounds: u32, depth: usize, mut serve: impl FnMut()) {
        for round in 0..rounds {
            for call in 0..depth {
                let connection = &self.here[call % self.here.len()];
                assert!(connection.call(&[7; 32], 32, round).is_ok());
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.client.poll(|attached, answer| {
                    assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == 32));
                });
                serve();
                self.server.flush();
            }
        }
    }
}

#[test]
fn calls_do_not_allocate() {
    for (connections, depth) in [(1, 1), (1, 64), (1, 300), (16, 256)] {
        let pair = Pair::new(connections, 1 << 18);
        pair.exchange(2_000, depth);
        let what = format_args!("{connections} connections, depth {depth}");
        allocations::assert_none(what, || pair.exchange(2_000, depth));
    }
}

/// Bulk requests with bulk responses, two at a time, and READs in between, with regions that are reused.
fn exchange_bulk(pair: &Pair, rounds: u32, buffer: &mut [u8], regions: &mut Vec<Mr>, board: RemoteMemory) {
    let connection = &pair.here[0];
    for round in 0..rounds {
        for _ in 0..2 {
            assert!(connection.call(&LONG_REQUEST, LONG_REQUEST.len(), round).is_ok());
        }
        while let Some(region) = regions.pop() {
            assert!(connection.read(region, 0..4096, board.at(0), 0).is_ok());
        }
        let mut answered = 0;
        while answered < 2 || regions.len() < 4 {
            answered += pair.client.poll(|attached, answer| {
                assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == LONG_REQUEST.len()));
            });
            while let Some(completion) = pair.client.take_raw_completion() {
                regions.push(completion.region);
            }
            pair.server.poll(|_, _| ());
            while let Some(request) = pair.server.recv() {
                let len = request.data().copy_to(buffer);
                assert!(request.reply(&buffer[..len]).is_ok());
            }
        }
    }
}

static LONG_REQUEST: [u8; 700_000] = [7; 700_000];

#[test]
fn bulk_calls_do_not_allocate() {
    let pair = Pair::with_bulk(1, 1 << 14, 4 << 20);
    let mut buffer = vec![0; LONG_REQUEST.len()];
    let board = pair.server.allocate(4096, Access::ALL).unwrap();
    let mut regions: Vec<Mr> =
        (0..4).map(|_| pair.client.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    exchange_bulk(&pair, 20, &mut buffer, &mut regions, board.remote());
    allocations::assert_none(format_args!("bulk"), || {
        exchange_bulk(&pair, 100, &mut buffer, &mut regions, board.remote());
    });
    assert_eq!(pair.client.counters().bulk_calls, 240);
}

#[test]
fn calls_make_no_system_call() {
    if child::is_child() {
        let pair = Pair::with_bulk(4, 1 << 16, 4 << 20);
        pair.exchange(2_000, 64);
        let mut buffer = vec![0; LONG_REQUEST.len()];
        let board = pair.server.allocate(4096, Access::ALL).unwrap();
        let mut regions: Vec<Mr> =
            (0..4).map(|_| pair.client.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
        exchange_bulk(&pair, 20, &mut buffer, &mut regions, board.remote());
        seccomp::without_system_calls(&[], || {
            [1, 8, 64, 200].into_iter().for_each(|depth| pair.exchange(5_000, depth));
            exchange_bulk(&pair, 50, &mut buffer, &mut regions, board.remote());
        });
    }
    seccomp::assert_no_system_calls(calls_make_no_system_call, &["calls"]);
}

/// Calls in flight of each connection. They are a batch: with the same number for all, its costs are those of the same number of calls.
const CALLS_EACH: usize = 16;
/// Most connections.
const MANY: usize = 512;
/// Calls in flight of that many.
const DEPTH: usize = MANY * CALLS_EACH;
const ROUNDS: usize = 3;

#[test]
fn call_cost_does_not_depend_on_the_number_of_connections() {
    if let Some(connections) = child::task() {
        let connections: usize = connections.parse().unwrap();
        let pair = Pair::new(connections, CALLS_EACH * 1024);
        let (rounds, depth) = (ROUNDS * MANY / connections, CALLS_EACH * connections);
        pair.exchange(1, depth);
        return callgrind::measure(&mut || pair.exchange(rounds as u32, depth));
    }
    let counts = [1, 8, 64, MANY].map(|connections| {
        let count = callgrind::count(
            call_cost_does_not_depend_on_the_number_of_connections,
            &connections.to_string(),
        );
        let each = count as f64 / (ROUNDS * DEPTH) as f64;
        println!(
            "{connections} connections, {CALLS_EACH} calls each: {each:.0} instructions per call, both sides"
        );
        each
    });
    let (least, most) = (counts.into_iter().fold(f64::MAX, f64::min), counts.into_iter().fold(0.0, f64::max));
    assert!(most <= 1.3 * least, "instructions per call: {counts:?}");
}

/// A typed client and a service that make the same exchange as a [`Pair`].
struct Typed<H> {
    driver: Driver,
    client: Client,
    server: Context<u32>,
    service: Service<(), u32, H>,
    #[expect(dead_code, reason = "keeps the connection open")]
    connection: Connection<u32>,
}

struct Echo;
impl Method for Echo {
    const ID: u32 = 1;
    type Request = [u8; 32];
    type Response = [u8; 32];
}

/// Larger than what fits into registers.
struct Large;
impl Method for Large {
    const ID: u32 = 2;
    type Request = [u8; 1000];
    type Response = [u8; 2000];
}

fn typed(ring: usize) -> Typed<impl Handlers<(), u32>> {
    let (driver, server, config) = (Driver::new(context()), context(), rings(ring, 0));
    let (client, connection) =
        (driver.create_client(&config).unwrap(), server.create_connection(&config).unwrap());
    client.connect(&connection.address(), &ConnectConfig::default()).unwrap();
    connection.connect(&client.address(), &ConnectConfig::default()).unwrap();
    let service = Service::new(()).on::<Large>(|(), large| [large[0]; 2000]).on::<Echo>(|(), bytes| bytes);
    Typed { driver, client, server, service, connection }
}

impl<H: Handlers<(), u32>> Typed<H> {
    fn exchange<M: Method>(
        &mut self,
        calls: &mut Vec<Call<M>>,
        rounds: u32,
        depth: usize,
        request: M::Request,
    ) where
        M::Request: Copy,
    {
        let mut task = TaskContext::from_waker(Waker::noop());
        for _ in 0..rounds {
            for _ in 0..depth {
                let mut call = self.client.call::<M>(request);
                assert!(Pin::new(&mut call).poll(&mut task).is_pending());
                calls.push(call);
            }
            let mut answered = 0;
            while answered < depth {
                if self.driver.step() {
                    while let Some(call) = calls.get_mut(answered)
                        && let Poll::Ready(answer) = Pin::new(call).poll(&mut task)
                    {
                        assert!(answer.is_ok());
                        answered += 1;
                    }
                }
                self.service.poll(&self.server, |_, _| ());
            }
            calls.clear();
        }
    }
}

#[test]
fn typed_calls_do_not_allocate() {
    // With the small ring most calls are queued.
    for (ring, depth) in [(1 << 18, 1), (1 << 18, 64), (1 << 18, 300), (4096, 300)] {
        let mut typed = typed(ring);
        let (mut echoes, mut larges) = (Vec::with_capacity(depth + 1), Vec::with_capacity(depth + 1));
        let mut exchange = |rounds| {
            typed.exchange::<Echo>(&mut echoes, rounds, depth, [7; 32]);
            if ring > 4096 {
                typed.exchange::<Large>(&mut larges, rounds / 10, depth.min(20), [7; 1000]);
            }
        };
        exchange(1_000);
        allocations::assert_none(format_args!("ring {ring}, depth {depth}"), || exchange(1_000));
    }
}

/// Calls in flight when instructions are counted, and the number of rounds.
const COUNTED_DEPTH: u32 = 64;
const COUNTED_ROUNDS: u32 = 300;

/// Makes the calls of a task: warms up, and measures.
fn measure_calls(task: &str) {
    let depth = if task.contains("one") { 1 } else { COUNTED_DEPTH as usize };
    if task.contains("typed") {
        let (mut typed, mut calls) = (typed(1 << 18), Vec::with_capacity(depth));
        let mut exchange = || typed.exchange::<Echo>(&mut calls, COUNTED_ROUNDS, depth, [7; 32]);
        exchange();
        return callgrind::measure(&mut exchange);
    }
    let (pair, mut buffer) = (Pair::new(1, 1 << 18), [0; 64]);
    let mut exchange = || {
        if task.contains("queue") {
            return pair.exchange(COUNTED_ROUNDS, depth);
        }
        pair.exchange_with(COUNTED_ROUNDS, depth, || {
            pair.server.serve(
                &mut buffer,
                |buffer, request| {
                    let len = request.data().copy_to(buffer);
                    assert!(request.reply(&buffer[..len]).is_ok());
                },
                |_, _, _| (),
            );
        });
    };
    exchange();
    callgrind::measure(&mut exchange);
}

#[test]
fn typed_call_costs_at_most_1_75_times_a_plain_call() {
    if let Some(task) = child::task() {
        return measure_calls(&task);
    }
    let [plain, typed] = ["calls through the queue", "typed calls"].map(|task| {
        let count = callgrind::count(typed_call_costs_at_most_1_75_times_a_plain_call, task);
        count / u64::from(COUNTED_ROUNDS * COUNTED_DEPTH)
    });
    println!("{plain} instructions per plain call, {typed} per typed one, both sides");
    assert!(4 * typed <= 7 * plain, "{typed} instructions per typed call, {plain} per plain one");
}

#[cfg(not(debug_assertions))]
#[test]
fn calls_stay_within_their_instruction_limits() {
    const CALLS: u32 = COUNTED_ROUNDS * COUNTED_DEPTH;
    if let Some(task) = child::task() {
        return measure_calls(&task);
    }
    callgrind::assert_limits(
        calls_stay_within_their_instruction_limits,
        &[
            ("one call at a time", COUNTED_ROUNDS, 3800),
            ("calls", CALLS, 865),
            ("calls through the queue", CALLS, 1190),
            ("typed calls", CALLS, 1250),
        ],
    );
}
