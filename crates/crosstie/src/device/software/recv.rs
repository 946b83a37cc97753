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

use super::layout::{OwnerLine, PeerLine, QpBlock, RECV_HEAD_WORDS, recv_stride};
use super::shared_recv::SharedTaker;
use super::state::{Allocation, DeviceShared};
use crate::device::{Access, DeviceError, Opcode, PostError, RecvWr, Sge};
use crate::memory::segment::{Segment, SharedSlice};

/// The receive slots in a segment.
#[derive(Clone, Debug)]
pub(super) struct RecvSlots {
    words: SharedSlice<AtomicU64>,
    /// The number of slots.
    depth: usize,
    stride: usize,
    pub(super) max_sge: u32,
}

/// A scatter/gather entry of a receive, as read from the segment. Not yet checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecvSge {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) lkey: u32,
}

impl RecvSlots {
    pub(super) fn bytes(depth: u32, max_sge: u32) -> u64 {
        u64::from(depth) * recv_stride(max_sge) as u64 * 8
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn new(segment: &Arc<Segment>, offset: u64, depth: u32, max_sge: u32) -> Option<RecvSlots> {
        let stride = recv_stride(max_sge);
        let words = SharedSlice::new(segment, offset, (depth as usize).checked_mul(stride)?)?;
        Some(RecvSlots { words, depth: depth as usize, stride, max_sge })
    }

    #[inline(always)]
    fn write(&self, slot: usize, sges: &[Sge<'_>]) {
        let words = self.words.range(slot * self.stride + RECV_HEAD_WORDS, 2 * sges.len());
        for ([addr, len_key], sge) in words.as_chunks().0.iter().zip(sges) {
            addr.store(sge.addr, Relaxed);
            len_key.store(u64::from(sge.lkey) << 32 | u64::from(sge.len), Relaxed);
        }
    }

    #[inline(always)]
    fn write_count(&self, slot: usize, count: u32) {
        self.words[slot * self.stride].store(count.into(), Relaxed);
    }

    pub(super) fn sges(&self, slot: usize) -> impl Iterator<Item = RecvSge> {
        let at = slot * self.stride;
        let count = (self.words[at].load(Relaxed) as usize).min(self.max_sge as usize);
        (0..count).map(move |i| {
            let word = at + RECV_HEAD_WORDS + 2 * i;
            let len_key = self.words[word + 1].load(Relaxed);
            RecvSge {
                addr: self.words[word].load(Relaxed),
                len: len_key as u32,
                lkey: (len_key >> 32) as u32,
            }
        })
    }
}

/// Checks a receive as far as that is possible before a message arrives. Access rights are checked then.
pub(super) fn check(wr: &RecvWr<'_>, max_sge: u32) -> Result<(), PostError> {
    if wr.sges.len() > max_sge as usize {
        return Err(PostError::TooManySges { count: wr.sges.len(), max: max_sge as usize });
    }
    Ok(())
}

/// Bytes that a receive has room for.
#[inline]
pub(super) fn room(wr: &RecvWr<'_>) -> u32 {
    wr.sges.iter().fold(0, |sum: u32, sge| sum.saturating_add(sge.len))
}

/// A receive that completed. This is the owner's own record of it, not what a peer wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CompletedRecv {
    pub(super) wr_id: u64,
    /// Bytes that it has room for.
    pub(super) room: u32,
}

impl CompletedRecv {
    /// Whether a peer can have completed this receive so. The bytes of a WRITE+IMM are not in the receive.
    #[inline(always)]
    pub(super) fn fits(self, opcode: Opcode, byte_len: u32) -> bool {
        match opcode {
            Opcode::Recv => byte_len <= self.room,
            _ => opcode == Opcode::RecvWriteImm,
        }
    }
}

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

/// How many scatter/gather entries the slot of a receive says it has. Receives of WRITE+IMMs have none: their slots, each a cache line, are
/// written once and then left alone. Writer: the poster.
#[derive(Debug)]
pub(super) struct WrittenEntries {
    count: AtomicU32,
}

impl Default for WrittenEntries {
    /// Those of a slot that was not written yet.
    fn default() -> WrittenEntries {
        WrittenEntries { count: AtomicU32::new(u32::MAX) }
    }
}

impl WrittenEntries {
    /// Writes the entries of a receive into its slot.
    #[inline(always)]
    pub(super) fn write(&self, slots: &RecvSlots, slot: usize, sges: &[Sge<'_>]) {
        let count = sges.len() as u32;
        if self.count.load(Relaxed) != count {
            slots.write_count(slot, count);
            self.count.store(count, Relaxed);
        }
        slots.write(slot, sges);
    }
}

impl RecvQueue {
    pub(super) fn new(
        device: &Arc<DeviceShared>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<RecvQueue, DeviceError> {
        let depth = max_wr.max(1).next_power_of_two();
        let memory = device.allocate(RecvSlots::bytes(depth, max_sge))?;
        let slots = RecvSlots::new(&device.segment, memory.at, depth, max_sge)
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
    #[inline(always)]
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

    #[inline(always)]
    fn note_taken(&mut self, position: u64, slot: u16, line: &PeerLine) -> TakenRecv {
        self.taken = position.wrapping_add(1);
        line.taken.store(self.taken, Relaxed);
        TakenRecv { slot, position }
    }

    /// The scatter/gather entries of a taken receive.
    pub(super) fn sges(&self, taken: TakenRecv) -> impl Iterator<Item = RecvSge> {
        let slot = if self.is_shared() { taken.slot.into() } else { taken.position as usize };
        self.slots.sges(slot & (self.slots.depth - 1))
    }

    #[inline(always)]
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }
}

/// The access right that the memory of a receive needs.
pub(super) const RECV_ACCESS: Access = Access::LOCAL_WRITE;

#[cfg(all(test, not(loom)))]
mod tests {
    use core::marker::PhantomData;

    use super::*;

    #[test]
    fn slot_has_the_entries_of_its_last_receive() {
        let segment = Arc::new(Segment::create(4096).unwrap());
        let slots = RecvSlots::new(&segment, 0, 2, 2).unwrap();
        let entry = |addr, len| Sge { addr, len, lkey: 7, pd: 0, access: RECV_ACCESS, region: PhantomData };
        let (entries, long, short) = (WrittenEntries::default(), [entry(1, 2), entry(3, 4)], [entry(5, 6)]);
        // What was in this memory before.
        slots.write_count(1, 2);
        slots.write(1, &long);
        for sges in [&[][..], &[], &short, &[], &long, &short, &[], &[]] {
            entries.write(&slots, 1, sges);
            let written: Vec<_> = slots.sges(1).map(|sge| (sge.addr, sge.len, sge.lkey)).collect();
            let expected: Vec<_> = sges.iter().map(|sge| (sge.addr, sge.len, sge.lkey)).collect();
            assert_eq!(written, expected);
        }
    }
}
