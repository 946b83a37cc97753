//! Typed services and calls that are futures.
//!
//! Most of it runs in one thread, which turns both sides and an executor in turn. The seed of what is random is printed;
//! `CROSSTIE_SEED` sets it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use crosstie::copyrpc::service::{
    Call, Client, Deferred, Driver, Error, Handlers, Method, Refused, Service, Ticket,
};
use crosstie::copyrpc::{
    CallFailed, Config, Context, Endpoint, EndpointAddress, EndpointConfig, Failure, NotCalled,
};
use crosstie::device::{ConnectConfig, DeviceSpec};
use futures::executor::LocalPool;
use futures::future::join_all;
use futures::task::LocalSpawnExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

const PATIENCE: Duration = Duration::from_secs(20);

macro_rules! method {
    ($name:ident, $id:literal, $request:ty => $response:ty) => {
        struct $name;
        impl Method for $name {
            const ID: u32 = $id;
            type Request = $request;
            type Response = $response;
        }
    };
}

method!(Double, 1, u64 => u64);
method!(Later, 2, u64 => u64);
method!(Choose, 3, Choice => u8);
method!(Bulk, 4, [u8; 1000] => [u8; 2000]);
method!(Missing, 77, u64 => u64);
// As another program may have it.
method!(WideDouble, 1, [u64; 2] => u64);
method!(DoubleWide, 1, u64 => [u64; 2]);

#[derive(Clone, Copy, Debug, PartialEq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
enum Choice {
    Take = 1,
    Leave = 2,
    Panic = 3,
}

/// Requests that wait for an answer, and all that came in the order in which they came.
#[derive(Default)]
struct Seen<U> {
    deferred: Vec<(u64, Deferred<Later, U>)>,
    order: Vec<u64>,
}

fn service<U>() -> Service<Seen<U>, U, impl Handlers<Seen<U>, U>> {
    Service::new(Seen { deferred: vec![], order: vec![] })
        .on::<Double>(|seen: &mut Seen<U>, number| {
            seen.order.push(number);
            number.wrapping_mul(2)
        })
        .defer::<Later>(|seen, number, reply| seen.deferred.push((number, reply)))
        .try_on::<Choose>(|_, choice| match choice {
            Choice::Take => Ok(1),
            Choice::Leave => Err(Refused(42)),
            Choice::Panic => panic!("on request"),
        })
        .on::<Bulk>(|seen, bytes| {
            seen.order.push(u64::from(bytes[0]));
            std::array::from_fn(|index| bytes[index / 2])
        })
}

fn open<U>() -> Context<U> {
    Context::open(&DeviceSpec::Software, &Config::default()).unwrap()
}

fn ring(bytes: usize, pending_calls: usize) -> EndpointConfig {
    EndpointConfig { ring: bytes, credit: bytes / 4, pending_calls, bulk: 0 }
}

/// A driver with a client, and the context of a server that is connected to it.
struct Pair {
    driver: Driver,
    client: Client,
    server: Context<()>,
    endpoint: Option<Endpoint<()>>,
}

impl Pair {
    fn new(config: &EndpointConfig) -> Pair {
        Pair::with_limit(config, 1 << 20)
    }

    fn with_limit(config: &EndpointConfig, calls: usize) -> Pair {
        let (driver, server) = (Driver::with_limit(open(), calls), open());
        let (client, endpoint) = connect(&driver, &server, config);
        Pair { driver, client, server, endpoint: Some(endpoint) }
    }

    /// Both sides once.
    fn turn<S, H: Handlers<S, ()>>(&self, service: &mut Service<S, (), H>) {
        self.driver.step();
        self.server.poll(|(), _| ());
        service.serve(&self.server);
    }

    /// Both sides until a future has ended.
    fn finish<S, H: Handlers<S, ()>, F: Future>(
        &self,
        service: &mut Service<S, (), H>,
        future: F,
    ) -> F::Output {
        self.finish_with(future, || self.turn(service))
    }

