//! How to wait: the loop that spins, yields and parks, as a [`WaitStrategy`] says.

use std::time::{Duration, Instant};

use super::parker::{MAX_PARK, Parker, Wakeup, park, park_at_any};
use super::yielding::yield_core;
use crate::ring::fence;

/// Checks of the condition between two readings of the clock.
const CHECKS_PER_CLOCK_READING: u32 = 64;
/// How long adaptive waiting spins.
const SPIN_TIME: Duration = Duration::from_micros(5);
/// How long adaptive waiting spins and then yields its core, before it parks.
const YIELD_TIME: Duration = Duration::from_micros(50);

/// How to wait for another thread or process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WaitStrategy {
    /// Check the condition in a loop. The fastest for a thread that is pinned to a core of its own; it uses all of that
    /// core.
    Spin,
    /// Spin for a few microseconds, then yield the core between checks, then [park](WaitStrategy::Park). Park at once instead of yielding
    /// where another thread was found to compute on the same core, see [`yield_core`].
    #[default]
    Adaptive,
    /// Sleep in the kernel after a very short spin, until the other side wakes us. Each wake-up costs the other side a
    /// system call, and us some tens of microseconds.
    Park,
}

/// Waits until `ready` returns true or the deadline has passed. Returns what `ready` returned last. The caller is the
/// parker's owner.
pub(crate) fn wait_until(
    parker: &Parker,
    strategy: WaitStrategy,
    deadline: Option<Instant>,
    ready: impl FnMut() -> bool,
) -> bool {
    wait_with(
        strategy,
        |_| deadline,
        ready,
        |timeout, ready| park(&parker.parked, timeout, fence::heavy, ready),
    )
}

/// As [`wait_until`], with a timeout instead of a deadline: the clock is not read if `ready` returns true at once.
pub(crate) fn wait_for(
    parker: &Parker,
    strategy: WaitStrategy,
    timeout: Option<Duration>,
    ready: impl FnMut() -> bool,
) -> bool {
    let deadline = |now: Instant| timeout.and_then(|timeout| now.checked_add(timeout));
    wait_with(strategy, deadline, ready, |timeout, ready| park(&parker.parked, timeout, fence::heavy, ready))
}

/// As [`wait_for`], at several parkers: a notification of any of them ends the wait. The caller owns all of them. Before each
/// park `prepare` is called, which returns the longest park.
pub(crate) fn wait_for_any<'p>(
    parkers: impl Iterator<Item = &'p Parker> + Clone,
    strategy: WaitStrategy,
    timeout: Option<Duration>,
    prepare: impl Fn() -> Duration,
    ready: impl FnMut() -> bool,
) -> bool {
    let deadline = |now: Instant| timeout.and_then(|timeout| now.checked_add(timeout));
    wait_with(strategy, deadline, ready, |timeout, ready| {
        let (_, is_ready) = park_at_any(parkers.clone(), timeout.min(prepare()), ready);
        is_ready
    })
}

/// Parks once at several parkers, for at most `timeout`. The caller owns all of them.
pub(crate) fn park_once<'p>(
    parkers: impl Iterator<Item = &'p Parker> + Clone,
    timeout: Duration,
    mut ready: impl FnMut() -> bool,
) -> Wakeup {
    if ready() {
        // Before anything is announced: the barrier of a park costs more than this check.
        return Wakeup::Ready;
    }
    park_at_any(parkers, timeout.min(MAX_PARK), ready).0
}

