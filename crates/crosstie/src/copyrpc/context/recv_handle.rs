//! A received request, as the application holds it.

use std::collections::VecDeque;
use std::rc::Rc;

use crosstie_protocol::copyrpc::{BulkMemory, HeldSpace, ReplyToken};

use super::ContextCore;
use crate::copyrpc::address::EndpointId;
use crate::copyrpc::bulk_state::ReadyRequest;
use crate::copyrpc::connection::Connection;
use crate::copyrpc::error::{Failure, NotReplied};
use crate::copyrpc::flush_policy::SendTiming;
use crate::copyrpc::payload::{Payload, ShortPayload};
use crate::copyrpc::region_pool::PooledRegion;

/// A received request. Unless it is short and came alone, it occupies its place in the ring, and the ring space behind it stays occupied,
/// until the request is answered, [detached](RecvHandle::detach) or dropped.
///
/// A request that is dropped without a reply is answered with an empty payload.
#[must_use = "the peer waits for a response"]
pub struct RecvHandle<U> {
    connection: Rc<Connection<U>>,
    core: Rc<ContextCore<U>>,
    offset: u32,
    len: u32,
    space: Option<HeldSpace>,
    reply_token: Option<ReplyToken>,
    body: RequestBody,
}

/// A short request in the ring, as it waits for [`Context::recv`](super::Context::recv). It has all that a [`RecvHandle`] is made of,
/// and is a third as long.
pub(super) struct RingRequest<U> {
    pub(super) connection: Rc<Connection<U>>,
    /// Where the payload is in the ring.
    pub(super) offset: u32,
    pub(super) len: u32,
    /// `None`: the payload came with the completion, and waits in a queue of its own.
    pub(super) space: Option<HeldSpace>,
    pub(super) reply_token: ReplyToken,
}

const _: () = assert!(size_of::<Option<RingRequest<u64>>>() <= 32);

/// A short request whose payload came with its completion.
pub(super) struct CopiedRequest<U> {
    pub(super) connection: Rc<Connection<U>>,
    pub(super) len: u32,
    pub(super) reply_token: ReplyToken,
    pub(super) copy: ShortPayload,
}

/// Requests that wait for [`Context::recv`](super::Context::recv).
pub(super) struct RequestQueue<U> {
    /// The oldest one, if its payload came with its completion and no other was waiting then.
    first: Option<CopiedRequest<U>>,
    /// All others. `None` stands for the first of `others`.
    in_ring: RequestRing<U>,
    /// The payloads of requests that came with their completion, see [`RingRequest::space`].
    copies: VecDeque<ShortPayload>,
    /// Requests that may have bulk memory.
    others: VecDeque<RecvHandle<U>>,
}

impl<U> RequestQueue<U> {
    pub(super) fn new() -> RequestQueue<U> {
        RequestQueue {
            first: None,
            in_ring: RequestRing::new(),
            copies: VecDeque::with_capacity(64),
            others: VecDeque::with_capacity(64),
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none() && self.in_ring.is_empty()
    }

    /// Where the next request goes.
    #[inline(always)]
    pub(super) fn next_slot(&mut self) -> RequestSlot<'_, U> {
        self.in_ring.push_slot()
    }

    /// Adds a request whose payload came with its completion.
    #[inline(always)]
    pub(super) fn push_copied(
        &mut self,
        connection: &Rc<Connection<U>>,
        len: u32,
        reply_token: ReplyToken,
        copy: &ShortPayload,
    ) {
        if self.is_empty() {
            let (connection, copy) = (connection.clone(), *copy);
            // There is nothing to drop. The compiler does not know.
            std::mem::forget(self.first.replace(CopiedRequest { connection, len, reply_token, copy }));
        } else {
            self.push_copied_behind(connection, len, reply_token, copy);
        }
    }

    #[inline(never)]
    fn push_copied_behind(
        &mut self,
        connection: &Rc<Connection<U>>,
        len: u32,
        reply_token: ReplyToken,
        copy: &ShortPayload,
    ) {
        self.copies.push_back(*copy);
        let connection = connection.clone();
        self.next_slot().fill(RingRequest { connection, offset: 0, len, space: None, reply_token });
    }

