//! Memory regions: allocated by the library, registered in place, overlapping, and with concurrent access.

use crosstie::device::{
    Access, ConnectConfig, Cq, Data, Mr, Pd, QpConfig, RcQp, RecvWr, RemoteMemory, SendOp, SendWr, Status,
};

use super::cases;
use crate::participant::{
    Participant, TestConfig, TestQp, expect_success, pattern, read_bytes, read_word, take_completions,
    wait_until, whole_region, write_bytes,
};

cases!("memory":
    allocated_memory_is_zeroed_and_aligned, ranges_outside_a_region_are_refused, in_place_as_target,
    in_place_as_source_and_result, in_place_as_receive, in_place_to_the_byte, overlapping_regions,
    keys_differ, atomics_of_both_sides_add_up, compare_swap_is_a_lock, writes_of_the_owner_are_read,
);

/// Memory that the library did not allocate, registered while it lives.
struct InPlace {
    // Dropped before the bytes.
    mr: Mr,
    #[expect(dead_code, reason = "the region points into it")]
    bytes: Box<[u64]>,
}

impl InPlace {
    /// Of `len` bytes that begin `skew` bytes into a word.
    fn new(pd: &Pd, len: usize, skew: usize, access: Access) -> InPlace {
        let mut bytes = vec![0u64; (len + skew).div_ceil(8)].into_boxed_slice();
        let start = bytes.as_mut_ptr().cast::<u8>().wrapping_add(skew);
        // SAFETY: `start..start + len` is inside the heap block that `bytes` owns and keeps until after the region is
        // gone (fields drop in order); nothing uses `bytes` while the region exists.
        let mr = unsafe { pd.register(start, len, access) }.expect("register");
        InPlace { mr, bytes }
    }
}

/// Allocated memory is aligned to a page and zeroed, even if an earlier region used it.
fn allocated_memory_is_zeroed_and_aligned(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    for len in [1, 4096, 100_000] {
        for _ in 0..3 {
            let region = end.region(len);
            assert_eq!((region.len(), region.as_ptr() as usize % 4096), (len, 0));
            assert!(read_bytes(&region, 0, len).iter().all(|b| *b == 0));
            write_bytes(&region, 0, &vec![0xff; len]);
            assert_eq!((region.remote().len as usize, region.access()), (len, Access::ALL));
        }
    }
}

/// Scatter/gather entries and copies outside a region are refused.
fn ranges_outside_a_region_are_refused(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let region = end.region(100);
    assert_eq!(region.sge(0..100).unwrap().len(), 100);
    assert!(region.sge(100..100).unwrap().is_empty());
    let backwards = core::ops::Range { start: 50, end: 40 };
    for range in [0..101, 100..101, backwards, 0..usize::MAX, usize::MAX - 1..usize::MAX] {
        assert!(region.sge(range.clone()).is_err(), "{range:?}");
    }
    assert!(region.write(99, &[0; 2]).is_err() && region.write(usize::MAX, &[0; 2]).is_err());
    assert!(region.read(99, &mut [0; 2]).is_err() && region.read(101, &mut []).is_err());
    region.write(99, &[5]).unwrap();
    assert_eq!(read_bytes(&region, 99, 1), [5]);
}

/// The peer can access memory registered in place with every operation.
fn in_place_as_target(side: &mut Participant) {
    let mut end = side.connected_qp();
    let target = InPlace::new(&end.pd, 70_000, 0, Access::ALL);
    let remote: RemoteMemory = side.exchange(&target.mr.remote());
    if side.is_left() {
        let region = end.region(70_000);
        write_bytes(&region, 0, &pattern(70_000, 1));
        side.wait_for_other();
        end.post(1, SendOp::WriteImm(remote.at(0), 1), &region);
        end.expect_success(1);
        write_bytes(&region, 0, &[0; 70_000]);
        end.post(2, SendOp::Read(remote.at(0)), &region);
        end.expect_success(2);
        assert!(read_bytes(&region, 0, 70_000) == pattern(70_000, 1));
        let sges = [region.sge(0..8).unwrap()];
        let ops = [
            SendOp::FetchAdd { remote: remote.at(64), add: 7 },
            SendOp::CompareSwap { remote: remote.at(72), compare: 0, swap: 1 },
        ];
        for (id, op) in ops.into_iter().enumerate() {
            let at = 64 + 8 * id;
            end.qp.post(&SendWr::new(id as u64, op, Data::Regions(&sges)).signaled()).unwrap();
            end.expect_success(id as u64);
            assert_eq!(read_bytes(&region, 0, 8), pattern(70_000, 1)[at..at + 8]);
        }
        end.inline(5, SendOp::Write(remote.at(69_999)), &[0x77]);
        end.expect_success(5);
        side.wait_for_other();
    } else {
        end.recv(1);
        side.wait_for_other();
        end.expect_success(1);
        assert!(read_bytes(&target.mr, 80, 69_919) == pattern(70_000, 1)[80..69_999]);
        side.wait_for_other();
        let former = u64::from_ne_bytes(pattern(70_000, 1)[64..72].try_into().unwrap());
        assert_eq!(read_word(&target.mr, 64), former.wrapping_add(7));
        assert_eq!(read_bytes(&target.mr, 72, 8), pattern(70_000, 1)[72..80]);
        assert_eq!(read_bytes(&target.mr, 69_999, 1), [0x77]);
    }
    side.wait_for_other();
}

