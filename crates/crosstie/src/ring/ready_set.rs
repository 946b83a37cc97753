//! Many lanes with one reader: which of them the reader has to look at.
//!
//! A lane is a queue with one writer and one reader. The reader looks at a few lanes, the *polled* ones, every time. The writer of
//! any other lane tells the reader by a bit in a [`ReadySet`], after it has published an entry. So a writer that the reader expects
//! executes no locked instruction, and looking costs the reader the same however many lanes there are.
//!
//! ```text
//!  writer of lane n                       reader
//!  publish the entry                      a polled lane: look for entries
//!  light barrier
//!  polled[n] ?  nothing to do             summary == 0 ?  nothing to do
//!  else  words[n / 64] |= bit             else  swap summary and words by 0, look at the lanes of the bits
//!        summary |= bit of the word
//!
//!  To poll a lane no longer:              polled[n] = 0, heavy barrier, look at the lane once more
//! ```
//!
//! **Promise.** No entry is overlooked: its lane is polled, its bit is set, or its writer is about to set the bit. A writer that dies
//! before it sets the bit leaves an entry in a lane that nobody looks at; whoever cleans up after the writer looks at its lane.
//!
//! Every process that maps the words can write them. A wrong bit costs the reader a look; a bit that is missing delays the lane of
//! the process that cleared it, or of others, until their writers publish again.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Word, fence};

/// Bits in a word.
const BITS: usize = u64::BITS as usize;

/// One bit per lane: its writer has published an entry that the reader may not know. All zeros: no lane is ready.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct ReadySet<const WORDS: usize, W = AtomicU64> {
    /// Bit `i` stands for the words from `i * WORDS_PER_BIT` on.
    summary: W,
    words: [W; WORDS],
}

impl<const WORDS: usize, W: Word> ReadySet<WORDS, W> {
    const WORDS_PER_BIT: usize = WORDS.div_ceil(BITS);

    /// Adds a lane. To be called after publishing an entry there. A lane that the set has no bit for is ignored.
    #[cold]
    pub(crate) fn add(&self, lane: usize) {
        let Some(word) = self.words.get(lane / BITS) else { return };
        // Release, partner: the Acquire swap of the word in `take`. The reader sees the entry.
        word.fetch_or(1 << (lane % BITS), Release);
        // Release, partner: the Acquire swap of the summary in `take`. The reader sees the bit above.
        self.summary.fetch_or(1 << (lane / BITS / Self::WORDS_PER_BIT), Release);
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.summary.load(Relaxed) == 0
    }

    /// Empties the set and calls `each` with every lane that was in it.
    #[cold]
    pub(crate) fn take(&self, mut each: impl FnMut(usize)) {
        // Acquire, partner: the Release `fetch_or` of the summary in `add`.
        let mut groups = self.summary.swap(0, Acquire);
        while groups != 0 {
            let first = groups.trailing_zeros() as usize * Self::WORDS_PER_BIT;
            groups &= groups - 1;
            for (i, word) in self.words.iter().enumerate().skip(first).take(Self::WORDS_PER_BIT) {
                if word.load(Relaxed) == 0 {
                    continue;
                }
                // Acquire, partner: the Release `fetch_or` of the word in `add`.
                let mut bits = word.swap(0, Acquire);
                while bits != 0 {
                    each(i * BITS + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                }
            }
        }
    }
}

/// Whether the reader looks at a lane every time. To be called by the lane's writer after publishing an entry; if the result is
/// false, it must add the lane to the set.
#[inline]
pub(crate) fn is_polled<W: Word>(polled: &W) -> bool {
    is_polled_after(polled, fence::light)
}

#[inline]
fn is_polled_after<W: Word>(polled: &W, light: impl Fn()) -> bool {
    // Orders the publication before the load. Partner: the heavy barrier in `stop_polling`.
    light();
    polled.load(Relaxed) != 0
}

/// Announces that the reader looks at a lane every time from now on.
pub(crate) fn start_polling<W: Word>(polled: &W) {
    polled.store(1, Relaxed);
}

/// Announces that the reader does not look at a lane every time any more. It must look at it once more after this call.
pub(crate) fn stop_polling<W: Word>(polled: &W) {
    stop_polling_before(polled, fence::heavy);
}

fn stop_polling_before<W: Word>(polled: &W, heavy: impl Fn()) {
    polled.store(0, Relaxed);
    // Orders the store before the reader's last look, as every writer sees them: see `is_polled`.
    heavy();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_lane_that_was_added_is_taken_once() {
        fn check<const WORDS: usize>() {
            let set: ReadySet<WORDS> =
                ReadySet { summary: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS] };
            let taken = || {
                let mut lanes = Vec::new();
                set.take(|lane| lanes.push(lane));
                lanes
            };
            let lanes = WORDS * BITS;
            for step in [1, 7, 64, 1000] {
                let added: Vec<usize> = (0..lanes).step_by(step).chain([lanes - 1]).collect();
                added.iter().for_each(|lane| set.add(*lane));
                assert!(!set.is_empty());
                let mut expected = added;
                expected.dedup();
                assert_eq!(taken(), expected);
                assert!(set.is_empty() && taken().is_empty());
            }
            set.add(lanes);
            assert!(set.is_empty() && taken().is_empty(), "there is no such lane");
        }
        check::<1>();
        check::<3>();
        check::<64>();
        check::<256>();
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use core::sync::atomic::Ordering;

    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, fence as loom_fence};
    use loom::thread;

    use super::*;

    const NO_ENTRY: u64 = 0;

    /// Two lanes of one entry each, and a second entry for the first lane.
    struct Lanes {
        entries: [AtomicU64; 3],
        polled: [AtomicU64; 2],
        ready: ReadySet<1, AtomicU64>,
    }

