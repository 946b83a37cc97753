//! Positions of producers that are alive but do not move: stopped between reserving a position of an MPSC ring
//! ([`reservation`](super::reservation)) and publishing it.
//!
//! Nobody can tell such a producer from one that is only slow, and it may write its slot at any later time. So the consumer neither
//! waits for it for ever nor gives its slot away: it passes the position, and producers leave the slot out in all further rounds of
//! the ring.
//!
//! ```text
//!  consumer                                      other producers                     the stopped producer
//!  position p: reserved, claimed, not published
//!  for STALL_TIME
//!  list the slot of p
//!  consumed = p + 1  (Release)  ---------------> consumed (Acquire), reserve         ...
//!                                                p + depth; its slot is listed: clear
//!                                                the claim, reserve the next position
//!  p + depth: reserved, not published, and no
//!  claim: skip it, as a dead producer's
//!                                                                                    continues: publishes p,
//!  p is published: read it  <------------------------------------------------------  clears its claim
//!  unlist the slot of p  (Release)  -----------> unlisted (Acquire): use the slot
//! ```
//!
//! **Promise.** Only the producer that reserved a stalled position writes to its slot, until the consumer has read it or the producer
//! is gone. An entry is read exactly once, however late it is published. Entries of one producer stay in order, if the consumer looks
//! at stalled positions first.
//!
//! A listed slot stays where it is in the list until it is unlisted: a producer that reads the list while another slot is unlisted
//! does not miss it.
//!
//! Why this is safe: a producer reserves `p + depth` only after it has seen that the consumer is beyond `p`, which the consumer
//! published after it had listed the slot. A producer that sees the slot unlisted sees it after the consumer has read it. Whether a
//! producer used a position of the slot or left it out shows in the ring itself: the position is published, or nobody claims it.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::Word;

/// Most positions of one ring that can be stalled at a time. With one more, the consumer waits.
pub(crate) const MAX_STALLED: usize = 5;
/// Positions that a producer reserves in vain, because their slots are listed, before it gives up. At most [`MAX_STALLED`] slots are listed,
/// so the first or second round of the ring is the last one. The limit is for a peer that forges the list and the room.
pub(crate) const MAX_ROUNDS: u32 = 1 << 10;
/// How long a position may stay reserved and not published before the consumer passes it.
const STALL_TIME: Duration = Duration::from_millis(10);

/// The slots that producers must leave out: six words in the ring's header. Writer: the consumer.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct StalledSlots<W = AtomicU64> {
    /// How many entries of `slots` are used. They are not always the first ones.
    count: W,
    /// Each plus one; zero if the entry is not used.
    slots: [W; MAX_STALLED],
}

impl<W: Word> StalledSlots<W> {
    /// Whether a producer must leave out the slot of `position`, which it has reserved.
    #[inline]
    pub(crate) fn contains(&self, position: u64, depth: u64) -> bool {
        // Acquire, partner: the Release stores in `publish`.
        self.count.load(Acquire) != 0 && self.lists(position, depth)
    }

    #[cold]
    fn lists(&self, position: u64, depth: u64) -> bool {
        let slot = position % depth;
        // Acquire, partner: as above.
        self.slots.iter().any(|listed| listed.load(Acquire) == slot + 1)
    }

    /// Lists the slot of a position, or none, in entry `index`; `count` entries are then used.
    fn publish(&self, index: usize, position: Option<u64>, depth: u64, count: usize) {
        // Release, partner: the Acquire loads above. What was read from a slot that is not listed any more was read before.
        self.slots[index].store(position.map_or(0, |position| position % depth + 1), Release);
        self.count.store(count as u64, Release);
    }
}

/// The stalled positions of a ring, as its consumer knows them. They are not in shared memory: no producer can change them.
#[derive(Debug)]
pub(crate) struct StalledPositions {
    depth: u64,
    /// At most [`MAX_STALLED`], in their order, each with its entry in [`StalledSlots`].
    positions: Vec<(u64, usize)>,
    /// A position at which the consumer waits, and since when.
    waiting: Option<(u64, Instant)>,
}

impl StalledPositions {
    pub(crate) fn new(depth: u64) -> StalledPositions {
        StalledPositions { depth, positions: Vec::with_capacity(MAX_STALLED), waiting: None }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        self.positions.iter().map(|(position, _)| *position)
    }

