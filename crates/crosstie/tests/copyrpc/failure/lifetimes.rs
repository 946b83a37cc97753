//! Lifetimes of calls and connections: long-running, failed and timed-out ones.

use std::time::{Duration, Instant};

use crosstie::copyrpc::{CallFailed, ConnectionConfig, Failure, NotCalled};
use crosstie::device::Access;
use crosstie_protocol::copyrpc::Refusal;
use crosstie_testkit::wait::until;

use super::test_peer::{LONG, TIMEOUT, TestPeer, Workload, bulk, exercise, finish_open_calls, ring, sides};
use crate::connect_pair;

#[test]
fn tiny_ring_wraps_half_a_million_times() {
    let (mut left, mut right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, there) = connect_pair(&left.context, &right.context, &ring(256));
    left.connections.push(here);
    let rounds = 500_000;
    let begin = Instant::now();
    while right.context.counters().bytes / 256 < rounds {
        left.call(64);
        left.turn();
        right.turn();
        assert!(begin.elapsed() < 15 * TIMEOUT);
    }
    finish_open_calls(&mut left, &mut right, "a tiny ring");
    assert!(left.failed.is_empty() && there.failure().is_none());
    println!("{} calls, {:?}", left.answered, begin.elapsed());
}

#[test]
fn panicking_callback_ends_the_connections_but_not_the_context() {
    let (mut left, mut right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, there) = connect_pair(&left.context, &right.context, &ring(4096));
    here.call(b"panic", 8, (0, 0)).unwrap();
    here.call(b"lost with it", 8, (0, 1)).unwrap();
    until("a callback panics", || {
        right.turn();
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            left.context.poll(|_, _| panic!("as asked"));
        }));
        polled.is_err()
    });
    let mut ended = Vec::new();
    until("the connection and its call end", || {
        left.context.poll(|user, answer| ended.push((user, answer.err())));
        here.failure().is_some() && !ended.is_empty()
    });
    assert_eq!(ended, [((0, 1), Some(CallFailed::Connection(Failure::Closed)))]);
    drop((here, there));
    // A new connection of the same contexts works.
    left.connect(&mut right, &ring(4096));
    exercise(&mut left, &mut right, 100, "after a panic");
}

/// As for a callback. Requests of both forms: one that came with its completion, and one in the ring.
#[test]
fn panicking_handler_ends_the_connections_but_not_the_context() {
    for calls in [1, 12] {
        let (mut left, mut right) =
            (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
        let (here, there) = connect_pair(&left.context, &right.context, &ring(4096));
        (0..calls).for_each(|number| here.call(b"panic", 8, (0, number)).unwrap());
        left.context.flush();
        until("a handler panics", || {
            let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                right.context.serve(&mut (), |(), _| panic!("as asked"), |(), _, _| ());
            }));
            served.is_err()
        });
        // The request is answered with an empty payload. The others end with the connection, each once.
        let mut ended = 0;
        until("the connection and its calls end", || {
            ended += left.context.poll(|(_, number), answer| {
                assert!(answer.map_or(number > 0, |bytes| number == 0 && bytes.is_empty()), "{number}");
            }) as u64;
            right.context.poll(|_, _| ());
            there.failure().is_some() && ended >= calls
        });
        assert_eq!(ended, calls);
        drop((here, there));
        left.connect(&mut right, &ring(4096));
        exercise(&mut left, &mut right, 100, "after a panic");
    }
}

