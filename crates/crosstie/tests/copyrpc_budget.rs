//! The budget of copyrpc's data path: no allocation and no system call per call, and a cost per call that does not depend on the
//! number of endpoints. The service layer allocates nothing either, and costs little more.
//!
//! Both sides run in one thread, which polls them in turn, so the counts are the same in every run. This test's allocator counts
//! allocations. A seccomp filter in a child process kills the child at its first system call. Callgrind (Debian package
//! `valgrind`) counts the instructions of a child process.

#[path = "allocations/mod.rs"]
mod allocations;
#[path = "instructions/callgrind.rs"]
mod callgrind;
#[path = "seccomp/mod.rs"]
mod seccomp;

use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::process::{Command, Output, Stdio};
use std::task::{Context as TaskContext, Poll, Waker};

use allocations::ALLOCATIONS;
use crosstie::copyrpc::service::{Call, Client, Driver, Handlers, Method, Service};
use crosstie::copyrpc::{Config, Context, Endpoint, EndpointConfig};
use crosstie::device::{Access, ConnectConfig, Device, Mr, RemoteMemory, software};

/// Environment variable that tells a child process of this test its task.
const CHILD: &str = "CROSSTIE_COPYRPC_BUDGET_CHILD";

/// Two contexts and the connections between them.
struct Pair {
    client: Context<u32>,
    server: Context<u32>,
    here: Vec<Endpoint<u32>>,
    #[expect(dead_code, reason = "keeps the connections open")]
    there: Vec<Endpoint<u32>>,
}

impl Pair {
    fn new(endpoints: usize, ring: usize) -> Pair {
        Pair::with_bulk(endpoints, ring, 0)
    }

    fn with_bulk(endpoints: usize, ring: usize, bulk: usize) -> Pair {
        // Valgrind limits the address space.
        let device = || Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
        let client = Context::new(device(), &Config::default()).unwrap();
        let server = Context::new(device(), &Config::default()).unwrap();
        let config = EndpointConfig {
            ring,
            credit: ring / 4,
            pending_calls: DEPTH,
            bulk,
            ..EndpointConfig::default()
        };
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for _ in 0..endpoints {
            let (near, far) =
                (client.create_endpoint(&config).unwrap(), server.create_endpoint(&config).unwrap());
            near.connect(&far.address(), &ConnectConfig::default()).unwrap();
            far.connect(&near.address(), &ConnectConfig::default()).unwrap();
            here.push(near);
            there.push(far);
        }
        Pair { client, server, here, there }
    }

    /// `rounds` times: makes `depth` calls, spread over the endpoints, and waits for their responses.
    fn exchange(&self, rounds: u32, depth: usize) {
        let mut buffer = [0; 64];
        for round in 0..rounds {
            for call in 0..depth {
                let endpoint = &self.here[call % self.here.len()];
                assert!(endpoint.call(&[7; 32], 32, round).is_ok());
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.client.poll(|attached, answer| {
                    assert!(attached == round && answer.is_ok_and(|bytes| bytes.len() == 32));
                });
                self.server.poll(|_, _| ());
                while let Some(request) = self.server.recv() {
                    let len = request.data().copy_to(&mut buffer);
                    assert!(request.reply(&buffer[..len]).is_ok());
                }
            }
        }
    }
}

#[test]
fn calls_do_not_allocate() {
    for (endpoints, depth) in [(1, 1), (1, 64), (1, 300), (16, 256)] {
        let pair = Pair::new(endpoints, 1 << 18);
        pair.exchange(2_000, depth);
        let before = ALLOCATIONS.get();
        pair.exchange(2_000, depth);
        let count = ALLOCATIONS.get() - before;
        assert_eq!(count, 0, "calls to the allocator, {endpoints} endpoints, depth {depth}");
    }
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(ALLOCATIONS.get() - before, 2, "the allocator counts");
}

