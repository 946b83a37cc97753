//! A daemon's connections with other nodes, over copyrpc: one with the daemon of the same number of each node. A request for a key goes to
//! the daemon that is connected with the owner of the key, so another node's request is always for the shard of the daemon that gets it.
//!
//! [`Connections`] executes the commands of the control plane, sends requests to other nodes, serves the requests of other
//! nodes, and takes requests from the delegation ring where the daemon has one. What finds no space waits in a backlog, in
//! order, and is retried in every pass of the daemon's loop.

#[cfg(test)]
mod memory_tests;
mod peer;

use std::collections::VecDeque;

use crosstie::copyrpc::{self, Connection, Context, Payload, RecvHandle, ReplyError, Request};
use crosstie::device::{ConnectConfig, Device, DeviceError, DeviceSpec};
use crosstie::{Waitable, delegation, ipc};
use zerocopy::IntoBytes;

use super::buffer_pool::BufferPool;
use super::bytes_server::{BytesServer, route, status_response};
use super::commands::{ConnectionCommand, ConnectionEvent};
use super::counters::DaemonActivity;
use super::origin::CallOrigin;
use super::ring::DelegationRing;
use super::shard_server::{MAX_PER_PASS, ShardServer};
use super::transport::Transport;
use crate::wire::{MAX_REQUEST, Status, WordRequest, WordResponse};
use peer::Peer;

/// How long a NIC waits for an acknowledgement, seven times: 268 ms, as 4.096 us times a power of two. The control connection
/// notices the death of a node sooner. A node that merely waits for a core must not be given up.
const ACK_TIMEOUT: u8 = 16;

/// Connections with some or all other nodes.
pub(super) struct Connections<R> {
    context: Context<CallOrigin>,
    ring: R,
    connection_config: copyrpc::ConnectionConfig,
    /// By rank.
    peers: Box<[Peer]>,
    /// Requests of other nodes that are not for 8-byte keys, and those behind them. Empty between polls.
    deferred: VecDeque<RecvHandle<CallOrigin>>,
    /// Responses to other nodes that found no memory to be sent from. Another node waits for each of them.
    unsent_responses: VecDeque<(RecvHandle<CallOrigin>, Vec<u8>)>,
    /// Messages in all backlogs.
    backlogged: usize,
    /// A buffer for byte-string requests of other nodes. It only grows.
    scratch: Vec<u8>,
    buffers: BufferPool,
}

/// The copyrpc configuration of a daemon in a cluster of `nodes`.
pub(super) fn config(nodes: u32) -> copyrpc::Config {
    // A rank that comes back may be connected before its previous connection is released.
    copyrpc::Config { max_connections: 2 * nodes as usize, ..copyrpc::Config::default() }
}

impl<R: DelegationRing> Connections<R> {
    pub(super) fn open(
        device: &DeviceSpec,
        nodes: u32,
        connection_config: copyrpc::ConnectionConfig,
        ring: R,
    ) -> Result<Connections<R>, DeviceError> {
        Connections::new(Device::open(device)?, nodes, connection_config, ring)
    }

    pub(super) fn new(
        device: Device,
        nodes: u32,
        connection_config: copyrpc::ConnectionConfig,
        ring: R,
    ) -> Result<Connections<R>, DeviceError> {
        Ok(Connections {
            context: Context::new(device, &config(nodes))?,
            ring,
            connection_config,
            peers: (0..nodes).map(|_| Peer::default()).collect(),
            deferred: VecDeque::new(),
            unsent_responses: VecDeque::new(),
            backlogged: 0,
            scratch: Vec::new(),
            buffers: BufferPool::default(),
        })
    }

    /// Delivers the responses of other nodes, and serves their requests.
    #[inline]
    fn poll_peers(&mut self, server: &mut ShardServer) -> usize {
        let Connections { context, ring, deferred, .. } = self;
        let mut poll = PeerPoll { server, ring, deferred };
        let count = context.serve(&mut poll, PeerPoll::serve_request, PeerPoll::deliver_response);
        while let Some(received) = self.deferred.pop_front() {
            self.serve_deferred(received, server);
        }
        count
    }

    #[cold]
    fn serve_deferred(&mut self, received: RecvHandle<CallOrigin>, server: &mut ShardServer) {
        match received.data().read::<WordRequest>() {
            Some(request) => {
                let response = server.serve_peer_word(&request);
                server.activity.undelivered += u64::from(received.reply(response.as_bytes()).is_err());
            }
            None => self.serve_peer_bytes(received, server),
        }
    }

