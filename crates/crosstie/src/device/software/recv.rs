//! Receive queues: a queue pair's own, which one peer takes from in order, and shared ones, which many take from.
//!
//! The owner keeps `wr_id`s and what is outstanding in private memory; the segment holds only what a sender must see.

use core::sync::atomic::{
    AtomicU8, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::Arc;

use super::layout::{OwnerLine, QpBlock, RECV_HEAD_WORDS, SrqHeader, SrqWord, recv_stride};
use super::setup::{Allocation, Inner};
use crate::device::{Access, DeviceError, PostError, RecvWr, Sge};
use crate::memory::segment::{Segment, SharedRef, SharedSlice};

/// Where receives lie in a segment.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    words: SharedSlice<AtomicU64>,
    stride: usize,
    max_sge: u32,
}

/// A piece of a receive, as read from the segment. Not yet checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) lkey: u32,
}

impl Slots {
    pub(super) fn bytes(depth: u32, max_sge: u32) -> u64 {
        u64::from(depth) * recv_stride(max_sge) as u64 * 8
    }

    pub(super) fn new(segment: &Arc<Segment>, offset: u64, depth: u32, max_sge: u32) -> Option<Slots> {
        let stride = recv_stride(max_sge);
        let words = SharedSlice::new(segment, offset, (depth as usize).checked_mul(stride)?)?;
        Some(Slots { words, stride, max_sge })
    }

    fn write(&self, slot: usize, sges: &[Sge<'_>]) {
        let at = slot * self.stride;
        self.words[at].store(sges.len() as u64, Relaxed);
        for (i, sge) in sges.iter().enumerate() {
            let word = at + RECV_HEAD_WORDS + 2 * i;
            self.words[word].store(sge.addr, Relaxed);
            self.words[word + 1].store(u64::from(sge.lkey) << 32 | u64::from(sge.len), Relaxed);
        }
    }

    pub(super) fn pieces(&self, slot: usize) -> impl Iterator<Item = Piece> {
        let at = slot * self.stride;
        let count = (self.words[at].load(Relaxed) as usize).min(self.max_sge as usize);
        (0..count).map(move |i| {
            let word = at + RECV_HEAD_WORDS + 2 * i;
            let len_key = self.words[word + 1].load(Relaxed);
            Piece { addr: self.words[word].load(Relaxed), len: len_key as u32, lkey: (len_key >> 32) as u32 }
        })
    }
}

/// What can be known to be wrong with a receive before a message meets it. Rights are the message's to find out.
fn check(wr: &RecvWr<'_>, max_sge: u32) -> Result<(), PostError> {
    if wr.sges.len() > max_sge as usize {
        return Err(PostError::TooManySges { count: wr.sges.len(), max: max_sge as usize });
    }
    Ok(())
}

/// A queue pair's own receive queue, owner's side.
#[derive(Debug)]
pub(super) struct OwnQueue {
    pub(super) slots: Slots,
    wr_ids: Box<[AtomicU64]>,
    capacity: u64,
    /// Receives posted, ever. Writer: the poster.
    pub(super) posted: AtomicU64,
    /// Receives ended, ever. Writer: the poller.
    done: AtomicU64,
    /// Receives before this were dropped by a reset. Writer: the poster.
    base: AtomicU64,
    pub(super) memory: Allocation,
}

impl OwnQueue {
    pub(super) fn new(inner: &Arc<Inner>, max_wr: u32, max_sge: u32) -> Result<OwnQueue, DeviceError> {
        let depth = max_wr.max(1).next_power_of_two();
        let memory = inner.allocate(Slots::bytes(depth, max_sge))?;
        let slots = Slots::new(&inner.segment, memory.at, depth, max_sge)
            .ok_or(DeviceError::Exhausted { what: "device memory" })?;
        Ok(OwnQueue {
            slots,
            wr_ids: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            capacity: max_wr.into(),
            posted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            base: AtomicU64::new(0),
            memory,
        })
    }

    pub(super) fn depth(&self) -> u32 {
        self.wr_ids.len() as u32
    }

    pub(super) fn max_sge(&self) -> u32 {
        self.slots.max_sge
    }

