//! Typed services, and calls as futures.
//!
//! Most tests run in one thread, which polls both sides and an executor in turn. The seed of random tests is printed;
//! `CROSSTIE_SEED` sets it.

mod executors;
mod failed_calls;
mod invalid_bytes;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use crosstie::copyrpc::service::{
    Call, CallToken, Client, Deferred, Driver, Error, Handlers, Method, Refused, Service,
};
use crosstie::copyrpc::{
    CallFailed, Config, Connection, ConnectionAddress, ConnectionConfig, Context, Failure, NotCalled,
};
use crosstie::device::fault::Odds;
use crosstie::device::{ConnectConfig, DeviceSpec};
use crosstie_testkit::rng::{Random, seed};
use futures::executor::LocalPool;
use futures::future::join_all;
use futures::task::LocalSpawnExt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

const TIMEOUT: Duration = Duration::from_secs(20);

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
// The same number with other types, as another program may define it.
method!(WideDouble, 1, [u64; 2] => u64);
method!(DoubleWide, 1, u64 => [u64; 2]);

#[derive(Clone, Copy, Debug, PartialEq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
enum Choice {
    Take = 1,
    Leave = 2,
    Panic = 3,
}

/// Requests that wait for a reply, and all requests in order of arrival.
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

fn ring(bytes: usize, pending_calls: usize) -> ConnectionConfig {
    ConnectionConfig { ring: bytes, credit: bytes / 4, pending_calls, bulk: 0, ..ConnectionConfig::default() }
}

/// A driver with a client, and the context of a server that is connected to it.
struct Pair {
    driver: Driver,
    client: Client,
    server: Context<()>,
    connection: Option<Connection<()>>,
    /// Polls so far.
    turns: Cell<u32>,
}

impl Pair {
    fn new(config: &ConnectionConfig) -> Pair {
        Pair::with_limit(config, 1 << 20)
    }

    fn with_limit(config: &ConnectionConfig, calls: usize) -> Pair {
        // One executes requests while they are posted; the other one queues them, as a NIC does.
        let queued = DeviceSpec::Fault { seed: 0, odds: Odds::NEVER, inner: Box::default() };
        let server = Context::open(&queued, &Config::default()).unwrap();
        let driver = Driver::with_limit(open(), calls);
        let (client, connection) = connect(&driver, &server, config);
        Pair { driver, client, server, connection: Some(connection), turns: Cell::new(0) }
    }

    /// Polls both sides once.
    fn turn<S, H: Handlers<S, ()>>(&self, service: &mut Service<S, (), H>) {
        self.driver.step();
        // In place, or deferred before.
        if self.turns.replace(self.turns.get() + 1) % 2 == 1 {
            self.server.poll(|(), _| ());
        }
        service.poll(&self.server, |(), _| ());
    }

    /// Polls both sides until a future has finished.
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
            assert!(begin.elapsed() < TIMEOUT, "for ever: {:?}", self.driver.context_counters());
        }
    }
}

fn connect(driver: &Driver, server: &Context<()>, config: &ConnectionConfig) -> (Client, Connection<()>) {
    let (client, connection) =
        (driver.create_client(config).unwrap(), server.create_connection(config).unwrap());
    connect_both(&client, &connection);
    (client, connection)
}

/// The death of a peer is detected within milliseconds.
fn connect_both<U>(client: &Client, connection: &Connection<U>) {
    let hasty = ConnectConfig { timeout: 8, retry_count: 1, ..ConnectConfig::default() };
    client.connect(&connection.address(), &hasty).unwrap();
    connection.connect(&client.address(), &hasty).unwrap();
}

fn peek<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut TaskContext::from_waker(Waker::noop()))
}

#[test]
fn concurrent_calls_get_their_own_responses() {
    let pair = Pair::new(&ConnectionConfig::default());
    let mut service = service();
    let calls = join_all((0..3000).map(|number| pair.client.call::<Double>(number)));
    let answers = pair.finish(&mut service, calls);
    assert_eq!(answers, (0..3000).map(|number| Ok(2 * number)).collect::<Vec<_>>());
    let bulk = pair.finish(&mut service, pair.client.call::<Bulk>([7; 1000]));
    assert_eq!(bulk, Ok([7; 2000]));
    assert_eq!(service.counters().answered, 3001);
}