    /// Serves a request of another node that is not for an 8-byte key.
    fn serve_peer_bytes(&mut self, received: RecvHandle<CallOrigin>, server: &mut ShardServer) {
        let mut request = std::mem::take(&mut self.scratch);
        let len = received.data().len();
        let routed = if len > MAX_REQUEST {
            Err(Status::Malformed)
        } else {
            if request.len() < len {
                request.resize(len, 0);
            }
            received.data().copy_to(&mut request);
            route(server.id, &server.shard_map, &request[..len])
        };
        match routed {
            Ok((shard, op)) if shard == server.id => {
                server.activity.served += 1;
                let limit = received.response_limit() as usize;
                self.send_response(received, server.bytes.execute(&mut server.shard, &op, limit));
            }
            other => {
                let response = status_response(other.err().unwrap_or(Status::Misrouted));
                server.activity.undelivered += u64::from(received.reply(&response).is_err());
            }
        }
        self.scratch = request;
    }

    /// Sends the requests that clients wrote into the ring to the nodes that own the keys.
    #[inline]
    fn serve_ring(&mut self, server: &mut ShardServer) -> usize {
        let mut count = 0;
        // The request is used in place, see `ShardServer::serve_clients`.
        while count < MAX_PER_PASS
            && let Some((request, ticket)) = self.ring.recv_request()
        {
            count += 1;
            let shard = server.shard_map.shard_of_word(request.key);
            let is_here = shard.daemon == server.id.daemon && shard.rank != server.id.rank;
            let failed = if is_here && shard.rank == request.rank {
                let peer = &mut self.peers[shard.rank as usize];
                let origin = CallOrigin::Ring(ticket);
                let sent = peer.send(request, origin, &mut self.backlogged, &mut server.activity);
                sent.err().map(|origin| (origin, Status::NodeGone))
            } else {
                Some((CallOrigin::Ring(ticket), Status::Misrouted))
            };
            if let Some((origin, status)) = failed {
                server.deliver(origin, &WordResponse::new(status, 0), &mut self.ring);
            }
        }
        count
    }

    /// Sends a response to another node, now or as soon as there is memory for it. If the connection has failed, nobody waits for
    /// the response, and it is dropped.
    #[inline]
    fn send_response(&mut self, request: RecvHandle<CallOrigin>, response: &[u8]) {
        if let Err(ReplyError { cause, request: Some(request) }) = request.reply(response) {
            self.handle_unsent_response(cause, request, response);
        }
    }

    #[cold]
    fn handle_unsent_response(
        &mut self,
        cause: copyrpc::NotReplied,
        request: RecvHandle<CallOrigin>,
        response: &[u8],
    ) {
        if cause.is_back_pressure() {
            self.unsent_responses.push_back((request, self.buffers.copy_of(response)));
            self.backlogged += 1;
            return;
        }
        // The peer gets the status alone. Only responses that hold a value are long, and their requests have changed nothing.
        let status = match cause {
            copyrpc::NotReplied::NoMemory => Status::NoRegisteredMemory,
            // The response is longer than the peer allows.
            _ => Status::Malformed,
        };
        drop(request.reply(&status_response(status)));
    }

    /// Retries what found no space.
    #[cold]
    fn retry_backlog(&mut self, bytes: &mut BytesServer) {
        for _ in 0..self.unsent_responses.len() {
            if let Some((request, response)) = self.unsent_responses.pop_front() {
                self.backlogged -= 1;
                match request.reply(&response) {
                    Err(ReplyError { cause, request: Some(request) }) if cause.is_back_pressure() => {
                        self.unsent_responses.push_back((request, response));
                        self.backlogged += 1;
                        continue;
                    }
                    Err(ReplyError { cause, request: Some(request) }) => {
                        self.handle_unsent_response(cause, request, &response);
                    }
                    Ok(()) | Err(ReplyError { request: None, .. }) => {}
                }
                self.buffers.release(response);
            }
        }
        for peer in &mut self.peers {
            peer.retry_backlog(&mut self.backlogged, &mut self.buffers, |ticket, status| {
                bytes.reply_status(ticket, status);
            });
        }
    }

    /// Closes the connection with a rank. All requests that were sent to it or wait for it end as [`Status::NodeGone`].
    fn close(&mut self, rank: u32, server: &mut ShardServer) {
        for origin in self.peers[rank as usize].close(&mut self.backlogged) {
            server.deliver(origin, &WordResponse::new(Status::NodeGone, 0), &mut self.ring);
        }
    }

    /// The peer, if its connection is still that of `epoch`.
    fn peer_in_epoch(&mut self, rank: u32, epoch: u64) -> Option<&mut Peer> {
        self.peers.get_mut(rank as usize).filter(|peer| peer.epoch == epoch)
    }
}

/// A daemon while it polls its connections.
struct PeerPoll<'p, R> {
    server: &'p mut ShardServer,
    ring: &'p mut R,
    deferred: &'p mut VecDeque<RecvHandle<CallOrigin>>,
}

