//! One side of a connection, as the application holds it.

use std::rc::Rc;
use std::time::{Duration, Instant};

use super::ContextCore;
use crate::copyrpc::address::{EndpointAddress, EndpointId};
use crate::copyrpc::connection::Connection;
use crate::copyrpc::error::{CallError, ConnectError, Failure};
use crate::copyrpc::flush_policy::{self, SendTiming};
use crate::device::ConnectConfig;

/// One side of a connection. Dropping it closes the connection.
pub struct Endpoint<U> {
    pub(super) connection: Rc<Connection<U>>,
    pub(super) core: Rc<ContextCore<U>>,
}

impl<U> Endpoint<U> {
    pub(super) fn new(connection: Rc<Connection<U>>, core: Rc<ContextCore<U>>) -> Endpoint<U> {
        Endpoint { connection, core }
    }

    /// The id of the endpoint in its context. Requests that arrive through it [have the same id](super::RecvHandle::endpoint).
    pub fn id(&self) -> EndpointId {
        EndpointId(self.connection.key)
    }

    /// The address that the peer needs to connect to this endpoint.
    pub fn address(&self) -> EndpointAddress {
        self.connection.address()
    }

    /// Connects to the peer's endpoint. The peer does the same; neither waits for the other.
    pub fn connect(&self, peer: &EndpointAddress, config: &ConnectConfig) -> Result<(), ConnectError> {
        self.connection.connect(&self.core.pd, peer, config)
    }

    /// Calls the peer with `payload`. The response has at most `response` bytes; [`Context::poll`](super::Context::poll) delivers it
    /// together with `user`. A call of at most 32 bytes goes out at once if no other call is pending, one between two polls; all others go
    /// with the next poll or flush.
    ///
    /// Request and response may have up to 1 GiB, as far as the [bulk memory](crate::copyrpc::EndpointConfig::bulk) of both sides
    /// allows, see [`max_lengths`](Endpoint::max_lengths). A request that is [too long for the
    /// ring](Endpoint::max_ring_lengths) is copied to bulk memory, and the peer READs it from there.
    #[inline]
    pub fn call(&self, payload: &[u8], response: usize, user: U) -> Result<(), CallError<U>> {
        self.start_call(payload, response, user, None)
    }

    /// Like [`call`](Endpoint::call). Without a response within `timeout` the call ends as
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
            Err((cause, user)) => {
                // The flush may READ the peer's position, to find room.
                core.schedule_flush(&self.connection);
                Err(CallError { cause, user })
            }
        }
    }

    /// Calls that wait for their response.
    pub fn pending_calls(&self) -> usize {
        self.connection.pending_calls()
    }

    /// The longest request, and the longest response that a call can ask for. `None` before the endpoint is connected.
    pub fn max_lengths(&self) -> Option<(usize, usize)> {
        self.connection.max_lengths()
    }

    /// Like [`max_lengths`](Endpoint::max_lengths), for payloads that travel in the rings.
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

impl<U> Drop for Endpoint<U> {
    fn drop(&mut self) {
        drop(self.core.remove_connection(&self.connection));
    }
}