/// Memory registered in place can be the source of sends and the destination of READ and atomic results.
fn in_place_as_source_and_result(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(10_000);
    let remote: RemoteMemory = side.exchange(&region.remote());
    if side.is_left() {
        let mine = InPlace::new(&end.pd, 10_000, 0, Access::LOCAL_WRITE);
        write_bytes(&mine.mr, 0, &pattern(10_000, 2));
        side.wait_for_other();
        end.post(1, SendOp::Send, &mine.mr);
        end.expect_success(1);
        end.post(2, SendOp::Write(remote.at(0)), &mine.mr);
        end.expect_success(2);
        write_bytes(&mine.mr, 0, &[0; 10_000]);
        end.post(3, SendOp::Read(remote.at(0)), &mine.mr);
        end.expect_success(3);
        assert!(read_bytes(&mine.mr, 0, 10_000) == pattern(10_000, 2));
        let op = SendOp::FetchAdd { remote: remote.at(8), add: 1 };
        let sges = [mine.mr.sge(800..808).unwrap()];
        end.qp.post(&SendWr::new(4, op, Data::Regions(&sges)).signaled()).unwrap();
        end.expect_success(4);
        assert_eq!(read_bytes(&mine.mr, 800, 8), pattern(10_000, 2)[8..16]);
    } else {
        let buffer = end.region(10_000);
        end.recv_into(1, &buffer);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 10_000);
        assert!(read_bytes(&buffer, 0, 10_000) == pattern(10_000, 2));
    }
    side.wait_for_other();
}

/// Memory registered in place can be the memory of a receive.
fn in_place_as_receive(side: &mut Participant) {
    let mut end = side.connected_qp();
    if side.is_left() {
        let region = end.region(5000);
        write_bytes(&region, 0, &pattern(5000, 3));
        side.wait_for_other();
        end.post(1, SendOp::Send, &region);
        end.inline(2, SendOp::SendImm(4), &[8; 100]);
        end.expect_success(1);
        end.expect_success(2);
    } else {
        let mine = InPlace::new(&end.pd, 6000, 0, Access::LOCAL_WRITE);
        let other = end.region(50);
        end.recv_into(1, &mine.mr);
        let sges = [whole_region(&other), mine.mr.sge(5500..6000).unwrap()];
        end.qp.post_recv(&RecvWr { wr_id: 2, sges: &sges }).unwrap();
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 5000);
        assert_eq!(end.expect_success(2).byte_len, 100);
        assert!(read_bytes(&mine.mr, 0, 5000) == pattern(5000, 3));
        assert_eq!(
            (read_bytes(&other, 0, 50), read_bytes(&mine.mr, 5500, 51)),
            (vec![8; 50], [&[8; 50][..], &[0]].concat())
        );
    }
    side.wait_for_other();
}

/// Regions registered in place have exact bounds: they begin and end anywhere in a page.
fn in_place_to_the_byte(side: &mut Participant) {
    let mut end = side.connected_qp();
    let target = InPlace::new(&end.pd, 4097, 5, Access::ALL);
    let remote: RemoteMemory = side.exchange(&target.mr.remote());
    if side.is_left() {
        let region = end.region(4097);
        write_bytes(&region, 0, &pattern(4097, 4));
        side.wait_for_other();
        end.post(1, SendOp::WriteImm(remote.at(0), 0), &region);
        end.expect_success(1);
        // One byte beyond the region is refused, although the page is mapped.
        let sges = [region.sge(0..2).unwrap()];
        let wr = SendWr::new(2, SendOp::Write(remote.at(4096)), Data::Regions(&sges)).signaled();
        end.qp.post(&wr).unwrap();
        end.expect_status(2, &[Status::RemoteAccess]);
    } else {
        end.recv(1);
        side.wait_for_other();
        assert_eq!(end.expect_success(1).byte_len, 4097);
        assert!(read_bytes(&target.mr, 0, 4097) == pattern(4097, 4));
    }
    side.wait_for_other();
}

/// The same bytes may be registered twice; each key allows what its own registration allows.
fn overlapping_regions(side: &mut Participant) {
    let mut end = side.connected_qp();
    let open = InPlace::new(&end.pd, 4096, 0, Access::ALL);
    // SAFETY: a part of the block that `open` owns, which lives longer than this region (declared later, dropped first).
    let narrow = unsafe { end.pd.register(open.mr.as_ptr().wrapping_add(1024), 1024, Access::REMOTE_READ) };
    let narrow = narrow.expect("register");
    let wide: RemoteMemory = side.exchange(&open.mr.remote());
    let read_only: RemoteMemory = side.exchange(&narrow.remote());
    if side.is_left() {
        let region = end.region(1024);
        end.inline(1, SendOp::Write(wide.at(1500)), &[3; 100]);
        end.expect_success(1);
        end.post(2, SendOp::Read(read_only.at(0)), &region);
        end.expect_success(2);
        assert_eq!(read_bytes(&region, 476, 100), [3; 100]);
        end.inline(3, SendOp::Write(read_only.at(0)), &[4]);
        end.expect_status(3, &[Status::RemoteAccess]);
    }
    side.wait_for_other();
}