impl<R: DelegationRing> PeerPoll<'_, R> {
    /// Serves a request for an 8-byte key where it has arrived. Others wait for the end of the poll, and those behind them do, too.
    #[inline(always)]
    fn serve_request(&mut self, received: Request<'_, CallOrigin>) {
        let request = received.data().read::<WordRequest>();
        let Some(request) = request.filter(|_| self.deferred.is_empty()) else {
            return self.deferred.push_back(received.defer());
        };
        let response = self.server.serve_peer_word(&request);
        self.server.activity.undelivered += u64::from(received.reply(response.as_bytes()).is_err());
    }

    #[inline(always)]
    fn deliver_response(&mut self, origin: CallOrigin, result: Result<Payload<'_>, copyrpc::CallFailed>) {
        match (origin, result) {
            (CallOrigin::BytesClient(ticket), Ok(payload)) => {
                self.server.bytes.reply_payload(ticket, payload);
            }
            (origin, result) => {
                let response = match result {
                    // An empty response means that the other node dropped the request.
                    Ok(payload) => payload.read().unwrap_or(WordResponse::new(Status::NodeGone, 0)),
                    Err(copyrpc::CallFailed::NoMemory) => WordResponse::new(Status::NoRegisteredMemory, 0),
                    Err(_) => WordResponse::new(Status::NodeGone, 0),
                };
                self.server.deliver(origin, &response, self.ring);
            }
        }
    }
}

impl<R: DelegationRing> Transport for Connections<R> {
    #[inline]
    fn poll(&mut self, server: &mut ShardServer) -> usize {
        let count = self.poll_peers(server);
        if self.backlogged > 0 {
            self.retry_backlog(&mut server.bytes);
        }
        count + self.serve_ring(server)
    }

    #[inline]
    fn call(&mut self, rank: u32, request: &WordRequest, origin: CallOrigin, server: &mut ShardServer) {
        let peer = &mut self.peers[rank as usize];
        if let Err(origin) = peer.send(request, origin, &mut self.backlogged, &mut server.activity) {
            server.deliver(origin, &WordResponse::new(Status::NodeGone, 0), &mut self.ring);
        }
    }

    fn call_bytes(
        &mut self,
        rank: u32,
        bytes: &[u8],
        response_limit: usize,
        ticket: ipc::Ticket,
        activity: &mut DaemonActivity,
    ) -> Result<(), (ipc::Ticket, Status)> {
        activity.sent += 1;
        let peer = &mut self.peers[rank as usize];
        peer.send_bytes(bytes, response_limit, ticket, &mut self.backlogged, &mut self.buffers)
    }

    fn has_backlog(&self) -> bool {
        self.backlogged > 0
    }

    fn sources(&self) -> [Option<&dyn Waitable>; 2] {
        [Some(&self.context), self.ring.source()]
    }

    fn execute_command(
        &mut self,
        command: ConnectionCommand,
        server: &mut ShardServer,
    ) -> Option<ConnectionEvent> {
        let daemon = server.id.daemon;
        match command {
            ConnectionCommand::Open { rank, epoch } => {
                self.close(rank, server);
                let peer = &mut self.peers[rank as usize];
                peer.epoch = epoch;
                match self.context.create_connection(&self.connection_config) {
                    Ok(connection) => {
                        let address = connection.address();
                        peer.connection = Some(connection);
                        Some(ConnectionEvent::Opened { rank, epoch, daemon, address })
                    }
                    Err(error) => Some(ConnectionEvent::Failed { rank, epoch, why: error.to_string() }),
                }
            }
            ConnectionCommand::Connect { rank, epoch, address } => {
                let connection = self.peer_in_epoch(rank, epoch)?.connection.as_ref()?;
                let connect = ConnectConfig { timeout: ACK_TIMEOUT, ..ConnectConfig::default() };
                match connection.connect(&address, &connect) {
                    Ok(()) => Some(ConnectionEvent::Connected { rank, epoch, daemon }),
                    Err(error) => {
                        self.close(rank, server);
                        Some(ConnectionEvent::Failed { rank, epoch, why: error.to_string() })
                    }
                }
            }
            ConnectionCommand::Enable { rank, epoch } => {
                let peer = self.peer_in_epoch(rank, epoch)?;
                peer.is_up = peer.connection.is_some();
                Some(ConnectionEvent::Up { rank, epoch, daemon })
            }
            ConnectionCommand::Close { rank, epoch } => {
                self.peer_in_epoch(rank, epoch)?;
                self.close(rank, server);
                None
            }
        }
    }

    fn check_connections(&mut self, server: &mut ShardServer, mut each: impl FnMut(ConnectionEvent)) {
        for rank in 0..self.peers.len() {
            let peer = &self.peers[rank];
            let epoch = peer.epoch;
            if let Some(failure) = peer.connection.as_ref().and_then(Connection::failure) {
                let rank = rank as u32;
                self.close(rank, server);
                each(ConnectionEvent::Failed { rank, epoch, why: failure.to_string() });
            }
        }
    }

    fn counters(&self) -> (copyrpc::Counters, delegation::Counters) {
        (self.context.counters(), self.ring.counters())
    }
}
