//! Clients begin a slice together, and the server learns when all have ended it.

use core::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::error::Error;
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

const STARTED: usize = 512;
const FINISHED: usize = 640;

/// Counts, in memory that all sides map, who began and who ended. The counts only grow.
pub(super) struct SliceBarrier<'a> {
    region: &'a SharedRegion,
    clients: u64,
    /// How many have begun and ended once this slice is over.
    total: u64,
}

impl<'a> SliceBarrier<'a> {
    pub(super) fn new(region: &'a SharedRegion, clients: usize) -> SliceBarrier<'a> {
        SliceBarrier { region, clients: clients as u64, total: 0 }
    }

    /// Every side, before a slice.
    pub(super) fn begin_slice(&mut self) {
        self.total += self.clients;
    }

    /// A client: waits until all are here.
    pub(super) fn wait_for_start(&self, mut spin: SpinWait) -> Result<(), Error> {
        // Release, partner: the Acquire below, of the others.
        self.region.word(STARTED).fetch_add(1, AcqRel);
        // Acquire, partner: the Release above.
        while self.region.word(STARTED).load(Acquire) < self.total {
            spin.idle()?;
        }
        Ok(())
    }

    /// A client: has ended, well or not.
    pub(super) fn finish(&self) {
        // Release, partner: the Acquire in `all_finished`.
        self.region.word(FINISHED).fetch_add(1, AcqRel);
    }

    /// The server: whether nobody will ask any more.
    #[inline]
    pub(super) fn all_finished(&self) -> bool {
        // Acquire, partner: the Release in `finish`.
        self.region.word(FINISHED).load(Acquire) >= self.total
    }
}
