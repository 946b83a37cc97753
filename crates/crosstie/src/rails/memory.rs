//! Memory that can be sent from and received into.

use core::ops::Range;
use core::time::Duration;
use std::sync::Arc;

use crosstie_protocol::rails::MAX_RAILS;

use crate::device::{MultiRegion, OutOfRegion, RemoteMemory};

/// Memory registered on all devices of a [`Rails`](super::Rails) context. Any thread may register memory while others send.
///
/// Dropping it deregisters the memory when no request receives into it any more, see [`Mr`](crate::device::Mr). A send does not keep it:
/// memory that is dropped before [`test`](super::SendConnection::test) says that the send is done ends the connection.
#[derive(Debug)]
pub struct Memory {
    /// Each receive into it holds another reference until it is done, each send of a group until the group is complete.
    pub(super) regions: Arc<MultiRegion>,
    /// The context, so that memory of another one is recognised.
    pub(super) context: u64,
    len: usize,
    pub(super) keys: RegionKeys,
}

/// What requests need of the regions, per rail, without a walk to them.
#[derive(Debug, Default)]
pub(super) struct RegionKeys {
    addrs: [u64; MAX_RAILS],
    pub(super) lkeys: [u32; MAX_RAILS],
    pub(super) rkeys: [u32; MAX_RAILS],
    pub(super) domains: [u32; MAX_RAILS],
}

/// Memory could not be deregistered; the error hands it back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeregisterError {
    /// A receive into this memory is outstanding, or a send from it waits for the others of its group.
    #[error(
        "a receive into this memory, or an incomplete group of sends, is outstanding: complete it, or abort its connection"
    )]
    InUse(Memory),
    /// A peer is inside an operation on the memory.
    #[error(
        "a peer{} is inside an operation and may still access the memory; it may be stopped: let it continue, or end it",
        process.map_or(String::new(), |process| format!(" in process {process}"))
    )]
    PeerBusy {
        /// The memory. It must stay valid until it is deregistered or dropped.
        memory: Memory,
        /// The peer's process, if it is known.
        process: Option<u32>,
    },
}

impl Memory {
    /// For regions in all domains of this context.
    pub(super) fn new(regions: Arc<MultiRegion>, context: u64) -> Memory {
        let mut keys = RegionKeys::default();
        for rail in 0..regions.domains().min(MAX_RAILS) {
            let region = regions.region(rail);
            RemoteMemory { addr: keys.addrs[rail], rkey: keys.rkeys[rail], .. } = region.remote();
            // An empty range is inside of any region.
            (keys.lkeys[rail], keys.domains[rail]) =
                region.sge(0..0).map_or((0, 0), |sge| (sge.lkey, sge.pd));
        }
        Memory { len: regions.len(), regions, context, keys }
    }

    /// The address of a range on each rail, and its length.
    #[inline]
    pub(super) fn resolve(&self, range: Range<usize>) -> Result<([u64; MAX_RAILS], u32), OutOfRegion> {
        let len = range.end.wrapping_sub(range.start);
        if range.end > self.len || range.start > range.end || len > u32::MAX as usize {
            return Err(OutOfRegion { offset: range.start, len, region: self.len });
        }
        Ok((self.keys.addrs.map(|addr| addr.wrapping_add(range.start as u64)), len as u32))
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// What a peer needs to access it over this rail.
    pub fn remote(&self, rail: usize) -> RemoteMemory {
        self.regions.region(rail).remote()
    }

    /// Copies bytes into the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        self.regions.write(offset, bytes)
    }

    /// Copies bytes out of the memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        self.regions.read(offset, bytes)
    }

    /// Deregisters the memory: when this returns `Ok`, nothing accesses it any more. It waits at most `timeout` for a peer that
    /// is inside an operation on it.
    pub fn deregister(self, timeout: Duration) -> Result<(), DeregisterError> {
        let Memory { regions, context, .. } = self;
        match Arc::try_unwrap(regions) {
            Err(regions) => Err(DeregisterError::InUse(Memory::new(regions, context))),
            Ok(regions) => regions.deregister(timeout).map_err(|(regions, process)| {
                let memory = Memory::new(Arc::new(regions), context);
                DeregisterError::PeerBusy { memory, process }
            }),
        }
    }
}
