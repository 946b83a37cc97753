//! The plain copies: nothing is mapped, and there are no helpers.

use std::os::fd::OwnedFd;

pub(crate) use super::process_vm::copy;
use crate::device::software::layout::RegionEntry;
use crate::memory::segment::SharedSlice;

/// As in `fast/peer_mapping.rs`, with no region.
#[derive(Debug)]
pub(crate) struct PeerMappings;

impl PeerMappings {
    pub(crate) fn new() -> PeerMappings {
        PeerMappings
    }

    #[inline]
    pub(crate) fn find(
        &mut self,
        _regions: &SharedSlice<RegionEntry>,
        _process: Option<&OwnedFd>,
        _key: u32,
        _addr: u64,
        _len: u32,
    ) -> Option<MappedPtr> {
        None
    }
}

/// There is none.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MappedPtr {}

impl MappedPtr {
    pub(crate) fn at(self, _offset: usize) -> MappedPtr {
        self
    }

    /// # Safety
    ///
    /// None: it is never called.
    pub(crate) unsafe fn write(self, _from: *const u8, _len: usize) {
        match self {}
    }
}
