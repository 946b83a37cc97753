//! What a daemon does when there is nothing to do: spin, then yield, then sleep until somebody wakes it.
//!
//! Clients, other daemons, other nodes and the control plane wake a daemon when they publish something for it. So a sleep may be long.
//! Only space in a full queue comes without a notification, so a daemon with a backlog sleeps for a short time.

use std::time::Duration;

use crosstie::WaitStrategy;

/// Idle passes before the daemon yields.
const SPINS: u32 = 64;
/// The same, where other threads were seen to wait for the core.
const CROWDED_SPINS: u32 = 2;
/// A yield that takes longer than this ran another thread.
pub(crate) const CROWDED: Duration = Duration::from_micros(3);
/// Two yields in a row that take longer than this ran a thread that does not yield itself. A single one may be a virtual machine that did
/// not run, or a process that was stopped.
const CORE_TAKEN: Duration = Duration::from_micros(500);
/// Idle periods without a yield, after yields ran such a thread.
const PERIODS_WITHOUT_YIELD: u32 = 256;
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
    /// Idle periods, the current one included, in which the daemon does not yield.
    periods_without_yield: u32,
    /// Whether the last yield took longer than [`CORE_TAKEN`].
    was_core_taken: bool,
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
        IdleBackoff {
            wait_strategy,
            spins: SPINS,
            passes: 0,
            periods_without_yield: 0,
            was_core_taken: false,
            backlog_sleep: FIRST_BACKLOG_SLEEP,
        }
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

    /// Records how long a yield took. After two yields longer than [`CORE_TAKEN`] the daemon sleeps instead, for the next
    /// [`PERIODS_WITHOUT_YIELD`] times that it is idle: another thread is running without yielding, and each yield would give it the
    /// core for a whole time slice, some milliseconds. A daemon that sleeps gets the core as soon as somebody wakes it. Then one more such
    /// yield is enough.
    #[inline]
    pub(super) fn record_yield(&mut self, took: Duration) {
        self.spins = if took > CROWDED { CROWDED_SPINS } else { SPINS };
        let is_core_taken = took > CORE_TAKEN;
        if is_core_taken && self.was_core_taken {
            self.periods_without_yield = PERIODS_WITHOUT_YIELD;
        }
        self.was_core_taken = is_core_taken;
    }

    /// Records an idle pass. Returns what to do.
    #[inline]
    pub(super) fn next_action(&mut self) -> IdleAction {
        self.passes += 1;
        if self.passes == 1 {
            self.periods_without_yield = self.periods_without_yield.saturating_sub(1);
        }
        match self.wait_strategy {
            WaitStrategy::Spin => IdleAction::Spin,
            WaitStrategy::Park if self.passes < PARK_PASSES => IdleAction::Spin,
            WaitStrategy::Adaptive if self.passes < self.spins => IdleAction::Spin,
            WaitStrategy::Adaptive if self.passes < YIELDS && self.periods_without_yield == 0 => {
                IdleAction::Yield
            }
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
    fn sleeps_after_two_yields_to_a_thread_that_does_not_yield() {
        let mut idle = IdleBackoff::new(WaitStrategy::Adaptive);
        idle.record_ready();
        // One long yield, again and again, says nothing.
        for took in [CORE_TAKEN, 2 * CORE_TAKEN, CORE_TAKEN, 2 * CORE_TAKEN] {
            assert_eq!(idle.next_action(), IdleAction::Yield);
            idle.record_yield(took);
        }
        assert_eq!(idle.next_action(), IdleAction::Yield);
        idle.record_yield(2 * CORE_TAKEN);
        // Each of the next idle periods spins and then sleeps.
        for _ in 1..PERIODS_WITHOUT_YIELD {
            assert_eq!(idle.next_action(), IdleAction::Sleep);
            assert_eq!(idle.next_action(), IdleAction::Sleep);
            idle.reset();
            while idle.next_action() == IdleAction::Spin {}
        }
        idle.reset();
        let actions: Vec<IdleAction> =
            std::iter::repeat_with(|| idle.next_action()).take(SPINS as usize).collect();
        assert!(actions.contains(&IdleAction::Yield), "after a while it tries a yield again");
        idle.record_yield(2 * CORE_TAKEN);
        assert_eq!(idle.next_action(), IdleAction::Sleep, "and one is enough then");
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
