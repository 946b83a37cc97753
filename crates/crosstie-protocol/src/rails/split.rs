//! How many bytes of a message each rail gets.

use super::MAX_RAILS;

/// Splits fall on multiples of this many bytes.
pub const GRANULARITY: u32 = 128;

/// What is known about a rail when a message is split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RailLoad {
    /// Bytes per microsecond; 0 if the rail must not be used.
    pub rate: u64,
    /// Bytes that are under way on it.
    pub queued: u64,
}

/// Splits `len` bytes so that all rails finish at the same time. A rail that is so busy that it would get less than `min_part`
/// bytes gets none. All parts but that of the last rail in use are multiples of [`GRANULARITY`]. All bytes go to some rail if at
/// least one rail has a rate; otherwise all lengths are zero.
///
/// The time until rail `r` has sent what it has and its part is `(queued + part) / rate`. With `T` for the common time,
/// `part = T * rate - queued`, and the parts together are `len`: `T = (len + all queued) / (all rates)`. A rail for which the
/// part is too small is taken out, and the rest is computed again.
///
/// ```
/// use crosstie_protocol::rails::{RailLoad, split};
/// let idle = |rate| RailLoad { rate, queued: 0 };
/// assert_eq!(split(4 << 20, &[idle(3000), idle(1000), idle(0), idle(0)], 4096), [3 << 20, 1 << 20, 0, 0]);
/// ```
#[inline]
pub fn split(len: u32, rails: &[RailLoad; MAX_RAILS], min_part: u32) -> [u32; MAX_RAILS] {
    let mut used = *rails;
    // Limits the numbers, so that no product overflows.
    for rail in &mut used {
        rail.rate = rail.rate.min(1 << 24);
        rail.queued = rail.queued.min(1 << 34);
    }
    loop {
        let active = used.iter().filter(|rail| rail.rate > 0);
        let (count, rate, queued) = active.fold((0, 0u64, 0u64), |(count, rate, queued), rail| {
            (count + 1, rate + rail.rate, queued + rail.queued)
        });
        if count <= 1 {
            let mut lens = [0; MAX_RAILS];
            if let Some(rail) = used.iter().position(|rail| rail.rate > 0) {
                lens[rail] = len;
            }
            return lens;
        }
        let total = u64::from(len) + queued;
        let mut lens = [0u32; MAX_RAILS];
        let mut worst: Option<(usize, i64)> = None;
        let (mut sum, mut last) = (0u64, 0);
        for (at, rail) in used.iter().enumerate().filter(|(_, rail)| rail.rate > 0) {
            let part = (total * rail.rate / rate) as i64 - rail.queued as i64;
            if part < i64::from(min_part) && worst.is_none_or(|(_, least)| part < least) {
                worst = Some((at, part));
            }
            let part = part.clamp(0, i64::from(len)) as u32 / GRANULARITY * GRANULARITY;
            lens[at] = part;
            sum += u64::from(part);
            last = at;
        }
        match worst {
            Some((at, _)) => used[at].rate = 0,
            None => {
                lens[last] += (u64::from(len) - sum) as u32;
                return lens;
            }
        }
    }
}

/// Splits `len` bytes in proportion to `weights`, on multiples of [`GRANULARITY`]. A weight of zero gives no bytes.
///
/// ```
/// use crosstie_protocol::rails::fixed_split;
/// assert_eq!(fixed_split(1000, &[1, 0, 0, 0]), [1000, 0, 0, 0]);
/// assert_eq!(fixed_split(1000, &[1, 1, 0, 0]), [384, 616, 0, 0]);
/// ```
#[inline]
pub fn fixed_split(len: u32, weights: &[u32; MAX_RAILS]) -> [u32; MAX_RAILS] {
    let mut lens = [0; MAX_RAILS];
    let all: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let Some(last) = weights.iter().rposition(|weight| *weight > 0) else { return lens };
    let mut left = len;
    for (len_here, weight) in lens.iter_mut().zip(weights).take(last) {
        let part = (u64::from(len) * u64::from(*weight) / all) as u32 / GRANULARITY * GRANULARITY;
        *len_here = part.min(left);
        left -= *len_here;
    }
    lens[last] = left;
    lens
}

/// The average rate of a rail, from completions.
///
/// A completion of `bytes` bytes that took the rail `nanoseconds` counts with its bytes, so that large parts matter more than
/// small ones. Older completions fade: after [`Rates::WINDOW`] bytes, their weight is halved.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    bytes: f32,
    nanoseconds: f32,
}

impl Rates {
    /// Bytes after which a measurement counts half.
    pub const WINDOW: u64 = 16 << 20;
    /// Parts shorter than this are dominated by latency, and are not counted.
    pub const MIN_PART: u64 = 16 << 10;