    fn finish_with<F: Future>(&self, future: F, mut turn: impl FnMut()) -> F::Output {
        let mut future = Box::pin(future);
        let begin = Instant::now();
        loop {
            if let Poll::Ready(output) = peek(&mut future) {
                return output;
            }
            turn();
            assert!(begin.elapsed() < PATIENCE, "for ever: {:?}", self.driver.context_counters());
        }
    }
}

fn connect(driver: &Driver, server: &Context<()>, config: &EndpointConfig) -> (Client, Endpoint<()>) {
    let (client, endpoint) = (driver.create_client(config).unwrap(), server.create_endpoint(config).unwrap());
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    client.connect(&endpoint.address(), &hasty).unwrap();
    endpoint.connect(&client.address(), &hasty).unwrap();
    (client, endpoint)
}

fn peek<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut TaskContext::from_waker(Waker::noop()))
}

#[test]
fn many_calls_at_once_each_get_their_own_answer() {
    let pair = Pair::new(&EndpointConfig::default());
    let mut service = service();
    let calls = join_all((0..3000).map(|number| pair.client.call::<Double>(number)));
    let answers = pair.finish(&mut service, calls);
    assert_eq!(answers, (0..3000).map(|number| Ok(2 * number)).collect::<Vec<_>>());
    let bulk = pair.finish(&mut service, pair.client.call::<Bulk>([7; 1000]));
    assert_eq!(bulk, Ok([7; 2000]));
    assert_eq!(service.counters().answered, 3001);
}

#[test]
fn calls_wait_for_room_first_come_first_served() {
    for (bytes, pending) in [(512, 64), (1024, 2), (4096, 64)] {
        let pair = Pair::new(&ring(bytes, pending));
        let mut service = service();
        let answers = pair.finish(&mut service, join_all((0..500).map(|n| pair.client.call::<Double>(n))));
        assert!(answers.iter().zip(0..).all(|(answer, n)| *answer == Ok(2 * n)), "ring {bytes}");
        assert_eq!(service.state().order, (0..500).collect::<Vec<_>>(), "ring {bytes}");
        assert!(pair.driver.counters().waited > 400, "{:?}", pair.driver.counters());
    }
}

#[test]
fn a_small_call_does_not_overtake_a_large_one_that_waits() {
    let pair = Pair::new(&ring(1 << 14, 64));
    let mut service = service();
    let calls: Vec<_> = (0..50)
        .map(|number| {
            (
                pair.client.call::<Bulk>([2 * number; 1000]),
                pair.client.call::<Double>(2 * u64::from(number) + 1),
            )
        })
        .collect();
    for (large, small) in calls {
        assert!(pair.finish(&mut service, large).is_ok());
        assert!(pair.finish(&mut service, small).is_ok());
    }
    assert!(pair.driver.counters().waited > 0);
    assert_eq!(service.state().order, (0..100).collect::<Vec<_>>());
}

#[test]
fn what_never_fits_is_refused_at_once() {
    let pair = Pair::new(&ring(1024, 64));
    let refused = peek(&mut pair.client.call::<Bulk>([0; 1000]));
    assert!(
        matches!(refused, Poll::Ready(Err(Error::NotCalled(cause))) if !cause.is_back_pressure()),
        "{refused:?}"
    );
    let unconnected = pair.driver.create_client(&ring(1024, 64)).unwrap();
    let refused = peek(&mut unconnected.call::<Double>(1));
    assert_eq!(refused, Poll::Ready(Err(Error::NotCalled(NotCalled::NotConnected))));
}

