//! Shared receive queues, from which many peers take.
//!
//! As with the other receive queues (`recv.rs`) the owner keeps its records in private memory ([`SharedRecvQueue`]), and the segment holds only
//! what a sender must see, which uses it through [`SharedTaker`].
//!
//! ```text
//!  owner:   free slot = SGEs, words[posted % 2 depth] = slot, posted += 1
//!  takers:  compare-and-swap their number into the first word that is not taken
//! ```
//!
//! A taker records itself in the same compare-and-swap with which it takes. If it dies before it completes the receive, the
//! owner finds the receive by that number and returns it to the program ([`SharedRecvQueue::announce_return`]).

use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::Arc;

use super::device_memory::Allocation;
use super::layout::{OWNER_TAKES, SrqHeader, SrqWord};
use super::recv_slots::{CompletedRecv, RecvSlots, WrittenEntries, check, room};
use crate::device::{DeviceError, PostError, RecvWr};
use crate::memory::prefetch::{self, CACHE_LINE};
use crate::memory::segment::{Segment, SharedRef, SharedSlice};

/// A shared receive queue, as its owner uses it. Datagram queue pairs without an SRQ have one of their own.
#[derive(Debug)]
pub(super) struct SharedRecvQueue {
    pub(super) header: SharedRef<SrqHeader>,
    words: SharedSlice<AtomicU64>,
    slots: RecvSlots,
    /// One for each receive that the queue has room for. They have the first slots.
    records: Box<[RecvRecord]>,
    /// For each word, whether the receive that was posted there is outstanding: takers have the cache lines of the words.
    words_in_use: Box<[AtomicBool]>,
    /// Set when a receive completes, for a poster that found all slots in use.
    completed: AtomicBool,
    pub(super) memory: Allocation,
}

/// The owner's record of the receive in one slot of a shared receive queue.
#[derive(Debug, Default)]
struct RecvRecord {
    wr_id: AtomicU64,
    /// One more than the position at which it was posted; zero once it has completed. The poster sets it. The poller that changes it
    /// back, by a compare-and-swap, completes the receive: no two receives of a queue have the same position.
    posted_at: AtomicU64,
    /// The `posted_at` of the receive whose return was announced last. Writer: the thread that holds `DeviceShared::cleanup`.
    returned_at: AtomicU64,
    /// Bytes that it has room for.
    room: AtomicU32,
    entries: WrittenEntries,
}

/// How often a taker that finds no others publishes how far it is, in receives.
const TAKEN_INTERVAL: u64 = 16;

const WORDS_PER_LINE: u64 = (CACHE_LINE / size_of::<AtomicU64>()) as u64;

const SRQ_WORDS_AT: u64 = size_of::<SrqHeader>() as u64;

fn srq_slots_at(offset: u64, depth: u32) -> Option<u64> {
    offset.checked_add(SRQ_WORDS_AT + (16 * u64::from(depth)).next_multiple_of(64))
}

