//! The slots of a receive queue, in which a sender finds the memory of a receive; and the owner's record of a completed receive.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use super::layout::{RECV_HEAD_WORDS, recv_stride};
use crate::device::{Access, Opcode, PostError, RecvWr, Sge};
use crate::memory::segment::{Segment, SharedSlice};

/// The access right that the memory of a receive needs.
pub(super) const RECV_ACCESS: Access = Access::LOCAL_WRITE;

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

    #[inline]
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn new(segment: &Arc<Segment>, offset: u64, depth: u32, max_sge: u32) -> Option<RecvSlots> {
        let stride = recv_stride(max_sge);
        let words = SharedSlice::new(segment, offset, (depth as usize).checked_mul(stride)?)?;
        Some(RecvSlots { words, depth: depth as usize, stride, max_sge })
    }

    #[inline]
    fn write(&self, slot: usize, sges: &[Sge<'_>]) {
        let words = self.words.range(slot * self.stride + RECV_HEAD_WORDS, 2 * sges.len());
        for ([addr, len_key], sge) in words.as_chunks().0.iter().zip(sges) {
            addr.store(sge.addr, Relaxed);
            len_key.store(u64::from(sge.lkey) << 32 | u64::from(sge.len), Relaxed);
        }
    }

    #[inline]
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
    #[inline]
    pub(super) fn fits(self, opcode: Opcode, byte_len: u32) -> bool {
        match opcode {
            Opcode::Recv => byte_len <= self.room,
            _ => opcode == Opcode::RecvWriteImm,
        }
    }
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
    #[inline]
    pub(super) fn write(&self, slots: &RecvSlots, slot: usize, sges: &[Sge<'_>]) {
        let count = sges.len() as u32;
        if self.count.load(Relaxed) != count {
            slots.write_count(slot, count);
            self.count.store(count, Relaxed);
        }
        slots.write(slot, sges);
    }
}

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
