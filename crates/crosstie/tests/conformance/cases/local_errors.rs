//! Requests whose local memory is invalid. Soft-RoCE reports some of these as a failure of the queue pair
//! ([`Status::LocalQpOperation`]).

use crosstie::device::{Access, Data, Mr, QpState, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::participant::{Participant, TestQp, assert_no_completion, read_bytes, wait_until, whole_region};

cases!("local_errors":
    send_from_another_domain, write_from_another_domain, read_into_another_domain, read_without_local_write,
    atomic_without_local_write, receive_without_local_write, receive_into_another_domain,
    reading_local_memory_needs_no_right, region_dropped_while_its_request_waits,
);

/// The left participant's request must fail because of its local memory, and break only its own connection.
fn fails(side: &mut Participant, op: fn(RemoteMemory) -> SendOp, memory: fn(&Participant, &TestQp) -> Mr) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        let local = memory(side, &end);
        end.qp.post(&SendWr::new(1, op(remote), Data::Regions(&[whole_region(&local)]))).unwrap();
        end.inline(2, SendOp::Write(remote.at(0)), &[9; 8]);
        end.expect_status(1, &side.allowed_statuses(Status::LocalProtection, &[Status::LocalQpOperation]));
        end.expect_status(2, &[Status::Flushed]);
        assert_eq!(end.qp.state(), QpState::Error);
        assert_eq!(read_bytes(&local, 0, 8), [0; 8]);
    }
    side.wait_for_other();
    // A READ or atomic fails when its result arrives; by then the atomic, and the WRITE behind it, may have taken effect.
    if matches!(op(remote), SendOp::Send | SendOp::Write(_)) {
        assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    }
    side.wait_for_other();
}

fn foreign(side: &Participant, _: &TestQp) -> Mr {
    side.device.alloc_pd().unwrap().allocate(8, Access::ALL).unwrap()
}

fn unwritable(_: &Participant, end: &TestQp) -> Mr {
    end.pd.allocate(8, Access::REMOTE_READ).unwrap()
}

/// The receiver's receive may remain unused.
fn send_from_another_domain(side: &mut Participant) {
    fails(side, |_| SendOp::Send, foreign);
}

fn write_from_another_domain(side: &mut Participant) {
    fails(side, |remote| SendOp::Write(remote.at(0)), foreign);
}

fn read_into_another_domain(side: &mut Participant) {
    fails(side, |remote| SendOp::Read(remote.at(0)), foreign);
}

fn read_without_local_write(side: &mut Participant) {
    fails(side, |remote| SendOp::Read(remote.at(0)), unwritable);
}

fn atomic_without_local_write(side: &mut Participant) {
    fails(side, |remote| SendOp::FetchAdd { remote: remote.at(0), add: 1 }, unwritable);
}

/// A receive whose memory is not writable: the receiver gets a local protection error, the sender a remote operation error.
fn receive_without_local_write(side: &mut Participant) {
    bad_receive(side, |end, _| end.pd.allocate(64, Access::REMOTE_READ).unwrap());
}

fn receive_into_another_domain(side: &mut Participant) {
    bad_receive(side, |_, side| side.device.alloc_pd().unwrap().allocate(64, Access::ALL).unwrap());
}

fn bad_receive(side: &mut Participant, memory: fn(&TestQp, &Participant) -> Mr) {
    let mut end = side.connected_qp();
    if side.is_left() {
        side.wait_for_other();
        end.inline(1, SendOp::Send, &[1; 64]);
        end.expect_status(1, &[Status::RemoteOperation]);
        assert_eq!(end.qp.state(), QpState::Error);
    } else {
        let region = memory(&end, side);
        end.recv_into(1, &region);
        end.recv(2);
        side.wait_for_other();
        end.expect_status(1, &side.allowed_statuses(Status::LocalProtection, &[Status::LocalQpOperation]));
        end.expect_status(2, &[Status::Flushed]);
        wait_until("ERR", || end.qp.state() == QpState::Error);
        assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    }
    side.wait_for_other();
}

/// A region without any access right can still be the source of a SEND.
fn reading_local_memory_needs_no_right(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(64);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        let closed = end.pd.allocate(64, Access::empty()).unwrap();
        side.wait_for_other();
        end.post(1, SendOp::Send, &closed);
        end.post(2, SendOp::Write(remote.at(0)), &closed);
        end.expect_success(1);
        end.expect_success(2);
    } else {
        let buffer = end.region(64);
        end.recv_into(1, &buffer);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 64);
    }
    side.wait_for_other();
}

/// A region is dropped while a request that names it waits for a receive: the request fails, and the memory is not sent.
fn region_dropped_while_its_request_waits(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        let region = end.region(64);
        end.post(1, SendOp::Send, &region);
        drop(region);
        side.wait_for_other();
        end.expect_status(1, &side.allowed_statuses(Status::LocalProtection, &[Status::LocalQpOperation]));
    } else {
        let buffer = end.region(64);
        side.wait_for_other();
        end.recv_into(1, &buffer);
        assert_no_completion(&mut end.cq);
    }
    side.wait_for_other();
}
