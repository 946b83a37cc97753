//! One thread drives several nodes against an oracle; drops are counted; then threads.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

fn spinning(capacity: usize) -> Config {
    Config { capacity, waiting: Waiting::Spin, ..Config::default() }
}

fn pair<Req: Send, Resp: Send, Token>(config: &Config) -> [Node<Req, Resp, Token>; 2] {
    network(2, config).unwrap().try_into().unwrap()
}

/// Polls until nothing has come for long enough that answers out of order were looked for too.
fn poll_all<Req, Resp, Token>(node: &mut Node<Req, Resp, Token>, mut each: impl FnMut(Token, Resp)) {
    for _ in 0..200 {
        node.poll(&mut each);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Call { from: Index, to: Index },
    Poll { node: Index },
    Receive { node: Index },
    Reply { node: Index, which: Index },
    Leave { node: Index },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    prop_oneof![
        40 => (index(), index()).prop_map(|(from, to)| Step::Call { from, to }),
        30 => index().prop_map(|node| Step::Poll { node }),
        30 => index().prop_map(|node| Step::Receive { node }),
        25 => (index(), index()).prop_map(|(node, which)| Step::Reply { node, which }),
        1 => index().prop_map(|node| Step::Leave { node }),
    ]
}

/// A message that knows its number and counts its end.
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

type Subject = Node<Counted, Counted, u64>;

/// What must be true, kept in the plainest way.
#[derive(Default)]
struct Oracle {
    /// Sent and not received, by caller and callee.
    sent: HashMap<(usize, usize), VecDeque<u64>>,
    /// Answered and not polled: the caller of each.
    answered: HashMap<u64, usize>,
    /// Under way, of each caller and callee.
    under_way: HashMap<(usize, usize), usize>,
}

proptest! {
    /// Any interleaving of call, poll, receive and reply, out of order and at any depth, with nodes that leave: no
    /// response is lost, doubled or handed to somebody else, and nothing is dropped twice or never.
    #[test]
    fn every_call_ends_once_and_nothing_leaks(
        nodes in 1usize..5,
        capacity in 1usize..6,
        max_in_flight in 1usize..12,
        steps in prop::collection::vec(step(), 0..400),
    ) {
        let config = Config { capacity, max_in_flight, waiting: Waiting::Spin };
        let alive = Arc::new(AtomicUsize::new(0));
        let mut net: Vec<Option<Subject>> = network(nodes, &config).unwrap().into_iter().map(Some).collect();
        let mut held: Vec<Vec<(u64, usize, Ticket)>> = (0..nodes).map(|_| Vec::new()).collect();
        let mut oracle = Oracle::default();
        // Call `number` is from caller to callee.
        let mut calls: Vec<(usize, usize)> = Vec::new();
        let mut ended: Vec<bool> = Vec::new();
        for step in steps {
            match step {
                Step::Call { from, to } => {
                    let (from, to) = (from.index(nodes), to.index(nodes + 1));
                    let to_gone = to < nodes && net[to].is_none();
                    let Some(node) = &mut net[from] else { continue };
                    let number = calls.len() as u64;
                    let pair = *oracle.under_way.get(&(from, to)).unwrap_or(&0);
                    let all: usize =
                        oracle.under_way.iter().filter(|((caller, _), _)| *caller == from).map(|(_, n)| n).sum();
                    prop_assert_eq!(node.in_flight(), all);
                    match node.call(to, Counted::new(number, &alive), number) {
                        Ok(()) => {
                            prop_assert!(to < nodes && !to_gone && pair < capacity && all < max_in_flight);
                            *oracle.under_way.entry((from, to)).or_default() += 1;
                            oracle.sent.entry((from, to)).or_default().push_back(number);
                            calls.push((from, to));
                            ended.push(false);
                        }
                        Err(error) => {
                            match error {
                                CallError::NoSuchNode { .. } => prop_assert_eq!(to, nodes),
                                CallError::TooManyInFlight { .. } => prop_assert_eq!(all, max_in_flight),
                                CallError::Gone { .. } => prop_assert!(to_gone),
                                CallError::Full { .. } => prop_assert!(pair == capacity && !to_gone),
                            }
                            let (request, token) = error.into_parts();
                            prop_assert_eq!((request.number, token), (number, number));
                        }
                    }
                }
                Step::Poll { node: index } => {
                    let index = index.index(nodes);
                    let Some(node) = &mut net[index] else { continue };
                    let mut seen = Vec::new();
                    let count = node.poll(|token, response| seen.push((token, response.number)));
                    prop_assert_eq!(count, seen.len());
                    for (token, number) in seen {
                        prop_assert_eq!(number, token + 1_000_000);
                        prop_assert_eq!(oracle.answered.remove(&token), Some(index));
                        prop_assert!(!core::mem::replace(&mut ended[token as usize], true));
                        *oracle.under_way.get_mut(&calls[token as usize]).unwrap() -= 1;
                    }
                }
                Step::Receive { node: index } => {
                    let index = index.index(nodes);
                    let Some(node) = &mut net[index] else { continue };
                    match node.try_recv() {
                        Some((from, request, ticket)) => {
                            let first = oracle.sent.get_mut(&(from, index)).and_then(VecDeque::pop_front);
                            prop_assert_eq!(first, Some(request.number));
                            prop_assert_eq!(ticket.from(), from);
                            held[index].push((request.number, from, ticket));
                        }
                        None => {
                            let waiting = oracle.sent.iter().any(|((_, to), queue)| *to == index && !queue.is_empty());
                            prop_assert!(!waiting);
                        }
                    }
                }
                Step::Reply { node: index, which } => {
                    let index = index.index(nodes);
                    if held[index].is_empty() {
                        continue;
                    }
                    let at = which.index(held[index].len());
                    let (number, from, ticket) = held[index].swap_remove(at);
                    let caller_gone = net[from].is_none();
                    let Some(node) = &mut net[index] else { continue };
                    match node.reply(ticket, Counted::new(number + 1_000_000, &alive)) {
                        Ok(()) => {
                            prop_assert!(!caller_gone);
                            prop_assert_eq!(oracle.answered.insert(number, from), None);
                        }
                        Err(ReplyError::Gone { target, response }) => {
                            prop_assert!(caller_gone);
                            prop_assert_eq!((target, response.number), (from, number + 1_000_000));
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Step::Leave { node: index } => {
                    let index = index.index(nodes);
                    if net[index].take().is_none() {
                        continue;
                    }
                    // Its own calls are nobody's any more.
                    oracle.under_way.retain(|(from, _), _| *from != index);
                    oracle.answered.retain(|_, from| *from != index);
                    held[index].clear();
                    for (other, node) in net.iter_mut().enumerate() {
                        let Some(node) = node else { continue };
                        prop_assert!(node.is_gone(index));
                        let mut lost = Vec::new();
                        let count = node.take_lost(|call| lost.push(call));
                        prop_assert_eq!(count, lost.len());
                        let mut queue = oracle.sent.remove(&(other, index)).unwrap_or_default();
                        lost.sort_by_key(|call| call.token);
                        for call in lost {
                            let number = call.token;
                            prop_assert_eq!(calls[number as usize], (other, index));
                            prop_assert!(!oracle.answered.contains_key(&number));
                            prop_assert!(!core::mem::replace(&mut ended[number as usize], true));
                            let unreceived = queue.front() == Some(&number);
                            prop_assert_eq!(call.request.map(|request| request.number), unreceived.then_some(number));
                            if unreceived {
                                queue.pop_front();
                            }
                            *oracle.under_way.get_mut(&(other, index)).unwrap() -= 1;
                        }
                        prop_assert!(queue.is_empty());
                        prop_assert_eq!(node.take_lost(|_| {}), 0);
                        // What is left was answered.
                        let left = oracle.under_way.get(&(other, index)).copied().unwrap_or(0);
                        let answered = oracle.answered.keys().filter(|n| calls[**n as usize] == (other, index));
                        prop_assert_eq!(left, answered.count());
                    }
                }
            }
        }
        // Everybody answers all there is and polls all there is; then every call of who is still there has ended.
        for (index, node) in net.iter_mut().enumerate() {
            let Some(node) = node else { continue };
            let mut owed: Vec<_> = held[index].drain(..).map(|(number, _, ticket)| (number, ticket)).collect();
            while let Some((_, request, ticket)) = node.try_recv() {
                owed.push((request.number, ticket));
            }
            for (number, ticket) in owed {
                match node.reply(ticket, Counted::new(number + 1_000_000, &alive)) {
                    Ok(()) | Err(ReplyError::Gone { .. }) => {}
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
        }
        for node in net.iter_mut().flatten() {
            let mut wrong = 0;
            poll_all(node, |token, response| {
                wrong += usize::from(response.number != token + 1_000_000);
                wrong += usize::from(core::mem::replace(&mut ended[token as usize], true));
            });
            prop_assert_eq!(wrong, 0);
            prop_assert_eq!(node.in_flight(), 0);
        }
        for (number, (from, _)) in calls.iter().enumerate() {
            prop_assert!(ended[number] || net[*from].is_none(), "call {} never ended", number);
        }
        drop(net);
        prop_assert_eq!(alive.load(SeqCst), 0);
    }
}

#[test]
fn what_nobody_took_is_dropped_once() {
    // Everything that a call can be when nodes go, in both orders of going.
    for caller_first in [true, false] {
        let alive = Arc::new(AtomicUsize::new(0));
        let [mut caller, mut callee] = pair::<Counted, Counted, Counted>(&spinning(8));
        for i in 0..6 {
            caller.call(1, Counted::new(i, &alive), Counted::new(100 + i, &alive)).unwrap();
        }
        // 0 polled; 1 answered and not polled; 2 received, its ticket dropped; 3 received, its ticket outlives the node;
        // 4 and 5 never received.
        let mut received = (0..4).map(|_| callee.try_recv().unwrap()).collect::<VecDeque<_>>();
        for _ in 0..2 {
            let (_, request, ticket) = received.pop_front().unwrap();
            callee.reply(ticket, Counted::new(200 + request.number, &alive)).unwrap();
        }
        let mut polled = false;
        // A panic in the callback leaves the rest where it is.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            caller.poll(|token, response| {
                assert_eq!((token.number, response.number), (100, 200));
                polled = true;
                panic!("on purpose");
            })
        }));
        assert!(panicked.is_err() && polled);
        drop(received.pop_front());
        assert_eq!(alive.load(SeqCst), 5 + 1 + 1 + 2, "tokens, response 1, request 3, requests 4 and 5");
        if caller_first {
            drop(caller);
            assert_eq!(alive.load(SeqCst), 1 + 2);
            // What was called before is still delivered.
            let (from, request, ticket) = callee.try_recv().unwrap();
            assert_eq!((from, request.number), (0, 4));
            match callee.reply(ticket, Counted::new(0, &alive)) {
                Err(ReplyError::Gone { target: 0, response }) => assert_eq!(response.number, 0),
                other => panic!("{other:?}"),
            }
            drop(request);
            drop(callee);
        } else {
            drop(callee);
            let mut lost: Vec<_> = Vec::new();
            assert_eq!(caller.take_lost(|call| lost.push(call)), 4);
            let mut lost: Vec<_> =
                lost.into_iter().map(|call| (call.token.number, call.request.map(|r| r.number))).collect();
            lost.sort();
            assert_eq!(lost, [(102, None), (103, None), (104, Some(4)), (105, Some(5))]);
            assert_eq!((caller.in_flight(), alive.load(SeqCst)), (1, 1 + 1 + 1));
            drop(caller);
        }
        assert_eq!(alive.load(SeqCst), 1, "request 3 is still here");
        drop(received);
        assert_eq!(alive.load(SeqCst), 0);
    }
}

/// Something whose end panics, once.
struct Grenade(Counted, bool);

impl Drop for Grenade {
    fn drop(&mut self) {
        assert!(!self.1, "on purpose");
    }
}

#[test]
fn a_drop_that_panics_drops_nothing_twice() {
    for at in 0..3 {
        let alive = Arc::new(AtomicUsize::new(0));
        let [mut caller, mut callee] = pair::<Grenade, Grenade, u64>(&spinning(4));
        for round in 0..2 {
            for i in 0..4 {
                caller.call(1, Grenade(Counted::new(i, &alive), round == 1 && i == at), i).unwrap();
            }
            if round == 0 {
                while let Some((_, request, ticket)) = callee.try_recv() {
                    let response = Grenade(Counted::new(request.0.number, &alive), request.0.number == at);
                    callee.reply(ticket, response).ok().unwrap();
                }
                poll_all(&mut caller, |_, mut response| response.1 = false);
            }
        }
        for _ in 0..2 {
            let (_, mut request, ticket) = callee.try_recv().unwrap();
            request.1 = false;
            let response = Grenade(Counted::new(request.0.number, &alive), at < 2);
            callee.reply(ticket, response).ok().unwrap();
        }
        // Two responses and two requests are in slots.
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(caller)));
        let second = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(callee)));
        assert!(first.is_err() || second.is_err());
        // `Counted` itself notices a second drop. Leaks are what a panic in a drop may cost.
    }
}

