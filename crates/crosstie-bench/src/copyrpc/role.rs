//! What a side does in a slice: the client sends requests; the server responds until the client tells it that the slice is over.

use std::time::Duration;

use crate::error::Error;
use crate::limits::Throughput;
use crate::node::rpc_loop::{Client, Idle, RpcClient, RpcServer, Server, Tally};
use crate::spin_wait::SpinWait;

/// The number of the request that ends a slice. The numbers of other requests never reach it.
pub(super) const END: u64 = u64::MAX;

/// An RPC between two sides, client and server in one type.
pub(super) trait RpcPeer: RpcClient + RpcServer {
    /// Called on both sides before a slice.
    fn begin_slice(&mut self);
    /// Called by the client after a slice: sends the request with the number [`END`].
    fn end_slice(&mut self) -> Result<(), Error>;
    /// Called by the server: whether that request has arrived.
    fn is_over(&self) -> bool;
}

/// The loop of one side.
pub(super) enum Role<C> {
    Client(Client<C>),
    Server(Server<C>),
}

impl<C: RpcPeer> Role<C> {
    /// Rank 0 is the client.
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

    /// Sets the counts to zero.
    pub(super) fn reset_counters(&mut self) {
        match self {
            Role::Client(client) => client.tally = Tally::default(),
            Role::Server(server) => server.responses = 0,
        }
    }

    /// Runs one slice. A client returns its throughput.
    pub(super) fn run_slice(
        &mut self,
        slice: Duration,
        mut spin: SpinWait,
    ) -> Result<Option<Throughput>, Error> {
        self.rpc().begin_slice();
        match self {
            Role::Client(client) => {
                let throughput = client.run_slice(slice)?;
                client.rpc.end_slice()?;
                while client.rpc.poll(|_, _| ())? == 0 {
                    spin.idle()?;
                }
                Ok(Some(throughput))
            }
            Role::Server(server) => server.serve_until(C::is_over).map(|()| None),
        }
    }

    /// The number of responses sent; 0 on a client.
    pub(super) fn responses(&self) -> u64 {
        if let Role::Server(server) = self { server.responses } else { 0 }
    }
}
