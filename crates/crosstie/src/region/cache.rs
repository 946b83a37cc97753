//! A cache of registered regions, so that memory is registered once and not for every transfer.
//!
//! ```text
//!   get(&memory, access) --> ranges by access rights ---- hit: the region that contains the memory
//!                                   |
//!                                   +-------------------- miss: evict idle regions beyond the limits, register
//!
//!   CachedRegion --+
//!   CachedRegion --+--> Arc<Entry> { region, Arc<memory> } <-- ranges, list of use
//! ```
//!
//! - An entry keeps its memory alive, so a range of addresses in the cache cannot belong to any other memory. This is why the
//!   cache needs no hook into the allocator.
//! - A region is used only for requests with exactly its access rights. Memory that is shared for reading is never registered
//!   for writing because someone else once wrote it.
//! - A region that a [`CachedRegion`] refers to is never evicted. An idle one is, the least recently used first, when the cache
//!   would exceed [`RegionCacheConfig`].
//! - The lock is held for looking up, not while the device registers or deregisters.

use core::fmt;
use core::ops::Range;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::interval_map::IntervalMap;
use super::kept;
use super::{OwnedRegion, SharedMemory};
use crate::device::{Access, DeviceError, Mr, OutOfRegion, Pd, Sge};

/// Limits of a [`RegionCache`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionCacheConfig {
    /// Regions that are registered at a time, used or idle.
    pub max_regions: usize,
    /// Bytes that are registered at a time, used or idle. On verbs they are locked into memory.
    pub max_bytes: u64,
}

impl Default for RegionCacheConfig {
    /// 4096 regions, 16 GiB.
    fn default() -> Self {
        RegionCacheConfig { max_regions: 4096, max_bytes: 16 << 30 }
    }
}

/// What a cache has done, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionCacheCounters {
    /// Requests that found their memory registered.
    pub hits: u64,
    /// Requests that registered memory.
    pub misses: u64,
    /// Idle regions that were deregistered because of a limit.
    pub evictions: u64,
    /// Regions now.
    pub regions: u64,
    /// Bytes of these regions.
    pub bytes: u64,
}

/// Memory could not be registered through the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionCacheError {
    /// All regions are in use, and one more would exceed a limit.
    #[error(
        "the cache of registered memory is full: {regions} regions with {bytes} bytes are in use, {asked} bytes more exceed \
         the limit ({limit}); wait for transfers to end, or raise the limit in RegionCacheConfig"
    )]
    Full {
        /// Regions in use.
        regions: u64,
        /// Their bytes.
        bytes: u64,
        /// Bytes that were to be registered.
        asked: u64,
        /// `max_regions` or `max_bytes`.
        limit: &'static str,
    },
    /// Write access was asked for memory that is shared for reading.
    #[error("the memory is shared for reading and cannot be registered for {0:?}: use a SharedBuffer")]
    NotWritable(Access),
    /// The device refused the memory.
    #[error("memory cannot be registered: {0}")]
    Device(#[from] DeviceError),
}

/// A cache of registered regions that threads share. Clones are the same cache.
///
/// ```
/// use crosstie::device::{Access, Device, DeviceSpec};
/// use crosstie::region::{RegionCache, RegionCacheConfig, SharedBuffer};
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(&DeviceSpec::Software)?;
/// let cache = RegionCache::new(&Arc::new(device.alloc_pd()?), RegionCacheConfig::default());
/// let pages = Arc::new(SharedBuffer::zeroed(1 << 20));
/// for _ in 0..10 {
///     let region = cache.get(&pages, Access::LOCAL_WRITE)?;
///     let _page = region.sge(4096..8192)?;
/// }
/// assert_eq!((cache.counters().misses, cache.counters().hits), (1, 9));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RegionCache {
    shared: Arc<Shared>,
}

struct Shared {
    pd: Arc<Pd>,
    config: RegionCacheConfig,
    usage: Arc<Usage>,
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    table: Mutex<Table>,
}

/// What is registered. It is increased under the lock of the table, so the limits hold; it is decreased at any time.
#[derive(Default)]
struct Usage {
    regions: AtomicU64,
    bytes: AtomicU64,
}

impl Usage {
    fn count(self: &Arc<Usage>, bytes: u64) -> Counted {
        self.regions.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        Counted { usage: self.clone(), bytes, ended: AtomicBool::new(false) }
    }
}

/// One region of a [`Usage`].
struct Counted {
    usage: Arc<Usage>,
    bytes: u64,
    ended: AtomicBool,
}

