//! The calling side of a connection, and calls as futures.

use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::desk::{Desk, Line, Ticket};
use super::error::Error;
use super::method::{Frame, Method, Prefix, answer_size, decode};
use crate::copyrpc::{ConnectError, Endpoint, EndpointAddress, Failure};
use crate::device::ConnectConfig;

/// One side of a connection, whose calls are futures. Made by [`Driver::create_client`](super::Driver::create_client).
///
/// Clones are the same connection; it is closed when the last of them is dropped, and its open calls end.
#[derive(Clone)]
pub struct Client {
    shared: Rc<Shared>,
}

struct Shared {
    desk: Rc<Desk>,
    line: Rc<Line>,
    address: EndpointAddress,
}

impl Client {
    pub(super) fn new(desk: Rc<Desk>, endpoint: Endpoint<Ticket>) -> Client {
        let address = endpoint.address();
        Client { shared: Rc::new(Shared { desk, line: Rc::new(Line::new(endpoint)), address }) }
    }

    /// What the peer must know to connect to it.
    pub fn address(&self) -> EndpointAddress {
        self.shared.address
    }

    /// Connects to the peer's endpoint. The peer does the same; neither waits for the other.
    pub fn connect(&self, peer: &EndpointAddress, config: &ConnectConfig) -> Result<(), ConnectError> {
        match &*self.shared.line.endpoint.borrow() {
            Some(endpoint) => endpoint.connect(peer, config),
            None => Err(ConnectError::Connected),
        }
    }

    /// Calls `M`.
    ///
    /// The call is made here and now, not when the future is first awaited; if there is no room for it, it waits for its
    /// turn behind the calls that came before it. So calls reach the peer in the order in which they were made. Dropping
    /// the future does not take the call back: its answer, if it still comes, is dropped.
    #[inline]
    pub fn call<M: Method>(&self, request: M::Request) -> Call<M> {
        self.begin(request, None)
    }

    /// As [`call`](Client::call); without an answer in time, counted from now, the call ends as
    /// [`TimedOut`](crate::copyrpc::CallFailed::TimedOut).
    pub fn call_within<M: Method>(&self, request: M::Request, time: Duration) -> Call<M> {
        self.begin(request, Instant::now().checked_add(time))
    }

    #[inline]
    fn begin<M: Method>(&self, request: M::Request, deadline: Option<Instant>) -> Call<M> {
        let Shared { desk, line, .. } = &*self.shared;
        let frame = Frame { prefix: Prefix::request::<M>(), body: request };
        let stage = match desk.begin(line, frame.as_bytes(), answer_size::<M>(), deadline) {
            Ok(ticket) => Stage::Open(ticket),
            Err(error) => Stage::NotMade(error),
        };
        Call { desk: desk.clone(), stage, of: PhantomData }
    }

    /// Why the connection is over, if it is.
    pub fn failure(&self) -> Option<Failure> {
        match &*self.shared.line.endpoint.borrow() {
            Some(endpoint) => endpoint.failure(),
            None => Some(Failure::Closed),
        }
    }

    /// Closes the connection, also for the clones of this client; its open calls end.
    pub fn close(self) {
        self.shared.desk.close(&self.shared.line);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.desk.close(&self.line);
    }
}

/// A call under way. Any executor of its thread can await it, if something [drives](super::Driver) the context.
#[must_use = "the call is made, but nobody will see its answer"]
pub struct Call<M> {
    desk: Rc<Desk>,
    stage: Stage,
    of: PhantomData<fn(M)>,
}

enum Stage {
    Open(Ticket),
    NotMade(Error),
    Over,
}

impl<M: Method> Future for Call<M> {
    type Output = Result<M::Response, Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = match self.stage {
            Stage::Open(ticket) => self.desk.poll(ticket, context.waker(), decode::<M>),
            Stage::NotMade(error) => Poll::Ready(Err(error)),
            Stage::Over => panic!("a call was awaited again after its end"),
        };
        if polled.is_ready() {
            self.stage = Stage::Over;
        }
        polled
    }
}

impl<M> Drop for Call<M> {
    fn drop(&mut self) {
        if let Stage::Open(ticket) = self.stage {
            self.desk.forget(ticket);
        }
    }
}
