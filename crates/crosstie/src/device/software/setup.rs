//! Opening a device; protection domains and regions.

use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::layout::{
    HEAP_AT, Header, IN_PLACE, LINES_AT, MAGIC, MAX_LINES, PeerLine, QpNum, REGIONS_AT, RegionEntry,
    RegionKey,
};
use super::link::Link;
use super::qp::QpLocal;
use super::{progress, service};
use crate::device::{Access, DeviceAddress, DeviceAttr, DeviceError, Event};
use crate::memory::heap::Heap;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};
use crate::ring::fence;

/// Sizes of a software device.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address space for the device's memory: what [`Pd::allocate`](crate::device::Pd::allocate) hands out and the
    /// queues. Every peer maps as much. Memory is used only as it is touched.
    pub space: u64,
}

impl Default for Config {
    /// 64 GiB of address space, or as much of it as the process may have.
    fn default() -> Self {
        Config { space: 64 << 30 }
    }
}

/// The least address space that makes sense.
const MIN_SPACE: u64 = 64 << 20;
/// Events kept for a program that does not ask; the oldest go first.
const MAX_EVENTS: usize = 1024;

/// An open device.
#[derive(Clone, Debug)]
pub struct Device {
    pub(super) handle: Arc<Handle>,
}

/// What every object holds to keep the device open.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) inner: Arc<Inner>,
    service: Option<JoinHandle<()>>,
}

/// What the device's own threads hold.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) gid: [u8; 16],
    attr: DeviceAttr,
    pub(super) segment: Arc<Segment>,
    heap: Mutex<Heap>,
    pub(super) regions: SharedSlice<RegionEntry>,
    region_keys: Mutex<KeyTable>,
    pub(super) qps: Mutex<QpTable>,
    pub(super) lines: SharedSlice<PeerLine>,
    pub(super) line_owners: Mutex<LineTable>,
    links: Mutex<HashMap<[u8; 16], Arc<Link>>>,
    pub(super) peers: Mutex<HashMap<[u8; 16], usize>>,
    events: Mutex<VecDeque<Event>>,
    event_arrived: Condvar,
    pub(super) service: service::Mailbox,
    pub(super) progress: progress::Stalled,
    pub(super) closing: AtomicBool,
}

/// Memory of the segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allocation {
    pub(super) at: u64,
    pub(super) len: u64,
}

/// Queue pairs by index.
#[derive(Debug, Default)]
pub(super) struct QpTable {
    keys: KeyTable,
    pub(super) by_index: Vec<Option<Arc<QpLocal>>>,
}

/// Lines by index: whose they are.
#[derive(Debug, Default)]
pub(super) struct LineTable {
    pub(super) owners: Vec<Option<[u8; 16]>>,
}

/// Hands out indices, the least recently used first, with the last key that each had.
#[derive(Debug, Default)]
struct KeyTable {
    last: Vec<u32>,
    free: VecDeque<u32>,
}

impl KeyTable {
    fn take<const I: u32, const B: u32>(&mut self) -> Option<crosstie_protocol::key::Key<I, B>> {
        use crosstie_protocol::key::Key;
        // Fresh indices first: a key repeats as late as it can.
        if (self.last.len() as u32) < Key::<I, B>::INDICES {
            let key = Key::first(self.last.len() as u32);
            self.last.push(key.bits());
            return Some(key);
        }
        let index = self.free.pop_front()?;
        let key = Key::<I, B>::from_bits(self.last[index as usize]).next();
        self.last[index as usize] = key.bits();
        Some(key)
    }

    fn give_back(&mut self, index: u32) {
        self.free.push_back(index);
    }
}

