//! Parking until somebody else has published something, and waking who parked.
//!
//! ```text
//!  ringer                            owner
//!  publish                           asleep = 1
//!  light barrier                     heavy barrier
//!  asleep == 0 ?  nothing to do      published ?  asleep = 0, go on
//!  else  asleep = 0, futex wake      futex wait while asleep == 1, at most SLICE
//! ```
//!
//! **Promise.** Ringing a bell whose owner is awake is a load, without any fence that a processor executes. No wake-up is
//! lost: of the ringer's publication and the owner's `asleep` at least one is seen by the other side, see
//! [`fence`]. Processes that ring must have [registered](fence::register).
//!
//! Anybody who maps a bell can write it. That costs its owner time and nothing else: a park ends after [`SLICE`] whatever
//! the word says, which also covers a ringer that is killed between its store and its wake.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::thread::futex;
use rustix::time::Timespec;

use crate::memory::segment::Shared;
use crate::ring::fence;

/// One park at most; then the owner looks again by itself.
const SLICE: Duration = Duration::from_millis(50);
/// One sleep at most where several bells cannot be waited at: nobody wakes the sleeper.
const NAP: Duration = Duration::from_millis(1);
/// Bells that the kernel waits at together, at most.
const TOGETHER: usize = 128;
/// Looks at what is awaited before the clock is asked for the first time.
const FIRST_LOOKS: u32 = 64;
/// How long adaptive waiting spins.
const SPIN: Duration = Duration::from_micros(5);
/// How long adaptive waiting spins, and then yields its core in between, before it parks.
const YIELD: Duration = Duration::from_micros(50);

/// How to wait for the other side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Waiting {
    /// Look again and again. The fastest, for a thread that has its core to itself; it uses all of it.
    Spin,
    /// Spin for a few microseconds, then let others run in between, then [park](Waiting::Park).
    #[default]
    Adaptive,
    /// Sleep in the kernel after a very short spin, until the other side wakes us. Costs the other side a system call
    /// for every wake-up, and us some tens of microseconds.
    Park,
}

/// One owner waits at it, anybody rings it. All zeros is a bell whose owner is awake.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Bell {
    /// 1 while the owner sleeps, or is about to; a futex. Writers: owner, and who wakes it.
    asleep: AtomicU32,
}

// SAFETY: one atomic integer.
unsafe impl Shared for Bell {}

impl Bell {
    /// Wakes the owner if it sleeps. After publishing what it waits for.
    #[inline(always)]
    pub(crate) fn ring(&self) {
        if sleeps(&self.asleep, fence::light) {
            self.wake();
        }
    }

    /// Wakes the owner, or keeps it from falling asleep. After storing what it should see.
    #[cold]
    pub(crate) fn wake(&self) {
        rouse(&self.asleep, full_fence);
    }
}

/// Waits until `ready` or the deadline, and returns what `ready` said last. The caller is the bell's owner.
pub(crate) fn wait(
    bell: &Bell,
    how: Waiting,
    deadline: Option<Instant>,
    ready: impl FnMut() -> bool,
) -> bool {
    attend(how, |_| deadline, ready, |at_most, ready| park(&bell.asleep, at_most, fence::heavy, ready))
}

/// The same, for a while: the clock is not read if there is no need to wait.
pub(crate) fn wait_for(
    bell: &Bell,
    how: Waiting,
    timeout: Option<Duration>,
    ready: impl FnMut() -> bool,
) -> bool {
    let deadline = |now: Instant| timeout.and_then(|timeout| now.checked_add(timeout));
    attend(how, deadline, ready, |at_most, ready| park(&bell.asleep, at_most, fence::heavy, ready))
}

/// The same at several bells: whoever rings one of them ends the wait. The caller owns them all.
pub(crate) fn wait_at<'b>(
    bells: impl Iterator<Item = &'b Bell> + Clone,
    how: Waiting,
    timeout: Option<Duration>,
    ready: impl FnMut() -> bool,
) -> bool {
    let deadline = |now: Instant| timeout.and_then(|timeout| now.checked_add(timeout));
    attend(how, deadline, ready, |at_most, ready| park_at(bells.clone(), at_most, ready))
}

