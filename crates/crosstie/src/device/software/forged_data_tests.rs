//! A process of our own user that maps a segment and writes forged data into it on purpose. It can break its connections;
//! it cannot make the owner's process access memory that is not registered.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::{FromZeros, IntoBytes};

use super::control::{self, Reply, Request, hex};
use super::cq_ring::NewCqe;
use super::layout::{
    CqeKind, IN_PLACE, MAGIC, QPS_AT, QpBlock, QpNum, RECV_HEAD_WORDS, REGIONS_AT, RegionEntry, RegionKey,
    RequestWord, short_epoch,
};
use crate::device::*;
use crate::local::socket::{self, ListeningSocket, Socket};
use crate::memory::segment::{Segment, SharedSlice};

const ROLE: &str = "CROSSTIE_FORGED_DATA";
const TIMEOUT: Duration = Duration::from_secs(20);

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
    let Ok(role) = std::env::var(ROLE) else { return };
    let (gid, victim) = role.split_once(' ').unwrap();
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
    if std::env::var_os(ROLE).is_some() {
        return;
    }
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let victim = AtomicU64::new(7);
    let attacker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "device::software::forged_data_tests::attacker_process", "--nocapture"])
        .env(ROLE, format!("{} {}", hex(&device.address().gid), victim.as_ptr().expose_provenance()))
        .output()
        .unwrap();
    assert!(attacker.status.success(), "{}", String::from_utf8_lossy(&attacker.stderr));
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

struct Pair {
    near: Device,
    near_pd: Pd,
    near_cq: Cq,
    near_qp: RcQp,
    far: Device,
    far_pd: Pd,
    far_cq: Cq,
    far_qp: RcQp,
}

impl Pair {
    /// Two devices of this process, connected.
    fn new() -> Pair {
        let open = || Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let (near, far) = (open(), open());
        let (near_pd, far_pd) = (near.alloc_pd().unwrap(), far.alloc_pd().unwrap());
        let near_cq = near.create_cq(&CqConfig { depth: 64 }).unwrap();
        let far_cq = far.create_cq(&CqConfig { depth: 64 }).unwrap();
        let mut near_qp = near_pd.create_rc(&QpConfig::default(), &near_cq, &near_cq, None).unwrap();
        let mut far_qp = far_pd.create_rc(&QpConfig::default(), &far_cq, &far_cq, None).unwrap();
        near_qp.connect(&far_qp.address(), &ConnectConfig::default()).unwrap();
        far_qp.connect(&near_qp.address(), &ConnectConfig::default()).unwrap();
        Pair { near, near_pd, near_cq, near_qp, far, far_pd, far_cq, far_qp }
    }
}

fn next(cq: &mut Cq) -> Completion {
    let begun = Instant::now();
    let mut got = None;
    while cq.poll(1, |completion| got = Some(*completion)).unwrap() == 0 {
        assert!(begun.elapsed() < TIMEOUT, "no completion");
    }
    got.unwrap()
}

