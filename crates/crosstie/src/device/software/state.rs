//! The state of an open device that its objects and its threads share: the segment, its memory, and the tables of regions,
//! queue pairs, peers and links.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crosstie_protocol::key::Key;

use super::lane::LANE_DATA;
use super::layout::{HEAP_AT, Header, MAGIC, QpNum, REGIONS_AT, RegionEntry, RegionKey};
use super::link::Link;
use super::peer_lines::{AssignedLine, LineUse, PeerLines};
use super::progress::Progress;
use super::qp::QpShared;
use super::region_keys::{RegionKeys, TaggedKey};
use super::removal::Removals;
use super::service::ServiceHandle;
use crate::device::{Access, DeviceAddress, DeviceAttr, DeviceError, Event};
use crate::memory::heap::Heap;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};

/// Events kept for a program that does not collect them; the oldest are dropped first.
const MAX_EVENTS: usize = 1024;

/// An open device, as its objects and its threads see it.
#[derive(Debug)]
pub(super) struct DeviceShared {
    pub(super) gid: [u8; 16],
    attr: DeviceAttr,
    pub(super) segment: Arc<Segment>,
    heap: Mutex<Heap>,
    /// The regions, in memory that no peer can write. This process decides from this table only.
    pub(super) regions: SharedSlice<RegionEntry>,
    /// A copy of `regions` in the segment, for peers in other processes. This process never reads it.
    published_regions: SharedSlice<RegionEntry>,
    region_keys: Mutex<RegionKeys>,
    qps: Mutex<QpTable>,
    pub(super) peer_lines: Mutex<PeerLines>,
    pub(super) removals: Removals,
    /// Number of epochs so far.
    epochs: AtomicU64,
    links: Mutex<HashMap<[u8; 16], Arc<Link>>>,
    /// Peer devices that have mapped our segment, with the number of connections of each.
    pub(super) connected_peers: Mutex<HashMap<[u8; 16], usize>>,
    events: Mutex<VecDeque<Event>>,
    event_arrived: Condvar,
    pub(super) service: ServiceHandle,
    pub(super) progress: Progress,
    closing: AtomicBool,
}

/// The region tables of the open devices of this process, by the devices' names. A link to such a device uses the device's
/// own table.
static LOCAL_REGIONS: Mutex<BTreeMap<[u8; 16], SharedSlice<RegionEntry>>> = Mutex::new(BTreeMap::new());

/// The region table of a device of this process. `None` if there is no such device.
pub(super) fn local_regions(gid: &[u8; 16]) -> Option<SharedSlice<RegionEntry>> {
    locked(&LOCAL_REGIONS).get(gid).cloned()
}

impl Drop for DeviceShared {
    fn drop(&mut self) {
        locked(&LOCAL_REGIONS).remove(&self.gid);
    }
}

/// A range of the segment's heap.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allocation {
    pub(super) at: u64,
    pub(super) len: u64,
}

/// What a region table says about a region.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) pd: u32,
    pub(super) access: Access,
    /// First address, with its tag.
    pub(super) addr: u64,
    pub(super) len: u64,
    /// As `RegionEntry::offset`.
    pub(super) offset: u64,
}

/// Queue pairs by index.
#[derive(Debug, Default)]
struct QpTable {
    keys: KeyTable,
    by_index: Vec<Option<Arc<QpShared>>>,
}

/// Hands out keys. It reuses the index that was returned first, with the next generation of the key.
#[derive(Debug, Default)]
struct KeyTable {
    /// By index: the last key that was handed out.
    last: Vec<u32>,
    free: VecDeque<u32>,
}