#[test]
fn dead_peer_is_detected_while_other_connections_are_busy() {
    let (mut left, mut right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    for _ in 0..2 {
        left.connect(&mut right, &ring(4096));
    }
    left.call(4);
    left.context.flush();
    // The peer polls the requests and closes. The requests have arrived, so no WRITE of this side fails.
    let gone = right.connections.pop().unwrap();
    right.context.poll(|_, _| ());
    drop(gone);
    right.turn();
    // This side sends nothing more on that connection.
    let doomed = left.connections.pop().unwrap();
    until("the dead peer is detected", || {
        left.call(16);
        left.turn();
        right.turn();
        doomed.failure().is_some()
    });
    assert_eq!(left.failed.len(), 4);
    assert!(
        left.failed
            .iter()
            .all(|((index, _), cause)| *index == 1 && matches!(cause, CallFailed::Connection(_)))
    );
    finish_open_calls(&mut left, &mut right, "the other one");
    assert_eq!(left.context.counters().failures, 1);
}

#[test]
fn deadline_applies_only_to_its_own_call() {
    // The call with the same id must be made before the deadline of the first call. On a slow machine that takes longer.
    let tried = [2, 8, 32, 128].map(Duration::from_secs);
    assert!(tried.into_iter().any(reuses_call_id_before_deadline), "too slow for a deadline after {tried:?}");
}

/// Makes a call with a deadline, and after it as many calls as there are ids, one at a time. Then waits until the deadline has
/// passed. Returns `false` if it passed too early, so that nothing was shown.
fn reuses_call_id_before_deadline(time: Duration) -> bool {
    // With one call at a time, call ids repeat soon.
    const GENERATIONS: u64 = (1 << 15) - 1;
    let (mut left, mut right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, there) =
        connect_pair(&left.context, &right.context, &ConnectionConfig { pending_calls: 1, ..ring(4096) });
    // The first call has a deadline far away and is answered at once. Later calls have none, and one of them has the same id.
    let begin = Instant::now();
    for number in 0..GENERATIONS {
        let bytes = number.to_le_bytes();
        let called = match number {
            0 => here.call_within(&bytes, 8, (0, number), time),
            _ => here.call(&bytes, 8, (0, number)),
        };
        assert!(called.is_ok() && left.open.insert((0, number)));
        finish_open_calls(&mut left, &mut right, "one at a time");
    }
    assert!(here.call(&GENERATIONS.to_le_bytes(), 8, (0, GENERATIONS)).is_ok());
    if begin.elapsed() >= time {
        return false;
    }
    left.open.insert((0, GENERATIONS));
    while begin.elapsed() < time + Duration::from_millis(200) {
        left.turn();
    }
    assert!(left.failed.is_empty(), "ended by the deadline of another call: {:?}", left.failed);
    finish_open_calls(&mut left, &mut right, "the last one");
    assert!(left.failed.is_empty() && there.failure().is_none());
    true
}

#[test]
fn panicking_callback_does_not_hide_other_calls_that_ended() {
    let (left, right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, there) = connect_pair(&left.context, &right.context, &ring(4096));
    for number in 0..3 {
        here.call(b"no response", 8, (0, number)).unwrap();
    }
    left.context.flush();
    drop(there);
    let (mut ended, begin) = (Vec::new(), Instant::now());
    while ended.len() < 3 {
        // Every callback panics. Each call still ends once.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            left.context.poll(|user, result| {
                ended.push((user, result.err()));
                panic!("as asked");
            })
        }));
        assert!(polled.is_err() || polled.is_ok_and(|count| count == 0));
        assert!(begin.elapsed() < TIMEOUT, "not all calls ended: {ended:?}");
    }
    ended.sort_by_key(|(user, _)| *user);
    assert_eq!(ended.iter().map(|(user, _)| *user).collect::<Vec<_>>(), [(0, 0), (0, 1), (0, 2)]);
    assert!(ended.iter().all(|(_, cause)| matches!(cause, Some(CallFailed::Connection(_)))), "{ended:?}");
    assert_eq!(left.context.poll(|user, _| panic!("{user:?} ended twice")), 0);
}

#[test]
fn refused_calls_return_their_bulk_memory() {
    // A call that is refused by the ring after it took memory returns the memory. One that is refused for lack of memory takes
    // nothing from the ring.
    let (mut left, mut right) = (TestPeer::software(Workload::Bulk), TestPeer::software(Workload::Bulk));
    let (here, there) = connect_pair(&left.context, &right.context, &bulk(1 << 20));
    let long = vec![1; LONG];
    for _ in 0..200 {
        let refused = loop {
            match here.call(&[1; 40], 24, (3, 0)) {
                Ok(()) => {}
                Err(error) => break error.cause,
            }
        };
        assert!(refused.is_back_pressure());
        let refused = here.call(&long, 24, (3, 1)).unwrap_err().cause;
        assert!(
            refused.is_back_pressure() && refused != NotCalled::Refused(Refusal::NoBulkMemory),
            "{refused}"
        );
        until("all calls are answered", || {
            left.context.poll(|_, answer| assert!(answer.is_ok()));
            right.context.poll(|_, _| ());
            while right.context.recv().is_some() {}
            here.pending_calls() == 0
        });
    }
    drop((here, there));
    left.connect(&mut right, &bulk(1 << 20));
    exercise(&mut left, &mut right, 30, "afterwards");
}

#[test]
fn raw_operations_in_flight_are_counted() {
    let (mut left, right) = sides(Workload::Bulk);
    let board = right.context.allocate(4096, Access::ALL).unwrap();
    board.write(0, &[0x77; 4096]).unwrap();
    left.regions = (0..4).map(|_| left.context.allocate(4096, Access::LOCAL_WRITE).unwrap()).collect();
    assert_eq!(left.context.raw_operations_in_flight(), 0);
    left.read(0, board.remote());
    assert_eq!(left.context.raw_operations_in_flight(), 4);
    until("the READs complete", || {
        left.turn();
        left.read == 4
    });
    assert_eq!(left.context.raw_operations_in_flight(), 0);
    // Operations that end with their connection are not in flight either.
    left.read(0, board.remote());
    left.connections.clear();
    assert_eq!(left.context.raw_operations_in_flight(), 0);
    left.turn();
    assert_eq!(left.regions.len(), 4, "all regions are back");
}