    pub(super) fn push_other(&mut self, request: RecvHandle<U>) {
        self.others.push_back(request);
        self.in_ring.push_slot();
    }

    /// Takes the oldest request, if it is [`first`](RequestQueue::first).
    #[inline(always)]
    pub(super) fn take_first(&mut self) -> Option<CopiedRequest<U>> {
        self.first.take()
    }

    /// Takes the next request behind the first: `Err` if it is not a short request in the ring. Such a one comes from
    /// [`take_behind`](RequestQueue::take_behind).
    #[inline(always)]
    pub(super) fn take_in_ring(&mut self) -> Option<Result<RingRequest<U>, Option<RingRequest<U>>>> {
        Some(match self.in_ring.pop()? {
            Some(request) if request.space.is_some() => Ok(request),
            other => Err(other),
        })
    }

    /// Completes a request that is not in the ring.
    #[inline(never)]
    pub(super) fn take_behind(
        &mut self,
        request: Option<RingRequest<U>>,
        core: &Rc<ContextCore<U>>,
    ) -> Option<RecvHandle<U>> {
        let Some(RingRequest { connection, len, reply_token, .. }) = request else {
            return self.others.pop_front();
        };
        let copy = self.copies.pop_front().unwrap_or_default();
        Some(RecvHandle::with_copy(CopiedRequest { connection, len, reply_token, copy }, core))
    }
}

/// Where the payload of a request is.
// A word says which it is: a move copies it, and then the rest, which for a request in the ring was not stored a moment before. With a byte
// instead, the copy of the rest would span bytes that were, and wait for them.
#[repr(u64)]
enum RequestBody {
    Ring,
    /// A copy, which came with the completion.
    Copy(ShortPayload),
    /// The call needs bulk memory: for the request, whose payload is in the ring if there is no region; or for its response.
    Bulk {
        region: Option<PooledRegion>,
        response_buffer: Option<BulkMemory>,
    },
}

/// A queue of requests: less work per request than `VecDeque`. `None` stands for a request that waits elsewhere.
struct RequestRing<U> {
    /// A power of two.
    slots: Vec<Option<RingRequest<U>>>,
    /// The first request, and the end of the last one. They are never reduced.
    first: usize,
    end: usize,
}

impl<U> RequestRing<U> {
    fn new() -> RequestRing<U> {
        RequestRing { slots: empty_slots(1024), first: 0, end: 0 }
    }

    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Adds an empty slot.
    #[inline(always)]
    fn push_slot(&mut self) -> RequestSlot<'_, U> {
        if self.end.wrapping_sub(self.first) >= self.slots.len() {
            self.grow();
        }
        let at = self.end & (self.slots.len() - 1);
        self.end = self.end.wrapping_add(1);
        RequestSlot(&mut self.slots[at])
    }

    /// Takes the first slot.
    #[inline(always)]
    fn pop(&mut self) -> Option<Option<RingRequest<U>>> {
        if self.is_empty() {
            return None;
        }
        let at = self.first & (self.slots.len() - 1);
        self.first = self.first.wrapping_add(1);
        Some(self.slots[at].take())
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let mut slots = empty_slots(2 * self.slots.len());
        let mut end = 0;
        while let Some(slot) = self.pop() {
            slots[end] = slot;
            end += 1;
        }
        *self = RequestRing { slots, first: 0, end };
    }
}

fn empty_slots<U>(count: usize) -> Vec<Option<RingRequest<U>>> {
    std::iter::repeat_with(|| None).take(count).collect()
}

/// An empty slot of a [`RequestRing`].
pub(super) struct RequestSlot<'q, U>(&'q mut Option<RingRequest<U>>);

impl<U> RequestSlot<'_, U> {
    #[inline(always)]
    pub(super) fn fill(self, request: RingRequest<U>) {
        let former = self.0.replace(request);
        debug_assert!(former.is_none());
        // There is nothing to drop. The compiler does not know.
        std::mem::forget(former);
    }
}

impl<U> RecvHandle<U> {
    /// A short request.
    #[inline(always)]
    pub(super) fn new(request: RingRequest<U>, core: &Rc<ContextCore<U>>) -> RecvHandle<U> {
        let RingRequest { connection, offset, len, space, reply_token } = request;
        let (core, reply_token) = (core.clone(), Some(reply_token));
        RecvHandle { connection, core, offset, len, space, reply_token, body: RequestBody::Ring }
    }