#[test]
fn limits_are_checked() {
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
fn back_pressure_hands_everything_back() {
    let [mut caller, mut callee] =
        pair::<String, usize, u32>(&Config { capacity: 2, max_in_flight: 3, waiting: Waiting::Spin });
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
    // Answered is not yet room: what was not polled counts.
    assert!(matches!(caller.call(1, text("f"), 5), Err(CallError::Full { .. })));
    // Half of two at a time.
    assert_eq!(caller.poll(|_, _| {}), 1);
    caller.call(1, text("f"), 5).unwrap();
    assert_eq!(caller.poll(|_, _| {}), 1);
    assert_eq!(caller.poll(|_, _| {}), 0);
}

#[test]
fn tickets_of_others_are_refused_and_stay_good() {
    let [mut a, mut b] = pair::<u8, u8, ()>(&spinning(2));
    let [mut other_a, mut other_b] = pair::<u8, u8, ()>(&spinning(2));
    a.call(1, 7, ()).unwrap();
    other_a.call(1, 8, ()).unwrap();
    let (_, _, ticket) = b.try_recv().unwrap();
    let (_, _, other_ticket) = other_b.try_recv().unwrap();
    let refuse = |node: &mut Node<u8, u8, ()>, ticket| match node.reply(ticket, 9) {
        Err(ReplyError::NotMine { ticket, response: 9 }) => ticket,
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
fn large_and_empty_messages_fit() {
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
fn a_busy_caller_does_not_keep_others_waiting() {
    let mut net = network::<u32, (), ()>(3, &spinning(500)).unwrap();
    for i in 0..400 {
        net[0].call(2, i, ()).unwrap();
    }
    net[1].call(2, 1000, ()).unwrap();
    let position = core::iter::from_fn(|| net[2].try_recv()).position(|(from, ..)| from == 1).unwrap();
    assert!(position < 100, "{position}");
}

/// Spins a little, then lets others run: more threads than cores must get on.
fn idle(round: &mut u32) {
    *round += 1;
    if round.is_multiple_of(64) { std::thread::yield_now() } else { core::hint::spin_loop() }
}

/// All call all, themselves too; replies come out of order; every response is its call's.
fn everybody_calls_everybody(nodes: usize, calls: u64, config: &Config, waits: bool) {
    let net = network::<Box<u64>, Box<u64>, u64>(nodes, config).unwrap();
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for mut node in net {
            let finished = &finished;
            scope.spawn(move || {
                let (mut made, mut ended, mut round, mut told) = (0, 0, 0, false);
                let mut seed = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(node.id() as u64 + 1);
                let mut owed: Vec<(u64, Ticket)> = Vec::new();
                let mut sum = 0u64;
                let begun = Instant::now();
                while finished.load(SeqCst) < nodes {
                    assert!(begun.elapsed() < Duration::from_secs(60), "{node:?} hangs");
                    let mut progress = false;
                    while made < calls {
                        let target = (made as usize + node.id()) % nodes;
                        match node.call(target, Box::new(made), made) {
                            Ok(()) => (made, progress) = (made + 1, true),
                            Err(error) if error.is_back_pressure() => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    while let Some((_, request, ticket)) = node.try_recv() {
                        owed.push((*request * 3, ticket));
                        progress = true;
                        if owed.len() > 20 {
                            break;
                        }
                    }
                    while !owed.is_empty() {
                        seed ^= seed << 13;
                        seed ^= seed >> 7;
                        seed ^= seed << 17;
                        let (response, ticket) = owed.swap_remove(seed as usize % owed.len());
                        node.reply(ticket, Box::new(response)).unwrap();
                    }
                    let polled = node.poll(|token, response| {
                        assert_eq!(*response, token * 3);
                        sum += token;
                    });
                    ended += polled as u64;
                    if ended == calls && !told {
                        told = true;
                        assert_eq!(sum, calls * (calls - 1) / 2);
                        finished.fetch_add(1, SeqCst);
                    }
                    if !progress && polled == 0 {
                        if waits {
                            node.wait(Some(Duration::from_millis(5)));
                        } else {
                            idle(&mut round);
                        }
                    }
                    if told {
                        node.take_lost(|lost| panic!("{lost:?}"));
                    }
                }
            });
        }
    });
}

#[test]
fn threads_call_each_other() {
    for (nodes, capacity) in [(2, 1), (2, 32), (3, 4)] {
        everybody_calls_everybody(nodes, 100_000, &spinning(capacity), false);
    }
}

#[test]
fn threads_call_each_other_and_sleep() {
    for waiting in [Waiting::Adaptive, Waiting::Park] {
        let config = Config { capacity: 8, max_in_flight: 12, waiting };
        everybody_calls_everybody(3, 10_000, &config, true);
    }
}

#[test]
fn who_sleeps_is_woken_by_call_reply_and_departure() {
    for waiting in [Waiting::Adaptive, Waiting::Park, Waiting::Spin] {
        let [mut a, mut b] = pair::<u32, u32, ()>(&Config { waiting, ..Config::default() });
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..20 {
                    assert!(b.wait(None));
                    let (_, request, ticket) = b.try_recv().unwrap();
                    assert_eq!(request, i);
                    std::thread::sleep(Duration::from_millis(1));
                    b.reply(ticket, request + 1).unwrap();
                }
                std::thread::sleep(Duration::from_millis(5));
            });
            for i in 0..20 {
                std::thread::sleep(Duration::from_millis(1));
                a.call(1, i, ()).unwrap();
                assert!(a.wait(None));
                assert_eq!(a.poll(|(), response| assert_eq!(response, i + 1)), 1);
            }
            assert!(a.wait(None));
            assert!(a.is_gone(1));
            assert_eq!(a.take_lost(|_| {}), 0);
            assert!(!a.wait(Some(Duration::from_millis(1))));
        });
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn wait_sees_an_answer_out_of_turn() {
    let [mut a, mut b] = pair::<u8, u8, u8>(&Config::default());
    for i in 0..3 {
        a.call(1, i, i).unwrap();
    }
    let mut held: Vec<_> = core::iter::from_fn(|| b.try_recv()).collect();
    assert!(!a.wait(Some(Duration::from_millis(1))));
    let (_, request, ticket) = held.pop().unwrap();
    b.reply(ticket, request).unwrap();
    assert!(a.wait(None));
    let mut polled = 0;
    poll_all(&mut a, |token, response| {
        assert_eq!((token, response), (2, 2));
        polled += 1;
    });
    assert_eq!(polled, 1);
}

/// A node's thread panics at some moment while others call it; every call of theirs ends.
#[test]
fn a_panicking_thread_takes_nobody_with_it() {
    for round in 0..100u64 {
        let alive = Arc::new(AtomicUsize::new(0));
        let net = network::<Counted, Counted, u64>(3, &Config { capacity: 5, ..Config::default() }).unwrap();
        let [mut victim, a, b] = <[_; 3]>::try_from(net).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let victim = scope.spawn({
                let alive = &alive;
                move || {
                    let mut owed = Vec::new();
                    for i in 0.. {
                        if victim.in_flight() < 2 {
                            victim.call(1 + i as usize % 2, Counted::new(i, alive), i).unwrap();
                        }
                        victim.poll(|_, _| {});
                        while let Some((_, request, ticket)) = victim.try_recv() {
                            owed.push((request, ticket));
                        }
                        if i % 3 == 0
                            && let Some((request, ticket)) = owed.pop()
                        {
                            victim.reply(ticket, Counted::new(request.number, alive)).unwrap();
                        }
                        if i > 20 + 7 * round {
                            // Quietly: no message on the terminal.
                            std::panic::resume_unwind(Box::new("on purpose"));
                        }
                    }
                }
            });
            for mut node in [a, b] {
                let (alive, over) = (&alive, &over);
                scope.spawn(move || {
                    let begun = Instant::now();
                    let (mut made, mut ended, mut gone) = (0u64, 0u64, false);
                    while !gone || ended < made {
                        assert!(begun.elapsed() < Duration::from_secs(30));
                        while !gone {
                            match node.call(0, Counted::new(made, alive), made) {
                                Ok(()) => made += 1,
                                Err(CallError::Gone { target: 0, .. }) => gone = true,
                                Err(error) if error.is_back_pressure() => break,
                                Err(error) => panic!("{error}"),
                            }
                        }
                        while let Some((_, request, ticket)) = node.try_recv() {
                            match node.reply(ticket, request) {
                                Ok(()) | Err(ReplyError::Gone { .. }) => {}
                                Err(error) => panic!("{error}"),
                            }
                        }
                        ended += node.poll(|token, response| assert_eq!(token, response.number)) as u64;
                        ended += node.take_lost(|lost| {
                            assert_eq!(lost.target, 0);
                            if let Some(request) = lost.request {
                                assert_eq!(request.number, lost.token);
                            }
                        }) as u64;
                        if !gone || ended < made {
                            node.wait(Some(Duration::from_millis(20)));
                        }
                    }
                    assert_eq!(node.in_flight(), 0);
                    over.store(true, SeqCst);
                });
            }
            assert!(victim.join().is_err());
        });
        assert!(over.load(SeqCst));
        assert_eq!(alive.load(SeqCst), 0, "round {round}");
    }
}

#[test]
fn nodes_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Node<Cell<u8>, Cell<u8>, String>>();
    is_send::<Ticket>();
    use std::cell::Cell;
    let [mut a, mut b] = pair::<u8, u8, ()>(&spinning(2));
    let (b, ticket) = std::thread::spawn(move || {
        while !b.wait(None) {}
        let (_, _, ticket) = b.try_recv().unwrap();
        (b, ticket)
    })
    .join_after(|| a.call(1, 1, ()).unwrap());
    std::thread::spawn(move || {
        let mut b = b;
        b.reply(ticket, 2).unwrap();
    })
    .join()
    .unwrap();
    assert_eq!(a.poll(|(), response| assert_eq!(response, 2)), 1);
}

trait JoinAfter<T> {
    fn join_after(self, first: impl FnOnce()) -> T;
}

impl<T> JoinAfter<T> for std::thread::JoinHandle<T> {
    fn join_after(self, first: impl FnOnce()) -> T {
        first();
        self.join().unwrap()
    }
}