/// Spins, yields and parks, as `how` says.
fn attend<R: FnMut() -> bool>(
    how: Waiting,
    deadline: impl FnOnce(Instant) -> Option<Instant>,
    mut ready: R,
    mut park: impl FnMut(Duration, &mut R) -> bool,
) -> bool {
    for _ in 0..FIRST_LOOKS {
        if ready() {
            return true;
        }
        core::hint::spin_loop();
    }
    let begun = Instant::now();
    let deadline = deadline(begun);
    loop {
        let now = Instant::now();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return ready();
        }
        let waited = now - begun;
        if how == Waiting::Spin || (how == Waiting::Adaptive && waited < SPIN) {
            for _ in 0..FIRST_LOOKS {
                if ready() {
                    return true;
                }
                core::hint::spin_loop();
            }
        } else if how == Waiting::Adaptive && waited < YIELD {
            std::thread::yield_now();
            if ready() {
                return true;
            }
        } else if park(left.map_or(SLICE, |left| left.min(SLICE)), &mut ready) {
            return true;
        }
    }
}

/// The word that an owner sleeps at: the kernel's futex or, in tests, a model of it. Loads and stores are relaxed.
trait Futex {
    fn load(&self) -> u32;
    fn store(&self, value: u32);
    /// Sleeps until woken, for a while at most; not at all if the word is not 1.
    fn sleep(&self, at_most: Duration);
    fn wake(&self);
}

/// Whether the owner sleeps or is about to. If not, it sees what was published before.
#[inline(always)]
fn sleeps(word: &impl Futex, light: impl Fn()) -> bool {
    // Publication before load of `asleep`: the owner's barrier between its store of `asleep` and its look stands in for
    // the fence that is missing here.
    light();
    word.load() != 0
}

fn rouse(word: &impl Futex, full: impl Fn()) {
    // What the owner should see before our store of 0: should the owner's store of 1 come after it, its look does too.
    full();
    word.store(0);
    word.wake();
}

/// Looks once, after announcing it, and sleeps if there is nothing to see. Returns what it saw, before or after.
fn park(word: &impl Futex, at_most: Duration, heavy: impl Fn(), mut ready: impl FnMut() -> bool) -> bool {
    word.store(1);
    // Our store of `asleep` before our look, in the eyes of every ringer: see `sleeps`.
    heavy();
    let seen = ready();
    if !seen {
        word.sleep(at_most);
    }
    word.store(0);
    seen || ready()
}

/// As [`park`], at several bells.
fn park_at<'b>(
    bells: impl Iterator<Item = &'b Bell> + Clone,
    at_most: Duration,
    mut ready: impl FnMut() -> bool,
) -> bool {
    bells.clone().for_each(|bell| bell.asleep.store(1, Relaxed));
    // Our stores of `asleep` before our look, in the eyes of every ringer: see `sleeps`.
    fence::heavy();
    let seen = ready();
    if !seen {
        sleep_at(bells.clone(), at_most);
    }
    bells.for_each(|bell| bell.asleep.store(0, Relaxed));
    seen || ready()
}

/// Sleeps until one of the bells is rung, for a while at most; not at all if one has been.
fn sleep_at<'b>(bells: impl Iterator<Item = &'b Bell>, at_most: Duration) {
    let mut waits = [futex::Wait::new(); TOGETHER];
    let (mut count, mut at_most) = (0, at_most);
    for bell in bells {
        let Some(wait) = waits.get_mut(count) else {
            // One more than the kernel takes, and nobody to wake us for it.
            at_most = at_most.min(NAP);
            break;
        };
        (wait.val, wait.uaddr) = (1, futex::WaitPtr::new(bell.asleep.as_ptr().cast()));
        wait.flags = futex::WaitFlags::SIZE_U32;
        count += 1;
    }
    // This call alone has the time at which to end.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let nanos = now.tv_nsec as u64 + u64::from(at_most.subsec_nanos());
    let end = Timespec {
        tv_sec: now.tv_sec + at_most.as_secs() as i64 + (nanos / 1_000_000_000) as i64,
        tv_nsec: (nanos % 1_000_000_000) as _,
    };
    let flags = futex::WaitvFlags::empty();
    match futex::waitv(&waits[..count], flags, Some(&end), rustix::thread::ClockId::Monotonic) {
        Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => {}
        // A kernel before Linux 5.16, or one that does not let us.
        Err(_) => std::thread::sleep(at_most.min(NAP)),
    }
}

