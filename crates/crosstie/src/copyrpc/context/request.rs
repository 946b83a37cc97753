//! A request as a handler gets it, and what a poll does with what it receives.

use std::rc::Rc;

use crosstie_protocol::copyrpc::ReplyToken;

use super::{ContextCore, RecvHandle, RingRequest};
use crate::copyrpc::address::EndpointId;
use crate::copyrpc::connection::Connection;
use crate::copyrpc::error::{CallFailed, Failure, NotReplied};
use crate::copyrpc::payload::{Payload, ShortPayload};

/// A request that is lent to the handler of [`Context::serve`](super::Context::serve), which answers it in place, or keeps it: see
/// [`defer`](Request::defer).
///
/// A request that is dropped without a reply is answered with an empty payload.
#[must_use = "the peer waits for a response"]
pub struct Request<'c, U> {
    lent: LentRequest<'c, U>,
    /// The request, if it waited for the handler; for example until its bulk payload had arrived. The payload and the token are there, and
    /// `lent` has no token.
    held: &'c mut Option<RecvHandle<U>>,
}

/// A request that has just arrived.
// All fields are numbers and references, so that they stay in registers where the handler is inlined.
pub(in crate::copyrpc) struct LentRequest<'c, U> {
    core: &'c Rc<ContextCore<U>>,
    connection: &'c Rc<Connection<U>>,
    payload: Payload<'c>,
    reply_token: Option<ReplyToken>,
}

impl<'c, U> Request<'c, U> {
    /// The endpoint that the request arrived through.
    #[inline]
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.lent.connection.key)
    }

    /// The payload.
    #[inline(always)]
    pub fn data(&self) -> Payload<'_> {
        if self.lent.needs_reply() { self.lent.payload } else { held_data(self.held) }
    }

    /// The longest response that the caller allows.
    #[inline(always)]
    pub fn response_limit(&self) -> u64 {
        match &self.lent.reply_token {
            Some(token) => token.max_len(),
            None => self.held.as_ref().map_or(0, RecvHandle::response_limit),
        }
    }

    /// Keeps the request, so that it can be answered after the handler has returned.
    #[inline]
    pub fn defer(self) -> RecvHandle<U> {
        match self.into_lent() {
            Ok(mut lent) => lent.take(),
            Err(handle) => handle,
        }
    }

    /// Sends the response, as [`RecvHandle::reply`] does.
    #[inline(always)]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let Some(token) = self.lent.reply_token.take() else { return reply_held(self.held, payload) };
        let LentRequest { core, connection, payload: data, .. } = self.lent;
        reply_with(core, connection, token, payload).map_err(|(cause, token)| {
            (cause, token.map(|token| RecvHandle::from_lent(connection, core, data, Some(token))))
        })
    }

    /// The request without what few requests need; or that request, if it waited for the handler.
    #[inline(always)]
    pub(in crate::copyrpc) fn into_lent(self) -> Result<LentRequest<'c, U>, RecvHandle<U>> {
        if self.lent.needs_reply() { Ok(self.lent) } else { Err(take_held(self.held, self.lent)) }
    }
}

// The following are not inlined into handlers: few requests are held.

#[cold]
#[inline(never)]
fn held_data<U>(held: &Option<RecvHandle<U>>) -> Payload<'_> {
    held.as_ref().map_or(Payload::EMPTY, RecvHandle::data)
}

#[cold]
#[inline(never)]
fn reply_held<U>(
    held: &mut Option<RecvHandle<U>>,
    payload: &[u8],
) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
    match held.take() {
        Some(handle) => handle.reply(payload),
        None => Err((Failure::Closed.into(), None)),
    }
}

#[cold]
#[inline(never)]
fn take_held<U>(held: &mut Option<RecvHandle<U>>, mut lent: LentRequest<'_, U>) -> RecvHandle<U> {
    held.take().unwrap_or_else(|| lent.take())
}

impl<U> LentRequest<'_, U> {
    #[inline(always)]
    pub(in crate::copyrpc) fn data(&self) -> Payload<'_> {
        self.payload
    }

    /// The longest response that the caller allows.
    #[inline(always)]
    pub(in crate::copyrpc) fn response_limit(&self) -> u64 {
        self.reply_token.as_ref().map_or(0, ReplyToken::max_len)
    }

    /// Takes all that it has, and leaves nothing to be answered.
    #[cold]
    #[inline(never)]
    pub(in crate::copyrpc) fn take(&mut self) -> RecvHandle<U> {
        RecvHandle::from_lent(self.connection, self.core, self.payload, self.reply_token.take())
    }

    /// Sends the response. After an error, the request can be answered again if it [needs](LentRequest::needs_reply) a reply.
    #[inline(always)]
    pub(in crate::copyrpc) fn reply_in_place(&mut self, payload: &[u8]) -> Result<(), NotReplied> {
        let Some(token) = self.reply_token.take() else { return Err(Failure::Closed.into()) };
        reply_with(self.core, self.connection, token, payload).map_err(|(cause, token)| {
            self.reply_token = token;
            cause
        })
    }

    /// Whether no response was sent.
    #[inline(always)]
    pub(in crate::copyrpc) fn needs_reply(&self) -> bool {
        self.reply_token.is_some()
    }
}

#[inline(always)]
fn reply_with<U>(
    core: &ContextCore<U>,
    connection: &Rc<Connection<U>>,
    token: ReplyToken,
    payload: &[u8],
) -> Result<(), (NotReplied, Option<ReplyToken>)> {
    // The ring space of the request is passed when the poll continues.
    let timing = connection.reply(token, &mut None, payload, &core.counters)?;
    core.note_reply(connection, timing);
    Ok(())
}

