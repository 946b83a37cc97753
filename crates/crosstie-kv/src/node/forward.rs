//! Forwarding of clients' requests for 8-byte keys of other nodes, to the daemon that is connected with the owner of the key.
//!
//! Only with [`Backend::Meta`](crate::Backend). The receiving daemon responds when the other node has responded.

use std::collections::VecDeque;

use crosstie::{WaitStrategy, flux, ipc};

use super::error::StartError;
use crate::wire::{WordRequest, WordResponse};

/// One daemon's end of the lanes to all other daemons of its node.
pub(super) struct Forwarder {
    /// This daemon's endpoint in the flux network of the daemons. (flux calls it a node; it is not a node of the cluster.)
    pub(super) node: flux::Node<WordRequest, WordResponse, ipc::Ticket>,
    /// Requests that found the lane to a daemon full, by the number of that daemon. A client waits for each of them, so a backlog is never
    /// longer than the number of requests that all clients may have in flight.
    backlogs: Box<[VecDeque<(WordRequest, ipc::Ticket)>]>,
    /// Requests in all backlogs.
    backlogged: usize,
}

/// The configuration of the lanes between daemons, each with space for `requests`.
pub(super) fn config(daemons: u32, requests: usize) -> flux::Config {
    let max_in_flight = requests.saturating_mul(daemons as usize);
    flux::Config { queue_depth: requests, max_in_flight, wait_strategy: WaitStrategy::Spin }
}

/// Creates the forwarders of all daemons of a node.
pub(super) fn create(daemons: u32, requests: usize) -> Result<Vec<Forwarder>, StartError> {
    let backlogs = || (0..daemons).map(|_| VecDeque::new()).collect();
    let forwarder = |node| Forwarder { node, backlogs: backlogs(), backlogged: 0 };
    Ok(flux::network(daemons as usize, &config(daemons, requests))?.into_iter().map(forwarder).collect())
}

impl Forwarder {
    /// Forwards a request, now or as soon as there is space. Returns the ticket if the daemon has ended.
    #[inline]
    pub(super) fn forward(
        &mut self,
        daemon: u32,
        request: WordRequest,
        ticket: ipc::Ticket,
    ) -> Result<(), ipc::Ticket> {
        if !self.backlogs[daemon as usize].is_empty() {
            self.enqueue(daemon, request, ticket);
            return Ok(());
        }
        match self.node.call(daemon as usize, request, ticket) {
            Err(error) if error.cause.is_back_pressure() => self.enqueue(daemon, error.request, error.token),
            Err(error) => return Err(error.token),
            Ok(()) => {}
        }
        Ok(())
    }

    /// Whether requests are waiting for space.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        self.backlogged > 0
    }

    /// Forwards as many requests from the backlogs as there is space for now. Passes the tickets of requests whose daemon has
    /// ended to `gone`.
    #[cold]
    pub(super) fn retry_backlog(&mut self, mut gone: impl FnMut(ipc::Ticket)) {
        for daemon in 0..self.backlogs.len() {
            while let Some((request, ticket)) = self.backlogs[daemon].pop_front() {
                self.backlogged -= 1;
                match self.node.call(daemon, request, ticket) {
                    Ok(()) => {}
                    Err(error) if error.cause.is_back_pressure() => {
                        self.backlogs[daemon].push_front((error.request, error.token));
                        self.backlogged += 1;
                        break;
                    }
                    Err(error) => gone(error.token),
                }
            }
        }
    }

    #[cold]
    fn enqueue(&mut self, daemon: u32, request: WordRequest, ticket: ipc::Ticket) {
        self.backlogs[daemon as usize].push_back((request, ticket));
        self.backlogged += 1;
    }
}