impl SharedRecvQueue {
    pub(super) fn new(
        allocate: impl FnOnce(u64) -> Result<Allocation, DeviceError>,
        pd: u32,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<SharedRecvQueue, DeviceError> {
        let depth = max_wr.max(4).next_power_of_two();
        let bytes = srq_slots_at(0, depth).map(|at| at + RecvSlots::bytes(depth, max_sge));
        let no_memory = || DeviceError::Exhausted { what: "device memory" };
        let memory = allocate(bytes.ok_or_else(no_memory)?)?;
        let header: SharedRef<SrqHeader> =
            SharedRef::new(memory.segment(), memory.at()).ok_or_else(no_memory)?;
        header.depth.store(depth, Relaxed);
        header.sges.store(max_sge, Relaxed);
        header.pd.store(pd, Relaxed);
        let (words, slots) =
            words_and_slots(memory.segment(), memory.at(), depth, max_sge).ok_or_else(no_memory)?;
        Ok(SharedRecvQueue {
            header,
            words,
            slots,
            records: (0..max_wr).map(|_| RecvRecord::default()).collect(),
            words_in_use: (0..2 * depth).map(|_| AtomicBool::new(false)).collect(),
            completed: AtomicBool::new(false),
            memory,
        })
    }

    /// How many receives it has room for.
    pub(super) fn capacity(&self) -> u32 {
        self.records.len() as u32
    }

    /// The number of slots: a power of two.
    pub(super) fn depth(&self) -> u32 {
        self.slots.depth() as u32
    }

    pub(super) fn max_sge(&self) -> u32 {
        self.slots.max_sge
    }

    /// Posts up to `count` receives, see [`Srq::post_recvs`](crate::device::Srq::post_recvs).
    #[inline]
    pub(super) fn post(
        &self,
        cursor: &mut PostCursor,
        wr: &RecvWr<'_>,
        count: u32,
    ) -> Result<u32, PostError> {
        check(wr, self.slots.max_sge)?;
        let room = room(wr);
        let mut posted = 0;
        while posted < count
            && let Some(position) = self.free_position(cursor)
            && let Some((slot, record)) = self.free_slot(cursor)
        {
            record.wr_id.store(wr.wr_id, Relaxed);
            record.room.store(room, Relaxed);
            record.entries.write(&self.slots, slot, wr.sges);
            self.word_in_use(position).store(true, Relaxed);
            self.words.ring(position).store(SrqWord::posted(position, slot as u16).0, Relaxed);
            // Release, partner: the Acquire loads in `complete` and `outstanding`. The other fields, and the word, are those of this receive.
            record.posted_at.store(position + 1, Release);
            cursor.posted = position + 1;
            posted += 1;
        }
        if posted == 0 && count > 0 {
            return Err(PostError::Full);
        }
        // Release, partner: the taker's Acquire load in `SharedTaker::take`. It makes words and slots visible to the
        // taker and, through the taker's completion, the private fields to the poller.
        self.header.posted.word.store(cursor.posted, Release);
        Ok(posted)
    }

    /// The next position whose word is not the only record of who took a receive. Completions of several connections are polled in any
    /// order, so such a receive may be much older than the others. Takers skip the positions that are left out, because the words
    /// there are of other positions. There is always one: there are twice as many words as receives.
    #[inline]
    fn free_position(&self, cursor: &PostCursor) -> Option<u64> {
        if self.is_free_position(cursor.posted) {
            return Some(cursor.posted);
        }
        self.search_position(cursor.posted + 1)
    }

    #[cold]
    fn search_position(&self, first: u64) -> Option<u64> {
        (first..first + self.words.len() as u64 - 1).find(|position| self.is_free_position(*position))
    }

    #[inline]
    fn is_free_position(&self, position: u64) -> bool {
        // Acquire, partner: the Release store in `complete`.
        !self.word_in_use(position).load(Acquire)
    }

    /// Whether the receive that was posted last at the word of this position is outstanding.
    #[inline]
    fn word_in_use(&self, position: u64) -> &AtomicBool {
        &self.words_in_use[position as usize & (self.words_in_use.len() - 1)]
    }

    /// A slot that is not in use, and its record. Slots usually become free in the order of posting, so the first one that is
    /// checked is free. A full queue is searched again only after a receive completed.
    #[inline]
    fn free_slot(&self, cursor: &mut PostCursor) -> Option<(usize, &RecvRecord)> {
        if !cursor.full
            && let Some(record) = self.check_slot(cursor)
        {
            return Some(record);
        }
        self.search_slot(cursor)
    }

    /// Checks the slot where to look first, and moves on to the next one.
    #[inline]
    fn check_slot(&self, cursor: &mut PostCursor) -> Option<(usize, &RecvRecord)> {
        let slot = if cursor.next < self.records.len() { cursor.next } else { 0 };
        cursor.next = slot + 1;
        cursor.count_check();
        let record = self.records.get(slot)?;
        // Acquire, partner: the Release exchange in `complete`: the slot's fields have been read.
        (record.posted_at.load(Acquire) == 0).then_some((slot, record))
    }

    /// Checks all other slots.
    #[cold]
    fn search_slot(&self, cursor: &mut PostCursor) -> Option<(usize, &RecvRecord)> {
        let is_first_search = !cursor.full;
        // Acquire, partner: the Release store in `complete`: the slot is free, too.
        if !is_first_search && !self.completed.swap(false, Acquire) {
            return None;
        }
        let unchecked = self.records.len().saturating_sub(usize::from(is_first_search));
        let found = (0..unchecked).find_map(|_| self.check_slot(cursor));
        cursor.full = found.is_none();
        found
    }

    /// Completes the receive in `slot`. `None` if no such receive is outstanding: the slot number comes from a peer.
    #[inline]
    pub(super) fn complete(&self, slot: u32) -> Option<CompletedRecv> {
        let record = self.records.get(slot as usize)?;
        // Acquire, partner: the Release store in `post`.
        self.complete_posted_at(record, record.posted_at.load(Acquire))
    }

    /// Completes this receive, unless it has completed meanwhile.
    pub(super) fn complete_taken(&self, taken: TakenSlot) -> Option<CompletedRecv> {
        let record = self.records.get(taken.slot as usize)?;
        // Acquire, partner: as in `complete`.
        let posted_at = record.posted_at.load(Acquire);
        if posted_at != taken.position + 1 {
            return None;
        }
        self.complete_posted_at(record, posted_at)
    }

    /// Completes the receive that the record is of, if that is still the one which was posted at `posted_at`. The poller of another queue
    /// may be completing it, too, if a peer has forged an entry: one of the two does.
    #[inline]
    fn complete_posted_at(&self, record: &RecvRecord, posted_at: u64) -> Option<CompletedRecv> {
        let position = posted_at.checked_sub(1)?;
        let recv = CompletedRecv { wr_id: record.wr_id.load(Relaxed), room: record.room.load(Relaxed) };
        #[cfg(test)]
        super::pauses::at(super::pauses::Pause::RecordRead);
        // Release, partner: the Acquire load in `check_slot`: the fields have been read.
        record.posted_at.compare_exchange(posted_at, 0, Release, Relaxed).ok()?;
        // Release, partner: the Acquire load in `is_free_position`.
        self.word_in_use(position).store(false, Release);
        // Release, partner: the Acquire swap in `search_slot`.
        self.completed.store(true, Release);
        Some(recv)
    }

    /// Every outstanding receive, and the word at its position, which peers can write.
    fn outstanding(&self) -> impl Iterator<Item = (TakenSlot, SrqWord)> {
        (0..).zip(&self.records).filter_map(|(slot, record)| {
            // Acquire, partner: the Release store in `post`.
            let position = record.posted_at.load(Acquire).checked_sub(1)?;
            Some((TakenSlot { position, slot }, SrqWord(self.words.ring(position).load(Acquire))))
        })
    }

    /// The receives that `taker` took and that are outstanding, in the order of posting. Those that it has completed are among them until
    /// the completion has been polled.
    pub(super) fn taken_by(&self, taker: u16) -> Vec<TakenSlot> {
        let is_taken =
            |(taken, word): &(TakenSlot, SrqWord)| word.is_taken_by(taken.position, |by| by == taker);
        let mut taken: Vec<TakenSlot> = self.outstanding().filter(is_taken).map(|(taken, _)| taken).collect();
        taken.sort_unstable();
        taken
    }

    /// The outstanding receives whose taker `of` accepts, in the order of posting. Each is announced once, however often this
    /// is called: so all that wait to be returned are never more than the queue has. The caller holds `DeviceShared::cleanup`.
    pub(super) fn announce_return(&self, of: impl Fn(u16) -> bool) -> Vec<TakenSlot> {
        let is_taken = |(taken, word): &(TakenSlot, SrqWord)| word.is_taken_by(taken.position, &of);
        self.announce(self.outstanding().filter(is_taken).map(|(taken, _)| taken))
    }

    /// As [`announce_return`](SharedRecvQueue::announce_return), of all receives except those whose taker `may_use` accepts. No peer takes a
    /// receive any more.
    pub(super) fn announce_return_of_all(&self, may_use: impl Fn(u16) -> bool) -> Vec<TakenSlot> {
        for (taken, word) in self.outstanding() {
            if word.is_at(taken.position) && !word.is_taken() {
                // If this fails, a sender has just taken it.
                let at = self.words.ring(taken.position);
                at.compare_exchange(word.0, word.taken_by(OWNER_TAKES).0, Acquire, Acquire).ok();
            }
        }
        let is_free = |(taken, word): &(TakenSlot, SrqWord)| !word.is_taken_by(taken.position, &may_use);
        self.announce(self.outstanding().filter(is_free).map(|(taken, _)| taken))
    }

    fn announce(&self, receives: impl Iterator<Item = TakenSlot>) -> Vec<TakenSlot> {
        let is_new = |taken: &TakenSlot| {
            let posted_at = taken.position + 1;
            let returned_at = &self.records[taken.slot as usize].returned_at;
            let is_new = returned_at.load(Relaxed) != posted_at;
            returned_at.store(posted_at, Relaxed);
            is_new
        };
        let mut receives: Vec<TakenSlot> = receives.filter(is_new).collect();
        receives.sort_unstable();
        receives
    }
}

/// A receive of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TakenSlot {
    /// Where it was posted: no two receives of a queue have the same position.
    position: u64,
    slot: u32,
}

