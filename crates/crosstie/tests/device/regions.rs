//! Registered memory with an owner: in place, cached and described to a peer.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crosstie::device::*;
use crosstie::region::*;
use crosstie_testkit::rng;

const TIMEOUT: Duration = Duration::from_secs(60);

fn software() -> (Device, Arc<Pd>) {
    let device = Device::open_software(&software::Config { space: 256 << 20 }).unwrap();
    let pd = Arc::new(device.alloc_pd().unwrap());
    (device, pd)
}

/// One operation of a peer on its own connection.
fn access(
    owner: (&Device, &Pd),
    op: impl Fn(&RemoteRegion) -> SendOp,
    region: &RemoteRegion,
    bytes: &Mr,
) -> Status {
    let (device, pd) = software();
    let end = |device: &Device, pd: &Pd| {
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        qp.init(Access::ALL).unwrap();
        (cq, qp)
    };
    let (_cq, mut owner_qp) = end(owner.0, owner.1);
    let (mut cq, mut qp) = end(&device, &pd);
    owner_qp.connect(&qp.address(), &ConnectConfig::default()).unwrap();
    qp.connect(&owner_qp.address(), &ConnectConfig::default()).unwrap();
    let local = pd.allocate(bytes.len(), Access::ALL).unwrap();
    let mut copy = vec![0; bytes.len()];
    bytes.read(0, &mut copy).unwrap();
    local.write(0, &copy).unwrap();
    let sges = [local.sge(0..region.len() as usize).unwrap()];
    qp.post(&SendWr::new(1, op(region), Data::Regions(&sges)).signaled()).unwrap();
    let mut status = None;
    while status.is_none() {
        cq.poll(1, |completion| status = Some(completion.status)).unwrap();
        std::thread::yield_now();
    }
    local.read(0, &mut copy).unwrap();
    bytes.write(0, &copy).unwrap();
    status.unwrap()
}

#[test]
fn a_peer_reads_and_writes_owned_memory_in_place_until_it_is_given_back() {
    let (device, pd) = software();
    let bytes = pd.allocate(64, Access::ALL).unwrap();
    let memory: Vec<u32> = (0..1000).collect();
    let address = memory.as_ptr().addr();
    let region = OwnedRegion::register(&pd, memory, Access::ALL).unwrap();
    assert_eq!(region.mr().as_ptr().addr(), address, "registered in place");
    // What the peer receives.
    let encoded = region.mr().describe(&device.address()).encode();
    let remote = RemoteRegion::decode(&encoded).unwrap();
    assert_eq!((remote.len(), remote.rights(), remote.gid()), (4000, Rights::ALL, &device.address().gid));
    let slice = remote.slice(400, 64).unwrap();
    assert_eq!(access((&device, &pd), |r| SendOp::Read(r.into()), &slice, &bytes), Status::Success);
    let mut words = [0; 64];
    bytes.read(0, &mut words).unwrap();
    assert_eq!(words[..8], [100, 0, 0, 0, 101, 0, 0, 0]);
    bytes.write(0, &[0xFF; 64]).unwrap();
    assert_eq!(access((&device, &pd), |r| SendOp::Write(r.into()), &slice, &bytes), Status::Success);
    let memory = region.into_memory(TIMEOUT).unwrap();
    assert_eq!(memory.as_ptr().addr(), address, "the same memory");
    assert_eq!(memory[99..117].iter().filter(|word| **word == u32::MAX).count(), 16);
    assert_eq!((memory[99], memory[116]), (99, 116));
    let refused = access((&device, &pd), |r| SendOp::Write(r.into()), &slice, &bytes);
    assert_eq!(refused, Status::RemoteAccess);
    // The same memory has another key when it is registered again.
    let again = OwnedRegion::register(&pd, memory, Access::ALL).unwrap();
    assert_eq!(again.mr().as_ptr().addr(), address);
    let refused = access((&device, &pd), |r| SendOp::Read(r.into()), &slice, &bytes);
    assert_eq!(refused, Status::RemoteAccess);
}

#[test]
fn rights_of_a_region_are_enforced_by_its_owner_and_named_in_its_descriptor() {
    let (device, pd) = software();
    let bytes = pd.allocate(8, Access::ALL).unwrap();
    let region = OwnedRegion::register(&pd, vec![0u64; 1], Access::REMOTE_READ).unwrap();
    let remote = region.mr().describe(&device.address());
    assert_eq!(remote.rights(), Rights { read: true, write: false, atomic: false });
    assert_eq!(access((&device, &pd), |r| SendOp::Read(r.into()), &remote, &bytes), Status::Success);
    assert_eq!(access((&device, &pd), |r| SendOp::Write(r.into()), &remote, &bytes), Status::RemoteAccess);
}

