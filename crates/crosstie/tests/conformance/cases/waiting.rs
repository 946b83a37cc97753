//! Sleeping until something completes, polling in portions, and events.

use core::time::Duration;
use std::time::Instant;

use crosstie::device::{Cq, Data, Event, Opcode, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::side::{End, PATIENCE, QUIET, Shape, Side, done, is, next, quiet, until};

cases!("waiting":
    wait_with_something_there, wait_times_out, wait_wakes_on_a_receive, wait_wakes_on_a_sends_end, wait_wakes_on_a_flush,
    ping_pong_asleep, poll_in_portions, poll_of_nothing, no_event_when_nothing_happens,
    access_violation_is_an_event,
);

const A_MOMENT: Duration = Duration::from_millis(20);

/// Sleeps until the queue has something. A wake-up that gets lost shows as a wait that lasts [`PATIENCE`].
fn sleep_until_ready(cq: &mut Cq) {
    let asleep = Instant::now();
    assert!(cq.wait(PATIENCE).unwrap(), "not woken in {:?}", asleep.elapsed());
}

/// The next completion, sleeping until it is there. A wait may wake early.
fn next_asleep(cq: &mut Cq) -> crosstie::device::Completion {
    let mut seen = None;
    until("a completion", || {
        cq.poll(1, |c| seen = Some(*c)).unwrap();
        if seen.is_none() {
            sleep_until_ready(cq);
        }
        seen.is_some()
    });
    seen.expect("until waited for it")
}

/// What is there already ends a wait at once.
fn wait_with_something_there(side: &mut Side) {
    let mut end = side.end();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        side.meet();
    } else {
        end.recv(1);
        side.meet();
        sleep_until_ready(&mut end.cq);
        sleep_until_ready(&mut end.cq);
        end.done(1);
    }
    side.meet();
}

/// Nothing comes: the wait ends by itself, not before its time.
fn wait_times_out(side: &mut Side) {
    let mut end = side.end();
    until("a wait that is not woken early", || {
        let asleep = Instant::now();
        let woken = end.cq.wait(A_MOMENT).unwrap();
        assert!(woken || asleep.elapsed() >= A_MOMENT, "{:?}", asleep.elapsed());
        !woken
    });
    assert_eq!(end.cq.poll(1, |c| panic!("{c:?}")).unwrap(), 0);
    until("a wait of no time", || !end.cq.wait(Duration::ZERO).unwrap());
    side.meet();
}

/// A message wakes the one who sleeps on its receive.
fn wait_wakes_on_a_receive(side: &mut Side) {
    let mut end = side.end();
    if side.is_left() {
        side.meet();
        std::thread::sleep(QUIET);
        end.inline(1, SendOp::SendImm(3), &[]);
        end.done(1);
    } else {
        end.recv(1);
        side.meet();
        assert_eq!(next_asleep(&mut end.cq).imm, Some(3));
    }
    side.meet();
}

/// A receive that the peer posts late wakes the sender who sleeps on its request.
fn wait_wakes_on_a_sends_end(side: &mut Side) {
    let mut end = side.end();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        side.meet();
        let completion = next_asleep(&mut end.cq);
        assert_eq!((completion.wr_id, completion.status), (1, Status::Success));
    } else {
        side.meet();
        std::thread::sleep(QUIET);
        end.recv(1);
        next_asleep(&mut end.cq);
    }
    side.meet();
}

/// A connection that breaks wakes the one who sleeps on its receives.
fn wait_wakes_on_a_flush(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(8);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        side.meet();
        std::thread::sleep(QUIET);
        end.inline(1, SendOp::Write(remote.at(1)), &[0; 8]);
        assert_eq!(next_asleep(&mut end.cq).status, Status::RemoteAccess);
    } else {
        end.recv(1);
        side.meet();
        assert!(!next_asleep(&mut end.cq).status.is_success());
    }
    side.meet();
}

/// Both sides sleep through every turn.
fn ping_pong_asleep(side: &mut Side) {
    let rounds = side.many(1000) as u64;
    let mut end = side.end();
    end.recv(0);
    side.meet();
    for round in 0..rounds {
        let ping = SendWr::new(round, SendOp::SendImm(round as u32), Data::Inline(&[]));
        let ping = if round % 32 == 0 { ping.signaled() } else { ping };
        if side.is_left() {
            end.qp.post(&ping).unwrap();
        }
        let received = loop {
            let completion = next_asleep(&mut end.cq);
            if completion.opcode == Opcode::Recv {
                break completion;
            }
            is(&completion, Opcode::Send);
        };
        assert_eq!((received.imm, received.wr_id), (Some(round as u32), round));
        end.recv(round + 1);
        if !side.is_left() {
            end.qp.post(&ping).unwrap();
        }
    }
    side.meet();
}

/// A poll hands out no more than asked for, oldest first, and says how many.
fn poll_in_portions(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(8);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        (0..10).for_each(|i| end.inline(i, SendOp::Write(remote.at(0)), &[0; 8]));
        assert_eq!(end.cq.poll(0, |c| panic!("{c:?}")).unwrap(), 0);
        let mut seen = vec![];
        until("ten completions", || {
            let before = seen.len();
            let count = end.cq.poll(3, |c| seen.push(c.wr_id)).unwrap();
            assert!(count <= 3 && count == seen.len() - before, "{count}");
            seen.len() == 10
        });
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
    }
    side.meet();
}

/// An empty queue has nothing, however often it is asked.
fn poll_of_nothing(side: &mut Side) {
    let mut end = End::unconnected(&side.device, &Shape::default());
    for _ in 0..1000 {
        assert_eq!(end.cq.poll(16, |c| panic!("{c:?}")).unwrap(), 0);
    }
    quiet(&mut end.cq);
}

/// Connections that come, talk and go are no event.
fn no_event_when_nothing_happens(side: &mut Side) {
    let mut end = side.end();
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.done(1);
    } else {
        end.recv(1);
        end.done(1);
    }
    side.meet();
    let event = side.device.wait_event(A_MOMENT).unwrap();
    assert_eq!(event, None);
    side.meet();
}

/// A responder that is broken by its peer's violation learns of it by an event.
fn access_violation_is_an_event(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(8);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Write(remote.at(4)), &[0; 8]);
        assert_eq!(next(&mut end.cq).status, Status::RemoteAccess);
    } else {
        let expected = Event::QpAccess(end.qp.qp_num());
        until("the event", || side.device.wait_event(A_MOMENT).unwrap() == Some(expected));
    }
    side.meet();
    // And the device is none the worse.
    let mut other = side.end();
    if side.is_left() {
        other.inline(2, SendOp::Send, &[]);
        other.done(2);
    } else {
        other.recv(2);
        done(&mut other.cq, 2);
    }
    side.meet();
}
