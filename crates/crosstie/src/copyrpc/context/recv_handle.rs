//! A received request, as the application keeps it.

use std::fmt;
use std::rc::Rc;

use crosstie_protocol::copyrpc::{BulkMemory, ReplyToken, RetainedSpace};

use super::ContextCore;
use crate::copyrpc::address::ConnectionId;
use crate::copyrpc::bulk_state::ReadyRequest;
use crate::copyrpc::connection::ConnectionCore;
use crate::copyrpc::error::{Failure, NoReply, NotReplied, ReplyError};
use crate::copyrpc::payload::{Payload, ShortPayload};
use crate::copyrpc::region_pool::PooledRegion;

/// A received request that the application keeps: a [`Request`](super::Request) that was deferred. Unless it is short and came alone, it
/// occupies its place in the ring, and the ring space behind it stays occupied, until the request is answered,
/// [detached](RecvHandle::detach) or dropped.
///
/// A request that is dropped without a reply is answered with an empty payload.
#[must_use = "the peer waits for a response"]
pub struct RecvHandle<U> {
    pub(super) connection: Rc<ConnectionCore<U>>,
    core: Rc<ContextCore<U>>,
    offset: u32,
    len: u32,
    /// Its place in the ring.
    space: Option<RetainedSpace>,
    reply_token: Option<ReplyToken>,
    body: Body,
}

/// Where the payload of a request is.
enum Body {
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
    /// Keeps the request that was received last.
    pub(super) fn keep(
        connection: &Rc<ConnectionCore<U>>,
        core: &Rc<ContextCore<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    ) -> RecvHandle<U> {
        let (connection, core, len) = (connection.clone(), core.clone(), payload.len() as u32);
        let (offset, space, body) = match connection.retain() {
            Some(space) => (payload.offset_in(&connection.ring) as u32, Some(space), Body::Ring),
            None => {
                let mut copy = ShortPayload::default();
                payload.copy_to(&mut copy);
                (0, None, Body::Copy(copy))
            }
        };
        RecvHandle { connection, core, offset, len, space, reply_token, body }
    }

    /// A request that was queued: a bulk request, or one behind a bulk request.
    pub(super) fn from_queued(
        connection: Rc<ConnectionCore<U>>,
        core: Rc<ContextCore<U>>,
        request: ReadyRequest,
    ) -> RecvHandle<U> {
        let ReadyRequest { offset, len, space, region, response_buffer, reply_token } = request;
        // Rings and bulk payloads are shorter than 4 GiB.
        let (offset, len) = (offset as u32, len as u32);
        let (reply_token, body) = (Some(reply_token), Body::Bulk { region, response_buffer });
        RecvHandle { connection, core, offset, len, space, reply_token, body }
    }

    /// The connection that the request arrived through.
    pub fn connection(&self) -> ConnectionId {
        ConnectionId(self.connection.key)
    }