#[test]
fn memory_that_cannot_be_registered_is_handed_back() {
    let (_device, pd) = software();
    let memory: Box<[u8]> = Box::from([1, 2, 3]);
    let refused = OwnedRegion::register(&pd, memory, Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(refused.error, DeviceError::BadAddress(_)), "{refused:?}");
    assert_eq!(*refused.memory, [1, 2, 3]);
}

/// Counts how often the memory is freed.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

// SAFETY: the vector's memory, which nobody else accesses.
unsafe impl StableMemory for Counted {
    fn bytes(&mut self) -> *mut [u8] {
        self.0.bytes()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

#[test]
fn an_owner_is_dropped_exactly_once() {
    let (_device, pd) = software();
    let freed = Arc::new(AtomicUsize::new(0));
    let memory = || Counted(vec![0; 100], freed.clone());
    drop(OwnedRegion::register(&pd, memory(), Access::ALL).unwrap());
    assert_eq!(freed.load(SeqCst), 1);
    let back = OwnedRegion::register(&pd, memory(), Access::ALL).unwrap().into_memory(TIMEOUT).unwrap();
    assert_eq!(freed.load(SeqCst), 1);
    drop(back);
    assert_eq!(freed.load(SeqCst), 2);
    drop(OwnedRegion::register(&pd, memory(), Access::REMOTE_WRITE).unwrap_err());
    assert_eq!(freed.load(SeqCst), 3);
}

fn buffers(count: usize, len: usize) -> Vec<Arc<SharedBuffer>> {
    (0..count).map(|_| Arc::new(SharedBuffer::zeroed(len))).collect()
}

#[test]
fn the_cache_evicts_the_least_recently_used_idle_region_under_each_limit() {
    let (_device, pd) = software();
    for config in [
        RegionCacheConfig { max_regions: 3, ..RegionCacheConfig::default() },
        RegionCacheConfig { max_bytes: 3 * 4096 + 100, ..RegionCacheConfig::default() },
    ] {
        let cache = RegionCache::new(&pd, config);
        let all = buffers(5, 4096);
        for buffer in &all[..3] {
            cache.get(buffer, Access::LOCAL_WRITE).unwrap();
        }
        let used = cache.get(&all[0], Access::LOCAL_WRITE).unwrap();
        let key = used.mr().remote().rkey;
        cache.get(&all[1], Access::LOCAL_WRITE).unwrap();
        // Number 0 is in use and 1 was used after 2, so 2 goes first, then 1, and 0 never.
        cache.get(&all[3], Access::LOCAL_WRITE).unwrap();
        assert_eq!(all.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2, 2, 1, 2, 1]);
        cache.get(&all[4], Access::LOCAL_WRITE).unwrap();
        assert_eq!(all.iter().map(Arc::strong_count).collect::<Vec<_>>(), [2, 1, 1, 2, 2]);
        let counters = cache.counters();
        assert_eq!((counters.hits, counters.misses, counters.evictions), (2, 5, 2));
        assert_eq!((counters.regions, counters.bytes), (3, 3 * 4096));
        assert_eq!(cache.get(&all[0], Access::LOCAL_WRITE).unwrap().mr().remote().rkey, key);
        assert_eq!(cache.evict_idle(), 2);
        assert_eq!((cache.counters().regions, cache.counters().bytes), (1, 4096));
        drop(used);
        assert_eq!(cache.evict_idle(), 1);
        assert_eq!((cache.counters().regions, cache.counters().bytes), (0, 0));
        assert!(all.iter().all(|buffer| Arc::strong_count(buffer) == 1), "the memory is ours alone again");
    }
}

#[test]
fn a_cache_whose_regions_are_all_in_use_refuses_more_and_names_the_limit() {
    let (_device, pd) = software();
    let cache = RegionCache::new(&pd, RegionCacheConfig { max_regions: 2, max_bytes: 10_000 });
    let all = buffers(3, 4096);
    let _used: Vec<_> = all[..2].iter().map(|b| cache.get(b, Access::LOCAL_WRITE).unwrap()).collect();
    let refused = cache.get(&all[2], Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(
        refused,
        RegionCacheError::Full { regions: 2, bytes: 8192, asked: 4096, limit: "max_regions" }
    ));
    let large = Arc::new(SharedBuffer::zeroed(10_001));
    let other = RegionCache::new(&pd, RegionCacheConfig { max_regions: 2, max_bytes: 10_000 });
    let refused = other.get(&large, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(refused, RegionCacheError::Full { regions: 0, limit: "max_bytes", .. }), "{refused}");
}

#[test]
fn memory_shared_for_reading_is_never_registered_for_writing() {
    let (device, pd) = software();
    let cache = RegionCache::new(&pd, RegionCacheConfig::default());
    let weights = Arc::new(vec![0.5f32; 1000]);
    for access in [Access::LOCAL_WRITE, Access::ALL, Access::REMOTE_READ | Access::REMOTE_ATOMIC] {
        assert!(matches!(cache.get(&weights, access), Err(RegionCacheError::NotWritable(_))));
    }
    let region = cache.get(&weights, Access::REMOTE_READ).unwrap();
    let remote = region.mr().describe(&device.address()).slice(0, 8).unwrap();
    let bytes = pd.allocate(8, Access::ALL).unwrap();
    assert_eq!(access((&device, &pd), |r| SendOp::Write(r.into()), &remote, &bytes), Status::RemoteAccess);
    assert_eq!(access((&device, &pd), |r| SendOp::Read(r.into()), &remote, &bytes), Status::Success);
    // The program cannot write it through the region either.
    assert!(region.mr().write(0, &[1; 4]).is_err());
    assert_eq!(weights[0], 0.5);
}

#[test]
fn a_region_is_reused_for_the_same_rights_only() {
    let (_device, pd) = software();
    let cache = RegionCache::new(&pd, RegionCacheConfig::default());
    let buffer = Arc::new(SharedBuffer::zeroed(4096));
    let local = cache.get(&buffer, Access::LOCAL_WRITE).unwrap();
    let open = cache.get(&buffer, Access::ALL).unwrap();
    assert_eq!((local.mr().access(), open.mr().access()), (Access::LOCAL_WRITE, Access::ALL));
    assert_eq!(cache.get(&buffer, Access::LOCAL_WRITE).unwrap().mr().remote(), local.mr().remote());
    assert_eq!(cache.counters().regions, 2);
}

/// A part of a pool of pages.
struct Part(Arc<SharedBuffer>, std::ops::Range<usize>);

// SAFETY: a part of memory that fulfils the contract, and that is kept alive.
unsafe impl SharedMemory for Part {
    const WRITABLE: bool = true;