pub(super) fn os(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |source| DeviceError::Os { what, source }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    pub(crate) fn open(config: &Config) -> Result<Device, DeviceError> {
        fence::register().map_err(os("membarrier (the software device needs Linux 4.16 or later)"))?;
        let mut gid = [0; 16];
        rustix::rand::getrandom(&mut gid, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| os("random name of the device")(e.into()))?;

        let mut space = config.space.max(MIN_SPACE).next_multiple_of(4096);
        let segment = loop {
            match Segment::create(space) {
                Ok(segment) => break Arc::new(segment),
                Err(_) if space / 2 >= MIN_SPACE => space = (space / 2).next_multiple_of(4096),
                Err(e) => return Err(os("memory of the device")(e)),
            }
        };
        let none = || DeviceError::Exhausted { what: "device memory" };
        let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or_else(none)?;
        header.len.store(space, Relaxed);
        header.magic.store(MAGIC, Relaxed);

        let (mailbox, sockets) = service::Mailbox::open(&gid).map_err(os("the device's socket"))?;
        let inner = Arc::new(Inner {
            gid,
            attr: attributes(),
            heap: Mutex::new(Heap::new(HEAP_AT, space)),
            regions: SharedSlice::new(&segment, REGIONS_AT, RegionKey::INDICES as usize).ok_or_else(none)?,
            region_keys: Mutex::default(),
            qps: Mutex::default(),
            lines: SharedSlice::new(&segment, LINES_AT, MAX_LINES as usize).ok_or_else(none)?,
            line_owners: Mutex::default(),
            segment,
            links: Mutex::default(),
            peers: Mutex::default(),
            events: Mutex::default(),
            event_arrived: Condvar::new(),
            service: mailbox,
            progress: progress::Stalled::default(),
            closing: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name("crosstie-service".into())
            .spawn({
                let inner = inner.clone();
                move || service::run(&inner, sockets)
            })
            .map_err(os("the device's thread"))?;
        Ok(Device { handle: Arc::new(Handle { inner, service: Some(thread) }) })
    }

    pub(crate) fn attr(&self) -> &DeviceAttr {
        &self.handle.inner.attr
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.handle.inner.address()
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd { handle: self.handle.clone() })
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, DeviceError> {
        let inner = &self.handle.inner;
        let deadline = Instant::now() + timeout;
        let mut events = locked(&inner.events);
        loop {
            if let Some(event) = events.pop_front() {
                return Ok(Some(event));
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return Ok(None);
            };
            events = inner.event_arrived.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Release, partner: the Acquire loads of the device's threads.
        self.inner.closing.store(true, Release);
        self.inner.service.wake();
        self.inner.progress.stop();
        if let Some(service) = self.service.take() {
            // A panicked service thread has reported itself; closing goes on.
            service.join().ok();
        }
    }
}

fn attributes() -> DeviceAttr {
    DeviceAttr {
        max_qp_wr: 1 << 14,
        max_sge: 16,
        max_cqe: 1 << 20,
        max_srq_wr: 1 << 15,
        // The poster copies either way: nothing but the message's length limits it.
        max_inline: 1 << 20,
        max_message: 1 << 30,
        max_datagram: 4096,
        max_qp: QpNum::INDICES,
        max_mr: RegionKey::INDICES,
        one_sided: true,
    }
}

/// Refuses more than a limit.
pub(super) fn limit(what: &'static str, asked: u32, limit: u32) -> Result<(), DeviceError> {
    if asked > limit {
        return Err(DeviceError::Limit { what, asked: asked.into(), limit: limit.into() });
    }
    Ok(())
}

impl Inner {
    pub(super) fn address(&self) -> DeviceAddress {
        DeviceAddress {
            provider: DeviceAddress::SOFTWARE,
            link_layer: 0,
            mtu: 5,
            reserved: 0,
            lid: 0,
            reserved2: 0,
            gid: self.gid,
        }
    }

    pub(super) fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    pub(super) fn closing(&self) -> bool {
        // Acquire, partner: the Release store in `Handle::drop`.
        self.closing.load(Acquire)
    }

    /// Zeroed memory of the segment.
    pub(super) fn allocate(&self, len: u64) -> Result<Allocation, DeviceError> {
        match locked(&self.heap).allocate(len) {
            Some((at, len)) => Ok(Allocation { at, len }),
            None => Err(DeviceError::Exhausted { what: "device memory" }),
        }
    }

    /// Gives memory back, zeroed. Nobody may still use it.
    pub(super) fn free(&self, memory: &Allocation) {
        // Memory that cannot be zeroed is not handed out again.
        if self.segment.discard(memory.at, memory.len).is_ok() {
            locked(&self.heap).free(memory.at, memory.len);
        }
    }

    pub(super) fn emit(&self, event: Event) {
        let mut events = locked(&self.events);
        if events.len() == MAX_EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        self.event_arrived.notify_one();
    }

    /// The way to a peer, made if there is none yet.
    pub(super) fn link(&self, to: &DeviceAddress) -> Result<Arc<Link>, DeviceError> {
        if to.provider != DeviceAddress::SOFTWARE {
            return Err(DeviceError::BadAddress("it is not one of a software device"));
        }
        let mut links = locked(&self.links);
        if let Some(link) = links.get(&to.gid).filter(|link| !link.is_dead()) {
            return Ok(link.clone());
        }
        let link = Arc::new(Link::connect(self.gid, to.gid)?);
        self.service.watch(&link).map_err(os("watching the peer"))?;
        links.insert(to.gid, link.clone());
        Ok(link)
    }

    pub(super) fn forget_link(&self, link: &Arc<Link>) {
        let mut links = locked(&self.links);
        if links.get(&link.gid).is_some_and(|known| Arc::ptr_eq(known, link)) {
            links.remove(&link.gid);
        }
    }

    /// Whether a device with this name has a way into our segment.
    pub(super) fn peer_connected(&self, gid: &[u8; 16]) -> bool {
        locked(&self.peers).contains_key(gid)
    }

    pub(super) fn add_qp(
        &self,
        make: impl FnOnce(QpNum) -> Result<Arc<QpLocal>, DeviceError>,
    ) -> Result<Arc<QpLocal>, DeviceError> {
        let key = locked(&self.qps).keys.take().ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
        let made = make(key);
        let mut table = locked(&self.qps);
        match made {
            Ok(qp) => {
                let index = key.index() as usize;
                if table.by_index.len() <= index {
                    table.by_index.resize(index + 1, None);
                }
                table.by_index[index] = Some(qp.clone());
                Ok(qp)
            }
            Err(e) => {
                table.keys.give_back(key.index());
                Err(e)
            }
        }
    }

    /// Forgets a queue pair. Its index is used again if `reuse`.
    pub(super) fn remove_qp(&self, num: u32, reuse: bool) {
        let mut table = locked(&self.qps);
        let index = QpNum::from_bits(num).index();
        table.by_index[index as usize] = None;
        if reuse {
            table.keys.give_back(index);
        }
    }

    pub(super) fn qp(&self, num: u32) -> Option<Arc<QpLocal>> {
        let index = QpNum::from_bits(num).index() as usize;
        locked(&self.qps).by_index.get(index)?.clone().filter(|qp| qp.num == num)
    }

    pub(super) fn all_qps(&self) -> Vec<Arc<QpLocal>> {
        locked(&self.qps).by_index.iter().flatten().cloned().collect()
    }

    /// Waits until nobody is inside an operation that began before now and could have seen what was just taken away.
    ///
    /// `patience` limits the wait for peers that are alive but do not move (stopped, say); `false` if it ran out.
    pub(super) fn quiesce(&self, patience: Option<Duration>) -> bool {
        // Everybody who did not see our stores has, after this, shown its `busy`.
        fence::heavy();
        let mut waiting: Vec<(SharedRef<PeerLine>, u64, [u8; 16])> = Vec::new();
        for qp in self.all_qps() {
            if let Some((line, gid)) = qp.requester() {
                waiting.push((line, 0, gid));
            }
        }
        for (index, owner) in locked(&self.line_owners).owners.iter().enumerate() {
            let line = SharedRef::new(&self.segment, LINES_AT + 64 * index as u64);
            if let (Some(gid), Some(line)) = (owner, line) {
                waiting.push((line, 0, *gid));
            }
        }
        for (line, seen, _) in &mut waiting {
            // Acquire, partner: the Release store of `busy` at the end of an operation.
            *seen = line.busy.load(Acquire);
        }
        let begun = Instant::now();
        waiting.retain(|(_, seen, _)| seen & 1 == 1);
        while !waiting.is_empty() {
            waiting.retain(|(line, seen, gid)| line.busy.load(Acquire) == *seen && self.peer_connected(gid));
            if waiting.is_empty() {
                break;
            }
            if patience.is_some_and(|patience| begun.elapsed() > patience) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

/// How long an object that goes away waits for a peer that is alive but stuck inside an operation.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    pub(super) handle: Arc<Handle>,
}

impl Pd {
    pub(crate) fn allocate(&self, pd: u32, len: usize, access: Access) -> Result<Mr, DeviceError> {
        let inner = &self.handle.inner;
        let memory = inner.allocate(len as u64)?;
        let start = inner
            .segment
            .bytes(memory.at, memory.len)
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        if memory.len >= 2 << 20 {
            inner.segment.advise_huge(memory.at, memory.len);
        }
        let addr = start.as_ptr().expose_provenance() as u64;
        self.enter(pd, addr, len, access, Some(memory)).inspect_err(|_| inner.free(&memory))
    }

    /// # Safety
    ///
    /// As for [`crate::device::Pd::register`].
    pub(crate) unsafe fn register(
        &self,
        pd: u32,
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, DeviceError> {
        let addr = start.expose_provenance();
        if start.is_null() || addr.checked_add(len).is_none() {
            return Err(DeviceError::BadAddress("the memory to register wraps around"));
        }
        self.enter(pd, addr as u64, len, access, None)
    }

    fn enter(
        &self,
        pd: u32,
        addr: u64,
        len: usize,
        access: Access,
        memory: Option<Allocation>,
    ) -> Result<Mr, DeviceError> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(DeviceError::BadAddress("remote writes and atomics need local write access"));
        }
        let inner = &self.handle.inner;
        let key: RegionKey =
            locked(&inner.region_keys).take().ok_or(DeviceError::Exhausted { what: "regions" })?;
        let entry = &inner.regions[key.index() as usize];
        entry.access.store(access.bits(), Relaxed);
        entry.pd.store(pd, Relaxed);
        entry.addr.store(addr, Relaxed);
        entry.len.store(len as u64, Relaxed);
        entry.offset.store(memory.map_or(IN_PLACE, |memory| memory.at), Relaxed);
        // Release, partner: the Acquire load of `key` wherever a region is looked up.
        entry.key.store(key.bits(), Release);
        Ok(Mr { handle: self.handle.clone(), key, addr, len, memory })
    }
}

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    handle: Arc<Handle>,
    key: RegionKey,
    addr: u64,
    len: usize,
    memory: Option<Allocation>,
}

impl Mr {
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.key.bits()
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.key.bits()
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let inner = &self.handle.inner;
        inner.regions[self.key.index() as usize].key.store(0, Relaxed);
        // The caller gets memory in place back, so for that there is no end to our patience.
        let quiet = inner.quiesce(self.memory.map(|_| PATIENCE));
        // Requests of our own that wait for a peer look the key up under this lock.
        inner.progress.pause();
        if quiet {
            if let Some(memory) = &self.memory {
                inner.free(memory);
            }
            locked(&inner.region_keys).give_back(self.key.index());
        }
        // Otherwise neither memory nor index is ever used again.
    }
}