    #[inline]
    pub(super) fn post(&self, line: &OwnerLine, wr: &RecvWr<'_>) -> Result<(), PostError> {
        check(wr, self.slots.max_sge)?;
        let posted = self.posted.load(Relaxed);
        // Acquire, partner: the Release store in `finish`: the slot's `wr_id` has been read.
        let done = self.done.load(Acquire).max(self.base.load(Relaxed));
        if posted - done >= self.capacity {
            return Err(PostError::Full);
        }
        let slot = posted as usize & (self.wr_ids.len() - 1);
        self.wr_ids[slot].store(wr.wr_id, Relaxed);
        self.slots.write(slot, wr.sges);
        // Release, partner: `flush` below, on the poller's thread.
        self.posted.store(posted + 1, Release);
        // Release, partner: the sender's Acquire load in `RecvTarget::take`. The slot is visible with it, and, through
        // the sender's completion, the `wr_id` to the poller.
        line.posted.store(posted + 1, Release);
        Ok(())
    }

    /// The next receive ended, as they do: in order. Gives its `wr_id`, if there is one outstanding.
    #[inline]
    pub(super) fn finish(&self) -> Option<u64> {
        let done = self.done.load(Relaxed).max(self.base.load(Relaxed));
        // Acquire, partner: `posted.store` in `post`.
        if done >= self.posted.load(Acquire) {
            return None;
        }
        let wr_id = self.wr_ids[done as usize & (self.wr_ids.len() - 1)].load(Relaxed);
        // Release, partner: the Acquire load in `post`.
        self.done.store(done + 1, Release);
        Some(wr_id)
    }

