//! A connection, as the application has it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::ContextCore;
use crate::copyrpc::address::{ConnectionAddress, ConnectionId};
use crate::copyrpc::connection::ConnectionCore;
use crate::copyrpc::error::{CallError, ConnectError, Failure};
use crate::copyrpc::flush_policy::{self, SendTiming};
use crate::device::ConnectConfig;

/// A connection to a peer. Dropping it closes the connection.
pub struct Connection<U> {
    pub(super) connection: Rc<ConnectionCore<U>>,
    pub(super) core: Rc<ContextCore<U>>,
}

impl<U> Connection<U> {
    pub(super) fn new(connection: Rc<ConnectionCore<U>>, core: Rc<ContextCore<U>>) -> Connection<U> {
        Connection { connection, core }
    }

    /// The id of the connection in its context. Requests that arrive through it [have the same id](super::RecvHandle::connection).
    pub fn id(&self) -> ConnectionId {
        ConnectionId(self.connection.key)
    }

    /// The address of this side, which the peer needs to connect.
    pub fn address(&self) -> ConnectionAddress {
        self.connection.address()
    }

    /// Connects to the peer whose side has this address. The peer does the same; neither waits for the other.
    pub fn connect(&self, peer: &ConnectionAddress, config: &ConnectConfig) -> Result<(), ConnectError> {
        self.connection.connect(&self.core.pd, peer, config)
    }

    /// Calls the peer with `payload`. The response has at most `response` bytes; [`Context::poll`](super::Context::poll) delivers it
    /// together with `user`. A call of at most 32 bytes goes out at once if no other call is pending, one between two polls; all others go
    /// with the next poll or flush.
    ///
    /// Request and response may have up to 1 GiB, as far as the [bulk memory](crate::copyrpc::ConnectionConfig::bulk) of both sides
    /// allows, see [`max_lengths`](Connection::max_lengths). A request that is [too long for the
    /// ring](Connection::max_ring_lengths) is copied to bulk memory, and the peer READs it from there.
    #[inline]
    pub fn call(&self, payload: &[u8], response: usize, user: U) -> Result<(), CallError<U>> {
        self.start_call(payload, response, user, None)
    }

    /// Like [`call`](Connection::call). Without a response within `timeout` the call ends as
    /// [`TimedOut`](crate::copyrpc::CallFailed::TimedOut).
    pub fn call_within(
        &self,
        payload: &[u8],
        response: usize,
        user: U,
        timeout: Duration,
    ) -> Result<(), CallError<U>> {
        let deadline = Instant::now().checked_add(timeout);
        if let Some(deadline) = deadline {
            self.core.liveness.note_deadline(deadline);
        }
        self.start_call(payload, response, user, deadline)
    }

    #[inline(always)]
    fn start_call(
        &self,
        payload: &[u8],
        response: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), CallError<U>> {
        let core = &*self.core;
        let may_go_alone = flush_policy::may_go_alone(payload.len()) && !core.has_sent_alone.get();
        match self.connection.call(payload, response, user, deadline, may_go_alone) {
            Ok(timing) => {
                core.counters.calls.add(1);
                if timing == SendTiming::Sent {
                    core.has_sent_alone.set(true);
                }
                core.flush_after_write(&self.connection, timing);
                Ok(())
            }
            Err(error) => {
                // The flush may READ the peer's position, to find room.
                core.schedule_flush(&self.connection);
                Err(error)
            }
        }
    }

    /// Calls that wait for their response.
    pub fn pending_calls(&self) -> usize {
        self.connection.pending_calls()
    }

    /// The longest request, and the longest response that a call can ask for. `None` before [`connect`](Connection::connect).
    pub fn max_lengths(&self) -> Option<(usize, usize)> {
        self.connection.max_lengths()
    }

    /// Like [`max_lengths`](Connection::max_lengths), for payloads that travel in the rings.
    pub fn max_ring_lengths(&self) -> Option<(usize, usize)> {
        self.connection.max_ring_lengths()
    }

    /// Why the connection has ended, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.connection.failure()
    }

    /// Closes the connection. Returns what was attached to its pending calls.
    pub fn close(self) -> Vec<U> {
        self.core.remove_connection(&self.connection)
    }
}

impl<U> Drop for Connection<U> {
    fn drop(&mut self) {
        drop(self.core.remove_connection(&self.connection));
    }
}
