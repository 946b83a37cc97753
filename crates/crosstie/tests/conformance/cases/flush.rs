//! After an error, all requests of the queue pair complete, in order, and other queue pairs are not affected.

use crosstie::device::{Data, QpState, RecvWr, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::participant::{
    Participant, TestQp, assert_no_completion, next_completion, read_bytes, read_word, take_completions,
    wait_until,
};

cases!("flush":
    unsignaled_failure_shows, sends_flush_in_order, receives_flush_in_order, receives_of_the_responder_flush,
    what_was_done_before_the_error_stays, posts_in_error_flush, error_breaks_one_connection_only, reset_recovers_from_error,
);

/// A request that never succeeds.
fn bad_write(end: &mut TestQp, wr_id: u64, remote: RemoteMemory, signaled: bool) {
    let mut wr = SendWr::new(wr_id, SendOp::Write(remote.at(remote.len)), Data::Inline(&[1; 8]));
    wr.signal = signaled.into();
    end.qp.post(&wr).unwrap();
}

/// A failure produces a completion also for an unsignaled request.
fn unsignaled_failure_shows(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        bad_write(&mut end, 5, remote, false);
        end.expect_status(5, &[Status::RemoteAccess]);
        assert_eq!(end.qp.state(), QpState::Error);
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}

/// The requests behind the failed one, signaled or not, are flushed in order.
fn sends_flush_in_order(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.inline(0, SendOp::Write(remote.at(0)), &1u64.to_ne_bytes());
        bad_write(&mut end, 1, remote, false);
        for i in 2..20u64 {
            let wr = SendWr::new(i, SendOp::Write(remote.at(0)), Data::Inline(&[9; 8]));
            end.qp.post(&if i % 3 == 0 { wr.signaled() } else { wr }).unwrap();
        }
        end.expect_status(0, &[Status::Success]);
        end.expect_status(1, &[Status::RemoteAccess]);
        end.expect_all_flushed(2..20);
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
    if !side.is_left() {
        assert_eq!(read_word(&region, 0), 1, "what was flushed took no effect");
    }
    side.wait_for_other();
}

/// The receives of the side that failed are flushed in the order they were posted.
fn receives_flush_in_order(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        (100..120).for_each(|i| end.recv(i));
        bad_write(&mut end, 1, remote, true);
        let completions = take_completions(&mut end.cq, 21);
        let failed = completions.iter().position(|c| c.wr_id == 1).expect("the failed request");
        assert_eq!(completions[failed].status, Status::RemoteAccess);
        let flushed: Vec<u64> = completions.iter().filter(|c| c.wr_id != 1).map(|c| c.wr_id).collect();
        assert_eq!(flushed, (100..120).collect::<Vec<_>>());
        assert!(completions.iter().all(|c| c.wr_id == 1 || c.status == Status::Flushed), "{completions:?}");
    }
    side.wait_for_other();
}

/// An invalid request takes the responder's queue pair to ERR too: its receives complete in order, none with success. The
/// first may have the cause as status instead of [`Status::Flushed`].
fn receives_of_the_responder_flush(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        end.inline(0, SendOp::SendImm(3), &[]);
        end.expect_success(0);
        bad_write(&mut end, 1, remote, true);
        end.expect_status(1, &[Status::RemoteAccess]);
    } else {
        (0..10).for_each(|i| end.recv(i));
        side.wait_for_other();
        assert_eq!(end.expect_success(0).imm, Some(3));
        for i in 1..10 {
            let flushed = next_completion(&mut end.cq);
            assert_eq!(flushed.wr_id, i, "{flushed:?}");
            let cause = i == 1 && !flushed.status.is_success();
            assert!(cause || flushed.status == Status::Flushed, "{flushed:?}");
        }
        wait_until("ERR", || end.qp.state() == QpState::Error);
        end.inline(50, SendOp::Send, &[]);
        end.expect_status(50, &[Status::Flushed]);
    }
    side.wait_for_other();
}

/// Requests before the failed one have taken effect and complete with success.
fn what_was_done_before_the_error_stays(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64 * 8);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        side.wait_for_other();
        for i in 0..64u64 {
            end.inline(i, SendOp::WriteImm(remote.at(8 * i), i as u32), &(i + 1).to_ne_bytes());
        }
        bad_write(&mut end, 64, remote, true);
        end.expect_all_success(0..64);
        end.expect_status(64, &[Status::RemoteAccess]);
    } else {
        (0..64).for_each(|i| end.recv(i));
        side.wait_for_other();
        for i in 0..64 {
            assert_eq!(end.expect_success(i).imm, Some(i as u32));
            assert_eq!(read_word(&region, 8 * i as usize), i + 1);
        }
    }
    side.wait_for_other();
}

/// A queue pair in ERR accepts requests and receives, and flushes them.
fn posts_in_error_flush(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        end.qp.fail().unwrap();
        for i in 0..5 {
            end.qp.post(&SendWr::new(i, SendOp::Write(remote.at(0)), Data::Inline(&[1]))).unwrap();
            end.expect_status(i, &[Status::Flushed]);
        }
        for i in 5..10 {
            end.qp.post_recv(&RecvWr { wr_id: i, sges: &[] }).unwrap();
            end.expect_status(i, &[Status::Flushed]);
        }
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
    assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
}

/// An error breaks one connection only, also between the same two devices and with the same completion queue.
fn error_breaks_one_connection_only(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    let mut other = end.pd.create_rc(&Default::default(), &end.cq, &end.cq, None).unwrap();
    side.connect(&mut other, &Default::default());
    if side.is_left() {
        bad_write(&mut end, 1, remote, true);
        end.expect_status(1, &[Status::RemoteAccess]);
        for i in 2..50u64 {
            let op = SendOp::Write(remote.at(8));
            other.post(&SendWr::new(i, op, Data::Inline(&i.to_ne_bytes())).signaled()).unwrap();
            let completion = next_completion(&mut end.cq);
            let (status, qp_num) = (completion.status, completion.qp_num);
            assert_eq!((status, qp_num, completion.wr_id), (Status::Success, other.qp_num(), i));
        }
        assert_eq!((end.qp.state(), other.state()), (QpState::Error, QpState::ReadyToSend));
    }
    side.wait_for_other();
    if !side.is_left() {
        assert_eq!(read_word(&region, 8), 49);
        assert_eq!(other.state(), QpState::ReadyToSend);
    }
    side.wait_for_other();
}

/// Both queue pairs leave ERR by RESET and are connected again: a late notice about the earlier connection does not break the
/// new one.
fn reset_recovers_from_error(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for round in 0..side.repetitions(100) as u32 {
        if side.is_left() {
            bad_write(&mut end, 1, remote, true);
            end.expect_status(1, &[Status::RemoteAccess]);
        }
        side.wait_for_other();
        end.qp.reset().unwrap();
        side.wait_for_other();
        side.connect(&mut end.qp, &Default::default());
        if side.is_left() {
            end.inline(2, SendOp::WriteImm(remote.at(0), round), &[round as u8; 8]);
            end.expect_success(2);
        } else {
            end.recv(3);
            assert_eq!(end.expect_success(3).imm, Some(round));
            assert_eq!(read_bytes(&region, 0, 8), [round as u8; 8]);
        }
    }
    side.wait_for_other();
}
