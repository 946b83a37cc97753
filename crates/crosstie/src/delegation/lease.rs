//! The right to write into a client's response slots, and taking it back when the client is gone.
//!
//! The server's thread answers, the watcher's thread gives a dead client's slots to somebody else. An answer that is being
//! written when the client is found dead must not land in its successor's slots:
//!
//! ```text
//!  server                                  watcher
//!  answering = key                         holder = NOBODY
//!  light barrier                           heavy barrier
//!  holder == key ?  no: the client is gone answering == key ?  yes: ask again later
//!  write the answer                        the slots are free
//!  answering = NOBODY
//! ```
//!
//! **Promise.** When [`end`] has returned true, no answer to that holder is being written or will be.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::ring::{Word, fence};

/// No key is zero.
pub(super) const NOBODY: u64 = 0;

/// Begins an answer to `key`. False if it does not hold the slots any more; else [`answered`] must follow.
#[inline]
pub(super) fn answer<W: Word>(answering: &W, holder: &W, key: u64) -> bool {
    answer_fenced(answering, holder, key, fence::light)
}

#[inline]
fn answer_fenced<W: Word>(answering: &W, holder: &W, key: u64, light: impl Fn()) -> bool {
    answering.store(key, Relaxed);
    light();
    // Acquire, partner: the Release store of a new holder: the slots have been cleared for it.
    let holds = holder.load(Acquire) == key;
    if !holds {
        answering.store(NOBODY, Relaxed);
    }
    holds
}

/// Ends an answer.
#[inline]
pub(super) fn answered<W: Word>(answering: &W) {
    // Release, partner: the Acquire load in `end`. Whoever sees NOBODY sees the answer, and may clear it.
    answering.store(NOBODY, Release);
}

/// Takes the slots from `key`. False if an answer is being written; then ask again.
pub(super) fn end<W: Word>(answering: &W, holder: &W, key: u64) -> bool {
    end_fenced(answering, holder, key, fence::heavy)
}

fn end_fenced<W: Word>(answering: &W, holder: &W, key: u64, heavy: impl Fn()) -> bool {
    // Release, partner: the Acquire load of holders by whoever looks for abandoned requests: all that the holder wrote
    // is visible to us, its death having been reported.
    holder.store(NOBODY, Release);
    heavy();
    // Acquire, partner: the Release store in `answered`.
    answering.load(Acquire) != key
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    /// One answers, the other takes the slot away and clears it. Loom reports a race if both write at once.
    fn check(light: fn(), heavy: fn()) {
        loom::model(move || {
            let shared = Arc::new((AtomicU64::new(NOBODY), AtomicU64::new(7), UnsafeCell::new(0)));
            let server = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (answering, holder, slot) = &*shared;
                    if answer_fenced(answering, holder, 7, light) {
                        // SAFETY: what is tested; loom checks it.
                        slot.with_mut(|slot| unsafe { *slot = 1 });
                        answered(answering);
                    }
                }
            });
            let (answering, holder, slot) = &*shared;
            while !end_fenced(answering, holder, 7, heavy) {
                thread::yield_now();
            }
            // SAFETY: as above.
            slot.with_mut(|slot| unsafe { *slot = 0 });
            holder.store(8, Release);
            server.join().unwrap();
            // SAFETY: alone again.
            slot.with(|slot| assert_eq!(unsafe { *slot }, 0, "an answer for somebody who is gone"));
        });
    }

    #[test]
    fn loom_no_answer_reaches_the_successor() {
        check(fence::light, fence::heavy);
    }

    /// A twin that must fail: a server that looks who holds the slots before others see that it answers.
    #[test]
    #[should_panic]
    fn loom_twin_answer_without_barrier_is_caught() {
        check(|| (), fence::heavy);
    }

    /// A twin that must fail: a watcher that looks for answers before the server can see that the holder is gone.
    #[test]
    #[should_panic]
    fn loom_twin_end_without_barrier_is_caught() {
        check(fence::light, || ());
    }
}
