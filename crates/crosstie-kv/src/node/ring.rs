//! A daemon's delegation ring, into which clients write requests for other nodes.
//!
//! Daemons of a cluster with [`Backend::Delegation`](crate::Backend) have one. The code of daemons without a ring is
//! compiled with [`NoRing`], so that it does not even check.

use crosstie::{Waitable, delegation};

use crate::wire::{WordRequest, WordResponse};

/// The daemon's end of the ring, if it has one.
pub(super) trait DelegationRing {
    /// Takes the next request.
    fn recv_request(&mut self) -> Option<(&WordRequest, delegation::Ticket)>;
    /// Sends a response. Returns whether a client is still waiting for it.
    fn send_response(&mut self, ticket: delegation::Ticket, response: &WordResponse) -> bool;
    /// What wakes a daemon that sleeps.
    fn source(&self) -> Option<&dyn Waitable>;
    /// What happened so far.
    fn counters(&self) -> delegation::Counters;
}

/// A daemon without a ring.
pub(super) struct NoRing;

impl DelegationRing for NoRing {
    #[inline]
    fn recv_request(&mut self) -> Option<(&WordRequest, delegation::Ticket)> {
        None
    }

    fn send_response(&mut self, _: delegation::Ticket, _: &WordResponse) -> bool {
        false
    }

    fn source(&self) -> Option<&dyn Waitable> {
        None
    }

    fn counters(&self) -> delegation::Counters {
        delegation::Counters::default()
    }
}

/// A ring of a daemon.
pub(super) type RingServer = delegation::Server<WordRequest, WordResponse>;

impl DelegationRing for RingServer {
    #[inline]
    fn recv_request(&mut self) -> Option<(&WordRequest, delegation::Ticket)> {
        let request = self.recv()?;
        Some((request.message(), request.defer()))
    }

    #[inline]
    fn send_response(&mut self, ticket: delegation::Ticket, response: &WordResponse) -> bool {
        delegation::Server::reply(self, ticket, response).is_ok()
    }

    fn source(&self) -> Option<&dyn Waitable> {
        Some(self)
    }

    fn counters(&self) -> delegation::Counters {
        delegation::Server::counters(self)
    }
}
