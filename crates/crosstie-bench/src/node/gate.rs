//! Clients begin a slice together, and the server learns when all have ended it.

use core::sync::atomic::Ordering::{AcqRel, Acquire};

use crate::arena::Arena;
use crate::error::Error;
use crate::patience::Patience;

const IN: usize = 512;
const OUT: usize = 640;

/// Counts, in memory that all sides map, who began and who ended. The counts only grow.
pub(super) struct Gate<'a> {
    arena: &'a Arena,
    clients: u64,
    /// How many have begun and ended once this slice is over.
    total: u64,
}

impl<'a> Gate<'a> {
    pub(super) fn new(arena: &'a Arena, clients: usize) -> Gate<'a> {
        Gate { arena, clients: clients as u64, total: 0 }
    }

    /// Every side, before a slice.
    pub(super) fn next(&mut self) {
        self.total += self.clients;
    }

    /// A client: waits until all are here.
    pub(super) fn enter(&self, mut patience: Patience) -> Result<(), Error> {
        // Release, partner: the Acquire below, of the others.
        self.arena.word(IN).fetch_add(1, AcqRel);
        // Acquire, partner: the Release above.
        while self.arena.word(IN).load(Acquire) < self.total {
            patience.idle()?;
        }
        Ok(())
    }

    /// A client: has ended, well or not.
    pub(super) fn leave(&self) {
        // Release, partner: the Acquire in `all_are_out`.
        self.arena.word(OUT).fetch_add(1, AcqRel);
    }

    /// The server: whether nobody will ask any more.
    #[inline]
    pub(super) fn all_are_out(&self) -> bool {
        // Acquire, partner: the Release in `leave`.
        self.arena.word(OUT).load(Acquire) >= self.total
    }
}
