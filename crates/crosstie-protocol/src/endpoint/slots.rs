//! Slots: which operation a work request belongs to.
//!
//! A slot is leased for one operation and released when every work request that names it has completed (invariant I2). Free
//! slots wait in a ring; the slot that was released first is leased first. No slot is ever chosen by `number mod size`.
//!
//! ```text
//!   lease                 lease(d)                      release(b)
//!   free ring:  [b c d]   ->   [c d]  b leased, 2 work requests
//!                              [c d]  b: 1 work request left
//!                              [c d b']                        b' = b with the next generation
//! ```

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Bits of a slot's index.
pub const SLOT_BITS: u32 = 12;
/// The most slots of a table.
pub const MAX_SLOTS: usize = 1 << SLOT_BITS;
/// Bits of a slot's generation.
pub const GENERATION_BITS: u32 = 22;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

/// A leased slot: its index and the generation of this lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotKey {
    /// Index in the table.
    pub index: u16,
    /// Number of the lease, modulo 2^22.
    pub generation: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    generation: u32,
    leased: bool,
    /// Work requests that name the slot and have not completed.
    outstanding: u32,
}

/// A table of slots. See the [module](self).
#[derive(Debug)]
pub struct Slots {
    entries: Box<[Entry]>,
    /// The free ring: indices, oldest first.
    ring: Box<[u16]>,
    first: usize,
    free: usize,
    /// The slot that is leased next, if one is free. Its generation counts, not that of its entry.
    next: SlotKey,
}

impl Slots {
    /// A table of `count` free slots, at most [`MAX_SLOTS`].
    pub fn new(count: usize) -> Slots {
        let count = count.clamp(1, MAX_SLOTS);
        let entry = Entry { generation: 1, leased: false, outstanding: 0 };
        let entries: Vec<Entry> = core::iter::repeat_n(entry, count).collect();
        let next = SlotKey { index: 0, generation: 1 };
        Slots { entries: entries.into(), ring: (0..count as u16).collect(), first: 0, free: count, next }
    }

    /// Number of slots.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never: a table has at least one slot.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Slots that are not leased.
    #[inline]
    pub fn free(&self) -> usize {
        self.free
    }

    /// Leases the slot that has been free for the longest time. `None`: all are leased.
    #[inline]
    pub fn lease(&mut self) -> Option<SlotKey> {
        let key = self.next()?;
        self.first = if self.first + 1 == self.ring.len() { 0 } else { self.first + 1 };
        self.free -= 1;
        let entry = &mut self.entries[usize::from(key.index)];
        (entry.leased, entry.generation) = (true, key.generation);
        self.find_next();
        Some(key)
    }

    /// The slot that the next [`lease`](Slots::lease) leases.
    #[inline]
    pub fn next(&self) -> Option<SlotKey> {
        (self.free > 0).then_some(self.next)
    }

    /// Notes which slot is leased next, after another one has become the first in the ring.
    #[inline]
    fn find_next(&mut self) {
        let index = self.ring[self.first];
        self.next = SlotKey { index, generation: self.entries[usize::from(index)].generation };
    }

    /// Leases and releases the next slot: the one work request that named it has completed.
    #[inline]
    pub fn skip(&mut self) {
        // It stays the first one in the ring, with another generation. If none is free, this changes nothing that counts.
        self.next.generation = next_generation(self.next.generation);
    }

