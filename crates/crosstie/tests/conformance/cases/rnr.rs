//! Messages that find no receive: the sender waits, then tries again.

use crosstie::device::{ConnectConfig, QpState, RemoteMemory, SendOp, SrqConfig, Status};

use super::cases;
use crate::side::{End, QUIET, Shape, Side, done, get, pattern, put, quiet, srq_recv, word};

cases!("rnr":
    send_waits_for_a_receive, write_imm_waits_for_a_receive, write_imm_waits_on_an_empty_shared_queue,
    messages_keep_their_order_while_they_wait, nothing_passes_a_message_that_waits, limited_retries_end,
    limited_retries_are_enough_when_a_receive_comes, long_messages_wait_too, drip_of_receives,
);

/// SEND before the receive is there: done when it comes.
fn send_waits_for_a_receive(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    if side.is_left() {
        end.inline(1, SendOp::SendImm(1), &[7; 64]);
        quiet(&mut end.cq);
        side.meet();
        end.done(1);
    } else {
        side.meet();
        end.recv_into(2, &region);
        assert_eq!(end.done(2).imm, Some(1));
        assert_eq!(get(&region, 0, 64), [7; 64]);
    }
    side.meet();
}

/// WRITE+IMM before the receive is there. Its bytes may arrive before.
fn write_imm_waits_for_a_receive(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::WriteImm(remote.at(0), 1), &[7; 64]);
        quiet(&mut end.cq);
        side.meet();
        end.done(1);
    } else {
        side.meet();
        end.recv(2);
        let received = end.done(2);
        assert_eq!((received.imm, received.byte_len), (Some(1), 64));
        assert_eq!(get(&region, 0, 64), [7; 64]);
    }
    side.meet();
}

/// The same with a shared receive queue that is empty at first.
fn write_imm_waits_on_an_empty_shared_queue(side: &mut Side) {
    let mut end = End::unconnected(&side.device, &Shape::default());
    let mut srq = end.pd.create_srq(&SrqConfig::default()).unwrap();
    end.qp = end.pd.create_rc(&Default::default(), &end.cq, &end.cq, Some(&srq)).unwrap();
    side.connect(&mut end.qp, &ConnectConfig::default());
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        (0..10).for_each(|i| end.inline(i, SendOp::WriteImm(remote.at(0), i as u32), &[i as u8; 64]));
        quiet(&mut end.cq);
        side.meet();
        end.all_done(0..10);
    } else {
        side.meet();
        for i in 0..10 {
            srq_recv(&mut srq, i);
            let received = done(&mut end.cq, i);
            assert_eq!((received.imm, received.qp_num), (Some(i as u32), end.qp.qp_num()));
        }
        assert_eq!(get(&region, 0, 64), [9; 64]);
    }
    side.meet();
}

/// Several waiting messages arrive in order.
fn messages_keep_their_order_while_they_wait(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        for i in 0..60 {
            let op = if i % 2 == 0 { SendOp::SendImm(i) } else { SendOp::WriteImm(remote.at(0), i) };
            end.inline(u64::from(i), op, &[]);
        }
        side.meet();
        end.all_done(0..60);
    } else {
        side.meet();
        (0..60).for_each(|i| end.recv(i));
        (0..60).for_each(|i| assert_eq!(end.done(i).imm, Some(i as u32)));
    }
    side.meet();
}

/// A WRITE or an atomic behind a SEND that waits takes no effect before it.
fn nothing_passes_a_message_that_waits(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.inline(2, SendOp::Write(remote.at(0)), &1u64.to_ne_bytes());
        let scratch = end.region(8);
        end.post(3, SendOp::FetchAdd { remote: remote.at(8), add: 1 }, &scratch);
        side.meet();
        end.done(1);
        end.done(2);
        end.done(3);
        side.meet();
    } else {
        side.meet();
        std::thread::sleep(QUIET);
        assert_eq!([word(&region, 0), word(&region, 8)], [0, 0]);
        end.recv(1);
        end.done(1);
        side.meet();
        assert_eq!([word(&region, 0), word(&region, 8)], [1, 1]);
    }
    side.meet();
}

/// A limited number of retries ends in an error, and the queue pair in ERR. The peer's is none the worse.
fn limited_retries_end(side: &mut Side) {
    let connect = ConnectConfig { rnr_retry: 2, min_rnr_timer: 12, ..ConnectConfig::default() };
    let mut end = side.end_with(&Shape { connect, ..Shape::default() });
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.inline(2, SendOp::Send, &[]);
        end.ends(1, &[Status::RnrRetryExceeded]);
        end.ends(2, &[Status::Flushed]);
        assert_eq!(end.qp.state(), QpState::Error);
        side.meet();
    } else {
        side.meet();
        assert_eq!(end.qp.state(), QpState::ReadyToSend);
        end.recv(5);
        quiet(&mut end.cq);
    }
    side.meet();
}

/// Retries count anew for each message, and one that succeeds in time is a success. 6 retries of 164 ms are nearly a second.
fn limited_retries_are_enough_when_a_receive_comes(side: &mut Side) {
    let connect = ConnectConfig { rnr_retry: 6, min_rnr_timer: 28, ..ConnectConfig::default() };
    let mut end = side.end_with(&Shape { connect, ..Shape::default() });
    if side.is_left() {
        side.meet();
        end.inline(1, SendOp::SendImm(1), &[]);
        end.done(1);
    } else {
        side.meet();
        std::thread::sleep(QUIET);
        end.recv(1);
        end.done(1);
    }
    side.meet();
}

/// A message of many packets waits as well as a short one.
fn long_messages_wait_too(side: &mut Side) {
    let mut end = side.end();
    let len = 300_000;
    let region = end.region(len);
    if side.is_left() {
        put(&region, 0, &pattern(len, 8));
        end.post(1, SendOp::Send, &region);
        end.post(2, SendOp::Send, &region);
        side.meet();
        end.done(1);
        end.done(2);
    } else {
        side.meet();
        for i in 0..2 {
            put(&region, 0, &vec![0; len]);
            end.recv_into(i, &region);
            assert_eq!(end.done(i).byte_len as usize, len);
            assert!(get(&region, 0, len) == pattern(len, 8));
        }
    }
    side.meet();
}

/// A receiver that is always one receive behind: slow, but everything arrives once.
fn drip_of_receives(side: &mut Side) {
    let count = side.many(500) as u64;
    let connect = ConnectConfig { min_rnr_timer: 1, ..ConnectConfig::default() };
    let mut end = side.end_with(&Shape { connect, ..Shape::default() });
    if side.is_left() {
        for i in 0..count {
            if i >= 64 {
                end.done(i - 64);
            }
            end.inline(i, SendOp::SendImm(i as u32), &[]);
        }
        end.all_done(count.saturating_sub(64)..count);
    } else {
        for i in 0..count {
            end.recv(i);
            assert_eq!(end.done(i).imm, Some(i as u32));
        }
        end.recv(count);
    }
    side.meet();
    quiet(&mut end.cq);
}
