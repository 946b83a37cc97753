//! What a side does in a slice: ask, or answer until it is told that the slice is over.

use std::time::Duration;

use crate::error::Error;
use crate::limits::Throughput;
use crate::node::rpc_loop::{Client, Idle, RpcClient, RpcServer, Server, Tally};
use crate::spin_wait::SpinWait;

/// The number of the request that ends a slice. Those of a client never get so far.
pub(super) const END: u64 = u64::MAX;

/// What carries messages, as either side has it.
pub(super) trait RpcPeer: RpcClient + RpcServer {
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

impl<C: RpcPeer> Role<C> {
    /// Rank 0 asks.
    pub(super) fn new(rpc: C, rank: usize, payload: usize, depth: usize, spin: SpinWait) -> Role<C> {
        let idle = Idle::new(true, spin);
        if rank == 0 {
            Role::Client(Client::new(rpc, rank, payload, depth, idle))
        } else {
            Role::Server(Server::new(rpc, idle))
        }
    }

    pub(super) fn rpc(&mut self) -> &mut C {
        match self {
            Role::Client(client) => &mut client.rpc,
            Role::Server(server) => &mut server.rpc,
        }
    }

    /// Begins to count anew.
    pub(super) fn reset_counters(&mut self) {
        match self {
            Role::Client(client) => client.tally = Tally::default(),
            Role::Server(server) => server.responses = 0,
        }
    }

    /// Takes part in a slice. A client says how fast it was.
    pub(super) fn run_slice(
        &mut self,
        slice: Duration,
        mut spin: SpinWait,
    ) -> Result<Option<Throughput>, Error> {
        self.rpc().begin();
        match self {
            Role::Client(client) => {
                let throughput = client.run_slice(slice)?;
                client.rpc.end()?;
                while client.rpc.poll(|_, _| ())? == 0 {
                    spin.idle()?;
                }
                Ok(Some(throughput))
            }
            Role::Server(server) => server.serve_until(C::is_over).map(|()| None),
        }
    }

    /// Responder given.
    pub(super) fn responses(&self) -> u64 {
        if let Role::Server(server) = self { server.responses } else { 0 }
    }
}
