//! Keys: what NCCL gets instead of pointers.

use core::ffi::c_void;

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

impl Key {
    pub(crate) const GENERATIONS: u32 = 1 << GENERATION_BITS;

    pub(crate) fn new(kind: Kind, generation: u32, index: u32) -> Key {
        let generation = u64::from(generation % Key::GENERATIONS);
        Key((kind as u64) << 60 | generation << 32 | u64::from(index))
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
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32 % Key::GENERATIONS
    }

    #[inline]
    pub(crate) fn index(self) -> u32 {
        self.0 as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_key_are_independent() {
        for (generation, index) in [(0, 0), (1, 0), (Key::GENERATIONS - 1, u32::MAX), (77, 1 << 20)] {
            let key = Key::new(Kind::Connecting, generation, index);
            assert_eq!((key.generation(), key.index()), (generation, index));
            assert!(key.is(Kind::Connecting) && !key.is(Kind::Send));
            assert_eq!(Key::from_ptr(key.to_ptr()), key);
            assert!(key.bits() > 1);
        }
        assert_eq!(Key::new(Kind::Send, Key::GENERATIONS, 3), Key::new(Kind::Send, 0, 3));
    }
}
