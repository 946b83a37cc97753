//! Serving requests for 8-byte keys: from clients and from other daemons of the node.

use crosstie::{flux, ipc};

use super::origin::CallOrigin;
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
            false => self.words.poll_with_prefetch(|request| shard.home_group(request.key)),
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
        if shard.daemon == self.id.daemon {
            return transport.call(shard.rank, request, CallOrigin::Client(ticket), self);
        }
        self.activity.forwarded += 1;
        if let Err(ticket) = self.forwarder.forward(shard.daemon, *request, ticket) {
            self.fail_forwarded(ticket);
        }
    }

    /// Handles the responses of other daemons, and sends the requests that they have forwarded. Returns how many.
    #[inline]
    pub(super) fn serve_daemons(&mut self, transport: &mut impl Transport) -> usize {
        let ShardServer { forwarder, words, activity, .. } = self;
        let mut count = forwarder.node.poll(|ticket, response| {
            activity.undelivered += u64::from(words.reply(ticket, &response).is_err());
        });
        if self.forwarder.has_backlog() {
            self.retry_backlog();
        }
        for _ in 0..MAX_PER_PASS {
            let Some((request, ticket)) = self.forwarder.node.recv().map(flux::Request::defer) else { break };
            count += 1;
            transport.call(request.rank, &request, CallOrigin::Daemon(ticket), self);
        }
        count
    }

    /// Fails forwarded requests whose daemon has ended: no response will come.
    pub(super) fn fail_lost_forwards(&mut self) {
        let mut gone = Vec::new();
        self.forwarder.node.take_lost(|lost| gone.push(lost.token));
        gone.into_iter().for_each(|ticket| self.fail_forwarded(ticket));
    }

    #[cold]
    fn retry_backlog(&mut self) {
        let mut gone = Vec::new();
        self.forwarder.retry_backlog(|ticket| gone.push(ticket));
        gone.into_iter().for_each(|ticket| self.fail_forwarded(ticket));
    }

    #[cold]
    fn fail_forwarded(&mut self, ticket: ipc::Ticket) {
        self.reply_client(ticket, &WordResponse::new(Status::NodeGone, 0));
    }
}
