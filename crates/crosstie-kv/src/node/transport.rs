//! How a daemon reaches other nodes. Chosen once, when the daemon starts.
//!
//! [`Connections`](super::connections::Connections) sends requests with copyrpc. [`NoTransport`] is for daemons without
//! connections. The daemon's loop is compiled for each, so that a daemon does not check for what it does not have.

use crosstie::{Waitable, copyrpc, delegation, ipc};

use super::commands::{ConnectionCommand, ConnectionEvent};
use super::counters::DaemonActivity;
use super::origin::CallOrigin;
use super::ring::NoRing;
use super::shard_server::ShardServer;
use crate::wire::{Status, WordRequest, WordResponse};

/// The connections of a daemon with other nodes.
pub(super) trait Transport {
    /// Handles responses and requests that have arrived and sends what is due. Returns how many messages there were.
    fn poll(&mut self, server: &mut ShardServer) -> usize;
    /// Sends a request to a node. The response goes to `origin`, also if the request cannot be sent.
    fn call(&mut self, rank: u32, request: &WordRequest, origin: CallOrigin, server: &mut ShardServer);
    /// Sends an encoded byte-string request, whose response has at most `response_limit` bytes. Returns the ticket and the status
    /// if the request ends at once.
    fn call_bytes(
        &mut self,
        rank: u32,
        bytes: &[u8],
        response_limit: usize,
        ticket: ipc::Ticket,
        activity: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)>;
    /// Whether messages wait for space.
    fn has_backlog(&self) -> bool;
    /// What wakes a daemon that sleeps: the connections, and the ring.
    fn sources(&self) -> [Option<&dyn Waitable>; 2];
    /// Executes a command of the control plane.
    fn execute_command(
        &mut self,
        command: ConnectionCommand,
        server: &mut ShardServer,
    ) -> Option<ConnectionEvent>;
    /// Closes connections that have failed, and passes an event for each to `each`.
    fn check_connections(&mut self, server: &mut ShardServer, each: impl FnMut(ConnectionEvent));
    /// What happened so far, in connections and in the ring.
    fn counters(&self) -> (copyrpc::Counters, delegation::Counters);
}

/// The transport of a daemon without connections. No request reaches it.
pub(super) struct NoTransport;

impl Transport for NoTransport {
    #[inline]
    fn poll(&mut self, _: &mut ShardServer) -> usize {
        0
    }

    fn call(&mut self, _: u32, _: &WordRequest, origin: CallOrigin, server: &mut ShardServer) {
        server.deliver(origin, &WordResponse::new(Status::NodeGone, 0), &mut NoRing);
    }

    fn call_bytes(
        &mut self,
        _: u32,
        _: &[u8],
        _: usize,
        ticket: ipc::Ticket,
        _: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)> {
        Err((ticket, Status::NodeGone))
    }

    fn has_backlog(&self) -> bool {
        false
    }

    fn sources(&self) -> [Option<&dyn Waitable>; 2] {
        [None; 2]
    }

    fn execute_command(&mut self, _: ConnectionCommand, _: &mut ShardServer) -> Option<ConnectionEvent> {
        None
    }

    fn check_connections(&mut self, _: &mut ShardServer, _: impl FnMut(ConnectionEvent)) {}

    fn counters(&self) -> (copyrpc::Counters, delegation::Counters) {
        Default::default()
    }
}
