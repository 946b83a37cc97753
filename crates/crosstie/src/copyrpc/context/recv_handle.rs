//! A received request, as the application holds it.

use std::rc::Rc;

use crosstie_protocol::copyrpc::{BulkMemory, HeldSpace, ReplyToken};

use super::ContextCore;
use crate::copyrpc::address::EndpointId;
use crate::copyrpc::bulk_state::ReadyRequest;
use crate::copyrpc::connection::Connection;
use crate::copyrpc::error::{Failure, NotReplied};
use crate::copyrpc::flush_policy::SendTiming;
use crate::copyrpc::payload::Payload;
use crate::copyrpc::region_pool::PooledRegion;

/// A received request. Its payload stays in the ring (or in bulk memory), and the ring space behind it stays occupied, until the
/// request is answered, [detached](RecvHandle::detach) or dropped.
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
    /// Where the payload is, if it is not in the ring.
    region: Option<PooledRegion>,
    /// Where a long response goes; length zero if the call named no buffer.
    response_buffer: BulkMemory,
}

const NO_BUFFER: BulkMemory = BulkMemory { addr: 0, len: 0, rkey: 0 };

impl<U> RecvHandle<U> {
    /// A short request, in the ring.
    pub(super) fn new(
        connection: Rc<Connection<U>>,
        core: Rc<ContextCore<U>>,
        offset: usize,
        len: usize,
        space: HeldSpace,
        reply_token: ReplyToken,
    ) -> RecvHandle<U> {
        // Rings and bulk payloads are shorter than 4 GiB.
        let (offset, len) = (offset as u32, len as u32);
        let (space, reply_token) = (Some(space), Some(reply_token));
        RecvHandle {
            connection,
            core,
            offset,
            len,
            space,
            reply_token,
            region: None,
            response_buffer: NO_BUFFER,
        }
    }

    /// A request that was queued: a bulk request, or one behind a bulk request.
    pub(super) fn from_queued(
        connection: Rc<Connection<U>>,
        core: Rc<ContextCore<U>>,
        request: ReadyRequest,
    ) -> RecvHandle<U> {
        let ReadyRequest { offset, len, space, region, response_buffer, reply_token } = request;
        let (offset, len) = (offset as u32, len as u32);
        let (reply_token, response_buffer) = (Some(reply_token), response_buffer.unwrap_or(NO_BUFFER));
        RecvHandle { connection, core, offset, len, space, reply_token, region, response_buffer }
    }

    /// The endpoint that the request arrived through.
    #[inline]
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.connection.key)
    }

    /// The payload. Empty after [`detach`](RecvHandle::detach).
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        let (memory, is_there) = match &self.region {
            Some(region) => (region.mr(), true),
            None => (&self.connection.ring, self.space.is_some()),
        };
        Payload::new(memory, self.offset as usize, if is_there { self.len as usize } else { 0 })
    }

    /// The longest response that the caller allows.
    pub fn response_limit(&self) -> u64 {
        let buffer = u64::from(self.response_buffer.len);
        self.reply_token.as_ref().map_or(0, |token| token.max_len().max(buffer))
    }

    /// Releases the payload and its ring space. The reply can follow later. For requests that take long to answer.
    pub fn detach(&mut self) {
        if let Some(space) = self.space.take() {
            self.connection.release(space);
            self.core.schedule_flush(&self.connection);
        }
        if let Some(region) = self.region.take() {
            self.connection.put_back_request(region);
            self.core.schedule_flush(&self.connection);
        }
    }

    /// Sends the response. Never waits. If the response is too long, the request is returned.
    ///
    /// A response that is too long for the ring is copied to bulk memory, and the following polls write it to the caller. While
    /// that memory is in use, the request is returned as well ([`NotReplied::NoBulkMemory`]): poll and reply again. The
    /// memory becomes free by polling alone, whatever the applications do.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let Some(token) = self.reply_token.take() else { return Err((Failure::Closed.into(), None)) };
        let replied =
            self.connection.reply(token, &mut self.space, payload, &mut self.core.counters.borrow_mut());
        let replied = match replied {
            Err((NotReplied::TooLong { .. }, Some(token))) if self.response_buffer.len > 0 => {
                self.reply_bulk(token, payload)
            }
            replied => replied,
        };
        match replied {
            Ok(timing) => {
                self.core.counters.borrow_mut().replies += 1;
                self.core.flush_after_write(&self.connection, timing);
                Ok(())
            }
            Err((cause, None)) => Err((cause, None)),
            Err((cause, token)) => {
                self.reply_token = token;
                Err((cause, Some(self)))
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn reply_bulk(
        &self,
        token: ReplyToken,
        payload: &[u8],
    ) -> Result<SendTiming, (NotReplied, Option<ReplyToken>)> {
        let replied = self.connection.reply_bulk(token, self.response_buffer, payload);
        match replied {
            Ok(()) => self.core.counters.borrow_mut().bulk_replies += 1,
            // Completed WRITEs return memory. A flush lets the poll look for their completions.
            Err(_) => self.core.schedule_flush(&self.connection),
        }
        replied.map(|()| SendTiming::WithNextPoll)
    }
}

impl<U> Drop for RecvHandle<U> {
    fn drop(&mut self) {
        self.detach();
        if let Some(token) = self.reply_token.take() {
            // Without a response its credit would be lost. A connection that has ended needs none.
            let mut counters = self.core.counters.borrow_mut();
            if self.connection.reply(token, &mut None, &[], &mut counters).is_ok() {
                counters.unanswered += 1;
                self.core.schedule_flush(&self.connection);
            }
        }
    }
}