impl Counted {
    fn end(&self) {
        if !self.ended.swap(true, Relaxed) {
            self.usage.regions.fetch_sub(1, Relaxed);
            self.usage.bytes.fetch_sub(self.bytes, Relaxed);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.end();
    }
}

/// A registered region and the memory that it keeps alive.
struct Entry {
    region: OwnedRegion<Arc<dyn Any + Send + Sync>>,
    access: Access,
    start: usize,
    counted: Counted,
}

#[derive(Default)]
struct Table {
    ranges: IntervalMap<usize>,
    /// Entries of `ranges`, linked in the order of their last use.
    nodes: Vec<Node>,
    free: Vec<usize>,
    least_recent: Option<usize>,
    most_recent: Option<usize>,
}

struct Node {
    entry: Option<Arc<Entry>>,
    before: Option<usize>,
    after: Option<usize>,
}

impl RegionCache {
    /// An empty cache for memory of a protection domain.
    pub fn new(pd: &Arc<Pd>, config: RegionCacheConfig) -> RegionCache {
        RegionCache {
            shared: Arc::new(Shared {
                pd: pd.clone(),
                config,
                usage: Arc::default(),
                hits: AtomicU64::new(0),
                misses: AtomicU64::new(0),
                evictions: AtomicU64::new(0),
                table: Mutex::default(),
            }),
        }
    }

    /// The region of `memory` with these access rights: registered now, or before.
    pub fn get<M: SharedMemory>(
        &self,
        memory: &Arc<M>,
        access: Access,
    ) -> Result<CachedRegion, RegionCacheError> {
        let writes = access.difference(Access::REMOTE_READ);
        if !M::WRITABLE && !writes.is_empty() {
            return Err(RegionCacheError::NotWritable(writes));
        }
        let bytes = memory.bytes();
        let start = bytes.cast::<u8>().addr();
        let range = start..start + bytes.len();
        let mut evicted = Vec::new();
        let counted = {
            let mut table = self.lock();
            if let Some(found) = table.find(access, range.clone()) {
                self.shared.hits.fetch_add(1, Relaxed);
                return Ok(found);
            }
            let room = self.make_room(&mut table, bytes.len() as u64, &mut evicted);
            room.map(|()| self.shared.usage.count(bytes.len() as u64))
        };
        // Without the lock, because both may take long, and the drop of an owner may use the cache.
        drop(evicted);
        kept::free_kept();
        let counted = counted?;
        // SAFETY: `SharedMemory` promises that the bytes are valid as long as the owner lives, which the region below keeps
        // alive until it is deregistered; that there are no references to writable bytes; and that nobody writes the others,
        // which are registered without a right to write.
        let mr = unsafe { self.shared.pd.register(bytes.cast(), bytes.len(), access)? };
        let owner: Arc<dyn Any + Send + Sync> = memory.clone();
        let region = OwnedRegion::from_parts(mr, owner);
        let entry = Arc::new(Entry { region, access, start, counted });
        self.shared.misses.fetch_add(1, Relaxed);
        let found = CachedRegion { entry: entry.clone(), range: 0..bytes.len() };
        let replaced = if range.is_empty() { Vec::new() } else { self.lock().insert(entry, range) };
        drop(replaced);
        Ok(found)
    }

    /// The region that contains `len` bytes at `start`, with these access rights, if there is one. The memory of a region that is
    /// found stays valid as long as the result exists.
    pub fn find(&self, start: *const u8, len: usize, access: Access) -> Option<CachedRegion> {
        let end = start.addr().checked_add(len)?;
        let found = self.lock().find(access, start.addr()..end);
        if found.is_some() {
            self.shared.hits.fetch_add(1, Relaxed);
        }
        found
    }

    /// Removes `memory` from the cache, with all access rights. It is deregistered when no [`CachedRegion`] refers to it, which
    /// is now or later.
    pub fn forget<M: SharedMemory>(&self, memory: &Arc<M>) {
        let bytes = memory.bytes();
        let start = bytes.cast::<u8>().addr();
        let removed = self.lock().remove_overlapping(start..start + bytes.len());
        drop(removed);
    }

    /// Removes everything that is not in use. Returns the number of regions.
    pub fn evict_idle(&self) -> usize {
        let mut evicted = Vec::new();
        let mut table = self.lock();
        while let Some(entry) = table.take_least_recent_idle() {
            evicted.push(entry);
        }
        drop(table);
        self.shared.evictions.fetch_add(evicted.len() as u64, Relaxed);
        evicted.len()
    }

    /// What the cache has done, and what it holds.
    pub fn counters(&self) -> RegionCacheCounters {
        let Shared { usage, hits, misses, evictions, .. } = &*self.shared;
        RegionCacheCounters {
            hits: hits.load(Relaxed),
            misses: misses.load(Relaxed),
            evictions: evictions.load(Relaxed),
            regions: usage.regions.load(Relaxed),
            bytes: usage.bytes.load(Relaxed),
        }
    }

