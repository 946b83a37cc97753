//! The ring behind a completion queue, as its producers use it.
//!
//! Producers are the queue's own queue pairs (send completions) and datagram senders. The receives of connections complete in lanes
//! (`lane.rs`). `ring/reservation.rs` describes how producers share the ring and what happens when one dies. The consumer is in `cq.rs`;
//! what it has to do besides is in notices, which take no room here (`ring/notices.rs`).

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::sync::Arc;

use super::layout::{CQES_AT, CqHeader, Cqe, CqeKind, CqeTag, RequestWord, ResultWord, SubjectWord};
use crate::device::{Opcode, Status};
use crate::memory::prefetch;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};
use crate::ring::reservation;
use crate::ring::stalled::MAX_ROUNDS;

/// A completion ring in this device's segment or in a peer's.
#[derive(Debug)]
pub(super) struct CqRing {
    pub(super) header: SharedRef<CqHeader>,
    pub(super) cqes: SharedSlice<Cqe>,
    depth: u64,
    /// The last known value of `consumed`: it is read again only when the ring looks full.
    seen_consumed: AtomicU64,
}

/// A completion to be pushed.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewCqe {
    pub(super) kind: CqeKind,
    pub(super) opcode: Opcode,
    pub(super) status: Status,
    pub(super) request: RequestWord,
    pub(super) qp_num: u32,
    pub(super) byte_len: u32,
    /// The immediate (receives) or the position in the send queue (sends).
    pub(super) detail: u32,
    pub(super) has_imm: bool,
    /// Low bits of the epoch of the queue pair's connection.
    pub(super) epoch: u8,
}

/// The ring was full; a completion is lost.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Overrun;

impl CqRing {
    /// The ring at `offset`. `None` if the header there is invalid.
    pub(super) fn new(segment: &Arc<Segment>, offset: u64) -> Option<CqRing> {
        let header: SharedRef<CqHeader> = SharedRef::new(segment, offset)?;
        let depth = header.depth.load(Relaxed);
        CqRing::with_depth(segment, offset, depth)
    }

    /// The ring at `offset`, whose number of entries is known. `None` if it is no power of two, or if the ring is not inside of the segment.
    pub(super) fn with_depth(segment: &Arc<Segment>, offset: u64, depth: u32) -> Option<CqRing> {
        if !depth.is_power_of_two() {
            return None;
        }
        let header = SharedRef::new(segment, offset)?;
        let cqes = SharedSlice::new(segment, offset.checked_add(CQES_AT)?, depth as usize)?;
        Some(CqRing { header, cqes, depth: depth.into(), seen_consumed: AtomicU64::new(0) })
    }

    /// Reserves a position. The caller must [`publish`](CqRing::publish) it at once: the consumer waits for it before it passes it.
    #[inline]
    pub(super) fn reserve(&self, claim: &AtomicU64) -> Result<u64, Overrun> {
        let has_room = |position: u64| {
            reservation::has_room(position, self.seen_consumed.load(Relaxed), self.depth) || {
                // Acquire, partner: the Release store of `consumed` in `Cq::poll`. The slot has been read.
                let consumed = self.header.consumed.word.load(Acquire);
                self.seen_consumed.store(consumed, Relaxed);
                reservation::has_room(position, consumed, self.depth)
            }
        };
        match self.reserve_usable(claim, has_room) {
            Some(position) => Ok(position),
            None => {
                self.header.overrun.store(1, Relaxed);
                self.header.parker.wake();
                Err(Overrun)
            }
        }
    }

    /// Reserves a position whose entry is not [stalled](crate::ring::stalled).
    #[inline]
    fn reserve_usable(&self, claim: &AtomicU64, mut has_room: impl FnMut(u64) -> bool) -> Option<u64> {
        let header = &*self.header;
        for _ in 0..MAX_ROUNDS {
            let position = reservation::reserve(&header.head.word, &header.mode, claim, &mut has_room)?;
            if !header.stalled.contains(position, self.depth) {
                return Some(position);
            }
            // The consumer skips the position: nobody claims it, and it is not published.
            reservation::clear_claim(claim);
        }
        None
    }

    pub(super) fn depth(&self) -> u64 {
        self.depth
    }

    /// Writes the entry at a reserved position and makes it visible to the consumer.
    #[inline]
    pub(super) fn publish(&self, claim: &AtomicU64, position: u64, new: &NewCqe) {
        let tag = CqeTag {
            kind: new.kind as u8,
            opcode: new.opcode as u8,
            status: new.status as u8,
            has_imm: new.has_imm,
            epoch: new.epoch,
        };
        // Prefetch the next cache line, so that it arrives while the next request is prepared. A line holds two entries.
        // Measured: two lines ahead was slower, and without the prefetch a push took a third longer.
        prefetch::for_write(self.cqes.ring(position.wrapping_add(2)));
        let cqe = self.cqes.ring(position);
        let subject = SubjectWord::new(new.qp_num, new.byte_len);
        cqe.store(new.request, subject, ResultWord::new(tag, new.detail));
        cqe.publish(position);
        reservation::clear_claim(claim);
        self.header.parker.notify();
    }

    #[inline]
    pub(super) fn push(&self, claim: &AtomicU64, new: &NewCqe) -> Result<(), Overrun> {
        let position = self.reserve(claim)?;
        self.publish(claim, position, new);
        Ok(())
    }

    /// Whether the entry at `position` can be read.
    #[inline]
    pub(super) fn is_published(&self, position: u64) -> bool {
        self.cqes.ring(position).is_published(position)
    }

    /// Publishes a void entry at a position whose producer is dead, see [`reservation::is_abandoned`].
    pub(super) fn publish_void(&self, position: u64) {
        let cqe = self.cqes.ring(position);
        cqe.store_void();
        cqe.publish(position);
        self.header.parker.wake();
    }
}
