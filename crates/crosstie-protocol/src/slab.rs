//! A table whose keys do not outlive their entries: a key is an index and a generation, and the generation differs each time that the
//! index is used again.
//!
//! ```text
//!   insert(a) = (0, g)    insert(b) = (1, g)    remove (0, g)    insert(c) = (0, g + 1)
//!   get (0, g) = nothing: the key is old
//! ```
//!
//! The index that was freed last is used first, because its memory is in a cache. So a key finds another entry after its index has
//! been used as often as there are generations, and not before.

use alloc::vec::Vec;

use crate::key::Key;

/// A key of a [`Slab`]: an index and a generation.
pub trait SlabKey: Copy + Eq {
    /// The key of an index with generation number `number`; the numbers repeat as the keys do.
    fn of_generation(index: u32, number: u32) -> Self;

    /// The index.
    fn index(self) -> u32;

    /// The key of the same index with the next generation.
    fn next(self) -> Self;
}

impl<const INDEX_BITS: u32, const BITS: u32> SlabKey for Key<INDEX_BITS, BITS> {
    #[inline]
    fn of_generation(index: u32, number: u32) -> Self {
        Key::of_generation(index, number)
    }

    #[inline]
    fn index(self) -> u32 {
        Key::index(self)
    }

    #[inline]
    fn next(self) -> Self {
        Key::next(self)
    }
}

/// A table of at most so many entries as it was made for.
///
/// ```
/// use crosstie_protocol::key::Key;
/// use crosstie_protocol::slab::Slab;
/// let mut names = Slab::<&str, Key<4>>::new(2);
/// let first = names.insert("first").unwrap();
/// assert_eq!(names.remove(first), Some("first"));
/// let second = names.insert("second").unwrap();
/// assert_eq!((names.get(first), names.get(second)), (None, Some(&"second")));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slab<T, K> {
    slots: Vec<Slot<T, K>>,
    limit: u32,
    len: u32,
    /// The slot that was freed last, which names the one before it. `NONE`: no slot is free.
    free: u32,
    first_generation: u32,
    /// Keys repeat at once, so that the states of a model repeat.
    #[cfg(test)]
    pub(crate) one_generation: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Slot<T, K> {
    /// That of the entry, or of the next one.
    key: K,
    next_free: u32,
    value: Option<T>,
}

const NONE: u32 = u32::MAX;

impl<T, K: SlabKey> Slab<T, K> {
    /// A table of `limit` entries, which is less than `u32::MAX` and at most as many as keys have indices. It allocates memory as it grows.
    pub const fn new(limit: u32) -> Self {
        assert!(limit < NONE);
        Slab {
            slots: Vec::new(),
            limit,
            len: 0,
            free: NONE,
            first_generation: 0,
            #[cfg(test)]
            one_generation: false,
        }
    }

    /// A table that allocates all its memory now. The generations of its indices begin with number `generation`.
    pub fn allocated(limit: u32, generation: u32) -> Self {
        let slot = |index| Slot {
            key: K::of_generation(index, generation),
            next_free: if index + 1 == limit { NONE } else { index + 1 },
            value: None,
        };
        let free = if limit == 0 { NONE } else { 0 };
        let slots = (0..limit).map(slot).collect();
        Slab { slots, free, first_generation: generation, ..Slab::new(limit) }
    }

