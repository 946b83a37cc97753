//! What a daemon does when there is nothing to do: spin, then yield, then sleep.

use std::time::Duration;

use crosstie::WaitStrategy;

/// Idle passes before the daemon yields.
const SPINS: u32 = 64;
/// The same, where other threads were seen to wait for the core.
const CROWDED_SPINS: u32 = 2;
/// A yield that takes longer than this ran another thread.
const CROWDED: Duration = Duration::from_micros(3);
/// A yield that takes longer than this ran a thread that does not yield itself.
const CORE_TAKEN: Duration = Duration::from_micros(500);
/// Idle passes before the daemon sleeps.
const YIELDS: u32 = 256;
/// The first sleep. Each is an eighth longer than the one before, and so at most about a ninth of the time without work.
const FIRST_SLEEP: Duration = Duration::from_micros(50);
/// The longest sleep.
const LONGEST_SLEEP: Duration = Duration::from_millis(4);
/// The longest sleep while responses are outstanding.
const LONGEST_SHORT_SLEEP: Duration = Duration::from_micros(50);

/// Counts idle passes, and says what to do next.
pub(super) struct IdleBackoff {
    wait_strategy: WaitStrategy,
    spins: u32,
    passes: u32,
    sleep: Duration,
}

/// What to do in an idle pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleAction {
    /// Check again at once.
    Spin,
    /// Let other threads run.
    Yield,
    /// Check what is rarely checked, then sleep for this time, or less if responses are outstanding.
    Sleep(Duration),
}

impl IdleBackoff {
    pub(super) fn new(wait_strategy: WaitStrategy) -> IdleBackoff {
        IdleBackoff { wait_strategy, spins: SPINS, passes: 0, sleep: FIRST_SLEEP }
    }

    /// Records a pass with something to do.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.passes = 0;
        self.sleep = FIRST_SLEEP;
    }

    /// Records how long a yield took. After a yield longer than [`CORE_TAKEN`] the next idle pass sleeps: another thread is running
    /// without yielding and would get the core again at the next yield. The scheduler gives a daemon that sleeps and wakes the
    /// core sooner.
    #[inline]
    pub(super) fn record_yield(&mut self, took: Duration) {
        self.spins = if took > CROWDED { CROWDED_SPINS } else { SPINS };
        if took > CORE_TAKEN {
            self.passes = YIELDS;
        }
    }

    /// Records an idle pass. Returns what to do.
    #[inline]
    pub(super) fn next_action(&mut self) -> IdleAction {
        if self.wait_strategy == WaitStrategy::Spin {
            return IdleAction::Spin;
        }
        self.passes += 1;
        match self.passes {
            passes if passes < self.spins && self.wait_strategy == WaitStrategy::Adaptive => IdleAction::Spin,
            ..YIELDS => IdleAction::Yield,
            _ => {
                self.passes = YIELDS;
                let sleep = self.sleep;
                self.sleep = (sleep * 9 / 8).min(LONGEST_SLEEP);
                IdleAction::Sleep(sleep)
            }
        }
    }
}

/// The length of a sleep while responses are outstanding.
pub(super) fn shorten_sleep(sleep: Duration) -> Duration {
    sleep.min(LONGEST_SHORT_SLEEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_grow_until_there_is_work() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        assert_eq!(idle.next_action(), IdleAction::Spin);
        let sleeps: Vec<Duration> = std::iter::repeat_with(|| idle.next_action())
            .take(1000)
            .filter_map(|action| match action {
                IdleAction::Sleep(sleep) => Some(sleep),
                _ => None,
            })
            .collect();
        assert!(sleeps.is_sorted());
        assert_eq!((sleeps[0], *sleeps.last().unwrap()), (FIRST_SLEEP, LONGEST_SLEEP));
        idle.reset();
        assert_eq!(idle.next_action(), IdleAction::Spin);
    }

    #[test]
    fn spins_less_where_others_wait_for_the_core() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        let mut spins = |took| {
            idle.record_yield(took);
            idle.reset();
            std::iter::repeat_with(|| idle.next_action())
                .take_while(|action| *action == IdleAction::Spin)
                .count()
        };
        assert!(spins(Duration::from_micros(50)) < 5);
        assert!(spins(Duration::from_nanos(300)) > 50);
    }

    #[test]
    fn sleeps_after_a_yield_to_a_thread_that_does_not_yield() {
        let mut idle = IdleBackoff::new(WaitStrategy::Park);
        assert_eq!(idle.next_action(), IdleAction::Yield);
        idle.record_yield(CORE_TAKEN);
        assert_eq!(idle.next_action(), IdleAction::Yield);
        idle.record_yield(2 * CORE_TAKEN);
        assert_eq!(idle.next_action(), IdleAction::Sleep(FIRST_SLEEP));
        idle.reset();
        assert_eq!(idle.next_action(), IdleAction::Yield);
    }

    #[test]
    fn spin_strategy_never_sleeps() {
        let mut idle = IdleBackoff::new(WaitStrategy::Spin);
        let mut actions = std::iter::repeat_with(|| idle.next_action()).take(10_000);
        assert!(actions.all(|action| action == IdleAction::Spin));
    }
}
