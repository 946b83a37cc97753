//! The callee's end of all lanes that lead to a node: it receives requests from all callers in turn, and replies.

use core::fmt;
use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use crosstie_protocol::lane::{CallNumber, SlotOwner, slot_owner};

use super::super::error::{NotReplied, ReplyError};
use super::node_state::NodeState;
use super::slot::{EMPTY, FULL, Slots};
use super::sync::Arc;
use crate::memory::prefetch;
use crate::ring::lane::{self, Cursor, Next};
use crate::wait::{self, WaitStrategy};

/// Pauses of the processor after the last request of a burst. Checking again at once would take the cache line away from
/// the caller in the middle of its next request.
const PAUSES_AFTER_BURST: u32 = 4;
/// Most requests that are received from one caller in a row before the other callers are checked.
const MAX_BURST: u32 = 32;

/// The right to reply to one request, at any later time, with [`Node::reply`](super::super::Node::reply).
///
/// If a ticket is dropped, its call stays in flight until the node that received the request, or the one that called, is dropped.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the client waits for a response"]
pub struct Ticket {
    /// The key of the lane.
    key: u64,
    client: u32,
    slot: u32,
    call: CallNumber,
}

impl Ticket {
    /// The node that sent the request.
    #[inline]
    pub fn client(&self) -> usize {
        self.client as usize
    }
}

/// A request. Reply to it now, or [later](Request::defer).
///
/// A request that is dropped gets no response, as a [`Ticket`].
#[must_use = "the client waits for a response"]
pub struct Request<'n, Req, Resp> {
    message: Req,
    lane: &'n mut IncomingLane<Req, Resp>,
    client: u32,
    /// A request of `call` was received from this slot of the lane, and not replied to.
    slot: u32,
    call: CallNumber,
}

impl<Req, Resp> Request<'_, Req, Resp> {
    /// The message.
    #[inline]
    pub fn message(&self) -> &Req {
        &self.message
    }

    /// The node that sent the request.
    #[inline]
    pub fn client(&self) -> usize {
        self.client as usize
    }

    /// Sends the response. There is always room for it.
    ///
    /// # Errors
    /// `ClientGone` if the caller was dropped. The response is handed back.
    #[inline]
    pub fn reply(self, response: Resp) -> Result<(), ReplyError<Resp>> {
        self.reply_with(|_| response)
    }

    /// As [`reply`](Request::reply), with a response that is made of the message.
    #[inline]
    pub fn reply_with(self, response: impl FnOnce(Req) -> Resp) -> Result<(), ReplyError<Resp>> {
        let Request { message, lane, slot, call, .. } = self;
        let response = response(message);
        // SAFETY: a request of this call was received from this slot of the lane. There was no reply: that would have consumed this.
        let replied = unsafe { lane.reply(slot, call, response) };
        replied.map_err(|response| ReplyError { cause: NotReplied::ClientGone, response, ticket: None })
    }

    /// Turns the request into its message and a ticket, so that other requests can be received before the reply.
    #[inline]
    pub fn defer(self) -> (Req, Ticket) {
        let Request { message, lane, client, slot, call } = self;
        (message, Ticket { key: lane.key, client, slot, call })
    }
}

/// The callee's end of one lane.
pub(super) struct IncomingLane<Req, Resp> {
    pub(super) slots: Slots<Req, Resp>,
    pub(super) caller: Arc<NodeState>,
    /// Of a lane with this many slots.
    pub(super) cursor: Cursor,
    /// By slot, as many as `slots`: a request was received from it and not replied to.
    pub(super) unanswered: Box<[bool]>,
    /// Unique in the process: tells the tickets of this lane from those of others.
    pub(super) key: u64,
}

impl<Req, Resp> IncomingLane<Req, Resp> {
    #[inline]
    fn has_request(&self) -> bool {
        self.cursor.is_at(&self.slots[self.cursor.slot()].word)
    }

    /// Takes the next request: its message, slot and call.
    #[inline]
    fn take_next(&mut self) -> Option<(Req, u32, CallNumber)> {
        // SAFETY: the cursor is at a slot that exists.
        let entry = unsafe { self.slots.get_unchecked(self.cursor.slot()) };
        let Next::Request { slot, call, .. } = self.cursor.take(&entry.word, Some(FULL)) else { return None };
        // SAFETY: the cursor was at this slot, and there are as many marks as slots.
        unsafe { *self.unanswered.get_unchecked_mut(slot) = true };
        // SAFETY: the word says that the request is there. It was not received before, because the cursor passes every call
        // once.
        let message = unsafe { entry.take_request() };
        Some((message, slot as u32, call))
    }

    /// Writes the response to a call, unless its caller is gone.
    ///
    /// # Safety
    /// A request of this call was received from this slot, and not replied to.
    #[inline]
    unsafe fn reply(&mut self, slot: u32, call: CallNumber, response: Resp) -> Result<(), Resp> {
        if self.caller.is_gone() {
            return Err(response);
        }
        let slot = slot as usize;
        // SAFETY: a request was received from the slot, so it exists.
        let entry = unsafe { self.slots.get_unchecked(slot) };
        // SAFETY: there are as many marks as slots.
        unsafe { *self.unanswered.get_unchecked_mut(slot) = false };
        // SAFETY: the request was received and there was no reply yet, so the slot holds nothing, and we own it.
        unsafe { entry.put_response(response) };
        lane::publish_response(&entry.word, call, FULL);
        // With several calls in flight, the caller gets the line sooner from the caches that all cores share. A caller with one
        // call at a time polls the line.
        if self.slots.len() > 1 {
            prefetch::demote(&raw const entry.word);
        }
        self.caller.parker.notify();
        Ok(())
    }
}

