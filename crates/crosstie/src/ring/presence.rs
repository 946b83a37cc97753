//! Presence: one process announces in shared memory that it is inside an operation, and the owner of the memory waits for
//! it before it frees what the operation may have found. Also who may write the announcement, and until when.
//!
//! Two words, both on one cache line that has one writer at a time:
//!
//! - `busy` is odd while the writer is inside an operation ([`enter`], [`leave`]).
//! - `tenure` says who the writer is. Its values are unique for every assignment, so a late writer of an earlier
//!   assignment is recognised.
//!
//! ```text
//!            assign                 open                    close
//!  0 (free) --------> t, even ----------------> t | 1, odd -------> t, even
//!     ^     owner         |     writer (CAS)                writer     |
//!     '-------------------'<-------------------------------------------'
//!            withdraw, owner (CAS t -> 0): succeeds only while nobody has the line open
//! ```
//!
//! **Promise.** After [`withdraw`] returned true, nobody writes `busy` until the next [`assign`]. After the owner took an
//! object away, passed [`fence::heavy`] and got `None` from [`observe`], or true from [`has_left`], the writer no longer
//! uses the object.

use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use super::{Word, fence};

/// Announces an operation. What the writer looks up after this call is not freed before [`leave`].
#[inline]
pub(crate) fn enter<W: Word>(busy: &W) {
    busy.store(busy.load(Relaxed).wrapping_add(1) | 1, Relaxed);
    // The announcement comes before the loads of the operation. Partner: `fence::heavy`, which the owner passes between
    // the store that takes an object away and `observe`.
    fence::light();
}

/// Ends the announced operation.
#[inline]
pub(crate) fn leave<W: Word>(busy: &W) {
    leave_ordered(busy, Release);
}

#[inline]
fn leave_ordered<W: Word>(busy: &W, order: Ordering) {
    // Release, partner: the Acquire loads in `observe` and `has_left`. All accesses of the operation are over.
    busy.store(busy.load(Relaxed).wrapping_add(1), order);
}

/// The value of `busy` if the writer is inside an operation now. The caller took an object away and then passed
/// [`fence::heavy`].
pub(crate) fn observe<W: Word>(busy: &W) -> Option<u64> {
    // Acquire, partner: the Release store in `leave`.
    let seen = busy.load(Acquire);
    (seen & 1 == 1).then_some(seen)
}

/// Whether the operation that [`observe`] saw is over.
pub(crate) fn has_left<W: Word>(busy: &W, seen: u64) -> bool {
    // Acquire, partner: the Release store in `leave`.
    busy.load(Acquire) != seen
}

/// Assigns a free line to a writer. `tenure` is even, not zero, and was never used for this line before.
pub(crate) fn assign<W: Word>(word: &W, tenure: u64) {
    debug_assert!(tenure != 0 && tenure & 1 == 0);
    // Release, partner: the Acquire exchange in `open`. The writer sees the line as the owner prepared it.
    word.store(tenure, Release);
}

/// Becomes the writer of a line. False if the line is not, or no longer, assigned with this `tenure`.
pub(crate) fn open<W: Word>(word: &W, tenure: u64) -> bool {
    exchange(word, tenure, tenure | 1)
}

/// Gives the line up; it can be opened again until it is withdrawn.
pub(crate) fn close<W: Word>(word: &W, tenure: u64) {
    // Release, partner: the Acquire exchange in `withdraw`. The last operation is over.
    word.store(tenure, Release);
}

/// Takes a line back. False while its writer has it open.
pub(crate) fn withdraw<W: Word>(word: &W, tenure: u64) -> bool {
    exchange(word, tenure, 0)
}