impl Futex for AtomicU32 {
    #[inline(always)]
    fn load(&self) -> u32 {
        self.load(Relaxed)
    }

    fn store(&self, value: u32) {
        self.store(value, Relaxed);
    }

    fn sleep(&self, at_most: Duration) {
        let left = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
        match futex::wait(self, futex::Flags::empty(), 1, Some(&left)) {
            Ok(())
            | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => {}
            // A kernel without futexes: look every millisecond.
            Err(_) => std::thread::sleep(at_most.min(Duration::from_millis(1))),
        }
    }

    fn wake(&self) {
        // Waking nobody, or a word that is gone with its owner, is no failure.
        futex::wake(self, futex::Flags::empty(), 1).ok();
    }
}

#[cfg(not(all(test, loom)))]
fn full_fence() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

#[cfg(all(test, loom))]
fn full_fence() {
    loom::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Release};

    use super::*;

    const ALL: [Waiting; 3] = [Waiting::Spin, Waiting::Adaptive, Waiting::Park];

    #[test]
    fn what_is_there_needs_no_waiting() {
        let bell = Bell::default();
        for how in ALL {
            assert!(wait(&bell, how, None, || true));
            assert!(wait(&bell, how, Some(Instant::now()), || true));
        }
    }

    #[test]
    fn a_deadline_ends_the_wait() {
        fence::register().unwrap();
        let bell = Bell::default();
        for how in ALL {
            let deadline = Instant::now() + Duration::from_millis(120);
            assert!(!wait(&bell, how, Some(deadline), || false));
            assert!(Instant::now() >= deadline);
            assert_eq!(bell.asleep.load(Relaxed), 0, "awake again");
        }
    }

    #[test]
    fn a_scribbler_delays_a_park_by_a_slice_at_most() {
        fence::register().unwrap();
        let (bell, news) = (Bell::default(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                // Clears the word, so that no ringer sees a sleeper, and wakes nobody.
                bell.asleep.store(0, Relaxed);
                news.store(true, Release);
                bell.ring();
            });
            assert!(wait(&bell, Waiting::Park, None, || news.load(Acquire)));
        });
    }

    /// Whichever of several bells is rung, its owner wakes; more bells than the kernel takes are no obstacle.
    #[test]
    fn one_of_several_bells_is_enough() {
        fence::register().unwrap();
        for count in [1, 2, 5, TOGETHER, TOGETHER + 1] {
            let bells: Vec<Bell> = (0..count).map(|_| Bell::default()).collect();
            for how in ALL {
                assert!(!wait_at(bells.iter(), how, Some(Duration::from_millis(3)), || false));
                assert!(bells.iter().all(|bell| bell.asleep.load(Relaxed) == 0), "awake again");
                for rung in [0, count / 2, count - 1] {
                    let news = AtomicBool::new(false);
                    std::thread::scope(|scope| {
                        scope.spawn(|| {
                            std::thread::sleep(Duration::from_millis(2));
                            news.store(true, Release);
                            bells[rung].ring();
                        });
                        // Acquire, partner: the Release store above.
                        assert!(wait_at(bells.iter(), how, None, || news.load(Acquire)));
                    });
                }
            }
        }
    }

    /// Two threads take turns at bells of which each has two, and ring the one and the other.
    #[test]
    fn no_wake_up_is_lost_at_several_bells() {
        fence::register().unwrap();
        let turns = 3000;
        let bells: [[Bell; 2]; 2] = Default::default();
        let turn = AtomicU64::new(0);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for me in 0..2u64 {
                let (bells, turn) = (&bells, &turn);
                scope.spawn(move || {
                    for i in (me..turns).step_by(2) {
                        let mine = bells[me as usize].iter();
                        // Acquire, partner: the Release store below.
                        assert!(wait_at(mine, Waiting::Park, None, || turn.load(Acquire) == i));
                        turn.store(i + 1, Release);
                        bells[1 - me as usize][(i / 2 % 2) as usize].ring();
                    }
                });
            }
        });
        // A lost wake-up costs a slice, and one in five of them lost is past the limit.
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }

    /// Two threads take turns; a lost wake-up costs a slice, and one in five of them lost is past the limit.
    #[test]
    fn no_wake_up_is_lost() {
        fence::register().unwrap();
        // Spinners that share a core with others wait for the scheduler at each turn.
        for (how, turns) in [(Waiting::Spin, 200), (Waiting::Adaptive, 3000), (Waiting::Park, 3000)] {
            let bells = [Bell::default(), Bell::default()];
            let turn = AtomicU64::new(0);
            let begun = Instant::now();
            std::thread::scope(|scope| {
                for me in 0..2 {
                    let (bells, turn) = (&bells, &turn);
                    scope.spawn(move || {
                        for i in (me..turns).step_by(2) {
                            // Acquire, partner: the Release store below.
                            assert!(wait(&bells[me as usize], how, None, || turn.load(Acquire) == i));
                            turn.store(i + 1, Release);
                            bells[1 - me as usize].ring();
                        }
                    });
                }
            });
            assert!(begun.elapsed() < Duration::from_secs(30), "{how:?}: {:?}", begun.elapsed());
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

    use loom::sync::atomic::{AtomicBool, AtomicU32};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// A futex whose sleeps never end by themselves. To sleep when the last ringer is done is a lost wake-up.
    struct Model {
        word: AtomicU32,
        wakes: Mutex<Wakes>,
        queue: Condvar,
    }

    #[derive(Default)]
    struct Wakes {
        count: u32,
        over: bool,
    }

    impl Model {
        fn over(&self) {
            self.wakes.lock().unwrap().over = true;
            self.queue.notify_all();
        }
    }

    impl Futex for Model {
        fn load(&self) -> u32 {
            self.word.load(Relaxed)
        }

        fn store(&self, value: u32) {
            self.word.store(value, Relaxed);
        }

        fn sleep(&self, _: Duration) {
            let mut wakes = self.wakes.lock().unwrap();
            let before = wakes.count;
            if self.word.load(Relaxed) == 1 {
                while wakes.count == before {
                    assert!(!wakes.over, "a wake-up was lost");
                    wakes = self.queue.wait(wakes).unwrap();
                }
            }
        }

        fn wake(&self) {
            self.wakes.lock().unwrap().count += 1;
            self.queue.notify_all();
        }
    }

    /// The barriers of each side; the shipped ones, or one left out.
    #[derive(Clone, Copy)]
    struct Barriers {
        light: fn(),
        heavy: fn(),
        full: fn(),
    }

    const SHIPPED: Barriers = Barriers { light: fence::light, heavy: fence::heavy, full: full_fence };

    /// One side publishes and rings, or wakes at once; the other parks until it sees it.
    fn check(barriers: Barriers, always: bool) {
        loom::model(move || {
            let word =
                Model { word: AtomicU32::new(0), wakes: Mutex::new(Wakes::default()), queue: Condvar::new() };
            let shared = Arc::new((word, AtomicBool::new(false)));
            let ringer = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (word, news) = &*shared;
                    news.store(true, Release);
                    if always || sleeps(word, barriers.light) {
                        rouse(word, barriers.full);
                    }
                    word.over();
                }
            });
            let (word, news) = &*shared;
            while !park(word, SLICE, barriers.heavy, || news.load(Acquire)) {
                thread::yield_now();
            }
            ringer.join().unwrap();
        });
    }

    #[test]
    fn loom_no_ring_is_lost() {
        check(SHIPPED, false);
    }

    #[test]
    fn loom_no_unconditional_wake_is_lost() {
        check(SHIPPED, true);
    }

    /// A twin that must fail: an owner that looks before others can see that it is about to sleep.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_owner_without_barrier_is_caught() {
        check(Barriers { heavy: || (), ..SHIPPED }, false);
    }

    /// A twin that must fail: a ringer that looks for sleepers before it has published.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_ringer_without_barrier_is_caught() {
        check(Barriers { light: || (), ..SHIPPED }, false);
    }

    /// A twin that must fail: a wake whose store of 0 overtakes the news.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_wake_without_barrier_is_caught() {
        check(Barriers { full: || (), ..SHIPPED }, true);
    }
}
