//! Forwarding of requests for 8-byte keys from one daemon of a node to another.
//!
//! Two kinds of requests share a lane:
//!
//! - *Inbound*: a request of another node, for a shard of this node. The receiving daemon executes it and responds at once.
//! - *Outbound*: a client's request, for another node. The receiving daemon owns the connection with that node; it responds
//!   when the other node has responded.
//!
//! Other nodes wait for the responses to inbound requests. Outbound requests must therefore never fill a lane: they may take
//! half of it.

use std::collections::VecDeque;

use crosstie::{WaitStrategy, flux};

use super::error::StartError;
use super::origin::ForwardOrigin;
use crate::wire::{WordRequest, WordResponse};

/// One daemon's end of the lanes to all other daemons of its node.
pub(super) struct Forwarder {
    /// This daemon's endpoint in the flux network of the daemons. (flux calls it a node; it is not a node of the cluster.)
    pub(super) node: flux::Node<WordRequest, WordResponse, ForwardOrigin>,
    /// The most outbound requests in a lane.
    max_outbound: usize,
    /// The state of the lane to each daemon, by the number of that daemon.
    lanes: Box<[Lane]>,
    /// Requests in all backlogs.
    backlogged: usize,
}

#[derive(Default)]
struct Lane {
    /// Outbound requests in flight.
    outbound: usize,
    /// Requests that found the lane full, by direction: [`INBOUND`] or [`OUTBOUND`]. A client or a peer waits for each of them,
    /// so a backlog is never longer than the number of requests that all clients and peers may have in flight.
    backlog: [VecDeque<(WordRequest, ForwardOrigin)>; 2],
}

/// The configuration of the lanes between daemons, each with space for `requests` of each direction.
pub(super) fn config(daemons: u32, requests: usize) -> flux::Config {
    let capacity = requests.saturating_mul(2);
    let max_in_flight = capacity.saturating_mul(daemons as usize);
    flux::Config { capacity, max_in_flight, wait_strategy: WaitStrategy::Spin }
}

/// Creates the forwarders of all daemons of a node.
pub(super) fn create(daemons: u32, requests: usize) -> Result<Vec<Forwarder>, StartError> {
    let config = config(daemons, requests);
    let lanes = || (0..daemons).map(|_| Lane::default()).collect();
    let forwarder = |node| Forwarder { node, max_outbound: requests, lanes: lanes(), backlogged: 0 };
    Ok(flux::network(daemons as usize, &config)?.into_iter().map(forwarder).collect())
}

impl Forwarder {
    /// Forwards a request, now or as soon as there is space. Returns the origin if the daemon has ended.
    #[inline]
    pub(super) fn forward(
        &mut self,
        daemon: u32,
        request: WordRequest,
        origin: ForwardOrigin,
    ) -> Result<(), ForwardOrigin> {
        let direction = direction(&origin);
        if self.lanes[daemon as usize].backlog[direction].is_empty() {
            match self.try_forward(daemon, request, origin) {
                Ok(()) => return Ok(()),
                Err(ForwardError::Full(request, origin)) => self.enqueue(daemon, request, origin),
                Err(ForwardError::DaemonGone(origin)) => return Err(origin),
            }
        } else {
            self.enqueue(daemon, request, origin);
        }
        Ok(())
    }

    /// Passes each response that has arrived to `each`. Returns the number of responses.
    #[inline]
    pub(super) fn poll_responses(&mut self, mut each: impl FnMut(ForwardOrigin, WordResponse)) -> usize {
        let lanes = &mut self.lanes;
        self.node.poll(|origin, response| {
            if let ForwardOrigin::Client(_, daemon) = &origin {
                lanes[*daemon as usize].outbound -= 1;
            }
            each(origin, response);
        })
    }

    /// Whether requests are waiting for space.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        self.backlogged > 0
    }

    /// Forwards as many requests from the backlogs as there is space for now. Passes the origins of requests whose daemon has
    /// ended to `gone`.
    #[cold]
    pub(super) fn retry_backlog(&mut self, mut gone: impl FnMut(ForwardOrigin)) {
        for daemon in 0..self.lanes.len() {
            for direction in 0..2 {
                while let Some((request, origin)) = self.lanes[daemon].backlog[direction].pop_front() {
                    self.backlogged -= 1;
                    match self.try_forward(daemon as u32, request, origin) {
                        Ok(()) => {}
                        Err(ForwardError::DaemonGone(origin)) => gone(origin),
                        Err(ForwardError::Full(request, origin)) => {
                            self.lanes[daemon].backlog[direction].push_front((request, origin));
                            self.backlogged += 1;
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Passes the origins of requests that will get no response, because the daemon that they were forwarded to has ended, to
    /// `each`.
    pub(super) fn take_lost(&mut self, mut each: impl FnMut(ForwardOrigin)) {
        let lanes = &mut self.lanes;
        self.node.take_lost(|lost| {
            if let ForwardOrigin::Client(_, daemon) = &lost.token {
                lanes[*daemon as usize].outbound -= 1;
            }
            each(lost.token);
        });
    }

    #[inline]
    fn try_forward(
        &mut self,
        daemon: u32,
        request: WordRequest,
        origin: ForwardOrigin,
    ) -> Result<(), ForwardError> {
        let lane = &mut self.lanes[daemon as usize];
        let is_outbound = direction(&origin) == OUTBOUND;
        if is_outbound && lane.outbound >= self.max_outbound {
            return Err(ForwardError::Full(request, origin));
        }
        match self.node.call(daemon as usize, request, origin) {
            Ok(()) => {
                lane.outbound += usize::from(is_outbound);
                Ok(())
            }
            Err(error) => {
                let full = error.is_back_pressure();
                let (request, origin) = error.into_parts();
                Err(if full { ForwardError::Full(request, origin) } else { ForwardError::DaemonGone(origin) })
            }
        }
    }

    #[cold]
    fn enqueue(&mut self, daemon: u32, request: WordRequest, origin: ForwardOrigin) {
        self.lanes[daemon as usize].backlog[direction(&origin)].push_back((request, origin));
        self.backlogged += 1;
    }
}

enum ForwardError {
    Full(WordRequest, ForwardOrigin),
    DaemonGone(ForwardOrigin),
}

const INBOUND: usize = 0;
const OUTBOUND: usize = 1;

#[inline]
fn direction(origin: &ForwardOrigin) -> usize {
    match origin {
        ForwardOrigin::Peer(_) => INBOUND,
        ForwardOrigin::Client(..) => OUTBOUND,
    }
}
