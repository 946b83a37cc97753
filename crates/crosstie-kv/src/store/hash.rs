//! Hashes that a client cannot predict: each shard draws a random seed, so that nobody can choose keys that collide.

use std::hash::{BuildHasher, RandomState};

/// The random seed of one shard.
pub(super) struct Seed {
    bytes: RandomState,
    words: [u64; 4],
}

impl Seed {
    pub(super) fn random() -> Seed {
        let bytes = RandomState::new();
        let words = [1u64, 2, 3, 4].map(|n| bytes.hash_one(n));
        Seed { bytes, words }
    }

    /// Hashes an 8-byte key with two multiplications; the two halves of each product are combined by XOR. For a single word this
    /// is much faster than SipHash.
    #[inline]
    pub(super) fn hash_word(&self, key: u64) -> u64 {
        let [xor_1, factor_1, xor_2, factor_2] = self.words;
        fold(fold(key ^ xor_1, factor_1) ^ xor_2, factor_2)
    }

    pub(super) fn hash_bytes(&self, key: &[u8]) -> u64 {
        self.bytes.hash_one(key)
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    // An even factor would lose bits of the low half.
    let product = u128::from(a) * u128::from(b | 1);
    (product >> 64) as u64 ^ product as u64
}
