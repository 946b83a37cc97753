//! The start times of requests in an open loop.

use super::PlanError;
use super::random::{Random, Stream};

/// Intended start times of one client's requests: random times at a given rate (a Poisson process), independent of the responses.
///
/// Latency counts from the intended start. So if the store stalls, every request that should have started meanwhile is late.
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
    /// The time of the last start: whole nanoseconds, and the fraction.
    at: u64,
    fraction: f64,
}

impl Schedule {
    /// The starts of client `client` of node `rank`, `rate` per second.
    pub fn new(seed: u64, rank: u32, client: u32, rate: f64) -> Result<Schedule, PlanError> {
        let gap = 1e9 / rate;
        if !(rate > 0.0 && rate.is_finite() && gap.is_finite()) {
            return Err(PlanError::Rate(rate));
        }
        Ok(Schedule { random: Random::new(seed, rank, client, Stream::Starts), gap, at: 0, fraction: 0.0 })
    }
}

impl Iterator for Schedule {
    type Item = u64;

    /// The next start, in nanoseconds from the start of the run. Never `None`.
    fn next(&mut self) -> Option<u64> {
        self.fraction -= (1.0 - self.random.unit()).ln() * self.gap;
        let whole = self.fraction as u64;
        self.fraction -= whole as f64;
        self.at = self.at.saturating_add(whole);
        Some(self.at)
    }
}