    /// Drops everything outstanding. Nobody may be taking from the queue. Gives the position to go on from.
    pub(super) fn reset(&self) -> u64 {
        let posted = self.posted.load(Relaxed);
        self.base.store(posted, Relaxed);
        posted
    }
}

/// A shared receive queue, owner's side. Datagram queue pairs have one of their own.
#[derive(Debug)]
pub(super) struct SharedQueue {
    pub(super) inner: Arc<Inner>,
    pub(super) header: SharedRef<SrqHeader>,
    words: SharedSlice<AtomicU64>,
    slots: Slots,
    wr_ids: Box<[AtomicU64]>,
    /// Per slot: 0 free, 1 outstanding. Poster sets, pollers clear.
    outstanding: Box<[AtomicU8]>,
    /// Per slot: the position it was posted at.
    positions: Box<[AtomicU64]>,
    capacity: u32,
    pub(super) memory: Allocation,
}

const SRQ_WORDS_AT: u64 = size_of::<SrqHeader>() as u64;

fn srq_slots_at(offset: u64, depth: u32) -> Option<u64> {
    offset.checked_add(SRQ_WORDS_AT + (16 * u64::from(depth)).next_multiple_of(64))
}

impl SharedQueue {
    pub(super) fn new(
        inner: &Arc<Inner>,
        pd: u32,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedQueue, DeviceError> {
        let depth = max_wr.max(4).next_power_of_two();
        let bytes = srq_slots_at(0, depth).map(|at| at + Slots::bytes(depth, max_sge));
        let none = || DeviceError::Exhausted { what: "device memory" };
        let memory = inner.allocate(bytes.ok_or_else(none)?)?;
        let header: SharedRef<SrqHeader> = SharedRef::new(&inner.segment, memory.at).ok_or_else(none)?;
        header.depth.store(depth, Relaxed);
        header.sges.store(max_sge, Relaxed);
        header.pd.store(pd, Relaxed);
        let (words, slots) = shared_parts(&inner.segment, memory.at, depth, max_sge).ok_or_else(none)?;
        Ok(SharedQueue {
            inner: inner.clone(),
            header,
            words,
            slots,
            wr_ids: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            outstanding: (0..depth).map(|_| AtomicU8::new(0)).collect(),
            positions: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            capacity: max_wr,
            memory,
        })
    }

    /// `cursor` is the poster's: how many were posted, and where to look for a free slot.
    #[inline]
    pub(super) fn post(&self, cursor: &mut PostCursor, wr: &RecvWr<'_>) -> Result<(), PostError> {
        check(wr, self.slots.max_sge)?;
        let position = cursor.posted;
        let ring = self.words.len() as u64;
        if position >= ring {
            // The word is about to be written over. It may still be the only record of who took a receive.
            let old = SrqWord(self.words.ring(position).load(Relaxed));
            let slot = usize::from(old.slot()) & (self.wr_ids.len() - 1);
            if old.is_at(position - ring)
                && self.outstanding[slot].load(Acquire) != 0
                && self.positions[slot].load(Relaxed) == position - ring
            {
                return Err(PostError::Full);
            }
        }
        let slot = self.free_slot(cursor).ok_or(PostError::Full)?;
        self.wr_ids[slot].store(wr.wr_id, Relaxed);
        self.positions[slot].store(position, Relaxed);
        self.slots.write(slot, wr.sges);
        self.outstanding[slot].store(1, Relaxed);
        self.words.ring(position).store(SrqWord::posted(position, slot as u16).0, Relaxed);
        cursor.posted += 1;
        // Release, partner: the taker's Acquire load in `RecvTarget::take`. Word and slot are visible with it, and,
        // through the taker's completion, the private parts to the poller.
        self.header.posted.word.store(position + 1, Release);
        Ok(())
    }

    fn free_slot(&self, cursor: &mut PostCursor) -> Option<usize> {
        let mask = self.wr_ids.len() - 1;
        // One at a time would find a full queue slowly and allow `depth` rather than `capacity`: count first.
        if cursor.posted - cursor.finished >= u64::from(self.capacity) {
            cursor.finished =
                cursor.posted - self.outstanding.iter().filter(|o| o.load(Relaxed) != 0).count() as u64;
            if cursor.posted - cursor.finished >= u64::from(self.capacity) {
                return None;
            }
        }
        for step in 0..=mask {
            let slot = (cursor.next + step) & mask;
            // Acquire, partner: the Release store in `finish`: the slot's parts have been read.
            if self.outstanding[slot].load(Acquire) == 0 {
                cursor.next = slot + 1;
                return Some(slot);
            }
        }
        None
    }

    /// The receive in `slot` ended. Gives its `wr_id`, unless the peer that says so is wrong.
    #[inline]
    pub(super) fn finish(&self, slot: u32) -> Option<u64> {
        let flag = self.outstanding.get(slot as usize)?;
        if flag.load(Acquire) == 0 {
            return None;
        }
        let wr_id = self.wr_ids[slot as usize].load(Relaxed);
        // Release, partner: the Acquire loads in `free_slot` and `post`.
        flag.store(0, Release);
        Some(wr_id)
    }

    /// Slots that `taker` took and did not finish. Right only once everything it finished has been polled.
    pub(super) fn taken_by(&self, taker: u16) -> Vec<u32> {
        let mut slots: Vec<(u64, u32)> = (0..self.words.len())
            .map(|i| SrqWord(self.words[i].load(Acquire)))
            .filter(|word| word.is_taken() && word.taker() == taker)
            .filter_map(|word| {
                let slot = usize::from(word.slot());
                let position = self.positions.get(slot)?.load(Relaxed);
                (word.is_at(position) && self.outstanding[slot].load(Acquire) != 0)
                    .then_some((position, slot as u32))
            })
            .collect();
        slots.sort_unstable();
        slots.into_iter().map(|(_, slot)| slot).collect()
    }

    /// Every slot that is outstanding, in the order of posting.
    pub(super) fn all_outstanding(&self) -> Vec<u32> {
        let mut slots: Vec<(u64, u32)> = (0..self.outstanding.len())
            .filter(|&slot| self.outstanding[slot].load(Acquire) != 0)
            .map(|slot| (self.positions[slot].load(Relaxed), slot as u32))
            .collect();
        slots.sort_unstable();
        slots.into_iter().map(|(_, slot)| slot).collect()
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        self.inner.free(&self.memory);
    }
}

/// The poster's place in a [`SharedQueue`].
#[derive(Debug, Default)]
pub(super) struct PostCursor {
    posted: u64,
    /// At least so many have ended.
    finished: u64,
    next: usize,
}

fn shared_parts(
    segment: &Arc<Segment>,
    offset: u64,
    depth: u32,
    max_sge: u32,
) -> Option<(SharedSlice<AtomicU64>, Slots)> {
    let words = SharedSlice::new(segment, offset.checked_add(SRQ_WORDS_AT)?, 2 * depth as usize)?;
    Some((words, Slots::new(segment, srq_slots_at(offset, depth)?, depth, max_sge)?))
}

/// A peer's receive queue, sender's side.
#[derive(Debug)]
pub(super) enum RecvTarget {
    /// Only we take from it, in order.
    Own { slots: Slots, mask: u64, taken: u64, seen_posted: u64 },
    /// Others take from it, too; we sign what we take.
    Shared {
        header: SharedRef<SrqHeader>,
        words: SharedSlice<AtomicU64>,
        slots: Slots,
        taker: u16,
        seen_posted: u64,
    },
}

/// A receive that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    /// What the owner needs to know it by.
    pub(super) slot: u32,
}

impl RecvTarget {
    /// The receive queue of the queue pair in `block`, if what is there makes sense.
    pub(super) fn new(segment: &Arc<Segment>, block: &QpBlock, taker: u16) -> Option<RecvTarget> {
        let line = &block.line1;
        let (at, depth) = (line.recv_at.load(Relaxed), line.recv_depth.load(Relaxed));
        let max_sge = line.recv_sges.load(Relaxed);
        if max_sge > 1 << 10 || !depth.is_power_of_two() {
            return None;
        }
        if line.shared.load(Relaxed) == 0 {
            let slots = Slots::new(segment, at, depth, max_sge)?;
            let taken = block.requester.taken.load(Relaxed);
            Some(RecvTarget::Own { slots, mask: u64::from(depth) - 1, taken, seen_posted: taken })
        } else {
            let header: SharedRef<SrqHeader> = SharedRef::new(segment, at)?;
            let (words, slots) = shared_parts(segment, at, depth, max_sge)?;
            Some(RecvTarget::Shared { header, words, slots, taker, seen_posted: 0 })
        }
    }

