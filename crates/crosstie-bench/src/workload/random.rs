//! The seeded RNG of workloads: SplitMix64 (Steele, Lea and Flood, 2014). It yields the same numbers on all machines.

use crosstie_kv::sharding::hash_word;

pub(super) struct Random {
    state: u64,
}

/// What the numbers are used for. Each use has its own stream of numbers, so that changing one use does not change the others.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    Keys = 1,
    Operations = 2,
    Locality = 3,
    Starts = 4,
}

impl Random {
    pub(super) fn new(seed: u64, rank: u32, client: u32, stream: Stream) -> Random {
        let id = u64::from(rank) << 32 | u64::from(client);
        Random { state: hash_word(hash_word(hash_word(seed) ^ id) ^ stream as u64) }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 (included) to 1 (excluded).
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number from 0 (included) to `count` (excluded). For `count` up to 2^32 the bias is at most 2^-32.
    pub(super) fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(count)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut random = super::Random { state: 1234567 };
        // The published sequence for this seed.
        let published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431];
        assert_eq!(published.map(|_| random.next()), published);
    }
}
