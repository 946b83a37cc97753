//! The client of a service: its calls are futures.

use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::call_table::CallTable;
use super::error::Error;
use super::method::{Frame, Method, Prefix, response_size};
use super::slots::{CallToken, ConnectionQueue};
use crate::copyrpc::{ConnectError, Connection, ConnectionAddress, Failure};
use crate::device::ConnectConfig;

/// One side of a connection whose calls are futures. Created by [`Driver::create_client`](super::Driver::create_client).
///
/// Clones share the connection. It is closed when the last of them is dropped; its open calls end then.
#[derive(Clone)]
pub struct Client {
    shared: Rc<Shared>,
}

struct Shared {
    calls: Rc<CallTable>,
    queue: Rc<ConnectionQueue>,
    address: ConnectionAddress,
}

impl Client {
    pub(super) fn new(calls: Rc<CallTable>, connection: Connection<CallToken>) -> Client {
        let address = connection.address();
        Client {
            shared: Rc::new(Shared { calls, queue: Rc::new(ConnectionQueue::new(connection)), address }),
        }
    }

    /// The address of this side, which the peer needs to connect.
    pub fn address(&self) -> ConnectionAddress {
        self.shared.address
    }

    /// Connects to the peer whose side has this address. The peer does the same; neither waits for the other.
    pub fn connect(&self, peer: &ConnectionAddress, config: &ConnectConfig) -> Result<(), ConnectError> {
        match &*self.shared.queue.connection.borrow() {
            Some(connection) => connection.connect(peer, config),
            None => Err(ConnectError::Connected),
        }
    }

    /// Calls method `M`.
    ///
    /// The call is made now, not when the future is first polled. If there is no room for it, it is queued behind earlier
    /// calls. So calls reach the peer in the order in which they were made. Dropping the future does not cancel the call:
    /// its response is dropped when it arrives.
    #[inline]
    pub fn call<M: Method>(&self, request: M::Request) -> Call<M> {
        self.start_call(request, None)
    }

    /// Like [`call`](Client::call). Without a response within `timeout` from now, the call ends as
    /// [`TimedOut`](crate::copyrpc::CallFailed::TimedOut).
    pub fn call_within<M: Method>(&self, request: M::Request, timeout: Duration) -> Call<M> {
        self.start_call(request, Instant::now().checked_add(timeout))
    }

    #[inline]
    fn start_call<M: Method>(&self, request: M::Request, deadline: Option<Instant>) -> Call<M> {
        let Shared { calls, queue, .. } = &*self.shared;
        let frame = Frame { prefix: Prefix::request::<M>(), body: request };
        let token = calls.start_call(queue, frame.as_bytes(), response_size::<M>(), deadline);
        Call { calls: calls.clone(), token, of: PhantomData }
    }

    /// Why the connection has ended, if it has.
    pub fn failure(&self) -> Option<Failure> {
        match &*self.shared.queue.connection.borrow() {
            Some(connection) => connection.failure(),
            None => Some(Failure::Closed),
        }
    }

    /// Closes the connection, also for the clones of this client. Its open calls end.
    pub fn close(self) {
        self.shared.calls.close_connection(&self.shared.queue);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.calls.close_connection(&self.queue);
    }
}

/// A call under way. Any executor of its thread can await it, if a [`Driver`](super::Driver) polls the context.
#[must_use = "the call is made, but its response is dropped"]
pub struct Call<M> {
    calls: Rc<CallTable>,
    token: CallToken,
    of: PhantomData<fn(M)>,
}

impl<M: Method> Future for Call<M> {
    type Output = Result<M::Response, Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.calls.poll_call::<M>(self.token, context.waker());
        if polled.is_ready() {
            self.token = CallToken::TAKEN;
        }
        polled
    }
}

impl<M> Drop for Call<M> {
    fn drop(&mut self) {
        if self.token != CallToken::TAKEN {
            self.calls.drop_call(self.token);
        }
    }
}