    /// Counts a part.
    #[inline]
    pub fn record(&mut self, bytes: u64, nanoseconds: u64) {
        if bytes < Rates::MIN_PART {
            return;
        }
        if self.bytes >= Rates::WINDOW as f32 {
            self.bytes /= 2.0;
            self.nanoseconds /= 2.0;
        }
        self.bytes += bytes as f32;
        self.nanoseconds += nanoseconds.clamp(1, 1 << 40) as f32;
    }

    /// Bytes per microsecond; `None` before the first measurement.
    #[inline]
    pub fn rate(&self) -> Option<u64> {
        (self.bytes > 0.0).then(|| ((self.bytes * 1000.0 / self.nanoseconds) as u64).max(1))
    }

    /// All measurements in one word, so that threads can share them without a lock.
    #[inline]
    pub fn to_bits(&self) -> u64 {
        u64::from(self.bytes.to_bits()) << 32 | u64::from(self.nanoseconds.to_bits())
    }

    /// What [`Rates::to_bits`] returned.
    #[inline]
    pub fn from_bits(bits: u64) -> Rates {
        Rates { bytes: f32::from_bits((bits >> 32) as u32), nanoseconds: f32::from_bits(bits as u32) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check_parts(len: u32, lens: &[u32; MAX_RAILS], usable: [bool; MAX_RAILS]) {
        let last = lens.iter().rposition(|len| *len > 0).unwrap_or(0);
        for (at, part) in lens.iter().enumerate() {
            assert!(usable[at] || *part == 0, "rail {at} has bytes: {lens:?}");
            assert!(at == last || part.is_multiple_of(GRANULARITY), "{lens:?}");
        }
        let sum: u64 = lens.iter().map(|part| u64::from(*part)).sum();
        assert_eq!(sum, if usable.contains(&true) { len.into() } else { 0 });
    }

    proptest! {
        #[test]
        fn every_byte_goes_to_one_usable_rail(
            len in prop_oneof![0..1000u32, 0..=1u32 << 31],
            rates in prop::array::uniform4(prop_oneof![Just(0u64), 1..100_000u64, any::<u64>()]),
            queued in prop::array::uniform4(prop_oneof![Just(0u64), 0..1u64 << 30, any::<u64>()]),
            weights in prop::array::uniform4(prop_oneof![Just(0u32), 0..300u32, any::<u32>()]),
            min_part in 0..1u32 << 20,
        ) {
            let loads = core::array::from_fn(|at| RailLoad { rate: rates[at], queued: queued[at] });
            check_parts(len, &split(len, &loads, min_part), rates.map(|rate| rate > 0));
            check_parts(len, &fixed_split(len, &weights), weights.map(|weight| weight > 0));
        }

        #[test]
        fn rails_with_parts_finish_at_the_same_time(
            len in 8u32 << 20..64 << 20,
            rates in prop::array::uniform4(500u64..20_000),
            queued in prop::array::uniform4(0u64..4 << 20),
        ) {
            let loads: [RailLoad; MAX_RAILS] =
                core::array::from_fn(|at| RailLoad { rate: rates[at], queued: queued[at] });
            let lens = split(len, &loads, 4096);
            let times = lens.iter().zip(loads).filter(|(len, _)| **len > 0);
            let times: std::vec::Vec<f64> =
                times.map(|(len, load)| (load.queued + u64::from(*len)) as f64 / load.rate as f64).collect();
            let (least, most) = times.iter().fold((f64::MAX, 0f64), |(a, b), t| (a.min(*t), b.max(*t)));
            prop_assert!(most - least <= 1.0 + most / 100.0, "{lens:?} {times:?}");
        }
    }

    #[test]
    fn a_short_message_takes_the_rail_that_is_done_first() {
        let load = |rate, queued| RailLoad { rate, queued };
        let none = load(0, 0);
        assert_eq!(split(4096, &[load(100, 1 << 20), load(100, 0), none, none], 1 << 16), [0, 4096, 0, 0]);
        assert_eq!(split(4096, &[load(100, 0), load(300, 0), none, none], 1 << 16), [0, 4096, 0, 0]);
    }

    #[test]
    fn rates_follow_a_change_within_a_few_windows() {
        let mut rates = Rates::default();
        assert_eq!(rates.rate(), None);
        rates.record(1 << 20, 1 << 20);
        assert_eq!(rates.rate(), Some(1000));
        assert_eq!(Rates::from_bits(rates.to_bits()).rate(), Some(1000));
        assert_eq!(Rates::from_bits(0).rate(), None);
        for _ in 0..256 {
            rates.record(1 << 20, 4 << 20);
        }
        assert!((245..260).contains(&rates.rate().unwrap()), "{:?}", rates.rate());
        rates.record(100, 1 << 40);
        assert!(rates.rate().unwrap() > 200, "short parts do not count");
    }
}
