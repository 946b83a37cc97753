//! The lease of a client on its response slots: the right to have responses written there, and how the watcher thread
//! ends it when the client is gone.
//!
//! The server's thread writes responses. The watcher thread gives the slots of a dead client to a new client. A response
//! that is being written when the client is found dead must not end up in the slots of the new client:
//!
//! ```text
//!  server thread                            watcher thread
//!  replying_to = key                        holder = NO_CLIENT
//!  light barrier                            heavy barrier
//!  holder == key ?  no: the client is gone  replying_to == key ?  yes: try again later
//!  write the response                       the slots are free
//!  replying_to = NO_CLIENT
//! ```
//!
//! **Promise.** When [`end`] has returned true, no response to that holder is being written or will be.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::ring::{Word, fence};

/// Stands for no client: no key is zero.
pub(super) const NO_CLIENT: u64 = 0;

/// Begins a reply to `key`. False if the lease of `key` has ended; otherwise [`end_reply`] must follow.
#[inline]
pub(super) fn begin_reply<W: Word>(replying_to: &W, holder: &W, key: u64) -> bool {
    begin_reply_fenced(replying_to, holder, key, fence::light)
}

#[inline]
fn begin_reply_fenced<W: Word>(replying_to: &W, holder: &W, key: u64, light: impl Fn()) -> bool {
    replying_to.store(key, Relaxed);
    light();
    // Acquire, partner: the Release store of a new holder. The slots have been cleared for it.
    let is_holder = holder.load(Acquire) == key;
    if !is_holder {
        replying_to.store(NO_CLIENT, Relaxed);
    }
    is_holder
}

/// Ends a reply, after the response was written.
#[inline]
pub(super) fn end_reply<W: Word>(replying_to: &W) {
    // Release, partner: the Acquire load in `end`. A thread that sees NO_CLIENT sees the response, and may clear it.
    replying_to.store(NO_CLIENT, Release);
}

/// Ends the lease of `key`. False if a response to it is being written; then try again later.
pub(super) fn end<W: Word>(replying_to: &W, holder: &W, key: u64) -> bool {
    end_fenced(replying_to, holder, key, fence::heavy)
}

fn end_fenced<W: Word>(replying_to: &W, holder: &W, key: u64, heavy: impl Fn()) -> bool {
    // Release, partner: the Acquire load of holders in `ClientRegistry::live_claims`. All that the dead holder wrote is
    // visible to us, because its death has been reported.
    holder.store(NO_CLIENT, Release);
    heavy();
    // Acquire, partner: the Release store in `end_reply`.
    replying_to.load(Acquire) != key
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    /// One thread replies, the other ends the lease and clears the slot. Loom reports a race if both write at once.
    fn check(light: fn(), heavy: fn()) {
        loom::model(move || {
            let shared = Arc::new((AtomicU64::new(NO_CLIENT), AtomicU64::new(7), UnsafeCell::new(0)));
            let server = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (replying_to, holder, slot) = &*shared;
                    if begin_reply_fenced(replying_to, holder, 7, light) {
                        // SAFETY: this is what the test checks, with loom.
                        slot.with_mut(|slot| unsafe { *slot = 1 });
                        end_reply(replying_to);
                    }
                }
            });
            let (replying_to, holder, slot) = &*shared;
            while !end_fenced(replying_to, holder, 7, heavy) {
                thread::yield_now();
            }
            // SAFETY: as above.
            slot.with_mut(|slot| unsafe { *slot = 0 });
            holder.store(8, Release);
            server.join().unwrap();
            // SAFETY: there is no other thread any more.
            slot.with(|slot| assert_eq!(unsafe { *slot }, 0, "a response to a client that is gone"));
        });
    }

    #[test]
    fn loom_no_response_reaches_the_next_holder() {
        check(fence::light, fence::heavy);
    }

    /// A twin that must fail: a server that checks the holder before others can see that it replies.
    #[test]
    #[should_panic]
    fn loom_twin_reply_without_barrier_is_caught() {
        check(|| (), fence::heavy);
    }

    /// A twin that must fail: a watcher that looks for a reply before the server can see that the lease has ended.
    #[test]
    #[should_panic]
    fn loom_twin_end_without_barrier_is_caught() {
        check(fence::light, || ());
    }
}
