//! A request as a handler gets it, and what a poll does with what it receives.

use std::rc::Rc;

use crosstie_protocol::copyrpc::ReplyToken;

use super::{ContextCore, RecvHandle};
use crate::copyrpc::address::ConnectionId;
use crate::copyrpc::connection::ConnectionCore;
use crate::copyrpc::error::{CallFailed, Failure, NoReply, NotReplied, ReplyError};
use crate::copyrpc::payload::Payload;
use crate::copyrpc::receive_policy::MAX_REQUESTS;

/// A request in the handler of [`Context::serve`](super::Context::serve), which answers it in place, or [keeps](Request::defer) it.
///
/// A request that is dropped without a reply is answered with an empty payload.
#[must_use = "the peer waits for a response"]
pub struct Request<'c, U> {
    core: &'c Rc<ContextCore<U>>,
    connection: &'c Rc<ConnectionCore<U>>,
    payload: Payload<'c>,
    reply_token: Option<ReplyToken>,
    /// The request, if it has waited for the handler, for example until its bulk payload had arrived. Payload and token are here then.
    deferred: &'c mut Option<RecvHandle<U>>,
}

impl<U> Request<'_, U> {
    /// The connection that the request arrived through.
    #[inline]
    pub fn connection(&self) -> ConnectionId {
        ConnectionId(self.connection.key)
    }

    /// The payload.
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        match &self.reply_token {
            Some(_) => self.payload,
            None => deferred_data(self.deferred),
        }
    }

    /// The longest response that the caller allows.
    #[inline]
    pub fn response_limit(&self) -> u64 {
        match &self.reply_token {
            Some(token) => token.max_len(),
            None => self.deferred.as_ref().map_or(0, RecvHandle::response_limit),
        }
    }

    /// Keeps the request, so that it can be answered after the handler has returned.
    pub fn defer(mut self) -> RecvHandle<U> {
        self.defer_in_place()
    }

    /// As [`defer`](Request::defer). Leaves nothing to be answered.
    #[inline(never)]
    pub(in crate::copyrpc) fn defer_in_place(&mut self) -> RecvHandle<U> {
        let (connection, core, token) = (self.connection, self.core, self.reply_token.take());
        self.deferred.take().unwrap_or_else(|| RecvHandle::keep(connection, core, self.payload, token))
    }

    /// Sends the response, as [`RecvHandle::reply`] does.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), ReplyError<U>> {
        match self.reply_in_place(payload) {
            Ok(()) => Ok(()),
            Err(cause) => Err(self.into_error(cause)),
        }
    }

    #[cold]
    #[inline(never)]
    fn into_error(self, cause: NotReplied) -> ReplyError<U> {
        ReplyError { cause, request: self.needs_reply().then(|| self.defer()) }
    }

    /// As [`reply`](Request::reply). If the request still [needs](Request::needs_reply) a reply after an error, it can be answered again.
    #[inline(always)]
    pub(in crate::copyrpc) fn reply_in_place(&mut self, payload: &[u8]) -> Result<(), NotReplied> {
        let Some(token) = self.reply_token.take() else { return reply_deferred(self.deferred, payload) };
        // Its ring space is freed when the poll continues.
        match self.core.reply(self.connection, token, &mut None, payload) {
            Ok(()) => Ok(()),
            Err(NoReply { cause, token }) => {
                self.reply_token = token;
                Err(cause)
            }
        }
    }

    /// Whether no response was sent.
    #[inline]
    pub(in crate::copyrpc) fn needs_reply(&self) -> bool {
        self.reply_token.is_some() || self.deferred.as_ref().is_some_and(RecvHandle::needs_reply)
    }

    /// Releases memory that a long response may need. The payload is empty afterwards, if it was there.
    #[inline]
    pub(in crate::copyrpc) fn detach_bulk(&mut self) {
        if self.reply_token.is_none()
            && let Some(request) = self.deferred
        {
            request.detach();
        }
    }
}

#[inline(never)]
fn deferred_data<U>(deferred: &Option<RecvHandle<U>>) -> Payload<'_> {
    deferred.as_ref().map_or(Payload::EMPTY, RecvHandle::data)
}