#[test]
fn receive_between_devices_of_one_process_goes_to_registered_memory_only() {
    let mut pair = Pair::new();
    let target = pair.far_pd.allocate(4096, Access::ALL).unwrap();
    let victim = AtomicU64::new(7);
    let addr = victim.as_ptr().expose_provenance() as u64;
    pair.far_qp.post_recv(&RecvWr { wr_id: 1, sges: &[target.sge(0..64).unwrap()] }).unwrap();

    let attacker = Attacker::connect(&pair.far.address().gid);
    attacker.forge_region(target.remote().rkey, addr);
    let blocks: SharedSlice<QpBlock> =
        SharedSlice::new(&attacker.segment, QPS_AT, QpNum::INDICES as usize).unwrap();
    let block = &blocks[QpNum::from_bits(pair.far_qp.qp_num()).index() as usize];
    let slots: SharedSlice<AtomicU64> =
        SharedSlice::new(&attacker.segment, block.owner_line.recv_at.load(Relaxed), 8).unwrap();
    assert_eq!(slots[RECV_HEAD_WORDS].load(Relaxed), target.remote().addr);
    slots[RECV_HEAD_WORDS].store(addr, Relaxed);

    pair.near_qp.post(&SendWr::new(2, SendOp::Send, Data::Inline(b"forged!!")).signaled()).unwrap();
    let received = next(&mut pair.far_cq);
    assert_eq!((received.wr_id, received.status), (1, Status::LocalProtection));
    assert_eq!(next(&mut pair.near_cq).status, Status::RemoteOperation);
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

#[test]
fn write_between_devices_of_one_process_goes_to_registered_memory_only() {
    let mut pair = Pair::new();
    let target = pair.far_pd.allocate(4096, Access::ALL).unwrap();
    let victim = AtomicU64::new(7);
    let addr = victim.as_ptr().expose_provenance() as u64;
    Attacker::connect(&pair.far.address().gid).forge_region(target.remote().rkey, addr);
    let remote = RemoteAddr { addr, rkey: target.remote().rkey };
    let write = SendWr::new(2, SendOp::Write(remote), Data::Inline(b"forged!!"));
    pair.near_qp.post(&write.signaled()).unwrap();
    assert_eq!(next(&mut pair.near_cq).status, Status::RemoteAccess);
    assert_eq!(victim.load(Relaxed), 7, "memory that is not registered was written");
}

/// A sender remembers where it wrote last. That counts only as long as the region is the same.
#[test]
fn short_write_goes_to_the_region_that_exists_now() {
    // How the region goes: its owner gives it back, or it has gone long ago and another region has its key (and another tag).
    for is_another in [false, true] {
        let mut pair = Pair::new();
        let target = pair.far_pd.allocate(4096, Access::ALL).unwrap();
        let remote = target.remote().at(0);
        let mut write = |bytes: &[u8]| {
            pair.far_qp.post_recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
            let wr = SendWr::new(2, SendOp::WriteImm(remote, 3), Data::Inline(bytes));
            pair.near_qp.post(&wr.signaled()).unwrap();
            next(&mut pair.near_cq).status
        };
        for _ in 0..3 {
            assert_eq!(write(b"expected"), Status::Success);
        }
        let mut kept = Some(target);
        if is_another {
            let key = RegionKey::from_bits(remote.rkey);
            let entry = &super::invalid_input_tests::shared(&pair.far).regions.table[key.index() as usize];
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
    let mut pair = Pair::new();
    let source = pair.near_pd.allocate(4096, Access::ALL).unwrap();
    let key = source.remote().rkey;
    let sges = [source.sge(0..8).unwrap()];
    // The peer has no receive, so the request is deferred.
    pair.near_qp.post(&SendWr::new(1, SendOp::Send, Data::Regions(&sges)).signaled()).unwrap();
    drop(source);
    let attacker = Attacker::connect(&pair.near.address().gid);
    attacker.regions[RegionKey::from_bits(key).index() as usize].key.store(key, Relaxed);
    let target = pair.far_pd.allocate(4096, Access::ALL).unwrap();
    pair.far_qp.post_recv(&RecvWr { wr_id: 2, sges: &[target.sge(0..64).unwrap()] }).unwrap();
    assert_eq!(next(&mut pair.near_cq).status, Status::LocalProtection);
}

#[test]
fn forged_completion_of_a_send_does_not_stop_later_sends() {
    let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_cq(&CqConfig { depth: 64 }).unwrap();
    let forge = |qp_num: u32, epoch: u8| {
        let shared = super::invalid_input_tests::shared(&device);
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
    forge(
        ud.qp_num(),
        short_epoch(super::invalid_input_tests::shared(&device).qps.get(ud.qp_num()).unwrap().epoch()),
    );
    assert_eq!(next(&mut cq).wr_id, 77);
    let to = pd.create_ah(&device.address()).unwrap();
    ud.post(&to, ud.qp_num(), 1, &SendWr::new(1, SendOp::Send, Data::Inline(b"x")).signaled()).unwrap();
    assert_eq!(next(&mut cq).wr_id, 1);

    let mut rc = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
    let to = rc.address();
    rc.connect(&to, &ConnectConfig::default()).unwrap();
    forge(
        rc.qp_num(),
        short_epoch(super::invalid_input_tests::shared(&device).qps.get(rc.qp_num()).unwrap().epoch()),
    );
    assert_eq!(next(&mut cq).wr_id, 77);
    let target = pd.allocate(64, Access::ALL).unwrap();
    let write = SendWr::new(2, SendOp::Write(target.remote().at(0)), Data::Inline(b"x"));
    rc.post(&write.signaled()).unwrap();
    assert_eq!(next(&mut cq).wr_id, 2);
}
