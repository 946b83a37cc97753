//! Keys: what NCCL gets instead of pointers.

use core::ffi::c_void;

use crosstie_protocol::slab::{Slab, SlabKey};

/// What a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Context = 1,
    Listen = 2,
    Send = 3,
    Recv = 4,
    Memory = 5,
    SendRequest = 6,
    RecvRequest = 7,
    Connecting = 8,
}

/// Kind, generation and index of an object, in one word. NCCL keeps it in a `void*` and never uses it as an address.
///
/// ```text
///   63    60 59                    32 31                              0
///   | kind  |     generation         |             index              |
/// ```
///
/// A kind is never 0, so a key is neither NULL nor 0x1, which NCCL uses as a value of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

const GENERATION_BITS: u32 = 28;

/// Index and generation of a [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryKey {
    pub(crate) index: u32,
    /// Below `2^GENERATION_BITS`.
    pub(crate) generation: u32,
}

const LAST_GENERATION: u32 = u32::MAX >> (32 - GENERATION_BITS);

impl SlabKey for EntryKey {
    #[inline]
    fn of_generation(index: u32, number: u32) -> EntryKey {
        EntryKey { index, generation: number & LAST_GENERATION }
    }

    #[inline]
    fn index(self) -> u32 {
        self.index
    }

    #[inline]
    fn next(self) -> EntryKey {
        EntryKey { generation: self.generation.wrapping_add(1) & LAST_GENERATION, ..self }
    }
}

/// A table whose keys fit into a [`Key`].
pub(crate) type KeySlab<T> = Slab<T, EntryKey>;

impl Key {
    /// For an entry of a [`KeySlab`].
    #[inline]
    pub(crate) fn new(kind: Kind, entry: EntryKey) -> Key {
        Key((kind as u64) << 60 | u64::from(entry.generation) << 32 | u64::from(entry.index))
    }

    #[inline]
    pub(crate) fn from_ptr(ptr: *mut c_void) -> Key {
        Key(ptr.addr() as u64)
    }

    #[inline]
    pub(crate) fn to_ptr(self) -> *mut c_void {
        core::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(crate) fn from_bits(bits: u64) -> Key {
        Key(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn is(self, kind: Kind) -> bool {
        self.0 >> 60 == kind as u64
    }

    #[inline]
    pub(crate) fn entry(self) -> EntryKey {
        EntryKey { index: self.0 as u32, generation: (self.0 >> 32) as u32 & LAST_GENERATION }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_key_are_independent() {
        for (generation, index) in [(0, 0), (1, 0), (LAST_GENERATION, u32::MAX), (77, 1 << 20)] {
            let entry = EntryKey { index, generation };
            let key = Key::new(Kind::Connecting, entry);
            assert_eq!(key.entry(), entry);
            assert!(key.is(Kind::Connecting) && !key.is(Kind::Send));
            assert_eq!(Key::from_ptr(key.to_ptr()), key);
            assert!(key.bits() > 1);
        }
    }

    #[test]
    fn entry_key_repeats_after_all_generations() {
        let first = EntryKey::of_generation(7, u32::MAX);
        assert_eq!(first, EntryKey { index: 7, generation: LAST_GENERATION });
        assert_eq!((first.next().index(), first.next().generation), (7, 0));
        assert_eq!(first.next(), EntryKey::of_generation(7, 0));
    }
}
