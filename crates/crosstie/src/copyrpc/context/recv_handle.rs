//! A received request, as the application holds it.

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

/// A received request. It occupies its place in the ring, and the ring space behind it stays occupied, until the request is answered,
/// [detached](RecvHandle::detach) or dropped.
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

/// Where the payload of a request is.
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

impl<U> RecvHandle<U> {
    /// A short request, in the ring. `copy` is a copy of its payload, if there is one already.
    pub(super) fn new(
        connection: Rc<Connection<U>>,
        core: Rc<ContextCore<U>>,
        offset: usize,
        len: usize,
        space: HeldSpace,
        reply_token: ReplyToken,
        copy: Option<ShortPayload>,
    ) -> RecvHandle<U> {
        // Rings and bulk payloads are shorter than 4 GiB.
        let (offset, len) = (offset as u32, len as u32);
        let (space, reply_token) = (Some(space), Some(reply_token));
        let body = copy.map_or(RequestBody::Ring, RequestBody::Copy);
        RecvHandle { connection, core, offset, len, space, reply_token, body }
    }

    /// A request that was queued: a bulk request, or one behind a bulk request.
    pub(super) fn from_queued(
        connection: Rc<Connection<U>>,
        core: Rc<ContextCore<U>>,
        request: ReadyRequest,
    ) -> RecvHandle<U> {
        let ReadyRequest { offset, len, space, region, response_buffer, reply_token } = request;
        let (offset, len) = (offset as u32, len as u32);
        let (reply_token, body) = (Some(reply_token), RequestBody::Bulk { region, response_buffer });
        RecvHandle { connection, core, offset, len, space, reply_token, body }
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
            _ if self.space.is_none() => Payload::new(&self.connection.ring, offset, 0),
            RequestBody::Copy(copy) => Payload::from_copy(copy, len),
            _ => Payload::new(&self.connection.ring, offset, len),
        }
    }

    /// The longest response that the caller allows.
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
        if let RequestBody::Bulk { region, .. } = &mut self.body
            && let Some(region) = region.take()
        {
            self.connection.put_back_request(region);
            self.core.schedule_flush(&self.connection);
        }
    }

    /// Sends the response. Never waits. If the response is too long, the request is returned.
    ///
    /// A response that is too long for the ring is copied to bulk memory, and the following polls write it to the caller. While
    /// that memory is in use, the request is returned as well ([`NotReplied::NoBulkMemory`]): poll and reply again. The
    /// memory becomes free by polling alone, whatever the applications do.
    #[inline(always)]
    #[expect(clippy::result_large_err, reason = "the request is returned, without an allocation")]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let Some(token) = self.reply_token.take() else { return Err((Failure::Closed.into(), None)) };
        let replied =
            self.connection.reply(token, &mut self.space, payload, &mut self.core.counters.borrow_mut());
        match replied {
            Ok(timing) => {
                self.note_reply(timing);
                Ok(())
            }
            Err((cause, None)) => Err((cause, None)),
            Err((cause, Some(token))) => self.reply_otherwise(cause, token, payload),
        }
    }

    #[inline(always)]
    fn note_reply(&self, timing: SendTiming) {
        self.core.counters.borrow_mut().replies += 1;
        self.core.flush_after_write(&self.connection, timing);
    }

    /// Replies in the buffer that the call named, if the response is too long for the ring. Otherwise returns the request.
    #[cold]
    #[inline(never)]
    #[expect(clippy::result_large_err, reason = "the request is returned, without an allocation")]
    fn reply_otherwise(
        mut self,
        cause: NotReplied,
        token: ReplyToken,
        payload: &[u8],
    ) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let replied = match (cause, self.response_buffer()) {
            (NotReplied::TooLong { .. }, Some(buffer)) => self.reply_bulk(token, buffer, payload),
            (cause, _) => Err((cause, Some(token))),
        };
        match replied {
            Ok(timing) => {
                self.note_reply(timing);
                Ok(())
            }
            Err((cause, None)) => Err((cause, None)),
            Err((cause, token)) => {
                self.reply_token = token;
                Err((cause, Some(self)))
            }
        }
    }

    /// Without a response its credit would be lost. A connection that has ended needs none.
    #[cold]
    #[inline(never)]
    fn reply_nothing(&self, token: ReplyToken) {
        let mut counters = self.core.counters.borrow_mut();
        if self.connection.reply(token, &mut None, &[], &mut counters).is_ok() {
            counters.unanswered += 1;
            self.core.schedule_flush(&self.connection);
        }
    }

    /// Where a long response goes, if the call named a buffer.
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

impl<U> Drop for RecvHandle<U> {
    #[inline]
    fn drop(&mut self) {
        self.detach();
        if let Some(token) = self.reply_token.take() {
            self.reply_nothing(token);
        }
    }
}
