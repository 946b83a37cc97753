//! Tests of flux: one thread that drives several nodes against an oracle, counted drops, and nodes on threads.

mod oracle;
mod threads;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::seccomp;

fn spinning(queue_depth: usize) -> Config {
    Config { queue_depth, wait_strategy: WaitStrategy::Spin, ..Config::default() }
}

fn pair<Req: Send, Resp: Send, Token>(config: &Config) -> [Node<Req, Resp, Token>; 2] {
    network(2, config).unwrap().try_into().unwrap()
}

/// Polls so often that responses out of order are found, too.
fn poll_all<Req, Resp, Token>(node: &mut Node<Req, Resp, Token>, mut each: impl FnMut(Token, Resp)) {
    for _ in 0..200 {
        node.poll(&mut each);
    }
}

/// A message that counts how many of its kind are alive.
#[derive(Debug)]
struct Counted {
    number: u64,
    alive: Arc<AtomicUsize>,
}

impl Counted {
    fn new(number: u64, alive: &Arc<AtomicUsize>) -> Counted {
        alive.fetch_add(1, SeqCst);
        Counted { number, alive: alive.clone() }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let before = self.alive.fetch_sub(1, SeqCst);
        assert!(before > 0, "dropped twice: {}", self.number);
    }
}

#[test]
fn configurations_outside_of_limits_are_rejected() {
    let make = |nodes, config: Config| network::<[u8; 32], (), ()>(nodes, &config).map(|nodes| nodes.len());
    let config = Config::default();
    assert!(matches!(make(0, config.clone()), Err(CreateError::Limit { what: "nodes", value: 0, .. })));
    assert!(matches!(make(MAX_NODES + 1, config.clone()), Err(CreateError::Limit { what: "nodes", .. })));
    assert!(matches!(make(2, spinning(0)), Err(CreateError::Limit { what: "queue_depth", value: 0, .. })));
    assert!(matches!(
        make(2, spinning(MAX_QUEUE_DEPTH + 1)),
        Err(CreateError::Limit { what: "queue_depth", .. })
    ));
    assert!(matches!(
        make(2, Config { max_in_flight: 0, ..config.clone() }),
        Err(CreateError::Limit { what: "max_in_flight", value: 0, .. })
    ));
    assert!(matches!(make(MAX_NODES, config.clone()), Err(CreateError::TooLarge { .. })));
    assert_eq!(make(2, spinning(MAX_QUEUE_DEPTH)).unwrap(), 2);
    assert_eq!(make(MAX_NODES / 8, spinning(1)).unwrap(), MAX_NODES / 8);
    for error in [make(0, config.clone()), make(2, spinning(0)), make(MAX_NODES, config)] {
        assert!(!error.unwrap_err().to_string().is_empty());
    }
}

#[test]
fn back_pressure_hands_request_and_token_back() {
    let [mut caller, mut callee] = pair::<String, usize, u32>(&Config {
        queue_depth: 2,
        max_in_flight: 3,
        wait_strategy: WaitStrategy::Spin,
    });
    let text = String::from;
    caller.call(1, text("a"), 1).unwrap();
    caller.call(1, text("b"), 2).unwrap();
    match caller.call(1, text("c"), 3) {
        Err(CallError { cause: NotCalled::Full { target: 1 }, request, token: 3 }) => {
            assert_eq!(request, "c")
        }
        other => panic!("{other:?}"),
    }
    caller.call(0, text("to myself"), 3).unwrap();
    match caller.call(0, text("d"), 4) {
        Err(CallError { cause: cause @ NotCalled::TooManyInFlight, .. }) => assert!(cause.is_back_pressure()),
        other => panic!("{other:?}"),
    }
    match caller.call(2, text("e"), 4) {
        Err(CallError { cause: NotCalled::NoSuchNode { target: 2, nodes: 2 }, request, token: 4 }) => {
            assert_eq!(request, "e");
        }
        other => panic!("{other:?}"),
    }
    let request = caller.recv().unwrap();
    assert_eq!((request.client(), &**request.message()), (0, "to myself"));
    request.reply_with(|text| text.len()).unwrap();
    let mut polled = Vec::new();
    assert_eq!(caller.poll(|token, len| polled.push((token, len))), 1);
    assert_eq!(polled, [(3, 9)]);
    assert_eq!(callee.serve(|request| request.reply_with(|text| text.len()).unwrap()), 2);
    // Calls count until their responses are polled.
    assert!(matches!(caller.call(1, text("f"), 5), Err(CallError { cause: NotCalled::Full { .. }, .. })));
    // One poll ends at most half of a few calls.
    assert_eq!(caller.poll(|_, _| {}), 1);
    caller.call(1, text("f"), 5).unwrap();
    assert_eq!(caller.poll(|_, _| {}), 1);
    assert_eq!(caller.poll(|_, _| {}), 0);
}

