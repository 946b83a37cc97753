//! Registered memory, as requests use it.

use core::ops::Range;
use std::sync::{Arc, LazyLock};

use crosstie::rails::Memory;

use crate::fault::Fault;
use crate::key::{Key, Kind};
use crate::table::Table;

/// Registrations at a time.
const MAX_MEMORY: u32 = 1 << 20;

/// Memory that NCCL has registered: two cache lines.
#[repr(align(64))]
pub(crate) struct Registered {
    pub(crate) memory: Memory,
    pub(crate) start: usize,
    pub(crate) is_gpu: bool,
}

const _: () = assert!(size_of::<Registered>() <= 128);

/// `None` only while the memory is being deregistered.
pub(crate) static MEMORY: LazyLock<Table<Option<Arc<Registered>>>> =
    LazyLock::new(|| Table::new(Kind::Memory, MAX_MEMORY));

impl Registered {
    /// The memory with this key.
    pub(crate) fn find(key: Key) -> Result<Arc<Registered>, Fault> {
        MEMORY.lock(key)?.clone().ok_or(Fault::InvalidKey(Kind::Memory))
    }

    /// The memory and the range of it that a buffer names.
    #[inline]
    pub(crate) fn range(&self, data: usize, size: usize) -> Result<(&Memory, Range<usize>), Fault> {
        if size == 0 {
            return Ok((&self.memory, 0..0));
        }
        let (at, len) = (data.wrapping_sub(self.start), self.memory.len());
        if data < self.start || at > len || size > len - at {
            return Err(Fault::Argument("the buffer is not inside the memory of its handle"));
        }
        Ok((&self.memory, at..at + size))
    }
}

/// The memory that a comm used last, so that its next request needs no lock and no reference count for it. NCCL has a handle for
/// each protocol of a connection. Deregistering memory makes all comms forget it.
#[derive(Default)]
pub(crate) struct RecentMemory {
    entries: [Option<(Key, Arc<Registered>)>; RECENT],
}

/// A power of two.
const RECENT: usize = 8;

impl RecentMemory {
    /// The memory with this key.
    #[inline]
    pub(crate) fn get(&mut self, key: Key) -> Result<&Registered, Fault> {
        let entry = &mut self.entries[key.entry().index as usize % RECENT];
        if !matches!(entry, Some((known, _)) if *known == key) {
            RecentMemory::find(entry, key)?;
        }
        match entry {
            Some((_, registered)) => Ok(registered),
            None => Err(Fault::InvalidKey(Kind::Memory)),
        }
    }

    #[cold]
    fn find(entry: &mut Option<(Key, Arc<Registered>)>, key: Key) -> Result<(), Fault> {
        // The old one may be this memory before it was registered again.
        *entry = None;
        *entry = Some((key, Registered::find(key)?));
        Ok(())
    }

    pub(crate) fn forget(&mut self, key: Key) {
        self.entries[key.entry().index as usize % RECENT].take_if(|(known, _)| *known == key);
    }
}
