//! Waiting and polling notice deadlines, dead peers and room in time, at little cost.
//!
//! Nothing is asserted about durations. The tests count waits, polls and READs; a test that hangs is ended by
//! [`with_hang_limit`].

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crosstie::copyrpc::{CallFailed, ConnectionAddress, Failure, NotCalled};
use crosstie::device::ConnectConfig;
use crosstie_protocol::copyrpc::Refusal;

use super::killed_processes::{SILENT, start_victim};
use super::test_peer::{TIMEOUT, TestPeer, Workload, ring, sides};
use crate::connect_pair;

/// Runs `test` in a thread, and fails if it does not end.
fn with_hang_limit(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        done.send(()).ok();
    });
    if ended.recv_timeout(2 * TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("a wait sleeps for ever");
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn wait_ends_when_the_peer_is_killed() {
    with_hang_limit(|| {
        let mut side = TestPeer::software(Workload::Small);
        let mut child = start_victim(&mut side, SILENT);
        side.connections[0].call(b"no response", 8, (0, 0)).unwrap();
        side.context.flush();
        child.kill();
        let (mut waits, mut ended) = (0, None);
        loop {
            side.context.poll(|user, result| ended = Some((user, result.map(|_| ()))));
            if ended.is_some() {
                break;
            }
            side.context.wait(Duration::MAX);
            waits += 1;
        }
        assert!(matches!(ended, Some((_, Err(CallFailed::Connection(Failure::Broken(_)))))), "{ended:?}");
        assert!(waits <= 3, "{waits} waits until the call ended");
    });
}

#[test]
fn wait_ends_at_the_deadline_of_a_call() {
    with_hang_limit(|| {
        let (left, right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
        let (here, _there) = connect_pair(&left.context, &right.context, &ring(4096));
        // Deadlines of calls that are answered do not end a wait.
        for number in 0..4 {
            here.call_within(b"answered", 8, (0, number), Duration::from_millis(20)).unwrap();
        }
        let mut answered = 0;
        while answered < 4 {
            answered += left.context.poll(|user, result| assert!(result.is_ok(), "{user:?} {result:?}"));
            right.context.poll(|_, _| ());
            while let Some(request) = right.context.recv() {
                assert!(request.reply(&[]).is_ok());
            }
        }
        here.call_within(b"late", 8, (1, 0), Duration::from_millis(150)).unwrap();
        here.call_within(b"later", 8, (1, 1), Duration::from_millis(200)).unwrap();
        let (mut waits, mut ended) = (0, Vec::new());
        while ended.len() < 2 {
            left.context.wait(Duration::MAX);
            waits += 1;
            left.context.poll(|user, result| ended.push((user, result.err())));
        }
        assert_eq!(ended, [0, 1].map(|number| ((1, number), Some(CallFailed::TimedOut))));
        assert!(waits <= 3, "{waits} waits for two deadlines");
    });
}

/// A loop whose polls are far apart still looks at its peers and deadlines after few polls.
#[test]
fn slow_polls_notice_dead_peers_and_deadlines_after_few_polls() {
    // Polls are fast first, so that the clock is read rarely.
    for fast_polls in [1100, 1500, 5000] {
        let (mut left, mut right) = sides(Workload::Small);
        left.connect(&mut right, &ring(4096));
        for _ in 0..fast_polls {
            left.turn();
        }
        left.connections[1].call(b"no response", 8, (1, 0)).unwrap();
        left.context.flush();
        drop(right.connections.pop());
        left.connections[0].call_within(b"late", 8, (0, 1), Duration::from_millis(5)).unwrap();
        left.open.extend([(1, 0), (0, 1)]);
        let mut polls = 0;
        while left.failed.len() < 2 {
            std::thread::sleep(Duration::from_millis(1));
            left.turn();
            polls += 1;
            assert!(polls <= 200, "{polls} polls, ended: {:?}", left.failed);
        }
    }
}

/// Rare traffic on one connection does not hide that the peer of another is dead.
#[test]
fn wait_with_rare_traffic_notices_a_dead_peer() {
    with_hang_limit(|| {
        let (mut left, mut right) = sides(Workload::Small);
        let pings = left.context.create_connection(&ring(4096)).unwrap();
        let (addresses, received) = mpsc::channel();
        let (stop, stopped) = mpsc::channel::<()>();
        let own = pings.address();
        let pinger = std::thread::spawn(move || {
            let side = TestPeer::software(Workload::Small);
            let connection = side.context.create_connection(&ring(4096)).unwrap();
            connection.connect(&own, &ConnectConfig::default()).unwrap();
            addresses.send(connection.address()).unwrap();
            let mut number = 0;
            while stopped.recv_timeout(Duration::from_millis(5)) == Err(mpsc::RecvTimeoutError::Timeout) {
                connection.call(b"ping", 8, (0, number)).ok();
                number += 1;
                side.context.poll(|_, _| ());
            }
        });
        let theirs: ConnectionAddress = received.recv().unwrap();
        pings.connect(&theirs, &ConnectConfig::default()).unwrap();
        left.call(1);
        left.context.flush();
        drop(right.connections.pop());
        let mut waits = 0;
        while left.connections[0].failure().is_none() {
            left.context.wait(Duration::MAX);
            waits += 1;
            left.turn();
            assert!(waits <= 1000, "the dead peer was not noticed after {waits} waits");
        }
        stop.send(()).unwrap();
        pinger.join().unwrap();
    });
}

#[test]
fn full_ring_is_read_a_few_times_and_then_left_alone() {
    let (left, right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, _there) = connect_pair(&left.context, &right.context, &ring(1024));
    let mut made = 0;
    let refused = loop {
        match here.call(&[1; 200], 0, (0, made)) {
            Ok(()) => made += 1,
            Err(error) => break error.cause,
        }
    };
    assert_eq!(refused, NotCalled::Refused(Refusal::RingFull));
    // The peer keeps all requests, and nobody asks for room again.
    let begin = Instant::now();
    for _ in 0..200_000 {
        left.context.poll(|_, _| panic!("nothing was answered"));
    }
    for _ in 0..20 {
        left.context.wait(Duration::from_millis(5));
        left.context.poll(|_, _| panic!("nothing was answered"));
    }
    // A silent peer that owes responses is also probed, by at most ten READs in a second.
    let probes = begin.elapsed().as_millis() as u64 / 100 + 1;
    let reads = left.context.counters().reads;
    assert!(reads <= 16 + probes, "{reads} READs for one refused call, at most {probes} of them probes");
    // Somebody asks again: the room that the peer has released meanwhile is found.
    right.context.poll(|_, _| ());
    let mut requests: Vec<_> = std::iter::from_fn(|| right.context.recv()).collect();
    assert_eq!(requests.len() as u64, made);
    requests.iter_mut().for_each(|request| request.detach());
    right.context.poll(|_, _| ());
    let begin = Instant::now();
    while here.call(&[1; 200], 0, (0, made)).is_err() {
        left.context.poll(|_, _| panic!("nothing was answered"));
        assert!(begin.elapsed() < TIMEOUT, "the room was not found: {:?}", left.context.counters());
    }
}

#[test]
fn slow_polls_hold_a_batch_back_at_most_once() {
    let (left, right) = (TestPeer::software(Workload::Small), TestPeer::software(Workload::Small));
    let (here, _there) = connect_pair(&left.context, &right.context, &ring(1 << 16));
    // The peer has not read two long batches, so a short one may be held back.
    for number in 0..2 {
        here.call(&[1; 4000], 8, (0, number)).unwrap();
        left.context.flush();
    }
    let batches = left.context.counters().batches;
    here.call(&[1; 8], 8, (0, 2)).unwrap();
    let mut polls = 0;
    while left.context.counters().batches == batches {
        left.context.poll(|_, _| panic!("nothing was answered"));
        polls += 1;
        // The work of a slow loop.
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(polls <= 2, "held back for {} polls", polls - 1);
}
