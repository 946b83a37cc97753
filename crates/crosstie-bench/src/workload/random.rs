//! Random numbers that are the same everywhere: SplitMix64 (Steele, Lea and Flood, 2014).

use crosstie_kv::sharding::hash_word;

pub(super) struct Random {
    state: u64,
}

/// What is drawn. Each has numbers of its own, so that a change of one does not change the others.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    Keys = 1,
    Kinds = 2,
    Sides = 3,
    Starts = 4,
}

impl Random {
    pub(super) fn new(seed: u64, rank: u32, client: u32, stream: Stream) -> Random {
        let who = u64::from(rank) << 32 | u64::from(client);
        Random { state: hash_word(hash_word(hash_word(seed) ^ who) ^ stream as u64) }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, without 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From 0 to `count`, without it. For `count` up to 2^32 no number is preferred by more than 2^-32.
    pub(super) fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(count)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_splitmix() {
        let mut random = super::Random { state: 1234567 };
        // The published sequence for this seed.
        let published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431];
        assert_eq!(published.map(|_| random.next()), published);
    }
}
