//! A futex word in shared memory: its owner parks at it until another thread or process notifies it.
//!
//! ```text
//!  notifier                            owner
//!  publish data                        parked = 1
//!  light barrier                       heavy barrier
//!  parked == 0 ?  nothing to do        data published ?  parked = 0, go on
//!  else  parked = 0, futex wake        futex wait while parked == 1, at most MAX_PARK
//! ```
//!
//! **Promises.** Notifying an owner that is not parked costs one load, without any fence that a processor executes. No
//! wake-up is lost: either the notifier sees `parked == 1`, or the owner sees the published data, see [`fence`]. Every
//! process that notifies must have [registered](fence::register).
//!
//! Every process that maps a parker can write to it. A wrong value costs the owner time and nothing else: a park ends
//! after [`MAX_PARK`], whatever the word says. This also covers a notifier that is killed between its store and its
//! system call.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use rustix::thread::futex;
use rustix::time::Timespec;

use crate::memory::segment::Shared;
use crate::ring::fence;

/// Longest park. After it the owner checks its condition again.
pub(super) const MAX_PARK: Duration = Duration::from_millis(50);
/// Longest sleep where the kernel cannot wait at all parkers, so that nobody wakes the sleeper.
pub(super) const MAX_UNNOTIFIED_SLEEP: Duration = Duration::from_millis(1);
/// Most parkers that the kernel can wait at together (`FUTEX_WAITV_MAX`).
pub(super) const MAX_PARKERS: usize = 128;

/// A word at which one owner parks, and which any thread or process may notify. All zeros: the owner is not parked.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Parker {
    /// 1 while the owner is parked or about to park; a futex. Writers: the owner, and the thread that wakes it.
    pub(super) parked: AtomicU32,
}

// SAFETY: one atomic integer.
unsafe impl Shared for Parker {}

impl Parker {
    /// Wakes the owner if it is parked. To be called after publishing what the owner waits for.
    #[inline]
    pub(crate) fn notify(&self) {
        if is_parked(&self.parked, fence::light) {
            self.wake();
        }
    }

    /// Wakes the owner, or keeps it from parking. To be called after storing what the owner should see.
    #[cold]
    pub(crate) fn wake(&self) {
        wake_owner(&self.parked, full_fence);
    }
}

/// The word that an owner parks at: the kernel's futex or, in tests, a model of it. Loads and stores are relaxed.
pub(super) trait Futex {
    fn load(&self) -> u32;
    fn store(&self, value: u32);
    /// Sleeps until woken, for at most `timeout`. Returns at once if the word is not 1.
    fn sleep(&self, timeout: Duration);
    fn wake(&self);
}

/// Whether the owner is parked or about to park. If not, it sees what was published before this call.
#[inline]
fn is_parked(word: &impl Futex, light: impl Fn()) -> bool {
    // Orders the publication before the load of `parked`. The owner's heavy barrier, between its store of `parked` and its
    // check, takes the place of the processor fence that is missing here.
    light();
    word.load() != 0
}

fn wake_owner(word: &impl Futex, full: impl Fn()) {
    // Orders the publication before our store of 0. If the owner's store of 1 comes after that store, so does its check.
    full();
    word.store(0);
    word.wake();
}

/// Announces the park, checks once more, and sleeps if `ready` returns false. Returns what `ready` returned before or
/// after the sleep.
pub(super) fn park(
    word: &impl Futex,
    timeout: Duration,
    heavy: impl Fn(),
    mut ready: impl FnMut() -> bool,
) -> bool {
    word.store(1);
    // Orders our store of `parked` before our check, as every notifier sees them: see `is_parked`.
    heavy();
    let seen = ready();
    if !seen {
        word.sleep(timeout);
    }
    word.store(0);
    seen || ready()
}

/// What ended a park, see [`park_any`](super::park_any).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakeup {
    /// Something was there before the owner slept.
    Ready,
    /// Another thread or process woke the owner. Usually something is there now.
    Notified,
    /// The time has passed, or a signal ended the sleep. Something may be there.
    TimedOut,
}

/// As [`park`], at several parkers. Returns what ended the park, and what `ready` returned last.
pub(super) fn park_at_any<'p>(
    parkers: impl Iterator<Item = &'p Parker> + Clone,
    timeout: Duration,
    mut ready: impl FnMut() -> bool,
) -> (Wakeup, bool) {
    parkers.clone().for_each(|parker| parker.parked.store(1, Relaxed));
    if parkers.clone().next().is_some() {
        // Orders our stores of `parked` before our check, as every notifier sees them: see `is_parked`.
        fence::heavy();
    }
    let seen = ready();
    let woken = !seen && sleep_at_any(parkers.clone(), timeout);
    parkers.for_each(|parker| parker.parked.store(0, Relaxed));
    match (seen, woken) {
        (true, _) => (Wakeup::Ready, true),
        (false, true) => (Wakeup::Notified, ready()),
        (false, false) => (Wakeup::TimedOut, ready()),
    }
}

