//! What users hold: one side of a connection, and requests that came through it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use crosstie_protocol::copyrpc::{BulkMemory, Held, Owed};

use super::EndpointAddress;
use super::bulk::Incoming;
use super::connection::{Connection, Due};
use super::context::Inner;
use super::error::{CallError, ConnectError, Failure, NotReplied};
use super::payload::Payload;
use super::pool::Region;
use crate::device::ConnectConfig;

/// Names an endpoint among all that its context ever had, or nearly: after some 2^20 at the same place names repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(pub(super) u32);

/// One side of a connection. Dropping it closes the connection.
pub struct Endpoint<U> {
    pub(super) connection: Rc<Connection<U>>,
    pub(super) context: Rc<Inner<U>>,
}

impl<U> Endpoint<U> {
    /// Its name in the context: requests that come through it [bear it](RecvHandle::endpoint).
    pub fn id(&self) -> EndpointId {
        EndpointId(self.connection.key)
    }

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
    ///
    /// Both may have up to 1 GiB, as far as the [bulk memory](super::EndpointConfig::bulk) of both sides allows: see
    /// [`longest`](Endpoint::longest). Beyond [what the ring holds](Endpoint::longest_in_ring) a request is copied to bulk
    /// memory, and the peer fetches it.
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

    #[inline(always)]
    fn begin(
        &self,
        payload: &[u8],
        response: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), CallError<U>> {
        let called = {
            let mut counters = self.context.counters.borrow_mut();
            let called = self.connection.call(payload, response, user, deadline, &mut counters);
            counters.calls += u64::from(called.is_ok());
            called
        };
        match called {
            Ok(due) => {
                self.context.wrote(&self.connection, due);
                Ok(())
            }
            Err((cause, user)) => {
                // The peer may have to be asked for room.
                self.context.mark(&self.connection);
                Err(CallError { cause, user })
            }
        }
    }

    /// Calls that wait for their answers.
    pub fn pending(&self) -> usize {
        self.connection.pending()
    }

    /// The longest request, and the longest answer that a call can ask for; `None` before it is connected.
    pub fn longest(&self) -> Option<(usize, usize)> {
        self.connection.longest()
    }

    /// As [`longest`](Endpoint::longest), of what travels in the rings.
    pub fn longest_in_ring(&self) -> Option<(usize, usize)> {
        self.connection.longest_in_ring()
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

/// A request that came. Its bytes stay in the ring (or in bulk memory), and the ring behind them taken, until it is answered,
/// [detached](RecvHandle::detach) or dropped.
///
/// Who drops it without an answer answers with nothing: an empty payload.
#[must_use = "the peer waits for an answer"]
pub struct RecvHandle<U> {
    connection: Rc<Connection<U>>,
    context: Rc<Inner<U>>,
    offset: u32,
    len: u32,
    held: Option<Held>,
    owed: Option<Owed>,
    /// Where its bytes are, if not in the ring.
    region: Option<Region>,
    /// Where a long answer goes; nowhere if it has no bytes.
    landing: BulkMemory,
}

/// No memory.
const NOWHERE: BulkMemory = BulkMemory { addr: 0, len: 0, rkey: 0 };

impl<U> RecvHandle<U> {
    pub(super) fn new(
        connection: Rc<Connection<U>>,
        context: Rc<Inner<U>>,
        offset: usize,
        len: usize,
        held: Held,
        owed: Owed,
    ) -> RecvHandle<U> {
        // No ring, and no bulk payload, is longer than 32 bits can say.
        let (offset, len) = (offset as u32, len as u32);
        let (held, owed) = (Some(held), Some(owed));
        RecvHandle { connection, context, offset, len, held, owed, region: None, landing: NOWHERE }
    }

    /// A request that is a bulk one, or had to wait for one.
    pub(super) fn waited(
        connection: Rc<Connection<U>>,
        context: Rc<Inner<U>>,
        incoming: Incoming,
    ) -> RecvHandle<U> {
        let Incoming { offset, len, held, region, landing, owed } = incoming;
        let (offset, len) = (offset as u32, len as u32);
        let (owed, landing) = (Some(owed), landing.unwrap_or(NOWHERE));
        RecvHandle { connection, context, offset, len, held, owed, region, landing }
    }

    /// The endpoint that it came through.
    #[inline]
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.connection.key)
    }

    /// What the peer sent. Empty after [`detach`](RecvHandle::detach).
    #[inline]
    pub fn data(&self) -> Payload<'_> {
        let (memory, is_there) = match &self.region {
            Some(region) => (region.mr(), true),
            None => (&self.connection.ring, self.held.is_some()),
        };
        Payload::new(memory, self.offset as usize, if is_there { self.len as usize } else { 0 })
    }

    /// The longest answer that the peer allows.
    pub fn response_limit(&self) -> u64 {
        self.owed.as_ref().map_or(0, |owed| owed.max_len().max(u64::from(self.landing.len)))
    }

    /// Gives the ring its place back; the answer can come later. For requests that take long.
    pub fn detach(&mut self) {
        if let Some(held) = self.held.take() {
            self.connection.release(held);
            self.context.mark(&self.connection);
        }
        if let Some(region) = self.region.take() {
            self.connection.give_arrival(region);
            self.context.mark(&self.connection);
        }
    }

    /// Answers. Never waits. An answer that is too long hands the request back.
    ///
    /// An answer that is too long for the ring is copied to bulk memory, and written to the caller over the next polls. While
    /// that memory is in use, the request is handed back as well ([`NotReplied::NoBulkMemory`]): poll, and answer
    /// again. It comes back by itself, whatever the applications do.
    #[inline]
    pub fn reply(mut self, payload: &[u8]) -> Result<(), (NotReplied, Option<RecvHandle<U>>)> {
        let Some(owed) = self.owed.take() else { return Err((Failure::Closed.into(), None)) };
        let replied =
            self.connection.reply(owed, &mut self.held, payload, &mut self.context.counters.borrow_mut());
        let replied = match replied {
            Err((NotReplied::TooLong { .. }, Some(owed))) if self.landing.len > 0 => {
                self.reply_bulk(owed, payload)
            }
            replied => replied,
        };
        match replied {
            Ok(due) => {
                self.context.counters.borrow_mut().replies += 1;
                self.context.wrote(&self.connection, due);
                Ok(())
            }
            Err((cause, None)) => Err((cause, None)),
            Err((cause, owed)) => {
                self.owed = owed;
                Err((cause, Some(self)))
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn reply_bulk(&self, owed: Owed, payload: &[u8]) -> Result<Due, (NotReplied, Option<Owed>)> {
        let replied = self.connection.reply_bulk(owed, self.landing, payload);
        match replied {
            Ok(()) => self.context.counters.borrow_mut().bulk_replies += 1,
            // Writes that are done give memory back: they are to be looked at.
            Err(_) => self.context.mark(&self.connection),
        }
        replied.map(|()| Due::Later)
    }
}

impl<U> Drop for RecvHandle<U> {
    fn drop(&mut self) {
        self.detach();
        if let Some(owed) = self.owed.take() {
            // The credit of an answer that never comes would be lost. A connection that is over needs none.
            let mut counters = self.context.counters.borrow_mut();
            if self.connection.reply(owed, &mut None, &[], &mut counters).is_ok() {
                counters.unanswered += 1;
                self.context.mark(&self.connection);
            }
        }
    }
}
