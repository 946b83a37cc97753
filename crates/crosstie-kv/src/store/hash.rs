//! Hashes that others cannot foresee: each shard draws its own seed, so nobody can choose keys that meet in one place.

use std::hash::{BuildHasher, RandomState};

/// One shard's seed.
pub(super) struct Seed {
    strings: RandomState,
    words: [u64; 4],
}

impl Seed {
    pub(super) fn random() -> Seed {
        let strings = RandomState::new();
        let words = [1u64, 2, 3, 4].map(|n| strings.hash_one(n));
        Seed { strings, words }
    }

    /// Two multiplications, each folded to its two halves' difference: short, and unlike SipHash fast for a single word.
    #[inline]
    pub(super) fn word(&self, key: u64) -> u64 {
        let [first, by, second, by_again] = self.words;
        fold(fold(key ^ first, by) ^ second, by_again)
    }

    pub(super) fn string(&self, key: &[u8]) -> u64 {
        self.strings.hash_one(key)
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    // An even factor would lose bits of the low half.
    let product = u128::from(a) * u128::from(b | 1);
    (product >> 64) as u64 ^ product as u64
}
