//! A seeded random number generator. The seed is printed, so that a run can be repeated.

/// The seed of this run, see [`choose_seed`]. Prints it.
pub fn seed() -> u64 {
    let seed = choose_seed();
    println!("seed {seed} (set CROSSTIE_SEED to repeat)");
    seed
}

/// Chooses a seed: `CROSSTIE_SEED`, or the time.
pub fn choose_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    given_seed().unwrap_or(now.map_or(1, |time| time.as_nanos() as u64))
}

/// The value of `CROSSTIE_SEED`.
pub fn given_seed() -> Option<u64> {
    std::env::var("CROSSTIE_SEED").ok().and_then(|seed| seed.parse().ok())
}

/// The splitmix64 generator.
#[derive(Clone)]
pub struct Random(
    /// The state; at first the seed.
    pub u64,
);

impl Random {
    /// Any number.
    #[expect(clippy::should_implement_trait, reason = "it is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// An index below `count`; 0 if `count` is 0.
    pub fn index(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }
}