/// Bulk requests with bulk responses, two at a time, and READs in between, with regions that are reused.
fn exchange_bulk(pair: &Pair, rounds: u32, buffer: &mut [u8], regions: &mut Vec<Mr>, board: RemoteMemory) {
    let endpoint = &pair.here[0];
    for round in 0..rounds {
        for _ in 0..2 {
            assert!(endpoint.call(&LONG_REQUEST, LONG_REQUEST.len(), round).is_ok());
        }
        while let Some(region) = regions.pop() {
            assert!(endpoint.read(region, 0..4096, board.at(0), 0).is_ok());
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
    let before = ALLOCATIONS.get();
    exchange_bulk(&pair, 100, &mut buffer, &mut regions, board.remote());
    assert_eq!(ALLOCATIONS.get() - before, 0, "calls to the allocator");
    assert_eq!(pair.client.counters().bulk_calls, 240);
}

#[test]
fn calls_make_no_system_call() {
    const NAME: &str = "calls_make_no_system_call";
    if let Ok(task) = std::env::var(CHILD) {
        let pair = Pair::with_bulk(4, 1 << 16, 4 << 20);
        pair.exchange(2_000, 64);
        let mut buffer = vec![0; LONG_REQUEST.len()];
        let board = pair.server.allocate(4096, Access::ALL).unwrap();
        let mut regions: Vec<Mr> =
            (0..4).map(|_| pair.client.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
        exchange_bulk(&pair, 20, &mut buffer, &mut regions, board.remote());
        seccomp::install_filter(&[libc::SYS_exit_group], seccomp::FilterMode::AllowOnly);
        if task == "guilty" {
            std::hint::black_box(std::process::id());
        }
        for depth in [1, 8, 64, 200] {
            pair.exchange(5_000, depth);
        }
        exchange_bulk(&pair, 50, &mut buffer, &mut regions, board.remote());
        // SAFETY: no memory is involved.
        unsafe { libc::_exit(0) }
    }
    let innocent = child(NAME, "calls");
    assert!(innocent.status.success(), "a call made a system call, or failed: {innocent:?}");
    let guilty = child(NAME, "guilty");
    assert_eq!(guilty.status.signal(), Some(libc::SIGSYS), "the filter kills: {guilty:?}");
}

/// Calls in flight of each endpoint. They are a batch: with the same number for all, its costs are those of the same number of calls.
const CALLS_EACH: usize = 16;
/// Most endpoints.
const MANY: usize = 512;
/// Calls in flight of that many.
const DEPTH: usize = MANY * CALLS_EACH;
const ROUNDS: usize = 3;

#[test]
fn call_cost_does_not_depend_on_the_number_of_endpoints() {
    const NAME: &str = "call_cost_does_not_depend_on_the_number_of_endpoints";
    if let Some(task) = callgrind::task() {
        let endpoints: usize = task.parse().unwrap();
        let pair = Pair::new(endpoints, CALLS_EACH * 1024);
        let (rounds, depth) = (ROUNDS * MANY / endpoints, CALLS_EACH * endpoints);
        pair.exchange(1, depth);
        callgrind::measure(&mut || pair.exchange(rounds as u32, depth));
        return;
    }
    let counts = [1, 8, 64, MANY].map(|endpoints| {
        let count = callgrind::count(NAME, &endpoints.to_string());
        let each = count as f64 / (ROUNDS * DEPTH) as f64;
        println!(
            "{endpoints} endpoints, {CALLS_EACH} calls each: {each:.0} instructions per call, both sides"
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
    endpoint: Endpoint<u32>,
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
    let device = || Device::open_software(&software::Config { space: 512 << 20 }).unwrap();
    let driver = Driver::new(Context::new(device(), &Config::default()).unwrap());
    let server = Context::new(device(), &Config::default()).unwrap();
    let config =
        EndpointConfig { ring, credit: ring / 4, pending_calls: DEPTH, bulk: 0, ..EndpointConfig::default() };
    let (client, endpoint) =
        (driver.create_client(&config).unwrap(), server.create_endpoint(&config).unwrap());
    client.connect(&endpoint.address(), &ConnectConfig::default()).unwrap();
    endpoint.connect(&client.address(), &ConnectConfig::default()).unwrap();
    let service = Service::new(()).on::<Large>(|(), large| [large[0]; 2000]).on::<Echo>(|(), bytes| bytes);
    Typed { driver, client, server, service, endpoint }
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
        let before = ALLOCATIONS.get();
        exchange(1_000);
        assert_eq!(ALLOCATIONS.get() - before, 0, "calls to the allocator, ring {ring}, depth {depth}");
    }
}

/// Calls in flight for the comparison of typed calls with plain ones, and the number of rounds.
const TYPED_DEPTH: usize = 64;
const TYPED_ROUNDS: u32 = 200;

#[test]
fn typed_call_costs_at_most_1_75_times_a_plain_call() {
    const NAME: &str = "typed_call_costs_at_most_1_75_times_a_plain_call";
    if let Some(task) = callgrind::task() {
        let (pair, mut typed) = (Pair::new(1, 1 << 18), typed(1 << 18));
        let mut calls = Vec::with_capacity(TYPED_DEPTH);
        match &*task {
            "plain" => {
                pair.exchange(20, TYPED_DEPTH);
                callgrind::measure(&mut || pair.exchange(TYPED_ROUNDS, TYPED_DEPTH));
            }
            _ => {
                typed.exchange::<Echo>(&mut calls, 20, TYPED_DEPTH, [7; 32]);
                callgrind::measure(&mut || {
                    typed.exchange::<Echo>(&mut calls, TYPED_ROUNDS, TYPED_DEPTH, [7; 32]);
                });
            }
        }
        return;
    }
    let each = |count: u64| count as f64 / f64::from(TYPED_ROUNDS) / TYPED_DEPTH as f64;
    let plain = each(callgrind::count(NAME, "plain"));
    let typed = each(callgrind::count(NAME, "typed"));
    println!(
        "depth {TYPED_DEPTH}: {plain:.0} instructions per plain call, {typed:.0} per typed one, both sides"
    );
    assert!(typed <= 1.75 * plain, "{typed:.0} instructions per typed call, {plain:.0} per plain one");
}

/// Starts one test of this program again, with a task.
fn child(test: &str, task: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(CHILD, task).stdin(Stdio::null()).output().unwrap()
}