    /// Whether a receive is there to be taken. For the own queue a `true` stays true.
    #[inline]
    pub(super) fn ready(&mut self, block: &QpBlock) -> bool {
        match self {
            RecvTarget::Own { taken, seen_posted, .. } => {
                if *taken == *seen_posted {
                    // Acquire, partner: the Release store in `OwnQueue::post`.
                    *seen_posted = block.line1.posted.load(Acquire);
                }
                // A count that went backwards is nonsense; treat it as empty.
                *taken < *seen_posted
            }
            RecvTarget::Shared { header, seen_posted, .. } => {
                let taken = header.taken.word.load(Relaxed);
                if taken >= *seen_posted {
                    // Acquire, partner: the Release store in `SharedQueue::post`.
                    *seen_posted = header.posted.word.load(Acquire);
                }
                taken < *seen_posted
            }
        }
    }

    /// Takes the next receive.
    #[inline]
    pub(super) fn take(&mut self, block: &QpBlock) -> Option<Taken> {
        if !self.ready(block) {
            return None;
        }
        match self {
            RecvTarget::Own { mask, taken, .. } => {
                let slot = (*taken & *mask) as u32;
                *taken = taken.wrapping_add(1);
                block.requester.taken.store(*taken, Relaxed);
                Some(Taken { slot })
            }
            RecvTarget::Shared { header, words, taker, seen_posted, .. } => {
                // Others may be ahead of the count; a queue full of nonsense must not keep us here.
                for _ in 0..2 * words.len() + 64 {
                    let position = header.taken.word.load(Acquire);
                    if position >= *seen_posted {
                        *seen_posted = header.posted.word.load(Acquire);
                        if position >= *seen_posted {
                            return None;
                        }
                    }
                    let at = words.ring(position);
                    let word = SrqWord(at.load(Acquire));
                    let advance = || {
                        // Release, partner: the Acquire load above: who sees the count sees the words behind it taken.
                        header
                            .taken
                            .word
                            .compare_exchange(position, position.wrapping_add(1), Release, Relaxed)
                            .ok();
                    };
                    if word.is_at(position) && !word.is_taken() {
                        // The taker signs in the same step in which it takes: if it dies now, the owner knows whose
                        // receive is missing.
                        if at.compare_exchange(word.0, word.taken_by(*taker).0, AcqRel, Relaxed).is_ok() {
                            advance();
                            return Some(Taken { slot: word.slot().into() });
                        }
                    } else if word.is_at(position) {
                        advance();
                    }
                }
                None
            }
        }
    }

    /// The pieces of a taken receive.
    pub(super) fn pieces(&self, taken: Taken) -> impl Iterator<Item = Piece> {
        let slots = match self {
            RecvTarget::Own { slots, .. } | RecvTarget::Shared { slots, .. } => slots,
        };
        let depth = slots.words.len() / slots.stride;
        slots.pieces(taken.slot as usize & (depth - 1))
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(self, RecvTarget::Shared { .. })
    }
}

/// The right a receive's memory needs.
pub(super) const RECV_ACCESS: Access = Access::LOCAL_WRITE;
