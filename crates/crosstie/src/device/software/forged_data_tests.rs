//! A process of our own user that maps a segment and writes forged data into it on purpose. It can break its connections;
//! it cannot make the owner's process access memory that is not registered.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use crosstie_testkit::child;
use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, Reply, Request, hex};
use super::cq_ring::NewCqe;
use super::ends::{End, next_completion as next};
use super::invalid_input_tests::shared;
use super::layout::{
    CqeKind, IN_PLACE, MAGIC, QPS_AT, QpBlock, QpNum, RECV_HEAD_WORDS, REGIONS_AT, RegionEntry, RegionKey,
    RequestWord, short_epoch,
};
use crate::device::*;
use crate::local::socket::{self, ListeningSocket, Socket};
use crate::memory::segment::{Segment, SharedSlice};

/// A peer that does not follow the protocol: it writes to the segment that it has mapped.
struct Attacker {
    socket: Socket,
    #[expect(dead_code, reason = "the device that it says it is")]
    listener: ListeningSocket,
    segment: Arc<Segment>,
    regions: SharedSlice<RegionEntry>,
}

impl Attacker {
    fn connect(gid: &[u8; 16]) -> Attacker {
        let socket = control::connect(gid).unwrap();
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = u128::from(std::process::id()) << 64 | u128::from(NEXT.fetch_add(1, Relaxed));
        let listener = control::listen(&own.to_be_bytes()).unwrap();
        let hello = Request { gid: own.to_be_bytes(), a: MAGIC, ..Request::new(Request::HELLO) };
        socket::send(&socket, hello.as_bytes(), &[], &[]).unwrap();
        let mut reply = Reply::new_zeroed();
        let (_, mut files) = socket::receive_with_files(&socket, reply.as_mut_bytes(), &mut []).unwrap();
        let segment = Arc::new(Segment::open(files.pop().unwrap(), reply.value).unwrap());
        let regions = SharedSlice::new(&segment, REGIONS_AT, RegionKey::INDICES as usize).unwrap();
        Attacker { socket, listener, segment, regions }
    }

    /// Makes `key` a region in place of 64 bytes at `addr`, with all access rights.
    fn forge_region(&self, key: u32, addr: u64) {
        let entry = &self.regions[RegionKey::from_bits(key).index() as usize];
        entry.access.store(Access::ALL.bits(), Relaxed);
        entry.addr.store(addr, Relaxed);
        entry.len.store(64, Relaxed);
        entry.offset.store(IN_PLACE, Relaxed);
        entry.key.store(key, Relaxed);
    }

    fn call(&self, request: &Request, payload: &[u8]) -> u32 {
        socket::send(&self.socket, request.as_bytes(), payload, &[]).unwrap();
        let mut reply = Reply::new_zeroed();
        socket::receive(&self.socket, reply.as_mut_bytes(), &mut [0; 64]).unwrap();
        reply.status
    }
}

/// Runs as the attacker when the next test starts it in a child process; does nothing in an ordinary run.
#[test]
fn attacker_process() {
    let Some(task) = child::task() else { return };
    let (gid, victim) = task.split_once(' ').unwrap();
    let gid = u128::from_str_radix(gid, 16).unwrap().to_be_bytes();
    let addr: u64 = victim.parse().unwrap();
    let attacker = Attacker::connect(&gid);
    let key = RegionKey::first(RegionKey::INDICES - 1).bits();
    attacker.forge_region(key, addr);
    for (kind, a, payload) in [
        (Request::READ, 8, &[][..]),
        (Request::WRITE, 8, b"forged!!"),
        (Request::COMPARE_SWAP, 7, &[]),
        (Request::FETCH_ADD, 1, &[]),
    ] {
        let status = attacker.call(&Request { key, addr, a, b: 9, ..Request::new(kind) }, payload);
        assert_eq!(status, Reply::NO_SUCH_REGION, "request {kind}");
    }
}