#[test]
fn deferred_answers_go_out_in_any_order() {
    let pair = Pair::new(&ring(4096, 16));
    let mut service = service();
    let mut calls: Vec<_> = (0..10).map(|number| pair.client.call::<Later>(number)).collect();
    while service.state().deferred.len() < 10 {
        pair.turn(&mut service);
    }
    // Deferred requests do not hold the ring: as much again passes by them as it has room for, many times.
    for number in 0..500 {
        assert_eq!(pair.finish(&mut service, pair.client.call::<Double>(number)), Ok(2 * number));
    }
    assert!(calls.iter_mut().all(|call| peek(call).is_pending()));
    while let Some((number, reply)) = service.state_mut().deferred.pop() {
        match number {
            3 => drop(reply),
            4 => reply.refuse(Refused(9)).unwrap(),
            number => reply.send(100 + number).unwrap(),
        }
        let answer = pair.finish(&mut service, calls.pop().unwrap());
        let expected = match number {
            3 => Err(Error::Unanswered),
            4 => Err(Error::Refused(Refused(9))),
            number => Ok(100 + number),
        };
        assert_eq!(answer, expected);
    }
    assert_eq!(service.counters().deferred, 10);
}

#[test]
fn refusals_unknown_methods_and_panics_come_back_typed() {
    let pair = Pair::new(&EndpointConfig::default());
    let mut service = service();
    assert_eq!(pair.finish(&mut service, pair.client.call::<Choose>(Choice::Take)), Ok(1));
    let refused = pair.finish(&mut service, pair.client.call::<Choose>(Choice::Leave));
    assert_eq!(refused, Err(Error::Refused(Refused(42))));
    assert_eq!(pair.finish(&mut service, pair.client.call::<Missing>(1)), Err(Error::UnknownMethod(77)));
    assert_eq!(
        pair.finish(&mut service, pair.client.call::<WideDouble>([1; 2])),
        Err(Error::MalformedRequest)
    );
    assert_eq!(pair.finish(&mut service, pair.client.call::<DoubleWide>(1)), Err(Error::MalformedRequest));

    let mut call = pair.client.call::<Choose>(Choice::Panic);
    let panicked = catch_unwind(AssertUnwindSafe(|| pair.finish(&mut service, &mut call)));
    assert!(panicked.is_err());
    assert_eq!(pair.finish(&mut service, call), Err(Error::Unanswered));
    let counters = service.counters();
    assert_eq!((counters.answered, counters.refused, counters.unknown, counters.malformed), (1, 1, 1, 2));
}

#[test]
#[should_panic(expected = "two handlers for method 1")]
fn a_method_has_one_handler() {
    drop(service::<()>().on::<WideDouble>(|_, _| 0));
}

#[test]
fn requests_of_any_bytes_are_answered_with_an_error() {
    let mut random = Random(seed());
    let (client, server) = (open::<usize>(), open::<()>());
    let config = EndpointConfig::default();
    let (here, there) = (client.create_endpoint(&config).unwrap(), server.create_endpoint(&config).unwrap());
    here.connect(&there.address(), &ConnectConfig::default()).unwrap();
    there.connect(&here.address(), &ConnectConfig::default()).unwrap();
    let mut service = service();
    let mut statuses = BTreeMap::<Vec<u8>, u64>::new();
    for round in 0..20_000 {
        let mut bytes: Vec<u8> = (0..random.below(40)).map(|_| random.next() as u8).collect();
        // Mostly something that exists.
        if bytes.len() >= 8 && random.below(4) > 0 {
            bytes[..4].copy_from_slice(&(random.below(5) as u32).to_le_bytes());
            bytes[4..8].copy_from_slice(&[[0, 1, 8][random.below(3) as usize], 0, 0, 0]);
            // The choice to panic is legal, and not what this is about.
            if bytes.len() == 9 && bytes[8] == 3 {
                continue;
            }
        }
        here.call(&bytes, random.below(64) as usize, round).unwrap();
        let mut answer = None;
        while answer.is_none() {
            client.poll(|_, response| answer = Some(response.unwrap().to_vec()));
            server.poll(|(), _| ());
            service.serve(&server);
            for (_, reply) in service.state_mut().deferred.drain(..) {
                reply.send(0).unwrap();
            }
        }
        let answer = answer.unwrap();
        *statuses.entry(answer.into_iter().take(4).collect()).or_default() += 1;
    }
    let counters = service.counters();
    println!("{counters:?} {statuses:?}");
    assert!(counters.answered > 0 && counters.unknown > 0 && counters.malformed > 0);
    let of = |status: u8| statuses.get(&vec![status, 0, 0, 0]).copied().unwrap_or(0);
    // Nothing, for who allows nothing: 8 bytes do not fit.
    let silent = statuses.get(&vec![]).copied().unwrap_or(0);
    let total =
        counters.answered + counters.refused + counters.deferred + counters.unknown + counters.malformed;
    assert_eq!(statuses.values().sum::<u64>(), total);
    assert_eq!(of(0), counters.answered + counters.deferred);
    assert_eq!(of(1) + of(2) + of(3) + silent, counters.unknown + counters.malformed + counters.refused);
}