    fn bytes(&self) -> *mut [u8] {
        let start = self.0.bytes().cast::<u8>().wrapping_add(self.1.start);
        std::ptr::slice_from_raw_parts_mut(start, self.1.len())
    }
}

#[test]
fn ranges_inside_a_registered_region_are_found() {
    let (_device, pd) = software();
    let cache = RegionCache::new(&pd, RegionCacheConfig::default());
    let pool = Arc::new(SharedBuffer::zeroed(16 * 4096));
    let start = pool.bytes().cast::<u8>();
    assert!(cache.find(start, 1, Access::LOCAL_WRITE).is_none());
    let whole = cache.get(&pool, Access::LOCAL_WRITE).unwrap();
    let page = cache.find(start.wrapping_add(3 * 4096), 4096, Access::LOCAL_WRITE).unwrap();
    assert_eq!((page.offset(), page.len()), (3 * 4096, 4096));
    assert_eq!(page.mr().remote(), whole.mr().remote());
    assert_eq!(page.sge(0..4096).unwrap().len(), 4096);
    assert_eq!(page.sge(1..4097).unwrap_err(), OutOfRegion { offset: 1, len: 4096, region: 4096 });
    for (offset, len) in [(0, 16 * 4096 + 1), (16 * 4096 - 1, 2), (16 * 4096, 1)] {
        assert!(cache.find(start.wrapping_add(offset), len, Access::LOCAL_WRITE).is_none());
    }
    assert!(cache.find(start, 1, Access::ALL).is_none(), "other rights");
    let part = Arc::new(Part(pool.clone(), 4096..8192));
    assert_eq!(cache.get(&part, Access::LOCAL_WRITE).unwrap().offset(), 4096);
    assert_eq!(
        (cache.counters().misses, Arc::strong_count(&part)),
        (1, 1),
        "nothing was registered for the part"
    );
}

/// A buffer whose drop uses the cache.
struct UsesCache(SharedBuffer, RegionCache, Arc<AtomicUsize>);

// SAFETY: that of the buffer.
unsafe impl SharedMemory for UsesCache {
    const WRITABLE: bool = true;

