//! Lets all clients start a slice together, and tells the server when all of them have finished it.

use core::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::error::Error;
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

/// Offsets of the two counts in the region.
const STARTED: usize = 512;
const FINISHED: usize = 640;

/// Counts the clients that have started and that have finished, in memory that all ranks map. The counts only grow.
pub(super) struct SliceBarrier<'a> {
    region: &'a SharedRegion,
    clients: u64,
    /// The value of both counts when this slice is over.
    total: u64,
}

impl<'a> SliceBarrier<'a> {
    pub(super) fn new(region: &'a SharedRegion, clients: usize) -> SliceBarrier<'a> {
        SliceBarrier { region, clients: clients as u64, total: 0 }
    }

    /// Every rank calls this before a slice.
    pub(super) fn begin_slice(&mut self) {
        self.total += self.clients;
    }

    /// Called by a client: waits until all clients have started.
    pub(super) fn wait_for_start(&self, mut spin: SpinWait) -> Result<(), Error> {
        // Release, partner: the Acquire load below, in the other clients.
        self.region.word(STARTED).fetch_add(1, AcqRel);
        // Acquire, partner: the Release part of the increment above.
        while self.region.word(STARTED).load(Acquire) < self.total {
            spin.idle()?;
        }
        Ok(())
    }

    /// Called by a client when it has finished the slice, with or without an error.
    pub(super) fn finish(&self) {
        // Release, partner: the Acquire in `all_finished`.
        self.region.word(FINISHED).fetch_add(1, AcqRel);
    }

    /// Called by the server: whether all clients have finished, so that no further request will come in this slice.
    #[inline]
    pub(super) fn all_finished(&self) -> bool {
        // Acquire, partner: the Release in `finish`.
        self.region.word(FINISHED).load(Acquire) >= self.total
    }
}
