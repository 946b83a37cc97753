//! What a program outside knows about the rails, through shared memory.

use crosstie_protocol::rails::MAX_RAILS;

/// A factor for the rate of each rail, in percent: 100 changes nothing, 0 excludes the rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Per rail.
    pub percent: [u8; MAX_RAILS],
}

impl Hint {
    /// Changes nothing.
    pub const NEUTRAL: Hint = Hint { percent: [100; MAX_RAILS] };

    /// The rate of a rail with this hint.
    #[inline]
    pub(super) fn apply(&self, rail: usize, rate: u64) -> u64 {
        let percent = u64::from(self.percent[rail]);
        if percent == 0 { 0 } else { (rate * percent / 100).max(1) }
    }
}

/// Reads the hint.
#[derive(Debug, Default)]
pub(super) struct HintReader {}

impl HintReader {
    #[inline]
    pub(super) fn read(&self) -> Hint {
        Hint::NEUTRAL
    }
}
