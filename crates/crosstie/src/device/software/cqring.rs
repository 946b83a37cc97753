//! The ring behind a completion queue, as its producers see it.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::Arc;

use super::layout::{CQES_AT, CqHeader, Cqe, CqeKind, Outcome};
use crate::device::{Opcode, Status};
use crate::memory::prefetch;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};
use crate::ring::reservation;

/// A ring somewhere, ready to be pushed to.
#[derive(Debug)]
pub(super) struct CqRing {
    pub(super) header: SharedRef<CqHeader>,
    pub(super) cqes: SharedSlice<Cqe>,
    depth: u64,
    /// What `consumed` was when last looked at: it is read again only when this says full.
    seen_consumed: AtomicU64,
}

/// A completion on its way into a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) kind: CqeKind,
    pub(super) opcode: Opcode,
    pub(super) status: Status,
    /// See [`Cqe::wr`].
    pub(super) wr: u64,
    pub(super) qp_num: u32,
    pub(super) byte_len: u32,
    /// Immediate (receives) or queue position (sends).
    pub(super) extra: u32,
    pub(super) has_imm: bool,
    /// Which connection of the queue pair it belongs to.
    pub(super) epoch: u8,
}

/// The ring had no room; a completion is lost.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overrun;

impl CqRing {
    /// The ring at `offset`, if what is there can be one.
    pub(super) fn new(segment: &Arc<Segment>, offset: u64) -> Option<CqRing> {
        let header: SharedRef<CqHeader> = SharedRef::new(segment, offset)?;
        let depth = header.depth.load(Relaxed);
        if !depth.is_power_of_two() {
            return None;
        }
        let cqes = SharedSlice::new(segment, offset.checked_add(CQES_AT)?, depth as usize)?;
        Some(CqRing { header, cqes, depth: depth.into(), seen_consumed: AtomicU64::new(0) })
    }

    /// Has the line of the next entry fetched: it arrives while the request is still being looked at.
    #[inline(always)]
    pub(super) fn expect_push(&self) {
        prefetch::for_write(self.cqes.ring(self.header.head.word.load(Relaxed)));
    }

    /// A place, to be filled by [`CqRing::publish`] at once: everybody else's completions queue behind it.
    #[inline(always)]
    pub(super) fn reserve(&self, claim: &AtomicU64) -> Result<u64, Overrun> {
        let has_room = |position: u64| {
            reservation::has_room(position, self.seen_consumed.load(Relaxed), self.depth) || {
                // Acquire, partner: the Release store of `consumed` in `Cq::poll`. The slot has been read.
                let consumed = self.header.consumed.word.load(Acquire);
                self.seen_consumed.store(consumed, Relaxed);
                reservation::has_room(position, consumed, self.depth)
            }
        };
        match reservation::reserve(&self.header.head.word, &self.header.mode, claim, has_room) {
            Some(position) => Ok(position),
            None => {
                self.header.overrun.store(1, Relaxed);
                self.header.bell.wake();
                Err(Overrun)
            }
        }
    }

    /// Fills a reserved place and lets the owner see it.
    #[inline(always)]
    pub(super) fn publish(&self, claim: &AtomicU64, position: u64, entry: &Entry) {
        let outcome = Outcome {
            kind: entry.kind as u8,
            opcode: entry.opcode as u8,
            status: entry.status as u8,
            has_imm: entry.has_imm,
            epoch: entry.epoch,
        };
        // The line after this one, so that it is on its way while the next request is prepared. Entries are two to a
        // line; two lines ahead was slower, none ahead a third slower.
        prefetch::for_write(self.cqes.ring(position.wrapping_add(2)));
        let cqe = self.cqes.ring(position);
        cqe.wr.store(entry.wr, Relaxed);
        cqe.what.store(u64::from(entry.byte_len) << 32 | u64::from(entry.qp_num), Relaxed);
        cqe.how.store(u64::from(entry.extra) << 32 | u64::from(outcome.to_bits()), Relaxed);
        // Release, partner: the Acquire load of `seq` in `Cq::poll`. Entry and payload are visible with it.
        cqe.seq.store(position.wrapping_add(1), Release);
        reservation::clear_claim(claim);
        self.header.bell.notify();
    }

    #[inline(always)]
    pub(super) fn push(&self, claim: &AtomicU64, entry: &Entry) -> Result<(), Overrun> {
        let position = self.reserve(claim)?;
        self.publish(claim, position, entry);
        Ok(())
    }

    /// Pushes if there is room. For entries that can be pushed later instead of being lost.
    pub(super) fn try_push(&self, claim: &AtomicU64, entry: &Entry) -> bool {
        let room = |position: u64| {
            // Acquire, partner: as in `reserve`.
            reservation::has_room(position, self.header.consumed.word.load(Acquire), self.depth)
        };
        match reservation::reserve(&self.header.head.word, &self.header.mode, claim, room) {
            Some(position) => {
                self.publish(claim, position, entry);
                true
            }
            None => false,
        }
    }

    /// Whether the entry at `position` can be read.
    pub(super) fn published(&self, position: u64) -> bool {
        // Acquire, partner: the Release store in `publish`.
        self.cqes.ring(position).seq.load(Acquire) == position.wrapping_add(1)
    }

    /// Fills a place whose owner is dead, see [`reservation::is_abandoned`].
    pub(super) fn void(&self, position: u64) {
        let cqe = self.cqes.ring(position);
        cqe.how.store(u64::from(Outcome::VOID.to_bits()), Relaxed);
        // Release, partner: as in `publish`.
        cqe.seq.store(position.wrapping_add(1), Release);
        self.header.bell.wake();
    }
}
