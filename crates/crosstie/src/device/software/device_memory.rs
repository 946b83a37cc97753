//! The memory of a device: its segment, and the heap from which its objects take ranges.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use super::layout::{HEAP_AT, Header, MAGIC};
use super::lock::locked;
use crate::memory::heap::Heap;
use crate::memory::segment::{Segment, SharedRef};

/// The segment of a device, which its peers map, and what is free in it.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pub(super) segment: Arc<Segment>,
    heap: Mutex<Heap>,
}

impl DeviceMemory {
    /// Initialises the segment of a new device. `None` if it is too short.
    pub(super) fn new(segment: Arc<Segment>) -> Option<DeviceMemory> {
        let len = segment.len();
        let header: SharedRef<Header> = SharedRef::new(&segment, 0)?;
        header.len.store(len, Relaxed);
        header.magic.store(MAGIC, Relaxed);
        Some(DeviceMemory { segment, heap: Mutex::new(Heap::new(HEAP_AT, len)) })
    }

    /// Allocates zeroed memory. `None` if no free range is long enough.
    pub(super) fn allocate(self: &Arc<Self>, len: u64) -> Option<Allocation> {
        let (at, len) = locked(&self.heap).allocate(len)?;
        Some(Allocation { memory: self.clone(), at, len })
    }
}

/// A range of a device's memory. When it is dropped, the range is zeroed and free again: no peer may still use it then, see `quiescence.rs`.
#[derive(Debug)]
pub(super) struct Allocation {
    memory: Arc<DeviceMemory>,
    at: u64,
    len: u64,
}

impl Allocation {
    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.memory.segment
    }

    /// Its offset in the segment.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Leaves the range as it is, for peers that may still use it: it is not free again.
    pub(super) fn abandon(mut self) {
        self.len = 0;
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let DeviceMemory { segment, heap } = &*self.memory;
        // A forked child would zero the memory of its parent's device. Memory that could not be zeroed is never handed out again.
        if self.len > 0 && segment.is_of_this_process() && segment.discard(self.at, self.len).is_ok() {
            locked(heap).free(self.at, self.len);
        }
    }
}