    /// The payload. Empty after [`detach`](RecvHandle::detach).
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        let (offset, len) = (self.offset as usize, self.len as usize);
        match &self.body {
            Body::Bulk { region: Some(region), .. } => Payload::new(region.mr(), offset, len),
            Body::Copy(copy) => Payload::from_copy(copy, len),
            _ if self.space.is_none() => Payload::EMPTY,
            _ => Payload::in_ring(&self.connection.ring, offset, len),
        }
    }

    /// Whether no response was sent.
    pub(in crate::copyrpc) fn needs_reply(&self) -> bool {
        self.reply_token.is_some()
    }

    /// The longest response that the caller allows.
    pub fn response_limit(&self) -> u64 {
        let buffer = self.response_buffer().map_or(0, |buffer| u64::from(buffer.len));
        self.reply_token.as_ref().map_or(0, |token| token.max_len().max(buffer))
    }

    /// Where a long response goes, if the call named a buffer.
    fn response_buffer(&self) -> Option<BulkMemory> {
        match self.body {
            Body::Bulk { response_buffer, .. } => response_buffer.filter(|buffer| buffer.len > 0),
            _ => None,
        }
    }

    /// Releases the payload and its ring space. The reply can follow later. For requests that take long to answer.
    pub fn detach(&mut self) {
        let space = self.space.take();
        let region = match &mut self.body {
            Body::Ring => None,
            Body::Copy(_) => {
                self.len = 0;
                None
            }
            Body::Bulk { region, .. } => region.take(),
        };
        if space.is_some() || region.is_some() {
            space.into_iter().for_each(|space| self.connection.release(space));
            region.into_iter().for_each(|region| self.connection.put_back_request(region));
            self.core.schedule_flush(&self.connection);
        }
    }

    /// Sends the response. Never waits. If the response is too long, the error has the request.
    ///
    /// A response that is too long for the ring is copied to bulk memory, and the following polls write it to the caller. While
    /// that memory is in use, the error has the request as well ([`NotReplied::NoBulkMemory`]): poll and reply again. The
    /// memory becomes free by polling alone, whatever the applications do.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), ReplyError<U>> {
        let replied = self.reply_in_place(payload);
        replied.map_err(|cause| ReplyError { cause, request: self.needs_reply().then_some(self) })
    }

    /// As [`reply`](RecvHandle::reply). The request stays where it is; if it still [needs](RecvHandle::needs_reply) a reply after an error, it
    /// can be answered again.
    #[inline]
    pub(in crate::copyrpc) fn reply_in_place(&mut self, payload: &[u8]) -> Result<(), NotReplied> {
        let Some(token) = self.reply_token.take() else { return Err(Failure::Closed.into()) };
        let mut replied = self.core.reply(&self.connection, token, &mut self.space, payload);
        if let (Err(NoReply { cause: NotReplied::TooLong { .. }, token }), Some(buffer)) =
            (&mut replied, self.response_buffer())
            && let Some(token) = token.take()
        {
            replied = self.core.reply_bulk(&self.connection, token, buffer, payload);
        }
        replied.map_err(|NoReply { cause, token }| {
            self.reply_token = token;
            cause
        })
    }
}

impl<U> ContextCore<U> {
    /// Sends a response, and releases the ring space of its request. An error has the token, if a reply is still possible.
    #[inline(always)]
    pub(super) fn reply(
        &self,
        connection: &Rc<ConnectionCore<U>>,
        token: ReplyToken,
        space: &mut Option<RetainedSpace>,
        payload: &[u8],
    ) -> Result<(), NoReply> {
        let timing = connection.reply(token, space, payload)?;
        self.counters.replies.add(1);
        self.flush_after_write(connection, timing);
        Ok(())
    }

    /// Starts a response in the buffer that the call named.
    fn reply_bulk(
        &self,
        connection: &Rc<ConnectionCore<U>>,
        token: ReplyToken,
        buffer: BulkMemory,
        payload: &[u8],
    ) -> Result<(), NoReply> {
        let replied = connection.reply_bulk(token, buffer, payload);
        self.counters.replies.add(usize::from(replied.is_ok()));
        self.counters.bulk_replies.add(usize::from(replied.is_ok()));
        // Also after an error: completed WRITEs return memory, and a flush lets the poll look for their completions.
        self.schedule_flush(connection);
        replied
    }

    /// Answers a request with an empty payload: without a response its credit would be lost. A connection that has ended needs none.
    #[cold]
    #[inline(never)]
    pub(super) fn reply_nothing(&self, connection: &Rc<ConnectionCore<U>>, token: ReplyToken) {
        if connection.reply(token, &mut None, &[]).is_ok() {
            self.counters.unanswered.add(1);
            self.schedule_flush(connection);
        }
    }
}

impl<U> fmt::Debug for RecvHandle<U> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RecvHandle").field("connection", &self.connection()).finish_non_exhaustive()
    }
}

impl<U> Drop for RecvHandle<U> {
    fn drop(&mut self) {
        self.detach();
        if let Some(token) = self.reply_token.take() {
            self.core.reply_nothing(&self.connection, token);
        }
    }
}
