//! What users hold: one side of a connection, and requests that came through it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crosstie_protocol::copyrpc::{Held, Owed};

use super::EndpointAddress;
use super::connection::Connection;
use super::context::Inner;
use super::error::{CallError, ConnectError, Failure, NotReplied};
use super::payload::Payload;
use crate::device::ConnectConfig;

/// One side of a connection. Dropping it closes the connection.
pub struct Endpoint<U> {
    pub(super) connection: Rc<Connection<U>>,
    pub(super) context: Rc<Inner<U>>,
}

impl<U> Endpoint<U> {
    /// What the peer must know to connect to it.
    pub fn address(&self) -> EndpointAddress {
        self.connection.address()
    }

    /// Connects to the peer's endpoint. The peer does the same; neither waits for the other.
    pub fn connect(&self, peer: &EndpointAddress, config: &ConnectConfig) -> Result<(), ConnectError> {
        self.connection.connect(&self.context.pd, peer, config)
    }

    /// Calls the peer with `payload`; the answer has at most `response` bytes and comes out of
    /// [`Context::poll`](super::Context::poll) together with `user`. Goes out with the next poll or flush.
    #[inline]
    pub fn call(&self, payload: &[u8], response: usize, user: U) -> Result<(), CallError<U>> {
        self.begin(payload, response, user, None)
    }

    /// As [`call`](Endpoint::call); without an answer in time the call ends as
    /// [`TimedOut`](super::CallFailed::TimedOut).
    pub fn call_within(
        &self,
        payload: &[u8],
        response: usize,
        user: U,
        time: Duration,
    ) -> Result<(), CallError<U>> {
        let deadline = Instant::now().checked_add(time);
        self.context.has_deadlines.set(self.context.has_deadlines.get() || deadline.is_some());
        self.begin(payload, response, user, deadline)
    }

    #[inline]
    fn begin(
        &self,
        payload: &[u8],
        response: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), CallError<U>> {
        let called = self.connection.call(payload, response, user, deadline);
        // Also after a refusal: the peer may have to be asked for room.
        self.context.wrote(&self.connection);
        called.map_err(|(cause, user)| CallError { cause, user })?;
        self.context.counters.borrow_mut().calls += 1;
        Ok(())
    }

    /// Calls that wait for their answers.
    pub fn pending(&self) -> usize {
        self.connection.pending()
    }

    /// The longest request, and the longest answer that a call can ask for; `None` before it is connected.
    pub fn longest(&self) -> Option<(usize, usize)> {
        self.connection.longest()
    }

    /// Why the connection is over, if it is.
    pub fn failure(&self) -> Option<Failure> {
        self.connection.failure()
    }

    /// Closes the connection; hands out what was attached to calls that were unanswered.
    pub fn close(self) -> Vec<U> {
        self.context.remove(&self.connection)
    }
}

impl<U> Drop for Endpoint<U> {
    fn drop(&mut self) {
        drop(self.context.remove(&self.connection));
    }
}

/// A request that came. Its bytes stay in the ring, and the ring behind them taken, until it is answered,
/// [detached](RecvHandle::detach) or dropped.
///
/// Who drops it without an answer answers with nothing: an empty payload.
#[must_use = "the peer waits for an answer"]
pub struct RecvHandle<U> {
    connection: Rc<Connection<U>>,
    context: Rc<Inner<U>>,
    offset: usize,
    len: usize,
    held: Option<Held>,
    owed: Option<Owed>,
}

impl<U> RecvHandle<U> {
    pub(super) fn new(
        connection: Rc<Connection<U>>,
        context: Rc<Inner<U>>,
        offset: usize,
        len: usize,
        held: Held,
        owed: Owed,
    ) -> RecvHandle<U> {
        RecvHandle { connection, context, offset, len, held: Some(held), owed: Some(owed) }
    }

    /// What the peer sent. Empty after [`detach`](RecvHandle::detach).
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        let len = if self.held.is_some() { self.len } else { 0 };
        Payload::new(&self.connection.ring, self.offset, len)
    }

    /// The longest answer that the peer allows.
    pub fn response_limit(&self) -> u64 {
        self.owed.as_ref().map_or(0, Owed::max_len)
    }

    /// Gives the ring its place back; the answer can come later. For requests that take long.
    pub fn detach(&mut self) {
        if let Some(held) = self.held.take() {
            self.connection.release(held);
            self.context.mark(&self.connection);
        }
    }

    /// Answers. An answer that is too long hands the request back.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let Some(owed) = self.owed.take() else { return Err((Failure::Closed.into(), None)) };
        match self.connection.reply(owed, payload) {
            Ok(()) => {
                self.context.counters.borrow_mut().replies += 1;
                self.context.wrote(&self.connection);
                Ok(())
            }
            Err((cause, None)) => Err((cause, None)),
            Err((cause, owed)) => {
                self.owed = owed;
                Err((cause, Some(self)))
            }
        }
    }
}

impl<U> Drop for RecvHandle<U> {
    fn drop(&mut self) {
        self.detach();
        if let Some(owed) = self.owed.take() {
            // The credit of an answer that never comes would be lost. A connection that is over needs none.
            if self.connection.reply(owed, &[]).is_ok() {
                self.context.counters.borrow_mut().unanswered += 1;
                self.context.mark(&self.connection);
            }
        }
    }
}