/// Live regions of a device have different keys.
fn keys_differ(side: &mut Participant) {
    let end = TestQp::unconnected(&side.device, &TestConfig::default());
    let regions: Vec<Mr> = (0..side.repetitions(500)).map(|_| end.region(64)).collect();
    let mut keys: Vec<u32> = regions.iter().map(|r| r.remote().rkey).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), regions.len());
}

/// Both sides add to one word at once, the left over the wire, the right through a connection to itself: nothing is
/// lost, and each sees the sum grow.
fn atomics_of_both_sides_add_up(side: &mut Participant) {
    let times = side.repetitions(2000) as u64;
    let mut end = side.connected_qp();
    let region = end.region(64);
    let (mut own, _echo) = loopback(&end);
    let remote: RemoteMemory = side.exchange(&region.remote());
    let (qp, remote) = if side.is_left() { (&mut end.qp, remote) } else { (&mut own, region.remote()) };
    let scratch = end.pd.allocate(8, Access::LOCAL_WRITE).unwrap();
    let mut former = None;
    for i in 0..times {
        let op = SendOp::FetchAdd { remote: remote.at(16), add: 1 };
        qp.post(&SendWr::new(i, op, Data::Regions(&[whole_region(&scratch)])).signaled()).unwrap();
        expect_success(&mut end.cq, i);
        let now = Some(read_word(&scratch, 0));
        assert!(now > former, "{now:?} after {former:?}");
        former = now;
    }
    side.wait_for_other();
    if !side.is_left() {
        assert_eq!(read_word(&region, 16), 2 * times);
    }
    side.wait_for_other();
}

/// A connection of a side to itself, in the domain and the completion queue of `end`.
fn loopback(end: &TestQp) -> (RcQp, RcQp) {
    let [mut one, mut other] =
        [(); 2].map(|()| end.pd.create_rc(&QpConfig::default(), &end.cq, &end.cq, None).unwrap());
    one.connect(&other.address(), &ConnectConfig::default()).unwrap();
    other.connect(&one.address(), &ConnectConfig::default()).unwrap();
    (one, other)
}

/// Of concurrent compare-and-swaps one succeeds: a lock built on it protects a plain counter.
fn compare_swap_is_a_lock(side: &mut Participant) {
    let times = side.repetitions(300) as u64;
    let mut end = side.connected_qp();
    let region = end.region(64);
    let (mut own, _echo) = loopback(&end);
    let remote: RemoteMemory = side.exchange(&region.remote());
    let (qp, remote) = if side.is_left() { (&mut end.qp, remote) } else { (&mut own, region.remote()) };
    let scratch = end.pd.allocate(16, Access::LOCAL_WRITE).unwrap();
    let run = |qp: &mut RcQp, cq: &mut Cq, op, at: usize| {
        qp.post(&SendWr::new(0, op, Data::Regions(&[scratch.sge(at..at + 8).unwrap()])).signaled()).unwrap();
        assert_eq!(take_completions(cq, 1)[0].status, Status::Success);
        read_word(&scratch, at)
    };
    for _ in 0..times {
        wait_until("the lock", || {
            let op = SendOp::CompareSwap { remote: remote.at(0), compare: 0, swap: 1 };
            run(qp, &mut end.cq, op, 0) == 0
        });
        let count = run(qp, &mut end.cq, SendOp::Read(remote.at(32)), 8);
        write_bytes(&scratch, 8, &(count + 1).to_ne_bytes());
        run(qp, &mut end.cq, SendOp::Write(remote.at(32)), 8);
        let op = SendOp::CompareSwap { remote: remote.at(0), compare: 1, swap: 0 };
        assert_eq!(run(qp, &mut end.cq, op, 0), 1, "the lock was mine");
    }
    side.wait_for_other();
    if !side.is_left() {
        assert_eq!(read_word(&region, 32), 2 * times);
    }
    side.wait_for_other();
}

/// A READ returns what the owner of the region wrote.
fn writes_of_the_owner_are_read(side: &mut Participant) {
    let mut end = side.connected_qp();
    let region = end.region(4096);
    let remote: RemoteMemory = side.exchange(&region.remote());
    for round in 0..20 {
        if side.is_left() {
            side.wait_for_other();
            end.post(round, SendOp::Read(remote.at(0)), &region);
            end.expect_success(round);
            assert!(read_bytes(&region, 0, 4096) == pattern(4096, round));
        } else {
            write_bytes(&region, 0, &pattern(4096, round));
            side.wait_for_other();
        }
        side.wait_for_other();
    }
}
