//! How one operation is divided over several queue pairs.

use core::ops::Range;

/// Parts begin at multiples of this many bytes: no two of them share a cache line of an aligned buffer.
pub const ALIGNMENT: u64 = 128;

/// The division of `len` bytes into parts, one for each queue pair that carries any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    len: u64,
    part: u64,
    count: u8,
}

impl Split {
    /// At most `qps` parts of at least `min_part` bytes each. There is always one part, also for zero bytes.
    pub const fn new(len: u64, qps: u8, min_part: u64) -> Split {
        if qps <= 1 {
            return Split { len, part: len, count: 1 };
        }
        let min_part = if min_part == 0 { 1 } else { min_part };
        let wanted = len / min_part;
        let count = if wanted >= qps as u64 { qps } else { wanted as u8 };
        if count <= 1 {
            return Split { len, part: len, count: 1 };
        }
        let part = len.div_ceil(count as u64).div_ceil(ALIGNMENT) * ALIGNMENT;
        Split { len, part, count: len.div_ceil(part) as u8 }
    }

    /// Number of parts.
    pub const fn count(&self) -> u8 {
        self.count
    }

    /// The bytes of a part.
    pub const fn part(&self, index: u8) -> Range<u64> {
        let start = index as u64 * self.part;
        let end = start + self.part;
        start..if end < self.len { end } else { self.len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_all_bytes_once(len in prop_oneof![0u64..100_000, any::<u32>().prop_map(u64::from)], qps in 1u8..9, min_part in 0u64..70_000) {
            let split = Split::new(len, qps, min_part);
            prop_assert!((1..=qps).contains(&split.count()));
            let mut next = 0;
            for index in 0..split.count() {
                let part = split.part(index);
                prop_assert_eq!(part.start, next);
                prop_assert!(index == 0 || (part.start.is_multiple_of(ALIGNMENT) && part.end > part.start), "{:?}", part);
                next = part.end;
            }
            prop_assert_eq!(next, len);
        }
    }
}