    /// Number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether there is no room for another entry.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free == NONE && self.slots.len() == self.limit as usize
    }

    /// The key that the next [`insert`](Slab::insert) returns. `None` if the table is full.
    pub fn next_key(&mut self) -> Option<K> {
        if self.free == NONE && !self.grow() {
            return None;
        }
        self.slots.get(self.free as usize).map(|slot| slot.key)
    }

    /// Adds an entry. Returns the value if the table is full.
    ///
    /// Inlined, as [`remove`](Slab::remove) is: passing values through memory took 7 % of the time of a short message of the NCCL plugin.
    #[inline]
    pub fn insert(&mut self, value: T) -> Result<K, T> {
        if self.free == NONE && !self.grow() {
            return Err(value);
        }
        let slot = &mut self.slots[self.free as usize];
        self.free = slot.next_free;
        self.len += 1;
        slot.value = Some(value);
        Ok(slot.key)
    }

    #[cold]
    fn grow(&mut self) -> bool {
        let index = self.slots.len() as u32;
        if index == self.limit {
            return false;
        }
        let key = K::of_generation(index, self.first_generation);
        self.slots.push(Slot { key, next_free: NONE, value: None });
        self.free = index;
        true
    }

    /// The entry with this key.
    #[inline]
    pub fn get(&self, key: K) -> Option<&T> {
        let slot = self.slots.get(key.index() as usize)?;
        slot.value.as_ref().filter(|_| slot.key == key)
    }

    /// The entry with this key.
    #[inline]
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.index() as usize)?;
        slot.value.as_mut().filter(|_| slot.key == key)
    }

    /// Takes the entry out. Its key finds nothing from then on.
    #[inline]
    pub fn remove(&mut self, key: K) -> Option<T> {
        let slot = self.slots.get_mut(key.index() as usize)?;
        let value = slot.value.take_if(|_| slot.key == key)?;
        slot.key = key.next();
        #[cfg(test)]
        if self.one_generation {
            slot.key = key;
        }
        slot.next_free = self.free;
        self.free = key.index();
        self.len -= 1;
        Some(value)
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// All entries.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }

    /// All entries.
    pub fn into_values(self) -> impl Iterator<Item = T> {
        self.slots.into_iter().filter_map(|slot| slot.value)
    }
}

#[cfg(test)]
mod tests {
    use std::string::String;

    use super::*;

    #[test]
    fn old_and_forged_keys_find_nothing_and_indices_are_used_again() {
        for mut slab in [Slab::<char, Key<8>>::new(2), Slab::allocated(2, 0)] {
            let first = slab.insert('a').unwrap();
            let second = slab.insert('b').unwrap();
            assert!(slab.is_full() && slab.next_key().is_none());
            assert_eq!(slab.insert('c'), Err('c'));
            assert_eq!((slab.get(first), slab.get(second)), (Some(&'a'), Some(&'b')));
            assert_eq!(slab.get_mut(second), Some(&mut 'b'));

            assert_eq!((slab.remove(first), slab.remove(first), slab.get(first)), (Some('a'), None, None));
            assert_eq!((slab.len(), slab.is_full(), slab.is_empty()), (1, false, false));
            let next = slab.next_key();
            let third = slab.insert('d').unwrap();
            assert_eq!((third.index(), Some(third)), (first.index(), next));
            assert_eq!((slab.remove(first), slab.get(first), slab.get(third)), (None, None, Some(&'d')));
            assert_eq!(slab.get_mut(first), None);
            assert_eq!(slab.iter().collect::<String>(), "db");
            for forged in [0, 2, u32::MAX, third.bits() + 1, third.next().bits()] {
                assert_eq!(slab.remove(Key::from_bits(forged)), None);
            }
            slab.iter_mut().for_each(|value| *value = 'e');
            assert_eq!(slab.into_values().collect::<String>(), "ee");
        }
    }

    #[test]
    fn key_repeats_after_all_generations_of_its_index() {
        let mut slab = Slab::<u32, Key<5, 8>>::allocated(1, 29);
        let keys: Vec<_> = (0..8)
            .map(|value| {
                let key = slab.insert(value).unwrap();
                assert_eq!(slab.remove(key), Some(value));
                key
            })
            .collect();
        assert_eq!(keys[0], Key::of_generation(0, 29));
        assert!((1..7).all(|at| keys[at] != keys[0]));
        assert_eq!(keys[7], keys[0]);
    }

    #[test]
    fn indices_that_were_freed_are_used_before_new_ones_and_the_last_one_first() {
        let mut slab = Slab::<u32, Key<8>>::new(9);
        let keys: Vec<_> = (0..4).map(|value| slab.insert(value).unwrap()).collect();
        for at in [1, 3, 0] {
            slab.remove(keys[at]).unwrap();
        }
        let indices: Vec<u32> = (0..5).map(|value| slab.insert(value).unwrap().index()).collect();
        assert_eq!(indices, [0, 3, 1, 4, 5]);
    }
}
