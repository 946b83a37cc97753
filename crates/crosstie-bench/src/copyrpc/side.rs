//! What a side does in a slice: the client sends requests; the server responds until the client tells it that the slice is over.

use std::time::Duration;

use super::Arguments;
use crate::error::Error;
use crate::limits::Throughput;
use crate::local_rpc::rpc_loop::{Client, Idle, RpcClient, RpcServer, Server};
use crate::runner::{Connect, Contender, Counts, Exchange, Rank, Role};
use crate::spin_wait::SpinWait;

/// The number of the request that ends a slice. The numbers of other requests never reach it.
pub(super) const END: u64 = u64::MAX;

/// An RPC between two sides, client and server in one type.
pub(super) trait RpcPeer: RpcClient + RpcServer + Connect {
    /// Called on both sides before a slice.
    fn begin_slice(&mut self);
    /// Called by the client after a slice: sends the request with the number [`END`].
    fn end_slice(&mut self) -> Result<(), Error>;
    /// Called by the client then: takes the responses that have arrived, and returns how many there were.
    fn discard(&mut self) -> Result<usize, Error> {
        self.poll(|_, _| ())
    }
    /// Called by the server: whether that request has arrived.
    fn is_over(&self) -> bool;
    /// Forgets what was counted.
    fn reset_counters(&mut self) {}
}

/// The loop of one side.
enum Side<C> {
    Client(Client<C>, SpinWait),
    Server(Server<C>),
}

/// Connects the two sides. Rank 0 is the client.
pub(super) fn connect<'a, C: RpcPeer + 'a>(
    role: Role,
    plan: &Arguments,
    rank: &mut Rank<'a>,
    opened: Result<C, Error>,
) -> Result<Contender<'a>, Error> {
    let rpc = rank.collective.connect(opened)?;
    let idle = Idle::new(true, rank.spin);
    let side = match rank.number {
        0 => Side::Client(Client::new(rpc, 0, plan.payload, plan.queue_depth, idle), rank.spin),
        _ => Side::Server(Server::new(rpc, idle)),
    };
    Ok(Contender::new(role, side))
}

impl<C: RpcPeer> Exchange for Side<C> {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        match self {
            Side::Client(client, spin) => {
                client.rpc.begin_slice();
                let throughput = client.run_slice(slice)?;
                client.rpc.end_slice()?;
                while client.rpc.discard()? == 0 {
                    spin.idle()?;
                }
                spin.reset();
                Ok(Some(throughput))
            }
            Side::Server(server) => {
                server.rpc.begin_slice();
                server.serve_until(C::is_over).map(|()| None)
            }
        }
    }

    fn reset(&mut self) {
        match self {
            Side::Client(client, _) => {
                client.reset();
                client.rpc.reset_counters();
            }
            Side::Server(server) => {
                server.reset();
                server.rpc.reset_counters();
            }
        }
    }

    fn counts(&self) -> Counts {
        let (mut counts, rpc) = match self {
            Side::Client(client, _) => (client.counts(), &client.rpc),
            Side::Server(server) => (Counts::new([("responses", server.responses)], 0), &server.rpc),
        };
        counts.counters.extend(rpc.counters().into_iter().map(|(name, count)| (name.to_owned(), count)));
        counts
    }
}