#[test]
fn ticket_of_another_node_is_refused_and_stays_valid() {
    let [mut a, mut b] = pair::<u8, u8, ()>(&spinning(2));
    let [mut other_a, mut other_b] = pair::<u8, u8, ()>(&spinning(2));
    a.call(1, 7, ()).unwrap();
    other_a.call(1, 8, ()).unwrap();
    let (_, ticket) = b.recv().unwrap().defer();
    let (_, other_ticket) = other_b.recv().unwrap().defer();
    let refuse = |node: &mut Node<u8, u8, ()>, ticket| match node.reply(ticket, 9) {
        Err(ReplyError { cause: NotReplied::WrongNode, response: 9, ticket: Some(ticket) }) => ticket,
        other => panic!("{other:?}"),
    };
    let ticket = refuse(&mut a, ticket);
    let ticket = refuse(&mut other_b, ticket);
    let other_ticket = refuse(&mut b, other_ticket);
    b.reply(ticket, 70).unwrap();
    other_b.reply(other_ticket, 80).unwrap();
    let mut polled = Vec::new();
    a.poll(|(), response| polled.push(response));
    other_a.poll(|(), response| polled.push(response));
    assert_eq!(polled, [70, 80]);
}

#[test]
fn large_and_empty_messages_arrive() {
    #[repr(align(256))]
    struct Wide([u64; 100]);
    let [mut a, mut b] = pair::<Wide, (), ()>(&spinning(3));
    a.call(1, Wide([5; 100]), ()).unwrap();
    let (request, ticket) = b.recv().unwrap().defer();
    assert_eq!((&raw const request).addr() % 256, 0);
    assert_eq!(request.0, [5; 100]);
    b.reply(ticket, ()).unwrap();
    assert_eq!(a.poll(|(), ()| {}), 1);
}

#[test]
fn busy_caller_does_not_starve_others() {
    let mut net = network::<u32, (), ()>(3, &spinning(500)).unwrap();
    for i in 0..400 {
        net[0].call(2, i, ()).unwrap();
    }
    net[1].call(2, 1000, ()).unwrap();
    let position =
        core::iter::from_fn(|| Some(net[2].recv()?.client())).position(|client| client == 1).unwrap();
    assert!(position < 100, "{position}");
}

/// One `serve` ends after a while, however much there is, and the next one goes on where it stopped.
#[test]
fn serve_hands_out_each_request_once_and_a_limited_number() {
    let [mut caller, mut callee] = pair::<u32, u32, u32>(&spinning(1000));
    for number in 0..600 {
        caller.call(1, number, number).unwrap();
    }
    let (mut expected, mut deferred, mut counts) = (0, Vec::new(), Vec::new());
    while expected < 600 {
        counts.push(callee.serve(|request| {
            assert_eq!(*request.message(), expected);
            expected += 1;
            match expected % 3 {
                0 => deferred.push(request.defer()),
                _ => request.reply_with(|number| number + 1).unwrap(),
            }
        }));
    }
    assert_eq!(counts, [256, 256, 88]);
    assert_eq!(callee.serve(|_| unreachable!()), 0);
    for (number, ticket) in deferred {
        callee.reply(ticket, number + 1).unwrap();
    }
    let mut polled = 0;
    poll_all(&mut caller, |token, response| {
        assert_eq!(response, token + 1);
        polled += 1;
    });
    assert_eq!(polled, 600);
}

/// A request that is dropped has no response until its callee has gone; then the call is lost.
#[test]
fn dropped_request_is_lost_with_its_callee() {
    let alive = Arc::new(AtomicUsize::new(0));
    let [mut caller, mut callee] = pair::<Counted, Counted, u8>(&spinning(2));
    for token in 0..2 {
        caller.call(1, Counted::new(token.into(), &alive), token).unwrap();
    }
    assert_eq!(callee.serve(|_| {}), 2);
    assert_eq!(alive.load(SeqCst), 0);
    assert_eq!((caller.poll(|_, _| {}), caller.take_lost(|_| {})), (0, 0));
    drop(callee);
    let mut lost = Vec::new();
    caller.take_lost(|call| lost.push((call.token, call.request.is_some())));
    assert_eq!(lost, [(0, false), (1, false)]);
}

/// Where the system refuses what parking needs, a network that spins can be created, and its nodes can be awaited with others.
#[test]
fn node_of_a_spinning_network_is_awaited_where_membarrier_is_refused() {
    // The filter stays on its thread, so the test gets one of its own.
    let awaited = std::thread::spawn(|| {
        seccomp::install_filter(&[libc::SYS_membarrier], seccomp::FilterMode::Deny);
        let parking = Config { wait_strategy: WaitStrategy::Park, ..Config::default() };
        assert!(matches!(network::<u64, u64, ()>(2, &parking), Err(CreateError::Parking(_))));
        let [mut caller, callee] = pair::<u64, u64, ()>(&spinning(4));
        crate::park_any([&callee as &dyn crate::Waitable].into_iter(), Duration::from_millis(5));
        caller.call(1, 7, ()).unwrap();
        crate::wait_any([&callee as &dyn crate::Waitable].into_iter(), WaitStrategy::Park, None)
    });
    assert!(awaited.join().unwrap());
}