    /// A short request, with a copy of its payload.
    #[inline(always)]
    pub(super) fn with_copy(request: CopiedRequest<U>, core: &Rc<ContextCore<U>>) -> RecvHandle<U> {
        let CopiedRequest { connection, len, reply_token, copy } = request;
        let (core, reply_token) = (core.clone(), Some(reply_token));
        let body = RequestBody::Copy(copy);
        RecvHandle { connection, core, offset: 0, len, space: None, reply_token, body }
    }

    /// A request that was lent, and is kept.
    pub(super) fn from_lent(
        connection: &Rc<Connection<U>>,
        core: &Rc<ContextCore<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    ) -> RecvHandle<U> {
        let (connection, core, len) = (connection.clone(), core.clone(), payload.len() as u32);
        let (offset, space, body) = match connection.hold() {
            Some(space) => (payload.offset_in(&connection.ring) as u32, Some(space), RequestBody::Ring),
            None => {
                let mut copy = ShortPayload::default();
                payload.copy_to(&mut copy);
                (0, None, RequestBody::Copy(copy))
            }
        };
        RecvHandle { connection, core, offset, len, space, reply_token, body }
    }

    /// A request that was queued: a bulk request, or one behind a bulk request.
    pub(super) fn from_queued(
        connection: Rc<Connection<U>>,
        core: Rc<ContextCore<U>>,
        request: ReadyRequest,
    ) -> RecvHandle<U> {
        let ReadyRequest { offset, len, space, region, response_buffer, reply_token } = request;
        // Rings and bulk payloads are shorter than 4 GiB.
        let (offset, len) = (offset as u32, len as u32);
        let (reply_token, body) = (Some(reply_token), RequestBody::Bulk { region, response_buffer });
        RecvHandle { connection, core, offset, len, space, reply_token, body }
    }

    /// Takes all that it has, and leaves nothing to be answered.
    pub(in crate::copyrpc) fn take(&mut self) -> RecvHandle<U> {
        RecvHandle {
            connection: self.connection.clone(),
            core: self.core.clone(),
            offset: self.offset,
            len: self.len,
            space: self.space.take(),
            reply_token: self.reply_token.take(),
            body: std::mem::replace(&mut self.body, RequestBody::Ring),
        }
    }

    pub(super) fn connection(&self) -> &Rc<Connection<U>> {
        &self.connection
    }

