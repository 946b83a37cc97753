//! A log-linear histogram: exact below 64, then 64 buckets to every doubling.
//!
//! ```text
//! value     0 1 2 ... 63 | 64 65 ... 127 | 128 130 ... 254 | 256 260 ... 508 | ... 2^63 ...
//! bucket    0 1 2 ... 63 | 64 65 ... 127 | 128 129 ... 191 | 192 193 ... 255 | ...
//! width     1            | 1             | 2               | 4               | ...
//! ```
//!
//! A bucket is at most 1/64 of its lower end wide, and what it reports is its middle, so a reported value is less than
//! 0.8 % away from the one recorded.

/// Buckets per doubling, as a power of two.
const STEP_BITS: u32 = 6;
const STEPS: usize = 1 << STEP_BITS;
/// One row of buckets for what is below `STEPS`, and one for every doubling from there to the end of 64 bits.
const BUCKETS: usize = STEPS * (64 - STEP_BITS as usize + 1);

/// Counts values of 64 bits in 3776 buckets (30 KiB), whatever their range. Recording allocates nothing.
///
/// ```
/// use crosstie::telemetry::Histogram;
/// let mut latencies = Histogram::new();
/// for ns in 1..=1000 {
///     latencies.record(ns);
/// }
/// assert_eq!(latencies.count(), 1000);
/// let p50 = latencies.quantile(0.5).unwrap();
/// assert!((496..=504).contains(&p50), "{p50}");
/// assert_eq!(latencies.quantile(1.0), Some(1000));
/// ```
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Box<[u64; BUCKETS]>,
    count: u64,
    min: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: Box::new([0; BUCKETS]), count: 0, min: u64::MAX, max: 0 }
    }
}

impl Histogram {
    /// An empty one. This allocates; nothing after it does.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    /// Counts one value `times` times.
    #[inline]
    pub fn record_n(&mut self, value: u64, times: u64) {
        if times == 0 {
            return;
        }
        self.buckets[bucket(value)] += times;
        self.count += times;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The least value, exactly. `None` when there was none.
    pub fn min(&self) -> Option<u64> {
        (self.count > 0).then_some(self.min)
    }

    /// The greatest value, exactly. `None` when there was none.
    pub fn max(&self) -> Option<u64> {
        (self.count > 0).then_some(self.max)
    }

    /// The least value that at least the share `q` (0 to 1) of all values does not exceed, to within 0.8 %. `None` when
    /// there was no value.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        let rank = ((q.clamp(0.0, 1.0) * self.count as f64).ceil() as u64).clamp(1, self.count);
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(middle(found).clamp(self.min, self.max))
    }

    /// Adds the values that another one counted.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *mine += theirs;
        }
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// What was counted, to print or to send: ascending values to within 0.8 %, and how often each came.
    /// [`Histogram::record_n`] of all of them makes one with the same quantiles.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let found = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        found.map(|(bucket, count)| (middle(bucket).clamp(self.min, self.max), *count))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.min, self.max) = (0, u64::MAX, 0);
    }
}

#[inline]
fn bucket(value: u64) -> usize {
    // Below STEPS the value is its own bucket: `| STEPS` makes its doubling the first, whose width is 1.
    let doubling = (value | STEPS as u64).ilog2() - STEP_BITS;
    // At least 2^STEP_BITS, below twice that, where the value is not below STEPS.
    let step = (value >> doubling) as usize;
    (doubling as usize) * STEPS + step
}

/// The middle of a bucket, rounded down.
fn middle(bucket: usize) -> u64 {
    if bucket < 2 * STEPS {
        return bucket as u64;
    }
    let doubling = (bucket / STEPS - 1) as u32;
    let low = ((bucket % STEPS + STEPS) as u64) << doubling;
    low + ((1 << doubling) - 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends of buckets, their neighbours, and the ends of the range.
    fn telling_values() -> impl Iterator<Item = u64> {
        let powers = (0..64).flat_map(|bit| {
            let power = 1u64 << bit;
            [power - 1, power, power + 1, power + power / 3, power | (power - 1)]
        });
        (0..300).chain(powers).chain([u64::MAX - 1, u64::MAX])
    }

    #[test]
    fn a_bucket_reports_what_fell_into_it_to_within_a_percent() {
        for value in telling_values() {
            let reported = middle(bucket(value));
            assert_eq!(bucket(reported), bucket(value), "{value} reported as {reported}");
            assert!(
                reported.abs_diff(value) as f64 <= value as f64 / 128.0,
                "{value} reported as {reported}"
            );
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn buckets_are_in_the_order_of_their_values() {
        let mut values: Vec<u64> = telling_values().collect();
        values.sort_unstable();
        assert!(values.windows(2).all(|pair| bucket(pair[0]) <= bucket(pair[1])));
        assert!((1..BUCKETS).all(|next| middle(next - 1) < middle(next)));
    }

    #[test]
    fn quantiles_agree_with_sorting() {
        // A fixed sequence over many magnitudes.
        let mut state = 1u64;
        let mut values: Vec<u64> = (0..10_000)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                state >> (20 + state % 40)
            })
            .collect();
        let mut histogram = Histogram::new();
        values.iter().for_each(|value| histogram.record(*value));
        values.sort_unstable();
        for q in [0.0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0] {
            let rank = ((q * values.len() as f64).ceil() as usize).max(1);
            let (exact, reported) = (values[rank - 1], histogram.quantile(q).unwrap());
            assert!(
                reported.abs_diff(exact) as f64 <= exact as f64 / 128.0,
                "{q}: {exact} reported as {reported}"
            );
        }
    }

    #[test]
    fn merging_is_recording_together() {
        let (mut left, mut right, mut both) = (Histogram::new(), Histogram::new(), Histogram::new());
        for value in telling_values() {
            if value % 2 == 0 {
                left.record(value)
            } else {
                right.record(value)
            }
            both.record(value);
        }
        left.merge(&right);
        assert_eq!((left.count(), left.min(), left.max()), (both.count(), both.min(), both.max()));
        assert_eq!(left.buckets, both.buckets);
        let mut again = Histogram::new();
        both.counts().for_each(|(value, times)| again.record_n(value, times));
        assert_eq!(again.buckets, both.buckets);
        assert_eq!(again.quantile(0.99), both.quantile(0.99));
        left.clear();
        assert_eq!((left.count(), left.min(), left.max(), left.quantile(0.5)), (0, None, None, None));
    }
}
