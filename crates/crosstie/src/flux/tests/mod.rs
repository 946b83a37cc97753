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

fn spinning(capacity: usize) -> Config {
    Config { capacity, wait_strategy: WaitStrategy::Spin, ..Config::default() }
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
    assert!(matches!(make(0, config.clone()), Err(ConfigError::Nodes(0))));
    assert!(matches!(make(MAX_NODES + 1, config.clone()), Err(ConfigError::Nodes(_))));
    assert!(matches!(make(2, spinning(0)), Err(ConfigError::Capacity(0))));
    assert!(matches!(make(2, spinning(MAX_CAPACITY + 1)), Err(ConfigError::Capacity(_))));
    assert!(matches!(make(2, Config { max_in_flight: 0, ..config.clone() }), Err(ConfigError::MaxInFlight)));
    assert!(matches!(make(MAX_NODES, config.clone()), Err(ConfigError::TooLarge { .. })));
    assert_eq!(make(2, spinning(MAX_CAPACITY)).unwrap(), 2);
    assert_eq!(make(MAX_NODES / 8, spinning(1)).unwrap(), MAX_NODES / 8);
    for error in [make(0, config.clone()), make(2, spinning(0)), make(MAX_NODES, config)] {
        assert!(!error.unwrap_err().to_string().is_empty());
    }
}

#[test]
fn back_pressure_hands_request_and_token_back() {
    let [mut caller, mut callee] = pair::<String, usize, u32>(&Config {
        capacity: 2,
        max_in_flight: 3,
        wait_strategy: WaitStrategy::Spin,
    });
    let text = String::from;
    caller.call(1, text("a"), 1).unwrap();
    caller.call(1, text("b"), 2).unwrap();
    match caller.call(1, text("c"), 3) {
        Err(CallError::Full { target: 1, request, token: 3 }) => assert_eq!(request, "c"),
        other => panic!("{other:?}"),
    }
    caller.call(0, text("to myself"), 3).unwrap();
    match caller.call(0, text("d"), 4) {
        Err(error @ CallError::TooManyInFlight { target: 0, .. }) => assert!(error.is_back_pressure()),
        other => panic!("{other:?}"),
    }
    match caller.call(2, text("e"), 4) {
        Err(CallError::NoSuchNode { target: 2, nodes: 2, request, token: 4 }) => assert_eq!(request, "e"),
        other => panic!("{other:?}"),
    }
    let (from, request, ticket) = caller.try_recv().unwrap();
    assert_eq!((from, &*request), (0, "to myself"));
    caller.reply(ticket, request.len()).unwrap();
    let mut polled = Vec::new();
    assert_eq!(caller.poll(|token, len| polled.push((token, len))), 1);
    assert_eq!(polled, [(3, 9)]);
    while let Some((_, request, ticket)) = callee.try_recv() {
        callee.reply(ticket, request.len()).unwrap();
    }
    // Calls count until their responses are polled.
    assert!(matches!(caller.call(1, text("f"), 5), Err(CallError::Full { .. })));
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
    let (_, _, ticket) = b.try_recv().unwrap();
    let (_, _, other_ticket) = other_b.try_recv().unwrap();
    let refuse = |node: &mut Node<u8, u8, ()>, ticket| match node.reply(ticket, 9) {
        Err(ReplyError::WrongNode { ticket, response: 9 }) => ticket,
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
    let (_, request, ticket) = b.try_recv().unwrap();
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
    let position = core::iter::from_fn(|| net[2].try_recv()).position(|(from, ..)| from == 1).unwrap();
    assert!(position < 100, "{position}");
}

/// Where the system refuses what parking needs, a network that spins can be created, and its nodes can be awaited with others.
#[test]
fn node_of_a_spinning_network_is_awaited_where_membarrier_is_refused() {
    // The filter stays on its thread, so the test gets one of its own.
    let awaited = std::thread::spawn(|| {
        seccomp::install_filter(&[libc::SYS_membarrier], seccomp::FilterMode::Deny);
        let parking = Config { wait_strategy: WaitStrategy::Park, ..Config::default() };
        assert!(matches!(network::<u64, u64, ()>(2, &parking), Err(ConfigError::Parking(_))));
        let [mut caller, callee] = pair::<u64, u64, ()>(&spinning(4));
        crate::park_any([&callee as &dyn crate::Waitable].into_iter(), Duration::from_millis(5));
        caller.call(1, 7, ()).unwrap();
        crate::wait_any([&callee as &dyn crate::Waitable].into_iter(), WaitStrategy::Park, None)
    });
    assert!(awaited.join().unwrap());
}
