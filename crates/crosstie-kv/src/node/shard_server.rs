//! What every daemon has: its shard, its services for clients, and its lanes to the other daemons of the node.
//!
//! This file delivers responses to the sender of the request. `serve_words` and `serve_bytes` take requests and decide what
//! happens with them; what goes to other nodes goes through a [`Transport`](super::transport::Transport).

use crosstie::ipc;

use super::bytes_server::BytesServer;
use super::counters::DaemonActivity;
use super::forward::Forwarder;
use super::origin::CallOrigin;
use super::ring::DelegationRing;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{Status, WordRequest, WordResponse};

/// The most messages that a daemon takes from one source in a pass of its loop: from its clients (8-byte keys), from the ring, from
/// other daemons, from other nodes. What is left is taken in the next pass, before anything newer of that source. So however fast
/// others send, each of them is served at least once in about 4 × 1024 requests. (Byte strings have a limit in bytes.)
pub(super) const MAX_PER_PASS: usize = 1024;

/// A daemon without its connections to other nodes.
pub(super) struct ShardServer {
    /// The shard of this daemon.
    pub(super) id: ShardId,
    pub(super) shard_map: ShardMap,
    pub(super) words: ipc::Server<WordRequest, WordResponse>,
    /// The last pass left clients that had sent requests.
    pub(super) has_more_clients: bool,
    pub(super) shard: Shard,
    pub(super) forwarder: Forwarder,
    pub(super) bytes: BytesServer,
    pub(super) activity: DaemonActivity,
}

impl ShardServer {
    /// Delivers the response of another node to the sender of the request.
    #[inline]
    pub(super) fn deliver(
        &mut self,
        origin: CallOrigin,
        response: &WordResponse,
        ring: &mut impl DelegationRing,
    ) {
        let delivered = match origin {
            CallOrigin::Ring(ticket) => ring.send_response(ticket, response),
            CallOrigin::Client(ticket) => self.words.reply(ticket, response).is_ok(),
            CallOrigin::Daemon(ticket) => self.forwarder.node.reply(ticket, *response).is_ok(),
            CallOrigin::BytesClient(ticket) => return self.bytes.reply_status(ticket, response.status),
        };
        self.activity.undelivered += u64::from(!delivered);
    }

    /// Serves a request of another node for an 8-byte key.
    #[inline(always)]
    pub(super) fn serve_peer_word(&mut self, request: &WordRequest) -> WordResponse {
        if self.shard_map.shard_of_word(request.key) != self.id {
            return WordResponse::new(Status::Misrouted, 0);
        }
        self.activity.served += 1;
        self.shard.apply(request)
    }

    /// Sends a response to a client of this daemon.
    #[cold]
    pub(super) fn reply_client(&mut self, ticket: ipc::Ticket, response: &WordResponse) {
        self.activity.undelivered += u64::from(self.words.reply(ticket, response).is_err());
    }
}