impl<U> Drop for LentRequest<'_, U> {
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

    /// As [`on_response`](PollHandler::on_response), for what few polls do: its code is there only once.
    #[cold]
    #[inline(never)]
    fn on_rare_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        self.on_response(user, response);
    }

    /// Handles a short request whose payload is in the ring, where it is lent.
    fn on_ring_request(
        &mut self,
        core: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        offset: usize,
        len: usize,
        reply_token: ReplyToken,
    );

    /// Handles a short request whose payload came with its completion.
    fn on_copied_request(
        &mut self,
        core: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        copy: &ShortPayload,
        len: u32,
        reply_token: ReplyToken,
    );

    /// Handles the requests that wait in the queue.
    fn on_queued_requests(&mut self);

    /// Whether the poll has handed out as many requests as it may.
    fn has_enough(&self) -> bool;
}

/// What a program does with responses: a closure, or a type whose method is inlined always, as no closure can be.
pub(in crate::copyrpc) trait OnResponse<U> {
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>);
}

impl<U, F: FnMut(U, Result<Payload<'_>, CallFailed>)> OnResponse<U> for F {
    #[inline(always)]
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        self(user, response);
    }
}

/// Requests go to the queue of [`Context::recv`](super::Context::recv).
pub(super) struct QueueRequests<R>(pub(super) R);

impl<U, R: OnResponse<U>> PollHandler<U> for QueueRequests<R> {
    #[inline(always)]
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        self.0.on_response(user, response);
    }

    #[inline(always)]
    fn on_ring_request(
        &mut self,
        core: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        offset: usize,
        len: usize,
        reply_token: ReplyToken,
    ) {
        // Rings are shorter than 4 GiB.
        let (offset, len, space) = (offset as u32, len as u32, connection.hold());
        let connection = connection.clone();
        let mut requests = core.requests.borrow_mut();
        requests.next_slot().fill(RingRequest { connection, offset, len, space, reply_token });
    }

    #[inline(always)]
    fn on_copied_request(
        &mut self,
        core: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        copy: &ShortPayload,
        len: u32,
        reply_token: ReplyToken,
    ) {
        core.requests.borrow_mut().push_copied(connection, len, reply_token, copy);
    }

    #[inline(always)]
    fn on_queued_requests(&mut self) {}

    #[inline(always)]
    fn has_enough(&self) -> bool {
        false
    }
}

/// A poll hands out at most so many requests from rings: otherwise a peer that sends very many could keep the program from anything else.
const MAX_REQUESTS: usize = 256;

/// Responses and requests go to callbacks.
pub(super) struct LendRequests<'c, U, S, F, G> {
    pub(super) core: &'c Rc<ContextCore<U>>,
    /// What both callbacks get.
    pub(super) state: &'c mut S,
    pub(super) on_request: F,
    pub(super) on_response: G,
    /// A request that waited for the handler, while it is called.
    pub(super) held: Option<RecvHandle<U>>,
    /// Requests so far.
    pub(super) requests: usize,
}

impl<U, S, F, G> PollHandler<U> for LendRequests<'_, U, S, F, G>
where
    F: FnMut(&mut S, Request<'_, U>),
    G: FnMut(&mut S, U, Result<Payload<'_>, CallFailed>),
{
    #[inline(always)]
    fn on_response(&mut self, user: U, response: Result<Payload<'_>, CallFailed>) {
        (self.on_response)(self.state, user, response);
    }

    #[inline(always)]
    fn on_ring_request(
        &mut self,
        _: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        offset: usize,
        len: usize,
        reply_token: ReplyToken,
    ) {
        let payload = Payload::in_ring(&connection.ring, offset, len);
        self.handle(connection, payload, Some(reply_token));
    }

    #[inline(always)]
    fn on_copied_request(
        &mut self,
        _: &ContextCore<U>,
        connection: &Rc<Connection<U>>,
        copy: &ShortPayload,
        len: u32,
        reply_token: ReplyToken,
    ) {
        self.handle(connection, Payload::from_copy(copy, len as usize), Some(reply_token));
    }

    #[inline(always)]
    fn on_queued_requests(&mut self) {
        if !self.core.requests.borrow().is_empty() {
            self.handle_queued();
        }
    }

    #[inline(always)]
    fn has_enough(&self) -> bool {
        self.requests >= MAX_REQUESTS
    }
}

impl<U, S, F: FnMut(&mut S, Request<'_, U>), G> LendRequests<'_, U, S, F, G> {
    /// Hands a request to the handler. If that is `held`, it has no payload and no token here.
    // Never inline, and nothing else calls the handler: so the compiler inlines the handler here, and everything stays in registers.
    #[inline(never)]
    fn handle(
        &mut self,
        connection: &Rc<Connection<U>>,
        payload: Payload<'_>,
        reply_token: Option<ReplyToken>,
    ) {
        self.requests += 1;
        let lent = LentRequest { core: self.core, connection, payload, reply_token };
        (self.on_request)(self.state, Request { lent, held: &mut self.held });
    }

    #[cold]
    #[inline(never)]
    fn handle_queued(&mut self) {
        while let Some(handle) = self.core.take_request() {
            let connection = handle.connection().clone();
            self.held = Some(handle);
            self.handle(&connection, Payload::EMPTY, None);
            self.held = None;
        }
    }
}
