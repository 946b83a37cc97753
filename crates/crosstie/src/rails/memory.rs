//! Memory that can be sent from and received into.

use core::time::Duration;
use std::sync::Arc;

use crate::device::{MultiRegion, OutOfRegion, RemoteMemory};

/// Memory registered on all devices of a [`Rails`](super::Rails) context. Any thread may register memory while others send.
///
/// Dropping it deregisters the memory when no request receives into it any more, see [`Mr`](crate::device::Mr).
#[derive(Debug)]
pub struct Memory {
    /// A receive that may have to copy from staging memory holds a second reference.
    pub(super) regions: Arc<MultiRegion>,
    /// The context, so that memory of another one is recognised.
    pub(super) context: u64,
}

/// Memory could not be deregistered; the error hands it back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeregisterError {
    /// A receive into this memory is outstanding.
    #[error("a receive into this memory is outstanding: complete it, or abort its connection")]
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
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.regions.len()
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
        let Memory { regions, context } = self;
        match Arc::try_unwrap(regions) {
            Err(regions) => Err(DeregisterError::InUse(Memory { regions, context })),
            Ok(regions) => regions.deregister(timeout).map_err(|(regions, process)| {
                DeregisterError::PeerBusy { memory: Memory { regions: Arc::new(regions), context }, process }
            }),
        }
    }
}