#[test]
fn answers_of_any_bytes_end_their_call_only() {
    let mut random = Random(seed());
    let pair = Pair::new(&EndpointConfig::default());
    for round in 0..5_000 {
        let len = [0, 3, 8, 9, 16][random.below(5) as usize];
        let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        if len >= 8 && random.below(2) == 0 {
            bytes[..4].copy_from_slice(&(random.below(6) as u32).to_le_bytes());
        }
        let answer = pair.finish_with(pair.client.call::<Double>(round), || {
            pair.driver.step();
            pair.server.poll(|(), _| ());
            while let Some(request) = pair.server.recv() {
                assert!(request.reply(&bytes).is_ok());
            }
        });
        let is_answer = bytes.len() == 16 && bytes[..4] == [0; 4];
        assert_eq!(answer.is_ok(), is_answer, "{bytes:?}: {answer:?}");
    }
    assert!(pair.driver.counters().malformed > 0);
    assert_eq!(pair.finish(&mut service(), pair.client.call::<Double>(4)), Ok(8));
}

#[test]
fn futures_may_be_dropped_at_any_time() {
    let pair = Pair::with_limit(&ring(1024, 64), 64);
    let mut service = service();
    let mut random = Random(seed());
    for _ in 0..200 {
        // More than the ring takes: some are made, some wait for room.
        let mut calls: Vec<_> = (0..40).map(|number| (number, pair.client.call::<Double>(number))).collect();
        calls.retain(|_| random.below(3) > 0);
        pair.turn(&mut service);
        calls.retain(|_| random.below(2) > 0);
        for (number, call) in calls.into_iter().rev() {
            if random.below(2) > 0 {
                assert_eq!(pair.finish(&mut service, call), Ok(2 * number));
            }
        }
        // What was dropped is still answered, and its slots come back.
        assert_eq!(pair.finish(&mut service, async { pair.client.call::<Double>(5).await }), Ok(10));
    }
    assert!(pair.driver.counters().dropped > 0, "{:?}", pair.driver.counters());

    // Not even with a peer that never answers do those pile up that were dropped while they waited for room.
    let stuck = Pair::with_limit(&ring(1024, 4), 64);
    let _made: Vec<_> = (0..4).map(|number| stuck.client.call::<Double>(number)).collect();
    let _first_to_wait = stuck.client.call::<Double>(4);
    for number in 5..10_000 {
        let call = stuck.client.call::<Double>(number);
        stuck.driver.step();
        drop(call);
    }
    assert!(peek(&mut stuck.client.call::<Double>(0)).is_pending());
}

#[test]
fn there_is_a_limit_on_open_calls() {
    let pair = Pair::with_limit(&EndpointConfig::default(), 3);
    let mut service = service();
    let calls: Vec<_> = (0..3).map(|number| pair.client.call::<Double>(number)).collect();
    assert_eq!(peek(&mut pair.client.call::<Double>(4)), Poll::Ready(Err(Error::TooManyCalls(3))));
    let answers = pair.finish(&mut service, join_all(calls));
    assert_eq!(answers, [Ok(0), Ok(2), Ok(4)]);
    assert_eq!(pair.finish(&mut service, pair.client.call::<Double>(4)), Ok(8));
}