    #[inline]
    fn entry(&mut self, key: SlotKey) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(usize::from(key.index))?;
        (entry.leased && entry.generation == key.generation).then_some(entry)
    }

    /// Whether this lease has not ended.
    #[inline]
    pub fn is_leased(&self, key: SlotKey) -> bool {
        let entry = self.entries.get(usize::from(key.index));
        entry.is_some_and(|entry| entry.leased && entry.generation == key.generation)
    }

    /// The current lease of the slot with this index, if it is leased.
    #[inline]
    pub fn current(&self, index: u16) -> Option<SlotKey> {
        let entry = self.entries.get(usize::from(index))?;
        entry.leased.then_some(SlotKey { index, generation: entry.generation })
    }

    /// Notes that work requests name the slot.
    #[inline]
    pub fn add_work(&mut self, key: SlotKey, requests: u32) {
        if let Some(entry) = self.entry(key) {
            entry.outstanding += requests;
        }
    }

    /// Notes that a work request of the slot has completed. Returns how many are left; `None` for a stale or duplicate
    /// completion, which changes nothing.
    #[inline]
    pub fn complete_work(&mut self, key: SlotKey) -> Option<u32> {
        let entry = self.entry(key)?;
        entry.outstanding = entry.outstanding.checked_sub(1)?;
        Some(entry.outstanding)
    }

    /// Work requests of the slot that have not completed.
    #[inline]
    pub fn outstanding(&self, key: SlotKey) -> u32 {
        let entry = self.entries.get(usize::from(key.index));
        entry
            .filter(|entry| entry.leased && entry.generation == key.generation)
            .map_or(0, |entry| entry.outstanding)
    }

    /// Ends the lease. `false`, and nothing changes: the key is stale, or work requests of the slot have not completed.
    #[inline]
    pub fn release(&mut self, key: SlotKey) -> bool {
        let Some(entry) = self.entry(key) else { return false };
        if entry.outstanding > 0 {
            return false;
        }
        entry.leased = false;
        entry.generation = next_generation(entry.generation);
        let mut end = self.first + self.free;
        if end >= self.ring.len() {
            end -= self.ring.len();
        }
        self.ring[end] = key.index;
        self.free += 1;
        if self.free == 1 {
            self.find_next();
        }
        true
    }

    /// Forgets the work requests of a slot, because its queue pairs were reset and no completion will come.
    pub fn drop_work(&mut self, key: SlotKey) {
        if let Some(entry) = self.entry(key) {
            entry.outstanding = 0;
        }
    }
}

#[inline]
fn next_generation(generation: u32) -> u32 {
    // Zero is no generation, so that a zeroed key matches nothing.
    ((generation + 1) & GENERATION_MASK).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Lease(u8),
        Complete(usize),
        Release(usize),
        Stale(usize),
        Skip,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u8..4).prop_map(Step::Lease),
            any::<usize>().prop_map(Step::Complete),
            any::<usize>().prop_map(Step::Release),
            any::<usize>().prop_map(Step::Stale),
            Just(Step::Skip),
        ]
    }

    proptest! {
        /// I2: against a model. A slot is leased to one operation at a time, in the order of its releases, and is not released
        /// while a work request names it. Keys of former leases change nothing.
        #[test]
        fn slots_follow_the_model(count in 1usize..5, steps in proptest::collection::vec(step(), 0..200)) {
            let mut slots = Slots::new(count);
            let mut free: VecDeque<u16> = (0..count as u16).collect();
            let mut leased: Vec<(SlotKey, u32)> = Vec::new();
            let mut former: Vec<SlotKey> = Vec::new();
            for step in steps {
                match step {
                    Step::Lease(work) => {
                        let key = slots.lease();
                        prop_assert_eq!(key.map(|key| key.index), free.pop_front());
                        if let Some(key) = key {
                            prop_assert!(!former.contains(&key) && leased.iter().all(|(other, _)| other.index != key.index));
                            slots.add_work(key, work.into());
                            leased.push((key, work.into()));
                        }
                    }
                    Step::Complete(which) if !leased.is_empty() => {
                        let at = which % leased.len();
                        let (key, left) = leased[at];
                        prop_assert_eq!(slots.complete_work(key), left.checked_sub(1));
                        leased[at].1 = left.saturating_sub(1);
                    }
                    Step::Release(which) if !leased.is_empty() => {
                        let at = which % leased.len();
                        let (key, left) = leased[at];
                        prop_assert_eq!(slots.release(key), left == 0);
                        if left == 0 {
                            leased.swap_remove(at);
                            free.push_back(key.index);
                            former.push(key);
                        }
                    }
                    Step::Skip => {
                        let key = slots.next();
                        prop_assert_eq!(key.map(|key| key.index), free.front().copied());
                        slots.skip();
                        if let Some(key) = key {
                            prop_assert!(!former.contains(&key));
                            former.push(key);
                        }
                    }
                    Step::Stale(which) if !former.is_empty() => {
                        let key = former[which % former.len()];
                        prop_assert_eq!(slots.complete_work(key), None);
                        prop_assert!(!slots.release(key) && !slots.is_leased(key));
                    }
                    _ => {}
                }
                prop_assert_eq!(slots.free(), free.len());
                for (key, left) in &leased {
                    prop_assert!(slots.is_leased(*key));
                    prop_assert_eq!(slots.outstanding(*key), *left);
                    prop_assert_eq!(slots.current(key.index), Some(*key));
                }
            }
        }
    }

    #[test]
    fn generation_wraps_without_zero() {
        let mut slots = Slots::new(1);
        slots.next.generation = GENERATION_MASK;
        let key = slots.lease().unwrap();
        assert!(slots.release(key));
        assert_eq!(slots.lease().unwrap().generation, 1);
    }
}