#[inline(never)]
fn reply_deferred<U>(deferred: &mut Option<RecvHandle<U>>, payload: &[u8]) -> Result<(), NotReplied> {
    deferred.as_mut().map_or(Err(Failure::Closed.into()), |request| request.reply_in_place(payload))
}

impl<U> Drop for Request<'_, U> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(token) = self.reply_token.take() {
            self.core.reply_nothing(self.connection, token);
        }
    }
}

/// What a poll does with what it receives.
pub(super) trait PollHandler<U> {
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>);

    /// Handles a request, whose payload is there until this returns. A request that has waited for the handler has no payload and no token
    /// here.
    fn on_request(
        &mut self,
        connection: &Rc<ConnectionCore<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    );

    /// Handles the requests that wait in the queue.
    fn on_queued_requests(&mut self);

    /// Whether the poll has handed out as many requests as it may.
    fn has_enough(&self) -> bool;
}

/// Requests are deferred, and wait for [`Context::recv`](super::Context::recv).
pub(super) struct QueueRequests<'c, U, R> {
    pub(super) core: &'c Rc<ContextCore<U>>,
    pub(super) on_response: R,
}

impl<U, R: FnMut(U, Result<Payload<'_>, CallFailed>)> PollHandler<U> for QueueRequests<'_, U, R> {
    #[inline]
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        (self.on_response)(user, response);
    }

    fn on_request(
        &mut self,
        connection: &Rc<ConnectionCore<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    ) {
        let request = RecvHandle::keep(connection, self.core, payload, reply_token);
        self.core.requests.borrow_mut().push_back(request);
    }

    fn on_queued_requests(&mut self) {}

    #[inline]
    fn has_enough(&self) -> bool {
        false
    }
}

/// Requests go to a callback.
pub(super) struct ServeRequests<'c, U, S, F, G> {
    pub(super) core: &'c Rc<ContextCore<U>>,
    /// What both callbacks get.
    pub(super) state: &'c mut S,
    /// Returns whether it takes another one in this poll.
    pub(super) on_request: F,
    pub(super) on_response: G,
    /// A request that has waited for the handler, while it is called.
    pub(super) deferred: Option<RecvHandle<U>>,
    /// Requests so far.
    pub(super) requests: usize,
    pub(super) has_enough: bool,
}

impl<U, S, F, G> PollHandler<U> for ServeRequests<'_, U, S, F, G>
where
    F: FnMut(&mut S, Request<'_, U>) -> bool,
    G: FnMut(&mut S, U, Result<Payload<'_>, CallFailed>),
{
    #[inline]
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        (self.on_response)(self.state, user, response);
    }

    // The only place that calls the handler, so that it is compiled into it once.
    #[inline(never)]
    fn on_request(
        &mut self,
        connection: &Rc<ConnectionCore<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    ) {
        let (core, deferred) = (self.core, &mut self.deferred);
        let request = Request { core, connection, payload, reply_token, deferred };
        let goes_on = (self.on_request)(self.state, request);
        self.requests += 1;
        self.has_enough = self.requests >= MAX_REQUESTS || !goes_on;
    }

    #[inline]
    fn on_queued_requests(&mut self) {
        if !self.core.requests.borrow().is_empty() {
            self.handle_queued();
        }
    }

    #[inline]
    fn has_enough(&self) -> bool {
        self.has_enough
    }
}

impl<U, S, F, G> ServeRequests<'_, U, S, F, G>
where
    F: FnMut(&mut S, Request<'_, U>) -> bool,
    G: FnMut(&mut S, U, Result<Payload<'_>, CallFailed>),
{
    #[inline(never)]
    fn handle_queued(&mut self) {
        while !self.has_enough {
            let Some(request) = self.core.requests.borrow_mut().pop_front() else { return };
            let connection = request.connection.clone();
            self.deferred = Some(request);
            self.on_request(&connection, Payload::EMPTY, None);
            self.deferred = None;
        }
    }
}
