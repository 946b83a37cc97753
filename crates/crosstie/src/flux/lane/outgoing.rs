//! The caller's end of a lane: one node's calls to another.

use std::sync::atomic::Ordering::Relaxed;

use crosstie_protocol::lane::CallNumber;

use super::super::error::{CallError, Lost, NotCalled};
use super::node_state::NodeState;
use super::slot::{FULL, Slots, UNUSED};
use super::sync::Arc;
use crate::memory::prefetch;
use crate::ring::call_table::CallTable;
use crate::ring::lane;

/// Most slots that are prefetched together.
const MAX_PREFETCH: usize = 16;

/// The caller's end of a lane.
pub(in super::super) struct OutgoingLane<Req, Resp, Token> {
    pub(super) slots: Slots<Req, Resp>,
    /// A table of as many slots as the lane has.
    pub(super) calls: CallTable<Token>,
    pub(super) callee: Arc<NodeState>,
    pub(super) target: usize,
}

impl<Req, Resp, Token> OutgoingLane<Req, Resp, Token> {
    #[inline]
    pub(in super::super) fn call(&mut self, request: Req, token: Token) -> Result<(), CallError<Req, Token>> {
        let target = self.target;
        if self.callee.is_gone() {
            return Err(CallError { cause: NotCalled::NodeGone { target }, request, token });
        }
        let started = match self.calls.start(token) {
            Ok(started) => started,
            Err(token) => return Err(CallError { cause: NotCalled::Full { target }, request, token }),
        };
        // SAFETY: the table has as many slots as the lane.
        let slot = unsafe { self.slots.get_unchecked(started.slot) };
        // SAFETY: the call table had the slot as free: it was never used, or the response of its last call was taken.
        unsafe { slot.put_request(request) };
        lane::publish_request(&slot.word, started, FULL);
        if let Some(slot) = self.calls.slot_to_demote(started.slot) {
            prefetch::demote(self.slots.as_ptr().wrapping_add(slot));
        }
        self.callee.parker.notify();
        Ok(())
    }

    #[inline]
    pub(in super::super) fn in_flight(&self) -> usize {
        self.calls.in_flight()
    }

    /// Most calls that one poll ends.
    #[inline]
    pub(in super::super) fn most_per_poll(&self) -> usize {
        self.calls.most_per_poll()
    }

    /// Takes the response of a call that is in the call table, if the response is there.
    fn take(&mut self, slot: usize, call: CallNumber) -> Option<(Token, Resp)> {
        let entry = &self.slots[slot];
        if !lane::is_response(&entry.word, call, FULL) {
            return None;
        }
        let token = self.calls.finish(slot)?;
        // SAFETY: the word says that the response is there. It was not taken before, because then the call would not have
        // been in the call table.
        Some((token, unsafe { entry.take_response() }))
    }

    /// Takes the response that is expected next. Responses come in the order of the calls, if the target replies in that
    /// order.
    #[inline]
    pub(in super::super) fn take_expected(&mut self) -> Option<(Token, Resp)> {
        loop {
            let expected = self.calls.expect();
            // SAFETY: the table has as many slots as the lane.
            let entry = unsafe { self.slots.get_unchecked(expected.slot()) };
            // The word of a slot that no call uses is the response to the last call that did.
            if lane::is_response(&entry.word, expected.call(), FULL)
                && let Some(token) = expected.finish()
            {
                // SAFETY: as in `take`.
                return Some((token, unsafe { entry.take_response() }));
            }
            if !self.calls.expect_other() {
                return None;
            }
        }
    }

    /// If the response that is expected next is there, prefetches the cache lines of that slot and those after it for writing. The caller
    /// is about to read them and soon after to write them: one request to the callee's core instead of two.
    #[inline]
    pub(in super::super) fn prefetch(&mut self, count: usize) {
        let expected = self.calls.expect();
        let (slot, count) = (expected.slot(), count.min(MAX_PREFETCH));
        if !lane::is_response(&self.slots[slot].word, expected.call(), FULL) {
            return;
        }
        let (to_end, from_start) = (self.slots[slot..].iter(), self.slots[..slot].iter());
        let left = count.saturating_sub(to_end.len());
        to_end.take(count).for_each(|slot| prefetch::for_write(slot));
        from_start.take(left).for_each(|slot| prefetch::for_write(slot));
    }

    /// To be called when [`take_expected`](Self::take_expected) returned None, or as often as its caller wanted; `found` says whether it
    /// returned any response before. Returns whether to call [`take_out_of_order`](Self::take_out_of_order) now.
    #[inline]
    pub(in super::super) fn note_end(&mut self, found: bool, missed: bool) -> bool {
        if found {
            self.calls.forget_misses();
        }
        missed && self.calls.note_miss()
    }

    /// Takes the responses that came out of order.
    #[cold]
    pub(in super::super) fn take_out_of_order(&mut self, mut each: impl FnMut(Token, Resp)) {
        let slots = self.slots.len();
        let first = self.calls.expected().map_or(0, |(slot, _)| slot);
        for slot in (first..slots).chain(0..first) {
            if let Some(call) = self.calls.call_in(slot)
                && let Some((token, response)) = self.take(slot, call)
            {
                self.calls.scan_soon();
                each(token, response);
            }
        }
    }

    /// Whether the response that is expected next is there.
    #[inline]
    pub(in super::super) fn has_expected_response(&self) -> bool {
        self.calls.expected().is_some_and(|(slot, call)| self.has_response(slot, call))
    }

    /// Whether any response is there.
    pub(in super::super) fn has_any_response(&self) -> bool {
        self.calls.iter().any(|(slot, call)| self.has_response(slot, call))
    }

    #[inline]
    fn has_response(&self, slot: usize, call: CallNumber) -> bool {
        lane::is_response(&self.slots[slot].word, call, FULL)
    }

    /// If the callee has left: ends the calls that it will not reply to. Responses that are there stay there.
    pub(in super::super) fn take_lost(&mut self, mut each: impl FnMut(Lost<Req, Token>)) {
        if !self.callee.is_gone() {
            return;
        }
        for slot in 0..self.slots.len() {
            let Some(call) = self.calls.call_in(slot) else { continue };
            let entry = &self.slots[slot];
            let request = match lane::response_len(&entry.word, call, Some(FULL)) {
                Some(FULL) => continue,
                Some(_) => None,
                // SAFETY: the callee has left, which `is_gone` saw by Acquire. If it had received the request, it would
                // have written a response before. So the request is there, and the callee does not access the lane any
                // more.
                None => Some(unsafe { entry.take_request() }),
            };
            if let Some(token) = self.calls.finish(slot) {
                each(Lost { target: self.target, token, request });
            }
        }
    }
}

impl<Req, Resp, Token> Drop for OutgoingLane<Req, Resp, Token> {
    fn drop(&mut self) {
        // First update all words, because the `drop` of a response may panic. Relaxed: the next reader of these words is
        // `Slot::drop`, which the `Arc` orders after this.
        for (index, slot) in self.slots.iter().enumerate() {
            if self.calls.call_in(index).is_none() {
                slot.word.store(UNUSED, Relaxed);
            }
        }
        for slot in 0..self.slots.len() {
            if let Some(call) = self.calls.call_in(slot)
                && let Some(taken) = self.take(slot, call)
            {
                self.slots[slot].word.store(UNUSED, Relaxed);
                drop(taken);
            }
        }
    }
}