/// The state of the one thread that posts to a [`SharedRecvQueue`].
#[derive(Debug, Default)]
pub(super) struct PostCursor {
    posted: u64,
    /// Where to look for a free slot first.
    next: usize,
    /// The last search found no free slot.
    full: bool,
    /// Slots that searches checked.
    #[cfg(test)]
    checks: usize,
}

impl PostCursor {
    #[inline]
    fn count_check(&mut self) {
        #[cfg(test)]
        {
            self.checks += 1;
        }
    }
}

fn words_and_slots(
    segment: &Arc<Segment>,
    offset: u64,
    depth: u32,
    max_sge: u32,
) -> Option<(SharedSlice<AtomicU64>, RecvSlots)> {
    let words = SharedSlice::new(segment, offset.checked_add(SRQ_WORDS_AT)?, 2 * depth as usize)?;
    Some((words, RecvSlots::new(segment, srq_slots_at(offset, depth)?, depth, max_sge)?))
}

/// What a sender needs to take from a shared queue: other senders take from it too, and each records its `taker` number in what it
/// takes.
#[derive(Debug)]
pub(super) struct SharedTaker {
    header: SharedRef<SrqHeader>,
    words: SharedSlice<AtomicU64>,
    taker: u16,
    /// The receives before this position are taken.
    next: u64,
}

