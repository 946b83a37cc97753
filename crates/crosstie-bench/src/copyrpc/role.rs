//! What a side does in a slice: ask, or answer until it is told that the slice is over.

use std::time::Duration;

use crate::error::Error;
use crate::limits::Pace;
use crate::node::exchange::{Answering, Asking, Client, Idle, Server, Tally};
use crate::patience::Patience;

/// The number of the request that ends a slice. Those of a client never get so far.
pub(super) const END: u64 = u64::MAX;

/// What carries messages, as either side has it.
pub(super) trait Carrier: Asking + Answering {
    /// Before a slice.
    fn begin(&mut self);
    /// The client, after a slice: asks the request with the number [`END`].
    fn end(&mut self) -> Result<(), Error>;
    /// The server: whether that request came.
    fn is_over(&self) -> bool;
}

/// A side.
pub(super) enum Role<C> {
    Client(Client<C>),
    Server(Server<C>),
}

impl<C: Carrier> Role<C> {
    /// Rank 0 asks.
    pub(super) fn new(carrier: C, rank: usize, payload: usize, depth: usize, patience: Patience) -> Role<C> {
        let idle = Idle::new(true, patience);
        if rank == 0 {
            Role::Client(Client::new(carrier, rank, payload, depth, idle))
        } else {
            Role::Server(Server::new(carrier, idle))
        }
    }

    pub(super) fn carrier(&mut self) -> &mut C {
        match self {
            Role::Client(client) => &mut client.asking,
            Role::Server(server) => &mut server.answering,
        }
    }

    /// Begins to count anew.
    pub(super) fn forget(&mut self) {
        match self {
            Role::Client(client) => client.tally = Tally::default(),
            Role::Server(server) => server.responses = 0,
        }
    }

    /// Takes part in a slice. A client says how fast it was.
    pub(super) fn slice(&mut self, slice: Duration, mut patience: Patience) -> Result<Option<Pace>, Error> {
        self.carrier().begin();
        match self {
            Role::Client(client) => {
                let pace = client.ask(slice)?;
                client.asking.end()?;
                while client.asking.poll(|_, _| ())? == 0 {
                    patience.idle()?;
                }
                Ok(Some(pace))
            }
            Role::Server(server) => server.answer(C::is_over).map(|()| None),
        }
    }

    /// Answers given.
    pub(super) fn responses(&self) -> u64 {
        if let Role::Server(server) = self { server.responses } else { 0 }
    }
}
