//! Requests that the responder refuses: the requester gets the cause, no memory changes, and both queue pairs go to ERR.
//!
//! If the queue pair lacks the right, not the region, the status is [`Status::RemoteInvalidRequest`]; some devices report
//! [`Status::RemoteAccess`].

use crosstie::device::{
    Access, ConnectConfig, Data, QpState, RecvWr, RemoteAddr, RemoteMemory, SendOp, SendWr, Status,
};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, next_completion, pattern, read_bytes, wait_until, write_bytes,
};

cases!("remote_errors":
    write_with_a_bad_key, write_imm_with_a_bad_key, read_with_a_bad_key, atomic_with_a_bad_key,
    key_of_a_dropped_region, write_beyond_the_end, read_beyond_the_end, atomic_beyond_the_end, write_before_the_beginning,
    address_that_wraps_around, region_without_remote_write, region_without_remote_read,
    region_without_remote_atomic, queue_pair_without_remote_write, queue_pair_without_remote_read,
    queue_pair_without_remote_atomic, region_of_another_domain, misaligned_compare_swap, misaligned_fetch_add,
    receive_too_small, receive_without_memory,
);

/// What the right participant allows and what the left participant tries.
struct Attempt {
    region: Access,
    queue_pair: Access,
    op: fn(RemoteMemory) -> SendOp,
    status: Status,
    /// Statuses that devices report instead.
    or: &'static [Status],
}

impl Default for Attempt {
    fn default() -> Attempt {
        Attempt {
            region: Access::ALL,
            queue_pair: Access::ALL,
            op: |r| SendOp::Write(r.at(0)),
            status: Status::RemoteAccess,
            or: &[],
        }
    }
}

impl Attempt {
    /// The left participant's request is refused and its queue pair goes to ERR. The right participant's memory does not
    /// change, none of its receives succeeds, and its queue pair goes to ERR too.
    fn is_refused(&self, side: &mut Participant) {
        let connect = ConnectConfig { access: self.queue_pair, ..ConnectConfig::default() };
        let mut end = side.connected_qp_with(&TestConfig { connect, ..TestConfig::default() });
        if side.is_left() {
            let remote: RemoteMemory = side.receive();
            let op = (self.op)(remote);
            expect_refusal(&mut end, op, &side.allowed_statuses(self.status, self.or));
            side.wait_for_other();
        } else {
            let region = end.pd.allocate(256, self.region).unwrap();
            write_bytes(&region, 0, &pattern(256, 1));
            end.recv(1);
            end.recv(2);
            side.send(&region.remote());
            expect_broken_responder(&mut end);
            side.wait_for_other();
            assert_eq!(read_bytes(&region, 0, 256), pattern(256, 1), "it was refused, yet something changed");
        }
        side.wait_for_other();
    }
}

/// Posts a request of eight bytes that must be refused, and checks that it had no effect.
fn expect_refusal(end: &mut TestQp, op: SendOp, allowed: &[Status]) {
    let local = end.region(8);
    end.post(1, op, &local);
    end.inline(2, SendOp::Send, &[]);
    end.expect_status(1, allowed);
    end.expect_status(2, &[Status::Flushed]);
    assert_eq!(end.qp.state(), QpState::Error);
    assert_eq!(read_bytes(&local, 0, 8), [0; 8], "a READ that was refused brought bytes");
}

/// The two receives (1 and 2) of a responder whose peer broke the connection complete, neither with success.
fn expect_broken_responder(end: &mut TestQp) {
    for id in [1, 2] {
        let completion = next_completion(&mut end.cq);
        assert_eq!(completion.wr_id, id);
        assert!(!completion.status.is_success(), "{completion:?}");
    }
    wait_until("ERR", || end.qp.state() == QpState::Error);
}

fn other_key(remote: RemoteMemory) -> RemoteAddr {
    RemoteAddr { rkey: remote.rkey ^ 0x0055_aa00, ..remote.at(0) }
}

fn write_with_a_bad_key(side: &mut Participant) {
    Attempt { op: |r| SendOp::Write(other_key(r)), ..Attempt::default() }.is_refused(side);
}

/// The receive that it would have taken is not completed with success.
fn write_imm_with_a_bad_key(side: &mut Participant) {
    Attempt { op: |r| SendOp::WriteImm(other_key(r), 1), ..Attempt::default() }.is_refused(side);
}

fn read_with_a_bad_key(side: &mut Participant) {
    Attempt { op: |r| SendOp::Read(other_key(r)), ..Attempt::default() }.is_refused(side);
}

fn atomic_with_a_bad_key(side: &mut Participant) {
    Attempt { op: |r| SendOp::FetchAdd { remote: other_key(r), add: 1 }, ..Attempt::default() }
        .is_refused(side);
}

/// The key of a dropped region is invalid, also after another region was allocated in its place.
fn key_of_a_dropped_region(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        end.inline(0, SendOp::Write(remote.at(0)), &[1; 8]);
        end.expect_success(0);
        side.wait_for_other();
        side.wait_for_other();
        expect_refusal(&mut end, SendOp::Write(remote.at(0)), &[Status::RemoteAccess]);
        side.wait_for_other();
    } else {
        let region = end.region(4096);
        end.recv(1);
        end.recv(2);
        side.send(&region.remote());
        side.wait_for_other();
        drop(region);
        let successor = end.region(4096);
        side.wait_for_other();
        expect_broken_responder(&mut end);
        side.wait_for_other();
        assert_eq!(read_bytes(&successor, 0, 4096), [0; 4096]);
    }
    side.wait_for_other();
}

/// The last byte of the request is one too far.
fn write_beyond_the_end(side: &mut Participant) {
    Attempt { op: |r| SendOp::Write(r.at(256 - 7)), ..Attempt::default() }.is_refused(side);
}