impl SharedTaker {
    /// The queue at `at`, and its slots. `None` if they are not inside of the segment.
    pub(super) fn new(
        segment: &Arc<Segment>,
        at: u64,
        depth: u32,
        max_sge: u32,
        taker: u16,
    ) -> Option<(SharedTaker, RecvSlots)> {
        let header = SharedRef::new(segment, at)?;
        let (words, slots) = words_and_slots(segment, at, depth, max_sge)?;
        Some((SharedTaker { header, words, taker, next: 0 }, slots))
    }

    /// Takes the first receive that nobody has taken, if that is the one behind this sender's last one. `seen_posted`: how many were posted, as
    /// far as is known. Returns its slot.
    ///
    /// Everyone takes the first one, so all receives before one that is taken are taken as well: a sender need not look at what
    /// comes before its own last one, nor before [`SrqHeader::taken`].
    #[inline(always)]
    pub(super) fn take_next(&mut self, seen_posted: u64) -> Option<u16> {
        let position = self.next;
        if position >= seen_posted {
            return None;
        }
        let slot = self.try_take(position)?;
        if position.is_multiple_of(WORDS_PER_LINE) {
            self.start_line(position);
        }
        Some(slot)
    }

    /// Takes the receive at this position, if nobody has taken it.
    #[inline]
    fn try_take(&mut self, position: u64) -> Option<u16> {
        let at = self.words.ring(position);
        let word = SrqWord(at.load(Acquire));
        // One compare-and-swap takes the receive and records the taker: if this process dies now, the owner knows who had the
        // receive.
        if !word.is_at(position)
            || word.is_taken()
            || at.compare_exchange(word.0, word.taken_by(self.taker).0, AcqRel, Relaxed).is_err()
        {
            return None;
        }
        self.next = position + 1;
        Some(word.slot())
    }