    /// Called when `position` is reserved and not published. Whether that has lasted for [`STALL_TIME`].
    pub(crate) fn has_lasted(&mut self, position: u64) -> bool {
        match self.waiting {
            Some((waiting, since)) if waiting == position => since.elapsed() >= STALL_TIME,
            _ => {
                self.waiting = Some((position, Instant::now()));
                false
            }
        }
    }

    /// Called when `position` is reserved by a live producer and not published. True if that [has lasted](Self::has_lasted) and the
    /// list has room: then the position is listed, and the consumer may pass it.
    pub(crate) fn try_pass<W: Word>(&mut self, position: u64, slots: &StalledSlots<W>) -> bool {
        let may_pass = self.has_lasted(position) && self.positions.len() < MAX_STALLED;
        if may_pass {
            self.waiting = None;
            self.list(position, slots);
        }
        may_pass
    }

    fn list<W: Word>(&mut self, position: u64, slots: &StalledSlots<W>) {
        let is_free = |index: &usize| self.positions.iter().all(|(_, used)| used != index);
        let Some(index) = (0..MAX_STALLED).find(is_free) else {
            unreachable!("the caller has checked for room")
        };
        self.positions.push((position, index));
        slots.publish(index, Some(position), self.depth, self.positions.len());
    }

    /// The entry at `position` was read, or its producer is gone.
    pub(crate) fn remove<W: Word>(&mut self, position: u64, slots: &StalledSlots<W>) {
        if let Some(at) = self.positions.iter().position(|(stalled, _)| *stalled == position) {
            let (_, index) = self.positions.remove(at);
            slots.publish(index, None, self.depth, self.positions.len());
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::super::reservation::{self, IDLE, SHARED};
    use super::*;

    const DEPTH: u64 = 2;

    struct Ring {
        head: loom::sync::atomic::AtomicU64,
        mode: loom::sync::atomic::AtomicU64,
        consumed: loom::sync::atomic::AtomicU64,
        claims: [loom::sync::atomic::AtomicU64; 2],
        stalled: StalledSlots<loom::sync::atomic::AtomicU64>,
        sequences: [loom::sync::atomic::AtomicU64; DEPTH as usize],
        values: [loom::cell::UnsafeCell<u64>; DEPTH as usize],
    }

    impl Ring {
        fn new() -> Arc<Ring> {
            let word = |value| loom::sync::atomic::AtomicU64::new(value);
            Arc::new(Ring {
                head: word(0),
                mode: word(SHARED),
                consumed: word(0),
                claims: [word(IDLE), word(IDLE)],
                stalled: StalledSlots { count: word(0), slots: core::array::from_fn(|_| word(0)) },
                sequences: core::array::from_fn(|_| word(0)),
                values: core::array::from_fn(|_| loom::cell::UnsafeCell::new(0)),
            })
        }

        fn publish(&self, producer: usize, position: u64) {
            let slot = (position % DEPTH) as usize;
            // SAFETY: only the producer that reserved the position writes it; loom checks that claim.
            self.values[slot].with_mut(|value| unsafe { *value = position + 100 });
            self.sequences[slot].store(position + 1, Release);
            reservation::clear_claim(&self.claims[producer]);
        }

        /// Reads a published value. Loom reports a race with any write that is not ordered before.
        fn read(&self, position: u64) -> Option<u64> {
            let slot = (position % DEPTH) as usize;
            (self.sequences[slot].load(Acquire) == position + 1)
                // SAFETY: published slots are not written until they are consumed.
                .then(|| self.values[slot].with(|value| unsafe { *value }))
        }
    }

    /// One producer has reserved position 0 and publishes it at any time. Another one fills the ring beyond it. The consumer passes
    /// position 0 at once. No slot is written by both, and no entry is lost.
    fn late_producer(respects_stalled_slots: bool) {
        // All interleavings would take minutes.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(move || {
            let ring = Ring::new();
            // As `reserve`, on behalf of the late producer.
            ring.claims[0].store(0, Release);
            ring.head.store(1, Release);
            let late = thread::spawn({
                let ring = ring.clone();
                move || ring.publish(0, 0)
            });
            let other = thread::spawn({
                let ring = ring.clone();
                move || {
                    // Position 1 is free; position 2 has the slot of position 0.
                    for _ in 0..2 {
                        let has_room =
                            |position| reservation::has_room(position, ring.consumed.load(Acquire), DEPTH);
                        let Some(position) =
                            reservation::reserve(&ring.head, &ring.mode, &ring.claims[1], has_room)
                        else {
                            return;
                        };
                        if respects_stalled_slots && ring.stalled.contains(position, DEPTH) {
                            reservation::clear_claim(&ring.claims[1]);
                        } else {
                            ring.publish(1, position);
                        }
                    }
                }
            });
            let mut stalled = StalledPositions::new(DEPTH);
            let mut seen = Vec::new();
            let mut cursor = 0;
            if ring.read(0).is_none() {
                stalled.list(0, &ring.stalled);
                cursor = 1;
                ring.consumed.store(1, Release);
            }
            for _ in 0..2 {
                let found = stalled.iter().find(|position| ring.read(*position).is_some());
                if let Some(position) = found {
                    seen.extend(ring.read(position));
                    stalled.remove(position, &ring.stalled);
                }
                if let Some(value) = ring.read(cursor) {
                    seen.push(value);
                    cursor += 1;
                    ring.consumed.store(cursor, Release);
                }
            }
            late.join().unwrap();
            other.join().unwrap();
            // Everything that is left: late entries first, and positions that nobody claims are skipped.
            let left: Vec<u64> = stalled.iter().collect();
            for position in left {
                seen.push(ring.read(position).expect("the late producer has published"));
                stalled.remove(position, &ring.stalled);
            }
            while cursor < ring.head.load(Acquire) {
                seen.extend(ring.read(cursor));
                cursor += 1;
            }
            assert!(seen.contains(&100), "the late entry is read: {seen:?}");
            assert!(seen.contains(&101), "{seen:?}");
            let mut unique = seen.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), seen.len(), "read once: {seen:?}");
        });
    }

    /// A producer reads the list for the second slot while the first one is unlisted by `unlist`.
    fn listed_slot_is_seen(unlist: fn(&mut StalledPositions, &StalledSlots<loom::sync::atomic::AtomicU64>)) {
        loom::model(move || {
            let ring = Ring::new();
            let mut stalled = StalledPositions::new(DEPTH);
            stalled.list(0, &ring.stalled);
            stalled.list(1, &ring.stalled);
            let producer = thread::spawn({
                let ring = ring.clone();
                move || assert!(ring.stalled.contains(1 + DEPTH, DEPTH), "a listed slot was missed")
            });
            unlist(&mut stalled, &ring.stalled);
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_listed_slot_is_seen_while_another_is_unlisted() {
        listed_slot_is_seen(|stalled, slots| stalled.remove(0, slots));
    }

    #[test]
    #[should_panic]
    fn loom_list_that_closes_gaps_is_found() {
        listed_slot_is_seen(|_, slots| {
            slots.publish(0, Some(1), DEPTH, 2);
            slots.publish(1, None, DEPTH, 1);
        });
    }

    #[test]
    fn loom_late_producer_and_others_do_not_share_a_slot() {
        late_producer(true);
    }

    #[test]
    #[should_panic]
    fn loom_producer_that_uses_a_stalled_slot_is_found() {
        late_producer(false);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn positions_keep_their_order_and_their_entries_in_the_list() {
        let (slots, mut stalled) = (StalledSlots::<AtomicU64>::default(), StalledPositions::new(8));
        let listed = || slots.slots.each_ref().map(|slot| slot.load(Acquire));
        for position in 8..8 + MAX_STALLED as u64 {
            stalled.list(position, &slots);
        }
        assert_eq!(listed(), [1, 2, 3, 4, 5]);
        stalled.remove(9, &slots);
        assert_eq!(listed(), [1, 0, 3, 4, 5]);
        assert!(slots.contains(16, 8) && !slots.contains(17, 8) && slots.contains(18, 8));
        stalled.list(15, &slots);
        assert_eq!(listed(), [1, 8, 3, 4, 5]);
        assert_eq!(stalled.iter().collect::<Vec<_>>(), [8, 10, 11, 12, 15]);
        for position in [8, 10, 11, 12, 15] {
            stalled.remove(position, &slots);
        }
        assert!(stalled.is_empty() && listed() == [0; 5] && !slots.contains(0, 8));
    }
}