/// The callee's end of all lanes that lead to a node.
pub(in super::super) struct IncomingLanes<Req, Resp> {
    /// By caller.
    pub(super) lanes: Box<[IncomingLane<Req, Resp>]>,
    pub(super) node_states: Box<[Arc<NodeState>]>,
    pub(super) own_id: usize,
    /// The lane that was received from last.
    pub(super) current: usize,
    /// Requests that may still be received from it in a row; 0 after a check found no request.
    pub(super) left_in_burst: u32,
    /// Whether requests were received since the last check that found none.
    pub(super) found_requests: bool,
    /// Departures of nodes that have been handled.
    pub(super) handled_departures: u32,
}

impl<Req, Resp> IncomingLanes<Req, Resp> {
    #[inline]
    pub(in super::super) fn receive(&mut self) -> Option<Request<'_, Req, Resp>> {
        let (message, slot, call) = self.take_next()?;
        let client = self.current;
        Some(Request { message, lane: &mut self.lanes[client], client: client as u32, slot, call })
    }

    /// Takes the next request of any caller, and makes its lane the current one.
    #[inline]
    fn take_next(&mut self) -> Option<(Req, u32, CallNumber)> {
        if self.left_in_burst > 0
            && let Some(taken) = self.lanes[self.current].take_next()
        {
            self.left_in_burst -= 1;
            return Some(taken);
        }
        self.take_from_others()
    }

    #[inline]
    fn take_from_others(&mut self) -> Option<(Req, u32, CallNumber)> {
        // A lane whose burst is over is checked last; a lane that was just found empty is not checked again.
        let lanes = self.lanes.len();
        let checks = lanes - usize::from(self.left_in_burst > 0);
        for _ in 0..checks {
            self.current = if self.current + 1 < lanes { self.current + 1 } else { 0 };
            if let Some(taken) = self.lanes[self.current].take_next() {
                self.left_in_burst = MAX_BURST - 1;
                self.found_requests = true;
                return Some(taken);
            }
        }
        self.left_in_burst = 0;
        if core::mem::take(&mut self.found_requests) {
            for _ in 0..PAUSES_AFTER_BURST {
                core::hint::spin_loop();
            }
        }
        None
    }

    #[inline]
    pub(in super::super) fn reply(&mut self, ticket: Ticket, response: Resp) -> Result<(), ReplyError<Resp>> {
        let lane = match self.lanes.get_mut(ticket.client()) {
            Some(lane) if lane.key == ticket.key => lane,
            _ => return Err(ReplyError { cause: NotReplied::WrongNode, response, ticket: Some(ticket) }),
        };
        // SAFETY: the ticket has the key of this lane, so its request was received from this slot of it. There is one ticket for each
        // request, which is consumed here, so there was no reply yet.
        let replied = unsafe { lane.reply(ticket.slot, ticket.call, response) };
        replied.map_err(|response| ReplyError { cause: NotReplied::ClientGone, response, ticket: None })
    }

    /// Whether a request is there.
    #[inline]
    pub(in super::super) fn has_request(&self) -> bool {
        self.lanes.iter().any(IncomingLane::has_request)
    }

    /// The number of nodes that have left, if it differs from the number that was
    /// [handled](Self::set_handled_departures).
    #[inline]
    pub(in super::super) fn unhandled_departures(&self) -> Option<u32> {
        // Acquire, partner: the Release add in `leave`. A thread that sees the count sees that the node is gone.
        let count = self.node_states[self.own_id].departures.load(Acquire);
        (count != self.handled_departures).then_some(count)
    }

    pub(in super::super) fn set_handled_departures(&mut self, departures: u32) {
        self.handled_departures = departures;
    }

    pub(in super::super) fn is_gone(&self, node: usize) -> bool {
        self.node_states[node].is_gone()
    }

    /// Waits until `ready` returns true. Every thread that publishes something for this node notifies its parker.
    pub(in super::super) fn wait(
        &self,
        strategy: WaitStrategy,
        deadline: Option<std::time::Instant>,
        ready: impl FnMut() -> bool,
    ) -> bool {
        wait::wait_until(self.parker(), strategy, deadline, ready)
    }

    /// The parker of this node.
    pub(in super::super) fn parker(&self) -> &wait::Parker {
        &self.node_states[self.own_id].parker
    }

    /// Stops receiving and replying, and tells the other nodes. `order` is Release, except in a test.
    pub(super) fn leave(&mut self, order: Ordering) {
        for lane in &mut self.lanes {
            for (slot, unanswered) in lane.slots.iter().zip(&mut lane.unanswered) {
                // Relaxed: we have received from this slot, so we have seen its word, and we own it.
                if core::mem::take(unanswered)
                    && let SlotOwner::Callee(call) = slot_owner(slot.word.load(Relaxed))
                {
                    lane::publish_response(&slot.word, call, EMPTY);
                }
            }
        }
        // Release, partner: the Acquire load in `NodeState::is_gone`. A caller that sees it sees every response that there
        // will ever be, and may take back the requests without one.
        self.node_states[self.own_id].gone.store(1, order);
        for node in &self.node_states[..] {
            // Release, partner: the Acquire load in `unhandled_departures`.
            node.departures.fetch_add(1, Release);
            node.parker.wake();
        }
    }
}

impl<Req: fmt::Debug, Resp> fmt::Debug for Request<'_, Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("message", &self.message)
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl<Req, Resp> Drop for IncomingLanes<Req, Resp> {
    fn drop(&mut self) {
        self.leave(Release);
    }
}