    impl Lanes {
        fn new(polled: u64) -> Arc<Lanes> {
            let word = |value| AtomicU64::new(value);
            Arc::new(Lanes {
                entries: [word(NO_ENTRY), word(NO_ENTRY), word(NO_ENTRY)],
                polled: [word(polled), word(0)],
                ready: ReadySet { summary: word(0), words: [word(0)] },
            })
        }

        fn publish(&self, lane: usize, entry: usize, light: fn()) {
            self.entries[entry].store(1, Release);
            if !is_polled_after(&self.polled[lane], light) {
                self.ready.add(lane);
            }
        }

        fn has(&self, entry: usize) -> bool {
            self.entries[entry].load(Acquire) != NO_ENTRY
        }
    }

    /// The reader stops polling the lane while its writer publishes. In the end the entry was read, or the lane is in the set.
    fn stops_polling(light: fn(), heavy: fn()) {
        loom::model(move || {
            let lanes = Lanes::new(1);
            let writer = thread::spawn({
                let lanes = lanes.clone();
                move || lanes.publish(0, 0, light)
            });
            stop_polling_before(&lanes.polled[0], heavy);
            let mut read = lanes.has(0);
            writer.join().unwrap();
            lanes.ready.take(|lane| read |= lane == 0);
            assert!(read, "an entry was overlooked");
        });
    }

    #[test]
    fn loom_no_entry_is_overlooked_when_polling_stops() {
        stops_polling(fence::light, fence::heavy);
    }

    /// A twin that must fail: the reader looks before others can see that it polls the lane no longer.
    #[test]
    #[should_panic(expected = "overlooked")]
    fn loom_twin_reader_without_barrier_is_caught() {
        stops_polling(fence::light, || ());
    }

    /// A twin that must fail: the writer asks whether the lane is polled before its entry is visible.
    #[test]
    #[should_panic(expected = "overlooked")]
    fn loom_twin_writer_without_barrier_is_caught() {
        stops_polling(|| (), fence::heavy);
    }

    /// Writers of lanes that are not polled, each with its lane and its entries, and a reader that takes the set once in between and
    /// starts to poll a lane in which it found something. Nothing is overlooked, and what a bit stands for is visible.
    fn takes_the_set_meanwhile(writers: &'static [(usize, &'static [usize])]) {
        loom::model(move || {
            let lanes = Lanes::new(0);
            let threads: Vec<_> = writers
                .iter()
                .map(|(lane, entries)| {
                    let lanes = lanes.clone();
                    thread::spawn(move || {
                        entries.iter().for_each(|entry| lanes.publish(*lane, *entry, fence::light));
                    })
                })
                .collect();
            let mut seen = [false; 3];
            let look = |lane: usize, seen: &mut [bool; 3]| {
                for (_, entries) in writers.iter().filter(|(other, _)| *other == lane) {
                    entries.iter().for_each(|entry| seen[*entry] |= lanes.has(*entry));
                }
            };
            lanes.ready.take(|lane| {
                assert!(lanes.has(lane), "the bit is visible, and its entry is not");
                start_polling(&lanes.polled[lane]);
                look(lane, &mut seen);
            });
            for thread in threads {
                thread.join().unwrap();
            }
            (0..2)
                .filter(|lane| lanes.polled[*lane].load(Relaxed) != 0)
                .for_each(|lane| look(lane, &mut seen));
            lanes.ready.take(|lane| look(lane, &mut seen));
            for entry in writers.iter().flat_map(|(_, entries)| *entries) {
                assert!(seen[*entry], "entry {entry} was overlooked");
            }
        });
    }

    #[test]
    fn loom_entries_of_two_writers_are_seen_with_their_bits() {
        takes_the_set_meanwhile(&[(0, &[0]), (1, &[1])]);
    }

    #[test]
    fn loom_entries_before_and_after_a_lane_is_polled_are_seen() {
        takes_the_set_meanwhile(&[(0, &[0, 2])]);
    }

    /// A lane is used again after a reset: the reader may be reading an entry of the old connection while the new writer overwrites
    /// it. It notices by the epoch, which the owner changed before it admitted the new writer.
    fn reuse(release: fn(), acquire: fn()) {
        loom::model(move || {
            // sequence, contents, epoch, whether the new writer may write
            let words = Arc::new([1, 10, 1, 0].map(AtomicU64::new));
            let writer = thread::spawn({
                let words = words.clone();
                move || {
                    if words[3].load(Acquire) == 1 {
                        release();
                        words[1].store(20, Relaxed);
                        words[0].store(3, Release);
                    }
                }
            });
            let owner = thread::spawn({
                let words = words.clone();
                move || {
                    words[2].store(2, Relaxed);
                    words[3].store(1, Release);
                }
            });
            if words[0].load(Acquire) == 1 {
                let contents = words[1].load(Relaxed);
                acquire();
                if words[2].load(Relaxed) == 1 {
                    assert_eq!(contents, 10, "contents of another connection");
                }
            }
            writer.join().unwrap();
            owner.join().unwrap();
        });
    }

    #[test]
    fn loom_entry_of_a_lane_that_is_used_again_is_not_taken_for_an_old_one() {
        reuse(|| loom_fence(Ordering::Release), || loom_fence(Ordering::Acquire));
    }

    /// A twin that must fail: the reader does not order its loads.
    #[test]
    #[should_panic(expected = "contents of another connection")]
    fn loom_twin_reader_of_a_reused_lane_without_fence_is_caught() {
        reuse(|| loom_fence(Ordering::Release), || ());
    }
}
