//! A log-linear histogram: exact below 64, then 64 buckets for each power of two.
//!
//! ```text
//! value     0 1 2 ... 63 | 64 65 ... 127 | 128 130 ... 254 | 256 260 ... 508 | ... 2^63 ...
//! bucket    0 1 2 ... 63 | 64 65 ... 127 | 128 129 ... 191 | 192 193 ... 255 | ...
//! width     1            | 1             | 2               | 4               | ...
//! ```
//!
//! The width of a bucket is at most 1/64 of its lower end, and a bucket reports its middle. So a reported value differs by
//! less than 0.8 % from the recorded one.

/// The number of buckets per power of two, as a binary logarithm.
const STEP_BITS: u32 = 6;
const STEPS: usize = 1 << STEP_BITS;
/// One row of buckets for values below `STEPS`, and one for each power of two from there up to 64 bits.
const BUCKETS: usize = STEPS * (64 - STEP_BITS as usize + 1);

/// Counts 64-bit values of any range in 3776 buckets (30 KiB). Recording allocates nothing.
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
    /// Creates an empty histogram. This allocates; no other method does.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_n(value, 1);
    }

    /// Records one value `times` times.
    #[inline]
    pub fn record_n(&mut self, value: u64, times: u64) {
        if times == 0 {
            return;
        }
        self.buckets[bucket_of(value)] += times;
        self.count += times;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// The number of recorded values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The exact smallest value; `None` when the histogram is empty.
    pub fn min(&self) -> Option<u64> {
        (self.count > 0).then_some(self.min)
    }

    /// The exact largest value; `None` when the histogram is empty.
    pub fn max(&self) -> Option<u64> {
        (self.count > 0).then_some(self.max)
    }

    /// The quantile `q` (0 to 1), to within 0.8 %: the smallest value that at least the fraction `q` of all values does not
    /// exceed. `None` when the histogram is empty.
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
        Some(bucket_middle(found).clamp(self.min, self.max))
    }

    /// Adds the values of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *mine += theirs;
        }
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Returns the values in ascending order, to within 0.8 %, each with its count, to print or to send them. Recording
    /// all of them with [`Histogram::record_n`] gives a histogram with the same quantiles.
    pub fn counts(&self) -> impl Iterator<Item = (u64, u64)> {
        let found = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        found.map(|(bucket, count)| (bucket_middle(bucket).clamp(self.min, self.max), *count))
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        (self.count, self.min, self.max) = (0, u64::MAX, 0);
    }
}

#[inline]
fn bucket_of(value: u64) -> usize {
    // A value below STEPS is its own bucket: `| STEPS` puts it into the first row, whose buckets have width 1.
    let shift = (value | STEPS as u64).ilog2() - STEP_BITS;
    // For a value of at least STEPS, this is at least 2^STEP_BITS and less than twice that.
    let step = (value >> shift) as usize;
    (shift as usize) * STEPS + step
}

/// The value in the middle of a bucket, rounded down.
fn bucket_middle(bucket: usize) -> u64 {
    if bucket < 2 * STEPS {
        return bucket as u64;
    }
    let shift = (bucket / STEPS - 1) as u32;
    let low = ((bucket % STEPS + STEPS) as u64) << shift;
    low + ((1 << shift) - 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ends of buckets, the values beside them, and the ends of the range.
    fn boundary_values() -> impl Iterator<Item = u64> {
        let powers = (0..64).flat_map(|bit| {
            let power = 1u64 << bit;
            [power - 1, power, power + 1, power + power / 3, power | (power - 1)]
        });
        (0..300).chain(powers).chain([u64::MAX - 1, u64::MAX])
    }

    #[test]
    fn bucket_reports_its_values_within_one_percent() {
        for value in boundary_values() {
            let reported = bucket_middle(bucket_of(value));
            assert_eq!(bucket_of(reported), bucket_of(value), "{value} reported as {reported}");
            assert!(
                reported.abs_diff(value) as f64 <= value as f64 / 128.0,
                "{value} reported as {reported}"
            );
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn buckets_are_ordered_by_value() {
        let mut values: Vec<u64> = boundary_values().collect();
        values.sort_unstable();
        assert!(values.windows(2).all(|pair| bucket_of(pair[0]) <= bucket_of(pair[1])));
        assert!((1..BUCKETS).all(|next| bucket_middle(next - 1) < bucket_middle(next)));
    }

    #[test]
    fn quantiles_match_those_of_the_sorted_values() {
        // A fixed pseudo-random sequence over many orders of magnitude.
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
    fn merged_histogram_equals_recording_all_values_in_one() {
        let (mut left, mut right, mut both) = (Histogram::new(), Histogram::new(), Histogram::new());
        for value in boundary_values() {
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
