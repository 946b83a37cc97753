//! What a daemon does when there is nothing to do: spin, then yield, then sleep until somebody wakes it.
//!
//! Clients, other daemons, other nodes and the control plane wake a daemon when they publish something for it. So a sleep may be long.
//! Only space in a full queue comes without a notification, so a daemon with a backlog sleeps for a short time.

use std::time::Duration;

use crosstie::WaitStrategy;

/// Idle passes before the daemon yields.
const SPINS: u32 = 64;
/// The same, where other threads were seen to wait for the core. They soon give it back.
const CROWDED_SPINS: u32 = 2;
/// The same, where another thread was seen to compute on the core. It keeps the core for a whole time slice, so the daemon gives it up less
/// readily; but what it waits for may need this core, too.
const TAKEN_SPINS: u32 = 32;
/// A yield that takes longer than this ran another thread.
pub(crate) const CROWDED: Duration = Duration::from_micros(3);
/// Idle passes before the daemon sleeps.
const YIELDS: u32 = 256;
/// Idle passes before the daemon sleeps, with [`WaitStrategy::Park`].
const PARK_PASSES: u32 = 4;
/// The longest sleep. After it the daemon checks its connections and publishes its counters.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// The first sleep with a backlog. Each is an eighth longer than the one before, and so at most about a ninth of the time without
/// progress.
const FIRST_BACKLOG_SLEEP: Duration = Duration::from_micros(50);
/// The longest sleep with a backlog.
const LONGEST_BACKLOG_SLEEP: Duration = Duration::from_millis(4);

/// Counts idle passes, and says what to do next.
pub(super) struct IdleBackoff {
    wait_strategy: WaitStrategy,
    spins: u32,
    passes: u32,
    /// The next sleep with a backlog.
    backlog_sleep: Duration,
}

/// What to do in an idle pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleAction {
    /// Check again at once.
    Spin,
    /// Let other threads run.
    Yield,
    /// Check what is rarely checked, then sleep.
    Sleep,
}

impl IdleBackoff {
    pub(super) fn new(wait_strategy: WaitStrategy) -> IdleBackoff {
        IdleBackoff { wait_strategy, spins: SPINS, passes: 0, backlog_sleep: FIRST_BACKLOG_SLEEP }
    }

    /// Records a pass with something to do.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.passes = 0;
        self.backlog_sleep = FIRST_BACKLOG_SLEEP;
    }

    /// Records that the daemon did not sleep, because something was there. If the next passes cannot handle it, they yield: it
    /// waits for another thread.
    pub(super) fn record_ready(&mut self) {
        self.passes = self.spins;
    }

    /// The length of the next sleep.
    pub(super) fn sleep_time(&mut self, has_backlog: bool) -> Duration {
        if !has_backlog {
            return LONGEST_SLEEP;
        }
        let sleep = self.backlog_sleep;
        self.backlog_sleep = (sleep * 9 / 8).min(LONGEST_BACKLOG_SLEEP);
        sleep
    }

    /// Records how long a yield took. `None`: another thread computes on this core, so that a yield would take a whole time slice, see
    /// [`crosstie::yield_core`]. Then the daemon sleeps instead: it gets the core when somebody wakes it.
    #[inline]
    pub(super) fn record_yield(&mut self, took: Option<Duration>) {
        self.spins = match took {
            None => TAKEN_SPINS,
            Some(took) if took > CROWDED => CROWDED_SPINS,
            Some(_) => SPINS,
        };
        if took.is_none() {
            self.passes = YIELDS;
        }
    }

    /// Records an idle pass. Returns what to do.
    #[inline]
    pub(super) fn next_action(&mut self) -> IdleAction {
        self.passes += 1;
        match self.wait_strategy {
            WaitStrategy::Spin => IdleAction::Spin,
            WaitStrategy::Park if self.passes < PARK_PASSES => IdleAction::Spin,
            WaitStrategy::Adaptive if self.passes < self.spins => IdleAction::Spin,
            WaitStrategy::Adaptive if self.passes < YIELDS => IdleAction::Yield,
            WaitStrategy::Adaptive | WaitStrategy::Park => {
                self.passes = YIELDS;
                IdleAction::Sleep
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spins_then_yields_then_sleeps_until_there_is_work() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        let mut actions: Vec<IdleAction> = std::iter::repeat_with(|| idle.next_action()).take(1000).collect();
        actions.dedup();
        assert_eq!(actions, [IdleAction::Spin, IdleAction::Yield, IdleAction::Sleep]);
        idle.reset();
        assert_eq!(idle.next_action(), IdleAction::Spin);
    }

    #[test]
    fn only_sleeps_with_a_backlog_are_short_and_grow() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        assert_eq!(idle.sleep_time(false), LONGEST_SLEEP);
        let sleeps: Vec<Duration> = std::iter::repeat_with(|| idle.sleep_time(true)).take(100).collect();
        assert!(sleeps.is_sorted());
        assert_eq!((sleeps[0], *sleeps.last().unwrap()), (FIRST_BACKLOG_SLEEP, LONGEST_BACKLOG_SLEEP));
        idle.reset();
        assert_eq!(idle.sleep_time(true), FIRST_BACKLOG_SLEEP);
    }

    #[test]
    fn spins_less_where_others_wait_for_the_core() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        let mut spins = |took| {
            idle.record_yield(Some(took));
            idle.reset();
            std::iter::repeat_with(|| idle.next_action())
                .take_while(|action| *action == IdleAction::Spin)
                .count()
        };
        assert!(spins(Duration::from_micros(50)) < 5);
        assert!(spins(Duration::from_nanos(300)) > 50);
    }

    #[test]
    fn sleeps_instead_of_yielding_where_another_thread_computes() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        for _ in 0..3 {
            while idle.next_action() == IdleAction::Spin {}
            idle.record_yield(None);
            assert_eq!(idle.next_action(), IdleAction::Sleep);
            assert_eq!(idle.next_action(), IdleAction::Sleep);
            idle.reset();
            let spins = (0..SPINS).take_while(|_| idle.next_action() == IdleAction::Spin).count() as u32;
            assert!(spins > CROWDED_SPINS && spins < SPINS, "{spins}");
        }
        idle.reset();
        while idle.next_action() == IdleAction::Spin {}
        idle.record_yield(Some(2 * CROWDED));
        assert_eq!(idle.next_action(), IdleAction::Yield, "the core is free again");
    }

    #[test]
    fn park_strategy_sleeps_almost_at_once() {
        let mut idle = IdleBackoff::new(WaitStrategy::Park);
        let spins =
            std::iter::repeat_with(|| idle.next_action()).take_while(|action| *action != IdleAction::Sleep);
        assert!(spins.count() < 10);
    }

    #[test]
    fn spin_strategy_never_sleeps() {
        let mut idle = IdleBackoff::new(WaitStrategy::Spin);
        let mut actions = std::iter::repeat_with(|| idle.next_action()).take(10_000);
        assert!(actions.all(|action| action == IdleAction::Spin));
    }
}
