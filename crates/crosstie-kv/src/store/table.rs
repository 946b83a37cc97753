//! A hash table that grows by segments.
//!
//! ```text
//! directory   | 0 | 0 | 1 | 2 |          2^depth entries, chosen by the highest bits of the hash
//!               |   |   |   `----> segment 2
//! segment 0  <--'---'   `--------> segment 1
//! | group | group | ...          |       GROUPS each, chosen by the lowest bits of the hash; linear probing of their slots
//! ```
//!
//! A full segment is split into two; the rest of the table stays where it is (extendible hashing). So growing never stops the
//! daemon for longer than one segment takes, and never needs twice the memory. A lookup reads the directory, which stays in the
//! cache, and one or two cache lines of a segment. Segments are not freed when their keys are deleted; new keys use them.
//!
//! Hashes with equal highest bits cannot be separated by splitting. Random hashes do not collide like that, and a client cannot
//! choose hashes, because it does not know the seed of the shard. Should it happen all the same, the table refuses more of these
//! keys, and nothing else suffers: the directory has at most [`MAX_ENTRIES_PER_SEGMENT`] entries for each segment, about 1 % of
//! the memory of the segments, so no key makes the table allocate or copy more than that.

/// A slot of a table: vacant, or an entry.
pub(super) trait Slot: Sized {
    /// A vacant slot.
    const VACANT: Self;
    /// Slots that [`Table::get_mut_at_home`] compares: an array of them, which may be aligned.
    type Group: AsRef<[Self]> + AsMut<[Self]>;
    /// A group of vacant slots.
    const VACANT_GROUP: Self::Group;
    fn is_vacant(&self) -> bool;
}

/// The table. Its users choose the hashes and compare the keys.
pub(super) struct Table<S: Slot, const GROUPS: usize> {
    /// Indices of segments. Empty at first, then 2^depth entries.
    directory: Vec<u32>,
    depth: u32,
    segments: Vec<Segment<S, GROUPS>>,
    len: usize,
}

struct Segment<S: Slot, const GROUPS: usize> {
    /// Numbered across groups, the slots form a ring.
    groups: Box<[S::Group; GROUPS]>,
    len: u32,
    /// The number of highest bits that all hashes in this segment have in common.
    depth: u32,
}

/// The most bits of the hash that choose a segment. A table that would need more is full.
const MAX_DEPTH: u32 = 28;
/// The most entries of the directory for each segment. With random hashes there are two to four.
const MAX_ENTRIES_PER_SEGMENT: usize = 64;

impl<S: Slot, const GROUPS: usize> Table<S, GROUPS> {
    /// Slots of a segment.
    const SLOTS: usize = Segment::<S, GROUPS>::SLOTS;
    /// The most occupied slots of a segment. One in five stays vacant, which keeps probing short.
    const FULL: usize = Self::SLOTS - Self::SLOTS.div_ceil(5);

    pub(super) fn new() -> Self {
        const {
            assert!(GROUPS.is_power_of_two() && Self::SLOTS.is_power_of_two());
            assert!(Self::SLOTS >= 8 && Self::SLOTS <= 1 << 16);
        }
        Table { directory: Vec::new(), depth: 0, segments: Vec::new(), len: 0 }
    }

    /// Occupied slots.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it has allocated.
    pub(super) fn allocated(&self) -> usize {
        self.directory.capacity() * size_of::<u32>()
            + self.segments.capacity() * size_of::<Segment<S, GROUPS>>()
            + self.segments.len() * size_of::<[S::Group; GROUPS]>()
    }

