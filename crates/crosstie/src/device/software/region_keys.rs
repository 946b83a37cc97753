//! The keys of regions, and the tags of their addresses: no region has the same key and tag as one before it.
//!
//! A key names an entry of the table of regions; its generation tells the regions apart that use the entry one after the
//! other. A key has 32 bits, as on a network, so the generations of an entry are used up after [`GENERATIONS`] regions. From
//! then on the keys repeat, and the address tells the regions apart: its upper 16 bits are a tag that counts how often the
//! generations were used up. A peer names both, so an address and key of a region that was given back match no later
//! region.
//!
//! ```text
//!           63      48 47                                     0          31         18 17          0
//!  address +----------+----------------------------------------+   key  +-------------+-------------+
//!          |   tag    | address in the owner's address space   |        | generation  |    index    |
//!          +----------+----------------------------------------+        +-------------+-------------+
//! ```
//!
//! The bound: after [`MAX_USES`] regions, about 2^30, an entry is not used again. All entries together serve 2^48 regions;
//! after that, registering fails. At a million registrations per second this takes nine years.
//!
//! The first generation is drawn at random for each device, so that a key of a device that was closed is not likely to be
//! valid on the device that its process opens next. (A peer cannot reach a region with an address of another device by
//! accident: it would need the same address, too.)

use std::collections::VecDeque;

use super::layout::RegionKey;

/// Bits of an address that are an address. Linux gives a program no memory beyond them unless the program asks for it.
const ADDRESS_BITS: u32 = 48;
/// Generations of a key.
const GENERATIONS: u32 = (1 << 14) - 1;
/// How often an entry is used: once for each generation with each tag.
const MAX_USES: u32 = GENERATIONS << 16;
/// New entries are used until this many are free. Then the one that is free for the longest time is used again. So the
/// table of a program that registers again and again stays small, and an entry does not need a tag for a long time.
const MIN_FREE: usize = 1024;

/// A key and the tag that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TaggedKey {
    pub(super) key: RegionKey,
    tag: u16,
}

impl TaggedKey {
    /// The address under which the device knows memory at `pointer`.
    pub(super) fn address(self, pointer: u64) -> u64 {
        pointer | u64::from(self.tag) << ADDRESS_BITS
    }
}

/// The pointer to memory that the device knows under this address.
#[inline]
pub(super) fn pointer(address: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut((address & ((1 << ADDRESS_BITS) - 1)) as usize)
}

/// Whether memory can have a tag in its address.
pub(super) fn is_taggable(start: usize, len: usize) -> bool {
    start.checked_add(len).is_some_and(|end| end as u64 <= 1 << ADDRESS_BITS)
}

/// Hands out keys.
#[derive(Debug)]
pub(super) struct RegionKeys {
    first_generation: u32,
    entries: u32,
    max_uses: u32,
    /// By index: how many regions have used the entry.
    uses: Vec<u32>,
    /// Entries that are free and can be used again; the one that is free for the longest time comes first.
    free: VecDeque<u32>,
}

impl RegionKeys {
    /// `random` chooses the first generation.
    pub(super) fn new(random: u16) -> RegionKeys {
        RegionKeys {
            first_generation: random.into(),
            entries: RegionKey::INDICES,
            max_uses: MAX_USES,
            uses: Vec::new(),
            free: VecDeque::new(),
        }
    }

    /// A key that no region had before. `None` if all are in use or used up.
    pub(super) fn take(&mut self) -> Option<TaggedKey> {
        let next = self.uses.len() as u32;
        let index = if next < self.entries && self.free.len() < MIN_FREE {
            self.uses.push(0);
            next
        } else {
            self.free.pop_front()?
        };
        let uses = &mut self.uses[index as usize];
        let (generation, tag) = ((self.first_generation + *uses) % GENERATIONS, *uses / GENERATIONS);
        *uses += 1;
        Some(TaggedKey { key: RegionKey::of_generation(index, generation), tag: tag as u16 })
    }

    /// The region with this key is gone, and no peer is inside an operation that found it.
    pub(super) fn give_back(&mut self, key: RegionKey) {
        let index = key.index();
        if self.uses[index as usize] < self.max_uses {
            self.free.push_back(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// A table with few entries, that are used up soon.
    fn small(entries: u32, max_uses: u32) -> RegionKeys {
        RegionKeys { entries, max_uses, ..RegionKeys::new(12345) }
    }

    #[test]
    fn no_key_is_handed_out_twice_with_the_same_tag_until_all_are_used_up() {
        const TAGS: u32 = 3;
        for entries in [1, 5] {
            let mut keys = small(entries, TAGS * GENERATIONS);
            let mut seen = HashSet::new();
            while let Some(tagged) = keys.take() {
                assert!(seen.insert((tagged.key.bits(), tagged.address(0x7000))), "{tagged:?}");
                assert_ne!(tagged.key.bits(), 0);
                assert_eq!(pointer(tagged.address(0x7000)).addr(), 0x7000);
                keys.give_back(tagged.key);
            }
            assert_eq!(seen.len() as u32, entries * TAGS * GENERATIONS, "all of them were used");
            assert_eq!(keys.take(), None, "they stay used up");
        }
    }

    #[test]
    fn the_last_tag_is_the_last_that_fits_into_an_address() {
        let mut keys = small(1, MAX_USES);
        let first = keys.take().unwrap();
        keys.uses[0] = MAX_USES - 1;
        keys.give_back(first.key);
        let last = keys.take().unwrap();
        assert_eq!(last.tag, u16::MAX);
        assert_eq!(last.address(0xFFFF_FFFF_FFFF), u64::MAX);
        keys.give_back(last.key);
        assert_eq!(keys.take(), None);
    }

    #[test]
    fn entries_are_used_again_in_the_order_in_which_they_became_free() {
        let mut keys = RegionKeys::new(0);
        let mut indices = HashSet::new();
        for _ in 0..20 * MIN_FREE {
            let tagged = keys.take().unwrap();
            assert_eq!(tagged.address(0), 0, "no tag yet");
            indices.insert(tagged.key.index());
            keys.give_back(tagged.key);
        }
        assert_eq!(indices.len(), MIN_FREE, "the table stays small");
        assert_eq!(keys.uses, [20; MIN_FREE], "all are used equally often");
    }

    #[test]
    fn memory_beyond_the_address_bits_has_no_place_for_a_tag() {
        assert!(is_taggable(4096, 4096) && is_taggable((1 << 48) - 4096, 4096));
        assert!(!is_taggable((1 << 48) - 4096, 4097) && !is_taggable(usize::MAX, 1));
    }
}
