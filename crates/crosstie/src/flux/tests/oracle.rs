//! Random interleavings against an oracle: no message leaks, and none is dropped twice.

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Call { from: Index, to: Index },
    Poll { node: Index },
    Receive { node: Index },
    Reply { node: Index, which: Index },
    Drop { node: Index },
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<Index>;
    prop_oneof![
        40 => (index(), index()).prop_map(|(from, to)| Step::Call { from, to }),
        30 => index().prop_map(|node| Step::Poll { node }),
        30 => index().prop_map(|node| Step::Receive { node }),
        25 => (index(), index()).prop_map(|(node, which)| Step::Reply { node, which }),
        1 => index().prop_map(|node| Step::Drop { node }),
    ]
}

type Subject = Node<Counted, Counted, u64>;

/// The expected state, in the simplest representation.
#[derive(Default)]
struct Oracle {
    /// Calls that were sent and not received, by caller and callee.
    sent: HashMap<(usize, usize), VecDeque<u64>>,
    /// Calls with a reply that was not polled, with their callers.
    replied: HashMap<u64, usize>,
    /// Calls in flight, by caller and callee.
    in_flight: HashMap<(usize, usize), usize>,
}

proptest! {
    /// Any interleaving of call, poll, receive and reply, out of order and at any depth, with nodes that are dropped: no
    /// response is lost, duplicated or delivered to another node, and every message is dropped exactly once.
    #[test]
    fn every_call_ends_once_and_nothing_leaks(
        nodes in 1usize..5,
        queue_depth in 1usize..6,
        max_in_flight in 1usize..12,
        steps in prop::collection::vec(step(), 0..400),
    ) {
        let config = Config { queue_depth, max_in_flight, wait_strategy: WaitStrategy::Spin };
        let alive = Arc::new(AtomicUsize::new(0));
        let mut net: Vec<Option<Subject>> = network(nodes, &config).unwrap().into_iter().map(Some).collect();
        let mut deferred: Vec<Vec<(u64, usize, Ticket)>> = (0..nodes).map(|_| Vec::new()).collect();
        let mut oracle = Oracle::default();
        // By the number of a call: its caller and its callee.
        let mut calls: Vec<(usize, usize)> = Vec::new();
        let mut ended: Vec<bool> = Vec::new();
        for step in steps {
            match step {
                Step::Call { from, to } => {
                    let (from, to) = (from.index(nodes), to.index(nodes + 1));
                    let to_gone = to < nodes && net[to].is_none();
                    let Some(node) = &mut net[from] else { continue };
                    let number = calls.len() as u64;
                    let pair = *oracle.in_flight.get(&(from, to)).unwrap_or(&0);
                    let all: usize =
                        oracle.in_flight.iter().filter(|((caller, _), _)| *caller == from).map(|(_, n)| n).sum();
                    prop_assert_eq!(node.in_flight(), all);
                    match node.call(to, Counted::new(number, &alive), number) {
                        Ok(()) => {
                            prop_assert!(to < nodes && !to_gone && pair < queue_depth && all < max_in_flight);
                            *oracle.in_flight.entry((from, to)).or_default() += 1;
                            oracle.sent.entry((from, to)).or_default().push_back(number);
                            calls.push((from, to));
                            ended.push(false);
                        }
                        Err(error) => {
                            let CallError { cause, request, token } = error;
                            match cause {
                                NotCalled::NoSuchNode { .. } => prop_assert_eq!(to, nodes),
                                NotCalled::TooManyInFlight => prop_assert_eq!(all, max_in_flight),
                                NotCalled::NodeGone { .. } => prop_assert!(to_gone),
                                NotCalled::Full { .. } => prop_assert!(pair == queue_depth && !to_gone),
                            }
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
                        prop_assert_eq!(oracle.replied.remove(&token), Some(index));
                        prop_assert!(!core::mem::replace(&mut ended[token as usize], true));
                        *oracle.in_flight.get_mut(&calls[token as usize]).unwrap() -= 1;
                    }
                }
                Step::Receive { node: index } => {
                    let index = index.index(nodes);
                    let Some(node) = &mut net[index] else { continue };
                    match node.recv() {
                        Some(request) => {
                            let from = request.client();
                            let (request, ticket) = request.defer();
                            let first = oracle.sent.get_mut(&(from, index)).and_then(VecDeque::pop_front);
                            prop_assert_eq!(first, Some(request.number));
                            prop_assert_eq!(ticket.client(), from);
                            deferred[index].push((request.number, from, ticket));
                        }
                        None => {
                            let pending = oracle.sent.iter().any(|((_, to), queue)| *to == index && !queue.is_empty());
                            prop_assert!(!pending);
                        }
                    }
                }
                Step::Reply { node: index, which } => {
                    let index = index.index(nodes);
                    if deferred[index].is_empty() {
                        continue;
                    }
                    let at = which.index(deferred[index].len());
                    let (number, from, ticket) = deferred[index].swap_remove(at);
                    let caller_gone = net[from].is_none();
                    let Some(node) = &mut net[index] else { continue };
                    match node.reply(ticket, Counted::new(number + 1_000_000, &alive)) {
                        Ok(()) => {
                            prop_assert!(!caller_gone);
                            prop_assert_eq!(oracle.replied.insert(number, from), None);
                        }
                        Err(ReplyError { cause: NotReplied::ClientGone, response, ticket: None }) => {
                            prop_assert!(caller_gone);
                            prop_assert_eq!(response.number, number + 1_000_000);
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Step::Drop { node: index } => {
                    let index = index.index(nodes);
                    if net[index].take().is_none() {
                        continue;
                    }
                    // Nobody waits for the calls of this node any more.
                    oracle.in_flight.retain(|(from, _), _| *from != index);
                    oracle.replied.retain(|_, from| *from != index);
                    deferred[index].clear();
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
                            prop_assert!(!oracle.replied.contains_key(&number));
                            prop_assert!(!core::mem::replace(&mut ended[number as usize], true));
                            let unreceived = queue.front() == Some(&number);
                            prop_assert_eq!(call.request.map(|request| request.number), unreceived.then_some(number));
                            if unreceived {
                                queue.pop_front();
                            }
                            *oracle.in_flight.get_mut(&(other, index)).unwrap() -= 1;
                        }
                        prop_assert!(queue.is_empty());
                        prop_assert_eq!(node.take_lost(|_| {}), 0);
                        // The remaining calls have responses.
                        let left = oracle.in_flight.get(&(other, index)).copied().unwrap_or(0);
                        let replied = oracle.replied.keys().filter(|n| calls[**n as usize] == (other, index));
                        prop_assert_eq!(left, replied.count());
                    }
                }
            }
        }
        // All nodes reply to all requests and poll all responses. Then every call of a remaining node must have ended.
        for (index, node) in net.iter_mut().enumerate() {
            let Some(node) = node else { continue };
            let mut last: Vec<_> = deferred[index].drain(..).map(|(number, _, ticket)| (number, ticket)).collect();
            while let Some((request, ticket)) = node.recv().map(Request::defer) {
                last.push((request.number, ticket));
            }
            for (number, ticket) in last {
                match node.reply(ticket, Counted::new(number + 1_000_000, &alive)) {
                    Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }) => {}
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
fn messages_that_nobody_took_are_dropped_once() {
    // Calls in every state when the nodes are dropped, in both orders of dropping.
    for caller_first in [true, false] {
        let alive = Arc::new(AtomicUsize::new(0));
        let [mut caller, mut callee] = pair::<Counted, Counted, Counted>(&spinning(8));
        for i in 0..6 {
            caller.call(1, Counted::new(i, &alive), Counted::new(100 + i, &alive)).unwrap();
        }
        // Call 0: polled. 1: replied and not polled. 2: received, and its ticket dropped. 3: received, and its ticket outlives
        // the node. 4 and 5: never received.
        let mut received = (0..4).map(|_| callee.recv().unwrap().defer()).collect::<VecDeque<_>>();
        for _ in 0..2 {
            let (request, ticket) = received.pop_front().unwrap();
            callee.reply(ticket, Counted::new(200 + request.number, &alive)).unwrap();
        }
        let mut polled = false;
        // A panic in the callback leaves the other responses in their slots.
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
            // Requests that were sent before are still delivered.
            let request = callee.recv().unwrap();
            assert_eq!((request.client(), request.message().number), (0, 4));
            match request.reply(Counted::new(0, &alive)) {
                Err(ReplyError { cause: NotReplied::ClientGone, response, ticket: None }) => {
                    assert_eq!(response.number, 0);
                }
                other => panic!("{other:?}"),
            }
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
        assert_eq!(alive.load(SeqCst), 1, "request 3 is still alive");
        drop(received);
        assert_eq!(alive.load(SeqCst), 0);
    }
}

/// A message whose `drop` panics if the flag is set.
struct PanicsOnDrop(Counted, bool);

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        assert!(!self.1, "on purpose");
    }
}

#[test]
fn panic_in_a_drop_drops_no_message_twice() {
    for at in 0..3 {
        let alive = Arc::new(AtomicUsize::new(0));
        let [mut caller, mut callee] = pair::<PanicsOnDrop, PanicsOnDrop, u64>(&spinning(4));
        for round in 0..2 {
            for i in 0..4 {
                caller.call(1, PanicsOnDrop(Counted::new(i, &alive), round == 1 && i == at), i).unwrap();
            }
            if round == 0 {
                callee.serve(|request| {
                    let number = request.message().0.number;
                    let response = PanicsOnDrop(Counted::new(number, &alive), number == at);
                    request.reply(response).unwrap();
                });
                poll_all(&mut caller, |_, mut response| response.1 = false);
            }
        }
        for _ in 0..2 {
            let (mut request, ticket) = callee.recv().unwrap().defer();
            request.1 = false;
            let response = PanicsOnDrop(Counted::new(request.0.number, &alive), at < 2);
            callee.reply(ticket, response).unwrap();
        }
        // Two responses and two requests are in the slots.
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(caller)));
        let second = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(callee)));
        assert!(first.is_err() || second.is_err());
        // `Counted` itself detects a second drop. A panic in a drop may leak other messages.
    }
}
