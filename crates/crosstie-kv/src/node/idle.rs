//! What a daemon does when there is nothing to do.

use std::time::Duration;

use crosstie::WaitStrategy;

/// Passes without anything to do before others are let run; and where others were seen to wait for the core.
const SPINS: u32 = 64;
const CROWDED_SPINS: u32 = 2;
/// Letting others run takes less if there are none.
const CROWDED: Duration = Duration::from_micros(3);
/// A yield that takes so long went to somebody who does not yield.
const TAKEN: Duration = Duration::from_micros(500);
/// Passes after which it naps.
const YIELDS: u32 = 256;
/// The first nap. Each is an eighth longer than the one before, and so at most about a ninth of the time without work.
const FIRST_NAP: Duration = Duration::from_micros(50);
/// The longest nap, and the longest while answers are yet to come.
const LONGEST_NAP: Duration = Duration::from_millis(4);
const LONGEST_SHORT_NAP: Duration = Duration::from_micros(50);

pub(super) struct Idle {
    waiting: WaitStrategy,
    spins: u32,
    passes: u32,
    nap: Duration,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// Look again.
    Spin,
    /// Let others run.
    Yield,
    /// See to what is rarely seen to, then sleep so long, or less if answers are yet to come.
    Nap(Duration),
}

impl Idle {
    pub(super) fn new(waiting: WaitStrategy) -> Idle {
        Idle { waiting, spins: SPINS, passes: 0, nap: FIRST_NAP }
    }

    /// There was something to do.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.passes = 0;
        self.nap = FIRST_NAP;
    }

    /// Others were let run, which took so long. One who keeps the core would get it again at the next yield; a daemon that naps
    /// and wakes gets it sooner.
    #[inline]
    pub(super) fn yielded(&mut self, took: Duration) {
        self.spins = if took > CROWDED { CROWDED_SPINS } else { SPINS };
        if took > TAKEN {
            self.passes = YIELDS;
        }
    }

    /// There was nothing.
    #[inline]
    pub(super) fn next(&mut self) -> Rest {
        if self.waiting == WaitStrategy::Spin {
            return Rest::Spin;
        }
        self.passes += 1;
        match self.passes {
            passes if passes < self.spins && self.waiting == WaitStrategy::Adaptive => Rest::Spin,
            ..YIELDS => Rest::Yield,
            _ => {
                self.passes = YIELDS;
                let nap = self.nap;
                self.nap = (nap * 9 / 8).min(LONGEST_NAP);
                Rest::Nap(nap)
            }
        }
    }
}

/// How long a nap is that may keep answers waiting.
pub(super) fn shortened(nap: Duration) -> Duration {
    nap.min(LONGEST_SHORT_NAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_and_work_ends_them() {
        let mut idle = Idle::new(WaitStrategy::Adaptive);
        assert_eq!(idle.next(), Rest::Spin);
        let naps: Vec<Duration> = std::iter::repeat_with(|| idle.next())
            .take(1000)
            .filter_map(|rest| match rest {
                Rest::Nap(nap) => Some(nap),
                _ => None,
            })
            .collect();
        assert!(naps.is_sorted());
        assert_eq!((naps[0], *naps.last().unwrap()), (FIRST_NAP, LONGEST_NAP));
        idle.reset();
        assert_eq!(idle.next(), Rest::Spin);
    }

    #[test]
    fn where_others_wait_for_the_core_it_spins_less() {
        let mut idle = Idle::new(WaitStrategy::Adaptive);
        let mut spins = |took| {
            idle.yielded(took);
            idle.reset();
            std::iter::repeat_with(|| idle.next()).take_while(|rest| *rest == Rest::Spin).count()
        };
        assert!(spins(Duration::from_micros(50)) < 5);
        assert!(spins(Duration::from_nanos(300)) > 50);
    }

    #[test]
    fn who_yields_to_one_that_does_not_naps() {
        let mut idle = Idle::new(WaitStrategy::Park);
        assert_eq!(idle.next(), Rest::Yield);
        idle.yielded(TAKEN);
        assert_eq!(idle.next(), Rest::Yield);
        idle.yielded(2 * TAKEN);
        assert_eq!(idle.next(), Rest::Nap(FIRST_NAP));
        idle.reset();
        assert_eq!(idle.next(), Rest::Yield);
    }

    #[test]
    fn who_shall_spin_never_sleeps() {
        let mut idle = Idle::new(WaitStrategy::Spin);
        assert!(std::iter::repeat_with(|| idle.next()).take(10_000).all(|rest| rest == Rest::Spin));
    }
}