#[test]
fn calls_end_in_time_whether_made_or_waiting() {
    let pair = Pair::new(&ring(1024, 4));
    let soon = Duration::from_millis(30);
    let patient: Vec<_> = (0..2).map(|number| pair.client.call::<Double>(number)).collect();
    let hasty: Vec<_> = (2..10).map(|number| pair.client.call_within::<Double>(number, soon)).collect();
    let behind: Vec<_> = (10..12).map(|number| pair.client.call::<Double>(number)).collect();
    assert!(pair.driver.counters().waited >= 6);
    // The server does nothing.
    let ended = pair.driver.run_until(join_all(hasty));
    assert!(ended.iter().all(|end| *end == Err(Error::Failed(CallFailed::TimedOut))), "{ended:?}");
    // Also behind one that waits for ever.
    let _front: Vec<_> = (0..8).map(|number| pair.client.call::<Double>(number)).collect();
    let late = pair.driver.run_until(pair.client.call_within::<Double>(9, soon));
    assert_eq!(late, Err(Error::Failed(CallFailed::TimedOut)));
    // Now it does; what was too late is answered to nobody, and what was behind gets on.
    let answers = pair.finish(&mut service(), join_all(patient.into_iter().chain(behind)));
    assert_eq!(answers, [Ok(0), Ok(2), Ok(20), Ok(22)]);
}

#[test]
fn a_peer_that_goes_ends_its_calls_and_no_others() {
    let mut pair = Pair::new(&ring(1024, 64));
    let mut service = service();
    let (other, _endpoint) = connect(&pair.driver, &pair.server, &ring(1024, 64));
    let calls: Vec<_> = (0..100).map(|number| pair.client.call::<Later>(number)).collect();
    let survivor = other.call::<Later>(1);
    while service.state().deferred.is_empty() {
        pair.turn(&mut service);
    }
    drop(pair.endpoint.take());
    let ended = pair.finish(&mut service, join_all(calls));
    let failure = pair.client.failure().expect("it is over");
    assert!(ended.iter().all(|end| *end == Err(Error::Failed(failure.into()))), "{ended:?}");
    assert_eq!(peek(&mut pair.client.call::<Double>(1)), Poll::Ready(Err(Error::Failed(failure.into()))));

    let mut delivered = 0;
    while delivered == 0 {
        pair.turn(&mut service);
        for (number, reply) in service.state_mut().deferred.drain(..) {
            // Those of the connection that is over say so.
            delivered += usize::from(reply.send(number).is_ok());
        }
    }
    assert_eq!(pair.finish(&mut service, survivor), Ok(1));
}

#[test]
fn closing_here_ends_calls_made_and_waiting() {
    let closed = Err(Error::Failed(Failure::Closed.into()));
    let pair = Pair::new(&ring(1024, 4));
    let calls: Vec<_> = (0..10).map(|number| pair.client.call::<Double>(number)).collect();
    let clone = pair.client.clone();
    clone.close();
    assert_eq!(pair.driver.run_until(join_all(calls)), vec![closed; 10]);
    assert_eq!(pair.client.failure(), Some(Failure::Closed));

    // Without a driver nothing would ever come.
    let Pair { driver, client, server: _server, endpoint: _endpoint } = Pair::new(&ring(1024, 4));
    let calls: Vec<_> = (0..10).map(|number| client.call::<Double>(number)).collect();
    drop(driver);
    for mut call in calls {
        assert_eq!(peek(&mut call), Poll::Ready(closed));
    }
    assert_eq!(peek(&mut client.call::<Double>(1)), Poll::Ready(closed));
}

