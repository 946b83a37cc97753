//! Keys: an index into a table with a generation, so that a key of something that is gone opens nothing.

/// A key of `INDEX_BITS` bits of index below a generation, in 32 bits.
///
/// The generation is never zero, so that no key is zero and a zeroed table entry matches none. After
/// `2^(32 - INDEX_BITS) - 1` reuses of one index a key repeats; tables hand out the least recently used index first,
/// which puts that as far away as it can be.
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
    /// How many indices there are.
    pub const INDICES: u32 = 1 << INDEX_BITS;
    const GENERATIONS: u32 = 1 << (BITS - INDEX_BITS);

    /// The first key of an index. Indices beyond [`Key::INDICES`] lose their upper bits.
    pub const fn first(index: u32) -> Self {
        Key((1 << INDEX_BITS) | (index & (Self::INDICES - 1)))
    }

    /// The key with these bits, from wherever they came.
    pub const fn from_bits(bits: u32) -> Self {
        Key(bits)
    }

    /// The bits to hand out.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Which table entry it is for. Always below [`Key::INDICES`].
    pub const fn index(self) -> u32 {
        self.0 & (Self::INDICES - 1)
    }

    /// The next key of the same index.
    pub const fn next(self) -> Self {
        let generation = (self.0 >> INDEX_BITS) & (Self::GENERATIONS - 1);
        let next = if generation + 1 >= Self::GENERATIONS { 1 } else { generation + 1 };
        Key((next << INDEX_BITS) | self.index())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_wrap_without_zero_and_stay_in_their_bits() {
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
    }
}