    /// Called with the position of the first word of a cache line that was taken.
    fn start_line(&self, position: u64) {
        // The owner wrote the next line, too. It arrives before it is needed.
        prefetch::for_write(self.words.ring(position + WORDS_PER_LINE));
        if position.is_multiple_of(TAKEN_INTERVAL) {
            self.header.taken.word.store(self.next, Relaxed);
        }
    }

    /// As [`take_next`](SharedTaker::take_next), if the next receive was taken by others, or is not known to be posted.
    #[inline(never)]
    pub(super) fn search(&mut self, seen_posted: &mut u64) -> Option<u16> {
        let count = self.words.len() as u64;
        // Whether others take as well.
        let mut has_searched = false;
        // The bound ends the loop if the queue holds invalid words.
        for _ in 0..2 * count + 64 {
            if self.next >= *seen_posted {
                // Acquire, partner: the Release store in `SharedRecvQueue::post`.
                *seen_posted = self.header.posted.word.load(Acquire);
                if self.next >= *seen_posted {
                    return None;
                }
                // The words before have been used again.
                self.next = self.next.max(seen_posted.saturating_sub(count));
            }
            let position = self.next;
            if let Some(slot) = self.try_take(position) {
                if position.is_multiple_of(WORDS_PER_LINE) {
                    self.start_line(position);
                }
                if has_searched {
                    self.header.taken.word.store(self.next, Relaxed);
                }
                return Some(slot);
            }
            // Others have taken it, and perhaps many more.
            has_searched = true;
            let others = self.header.taken.word.load(Relaxed);
            if others > *seen_posted {
                // Acquire, partner: as above.
                *seen_posted = self.header.posted.word.load(Acquire);
            }
            let is_ahead = others > position && others <= *seen_posted;
            self.next = if is_ahead { others } else { position + 1 };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Device, software};

    fn take(taker: &mut SharedTaker, seen_posted: &mut u64) -> Option<u16> {
        taker.take_next(*seen_posted).or_else(|| taker.search(seen_posted))
    }

    /// One receive completes very late. Meanwhile the queue is used many times over: it has room for all other receives, they are taken
    /// in order, and it is known who took the late one.
    #[test]
    fn receive_that_completes_late_does_not_hold_up_the_others() {
        const CAPACITY: u32 = 4;
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let shared = super::super::invalid_input_tests::shared_arc(&device);
        let queue = SharedRecvQueue::new(|len| shared.allocate(len), 1, CAPACITY, 1).unwrap();
        let (words, _) = words_and_slots(&shared.memory.segment, queue.memory.at(), CAPACITY, 1).unwrap();
        let taker =
            |taker| SharedTaker { header: queue.header.clone(), words: words.clone(), taker, next: 0 };
        let completed = |slot: u16| queue.complete(slot.into()).map(|recv| recv.wr_id);
        let (mut late, mut others, mut newcomer) = (taker(1), taker(2), taker(3));
        let mut cursor = PostCursor::default();
        let mut wr_ids = 0..;
        let mut post = |cursor: &mut PostCursor| {
            let wr_id = wr_ids.next().unwrap();
            queue.post(cursor, &RecvWr { wr_id, sges: &[] }, 1).map(|_| wr_id)
        };
        let mut posted: std::collections::VecDeque<u64> =
            (0..CAPACITY).map(|_| post(&mut cursor).unwrap()).collect();
        let (mut seen, mut seen_by_newcomer) = (0, 0);
        let kept = take(&mut late, &mut seen).unwrap();
        let kept_wr_id = posted.pop_front().unwrap();
        for round in 0..100 {
            assert!(matches!(post(&mut cursor), Err(PostError::Full)), "round {round}");
            let slot = match round % 7 {
                3 => take(&mut newcomer, &mut seen_by_newcomer),
                _ => take(&mut others, &mut seen),
            };
            let slot = slot.expect("a receive is there");
            assert_eq!(completed(slot), posted.pop_front(), "round {round}");
            posted.push_back(post(&mut cursor).unwrap());
            let taken: Vec<u32> = queue.taken_by(1).iter().map(|taken| taken.slot).collect();
            assert_eq!(taken, [u32::from(kept)], "round {round}");
        }
        assert_eq!(completed(kept), Some(kept_wr_id));
        assert!(queue.taken_by(1).is_empty());
        posted.push_back(post(&mut cursor).unwrap());
        while let Some(wr_id) = posted.pop_front() {
            let slot = take(&mut late, &mut seen).unwrap();
            assert_eq!(completed(slot), Some(wr_id));
        }
        assert_eq!((take(&mut late, &mut seen), take(&mut others, &mut seen)), (None, None));
    }

    /// The pollers of two completion queues complete the same receive: one has read its record when the other one comes. Nor does the
    /// first one complete the receive that was posted to the slot meanwhile.
    #[test]
    fn receive_of_a_shared_queue_completes_once() {
        use super::super::pauses::{Pause, once_at};
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let shared = super::super::invalid_input_tests::shared_arc(&device);
        for posts_again in [false, true] {
            let queue = Arc::new(SharedRecvQueue::new(|len| shared.allocate(len), 1, 1, 1).unwrap());
            let mut cursor = PostCursor::default();
            queue.post(&mut cursor, &RecvWr { wr_id: 7, sges: &[] }, 1).unwrap();
            let (sender, others) = std::sync::mpsc::channel();
            let other = queue.clone();
            once_at(Pause::RecordRead, move || {
                let completed = other.complete(0).map(|recv| recv.wr_id);
                if posts_again {
                    other.post(&mut cursor, &RecvWr { wr_id: 8, sges: &[] }, 1).unwrap();
                }
                sender.send(completed).unwrap();
            });
            assert_eq!(queue.complete(0), None);
            assert_eq!(others.recv().unwrap(), Some(7));
            assert_eq!(queue.complete(0).map(|recv| recv.wr_id), posts_again.then_some(8));
        }
    }

    #[test]
    fn posting_to_a_full_shared_queue_does_not_search_it_again() {
        let device = Device::open_software(&software::Config { space: 64 << 20 }).unwrap();
        let shared = super::super::invalid_input_tests::shared_arc(&device);
        // Not a power of two: there are more slots than receives.
        for capacity in [1, 3, 1000] {
            let queue = SharedRecvQueue::new(|len| shared.allocate(len), 1, capacity, 1).unwrap();
            let mut cursor = PostCursor::default();
            let wr = |wr_id| RecvWr { wr_id, sges: &[] };
            for wr_id in 0..capacity {
                queue.post(&mut cursor, &wr(wr_id.into()), 1).unwrap();
            }
            assert_eq!(cursor.checks, capacity as usize, "each slot was free when it was checked");
            for _ in 0..100 {
                assert!(matches!(queue.post(&mut cursor, &wr(9), 1), Err(PostError::Full)));
            }
            assert_eq!(cursor.checks, 2 * capacity as usize, "only the first search found the queue full");
            // Each completion makes room for exactly one receive, in any order.
            for slot in (0..capacity).rev().step_by(2) {
                assert_eq!(queue.complete(slot), Some(CompletedRecv { wr_id: slot.into(), room: 0 }));
                queue.post(&mut cursor, &wr(slot.into()), 1).unwrap();
                assert!(matches!(queue.post(&mut cursor, &wr(9), 1), Err(PostError::Full)));
            }
        }
    }
}
