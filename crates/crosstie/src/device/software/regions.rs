//! The registered regions of a device.
//!
//! There are two tables. This process decides from its private one. Peers in other processes look at the copy in the segment, which any of them
//! can write.

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};

use super::error::os;
use super::layout::{REGIONS_AT, RegionEntry, RegionKey};
use super::lock::locked;
use super::region_keys::{RegionKeys, TaggedKey};
use crate::device::{Access, DeviceError, Sge};
use crate::memory::segment::{Segment, SharedSlice};

/// The tables of regions, and their keys.
#[derive(Debug)]
pub(super) struct Regions {
    /// The name of the device.
    gid: [u8; 16],
    /// The regions, in memory that no peer can write. This process decides from this table only.
    pub(super) table: SharedSlice<RegionEntry>,
    /// A copy of `table` in the segment, for peers in other processes. This process never reads it.
    published: SharedSlice<RegionEntry>,
    keys: Mutex<RegionKeys>,
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

/// The region tables of the open devices of this process, by the devices' names. A link to such a device uses the device's
/// own table.
static LOCAL_REGIONS: Mutex<BTreeMap<[u8; 16], SharedSlice<RegionEntry>>> = Mutex::new(BTreeMap::new());

/// The region table of a device of this process. `None` if there is no such device.
pub(super) fn local_regions(gid: &[u8; 16]) -> Option<SharedSlice<RegionEntry>> {
    locked(&LOCAL_REGIONS).get(gid).cloned()
}

impl Drop for Regions {
    fn drop(&mut self) {
        locked(&LOCAL_REGIONS).remove(&self.gid);
    }
}

impl Regions {
    /// Those of a new device with this name and segment.
    pub(super) fn new(gid: [u8; 16], segment: &Arc<Segment>) -> Result<Regions, DeviceError> {
        let count = RegionKey::INDICES as usize;
        let table = SharedSlice::private(count).map_err(os("allocating the table of regions"))?;
        let published = SharedSlice::new(segment, REGIONS_AT, count)
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        let keys = Mutex::new(RegionKeys::new(u16::from_ne_bytes([gid[0], gid[1]])));
        locked(&LOCAL_REGIONS).insert(gid, table.clone());
        Ok(Regions { gid, table, published, keys })
    }

    /// A key that no region had before. `None` if all are in use or used up.
    pub(super) fn take_key(&self) -> Option<TaggedKey> {
        locked(&self.keys).take()
    }

    /// The region with this key is gone, and no peer is inside an operation that found it.
    pub(super) fn give_back_key(&self, key: RegionKey) {
        locked(&self.keys).give_back(key);
    }

    /// Adds a region to both tables.
    pub(super) fn add(&self, key: RegionKey, region: &Region) {
        for table in [&self.table, &self.published] {
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
    pub(super) fn remove(&self, key: RegionKey) {
        for table in [&self.table, &self.published] {
            table[key.index() as usize].key.store(0, Relaxed);
        }
    }

    /// Whether the regions of all entries are registered.
    pub(super) fn are_registered(&self, sges: &[Sge<'_>]) -> bool {
        sges.iter().all(|sge| {
            let entry = &self.table[RegionKey::from_bits(sge.lkey).index() as usize];
            // Acquire, partner: the Release store in `add`.
            entry.key.load(Acquire) == sge.lkey && {
                // Another region has the same key, but not the same tag.
                let offset = sge.addr.wrapping_sub(entry.addr.load(Relaxed));
                let len = entry.len.load(Relaxed);
                offset <= len && u64::from(sge.len) <= len - offset
            }
        })
    }
}