/// Spins, yields and parks, as the strategy says.
fn wait_with<R: FnMut() -> bool>(
    strategy: WaitStrategy,
    deadline: impl FnOnce(Instant) -> Option<Instant>,
    mut ready: R,
    mut park: impl FnMut(Duration, &mut R) -> bool,
) -> bool {
    for _ in 0..CHECKS_PER_CLOCK_READING {
        if ready() {
            return true;
        }
        core::hint::spin_loop();
    }
    let start = Instant::now();
    let deadline = deadline(start);
    loop {
        let now = Instant::now();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return ready();
        }
        let waited = now - start;
        if strategy == WaitStrategy::Spin || (strategy == WaitStrategy::Adaptive && waited < SPIN_TIME) {
            for _ in 0..CHECKS_PER_CLOCK_READING {
                if ready() {
                    return true;
                }
                core::hint::spin_loop();
            }
        } else if strategy == WaitStrategy::Adaptive && waited < YIELD_TIME && yield_core().is_some() {
            if ready() {
                return true;
            }
        } else if park(left.map_or(MAX_PARK, |left| left.min(MAX_PARK)), &mut ready) {
            return true;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::{
        AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
    };

    use super::super::parker::MAX_PARKERS;
    use super::*;

    const ALL: [WaitStrategy; 3] = [WaitStrategy::Spin, WaitStrategy::Adaptive, WaitStrategy::Park];

    #[test]
    fn ready_condition_ends_the_wait_at_once() {
        let parker = Parker::default();
        for strategy in ALL {
            assert!(wait_until(&parker, strategy, None, || true));
            assert!(wait_until(&parker, strategy, Some(Instant::now()), || true));
        }
    }

    #[test]
    fn deadline_ends_the_wait() {
        fence::register().unwrap();
        let parker = Parker::default();
        for strategy in ALL {
            let deadline = Instant::now() + Duration::from_millis(120);
            assert!(!wait_until(&parker, strategy, Some(deadline), || false));
            assert!(Instant::now() >= deadline);
            assert_eq!(parker.parked.load(Relaxed), 0, "not parked any more");
        }
    }

    #[test]
    fn overwritten_word_delays_the_owner_by_one_park_at_most() {
        fence::register().unwrap();
        let (parker, published) = (Parker::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                // Clears the word without a wake, so that the notification below does not see a parked owner.
                parker.parked.store(0, Relaxed);
                published.store(true, Release);
                parker.notify();
            });
            assert!(wait_until(&parker, WaitStrategy::Park, None, || published.load(Acquire)));
        });
    }

    /// A notification of any one of several parkers wakes the owner, also with more parkers than the kernel takes.
    #[test]
    fn notification_of_any_parker_wakes_the_owner() {
        fence::register().unwrap();
        for count in [1, 2, 5, MAX_PARKERS, MAX_PARKERS + 1] {
            let parkers: Vec<Parker> = (0..count).map(|_| Parker::default()).collect();
            for strategy in ALL {
                assert!(!wait_for_any(
                    parkers.iter(),
                    strategy,
                    Some(Duration::from_millis(3)),
                    || MAX_PARK,
                    || false
                ));
                assert!(parkers.iter().all(|parker| parker.parked.load(Relaxed) == 0), "not parked any more");
                for notified in [0, count / 2, count - 1] {
                    let published = AtomicBool::new(false);
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            std::thread::sleep(Duration::from_millis(2));
                            published.store(true, Release);
                            parkers[notified].notify();
                        });
                        // Acquire, partner: the Release store above.
                        assert!(wait_for_any(
                            parkers.iter(),
                            strategy,
                            None,
                            || MAX_PARK,
                            || published.load(Acquire)
                        ));
                    });
                }
            }
        }
    }

    /// Two threads with two parkers each take turns, and notify one parker of the other and then the other one.
    #[test]
    fn no_wake_up_is_lost_at_several_parkers() {
        fence::register().unwrap();
        let turns = 3000;
        let parkers: [[Parker; 2]; 2] = Default::default();
        let turn = AtomicU64::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for me in 0..2u64 {
                let (parkers, turn) = (&parkers, &turn);
                scope.spawn(move || {
                    for i in (me..turns).step_by(2) {
                        let mine = parkers[me as usize].iter();
                        // Acquire, partner: the Release store below.
                        assert!(wait_for_any(
                            mine,
                            WaitStrategy::Park,
                            None,
                            || MAX_PARK,
                            || turn.load(Acquire) == i
                        ));
                        turn.store(i + 1, Release);
                        parkers[1 - me as usize][(i / 2 % 2) as usize].notify();
                    }
                });
            }
        });
        // A lost wake-up costs MAX_PARK. Losing one in five of them would exceed the limit.
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    /// Two threads take turns. A lost wake-up costs MAX_PARK; losing one in five of them would exceed the limit.
    #[test]
    fn no_wake_up_is_lost() {
        fence::register().unwrap();
        // A spinning thread that shares its core waits for the scheduler at each turn.
        for (strategy, turns) in
            [(WaitStrategy::Spin, 200), (WaitStrategy::Adaptive, 3000), (WaitStrategy::Park, 3000)]
        {
            let parkers = [Parker::default(), Parker::default()];
            let turn = AtomicU64::new(0);
            let start = Instant::now();
            std::thread::scope(|scope| {
                for me in 0..2 {
                    let (parkers, turn) = (&parkers, &turn);
                    scope.spawn(move || {
                        for i in (me..turns).step_by(2) {
                            // Acquire, partner: the Release store below.
                            assert!(
                                wait_until(&parkers[me as usize], strategy, None, || turn.load(Acquire) == i)
                            );
                            turn.store(i + 1, Release);
                            parkers[1 - me as usize].notify();
                        }
                    });
                }
            });
            assert!(start.elapsed() < Duration::from_secs(30), "{strategy:?}: {:?}", start.elapsed());
        }
    }
}
