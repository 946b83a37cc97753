//! Requests whose own memory is wrong. Soft-RoCE calls some of it a failure of the queue pair
//! ([`Status::LocalQpOperation`]).

use crosstie::device::{Access, Data, Mr, QpState, RemoteMemory, SendOp, SendWr, Status};

use super::cases;
use crate::side::{End, Side, get, quiet, until, whole};

cases!("local_errors":
    send_from_another_domain, write_from_another_domain, read_into_another_domain, read_without_local_write,
    atomic_without_local_write, receive_without_local_write, receive_into_another_domain,
    reading_local_memory_needs_no_right, region_dropped_while_its_request_waits,
);

/// The left's request must fail by its own memory, and break only its own connection.
fn fails(side: &mut Side, op: fn(RemoteMemory) -> SendOp, memory: fn(&Side, &End) -> Mr) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        let local = memory(side, &end);
        end.qp.post(&SendWr::new(1, op(remote), Data::Regions(&[whole(&local)]))).unwrap();
        end.inline(2, SendOp::Write(remote.at(0)), &[9; 8]);
        end.ends(1, &side.endings(Status::LocalProtection, &[Status::LocalQpOperation]));
        end.ends(2, &[Status::Flushed]);
        assert_eq!(end.qp.state(), QpState::Error);
        assert_eq!(get(&local, 0, 8), [0; 8]);
    }
    side.meet();
    // What fetches fails when its result comes; by then the atomic, and the WRITE behind it, may have taken effect.
    if matches!(op(remote), SendOp::Send | SendOp::Write(_)) {
        assert_eq!(get(&region, 0, 64), [0; 64]);
    }
    side.meet();
}

fn foreign(side: &Side, _: &End) -> Mr {
    side.device.alloc_pd().unwrap().allocate(8, Access::ALL).unwrap()
}

fn unwritable(_: &Side, end: &End) -> Mr {
    end.pd.allocate(8, Access::REMOTE_READ).unwrap()
}

/// The receiver may find its receive untouched.
fn send_from_another_domain(side: &mut Side) {
    fails(side, |_| SendOp::Send, foreign);
}

fn write_from_another_domain(side: &mut Side) {
    fails(side, |remote| SendOp::Write(remote.at(0)), foreign);
}

fn read_into_another_domain(side: &mut Side) {
    fails(side, |remote| SendOp::Read(remote.at(0)), foreign);
}

fn read_without_local_write(side: &mut Side) {
    fails(side, |remote| SendOp::Read(remote.at(0)), unwritable);
}

fn atomic_without_local_write(side: &mut Side) {
    fails(side, |remote| SendOp::FetchAdd { remote: remote.at(0), add: 1 }, unwritable);
}

/// A receive that may not be written: the receiver is told of its memory, the sender that the responder failed on its own
/// side.
fn receive_without_local_write(side: &mut Side) {
    bad_receive(side, |end, _| end.pd.allocate(64, Access::REMOTE_READ).unwrap());
}

fn receive_into_another_domain(side: &mut Side) {
    bad_receive(side, |_, side| side.device.alloc_pd().unwrap().allocate(64, Access::ALL).unwrap());
}

fn bad_receive(side: &mut Side, memory: fn(&End, &Side) -> Mr) {
    let mut end = side.end();
    if side.is_left() {
        side.meet();
        end.inline(1, SendOp::Send, &[1; 64]);
        end.ends(1, &[Status::RemoteOperation]);
        assert_eq!(end.qp.state(), QpState::Error);
    } else {
        let region = memory(&end, side);
        end.recv_into(1, &region);
        end.recv(2);
        side.meet();
        end.ends(1, &side.endings(Status::LocalProtection, &[Status::LocalQpOperation]));
        end.ends(2, &[Status::Flushed]);
        until("ERR", || end.qp.state() == QpState::Error);
        assert_eq!(get(&region, 0, 64), [0; 64]);
    }
    side.meet();
}

/// A region without any right can still be sent from.
fn reading_local_memory_needs_no_right(side: &mut Side) {
    let mut end = side.end();
    let region = end.region(64);
    let remote: RemoteMemory = side.swap(&region.remote());
    if side.is_left() {
        let closed = end.pd.allocate(64, Access::empty()).unwrap();
        side.meet();
        end.post(1, SendOp::Send, &closed);
        end.post(2, SendOp::Write(remote.at(0)), &closed);
        end.done(1);
        end.done(2);
    } else {
        let buffer = end.region(64);
        end.recv_into(1, &buffer);
        side.meet();
        assert_eq!(end.done(1).byte_len, 64);
    }
    side.meet();
}

/// A region dropped under a request that waits for a receive: the request fails, nothing of the memory is sent.
fn region_dropped_while_its_request_waits(side: &mut Side) {
    let mut end = side.end();
    if side.is_left() {
        let region = end.region(64);
        end.post(1, SendOp::Send, &region);
        drop(region);
        side.meet();
        end.ends(1, &side.endings(Status::LocalProtection, &[Status::LocalQpOperation]));
    } else {
        let buffer = end.region(64);
        side.meet();
        end.recv_into(1, &buffer);
        quiet(&mut end.cq);
    }
    side.meet();
}
