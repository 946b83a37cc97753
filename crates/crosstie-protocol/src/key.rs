//! Keys: a table index with a generation, so that the key of a removed entry does not match its successor.

/// A key of `BITS` bits: the index in the lower `INDEX_BITS` bits, and the generation above it.
///
/// ```text
///  BITS          INDEX_BITS            0
/// +----------------+-------------------+
/// |   generation   |       index       |
/// +----------------+-------------------+
/// ```
///
/// The generation is never zero, so no key is zero, and a zeroed table entry matches no key. A key repeats after
/// `2^(BITS - INDEX_BITS) - 1` reuses of its index. Tables whose keys others may keep hand out the least recently used index first, which
/// makes this take as long as possible.
///
/// ```
/// use crosstie_protocol::key::Key;
/// type QpNum = Key<14>;
/// let first = QpNum::first(7);
/// let second = first.next();
/// assert_eq!((first.index(), second.index()), (7, 7));
/// assert_ne!(first, second);
/// assert_eq!(QpNum::from_bits(second.bits()), second);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key<const INDEX_BITS: u32, const BITS: u32 = 32>(u32);

impl<const INDEX_BITS: u32, const BITS: u32> Key<INDEX_BITS, BITS> {
    /// The number of indices.
    pub const INDICES: u32 = 1 << INDEX_BITS;
    const GENERATIONS: u32 = 1 << (BITS - INDEX_BITS);

    /// The first key of an index. Upper bits of an index beyond [`Key::INDICES`] are cut off.
    pub const fn first(index: u32) -> Self {
        Key((1 << INDEX_BITS) | (index & (Self::INDICES - 1)))
    }

    /// The key of an index with generation number `number`; the numbers repeat as the keys do.
    pub const fn of_generation(index: u32, number: u32) -> Self {
        let generation = number % (Self::GENERATIONS - 1) + 1;
        Key((generation << INDEX_BITS) | (index & (Self::INDICES - 1)))
    }

    /// The key with these bits, which may come from an untrusted peer.
    pub const fn from_bits(bits: u32) -> Self {
        Key(bits)
    }

    /// The key as an integer.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The index of the table entry. Always below [`Key::INDICES`].
    pub const fn index(self) -> u32 {
        self.0 & (Self::INDICES - 1)
    }

    /// The next key of the same index.
    pub const fn next(self) -> Self {
        match self.0.checked_add(Self::INDICES) {
            Some(next) if next <= u32::MAX >> (32 - BITS) => Key(next),
            _ => self.first_again(),
        }
    }

    /// Behind the last generation comes the first.
    #[cold]
    #[inline(never)]
    const fn first_again(self) -> Self {
        Self::first(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_wraps_without_zero_and_stays_in_its_bits() {
        let first = Key::<4, 8>::first(5);
        let mut key = first;
        for _ in 0..15 {
            assert_ne!(key.bits() >> 4, 0);
            assert!(key.bits() < 256);
            assert_eq!(key.index(), 5);
            key = key.next();
        }
        assert_eq!(key, first);
        assert_eq!(Key::<4, 8>::first(21).index(), 5);
        for number in 0..40 {
            assert_eq!(Key::<4, 8>::of_generation(5, number), key);
            key = key.next();
        }
    }
}
