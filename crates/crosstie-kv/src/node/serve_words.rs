//! Serving requests for 8-byte keys: from clients and from other daemons of the node.

use crosstie::ipc;
use zerocopy::IntoBytes;

use super::origin::{CallOrigin, ForwardOrigin};
use super::shard_server::{MAX_PER_PASS, ShardServer};
use super::transport::Transport;
use crate::sharding::ShardId;
use crate::wire::{Status, WordRequest, WordResponse};

/// With more clients than this, a daemon checks those that were idle less often. With fewer it checks them all: what it finds in one
/// pass goes to another node in one batch, and with skipped clients those batches were a third smaller.
const MANY_CLIENTS: usize = 64;

impl ShardServer {
    /// Serves the requests of clients. Returns how many.
    #[inline]
    pub(super) fn serve_clients(&mut self, transport: &mut impl Transport) -> usize {
        let shard = &self.shard;
        let found = match shard.words_fit_in_cache() {
            // A new poll would begin with the first client again.
            true if self.has_more_clients => 1,
            true if self.words.clients() > MANY_CLIENTS => self.words.poll_with_skip(),
            true => self.words.poll(),
            false => self.words.poll_with_prefetch(|request| shard.home_slot(request.key)),
        };
        if found == 0 {
            return 0;
        }
        self.has_more_clients = false;
        let mut count = 0;
        let (here, shard_map) = (self.id, self.shard_map);
        while let Some(received) = self.words.recv() {
            count += 1;
            // Used in place. `recv` has just copied the request out of shared memory word by word; a second copy with wider loads
            // would stall until these stores have left the store buffer.
            let request = received.message();
            let shard = shard_map.shard_of_word(request.key);
            if shard == here && request.rank == here.rank {
                let response = self.shard.apply(request);
                self.activity.served += 1;
                self.activity.undelivered += u64::from(received.reply(&response).is_err());
            } else {
                let (request, ticket) = (*request, received.defer());
                self.send_to_node(&request, shard, ticket, transport);
            }
            if count == MAX_PER_PASS {
                self.has_more_clients = true;
                break;
            }
        }
        count
    }

    /// Sends a client's request to the node that owns its key, directly or through another daemon.
    #[inline]
    fn send_to_node(
        &mut self,
        request: &WordRequest,
        shard: ShardId,
        ticket: ipc::Ticket,
        transport: &mut impl Transport,
    ) {
        if shard.rank != request.rank || shard.rank == self.id.rank {
            return self.reply_client(ticket, &WordResponse::new(Status::Misrouted, 0));
        }
        let owner = self.backend.connection_owner(shard.rank, self.shard_map.daemons());
        if owner == self.id.daemon {
            return transport.call(shard.rank, request, CallOrigin::Client(ticket), self);
        }
        self.activity.forwarded_out += 1;
        let origin = ForwardOrigin::Client(ticket, owner);
        if let Err(origin) = self.forwarder.forward(owner, *request, origin) {
            self.fail_forwarded(origin, transport);
        }
    }

    /// Handles the responses and serves the requests of other daemons. Returns how many.
    #[inline]
    pub(super) fn serve_daemons(&mut self, transport: &mut impl Transport) -> usize {
        let (words, activity) = (&mut self.words, &mut self.activity);
        let mut count = self.forwarder.poll_responses(|origin, response| match origin {
            ForwardOrigin::Client(ticket, _) => {
                activity.undelivered += u64::from(words.reply(ticket, &response).is_err())
            }
            ForwardOrigin::Peer(request_id) => transport.reply(request_id, response.as_bytes()),
        });
        if self.forwarder.has_backlog() {
            self.retry_backlog(transport);
        }
        for _ in 0..MAX_PER_PASS {
            let Some((_, request, ticket)) = self.forwarder.node.try_recv() else { break };
            count += 1;
            if request.rank == self.id.rank {
                // The daemon that forwarded the request has checked that this shard owns the key.
                let response = self.shard.apply(&request);
                self.activity.served += 1;
                self.activity.undelivered += u64::from(self.forwarder.node.reply(ticket, response).is_err());
            } else {
                transport.call(request.rank, &request, CallOrigin::Daemon(ticket), self);
            }
        }
        count
    }

    /// Fails forwarded requests whose daemon has ended: no response will come.
    pub(super) fn fail_lost_forwards(&mut self, transport: &mut impl Transport) {
        let mut gone = Vec::new();
        self.forwarder.take_lost(|origin| gone.push(origin));
        gone.into_iter().for_each(|origin| self.fail_forwarded(origin, transport));
    }

    #[cold]
    fn retry_backlog(&mut self, transport: &mut impl Transport) {
        let mut gone = Vec::new();
        self.forwarder.retry_backlog(|origin| gone.push(origin));
        gone.into_iter().for_each(|origin| self.fail_forwarded(origin, transport));
    }

    #[cold]
    fn fail_forwarded(&mut self, origin: ForwardOrigin, transport: &mut impl Transport) {
        let gone = WordResponse::new(Status::NodeGone, 0);
        match origin {
            ForwardOrigin::Client(ticket, _) => self.reply_client(ticket, &gone),
            ForwardOrigin::Peer(request_id) => transport.reply(request_id, gone.as_bytes()),
        }
    }
}