fn exchange<W: Word>(word: &W, old: u64, new: u64) -> bool {
    loop {
        // Acquire, partner: the Release stores in `assign` and `close`.
        match word.compare_exchange_weak(old, new, Acquire, Relaxed) {
            Ok(_) => return true,
            Err(now) if now != old => return false,
            // A spurious failure.
            Err(_) => {}
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    const FIRST: u64 = 2;
    const SECOND: u64 = 4;
    /// `connection` while the object does not exist.
    const GONE: u64 = 0;

    struct Shared {
        busy: AtomicU64,
        tenure: AtomicU64,
        /// The object exists as long as this equals the tenure of the connection that may use it.
        connection: AtomicU64,
        object: UnsafeCell<u64>,
    }

    impl Shared {
        fn new() -> Arc<Shared> {
            Arc::new(Shared {
                busy: AtomicU64::new(0),
                tenure: AtomicU64::new(FIRST),
                connection: AtomicU64::new(FIRST),
                object: UnsafeCell::new(0),
            })
        }

        /// One operation of the peer with connection `own`: a write to the object if it still exists.
        fn operate(&self, own: u64, leave_order: Ordering) {
            enter(&self.busy);
            if self.connection.load(Acquire) == own {
                // SAFETY: the object exists until the owner saw that nobody is inside; loom checks that.
                self.object.with_mut(|object| unsafe { *object += 1 });
            }
            leave_ordered(&self.busy, leave_order);
        }

        /// The owner reuses the object: loom reports a race if a peer may still write it.
        fn reuse(&self) {
            // SAFETY: nobody is inside any more; loom checks that.
            self.object.with_mut(|object| unsafe { *object = 99 });
        }
    }

    /// The steps of the protocol that a twin leaves out.
    #[derive(Clone, Copy)]
    struct Steps {
        leave: Ordering,
        heavy_fence: bool,
        withdraw: bool,
    }

    const ALL: Steps = Steps { leave: Release, heavy_fence: true, withdraw: true };

    /// The owner takes the object away while a peer works. It reuses the object when the peer has left; if the peer has not
    /// left yet, the object stays deferred and is reused after the peer's thread ended.
    fn take_away(steps: Steps) {
        loom::model(move || {
            let shared = Shared::new();
            let peer = thread::spawn({
                let shared = shared.clone();
                move || {
                    assert!(open(&shared.tenure, FIRST));
                    shared.operate(FIRST, steps.leave);
                    close(&shared.tenure, FIRST);
                }
            });
            shared.connection.store(GONE, Relaxed);
            if steps.heavy_fence {
                fence::heavy();
            }
            let deferred = match observe(&shared.busy) {
                Some(seen) if !has_left(&shared.busy, seen) => true,
                _ => {
                    shared.reuse();
                    false
                }
            };
            peer.join().unwrap();
            if deferred {
                shared.reuse();
            }
        });
    }

    #[test]
    fn loom_object_is_reused_only_after_the_peer_has_left() {
        take_away(ALL);
    }

    /// A twin that must fail: the end of the operation does not release.
    #[test]
    #[should_panic]
    fn loom_twin_relaxed_leave_is_caught() {
        take_away(Steps { leave: Relaxed, ..ALL });
    }

    /// A twin that must fail: the owner looks without the heavy fence.
    #[test]
    #[should_panic]
    fn loom_twin_missing_heavy_fence_is_caught() {
        take_away(Steps { heavy_fence: false, ..ALL });
    }

    /// An old peer opens its line late and posts, while the owner gives the line to a new peer and then takes the new
    /// peer's object away. The old peer must not disturb the announcement of the new one.
    fn late_old_peer(steps: Steps) {
        loom::model(move || {
            let shared = Shared::new();
            shared.connection.store(GONE, Relaxed);
            let old = thread::spawn({
                let shared = shared.clone();
                move || {
                    // It read tenure and connection before the owner closed them.
                    if !steps.withdraw || open(&shared.tenure, FIRST) {
                        shared.operate(FIRST, Release);
                        if steps.withdraw {
                            close(&shared.tenure, FIRST);
                        }
                    }
                }
            });
            if !steps.withdraw || withdraw(&shared.tenure, FIRST) {
                shared.busy.store(0, Relaxed);
                shared.connection.store(SECOND, Release);
                assign(&shared.tenure, SECOND);
                let new = thread::spawn({
                    let shared = shared.clone();
                    move || {
                        assert!(open(&shared.tenure, SECOND));
                        shared.operate(SECOND, Release);
                    }
                });
                shared.connection.store(GONE, Relaxed);
                fence::heavy();
                let seen = observe(&shared.busy);
                let quiet = seen.is_none_or(|seen| has_left(&shared.busy, seen));
                if quiet {
                    shared.reuse();
                }
                new.join().unwrap();
            }
            old.join().unwrap();
        });
    }

    #[test]
    fn loom_line_is_reused_only_after_it_was_withdrawn() {
        late_old_peer(ALL);
    }

    /// A twin that must fail: the owner reuses a line that the old peer may still open.
    #[test]
    #[should_panic]
    fn loom_twin_line_with_two_writers_is_caught() {
        late_old_peer(Steps { withdraw: false, ..ALL });
    }
}
