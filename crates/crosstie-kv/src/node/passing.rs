//! Requests on their way from one daemon of a node to another.
//!
//! Two kinds travel in the same lanes: *inward*, for a shard of this node, and *outward*, for the daemon that is connected
//! with another node. Inward ones are answered at once, outward ones when the other node answers. So that outward ones never
//! keep inward ones waiting, on which other nodes wait in turn, they may take half of a lane only.

use std::collections::VecDeque;

use crosstie::{WaitStrategy, flux, ipc};

use super::error::StartError;
use crate::wire::{WordRequest, WordResponse};

/// Who waits for the answer of another daemon.
pub(super) enum Waiter {
    /// A client; its request is on its way to another node, through that daemon.
    Client(ipc::Ticket, u32),
    /// Another node, whose request is kept under this number.
    Peer(u32),
}

/// One daemon's side.
pub(super) struct Passing {
    pub(super) node: flux::Node<WordRequest, WordResponse, Waiter>,
    /// Outward requests in a lane, at most.
    room: usize,
    /// By daemon.
    lanes: Box<[Lane]>,
    /// In all backlogs.
    waiting: usize,
}

#[derive(Default)]
struct Lane {
    /// Outward requests under way.
    outward: usize,
    /// What found no room. A client or a peer waits for each, so there are never more than those may ask at a time.
    backlog: [VecDeque<(WordRequest, Waiter)>; 2],
}

/// The lanes between daemons.
pub(super) fn config(daemons: u32, room: usize) -> flux::Config {
    let capacity = room.saturating_mul(2);
    let max_in_flight = capacity.saturating_mul(daemons as usize);
    flux::Config { capacity, max_in_flight, wait_strategy: WaitStrategy::Spin }
}

/// All sides.
pub(super) fn network(daemons: u32, room: usize) -> Result<Vec<Passing>, StartError> {
    let config = config(daemons, room);
    let lanes = || (0..daemons).map(|_| Lane::default()).collect();
    let side = |node| Passing { node, room, lanes: lanes(), waiting: 0 };
    Ok(flux::network(daemons as usize, &config)?.into_iter().map(side).collect())
}

impl Passing {
    /// Passes a request on, now or when there is room. It comes back if the daemon is gone.
    #[inline]
    pub(super) fn pass(&mut self, daemon: u32, request: WordRequest, waiter: Waiter) -> Result<(), Waiter> {
        let kind = kind(&waiter);
        if self.lanes[daemon as usize].backlog[kind].is_empty() {
            match self.try_pass(daemon, request, waiter) {
                Ok(()) => return Ok(()),
                Err(Refused::Full(request, waiter)) => self.keep(daemon, request, waiter),
                Err(Refused::Gone(waiter)) => return Err(waiter),
            }
        } else {
            self.keep(daemon, request, waiter);
        }
        Ok(())
    }

    /// Hands out the answers that came.
    #[inline]
    pub(super) fn poll(&mut self, mut each: impl FnMut(Waiter, WordResponse)) -> usize {
        let lanes = &mut self.lanes;
        self.node.poll(|waiter, response| {
            if let Waiter::Client(_, daemon) = &waiter {
                lanes[*daemon as usize].outward -= 1;
            }
            each(waiter, response);
        })
    }

    /// Whether requests found no room.
    #[inline]
    pub(super) fn has_backlog(&self) -> bool {
        self.waiting > 0
    }

    /// Tries again with what found no room. Hands out those whose daemon is gone.
    #[cold]
    pub(super) fn retry(&mut self, mut gone: impl FnMut(Waiter)) {
        for daemon in 0..self.lanes.len() {
            for kind in 0..2 {
                while let Some((request, waiter)) = self.lanes[daemon].backlog[kind].pop_front() {
                    self.waiting -= 1;
                    match self.try_pass(daemon as u32, request, waiter) {
                        Ok(()) => {}
                        Err(Refused::Gone(waiter)) => gone(waiter),
                        Err(Refused::Full(request, waiter)) => {
                            self.lanes[daemon].backlog[kind].push_front((request, waiter));
                            self.waiting += 1;
                            break;
                        }
                    }
                }
            }
        }
    }

    /// Hands out who waits in vain, because a daemon is gone.
    pub(super) fn take_lost(&mut self, mut each: impl FnMut(Waiter)) {
        let lanes = &mut self.lanes;
        self.node.take_lost(|lost| {
            if let Waiter::Client(_, daemon) = &lost.token {
                lanes[*daemon as usize].outward -= 1;
            }
            each(lost.token);
        });
    }

    /// Whether answers are yet to come.
    #[inline]
    pub(super) fn in_flight(&self) -> bool {
        self.node.in_flight() > 0 || self.has_backlog()
    }

    #[inline]
    fn try_pass(&mut self, daemon: u32, request: WordRequest, waiter: Waiter) -> Result<(), Refused> {
        let lane = &mut self.lanes[daemon as usize];
        let outward = kind(&waiter) == OUTWARD;
        if outward && lane.outward >= self.room {
            return Err(Refused::Full(request, waiter));
        }
        match self.node.call(daemon as usize, request, waiter) {
            Ok(()) => {
                lane.outward += usize::from(outward);
                Ok(())
            }
            Err(error) => {
                let full = error.is_back_pressure();
                let (request, waiter) = error.into_parts();
                Err(if full { Refused::Full(request, waiter) } else { Refused::Gone(waiter) })
            }
        }
    }

    #[cold]
    fn keep(&mut self, daemon: u32, request: WordRequest, waiter: Waiter) {
        self.lanes[daemon as usize].backlog[kind(&waiter)].push_back((request, waiter));
        self.waiting += 1;
    }
}

enum Refused {
    Full(WordRequest, Waiter),
    Gone(Waiter),
}

const INWARD: usize = 0;
const OUTWARD: usize = 1;

#[inline]
fn kind(waiter: &Waiter) -> usize {
    match waiter {
        Waiter::Peer(_) => INWARD,
        Waiter::Client(..) => OUTWARD,
    }
}