fn read_beyond_the_end(side: &mut Participant) {
    Attempt { op: |r| SendOp::Read(r.at(256 - 7)), ..Attempt::default() }.is_refused(side);
}

fn atomic_beyond_the_end(side: &mut Participant) {
    Attempt { op: |r| SendOp::FetchAdd { remote: r.at(256), add: 1 }, ..Attempt::default() }.is_refused(side);
}

/// The first byte of the request is one too early.
fn write_before_the_beginning(side: &mut Participant) {
    Attempt { op: |r| SendOp::Write(r.at(u64::MAX)), ..Attempt::default() }.is_refused(side);
}

/// An address so high that adding the length passes zero.
fn address_that_wraps_around(side: &mut Participant) {
    Attempt { op: |r| SendOp::Write(RemoteAddr { addr: u64::MAX - 3, rkey: r.rkey }), ..Attempt::default() }
        .is_refused(side);
}

fn region_without_remote_write(side: &mut Participant) {
    let region = Access::ALL.difference(Access::REMOTE_WRITE);
    Attempt { region, ..Attempt::default() }.is_refused(side);
}

fn region_without_remote_read(side: &mut Participant) {
    let region = Access::ALL.difference(Access::REMOTE_READ);
    Attempt { region, op: |r| SendOp::Read(r.at(0)), ..Attempt::default() }.is_refused(side);
}

fn region_without_remote_atomic(side: &mut Participant) {
    let region = Access::ALL.difference(Access::REMOTE_ATOMIC);
    let op = |r: RemoteMemory| SendOp::CompareSwap { remote: r.at(0), compare: 0, swap: 1 };
    Attempt { region, op, ..Attempt::default() }.is_refused(side);
}

const NOT_ALLOWED: Attempt = Attempt {
    region: Access::ALL,
    queue_pair: Access::ALL,
    op: |r| SendOp::Write(r.at(0)),
    status: Status::RemoteInvalidRequest,
    or: &[Status::RemoteAccess],
};

fn queue_pair_without_remote_write(side: &mut Participant) {
    let queue_pair = Access::ALL.difference(Access::REMOTE_WRITE);
    Attempt { queue_pair, ..NOT_ALLOWED }.is_refused(side);
}

fn queue_pair_without_remote_read(side: &mut Participant) {
    let queue_pair = Access::ALL.difference(Access::REMOTE_READ);
    let op = |r: RemoteMemory| SendOp::Read(r.at(0));
    Attempt { queue_pair, op, ..NOT_ALLOWED }.is_refused(side);
}

fn queue_pair_without_remote_atomic(side: &mut Participant) {
    let queue_pair = Access::ALL.difference(Access::REMOTE_ATOMIC);
    let op = |r: RemoteMemory| SendOp::FetchAdd { remote: r.at(0), add: 1 };
    Attempt { queue_pair, op, ..NOT_ALLOWED }.is_refused(side);
}

/// A key is valid only for the queue pairs of the region's protection domain.
fn region_of_another_domain(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        let remote: RemoteMemory = side.receive();
        expect_refusal(&mut end, SendOp::Write(remote.at(0)), &[Status::RemoteAccess]);
        side.wait_for_other();
    } else {
        let other = side.device.alloc_pd().unwrap();
        let region = other.allocate(64, Access::ALL).unwrap();
        end.recv(1);
        end.recv(2);
        side.send(&region.remote());
        expect_broken_responder(&mut end);
        side.wait_for_other();
        assert_eq!(read_bytes(&region, 0, 64), [0; 64]);
    }
    side.wait_for_other();
}

fn misaligned_compare_swap(side: &mut Participant) {
    let op = |r: RemoteMemory| SendOp::CompareSwap { remote: r.at(12), compare: 0, swap: 1 };
    Attempt { op, status: Status::RemoteInvalidRequest, ..Attempt::default() }.is_refused(side);
}

fn misaligned_fetch_add(side: &mut Participant) {
    let op = |r: RemoteMemory| SendOp::FetchAdd { remote: r.at(1), add: 1 };
    Attempt { op, status: Status::RemoteInvalidRequest, ..Attempt::default() }.is_refused(side);
}

/// A message longer than its receive: the receiver gets a length error, the sender a refusal. Some devices report the same
/// status to both; Soft-RoCE reports a failure of the receive. The memory of the receive may be written.
fn receive_too_small(side: &mut Participant) {
    too_small(side, 63);
}

/// The same where the receive has no memory at all.
fn receive_without_memory(side: &mut Participant) {
    too_small(side, 0);
}

fn too_small(side: &mut Participant, room: usize) {
    let mut end = side.connected_qp();
    let region = end.region(128);
    if side.is_left() {
        side.wait_for_other();
        end.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&[region.sge(0..64).unwrap()]))).unwrap();
        end.inline(2, SendOp::Send, &[]);
        end.expect_status(
            1,
            &side.allowed_statuses(Status::RemoteInvalidRequest, &[Status::RemoteOperation]),
        );
        end.expect_status(2, &[Status::Flushed]);
    } else {
        write_bytes(&region, 0, &[0x11; 128]);
        let sges = [region.sge(0..room).unwrap()];
        end.qp.post_recv(&RecvWr { wr_id: 1, sges: &sges }).unwrap();
        end.recv(2);
        side.wait_for_other();
        let or = &[Status::RemoteInvalidRequest, Status::LocalQpOperation];
        end.expect_status(1, &side.allowed_statuses(Status::LocalLength, or));
        end.expect_status(2, &[Status::Flushed]);
        wait_until("ERR", || end.qp.state() == QpState::Error);
        assert_eq!(read_bytes(&region, room, 128 - room), vec![0x11; 128 - room]);
    }
    side.wait_for_other();
}
