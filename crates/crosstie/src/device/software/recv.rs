//! Receive queues: a queue pair's own, from which one peer takes in order. Shared ones, from which many peers take, are in
//! `shared_recv.rs`.
//!
//! The owner keeps the `wr_id`s and the record of what is outstanding in private memory ([`RecvQueue`]). The segment holds only what a
//! sender must see; a sender uses either kind of queue through [`PeerRecvQueue`].
//!
//! ```text
//!  owner:  slots[posted % depth] = SGEs, posted += 1        (OwnerLine::posted)
//!  peer:   takes slots in order, taken += 1                 (PeerLine::taken)
//! ```

use core::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};
use std::sync::Arc;

use super::device_memory::Allocation;
use super::layout::{OwnerLine, PeerLine, QpBlock};
use super::recv_slots::{CompletedRecv, RecvSge, RecvSlots, WrittenEntries, check, room};
use super::shared_recv::SharedTaker;
use crate::device::{DeviceError, PostError, RecvWr};
use crate::memory::segment::Segment;

/// A queue pair's own receive queue, as its owner uses it.
#[derive(Debug)]
pub(super) struct RecvQueue {
    pub(super) slots: RecvSlots,
    records: Box<[OwnRecord]>,
    capacity: u64,
    /// Receives posted so far. Writer: the poster.
    pub(super) posted: AtomicU64,
    /// Receives completed so far. Writer: the poller.
    completed: AtomicU64,
    /// Receives before this position were dropped by a reset. Writer: the poster.
    base: AtomicU64,
    pub(super) memory: Allocation,
}

/// The owner's record of the receive in one slot.
#[derive(Debug, Default)]
struct OwnRecord {
    wr_id: AtomicU64,
    /// Bytes that it has room for.
    room: AtomicU32,
    entries: WrittenEntries,
}

impl RecvQueue {
    pub(super) fn new(
        allocate: impl FnOnce(u64) -> Result<Allocation, DeviceError>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<RecvQueue, DeviceError> {
        let depth = max_wr.max(1).next_power_of_two();
        let memory = allocate(RecvSlots::bytes(depth, max_sge))?;
        let slots = RecvSlots::new(memory.segment(), memory.at(), depth, max_sge)
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        Ok(RecvQueue {
            slots,
            records: (0..depth).map(|_| OwnRecord::default()).collect(),
            capacity: max_wr.into(),
            posted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            base: AtomicU64::new(0),
            memory,
        })
    }

    pub(super) fn depth(&self) -> u32 {
        self.records.len() as u32
    }

    pub(super) fn max_sge(&self) -> u32 {
        self.slots.max_sge
    }

    #[inline]
    pub(super) fn post(&self, line: &OwnerLine, wr: &RecvWr<'_>) -> Result<(), PostError> {
        check(wr, self.slots.max_sge)?;
        let posted = self.posted.load(Relaxed);
        // Acquire, partner: the Release store in `complete`: the slot's `wr_id` has been read.
        let completed = self.completed.load(Acquire).max(self.base.load(Relaxed));
        if posted - completed >= self.capacity {
            return Err(PostError::Full);
        }
        let slot = posted as usize & (self.records.len() - 1);
        let record = &self.records[slot];
        record.wr_id.store(wr.wr_id, Relaxed);
        record.room.store(room(wr), Relaxed);
        record.entries.write(&self.slots, slot, wr.sges);
        // Release, partner: the Acquire load in `complete`, when the poller flushes.
        self.posted.store(posted + 1, Release);
        // Release, partner: the sender's Acquire load in `PeerRecvQueue::take`. It makes the slot visible to the
        // sender and, through the sender's completion, the `wr_id` to the poller.
        line.posted.store(posted + 1, Release);
        Ok(())
    }

    /// Completes the receive at this position. Receives complete in order: `None` if this one is not the oldest that is outstanding, or if
    /// a reset on another thread drops it meanwhile.
    #[inline]
    pub(super) fn complete(&self, position: u64) -> Option<CompletedRecv> {
        // Acquire, partner: `posted.store` in `post`.
        if position != self.completed.load(Relaxed) || position >= self.posted.load(Acquire) {
            return None;
        }
        let record = &self.records[position as usize & (self.records.len() - 1)];
        let recv = CompletedRecv { wr_id: record.wr_id.load(Relaxed), room: record.room.load(Relaxed) };
        // Orders the loads above before that of `base`. Partner: the Release fence in `reset`. If the record is that of a receive which was
        // posted after the reset, then `base` is that of the reset, too.
        fence(Acquire);
        if position < self.base.load(Relaxed) {
            return None;
        }
        // Release, partner: the Acquire load in `post`.
        self.completed.store(position + 1, Release);
        Some(recv)
    }

    /// The position of the oldest receive that has not completed, for the poller.
    pub(super) fn next_position(&self) -> u64 {
        self.completed.load(Relaxed)
    }

    /// The poller goes on with the receives of the connection that begins at `first`.
    pub(super) fn follow_reset(&self, first: u64) {
        // Release, partner: the Acquire load in `post`.
        self.completed.store(first, Release);
    }

    /// Drops every outstanding receive. No peer may be taking from the queue. The poller may be completing one of them: it completes that
    /// one or none.
    pub(super) fn reset(&self) {
        self.base.store(self.posted.load(Relaxed), Relaxed);
        // Orders this store before those of the receives that are posted from now on. Partner: the Acquire fence in `complete`.
        fence(Release);
    }

    /// The position of the first receive of the current connection.
    pub(super) fn base(&self) -> u64 {
        self.base.load(Relaxed)
    }
}

/// A peer's receive queue, as a sender uses it.
#[derive(Debug)]
pub(super) struct PeerRecvQueue {
    slots: RecvSlots,
    /// Receives that this sender has taken: the position of the next one in an own queue.
    taken: u64,
    /// Receives that were posted, as far as this sender knows.
    seen_posted: u64,
    shared: Option<SharedTaker>,
}

/// A receive that a sender has taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakenRecv {
    /// Identifies a receive of a shared queue to its owner. Those of an own queue are known by their position; it is zero then.
    pub(super) slot: u16,
    /// How many receives the sender had taken before.
    pub(super) position: u64,
}