    fn bytes(&self) -> *mut [u8] {
        self.0.bytes()
    }
}

impl Drop for UsesCache {
    fn drop(&mut self) {
        self.2.fetch_add(1, SeqCst);
        self.1.evict_idle();
    }
}

#[test]
fn region_that_is_evicted_in_vain_is_dropped_without_the_lock() {
    let (_device, pd) = software();
    let config = RegionCacheConfig { max_bytes: 3 * 4096, ..RegionCacheConfig::default() };
    let cache = RegionCache::new(&pd, config);
    let drops = Arc::new(AtomicUsize::new(0));
    let idle = Arc::new(UsesCache(SharedBuffer::zeroed(4096), cache.clone(), drops.clone()));
    drop(cache.get(&idle, Access::LOCAL_WRITE).unwrap());
    drop(idle);
    let (sender, returned) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let refused = cache.get(&Arc::new(SharedBuffer::zeroed(4 * 4096)), Access::LOCAL_WRITE);
        sender.send(refused.map(|_| ())).unwrap();
    });
    let refused = returned.recv_timeout(TIMEOUT).expect("the cache waits for itself");
    assert!(matches!(refused, Err(RegionCacheError::Full { .. })), "{refused:?}");
    assert_eq!(drops.load(SeqCst), 1, "evicted");
}

#[test]
fn overlapping_memory_replaces_what_it_overlaps_and_leaves_those_in_use_registered() {
    let (_device, pd) = software();
    let cache = RegionCache::new(&pd, RegionCacheConfig::default());
    let pool = Arc::new(SharedBuffer::zeroed(8 * 4096));
    let part =
        |pages: std::ops::Range<usize>| Arc::new(Part(pool.clone(), pages.start * 4096..pages.end * 4096));
    let (left, right) = (part(0..4), part(2..6));
    let used = cache.get(&left, Access::LOCAL_WRITE).unwrap();
    cache.get(&right, Access::LOCAL_WRITE).unwrap();
    assert_eq!(cache.counters().regions, 2, "the first is in use");
    assert_eq!(used.sge(0..4096).unwrap().len(), 4096);
    drop(used);
    assert_eq!((cache.counters().regions, Arc::strong_count(&left)), (1, 1));
    cache.get(&pool, Access::LOCAL_WRITE).unwrap();
    assert_eq!((cache.counters().regions, Arc::strong_count(&right)), (1, 1));
    cache.forget(&pool);
    assert_eq!((cache.counters().regions, cache.counters().bytes), (0, 0));
    drop((left, right));
    assert_eq!(Arc::strong_count(&pool), 1);
}

/// Threads use, forget and evict the same buffers under a limit that is less than all of them together.
#[test]
fn threads_share_a_cache_and_never_exceed_its_limit() {
    const THREADS: usize = 4;
    let (_device, pd) = software();
    let limit = RegionCacheConfig { max_regions: 6, max_bytes: 6 * 8192 };
    let cache = RegionCache::new(&pd, limit);
    let all = buffers(10, 8192);
    let seed = rng::seed();
    let (start, over) = (Barrier::new(THREADS), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, all, start, over) = (cache.clone(), &all, &start, &over);
            scope.spawn(move || {
                let mut random = rng::Random(seed + thread as u64);
                start.wait();
                for _ in 0..2000 {
                    let buffer = &all[random.index(all.len())];
                    match random.index(20) {
                        0 => cache.forget(buffer),
                        1 => drop(cache.evict_idle()),
                        _ => {
                            // Each thread uses one at a time, so there is room for all of them.
                            let region = cache.get(buffer, Access::LOCAL_WRITE).unwrap();
                            region.mr().write(region.offset(), &[thread as u8; 64]).unwrap();
                            assert_eq!(region.mr().as_ptr().addr(), buffer.bytes().cast::<u8>().addr());
                        }
                    }
                    let counters = cache.counters();
                    if counters.regions > 6 || counters.bytes > 6 * 8192 {
                        over.store(true, SeqCst);
                    }
                }
            });
        }
    });
    assert!(!over.load(SeqCst), "the limit was exceeded");
    let counters = cache.counters();
    println!("{counters:?}");
    assert!(counters.hits > 0 && counters.evictions > 0);
    cache.evict_idle();
    assert_eq!((cache.counters().regions, cache.counters().bytes), (0, 0));
    assert!(all.iter().all(|buffer| Arc::strong_count(buffer) == 1), "every region was deregistered");
}
