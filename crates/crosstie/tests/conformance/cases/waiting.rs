//! Waiting for completions, polling with a limit, and events.

use core::time::Duration;
use std::time::Instant;

use crosstie::device::{Cq, Data, Event, Opcode, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::participant::{
    Participant, QUIET_PERIOD, TIMEOUT, TestConfig, TestQp, assert_no_completion, assert_opcode,
    expect_success, next_completion, wait_until,
};

cases!("waiting":
    wait_returns_at_once_if_a_completion_is_ready, wait_times_out, wait_wakes_on_a_receive, wait_wakes_on_a_send_completion, wait_wakes_on_a_flush,
    ping_pong_with_waiting, poll_in_portions, poll_of_an_empty_queue, no_event_when_nothing_happens,
    access_violation_is_an_event,
);

const A_MOMENT: Duration = Duration::from_millis(20);

/// Waits until the queue has a completion. A lost wake-up makes the wait last [`TIMEOUT`].
fn wait_until_ready(cq: &mut Cq) {
    let asleep = Instant::now();
    assert!(cq.wait(TIMEOUT).unwrap(), "not woken in {:?}", asleep.elapsed());
}

/// The next completion; waits until there is one. A wait may return early.
fn wait_for_next(cq: &mut Cq) -> crosstie::device::Completion {
    let mut seen = None;
    wait_until("a completion", || {
        cq.poll(1, |c| seen = Some(*c)).unwrap();
        if seen.is_none() {
            wait_until_ready(cq);
        }
        seen.is_some()
    });
    seen.expect("until waited for it")
}

/// A wait returns at once if a completion is ready.
fn wait_returns_at_once_if_a_completion_is_ready(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        side.wait_for_other();
    } else {
        end.recv(1);
        side.wait_for_other();
        wait_until_ready(&mut end.cq);
        wait_until_ready(&mut end.cq);
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// Without a completion, a wait ends at its timeout and not before.
fn wait_times_out(side: &mut Participant) {
    let mut end = side.connected_qp();
    wait_until("a wait that is not woken early", || {
        let asleep = Instant::now();
        let woken = end.cq.wait(A_MOMENT).unwrap();
        assert!(woken || asleep.elapsed() >= A_MOMENT, "{:?}", asleep.elapsed());
        !woken
    });
    assert_eq!(end.cq.poll(1, |c| panic!("{c:?}")).unwrap(), 0);
    wait_until("a wait of no time", || !end.cq.wait(Duration::ZERO).unwrap());
    side.wait_for_other();
}

/// A message wakes the thread that waits for its receive.
fn wait_wakes_on_a_receive(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        std::thread::sleep(QUIET_PERIOD);
        end.inline(1, SendOp::SendImm(3), &[]);
        end.expect_success(1);
    } else {
        end.recv(1);
        side.wait_for_other();
        assert_eq!(wait_for_next(&mut end.cq).imm, Some(3));
    }
    side.wait_for_other();
}

/// When the peer posts the receive late, the sender that waits for its request is woken.
fn wait_wakes_on_a_send_completion(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        side.wait_for_other();
        let completion = wait_for_next(&mut end.cq);
        assert_eq!((completion.wr_id, completion.status), (1, Status::Success));
    } else {
        side.wait_for_other();
        std::thread::sleep(QUIET_PERIOD);
        end.recv(1);
        wait_for_next(&mut end.cq);
    }
    side.wait_for_other();
}

/// A connection that breaks wakes the thread that waits for its receives.
fn wait_wakes_on_a_flush(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        std::thread::sleep(QUIET_PERIOD);
        end.inline(1, SendOp::Write(remote.at(1)), &[0; 8]);
        assert_eq!(wait_for_next(&mut end.cq).status, Status::RemoteAccess);
    } else {
        end.recv(1);
        side.wait_for_other();
        assert!(!wait_for_next(&mut end.cq).status.is_success());
    }
    side.wait_for_other();
}

/// Both participants wait before every message.
fn ping_pong_with_waiting(side: &mut Participant) {
    let rounds = side.repetitions(1000) as u64;
    let mut end = side.connected_qp();
    end.recv(0);
    side.wait_for_other();
    for round in 0..rounds {
        let ping = SendWr::new(round, SendOp::SendImm(round as u32), Data::Inline(&[]));
        let ping = if round % 32 == 0 { ping.signaled() } else { ping };
        if side.is_left() {
            end.qp.post(&ping).unwrap();
        }
        let received = loop {
            let completion = wait_for_next(&mut end.cq);
            if completion.opcode == Opcode::Recv {
                break completion;
            }
            assert_opcode(&completion, Opcode::Send);
        };
        assert_eq!((received.imm, received.wr_id), (Some(round as u32), round));
        end.recv(round + 1);
        if !side.is_left() {
            end.qp.post(&ping).unwrap();
        }
    }
    side.wait_for_other();
}

/// A poll hands out no more than asked for, oldest first, and says how many.
fn poll_in_portions(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        (0..10).for_each(|i| end.inline(i, SendOp::Write(remote.at(0)), &[0; 8]));
        assert_eq!(end.cq.poll(0, |c| panic!("{c:?}")).unwrap(), 0);
        let mut seen = vec![];
        wait_until("ten completions", || {
            let before = seen.len();
            let count = end.cq.poll(3, |c| seen.push(c.wr_id)).unwrap();
            assert!(count <= 3 && count == seen.len() - before, "{count}");
            seen.len() == 10
        });
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
    }
    side.wait_for_other();
}

/// An empty queue has nothing, however often it is asked.
fn poll_of_an_empty_queue(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    for _ in 0..1000 {
        assert_eq!(end.cq.poll(16, |c| panic!("{c:?}")).unwrap(), 0);
    }
    assert_no_completion(&mut end.cq);
}

/// Connections that come, talk and go are no event.
fn no_event_when_nothing_happens(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.expect_success(1);
    } else {
        end.recv(1);
        end.expect_success(1);
    }
    side.wait_for_other();
    let event = side.device.wait_event(A_MOMENT).unwrap();
    assert_eq!(event, None);
    side.wait_for_other();
}

/// A responder that is broken by its peer's violation learns of it by an event.
fn access_violation_is_an_event(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Write(remote.at(4)), &[0; 8]);
        assert_eq!(next_completion(&mut end.cq).status, Status::RemoteAccess);
    } else {
        let expected = Event::QpAccess(end.qp.qp_num());
        wait_until("the event", || side.device.wait_event(A_MOMENT).unwrap() == Some(expected));
    }
    side.wait_for_other();
    // The device still works.
    let mut other = side.connected_qp();
    if side.is_left() {
        other.inline(2, SendOp::Send, &[]);
        other.expect_success(2);
    } else {
        other.recv(2);
        expect_success(&mut other.cq, 2);
    }
    side.wait_for_other();
}