impl KeyTable {
    fn take<const I: u32, const B: u32>(&mut self) -> Option<Key<I, B>> {
        // Indices that were never used come first, so that a key repeats as late as possible.
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

/// Turns an I/O error into a [`DeviceError`]; `what` says what was tried.
pub(super) fn os(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |source| DeviceError::Os { what, source }
}

/// Locks a mutex, also after a panic of another thread: no invariant of this module spans a panic.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks a requested size against a limit.
pub(super) fn check_limit(what: &'static str, asked: u32, limit: u32) -> Result<(), DeviceError> {
    if asked > limit {
        return Err(DeviceError::Limit { what, asked: asked.into(), limit: limit.into() });
    }
    Ok(())
}

impl DeviceShared {
    /// Initialises the segment of a new device.
    pub(super) fn new(
        gid: [u8; 16],
        segment: Arc<Segment>,
        service: ServiceHandle,
    ) -> Result<DeviceShared, DeviceError> {
        let space = segment.len();
        let no_memory = || DeviceError::Exhausted { what: "device memory" };
        let header: SharedRef<Header> = SharedRef::new(&segment, 0).ok_or_else(no_memory)?;
        header.len.store(space, Relaxed);
        header.magic.store(MAGIC, Relaxed);
        let regions = SharedSlice::private(RegionKey::INDICES as usize)
            .map_err(os("allocating the table of regions"))?;
        let device = DeviceShared {
            gid,
            attr: attributes(),
            heap: Mutex::new(Heap::new(HEAP_AT, space)),
            regions,
            published_regions: SharedSlice::new(&segment, REGIONS_AT, RegionKey::INDICES as usize)
                .ok_or_else(no_memory)?,
            region_keys: Mutex::new(RegionKeys::new(u16::from_ne_bytes([gid[0], gid[1]]))),
            qps: Mutex::default(),
            peer_lines: Mutex::default(),
            removals: Removals::default(),
            epochs: AtomicU64::new(0),
            segment,
            links: Mutex::default(),
            connected_peers: Mutex::default(),
            events: Mutex::default(),
            event_arrived: Condvar::new(),
            service,
            progress: Progress::default(),
            closing: AtomicBool::new(false),
        };
        locked(&LOCAL_REGIONS).insert(gid, device.regions.clone());
        Ok(device)
    }

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

    /// Asks the device's threads to end.
    pub(super) fn close(&self) {
        // Release, partner: the Acquire load in `is_closing`.
        self.closing.store(true, Release);
    }

    pub(super) fn is_closing(&self) -> bool {
        // Acquire, partner: the Release store in `close`.
        self.closing.load(Acquire)
    }

    /// False in a forked child of the process that opened the device.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.segment.is_of_this_process()
    }

    // Memory.

    /// Allocates zeroed memory of the segment.
    pub(super) fn allocate(&self, len: u64) -> Result<Allocation, DeviceError> {
        let (at, len) = self
            .retry_after_removals(|| locked(&self.heap).allocate(len))
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        Ok(Allocation { at, len })
    }

    /// Zeroes and frees memory. No peer may still use it, see `quiescence.rs`.
    pub(super) fn free(&self, memory: &Allocation) {
        // A forked child would zero the memory of its parent's device. Memory that could not be zeroed is never handed out again.
        if self.is_of_this_process() && self.segment.discard(memory.at, memory.len).is_ok() {
            locked(&self.heap).free(memory.at, memory.len);
        }
    }

    /// Adds a region to both tables.
    pub(super) fn add_region(&self, key: RegionKey, region: &Region) {
        for table in [&self.regions, &self.published_regions] {
            let entry = &table[key.index() as usize];
            entry.access.store(region.access.bits(), Relaxed);
            entry.pd.store(region.pd, Relaxed);
            entry.addr.store(region.addr, Relaxed);
            entry.len.store(region.len, Relaxed);
            entry.offset.store(region.offset, Relaxed);
            // Release, partner: the Acquire load of `key` in `PeerMemory::look_up` and wherever else a region is looked up.
            entry.key.store(key.bits(), Release);
        }
    }

    /// Removes a region from both tables. Peers and threads that have looked it up before may still use it, see
    /// `quiescence.rs`.
    pub(super) fn remove_region(&self, key: RegionKey) {
        for table in [&self.regions, &self.published_regions] {
            table[key.index() as usize].key.store(0, Relaxed);
        }
    }

    pub(super) fn take_region_key(&self) -> Result<TaggedKey, DeviceError> {
        self.retry_after_removals(|| locked(&self.region_keys).take())
            .ok_or(DeviceError::Exhausted { what: "regions" })
    }

    pub(super) fn give_back_region_key(&self, key: RegionKey) {
        locked(&self.region_keys).give_back(key);
    }

    // Events.

    pub(super) fn emit(&self, event: Event) {
        let mut events = locked(&self.events);
        if events.len() == MAX_EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        self.event_arrived.notify_one();
    }

    pub(super) fn wait_event(&self, timeout: Duration) -> Option<Event> {
        // None: without an end.
        let deadline = Instant::now().checked_add(timeout);
        let mut events = locked(&self.events);
        loop {
            if let Some(event) = events.pop_front() {
                return Some(event);
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            events = self.event_arrived.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    // Peers.

    /// The link to a peer device; connects to the peer if it is not connected yet.
    pub(super) fn link(&self, to: &DeviceAddress) -> Result<Arc<Link>, DeviceError> {
        if to.provider != DeviceAddress::SOFTWARE {
            return Err(DeviceError::BadAddress("it is not the address of a software device"));
        }
        if let Some(link) = self.live_link(&locked(&self.links), &to.gid) {
            return Ok(link);
        }
        // Without the lock: the peer may take its time, and the service thread needs the lock when another peer ends.
        let link = Arc::new(Link::connect(self.gid, to.gid)?);
        let mut links = locked(&self.links);
        if let Some(link) = self.live_link(&links, &to.gid) {
            // Another thread was faster. Our connection is closed again.
            return Ok(link);
        }
        self.service.watch(&link).map_err(os("watching the peer's process"))?;
        links.insert(to.gid, link.clone());
        Ok(link)
    }

    /// The link to a peer device, if there is one.
    pub(super) fn known_link(&self, gid: &[u8; 16]) -> Option<Arc<Link>> {
        self.live_link(&locked(&self.links), gid)
    }

    fn live_link(&self, links: &HashMap<[u8; 16], Arc<Link>>, gid: &[u8; 16]) -> Option<Arc<Link>> {
        links.get(gid).filter(|link| !link.is_dead()).cloned()
    }

    pub(super) fn remove_link(&self, link: &Arc<Link>) {
        let mut links = locked(&self.links);
        if links.get(&link.gid).is_some_and(|known| Arc::ptr_eq(known, link)) {
            links.remove(&link.gid);
        }
    }

    /// Drops what refers to peers and to the objects of this device, which is closed and whose threads have ended: handles of queue pairs may
    /// keep the device's memory for longer, but peers learn now that we have left.
    pub(super) fn drop_links(&self) {
        self.service.close();
        locked(&self.links).clear();
    }

    /// Whether the device with this name is connected to us, so that it may be working on our segment.
    pub(super) fn is_peer_connected(&self, gid: &[u8; 16]) -> bool {
        locked(&self.connected_peers).contains_key(gid)
    }

    /// The process of a peer device, if there is a link to it.
    pub(super) fn peer_process(&self, gid: &[u8; 16]) -> Option<u32> {
        let link = locked(&self.links).get(gid).cloned()?;
        Some(link.pid.map_or(std::process::id(), |pid| pid.as_raw_nonzero().get() as u32))
    }

    /// Assigns a peer line to a new connection with device `gid`.
    pub(super) fn assign_line(
        &self,
        gid: [u8; 16],
        tenure: u64,
        usage: LineUse,
        taken: u64,
    ) -> Result<AssignedLine, DeviceError> {
        locked(&self.peer_lines).assign(gid, tenure, usage, taken)
    }

    /// Takes a peer line back that is not used here any more, as soon as its writer has closed it.
    pub(super) fn retire_line(&self, line: &AssignedLine) {
        let mut lines = locked(&self.peer_lines);
        let gone = !self.is_peer_connected(&line.gid);
        lines.retire(line, gone);
        if gone {
            lines.forget_gone_peer(&line.gid);
        }
    }

    /// Takes the line of a datagram sender back that is gone.
    pub(super) fn reclaim_line(&self, line: &AssignedLine) {
        let mut lines = locked(&self.peer_lines);
        // Its device may be connected again by now; what had the line open before is gone all the same.
        lines.retire(line, true);
        if !self.is_peer_connected(&line.gid) {
            lines.forget_gone_peer(&line.gid);
        }
    }

    // Queue pairs.

    pub(super) fn add_qp(
        &self,
        make: impl FnOnce(QpNum) -> Result<Arc<QpShared>, DeviceError>,
    ) -> Result<Arc<QpShared>, DeviceError> {
        let key: QpNum = self
            .retry_after_removals(|| locked(&self.qps).keys.take())
            .ok_or(DeviceError::Exhausted { what: "queue pairs" })?;
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

    /// Uses up the indices that were never used: the next queue pair gets that of one that is gone.
    #[cfg(test)]
    pub(super) fn use_up_qp_indices(&self) {
        let mut table = locked(&self.qps);
        let used = table.keys.last.len() as u32;
        table.keys.last.extend((used..QpNum::INDICES).map(|index| QpNum::first(index).bits()));
    }

    /// Removes a queue pair from the table. Its index will be used again.
    pub(super) fn remove_qp(&self, num: u32) {
        let mut table = locked(&self.qps);
        let index = QpNum::from_bits(num).index();
        table.by_index[index as usize] = None;
        table.keys.give_back(index);
    }

    /// A new epoch for a queue pair whose last one was `previous`. No other queue pair ever has the same epoch; the low bits
    /// ([`short_epoch`](super::layout::short_epoch)) count the epochs of this queue pair.
    pub(super) fn next_epoch(&self, previous: u64) -> u64 {
        let number = self.epochs.fetch_add(1, Relaxed) + 1;
        number << 7 | (previous + 1) & 0x7F
    }

    pub(super) fn qp(&self, num: u32) -> Option<Arc<QpShared>> {
        let index = QpNum::from_bits(num).index() as usize;
        locked(&self.qps).by_index.get(index)?.clone().filter(|qp| qp.num == num)
    }

    pub(super) fn all_qps(&self) -> Vec<Arc<QpShared>> {
        locked(&self.qps).by_index.iter().flatten().cloned().collect()
    }
}

fn attributes() -> DeviceAttr {
    DeviceAttr {
        max_qp_wr: 1 << 14,
        max_sge: 16,
        max_cqe: 1 << 20,
        max_srq_wr: 1 << 15,
        // The poster copies the bytes either way, so inline data has no other limit than this one.
        max_inline: 1 << 20,
        max_message: 1 << 30,
        max_datagram: 4096,
        max_qp: QpNum::INDICES,
        max_mr: RegionKey::INDICES,
        one_sided: true,
        atomics: true,
        link_rate: 10_000,
        same_machine: true,
        in_place_is_slower: true,
        port_events: false,
        completion_data: LANE_DATA as u32,
    }
}