/// Runs `client` with a driver whose peer serves in another thread.
fn with_server(client: impl FnOnce(Driver, Client)) {
    let stop = Arc::new(AtomicBool::new(false));
    let (to_server, at_server) = mpsc::channel::<EndpointAddress>();
    let (to_client, at_client) = mpsc::channel::<EndpointAddress>();
    let server = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let context = open::<()>();
            let endpoint = context.create_endpoint(&EndpointConfig::default()).unwrap();
            to_client.send(endpoint.address()).unwrap();
            endpoint.connect(&at_server.recv().unwrap(), &ConnectConfig::default()).unwrap();
            let mut service = service();
            // Relaxed: nothing else is passed on with it.
            while !stop.load(Ordering::Relaxed) {
                context.poll(|(), _| ());
                if service.serve(&context) == 0 {
                    context.wait(Duration::from_millis(1));
                }
            }
        }
    });
    let driver = Driver::new(open());
    let caller = driver.create_client(&EndpointConfig::default()).unwrap();
    to_server.send(caller.address()).unwrap();
    caller.connect(&at_client.recv().unwrap(), &ConnectConfig::default()).unwrap();
    client(driver, caller);
    stop.store(true, Ordering::Relaxed);
    server.join().unwrap();
}

/// Some calls after each other, some at once.
async fn calls(client: Client) {
    for number in 0..100 {
        assert_eq!(client.call::<Double>(number).await, Ok(2 * number));
    }
    let answers = join_all((0..2000).map(|number| client.call::<Double>(number))).await;
    assert!(answers.iter().zip(0..).all(|(answer, number)| *answer == Ok(2 * number)));
}

#[test]
fn the_driver_runs_a_future_itself() {
    with_server(|driver, client| {
        driver.run_until(calls(client.clone()));
        // Woken by another thread, while it sleeps on the device.
        let (sender, receiver) = futures::channel::oneshot::channel();
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            sender.send(21).unwrap();
        });
        let answer = driver.run_until(async { client.call::<Double>(receiver.await.unwrap()).await });
        assert_eq!(answer, Ok(42));
        other.join().unwrap();
    });
}

#[test]
fn tokio_runs_it() {
    for stall in [Duration::ZERO, Duration::from_micros(200)] {
        with_server(|driver, client| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let local = tokio::task::LocalSet::new();
            local.spawn_local(async move { driver.run(stall).await });
            runtime.block_on(local.run_until(async move {
                let tasks: Vec<_> = (0..4).map(|_| tokio::task::spawn_local(calls(client.clone()))).collect();
                for task in tasks {
                    task.await.unwrap();
                }
            }));
        });
    }
}

#[test]
fn a_pool_of_futures_runs_it_and_rests_with_it() {
    with_server(|driver, client| {
        let mut pool = LocalPool::new();
        let driver = Rc::new(driver);
        let polling = driver.clone();
        pool.spawner().spawn_local(async move { polling.run(Duration::ZERO).await }).unwrap();
        for _ in 0..10 {
            pool.run_until(calls(client.clone()));
            // It ends only when no task wants to run: an idle driver does not.
            pool.run_until_stalled();
        }
        assert_eq!(driver.counters().calls, 10 * 2100);
    });
}

const VICTIM: &str = "CROSSTIE_SERVICE_VICTIM";

/// A process that takes requests, and answers only some, until it is killed.
fn victim(theirs: &str) -> ! {
    let context = open::<()>();
    let endpoint = context.create_endpoint(&ring(4096, 64)).unwrap();
    endpoint.connect(&from_hex(theirs), &ConnectConfig::default()).unwrap();
    // The test harness writes to the same place.
    println!("\naddress {}", to_hex(&endpoint.address()));
    std::io::stdout().flush().unwrap();
    let mut service = service();
    loop {
        context.poll(|(), _| ());
        service.serve(&context);
    }
}