#[test]
fn queued_calls_are_sent_in_order() {
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
fn small_call_does_not_overtake_a_queued_large_one() {
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
fn calls_that_can_never_fit_are_refused_at_once() {
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
fn deferred_replies_may_be_sent_in_any_order() {
    let pair = Pair::new(&ring(4096, 16));
    let mut service = service();
    let mut calls: Vec<_> = (0..10).map(|number| pair.client.call::<Later>(number)).collect();
    while service.state().deferred.len() < 10 {
        pair.turn(&mut service);
    }
    // Deferred requests do not occupy the ring: many times its size passes while they wait.
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
fn refusals_unknown_methods_and_panics_are_typed_errors() {
    let pair = Pair::new(&ConnectionConfig::default());
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
fn second_handler_for_a_method_panics() {
    drop(service::<()>().on::<WideDouble>(|_, _| 0));
}

#[test]
fn futures_may_be_dropped_at_any_time() {
    let pair = Pair::with_limit(&ring(1024, 64), 64);
    let mut service = service();
    let mut random = Random(seed());
    for _ in 0..200 {
        // More calls than fit into the ring: some are made, some are queued.
        let mut calls: Vec<_> = (0..40).map(|number| (number, pair.client.call::<Double>(number))).collect();
        calls.retain(|_| random.below(3) > 0);
        pair.turn(&mut service);
        calls.retain(|_| random.below(2) > 0);
        for (number, call) in calls.into_iter().rev() {
            if random.below(2) > 0 {
                assert_eq!(pair.finish(&mut service, call), Ok(2 * number));
            }
        }
        // Calls whose future was dropped are still answered, and their slots are reused.
        assert_eq!(pair.finish(&mut service, async { pair.client.call::<Double>(5).await }), Ok(10));
    }
    assert!(pair.driver.counters().dropped > 0, "{:?}", pair.driver.counters());

    // Even with a peer that never answers, queued calls whose future was dropped do not pile up.
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
fn number_of_open_calls_is_limited() {
    let pair = Pair::with_limit(&ConnectionConfig::default(), 3);
    let mut service = service();
    let calls: Vec<_> = (0..3).map(|number| pair.client.call::<Double>(number)).collect();
    assert_eq!(peek(&mut pair.client.call::<Double>(4)), Poll::Ready(Err(Error::TooManyCalls(3))));
    let answers = pair.finish(&mut service, join_all(calls));
    assert_eq!(answers, [Ok(0), Ok(2), Ok(4)]);
    assert_eq!(pair.finish(&mut service, pair.client.call::<Double>(4)), Ok(8));
}

/// A call that cannot be made has ended. It counts until its future has taken the error.
#[test]
fn calls_that_cannot_be_made_keep_their_error_for_the_future() {
    let pair = Pair::with_limit(&ConnectionConfig::default(), 2);
    let mut service = service();
    let unconnected = pair.driver.create_client(&ring(1024, 64)).unwrap();
    let not_connected = Poll::Ready(Err(Error::NotCalled(NotCalled::NotConnected)));
    let (mut first, second) = (unconnected.call::<Double>(1), unconnected.call::<Double>(2));
    assert_eq!(peek(&mut pair.client.call::<Double>(3)), Poll::Ready(Err(Error::TooManyCalls(2))));
    assert_eq!(peek(&mut first), not_connected);
    assert_eq!(pair.finish(&mut service, pair.client.call::<Double>(4)), Ok(8));
    drop(second);
    let mut last = unconnected.call::<Double>(5);
    assert_eq!(pair.finish(&mut service, pair.client.call::<Double>(6)), Ok(12));
    drop(pair.driver);
    assert_eq!(peek(&mut last), not_connected);
}
