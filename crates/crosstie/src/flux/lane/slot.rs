//! One slot of a lane: a word, and the request or the response of a call.
//!
//! **Who owns the body of a slot.** The word says it, at every moment of the slot's life:
//!
//! ```text
//!  word                          the slot holds              who may touch it
//!  request_word(call)            the request                 the callee; the caller, once the callee has left
//!    ... and the callee has it
//!    marked as unanswered        nothing: it was received    the callee
//!  response_word(call, FULL)     the response                the caller
//!    ... and the call is not
//!    in the call table           nothing: it was taken       the caller
//!  response_word(_, EMPTY)       nothing                     the caller
//! ```
//!
//! A side that leaves updates the words, so that they are true without its private state (the callee's `unanswered` marks,
//! the caller's call table). The callee writes an `EMPTY` response for each request that it received and did not reply
//! to. The caller writes `EMPTY` over the responses that it took. So when both are gone, the words alone say what is left
//! to drop.

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering::Relaxed;

use crosstie_protocol::lane::{CallNumber, SlotOwner, response_word, slot_owner};

use super::sync::{Arc, AtomicU64, UnsafeCell};

/// The "length" in the word of a slot that holds a message.
pub(super) const FULL: usize = 1;
/// The "length" in the word of a response that holds nothing.
pub(super) const EMPTY: usize = 0;
/// The word of a slot that was never used.
pub(super) const UNUSED: u64 = response_word(CallNumber::FIRST, EMPTY);

/// The slots of a lane, which its caller and its callee share.
pub(super) type Slots<Req, Resp> = Arc<[Slot<Req, Resp>]>;

union Body<Req, Resp> {
    nothing: (),
    request: ManuallyDrop<Req>,
    response: ManuallyDrop<Resp>,
}

/// Space for one call: its request, then its response. One cache line if both are small.
#[repr(C, align(64))]
pub(super) struct Slot<Req, Resp> {
    pub(super) word: AtomicU64,
    body: UnsafeCell<Body<Req, Resp>>,
}

// SAFETY: a slot moves requests and responses between threads, hence both must be `Send`. It never gives out a reference to
// one, so they need not be `Sync`. Access to the body follows the word, see the table above.
unsafe impl<Req: Send, Resp: Send> Sync for Slot<Req, Resp> {}
// SAFETY: as above.
unsafe impl<Req: Send, Resp: Send> Send for Slot<Req, Resp> {}

impl<Req, Resp> Slot<Req, Resp> {
    pub(super) fn new() -> Self {
        Slot { word: AtomicU64::new(UNUSED), body: UnsafeCell::new(Body { nothing: () }) }
    }

    /// # Safety
    /// The slot holds nothing, and this thread owns it.
    #[inline]
    pub(super) unsafe fn put_request(&self, request: Req) {
        // SAFETY: nobody else touches the body, and nothing in it needs dropping.
        self.body.with_mut(|body| unsafe { (&raw mut (*body).request).write(ManuallyDrop::new(request)) });
    }

    /// # Safety
    /// The slot holds a request, and this thread owns it. Afterwards the slot holds nothing.
    #[inline]
    pub(super) unsafe fn take_request(&self) -> Req {
        // SAFETY: nobody else touches the body, and nobody will read the request again.
        self.body.with_mut(|body| unsafe { ManuallyDrop::into_inner((&raw const (*body).request).read()) })
    }

    /// # Safety
    /// The slot holds nothing, and this thread owns it.
    #[inline]
    pub(super) unsafe fn put_response(&self, response: Resp) {
        // SAFETY: as in `put_request`.
        self.body.with_mut(|body| unsafe { (&raw mut (*body).response).write(ManuallyDrop::new(response)) });
    }

    /// # Safety
    /// The slot holds a response, and this thread owns it. Afterwards the slot holds nothing.
    #[inline]
    pub(super) unsafe fn take_response(&self) -> Resp {
        // SAFETY: as in `take_request`.
        self.body.with_mut(|body| unsafe { ManuallyDrop::into_inner((&raw const (*body).response).read()) })
    }
}

impl<Req, Resp> Drop for Slot<Req, Resp> {
    /// Drops a message that nobody took. Caller and callee have left, because both hold the slots by `Arc`.
    fn drop(&mut self) {
        match slot_owner(self.word.load(Relaxed)) {
            // SAFETY: a callee that left has replied to every request that it received, so this one was not received. The
            // caller did not take it back either: then the call would not be in its table, and it would have marked the
            // slot.
            SlotOwner::Callee(_) => drop(unsafe { self.take_request() }),
            // SAFETY: a caller that left has marked the responses that it took, so it did not take this one.
            SlotOwner::Caller(_, FULL) => drop(unsafe { self.take_response() }),
            SlotOwner::Caller(..) => {}
        }
    }
}