    /// Moves idle regions to `evicted` until one of `len` bytes fits. The caller drops them without the lock.
    fn make_room(
        &self,
        table: &mut Table,
        len: u64,
        evicted: &mut Vec<Arc<Entry>>,
    ) -> Result<(), RegionCacheError> {
        let Shared { config, usage, evictions, .. } = &*self.shared;
        loop {
            let (regions, bytes) = (usage.regions.load(Relaxed), usage.bytes.load(Relaxed));
            let limit = if regions >= config.max_regions as u64 {
                "max_regions"
            } else if bytes.saturating_add(len) > config.max_bytes {
                "max_bytes"
            } else {
                return Ok(());
            };
            let Some(entry) = table.take_least_recent_idle() else {
                return Err(RegionCacheError::Full { regions, bytes, asked: len, limit });
            };
            evictions.fetch_add(1, Relaxed);
            evicted.push(entry);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.shared.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RegionCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionCache")
            .field("config", &self.shared.config)
            .field("counters", &self.counters())
            .finish_non_exhaustive()
    }
}

impl Table {
    fn find(&mut self, access: Access, range: Range<usize>) -> Option<CachedRegion> {
        let (start, &index) = self.ranges.find(access.bits(), range.clone())?;
        self.unlink(index);
        self.link_most_recent(index);
        let entry = self.nodes[index].entry.clone()?;
        Some(CachedRegion { entry, range: range.start - start..range.end - start })
    }

    /// Adds an entry. Returns those that it replaces: parts of its range, or the same range, which another thread has
    /// registered meanwhile.
    fn insert(&mut self, entry: Arc<Entry>, range: Range<usize>) -> Vec<Arc<Entry>> {
        let access = entry.access;
        let node = Node { entry: Some(entry), before: None, after: None };
        let index = match self.free.pop() {
            Some(index) => {
                self.nodes[index] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        let replaced = self.ranges.insert(access.bits(), range, index);
        self.link_most_recent(index);
        replaced.into_iter().filter_map(|index| self.take(index)).collect()
    }

    fn remove_overlapping(&mut self, range: Range<usize>) -> Vec<Arc<Entry>> {
        let mut removed = Vec::new();
        for group in 0..=Access::ALL.bits() {
            for index in self.ranges.remove_overlapping(group, range.clone()) {
                removed.extend(self.take(index));
            }
        }
        removed
    }

    /// Takes the entry out that is idle and was not used for the longest time.
    fn take_least_recent_idle(&mut self) -> Option<Arc<Entry>> {
        let mut next = self.least_recent;
        while let Some(index) = next {
            let node = &self.nodes[index];
            next = node.after;
            // The only reference is ours; new ones are made under the lock, which we hold, or from others.
            if let Some(entry) = node.entry.as_ref().filter(|entry| Arc::strong_count(entry) == 1) {
                self.ranges.remove(entry.access.bits(), entry.start);
                return self.take(index);
            }
        }
        None
    }

    /// Takes an entry out that is no longer in `ranges`.
    fn take(&mut self, index: usize) -> Option<Arc<Entry>> {
        self.unlink(index);
        self.free.push(index);
        let entry = self.nodes[index].entry.take()?;
        if Arc::strong_count(&entry) == 1 {
            // It is deregistered in a moment, without the lock. Others need not wait for that.
            entry.counted.end();
        }
        Some(entry)
    }

    fn link_most_recent(&mut self, index: usize) {
        let last = self.most_recent.replace(index);
        (self.nodes[index].before, self.nodes[index].after) = (last, None);
        match last {
            Some(last) => self.nodes[last].after = Some(index),
            None => self.least_recent = Some(index),
        }
    }

    fn unlink(&mut self, index: usize) {
        let Node { before, after, .. } = self.nodes[index];
        match before {
            Some(before) => self.nodes[before].after = after,
            None => self.least_recent = after,
        }
        match after {
            Some(after) => self.nodes[after].before = before,
            None => self.most_recent = before,
        }
    }
}

/// A registered range of memory, from a [`RegionCache`]. While it exists, the memory stays registered and alive.
#[derive(Clone)]
pub struct CachedRegion {
    entry: Arc<Entry>,
    /// The range in the region.
    range: Range<usize>,
}

impl CachedRegion {
    /// The region that contains the range.
    #[inline]
    pub fn mr(&self) -> &Mr {
        self.entry.region.mr()
    }

    /// Where the range begins in the region.
    #[inline]
    pub fn offset(&self) -> usize {
        self.range.start
    }

    /// Length of the range in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether the length is zero.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// A scatter/gather entry for a part of the range.
    pub fn sge(&self, part: Range<usize>) -> Result<Sge<'_>, OutOfRegion> {
        let error =
            OutOfRegion { offset: part.start, len: part.end.wrapping_sub(part.start), region: self.len() };
        if part.end > self.len() || part.start > part.end {
            return Err(error);
        }
        self.mr().sge(self.range.start + part.start..self.range.start + part.end).map_err(|_| error)
    }
}

impl fmt::Debug for CachedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedRegion")
            .field("range", &self.range)
            .field("access", &self.entry.access)
            .finish()
    }
}