    /// The endpoint that the request arrived through.
    #[inline]
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.connection.key)
    }

    /// The payload. Empty after [`detach`](RecvHandle::detach).
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        let (offset, len) = (self.offset as usize, self.len as usize);
        match &self.body {
            RequestBody::Bulk { region: Some(region), .. } => Payload::new(region.mr(), offset, len),
            RequestBody::Copy(copy) => Payload::from_copy(copy, len),
            _ if self.space.is_none() => Payload::EMPTY,
            _ => Payload::in_ring(&self.connection.ring, offset, len),
        }
    }

    /// Whether no response was sent.
    #[inline]
    pub(in crate::copyrpc) fn needs_reply(&self) -> bool {
        self.reply_token.is_some()
    }

    /// The longest response that the caller allows.
    #[inline]
    pub fn response_limit(&self) -> u64 {
        let buffer = self.response_buffer().map_or(0, |buffer| u64::from(buffer.len));
        self.reply_token.as_ref().map_or(0, |token| token.max_len().max(buffer))
    }

    /// Releases the payload and its ring space. The reply can follow later. For requests that take long to answer.
    #[inline(always)]
    pub fn detach(&mut self) {
        if let Some(space) = self.space.take() {
            self.connection.release(space);
            self.core.schedule_flush(&self.connection);
        }
        match &mut self.body {
            RequestBody::Ring => {}
            RequestBody::Copy(_) => self.len = 0,
            RequestBody::Bulk { region, .. } => {
                if let Some(region) = region.take() {
                    self.connection.put_back_request(region);
                    self.core.schedule_flush(&self.connection);
                }
            }
        }
    }

    /// Sends the response. Never waits. If the response is too long, the request is returned.
    ///
    /// A response that is too long for the ring is copied to bulk memory, and the following polls write it to the caller. While
    /// that memory is in use, the request is returned as well ([`NotReplied::NoBulkMemory`]): poll and reply again. The
    /// memory becomes free by polling alone, whatever the applications do.
    #[inline(always)]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        match self.reply_in_place(payload) {
            Ok(()) => Ok(()),
            Err(cause) => {
                let can_reply_again = self.reply_token.is_some();
                Err((cause, can_reply_again.then_some(self)))
            }
        }
    }

    /// As [`reply`](RecvHandle::reply). The request stays where it is; if it has a reply token after an error, it can be
    /// answered again.
    #[inline(always)]
    pub(in crate::copyrpc) fn reply_in_place(&mut self, payload: &[u8]) -> Result<(), NotReplied> {
        let Some(token) = self.reply_token.take() else { return Err(Failure::Closed.into()) };
        match self.connection.reply(token, &mut self.space, payload, &self.core.counters) {
            Ok(timing) => {
                self.core.note_reply(&self.connection, timing);
                Ok(())
            }
            Err((cause, None)) => Err(cause),
            Err((cause, Some(token))) => self.reply_otherwise(cause, token, payload),
        }
    }

    /// Replies in the buffer that the call named, if the response is too long for the ring. Otherwise keeps the token.
    #[cold]
    #[inline(never)]
    fn reply_otherwise(
        &mut self,
        cause: NotReplied,
        token: ReplyToken,
        payload: &[u8],
    ) -> Result<(), NotReplied> {
        let replied = match (cause, self.response_buffer()) {
            (NotReplied::TooLong { .. }, Some(buffer)) => self.reply_bulk(token, buffer, payload),
            (cause, _) => Err((cause, Some(token))),
        };
        match replied {
            Ok(timing) => {
                self.core.note_reply(&self.connection, timing);
                Ok(())
            }
            Err((cause, token)) => {
                self.reply_token = token;
                Err(cause)
            }
        }
    }

    /// Gives back what the request still has: its payload, and the right to a reply.
    #[cold]
    #[inline(never)]
    fn give_back(&mut self) {
        self.detach();
        if let Some(token) = self.reply_token.take() {
            self.core.reply_nothing(&self.connection, token);
        }
    }

    /// Where a long response goes, if the call named a buffer.
    #[inline]
    fn response_buffer(&self) -> Option<BulkMemory> {
        match self.body {
            RequestBody::Bulk { response_buffer, .. } => response_buffer.filter(|buffer| buffer.len > 0),
            _ => None,
        }
    }

    fn reply_bulk(
        &self,
        token: ReplyToken,
        buffer: BulkMemory,
        payload: &[u8],
    ) -> Result<SendTiming, (NotReplied, Option<ReplyToken>)> {
        let replied = self.connection.reply_bulk(token, buffer, payload);
        match replied {
            Ok(()) => self.core.counters.borrow_mut().bulk_replies += 1,
            // Completed WRITEs return memory. A flush lets the poll look for their completions.
            Err(_) => self.core.schedule_flush(&self.connection),
        }
        replied.map(|()| SendTiming::WithNextPoll)
    }
}

impl<U> ContextCore<U> {
    /// Counts a reply, and sends it if it is time.
    #[inline(always)]
    pub(super) fn note_reply(&self, connection: &Rc<Connection<U>>, timing: SendTiming) {
        let replies = &self.counters.replies;
        replies.set(replies.get() + 1);
        self.flush_after_write(connection, timing);
    }

    /// Answers a request with an empty payload: without a response its credit would be lost. A connection that has ended needs none.
    #[cold]
    #[inline(never)]
    pub(super) fn reply_nothing(&self, connection: &Rc<Connection<U>>, token: ReplyToken) {
        if connection.reply(token, &mut None, &[], &self.counters).is_ok() {
            self.counters.borrow_mut().unanswered += 1;
            self.schedule_flush(connection);
        }
    }
}

impl<U> Drop for RecvHandle<U> {
    #[inline(always)]
    fn drop(&mut self) {
        // Usually the request was answered, and nothing is left to do.
        let is_bulk = matches!(self.body, RequestBody::Bulk { .. });
        if self.space.is_some() || self.reply_token.is_some() || is_bulk {
            self.give_back();
        }
    }
}
