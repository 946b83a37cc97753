//! When to start, for clients that do not wait for answers.

use super::PlanError;
use super::random::{Random, Stream};

/// Intended starts of one client's requests: at random, at a given rate, whatever the answers do (a Poisson process).
///
/// Latency counts from the intended start: a store that stalls is late for every request that should have begun meanwhile.
///
/// ```
/// use crosstie_bench::workload::Schedule;
/// let starts: Vec<u64> = Schedule::new(1, 0, 0, 1_000_000.0)?.take(10_000).collect();
/// assert!(starts.is_sorted());
/// // Ten thousand at a million per second: ten milliseconds.
/// assert!((9_500_000..10_500_000).contains(starts.last().unwrap()));
/// # Ok::<(), crosstie_bench::workload::PlanError>(())
/// ```
pub struct Schedule {
    random: Random,
    gap: f64,
    /// Whole nanoseconds, and what is left.
    at: u64,
    rest: f64,
}

impl Schedule {
    /// The starts of client `client` of node `rank`, `rate` per second.
    pub fn new(seed: u64, rank: u32, client: u32, rate: f64) -> Result<Schedule, PlanError> {
        let gap = 1e9 / rate;
        if !(rate > 0.0 && rate.is_finite() && gap.is_finite()) {
            return Err(PlanError::Rate(rate));
        }
        Ok(Schedule { random: Random::new(seed, rank, client, Stream::Starts), gap, at: 0, rest: 0.0 })
    }
}

impl Iterator for Schedule {
    type Item = u64;

    /// Nanoseconds from the beginning. There is always a next one.
    fn next(&mut self) -> Option<u64> {
        self.rest -= (1.0 - self.random.unit()).ln() * self.gap;
        let whole = self.rest as u64;
        self.rest -= whole as f64;
        self.at = self.at.saturating_add(whole);
        Some(self.at)
    }
}
