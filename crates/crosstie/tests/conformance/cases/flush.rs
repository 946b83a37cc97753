//! After an error: everything ends, in order, and nothing else is touched.

use crosstie::device::{Data, QpState, RecvWr, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::side::{End, Side, get, next, quiet, take, until, word};

cases!("flush":
    unsignaled_failure_shows, sends_flush_in_order, receives_flush_in_order, receives_of_the_responder_flush,
    what_was_done_before_the_error_stays, posts_in_error_flush, error_of_one_is_not_the_others, reset_leads_out,
);

/// A request that never succeeds.
fn bad_write(end: &mut End, wr_id: u64, remote: RemoteMemory, signaled: bool) {
    let mut wr = SendWr::new(wr_id, SendOp::Write(remote.at(remote.len)), Data::Inline(&[1; 8]));
    wr.signaled = signaled;
    end.qp.post(&wr).unwrap();
}

/// Failure shows whether asked for or not.
fn unsignaled_failure_shows(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        bad_write(&mut end, 5, remote, false);
        end.ends(5, &[Status::RemoteAccess]);
        assert_eq!(end.qp.state(), QpState::Error);
        quiet(&mut end.cq);
    }
    side.meet();
}

/// Behind the one that failed, signaled or not, each is flushed in turn.
fn sends_flush_in_order(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        end.inline(0, SendOp::Write(remote.at(0)), &1u64.to_ne_bytes());
        bad_write(&mut end, 1, remote, false);
        for i in 2..20u64 {
            let wr = SendWr::new(i, SendOp::Write(remote.at(0)), Data::Inline(&[9; 8]));
            end.qp.post(&if i % 3 == 0 { wr.signaled() } else { wr }).unwrap();
        }
        end.ends(0, &[Status::Success]);
        end.ends(1, &[Status::RemoteAccess]);
        end.all_flushed(2..20);
        quiet(&mut end.cq);
    }
    side.meet();
    if !side.is_left() {
        assert_eq!(word(&region, 0), 1, "what was flushed took no effect");
    }
    side.meet();
}

/// The receives of the side that failed are flushed in the order they were posted.
fn receives_flush_in_order(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        (100..120).for_each(|i| end.recv(i));
        bad_write(&mut end, 1, remote, true);
        let completions = take(&mut end.cq, 21);
        let failed = completions.iter().position(|c| c.wr_id == 1).expect("the failed request");
        assert_eq!(completions[failed].status, Status::RemoteAccess);
        let flushed: Vec<u64> = completions.iter().filter(|c| c.wr_id != 1).map(|c| c.wr_id).collect();
        assert_eq!(flushed, (100..120).collect::<Vec<_>>());
        assert!(completions.iter().all(|c| c.wr_id == 1 || c.status == Status::Flushed), "{completions:?}");
    }
    side.meet();
}

/// A request that breaks the rules takes the responder's queue pair down with it: its receives end, in order, none with
/// success. The first may carry the cause instead of [`Status::Flushed`].
fn receives_of_the_responder_flush(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        side.meet();
        end.inline(0, SendOp::SendImm(3), &[]);
        end.done(0);
        bad_write(&mut end, 1, remote, true);
        end.ends(1, &[Status::RemoteAccess]);
    } else {
        (0..10).for_each(|i| end.recv(i));
        side.meet();
        assert_eq!(end.done(0).imm, Some(3));
        for i in 1..10 {
            let flushed = next(&mut end.cq);
            assert_eq!(flushed.wr_id, i, "{flushed:?}");
            let cause = i == 1 && !flushed.status.is_success();
            assert!(cause || flushed.status == Status::Flushed, "{flushed:?}");
        }
        until("ERR", || end.qp.state() == QpState::Error);
        end.inline(50, SendOp::Send, &[]);
        end.ends(50, &[Status::Flushed]);
    }
    side.meet();
}

/// Requests before the one that failed are done, and show as successes.
fn what_was_done_before_the_error_stays(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64 * 8);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        side.meet();
        for i in 0..64u64 {
            end.inline(i, SendOp::WriteImm(remote.at(8 * i), i as u32), &(i + 1).to_ne_bytes());
        }
        bad_write(&mut end, 64, remote, true);
        end.all_done(0..64);
        end.ends(64, &[Status::RemoteAccess]);
    } else {
        (0..64).for_each(|i| end.recv(i));
        side.meet();
        for i in 0..64 {
            assert_eq!(end.done(i).imm, Some(i as u32));
            assert_eq!(word(&region, 8 * i as usize), i + 1);
        }
    }
    side.meet();
}

/// ERR takes requests and receives, and flushes them.
fn posts_in_error_flush(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        end.qp.fail().unwrap();
        for i in 0..5 {
            end.qp.post(&SendWr::new(i, SendOp::Write(remote.at(0)), Data::Inline(&[1]))).unwrap();
            end.ends(i, &[Status::Flushed]);
        }
        for i in 5..10 {
            end.qp.post_recv(&RecvWr { wr_id: i, sges: &[] }).unwrap();
            end.ends(i, &[Status::Flushed]);
        }
        quiet(&mut end.cq);
    }
    side.meet();
    assert_eq!(get(&region, 0, 64), [0; 64]);
}

/// Connections break one by one, also between the same two devices and in the same completion queue.
fn error_of_one_is_not_the_others(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    let mut other = end.pd.create_rc(&Default::default(), &end.cq, &end.cq, None).unwrap();
    side.connect(&mut other, &Default::default());
    if side.is_left() {
        bad_write(&mut end, 1, remote, true);
        end.ends(1, &[Status::RemoteAccess]);
        for i in 2..50u64 {
            let op = SendOp::Write(remote.at(8));
            other.post(&SendWr::new(i, op, Data::Inline(&i.to_ne_bytes())).signaled()).unwrap();
            let completion = next(&mut end.cq);
            let (status, qp_num) = (completion.status, completion.qp_num);
            assert_eq!((status, qp_num, completion.wr_id), (Status::Success, other.qp_num(), i));
        }
        assert_eq!((end.qp.state(), other.state()), (QpState::Error, QpState::ReadyToSend));
    }
    side.meet();
    if !side.is_left() {
        assert_eq!(word(&region, 8), 49);
        assert_eq!(other.state(), QpState::ReadyToSend);
    }
    side.meet();
}

/// Out of ERR by RESET, on both sides, and connected again: what broke the earlier connection does not reach the new one,
/// however late word of it comes.
fn reset_leads_out(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    for round in 0..side.many(100) as u32 {
        if side.is_left() {
            bad_write(&mut end, 1, remote, true);
            end.ends(1, &[Status::RemoteAccess]);
        }
        side.meet();
        end.qp.reset().unwrap();
        side.meet();
        side.connect(&mut end.qp, &Default::default());
        if side.is_left() {
            end.inline(2, SendOp::WriteImm(remote.at(0), round), &[round as u8; 8]);
            end.done(2);
        } else {
            end.recv(3);
            assert_eq!(end.done(3).imm, Some(round));
            assert_eq!(get(&region, 0, 8), [round as u8; 8]);
        }
    }
    side.meet();
}
