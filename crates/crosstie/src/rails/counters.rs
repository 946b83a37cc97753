//! What a connection counts. One thread writes, any thread may read.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use crosstie_protocol::rails::{MAX_RAILS, Violation};

use super::agreement::Role;
use crate::telemetry::Histogram;

/// A counter with one writer: an addition is a load and a store.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(super) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Counts times in nanoseconds: eight buckets per power of two. Any thread may read them while they are counted, and there are four of
/// these per connection: a [`Histogram`] has one owner and 30 KiB.
#[derive(Debug)]
pub(super) struct Latencies {
    buckets: [AtomicU32; Latencies::BUCKETS],
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies { buckets: [const { AtomicU32::new(0) }; Latencies::BUCKETS] }
    }
}

impl Latencies {
    const BUCKETS: usize = 8 * 40;

    #[inline]
    pub(super) fn record(&self, nanoseconds: u64) {
        let value = nanoseconds | 8;
        let power = value.ilog2();
        let bucket = (8 * (power - 3) + ((value >> (power - 3)) & 7) as u32) as usize;
        let bucket = &self.buckets[bucket.min(Latencies::BUCKETS - 1)];
        bucket.store(bucket.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// The middle of each bucket, as often as it was counted: a quantile is exact to 12 %.
    fn histogram(&self) -> Histogram {
        let mut histogram = Histogram::new();
        for (bucket, count) in self.buckets.iter().enumerate() {
            let (power, step) = (bucket as u32 / 8, bucket as u64 % 8);
            histogram.record_n(((8 + step) << power) + (1 << power) / 2, count.load(Relaxed).into());
        }
        histogram
    }
}

/// The counters of one rail of a connection.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct RailCells {
    pub(super) bytes: Counter,
    pub(super) work_requests: Counter,
    pub(super) payload_requests: Counter,
    pub(super) completions: Counter,
    pub(super) receives: Counter,
    pub(super) retries: Counter,
    pub(super) replays: Counter,
    pub(super) replayed_bytes: Counter,
    pub(super) probes: Counter,
    pub(super) failures: Counter,
    pub(super) returns: Counter,
    pub(super) latencies: Latencies,
    /// Bytes per microsecond.
    pub(super) rate: AtomicU64,
    pub(super) is_up: AtomicU32,
}

/// The counters of a connection.
#[derive(Debug)]
pub(super) struct ConnectionCounters {
    pub(super) role: Role,
    pub(super) id: u64,
    pub(super) rail_count: usize,
    pub(super) rails: [RailCells; MAX_RAILS],
    pub(super) staged: Counter,
    /// Messages by the mask of their rails.
    pub(super) masks: [Counter; 1 << MAX_RAILS],
    pub(super) violations: [Counter; Violation::KINDS],
}

impl ConnectionCounters {
    pub(super) fn new(role: Role, id: u64, rail_count: usize) -> Arc<ConnectionCounters> {
        let counters = ConnectionCounters {
            role,
            id,
            rail_count,
            rails: Default::default(),
            staged: Counter::default(),
            masks: Default::default(),
            violations: Default::default(),
        };
        for rail in &counters.rails[..rail_count] {
            rail.is_up.store(1, Relaxed);
        }
        Arc::new(counters)
    }

    pub(super) fn snapshot(&self) -> Counters {
        let rails = self.rails[..self.rail_count].iter().map(|cells| {
            let latencies = cells.latencies.histogram();
            RailCounters {
                bytes: cells.bytes.get(),
                work_requests: cells.work_requests.get(),
                payload_requests: cells.payload_requests.get(),
                completions: cells.completions.get(),
                receives: cells.receives.get(),
                retries: cells.retries.get(),
                replays: cells.replays.get(),
                replayed_bytes: cells.replayed_bytes.get(),
                probes: cells.probes.get(),
                failures: cells.failures.get(),
                returns: cells.returns.get(),
                p50_ns: latencies.quantile(0.5).unwrap_or(0),
                p99_ns: latencies.quantile(0.99).unwrap_or(0),
                rate: cells.rate.load(Relaxed),
                is_up: cells.is_up.load(Relaxed) != 0,
            }
        });
        let masks = core::array::from_fn(|mask| self.masks[mask].get());
        Counters {
            messages: masks.iter().sum(),
            staged: self.staged.get(),
            masks,
            violations: core::array::from_fn(|kind| self.violations[kind].get()),
            rails: rails.collect(),
        }
    }
}

/// What a connection has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Messages completed. A group is one message.
    pub messages: u64,
    /// Messages that went through staging memory.
    pub staged: u64,
    /// Messages by the rails that they used: entry `m` counts the messages with mask `m`. Parts that were sent again do not
    /// count.
    pub masks: [u64; 1 << MAX_RAILS],
    /// Violations of the protocol by the peer, by [`Violation::kind`].
    pub violations: [u64; Violation::KINDS],
    /// Per rail.
    pub rails: Vec<RailCounters>,
}

/// What one rail of a connection has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailCounters {
    /// Payload bytes of work requests that were posted (sender) or arrived (receiver).
    pub bytes: u64,
    /// Work requests posted to send queues, of any kind.
    pub work_requests: u64,
    /// Of these, the ones that carry payload or complete a message: WRITE and WRITE+IMM.
    pub payload_requests: u64,
    /// Completions, of any kind. A part that the device has executed while it was posted counts as one.
    pub completions: u64,
    /// Receiver: completions of receives; one for each part.
    pub receives: u64,
    /// Posts that found a queue full and were tried again.
    pub retries: u64,
    /// Lost parts of this rail that were sent again over others.
    pub replays: u64,
    /// Bytes of these parts.
    pub replayed_bytes: u64,
    /// Empty WRITEs that were posted to find out whether the rail works.
    pub probes: u64,
    /// How often the rail failed.
    pub failures: u64,
    /// How often the rail came back.
    pub returns: u64,
    /// Median time of a part from post to completion (sender), in nanoseconds. On a connection with one rail, of messages that the
    /// device executes while they are posted, only every 16th is measured.
    pub p50_ns: u64,
    /// 99th percentile of this time.
    pub p99_ns: u64,
    /// Average rate of the rail's port in bytes per microsecond, by all connections of the process; 0 before the first measurement.
    pub rate: u64,
    /// Whether the rail is in use.
    pub is_up: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact_to_an_eighth() {
        let latencies = Latencies::default();
        assert_eq!(latencies.histogram().count(), 0);
        for value in 1..=10_000u64 {
            latencies.record(100 * value);
        }
        for (q, exact) in [(0.5, 500_000u64), (0.99, 990_000), (1.0, 1_000_000)] {
            let found = latencies.histogram().quantile(q).unwrap();
            assert!(found.abs_diff(exact) <= exact / 8, "{q}: {found}");
        }
        latencies.record(u64::MAX);
        latencies.record(0);
    }
}
