//! What every daemon has: clients, a shard, and other daemons.

use crosstie::ipc;

use super::counters::Counts;
use super::network::{Origin, RingSide, Way};
use super::passing::{Passing, Waiter};
use super::strings::Strings;
use crate::long::{self, Backend};
use crate::message::{Request, Response, Status};
use crate::placement::{Place, Placement};
use crate::store::Shard;
use zerocopy::IntoBytes;

pub(super) struct Inside {
    pub(super) place: Place,
    pub(super) placement: Placement,
    pub(super) backend: Backend,
    pub(super) words: ipc::Server<Request, Response>,
    pub(super) shard: Shard,
    pub(super) passing: Passing,
    pub(super) long: Strings,
    pub(super) counts: Counts,
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
            let place = placement.of_word(request.key);
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
    fn send_on(&mut self, request: &Request, place: Place, ticket: ipc::Ticket, way: &mut impl Way) {
        if place.rank != request.rank || place.rank == self.place.rank {
            return self.answer_client(ticket, &Response::new(Status::Misrouted, 0));
        }
        let holder = self.backend.holder(place.rank, self.placement.daemons());
        if holder == self.place.daemon {
            return way.call(place.rank, request, Origin::Client(ticket), self);
        }
        self.counts.passed_out += 1;
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
        let gone = Response::new(Status::NodeGone, 0);
        match waiter {
            Waiter::Client(ticket, _) => self.answer_client(ticket, &gone),
            Waiter::Peer(number) => way.reply(number, gone.as_bytes()),
        }
    }

    /// Hands an answer of another node to who asked.
    #[inline]
    pub(super) fn answer(&mut self, origin: Origin, response: &Response, ring: &mut impl RingSide) {
        let delivered = match origin {
            Origin::Ring(ticket) => ring.reply(ticket, response),
            Origin::Client(ticket) => self.words.reply(ticket, response).is_ok(),
            Origin::Daemon(ticket) => self.passing.node.reply(ticket, *response).is_ok(),
            Origin::Long(ticket) => return self.long.answer_status(ticket, response.status),
        };
        self.counts.undelivered += u64::from(!delivered);
    }

    #[cold]
    fn answer_client(&mut self, ticket: ipc::Ticket, response: &Response) {
        self.counts.undelivered += u64::from(self.words.reply(ticket, response).is_err());
    }

    /// Which daemon of which node a long request is for, or how it ends at once.
    pub(super) fn route_long(&self, bytes: &[u8]) -> Result<Place, Status> {
        let request = long::Request::decode(bytes).map_err(|_| Status::Malformed)?;
        if let long::Call::Info = request.call {
            // Who asks does not know where it is.
            return Ok(self.place);
        }
        let place = Place { rank: request.rank, daemon: request.daemon };
        let exists = place.rank < self.placement.nodes() && place.daemon < self.placement.daemons();
        let has_key = request.call.key().is_none_or(|key| self.placement.of_bytes(key) == place);
        if exists && has_key { Ok(place) } else { Err(Status::Misrouted) }
    }

    /// Does what a long request for this daemon says; the answer has at most `limit` bytes.
    pub(super) fn apply_long(&mut self, bytes: &[u8], limit: usize) -> &[u8] {
        self.counts.served += 1;
        let info;
        let response = match long::Request::decode(bytes).map(|request| request.call) {
            Err(_) => long::Response::new(Status::Malformed),
            Ok(long::Call::Info) => {
                info = self.long.next_info();
                long::Response { status: Status::Done, value: info.as_bytes() }
            }
            Ok(call) => self.shard.apply_long(&call),
        };
        self.long.encode(&response, limit)
    }

    /// Clients' requests in bytes, and other daemons'.
    pub(super) fn serve_long(&mut self, way: &mut impl Way) -> usize {
        let count = self.serve_long_clients(way) + self.serve_long_daemons(way);
        self.long.is_busy = count > 0;
        count
    }

    fn serve_long_clients(&mut self, way: &mut impl Way) -> usize {
        if !self.long.poll() {
            return 0;
        }
        let mut count = 0;
        while let Some((bytes, ticket)) = self.long.next() {
            count += 1;
            match self.route_long(&bytes) {
                Ok(place) if place == self.place => {
                    self.apply_long(&bytes, long::MAX_RESPONSE);
                    self.long.answer_encoded(ticket);
                }
                Ok(place)
                    if place.rank != self.place.rank
                        && self.backend.holder(place.rank, self.placement.daemons()) == self.place.daemon =>
                {
                    way.call_long(place.rank, &bytes, allowance(&bytes), ticket, self);
                }
                other => self.long.answer_status(ticket, other.err().unwrap_or(Status::Misrouted)),
            }
            self.long.give_back(bytes);
        }
        count
    }

    fn serve_long_daemons(&mut self, way: &mut impl Way) -> usize {
        let mut count = 0;
        while let Some(handed) = self.long.take_handed() {
            count += 1;
            match handed.answer {
                true => way.reply(handed.waiter, &handed.bytes),
                false => {
                    let answer = self.apply_long(&handed.bytes, long::MAX_RESPONSE).to_vec();
                    self.long.hand_back(handed.daemon, handed.waiter, answer);
                }
            }
        }
        count
    }
}

/// How long the answer to a long request may be.
fn allowance(bytes: &[u8]) -> usize {
    match long::Request::decode(bytes).map(|request| request.call) {
        Ok(long::Call::Put { .. } | long::Call::Delete { .. }) => {
            long::Response::new(Status::Done).encoded_len()
        }
        _ => long::MAX_RESPONSE,
    }
}