fn to_hex(address: &EndpointAddress) -> String {
    address.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(hex: &str) -> EndpointAddress {
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
    EndpointAddress::read_from_bytes(&bytes).unwrap()
}

#[test]
fn a_killed_process_ends_the_calls_to_it_also_while_the_driver_sleeps() {
    if let Ok(theirs) = std::env::var(VICTIM) {
        victim(&theirs);
    }
    let driver = Driver::new(open());
    let client = driver.create_client(&ring(4096, 64)).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "a_killed_process_ends_the_calls_to_it_also_while_the_driver_sleeps",
            "--exact",
            "--nocapture",
        ])
        .env(VICTIM, to_hex(&client.address()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.find_map(|line| Some(line.strip_prefix("address ")?.to_owned())).expect("an address");
    client.connect(&from_hex(&address), &ConnectConfig::default()).unwrap();
    assert_eq!(driver.run_until(client.call::<Double>(4)), Ok(8));
    // More than the ring takes, and none of them is ever answered.
    let calls = join_all((0..200).map(|number| client.call::<Later>(number)));
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        child.kill().unwrap();
        child.wait().unwrap();
    });
    let ended = driver.run_until(calls);
    killer.join().unwrap();
    let failure = client.failure().expect("it is over");
    assert!(matches!(failure, Failure::Broken(_)), "{failure}");
    assert_eq!(ended, vec![Err(Error::Failed(failure.into())); 200]);
}

/// Both sides on one context: each calls the other.
#[test]
fn one_context_calls_and_serves() {
    let driver = Driver::new(open());
    let config = ring(1024, 8);
    let (here, there) = (driver.create_client(&config).unwrap(), driver.create_client(&config).unwrap());
    here.connect(&there.address(), &ConnectConfig::default()).unwrap();
    there.connect(&here.address(), &ConnectConfig::default()).unwrap();
    let mut service = service::<Ticket>();
    let both = futures::future::join(calls(here), calls(there));
    driver.run_serving(both, &mut service);
    assert_eq!(service.counters().answered, 4200);
}

/// Random calls, drops, answers, refusals and silences, against a list of what should become of each call.
#[test]
fn random_lives_of_calls_follow_the_oracle() {
    let mut random = Random(seed());
    for round in 0..60 {
        let bytes = 512 << random.below(5);
        let pair = Pair::new(&ring(bytes, 1 + random.below(64) as usize));
        let mut service = service();
        let mut open: BTreeMap<u64, Call<Later>> = BTreeMap::new();
        let oracle: Rc<RefCell<BTreeMap<u64, Result<u64, Error>>>> = Rc::default();
        let (mut next, mut ended, mut last_seen) = (0, 0, None);
        let begin = Instant::now();
        while ended < 300 {
            match random.below(10) {
                0..4 => {
                    open.insert(next, pair.client.call::<Later>(next));
                    next += 1;
                }
                4 if random.below(4) == 0 && !open.is_empty() => {
                    let key = *open.keys().nth(random.below(open.len() as u64) as usize).unwrap();
                    drop(open.remove(&key));
                }
                4..8 => {
                    let known = service.state().deferred.len();
                    pair.turn(&mut service);
                    for (number, _) in &service.state().deferred[known..] {
                        assert!(last_seen < Some(*number), "{number} after {last_seen:?}, round {round}");
                        last_seen = Some(*number);
                    }
                }
                _ => {
                    let deferred = &mut service.state_mut().deferred;
                    if deferred.is_empty() {
                        continue;
                    }
                    let (number, reply) = deferred.remove(random.below(deferred.len() as u64) as usize);
                    let fate = match random.below(4) {
                        0 => Err(Error::Refused(Refused(number as u32))),
                        1 => Err(Error::Unanswered),
                        _ => Ok(number ^ 0xABCD),
                    };
                    match fate {
                        Ok(answer) => reply.send(answer).unwrap(),
                        Err(Error::Refused(refused)) => reply.refuse(refused).unwrap(),
                        _ => drop(reply),
                    }
                    assert!(oracle.borrow_mut().insert(number, fate).is_none(), "{number} came twice");
                }
            }
            open.retain(|number, call| match peek(call) {
                Poll::Pending => true,
                Poll::Ready(answer) => {
                    assert_eq!(Some(&answer), oracle.borrow().get(number), "call {number}, round {round}");
                    ended += 1;
                    false
                }
            });
            assert!(begin.elapsed() < PATIENCE, "no progress in round {round}");
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let given = std::env::var("CROSSTIE_SEED").ok().and_then(|s| s.parse().ok());
    let seed = given.unwrap_or(now.map_or(1, |d| d.as_nanos() as u64));
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    seed
}
