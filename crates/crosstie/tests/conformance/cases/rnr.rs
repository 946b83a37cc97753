//! Receiver not ready (RNR): a message without a matching receive is retried.

use crosstie::device::{ConnectConfig, QpState, RemoteMemory, SendOp, SrqConfig, Status};

use super::cases;
use crate::participant::{
    Participant, QUIET_PERIOD, TestConfig, TestQp, assert_no_completion, expect_success, pattern,
    post_srq_recv, read_bytes, read_word, write_bytes,
};

cases!("rnr":
    send_waits_for_a_receive, write_imm_waits_for_a_receive, write_imm_waits_on_an_empty_shared_queue,
    messages_keep_their_order_while_they_wait, requests_do_not_overtake_a_waiting_message, limited_retries_end_in_an_error,
    limited_retries_are_enough_when_a_receive_comes, long_messages_wait_too, one_receive_at_a_time,
);

/// A SEND before the receive is posted completes when it is.
fn send_waits_for_a_receive(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    if side.is_left() {
        end.inline(1, SendOp::SendImm(1), &[7; 64]);
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
        end.expect_success(1);
    } else {
        side.wait_for_other();
        end.recv_into(2, &region);
        assert_eq!(end.expect_success(2).imm, Some(1));
        assert_eq!(read_bytes(&region, 0, 64), [7; 64]);
    }
    side.wait_for_other();
}

/// A WRITE+IMM before the receive is posted. Its bytes may be written earlier.
fn write_imm_waits_for_a_receive(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::WriteImm(remote.at(0), 1), &[7; 64]);
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
        end.expect_success(1);
    } else {
        side.wait_for_other();
        end.recv(2);
        let received = end.expect_success(2);
        assert_eq!((received.imm, received.byte_len), (Some(1), 64));
        assert_eq!(read_bytes(&region, 0, 64), [7; 64]);
    }
    side.wait_for_other();
}

/// The same with a shared receive queue that is empty at first.
fn write_imm_waits_on_an_empty_shared_queue(side: &mut Participant) {
    let mut end = TestQp::unconnected(&side.device, &TestConfig::default());
    let mut srq = end.pd.create_srq(&SrqConfig::default()).unwrap();
    end.qp = end.pd.create_rc(&Default::default(), &end.cq, &end.cq, Some(&srq)).unwrap();
    side.connect(&mut end.qp, &ConnectConfig::default());
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        (0..10).for_each(|i| end.inline(i, SendOp::WriteImm(remote.at(0), i as u32), &[i as u8; 64]));
        assert_no_completion(&mut end.cq);
        side.wait_for_other();
        end.expect_all_success(0..10);
    } else {
        side.wait_for_other();
        for i in 0..10 {
            post_srq_recv(&mut srq, i);
            let received = expect_success(&mut end.cq, i);
            assert_eq!((received.imm, received.qp_num), (Some(i as u32), end.qp.qp_num()));
        }
        assert_eq!(read_bytes(&region, 0, 64), [9; 64]);
    }
    side.wait_for_other();
}

/// Several waiting messages arrive in order.
fn messages_keep_their_order_while_they_wait(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        for i in 0..60 {
            let op = if i % 2 == 0 { SendOp::SendImm(i) } else { SendOp::WriteImm(remote.at(0), i) };
            end.inline(u64::from(i), op, &[]);
        }
        side.wait_for_other();
        end.expect_all_success(0..60);
    } else {
        side.wait_for_other();
        (0..60).for_each(|i| end.recv(i));
        (0..60).for_each(|i| assert_eq!(end.expect_success(i).imm, Some(i as u32)));
    }
    side.wait_for_other();
}

/// A WRITE or an atomic behind a SEND that waits takes no effect before it.
fn requests_do_not_overtake_a_waiting_message(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.inline(2, SendOp::Write(remote.at(0)), &1u64.to_ne_bytes());
        let scratch = end.region(8);
        end.post(3, SendOp::FetchAdd { remote: remote.at(8), add: 1 }, &scratch);
        side.wait_for_other();
        end.expect_success(1);
        end.expect_success(2);
        end.expect_success(3);
        side.wait_for_other();
    } else {
        side.wait_for_other();
        std::thread::sleep(QUIET_PERIOD);
        assert_eq!([read_word(&region, 0), read_word(&region, 8)], [0, 0]);
        end.recv(1);
        end.expect_success(1);
        side.wait_for_other();
        assert_eq!([read_word(&region, 0), read_word(&region, 8)], [1, 1]);
    }
    side.wait_for_other();
}

/// A limited number of retries ends in an error, and the queue pair goes to ERR. The peer's queue pair is not affected.
fn limited_retries_end_in_an_error(side: &mut Participant) {
    let connect = ConnectConfig { rnr_retry: 2, min_rnr_timer: 12, ..ConnectConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { connect, ..TestConfig::default() });
    if side.is_left() {
        end.inline(1, SendOp::Send, &[]);
        end.inline(2, SendOp::Send, &[]);
        end.expect_status(1, &[Status::RnrRetryExceeded]);
        end.expect_status(2, &[Status::Flushed]);
        assert_eq!(end.qp.state(), QpState::Error);
        side.wait_for_other();
    } else {
        side.wait_for_other();
        assert_eq!(end.qp.state(), QpState::ReadyToSend);
        end.recv(5);
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// Retries count anew for each message, and one that succeeds in time is a success. 6 retries of 164 ms are nearly a second.
fn limited_retries_are_enough_when_a_receive_comes(side: &mut Participant) {
    let connect = ConnectConfig { rnr_retry: 6, min_rnr_timer: 28, ..ConnectConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { connect, ..TestConfig::default() });
    if side.is_left() {
        side.wait_for_other();
        end.inline(1, SendOp::SendImm(1), &[]);
        end.expect_success(1);
    } else {
        side.wait_for_other();
        std::thread::sleep(QUIET_PERIOD);
        end.recv(1);
        end.expect_success(1);
    }
    side.wait_for_other();
}

/// A message of many packets waits as well as a short one.
fn long_messages_wait_too(side: &mut Participant) {
    let mut end = side.connected_qp();
    let len = 300_000;
    let region = end.region(len);
    if side.is_left() {
        write_bytes(&region, 0, &pattern(len, 8));
        end.post(1, SendOp::Send, &region);
        end.post(2, SendOp::Send, &region);
        side.wait_for_other();
        end.expect_success(1);
        end.expect_success(2);
    } else {
        side.wait_for_other();
        for i in 0..2 {
            write_bytes(&region, 0, &vec![0; len]);
            end.recv_into(i, &region);
            assert_eq!(end.expect_success(i).byte_len as usize, len);
            assert!(read_bytes(&region, 0, len) == pattern(len, 8));
        }
    }
    side.wait_for_other();
}

/// A receiver that is always one receive behind: slow, but everything arrives once.
fn one_receive_at_a_time(side: &mut Participant) {
    let count = side.repetitions(500) as u64;
    let connect = ConnectConfig { min_rnr_timer: 1, ..ConnectConfig::default() };
    let mut end = side.connected_qp_with(&TestConfig { connect, ..TestConfig::default() });
    if side.is_left() {
        for i in 0..count {
            if i >= 64 {
                end.expect_success(i - 64);
            }
            end.inline(i, SendOp::SendImm(i as u32), &[]);
        }
        end.expect_all_success(count.saturating_sub(64)..count);
    } else {
        for i in 0..count {
            end.recv(i);
            assert_eq!(end.expect_success(i).imm, Some(i as u32));
        }
        end.recv(count);
    }
    side.wait_for_other();
    assert_no_completion(&mut end.cq);
}