impl PeerRecvQueue {
    /// The receive queue of the queue pair in `block`. `None` if the block's values are invalid.
    ///
    /// `taken` is the number of receives that this sender has taken already.
    pub(super) fn new(
        segment: &Arc<Segment>,
        block: &QpBlock,
        taker: u16,
        taken: u64,
    ) -> Option<PeerRecvQueue> {
        let line = &block.owner_line;
        let (at, depth) = (line.recv_at.load(Relaxed), line.recv_depth.load(Relaxed));
        let max_sge = line.recv_sges.load(Relaxed);
        if max_sge > 1 << 10 || !depth.is_power_of_two() {
            return None;
        }
        if line.shared.load(Relaxed) == 0 {
            let slots = RecvSlots::new(segment, at, depth, max_sge)?;
            Some(PeerRecvQueue { slots, taken, seen_posted: taken, shared: None })
        } else {
            let (shared, slots) = SharedTaker::new(segment, at, depth, max_sge, taker)?;
            Some(PeerRecvQueue { slots, taken, seen_posted: 0, shared: Some(shared) })
        }
    }

    /// The number of receives that this sender has taken.
    #[inline]
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes the next receive. `line` is this sender's line at the owner.
    #[inline(always)]
    pub(super) fn take(&mut self, block: &QpBlock, line: &PeerLine) -> Option<TakenRecv> {
        if self.shared.is_none() && self.taken == self.seen_posted {
            // Acquire, partner: the Release store in `RecvQueue::post`.
            self.seen_posted = block.owner_line.posted.load(Acquire);
        }
        if let Some(taken) = self.take_at_hand(line) {
            return Some(taken);
        }
        let slot = self.shared.as_mut()?.search(&mut self.seen_posted)?;
        Some(self.note_taken(self.taken, slot, line))
    }

    /// As [`take`](PeerRecvQueue::take), if the next receive is known to be there, and nobody else took it.
    #[inline(always)]
    pub(super) fn take_at_hand(&mut self, line: &PeerLine) -> Option<TakenRecv> {
        let position = self.taken;
        let slot = match &mut self.shared {
            // A count that went backwards is invalid; treat the queue as empty.
            None if position >= self.seen_posted => return None,
            None => 0,
            Some(shared) => shared.take_next(self.seen_posted)?,
        };
        Some(self.note_taken(position, slot, line))
    }

    #[inline]
    fn note_taken(&mut self, position: u64, slot: u16, line: &PeerLine) -> TakenRecv {
        self.taken = position.wrapping_add(1);
        line.taken.store(self.taken, Relaxed);
        TakenRecv { slot, position }
    }

    /// The scatter/gather entries of a taken receive.
    pub(super) fn sges(&self, taken: TakenRecv) -> impl Iterator<Item = RecvSge> {
        let slot = if self.is_shared() { taken.slot.into() } else { taken.position as usize };
        self.slots.sges(slot & (self.slots.depth() - 1))
    }

    #[inline]
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }
}