/// Sleeps until one of the parkers is woken, for at most `timeout`. Returns at once if one has been woken already. Returns
/// whether one was woken.
fn sleep_at_any<'p>(parkers: impl Iterator<Item = &'p Parker>, timeout: Duration) -> bool {
    let mut waits = [futex::Wait::new(); MAX_PARKERS];
    let (mut count, mut timeout) = (0, timeout);
    for parker in parkers {
        let Some(wait) = waits.get_mut(count) else {
            // More parkers than the kernel takes: nobody can wake us at the remaining ones.
            timeout = timeout.min(MAX_UNNOTIFIED_SLEEP);
            break;
        };
        (wait.val, wait.uaddr) = (1, futex::WaitPtr::new(parker.parked.as_ptr().cast()));
        wait.flags = futex::WaitFlags::SIZE_U32;
        count += 1;
    }
    // Unlike `futex_wait`, this system call takes an absolute time.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let nanos = now.tv_nsec as u64 + u64::from(timeout.subsec_nanos());
    let end = Timespec {
        tv_sec: now.tv_sec + timeout.as_secs() as i64 + (nanos / 1_000_000_000) as i64,
        tv_nsec: (nanos % 1_000_000_000) as _,
    };
    let flags = futex::WaitvFlags::empty();
    match futex::waitv(&waits[..count], flags, Some(&end), rustix::thread::ClockId::Monotonic) {
        // AGAIN: a word was no longer 1.
        Ok(_) | Err(rustix::io::Errno::AGAIN) => true,
        Err(rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => false,
        // A kernel before Linux 5.16, or a sandbox that refuses the call. Also without any parker.
        Err(_) => {
            std::thread::sleep(timeout.min(MAX_UNNOTIFIED_SLEEP));
            false
        }
    }
}

impl Futex for AtomicU32 {
    #[inline]
    fn load(&self) -> u32 {
        self.load(Relaxed)
    }

    fn store(&self, value: u32) {
        self.store(value, Relaxed);
    }

    fn sleep(&self, timeout: Duration) {
        let left = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        match futex::wait(self, futex::Flags::empty(), 1, Some(&left)) {
            Ok(())
            | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::TIMEDOUT) => {}
            // A sandbox that refuses futexes: check again every millisecond.
            Err(_) => std::thread::sleep(timeout.min(MAX_UNNOTIFIED_SLEEP)),
        }
    }

    fn wake(&self) {
        // There may be nobody to wake, and the word may be unmapped together with its owner. Neither is a failure.
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

#[cfg(all(test, loom))]
pub(crate) use loom_tests::Model as ModelParker;

#[cfg(all(test, loom))]
mod loom_tests {
    use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

    use loom::sync::atomic::{AtomicBool, AtomicU32};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// A futex whose sleeps have no timeout. An owner that sleeps after the last notifier has finished has lost a wake-up.
    pub(crate) struct Model {
        word: AtomicU32,
        wakes: Mutex<Wakes>,
        queue: Condvar,
    }

    #[derive(Default)]
    struct Wakes {
        count: u32,
        finished: bool,
    }

    impl Model {
        pub(crate) fn new() -> Model {
            Model { word: AtomicU32::new(0), wakes: Mutex::new(Wakes::default()), queue: Condvar::new() }
        }

        /// As [`Parker::notify`].
        pub(crate) fn notify(&self) {
            if is_parked(self, fence::light) {
                wake_owner(self, full_fence);
            }
        }

        /// Parks once.
        pub(crate) fn park(&self, ready: impl FnMut() -> bool) -> bool {
            park(self, MAX_PARK, fence::heavy, ready)
        }

        /// The last notifier has finished.
        pub(crate) fn finish(&self) {
            self.wakes.lock().unwrap().finished = true;
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
                    assert!(!wakes.finished, "a wake-up was lost");
                    wakes = self.queue.wait(wakes).unwrap();
                }
            }
        }

        fn wake(&self) {
            self.wakes.lock().unwrap().count += 1;
            self.queue.notify_all();
        }
    }

    /// The barriers of both sides: the real ones, or one left out.
    #[derive(Clone, Copy)]
    struct Barriers {
        light: fn(),
        heavy: fn(),
        full: fn(),
    }

    const REAL: Barriers = Barriers { light: fence::light, heavy: fence::heavy, full: full_fence };

    /// One side publishes and notifies, or wakes unconditionally; the other side parks until it sees the publication.
    fn check(barriers: Barriers, unconditionally: bool) {
        loom::model(move || {
            let shared = Arc::new((Model::new(), AtomicBool::new(false)));
            let notifier = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (word, published) = &*shared;
                    published.store(true, Release);
                    if unconditionally || is_parked(word, barriers.light) {
                        wake_owner(word, barriers.full);
                    }
                    word.finish();
                }
            });
            let (word, published) = &*shared;
            while !park(word, MAX_PARK, barriers.heavy, || published.load(Acquire)) {
                thread::yield_now();
            }
            notifier.join().unwrap();
        });
    }

    #[test]
    fn loom_no_notification_is_lost() {
        check(REAL, false);
    }

    #[test]
    fn loom_no_unconditional_wake_is_lost() {
        check(REAL, true);
    }

    /// A twin that must fail: an owner that checks before others can see that it is about to park.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_owner_without_barrier_is_caught() {
        check(Barriers { heavy: || (), ..REAL }, false);
    }

    /// A twin that must fail: a notifier that looks for a parked owner before its publication is visible.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_notifier_without_barrier_is_caught() {
        check(Barriers { light: || (), ..REAL }, false);
    }

    /// A twin that must fail: a wake whose store of 0 becomes visible before the publication.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_wake_without_barrier_is_caught() {
        check(Barriers { full: || (), ..REAL }, true);
    }
}