#[test]
fn service_refuses_a_region_that_only_the_segment_knows() {
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let victim = AtomicU64::new(7);
    let task = format!("{} {}", hex(&device.address().gid), victim.as_ptr().expose_provenance());
    let attacker = child::command(attacker_process, &task).output().unwrap();
    assert!(attacker.status.success(), "{}", String::from_utf8_lossy(&attacker.stderr));
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

#[test]
fn receive_between_devices_of_one_process_goes_to_registered_memory_only() {
    let [mut near, mut far] = End::pair(&QpConfig::default());
    let target = far.pd.allocate(4096, Access::ALL).unwrap();
    let victim = AtomicU64::new(7);
    let addr = victim.as_ptr().expose_provenance() as u64;
    far.qp.post_recv(&RecvWr { wr_id: 1, sges: &[target.sge(0..64).unwrap()] }).unwrap();

    let attacker = Attacker::connect(&far.device.address().gid);
    attacker.forge_region(target.remote().rkey, addr);
    let blocks: SharedSlice<QpBlock> =
        SharedSlice::new(&attacker.segment, QPS_AT, QpNum::INDICES as usize).unwrap();
    let block = &blocks[QpNum::from_bits(far.qp.qp_num()).index() as usize];
    let slots: SharedSlice<AtomicU64> =
        SharedSlice::new(&attacker.segment, block.owner_line.recv_at.load(Relaxed), 8).unwrap();
    assert_eq!(slots[RECV_HEAD_WORDS].load(Relaxed), target.remote().addr);
    slots[RECV_HEAD_WORDS].store(addr, Relaxed);

    near.qp.post(&SendWr::new(2, SendOp::Send, Data::Inline(b"forged!!")).signaled()).unwrap();
    let received = far.next();
    assert_eq!((received.wr_id, received.status), (1, Status::LocalProtection));
    assert_eq!(near.next().status, Status::RemoteOperation);
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

#[test]
fn write_between_devices_of_one_process_goes_to_registered_memory_only() {
    let [mut near, far] = End::pair(&QpConfig::default());
    let target = far.pd.allocate(4096, Access::ALL).unwrap();
    let victim = AtomicU64::new(7);
    let addr = victim.as_ptr().expose_provenance() as u64;
    Attacker::connect(&far.device.address().gid).forge_region(target.remote().rkey, addr);
    let remote = RemoteAddr { addr, rkey: target.remote().rkey };
    let write = SendWr::new(2, SendOp::Write(remote), Data::Inline(b"forged!!"));
    near.qp.post(&write.signaled()).unwrap();
    assert_eq!(near.next().status, Status::RemoteAccess);
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

/// A sender remembers where it wrote last. That counts only as long as the region is the same.
#[test]
fn short_write_goes_to_the_region_that_exists_now() {
    // How the region goes: its owner gives it back, or it has gone long ago and another region has its key (and another tag).
    for is_another in [false, true] {
        let [mut near, mut far] = End::pair(&QpConfig::default());
        let target = far.pd.allocate(4096, Access::ALL).unwrap();
        let remote = target.remote().at(0);
        let mut write = |bytes: &[u8]| {
            far.qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
            let wr = SendWr::new(2, SendOp::WriteImm(remote, 3), Data::Inline(bytes));
            near.qp.post(&wr.signaled()).unwrap();
            near.next().status
        };
        for _ in 0..3 {
            assert_eq!(write(b"expected"), Status::Success);
        }
        let mut kept = Some(target);
        if is_another {
            let key = RegionKey::from_bits(remote.rkey);
            let entry = &shared(&far.device).regions.table[key.index() as usize];
            entry.addr.store(remote.addr | 1 << 48, Relaxed);
        } else {
            kept = None;
        }
        assert_eq!(write(b"too late"), Status::RemoteAccess, "another region: {is_another}");
        if let Some(target) = kept {
            let mut bytes = [0; 8];
            target.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"expected");
        }
    }
}

#[test]
fn deferred_request_does_not_use_a_region_that_only_the_segment_knows() {
    let [mut near, mut far] = End::pair(&QpConfig::default());
    let source = near.pd.allocate(4096, Access::ALL).unwrap();
    let key = source.remote().rkey;
    let sges = [source.sge(0..8).unwrap()];
    // The peer has no receive, so the request is deferred.
    near.qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
    drop(source);
    let attacker = Attacker::connect(&near.device.address().gid);
    attacker.regions[RegionKey::from_bits(key).index() as usize].key.store(key, Relaxed);
    let target = far.pd.allocate(4096, Access::ALL).unwrap();
    far.qp.post_recv(&RecvWr { wr_id: 2, sges: &[target.sge(0..64).unwrap()] }).unwrap();
    assert_eq!(near.next().status, Status::LocalProtection);
}

#[test]
fn forged_completion_of_a_send_does_not_stop_later_sends() {
    let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig { depth: 64 }).unwrap();
    let forge = |qp_num: u32, epoch: u8| {
        let shared = shared(&device);
        let qp = shared.qps.get(qp_num).unwrap();
        let forged = NewCqe {
            kind: CqeKind::Send,
            opcode: Opcode::Send,
            status: Status::Success,
            request: RequestWord::of_send(77),
            qp_num,
            byte_len: 0,
            detail: 1_000_000,
            has_imm: false,
            epoch,
        };
        qp.send_cq.ring.push(&AtomicU64::new(crate::ring::reservation::IDLE), &forged).unwrap();
    };
    let mut ud = pd.create_ud(&QpConfig::default(), &cq, &cq, None).unwrap();
    ud.activate(1).unwrap();
    forge(ud.qp_num(), short_epoch(shared(&device).qps.get(ud.qp_num()).unwrap().epoch()));
    assert_eq!(next(&mut cq).wr_id, 77);
    let to = pd.create_ah(&device.address()).unwrap();
    ud.post(&to, ud.qp_num(), 1, &SendWr::new(1, SendOp::Send, Data::Inline(b"x")).signaled()).unwrap();
    assert_eq!(next(&mut cq).wr_id, 1);

    let mut rc = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let to = rc.address();
    rc.connect(&to, &ConnectConfig::default()).unwrap();
    forge(rc.qp_num(), short_epoch(shared(&device).qps.get(rc.qp_num()).unwrap().epoch()));
    assert_eq!(next(&mut cq).wr_id, 77);
    let target = pd.allocate(64, Access::ALL).unwrap();
    let write = SendWr::new(2, SendOp::Write(target.remote().at(0)), Data::Inline(b"x"));
    rc.post(&write.signaled()).unwrap();
    assert_eq!(next(&mut cq).wr_id, 2);
}