    pub(super) fn get(&self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<&S> {
        let segment = &self.segments[self.segment_of(hash)?];
        segment.find(hash, matches).map(|at| segment.slot(at))
    }

    pub(super) fn get_mut(&mut self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<&mut S> {
        let segment = self.segment_of(hash)?;
        let segment = &mut self.segments[segment];
        segment.find(hash, matches).map(|at| segment.slot_mut(at))
    }

    /// The group with which the search for `hash` starts.
    #[inline]
    pub(super) fn home(&self, hash: u64) -> Option<&S::Group> {
        let segment = &self.segments[self.segment_of(hash)?];
        Some(&segment.groups[Segment::<S, GROUPS>::home_group(hash)])
    }

    /// An entry, if it is in the group with which its search starts, as nearly all are. Otherwise [`get_mut`](Table::get_mut) may find it.
    ///
    /// Compares the slots without branches: how far an entry is from its home slot cannot be predicted.
    #[inline]
    pub(super) fn get_mut_at_home(&mut self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<&mut S> {
        let segment = self.segment_of(hash)?;
        let slots = self.segments[segment].groups[Segment::<S, GROUPS>::home_group(hash)].as_mut();
        let last = slots.len() - 1;
        let at = (0..last).fold(last, |at, i| if matches(&slots[i]) { i } else { at });
        matches(&slots[at]).then(|| &mut slots[at])
    }

    /// Makes space for one more entry with `hash`. Allocates at most `spare` bytes, and returns `false` if they are not enough, or
    /// if too many hashes have equal highest bits.
    pub(super) fn reserve(&mut self, hash: u64, mut spare: usize, hash_of: impl Fn(&S) -> u64) -> bool {
        loop {
            let full = match self.segment_of(hash) {
                Some(segment) if (self.segments[segment].len as usize) < Self::FULL => return true,
                full => full,
            };
            // All new memory counts, though the memory it replaces is freed later: for a moment both exist.
            let more_segments = self.segments.len() == self.segments.capacity();
            let segments = if more_segments { (self.segments.len() * 2).max(4) } else { 0 };
            let more_directory = full.is_none_or(|full| self.segments[full].depth == self.depth);
            let directory = if more_directory { (self.directory.len() * 2).max(1) } else { 0 };
            let max_directory = (self.segments.len() + 1) * MAX_ENTRIES_PER_SEGMENT;
            if let Some(full) = full
                && more_directory
                && (self.depth == MAX_DEPTH || directory > max_directory)
            {
                // The segment cannot be split. It may take a few more entries; one slot stays vacant, so that probing ends.
                return (self.segments[full].len as usize) < Self::SLOTS - 1;
            }
            let bytes = size_of::<[S::Group; GROUPS]>()
                + segments * size_of::<Segment<S, GROUPS>>()
                + directory * size_of::<u32>();
            let Some(left) = spare.checked_sub(bytes) else { return false };
            spare = left;
            if more_segments {
                self.segments.reserve_exact(segments - self.segments.len());
            }
            match full {
                None => {
                    self.directory = vec![0];
                    self.segments.push(Segment::new(0));
                }
                Some(full) => {
                    if more_directory {
                        self.directory = self.directory.iter().flat_map(|&segment| [segment; 2]).collect();
                        self.depth += 1;
                    }
                    self.split(full, hash, &hash_of);
                }
            }
        }
    }

    /// Inserts an entry whose key is not in the table. [`reserve`](Table::reserve) must have made space for it.
    pub(super) fn insert(&mut self, hash: u64, slot: S) {
        let Some(segment) = self.segment_of(hash) else { unreachable!("an insert follows a reserve") };
        debug_assert!((self.segments[segment].len as usize) < Self::SLOTS - 1);
        self.segments[segment].insert(hash, slot);
        self.len += 1;
    }

    pub(super) fn remove(
        &mut self,
        hash: u64,
        matches: impl Fn(&S) -> bool,
        hash_of: impl Fn(&S) -> u64,
    ) -> Option<S> {
        let segment = self.segment_of(hash)?;
        let segment = &mut self.segments[segment];
        let at = segment.find(hash, matches)?;
        self.len -= 1;
        Some(segment.remove(at, hash_of))
    }

    #[inline]
    fn segment_of(&self, hash: u64) -> Option<usize> {
        // Two shifts: with depth 0, one shift by 64 would overflow.
        self.directory.get(((hash >> 1) >> (63 - self.depth)) as usize).map(|&segment| segment as usize)
    }

    /// Splits segment `full`: entries whose next hash bit is set move into a new segment. `hash` is any hash that belongs into `full`.
    fn split(&mut self, full: usize, hash: u64, hash_of: &impl Fn(&S) -> u64) {
        let old = &mut self.segments[full];
        old.depth += 1;
        let depth = old.depth;
        let mut new = Segment::new(depth);
        old.partition(hash_of, |hash| hash >> (64 - depth) & 1 == 1, &mut new);

        let number = self.segments.len() as u32;
        self.segments.push(new);
        let prefix = (hash >> (64 - depth)) as usize | 1;
        let entries = 1 << (self.depth - depth);
        self.directory[prefix * entries..][..entries].fill(number);
    }
}

impl<S: Slot, const GROUPS: usize> Segment<S, GROUPS> {
    const PER_GROUP: usize = size_of::<S::Group>() / size_of::<S>();
    const SLOTS: usize = GROUPS * Self::PER_GROUP;

    fn new(depth: u32) -> Self {
        let groups: Box<[S::Group]> = (0..GROUPS).map(|_| S::VACANT_GROUP).collect();
        let Ok(groups) = groups.try_into() else { unreachable!("it has GROUPS groups") };
        Segment { groups, len: 0, depth }
    }

    #[inline]
    fn slot(&self, at: usize) -> &S {
        &self.groups[at / Self::PER_GROUP].as_ref()[at % Self::PER_GROUP]
    }

    #[inline]
    fn slot_mut(&mut self, at: usize) -> &mut S {
        &mut self.groups[at / Self::PER_GROUP].as_mut()[at % Self::PER_GROUP]
    }

    #[inline]
    fn home_group(hash: u64) -> usize {
        hash as usize & (GROUPS - 1)
    }

    /// The first slot of a probe sequence.
    #[inline]
    fn home(hash: u64) -> usize {
        Self::home_group(hash) * Self::PER_GROUP
    }

    #[inline]
    fn after(at: usize) -> usize {
        (at + 1) & (Self::SLOTS - 1)
    }

    // Probing ends: some slots are always vacant.
    fn find(&self, hash: u64, matches: impl Fn(&S) -> bool) -> Option<usize> {
        let mut at = Self::home(hash);
        loop {
            let slot = self.slot(at);
            if matches(slot) {
                return Some(at);
            }
            if slot.is_vacant() {
                return None;
            }
            at = Self::after(at);
        }
    }

    fn insert(&mut self, hash: u64, slot: S) {
        let mut at = Self::home(hash);
        while !self.slot(at).is_vacant() {
            at = Self::after(at);
        }
        *self.slot_mut(at) = slot;
        self.len += 1;
    }

    fn take(&mut self, at: usize) -> S {
        self.len -= 1;
        std::mem::replace(self.slot_mut(at), S::VACANT)
    }

    /// Removes an entry. Moves later entries of the probe sequence closer to their home slots.
    fn remove(&mut self, at: usize, hash_of: impl Fn(&S) -> u64) -> S {
        let removed = self.take(at);
        let (mut hole, mut at) = (at, Self::after(at));
        while !self.slot(at).is_vacant() {
            let home = Self::home(hash_of(self.slot(at)));
            // The entry may move into the hole unless its home slot lies after the hole.
            if (at.wrapping_sub(home) & (Self::SLOTS - 1)) >= (at.wrapping_sub(hole) & (Self::SLOTS - 1)) {
                *self.slot_mut(hole) = std::mem::replace(self.slot_mut(at), S::VACANT);
                hole = at;
            }
            at = Self::after(at);
        }
        removed
    }

    /// Moves the entries for which `moves` is true into `new`, and the others to where they would be without those.
    fn partition(&mut self, hash_of: &impl Fn(&S) -> u64, moves: impl Fn(u64) -> bool, new: &mut Self) {
        // Starts after a vacant slot. Then the entries that displaced an entry come before it and have already been moved.
        let vacant = (0..Self::SLOTS).find(|at| self.slot(*at).is_vacant()).unwrap_or(0);
        for at in (vacant + 1..Self::SLOTS).chain(0..vacant) {
            if !self.slot(at).is_vacant() {
                let hash = hash_of(self.slot(at));
                let slot = self.take(at);
                if moves(hash) { new.insert(hash, slot) } else { self.insert(hash, slot) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A key, which is its own hash, and a value. Key 0 means vacant.
    type Entry = (u64, u32);

    impl Slot for Entry {
        const VACANT: Entry = (0, 0);
        type Group = [Entry; 2];
        const VACANT_GROUP: [Entry; 2] = [Entry::VACANT; 2];
        fn is_vacant(&self) -> bool {
            self.0 == 0
        }
    }

    type Small = Table<Entry, 4>;

    fn reserve(table: &mut Small, key: u64, spare: usize) -> bool {
        table.reserve(key, spare, |slot| slot.0)
    }

    proptest! {
        /// With keys whose hashes collide in few segments and few home slots, the table contains exactly what was inserted.
        #[test]
        fn table_behaves_as_a_map(steps in prop::collection::vec((0u64..4, 1u64..8, 0u64..40, any::<bool>(), any::<u32>()), 0..400)) {
            let mut table = Small::new();
            let mut oracle = BTreeMap::new();
            for (high, low, middle, put, value) in steps {
                let key = high << 62 | middle << 56 | low;
                if put {
                    match table.get_mut(key, |slot| slot.0 == key) {
                        Some(slot) => slot.1 = value,
                        None => {
                            prop_assert!(reserve(&mut table, key, usize::MAX));
                            table.insert(key, (key, value));
                        }
                    }
                    oracle.insert(key, value);
                } else {
                    let removed = table.remove(key, |slot| slot.0 == key, |slot| slot.0);
                    prop_assert_eq!(removed.map(|slot| slot.1), oracle.remove(&key));
                }
                prop_assert_eq!(table.len(), oracle.len());
                for (key, value) in &oracle {
                    prop_assert_eq!(table.get(*key, |slot| slot.0 == *key), Some(&(*key, *value)));
                    let home = table.home(*key).is_some_and(|group| group.contains(&(*key, *value)));
                    let at_home = table.get_mut_at_home(*key, |slot| slot.0 == *key).copied();
                    prop_assert_eq!(at_home, home.then_some((*key, *value)));
                }
                prop_assert_eq!(table.segments.iter().map(|segment| segment.len as usize).sum::<usize>(), table.len());
            }
        }
    }

    #[test]
    fn table_never_allocates_more_than_its_limit() {
        let mut table = Small::new();
        let limit = 4000;
        let mut key = 0u64;
        loop {
            key = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let before = table.allocated();
            if !reserve(&mut table, key, limit - before) {
                break;
            }
            table.insert(key, (key, 1));
            assert!(table.allocated() <= limit);
        }
        assert!(table.len() > 60, "{}", table.len());
    }

    /// More keys than a segment takes, whose hashes differ in the lowest bits only: splitting cannot separate them, so the directory
    /// must not grow for them. With these steps `table_behaves_as_a_map` once allocated a directory of 1 GiB.
    #[test]
    fn hashes_with_equal_highest_bits_do_not_grow_the_directory() {
        let mut table = Small::new();
        let mut inserted = 0;
        for key in 1..20 {
            if reserve(&mut table, key, usize::MAX) {
                table.insert(key, (key, 7));
                inserted += 1;
            }
            assert!(table.directory.len() <= 1024, "{} entries for {inserted} keys", table.directory.len());
        }
        // One slot stays vacant, so that probing ends.
        assert_eq!((inserted, table.len()), (7, 7));
        for key in 1..20 {
            assert_eq!(table.get(key, |slot| slot.0 == key).is_some(), key <= 7, "{key}");
        }
        // Other keys find space.
        for key in (1..100).map(|n: u64| n << 57) {
            assert!(reserve(&mut table, key, usize::MAX));
            table.insert(key, (key, 8));
        }
        // So does a colliding key after one of the others was removed.
        assert!(table.remove(3, |slot| slot.0 == 3, |slot| slot.0).is_some());
        assert!(reserve(&mut table, 19, usize::MAX));
    }

    /// With hashes as the store has them, random ones, the limit of the directory is far away.
    #[test]
    fn random_hashes_stay_far_below_the_limit_of_the_directory() {
        let mut table = Table::<Entry, 512>::new();
        let (mut key, mut most) = (1u64, 0.0f64);
        for _ in 0..200_000 {
            key = key.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let hash = (key ^ key >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            assert!(table.reserve(hash, usize::MAX, |slot| slot.0));
            table.insert(hash, (hash, 1));
            most = most.max(table.directory.len() as f64 / table.segments.len() as f64);
        }
        assert!(most <= 8.0, "{most} entries of the directory for each segment");
    }

    /// Splitting cannot separate equal hashes. `reserve` fails before it has used all memory.
    #[test]
    fn reserve_fails_when_a_segment_is_full_of_equal_hashes() {
        let mut table = Small::new();
        for n in 0..7 {
            assert!(reserve(&mut table, 5, 1 << 20));
            table.insert(5, (5, n));
        }
        assert!(!reserve(&mut table, 5, 1 << 20));
        assert!(table.allocated() < 16 << 10);
        assert!(table.get(5, |slot| slot.1 == 3).is_some());
        assert!(reserve(&mut table, 5 << 61, 1 << 10));
    }
}
