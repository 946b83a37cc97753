//! Nodes that run on separate threads.

use super::*;

/// Spins, and yields now and then: there may be more threads than cores.
fn idle(round: &mut u32) {
    *round += 1;
    if round.is_multiple_of(64) { std::thread::yield_now() } else { core::hint::spin_loop() }
}

/// All nodes call all nodes, including themselves, and reply out of order. Every response must belong to its call.
fn all_nodes_call_all_nodes(nodes: usize, calls: u64, config: &Config, waits: bool) {
    let net = network::<Box<u64>, Box<u64>, u64>(nodes, config).unwrap();
    let finished = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for mut node in net {
            let finished = &finished;
            scope.spawn(move || {
                let (mut made, mut ended, mut round, mut reported) = (0, 0, 0, false);
                let mut seed = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(node.id() as u64 + 1);
                let mut deferred: Vec<(u64, Ticket)> = Vec::new();
                let mut sum = 0u64;
                let start = Instant::now();
                while finished.load(SeqCst) < nodes {
                    assert!(start.elapsed() < Duration::from_secs(60), "timed out: {node:?}");
                    let mut progress = false;
                    while made < calls {
                        let target = (made as usize + node.id()) % nodes;
                        match node.call(target, Box::new(made), made) {
                            Ok(()) => (made, progress) = (made + 1, true),
                            Err(error) if error.cause.is_back_pressure() => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    while let Some((request, ticket)) = node.recv().map(Request::defer) {
                        deferred.push((*request * 3, ticket));
                        progress = true;
                        if deferred.len() > 20 {
                            break;
                        }
                    }
                    while !deferred.is_empty() {
                        seed ^= seed << 13;
                        seed ^= seed >> 7;
                        seed ^= seed << 17;
                        let (response, ticket) = deferred.swap_remove(seed as usize % deferred.len());
                        node.reply(ticket, Box::new(response)).unwrap();
                    }
                    let polled = node.poll(|token, response| {
                        assert_eq!(*response, token * 3);
                        sum += token;
                    });
                    ended += polled as u64;
                    if ended == calls && !reported {
                        reported = true;
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
                    if reported {
                        node.take_lost(|lost| panic!("{lost:?}"));
                    }
                }
            });
        }
    });
}

#[test]
fn threads_call_each_other() {
    for (nodes, queue_depth) in [(2, 1), (2, 32), (3, 4)] {
        all_nodes_call_all_nodes(nodes, 100_000, &spinning(queue_depth), false);
    }
}

#[test]
fn threads_call_each_other_and_park() {
    for wait_strategy in [WaitStrategy::Adaptive, WaitStrategy::Park] {
        let config = Config { queue_depth: 8, max_in_flight: 12, wait_strategy };
        all_nodes_call_all_nodes(3, 10_000, &config, true);
    }
}

#[test]
fn parked_node_is_woken_by_call_reply_and_departure() {
    for wait_strategy in [WaitStrategy::Adaptive, WaitStrategy::Park, WaitStrategy::Spin] {
        let [mut a, mut b] = pair::<u32, u32, ()>(&Config { wait_strategy, ..Config::default() });
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..20 {
                    assert!(b.wait(None));
                    let request = b.recv().unwrap();
                    assert_eq!(*request.message(), i);
                    std::thread::sleep(Duration::from_millis(1));
                    request.reply(i + 1).unwrap();
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
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn wait_finds_a_response_out_of_order() {
    let [mut a, mut b] = pair::<u8, u8, u8>(&Config::default());
    for i in 0..3 {
        a.call(1, i, i).unwrap();
    }
    let mut received: Vec<_> = core::iter::from_fn(|| b.recv().map(Request::defer)).collect();
    assert!(!a.wait(Some(Duration::from_millis(1))));
    let (request, ticket) = received.pop().unwrap();
    b.reply(ticket, request).unwrap();
    assert!(a.wait(None));
    let mut polled = 0;
    poll_all(&mut a, |token, response| {
        assert_eq!((token, response), (2, 2));
        polled += 1;
    });
    assert_eq!(polled, 1);
}

/// The thread of a node panics at some moment while others call it. All of their calls must end.
#[test]
fn panic_of_one_thread_ends_all_calls_to_it() {
    for round in 0..100u64 {
        let alive = Arc::new(AtomicUsize::new(0));
        let net =
            network::<Counted, Counted, u64>(3, &Config { queue_depth: 5, ..Config::default() }).unwrap();
        let [mut victim, a, b] = <[_; 3]>::try_from(net).unwrap();
        let finished = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let victim = scope.spawn({
                let alive = &alive;
                move || {
                    let mut deferred = Vec::new();
                    for i in 0.. {
                        if victim.in_flight() < 2 {
                            victim.call(1 + i as usize % 2, Counted::new(i, alive), i).unwrap();
                        }
                        victim.poll(|_, _| {});
                        victim.serve(|request| deferred.push(request.defer()));
                        if i % 3 == 0
                            && let Some((request, ticket)) = deferred.pop()
                        {
                            victim.reply(ticket, Counted::new(request.number, alive)).unwrap();
                        }
                        if i > 20 + 7 * round {
                            // Without a message on the terminal.
                            std::panic::resume_unwind(Box::new("on purpose"));
                        }
                    }
                }
            });
            for mut node in [a, b] {
                let (alive, finished) = (&alive, &finished);
                scope.spawn(move || {
                    let start = Instant::now();
                    let (mut made, mut ended, mut gone) = (0u64, 0u64, false);
                    while !gone || ended < made {
                        assert!(start.elapsed() < Duration::from_secs(30));
                        while !gone {
                            match node.call(0, Counted::new(made, alive), made) {
                                Ok(()) => made += 1,
                                Err(CallError { cause: NotCalled::NodeGone { target: 0 }, .. }) => {
                                    gone = true
                                }
                                Err(error) if error.cause.is_back_pressure() => break,
                                Err(error) => panic!("{error}"),
                            }
                        }
                        node.serve(|request| match request.reply_with(|request| request) {
                            Ok(()) | Err(ReplyError { cause: NotReplied::ClientGone, .. }) => {}
                            Err(error) => panic!("{error}"),
                        });
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
                    finished.store(true, SeqCst);
                });
            }
            assert!(victim.join().is_err());
        });
        assert!(finished.load(SeqCst));
        assert_eq!(alive.load(SeqCst), 0, "round {round}");
    }
}

#[test]
fn nodes_can_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Node<Cell<u8>, Cell<u8>, String>>();
    is_send::<Ticket>();
    use std::cell::Cell;
    let [mut a, mut b] = pair::<u8, u8, ()>(&spinning(2));
    let (b, ticket) = std::thread::spawn(move || {
        while !b.wait(None) {}
        let (_, ticket) = b.recv().unwrap().defer();
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
