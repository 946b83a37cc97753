//! What every daemon has: clients, a shard, and other daemons.

use crosstie::ipc;

use super::counters::DaemonActivity;
use super::network::{Origin, RingSide, Way};
use super::passing::{Passing, Waiter};
use super::strings::Strings;
use crate::Backend;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{Status, WordRequest, WordResponse};
use zerocopy::IntoBytes;

pub(super) struct Inside {
    pub(super) place: ShardId,
    pub(super) placement: ShardMap,
    pub(super) backend: Backend,
    pub(super) words: ipc::Server<WordRequest, WordResponse>,
    pub(super) shard: Shard,
    pub(super) passing: Passing,
    pub(super) long: Strings,
    pub(super) counts: DaemonActivity,
}

impl Inside {
    /// Clients' requests.
    #[inline]
    pub(super) fn serve_clients(&mut self, way: &mut impl Way) -> usize {
        let shard = &self.shard;
        let found = match shard.words_are_cached() {
            true => self.words.poll(),
            false => self.words.poll_ahead(|request| shard.home(request.key)),
        };
        if found == 0 {
            return 0;
        }
        let mut count = 0;
        let (home, placement) = (self.place, self.placement);
        while let Some(asked) = self.words.recv() {
            count += 1;
            // Looked at where it is: it was written there word by word just now, and a copy in larger pieces would wait until
            // all that was written before has left the core.
            let request = asked.message();
            let place = placement.shard_of_word(request.key);
            if place == home && request.rank == home.rank {
                let response = self.shard.apply(request);
                self.counts.served += 1;
                self.counts.undelivered += u64::from(asked.reply(&response).is_err());
            } else {
                let (request, ticket) = (*request, asked.defer());
                self.send_on(&request, place, ticket, way);
            }
        }
        count
    }

    /// A client's request for another node.
    #[inline]
    fn send_on(&mut self, request: &WordRequest, place: ShardId, ticket: ipc::Ticket, way: &mut impl Way) {
        if place.rank != request.rank || place.rank == self.place.rank {
            return self.answer_client(ticket, &WordResponse::new(Status::Misrouted, 0));
        }
        let holder = self.backend.connection_owner(place.rank, self.placement.daemons());
        if holder == self.place.daemon {
            return way.call(place.rank, request, Origin::Client(ticket), self);
        }
        self.counts.forwarded_out += 1;
        if let Err(waiter) = self.passing.pass(holder, *request, Waiter::Client(ticket, holder)) {
            self.give_up(waiter, way);
        }
    }

    /// Other daemons' answers and requests.
    #[inline]
    pub(super) fn serve_daemons(&mut self, way: &mut impl Way) -> usize {
        let (words, counts) = (&mut self.words, &mut self.counts);
        let mut count = self.passing.poll(|waiter, response| match waiter {
            Waiter::Client(ticket, _) => {
                counts.undelivered += u64::from(words.reply(ticket, &response).is_err())
            }
            Waiter::Peer(number) => way.reply(number, response.as_bytes()),
        });
        if self.passing.has_backlog() {
            self.retry(way);
        }
        while let Some((_, request, ticket)) = self.passing.node.try_recv() {
            count += 1;
            if request.rank == self.place.rank {
                // Whoever passed it on has found that the key is ours.
                let response = self.shard.apply(&request);
                self.counts.served += 1;
                self.counts.undelivered += u64::from(self.passing.node.reply(ticket, response).is_err());
            } else {
                way.call(request.rank, &request, Origin::Daemon(ticket), self);
            }
        }
        count
    }

    #[cold]
    fn retry(&mut self, way: &mut impl Way) {
        let mut gone = Vec::new();
        self.passing.retry(|waiter| gone.push(waiter));
        gone.into_iter().for_each(|waiter| self.give_up(waiter, way));
    }

    /// Ends what a daemon that is gone will never answer.
    pub(super) fn end_lost(&mut self, way: &mut impl Way) {
        let mut gone = Vec::new();
        self.passing.take_lost(|waiter| gone.push(waiter));
        gone.into_iter().for_each(|waiter| self.give_up(waiter, way));
    }

    #[cold]
    fn give_up(&mut self, waiter: Waiter, way: &mut impl Way) {
        let gone = WordResponse::new(Status::NodeGone, 0);
        match waiter {
            Waiter::Client(ticket, _) => self.answer_client(ticket, &gone),
            Waiter::Peer(number) => way.reply(number, gone.as_bytes()),
        }
    }

    /// Hands an answer of another node to who asked.
    #[inline]
    pub(super) fn answer(&mut self, origin: Origin, response: &WordResponse, ring: &mut impl RingSide) {
        let delivered = match origin {
            Origin::Ring(ticket) => ring.reply(ticket, response),
            Origin::Client(ticket) => self.words.reply(ticket, response).is_ok(),
            Origin::Daemon(ticket) => self.passing.node.reply(ticket, *response).is_ok(),
            Origin::Long(ticket) => return self.long.answer_status(ticket, response.status),
        };
        self.counts.undelivered += u64::from(!delivered);
    }

    #[cold]
    fn answer_client(&mut self, ticket: ipc::Ticket, response: &WordResponse) {
        self.counts.undelivered += u64::from(self.words.reply(ticket, response).is_err());
    }
}
