//! A table whose keys do not outlive their entries: a key is an index and a generation, and the generation differs each time
//! that the index is used again.
//!
//! ```text
//!   insert(a) = (0, g)    insert(b) = (1, g)    remove (0, g)    insert(c) = (0, g + 1)
//!   get (0, g) = nothing: the key is old
//! ```
//!
//! The index that was freed last is used first, because its memory is in a cache. So a key finds another entry after its index has
//! been used `2^GENERATION_BITS` times, and not before.

/// Names an entry of a [`Slab`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabKey {
    pub(crate) index: u32,
    /// Below `2^GENERATION_BITS`.
    pub(crate) generation: u32,
}

/// A table of at most so many entries as it was made for.
#[derive(Debug)]
pub(crate) struct Slab<T, const GENERATION_BITS: u32 = 32> {
    slots: Vec<Slot<T>>,
    limit: u32,
    /// The slot that was freed last, which names the one before it. `NONE`: no slot was freed.
    free: u32,
    first_generation: u32,
}

#[derive(Debug)]
struct Slot<T> {
    /// That of the entry, or of the next one.
    generation: u32,
    next_free: u32,
    value: Option<T>,
}

const NONE: u32 = u32::MAX;

impl<T, const GENERATION_BITS: u32> Slab<T, GENERATION_BITS> {
    const LAST_GENERATION: u32 = u32::MAX >> (32 - GENERATION_BITS);

    /// A table of `limit` entries, which is less than `u32::MAX`. It allocates memory as it grows.
    pub(crate) const fn new(limit: u32) -> Self {
        assert!(limit < NONE);
        Slab { slots: Vec::new(), limit, free: NONE, first_generation: 0 }
    }

    /// A table that allocates all its memory now. The generations of its indices begin with the lower bits of `generation`.
    pub(crate) fn allocated(limit: u32, generation: u32) -> Self {
        let slots = Vec::with_capacity(limit as usize);
        Slab { slots, first_generation: generation & Self::LAST_GENERATION, ..Slab::new(limit) }
    }

    /// Whether there is no room for another entry.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.free == NONE && self.slots.len() == self.limit as usize
    }

    /// Adds an entry. Returns the value if the table is full.
    ///
    /// Inlined, as [`remove`](Slab::remove) is: passing values through memory took 7 % of the time of a short message.
    #[inline(always)]
    pub(crate) fn insert(&mut self, value: T) -> Result<SlabKey, T> {
        if self.is_full() {
            return Err(value);
        }
        if self.free == NONE {
            self.free = self.slots.len() as u32;
            self.slots.push(Slot { generation: self.first_generation, next_free: NONE, value: None });
        }
        let index = self.free;
        let slot = &mut self.slots[index as usize];
        self.free = slot.next_free;
        slot.value = Some(value);
        Ok(SlabKey { index, generation: slot.generation })
    }

    /// The entry with this key.
    #[inline]
    pub(crate) fn get(&self, key: SlabKey) -> Option<&T> {
        let slot = self.slots.get(key.index as usize)?;
        slot.value.as_ref().filter(|_| slot.generation == key.generation)
    }

    /// Takes the entry out. Its key finds nothing from then on.
    #[inline(always)]
    pub(crate) fn remove(&mut self, key: SlabKey) -> Option<T> {
        let slot = self.slots.get_mut(key.index as usize)?;
        let value = slot.value.take_if(|_| slot.generation == key.generation)?;
        slot.generation = slot.generation.wrapping_add(1) & Self::LAST_GENERATION;
        slot.next_free = self.free;
        self.free = key.index;
        Some(value)
    }

    /// All entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_forged_keys_find_nothing_and_indices_are_used_again() {
        let mut slab = Slab::<char>::new(2);
        let first = slab.insert('a').unwrap();
        let second = slab.insert('b').unwrap();
        assert!(slab.is_full());
        assert_eq!(slab.insert('c'), Err('c'));
        assert_eq!((slab.get(first), slab.get(second)), (Some(&'a'), Some(&'b')));

        assert_eq!((slab.remove(first), slab.remove(first), slab.get(first)), (Some('a'), None, None));
        assert!(!slab.is_full());
        let third = slab.insert('d').unwrap();
        assert_eq!(third.index, first.index);
        assert_eq!((slab.remove(first), slab.get(first), slab.get(third)), (None, None, Some(&'d')));
        assert_eq!(slab.iter().collect::<String>(), "db");
        for (index, generation) in [(2, 0), (u32::MAX, 0), (third.index, third.generation + 1)] {
            assert_eq!(slab.remove(SlabKey { index, generation }), None);
        }
    }

    #[test]
    fn key_repeats_after_all_generations_of_its_index() {
        let mut slab = Slab::<u32, 3>::allocated(1, 29);
        let keys: Vec<SlabKey> = (0..9)
            .map(|value| {
                let key = slab.insert(value).unwrap();
                assert_eq!(slab.remove(key), Some(value));
                key
            })
            .collect();
        assert_eq!(keys[0].generation, 29 % 8);
        assert!((1..8).all(|at| keys[at] != keys[0] && keys[at].generation < 8));
        assert_eq!(keys[8], keys[0]);
    }

    #[test]
    fn indices_that_were_freed_are_used_before_new_ones_and_the_last_one_first() {
        let mut slab = Slab::<u32>::new(9);
        let keys: Vec<SlabKey> = (0..4).map(|value| slab.insert(value).unwrap()).collect();
        for at in [1, 3, 0] {
            slab.remove(keys[at]).unwrap();
        }
        let indices: Vec<u32> = (0..5).map(|value| slab.insert(value).unwrap().index).collect();
        assert_eq!(indices, [0, 3, 1, 4, 5]);
    }
}
