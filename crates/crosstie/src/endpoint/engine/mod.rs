//! The engine: posts work requests and takes completions. One thread at a time runs it.
//!
//! - `mod.rs`: takes submitted operations, keeps deadlines, replaces connections.
//! - `link.rs`: one connection: its queue pairs, and its begin, end and drain.
//! - `transfer.rs`: READ, WRITE, batches: from an operation to work requests.
//! - `message.rs`: `send` and `recv`.
//! - `immediate.rs`: `imm_recv` and credit for immediates.
//! - `completions.rs`: what a completion means.

mod completions;
mod deadlines;
mod immediate;
mod link;
mod message;
mod transfer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

use super::address::EndpointAddress;
use super::cause::{Cause, ConnectError};
use super::config::{EndpointConfig, MAX_RETIRED};
use super::counters::EndpointCounters;
use super::operation::{Kind, Op, Table};
use super::path::Path;
use super::shared::Status;
use crate::copyrpc::poll_clock::PollClock;
use crate::device::{Device, DeviceError, Pd};

use deadlines::Deadlines;
pub(super) use link::Link;

/// How often queue pairs are checked for ERR, and a drain is tried again.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What every part of the engine needs.
pub(super) struct Engine {
    device: Device,
    pd: Arc<Pd>,
    config: EndpointConfig,
    link: Link,
    retired: Vec<Link>,
    deadlines: Deadlines,
    clock: PollClock,
    next_check: Instant,
    counters: EndpointCounters,
    status: Arc<Status>,
}

/// What the parts of a connection use of the rest.
pub(super) struct Shared<'e> {
    pub(super) table: &'e Table,
    pub(super) counters: &'e mut EndpointCounters,
    pub(super) status: &'e Status,
}

impl Shared<'_> {
    /// Gives an operation back to its future.
    #[inline]
    fn give_back(&mut self, op: Op, code: u16) -> bool {
        self.counters.operations += 1;
        self.counters.held_operations -= 1;
        op.give_back(self.table, code)
    }
}

impl Engine {
    pub(super) fn new(
        device: &Device,
        pd: &Arc<Pd>,
        config: &EndpointConfig,
        status: &Arc<Status>,
    ) -> Result<Engine, DeviceError> {
        Ok(Engine {
            device: device.clone(),
            pd: pd.clone(),
            config: config.clone(),
            link: Link::new(device, pd, config)?,
            retired: Vec::new(),
            deadlines: Deadlines::new(config.operations),
            clock: PollClock::new(),
            next_check: Instant::now(),
            counters: EndpointCounters::default(),
            status: status.clone(),
        })
    }

    pub(super) fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    pub(super) fn address(&self) -> EndpointAddress {
        self.link.address()
    }

    pub(super) fn connect(&mut self, peer: &EndpointAddress) -> Result<(), ConnectError> {
        self.link.connect(peer, &self.config)?;
        self.counters.connections += 1;
        self.status.connect(self.link.peer());
        Ok(())
    }

    /// Takes what was submitted, polls the device, and posts what waits. Returns how much happened.
    #[inline]
    pub(super) fn run(&mut self, table: &Table, reap: bool) -> usize {
        let mut count = self.take_submitted(table);
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        count += self.link.poll(&mut shared);
        count += self.link.post_waiting(&mut shared);
        if reap {
            count += self.link.reap_ended(&mut shared);
        }
        if !self.retired.is_empty() || self.clock.is_due() {
            count += self.check_time(table);
        }
        count
    }

    #[inline]
    fn take_submitted(&mut self, table: &Table) -> usize {
        let mut count = 0;
        let Engine { link, deadlines, counters, status, clock, .. } = self;
        table.take_submitted(|mut op| {
            count += 1;
            counters.held_operations += 1;
            let (kind, deadline) = op.with_value(table, |operation| (operation.kind, operation.deadline));
            if let Some(deadline) = deadline {
                deadlines.add(op.key(), deadline);
                clock.read_soon();
            }
            let mut shared = Shared { table, counters, status };
            if op.is_ended(table) {
                shared.give_back(op, Cause::Cancelled.encode());
                return;
            }
            if let Some(cause) = link.refusal() {
                shared.give_back(op, cause.encode());
                return;
            }
            match kind {
                Kind::Send => link.start_send(&mut shared, op),
                Kind::Recv => link.start_recv(&mut shared, op),
                Kind::ImmRecv => link.start_imm_recv(&mut shared, op),
                _ => link.start_transfer(&mut shared, op),
            }
        });
        count
    }

    /// Does what is due by time: deadlines, queue pairs in ERR, drains.
    #[cold]
    fn check_time(&mut self, table: &Table) -> usize {
        let now = self.clock.read();
        let mut count = 0;
        let expired = self.deadlines.expire(
            now,
            |key| table.end(key, Cause::TimedOut.encode()),
            |key| table.is_live(key),
        );
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        if expired > 0 {
            count += expired + self.link.reap_ended(&mut shared);
        }
        if now >= self.next_check {
            self.next_check = now + CHECK_INTERVAL;
            self.link.check_queue_pairs(&mut shared);
            self.link.probe_peer(&mut shared, now);
            self.link.try_drain(&mut shared);
            for link in &mut self.retired {
                link.poll(&mut shared);
                link.try_drain(&mut shared);
            }
            self.retired.retain(|link| !link.is_drained());
        }
        count
    }

    /// How long a thread may sleep without missing something that is due.
    pub(super) fn max_sleep(&mut self, now: Instant) -> Duration {
        // Time passes without polls.
        self.clock.read_soon();
        let until_deadline =
            self.deadlines.next().map_or(Duration::MAX, |at| at.saturating_duration_since(now));
        let check = match (self.link.is_idle(), self.retired.is_empty() && !self.link.is_draining()) {
            (true, true) => Duration::MAX,
            (_, false) => CHECK_INTERVAL,
            (false, true) => Duration::from_millis(1),
        };
        until_deadline.min(check)
    }

    /// Ends the connection.
    pub(super) fn close(&mut self, table: &Table, cause: Cause) {
        self.take_submitted(table);
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        self.link.announce_close();
        self.link.end(&mut shared, cause);
        self.link.poll(&mut shared);
        self.link.try_drain(&mut shared);
    }

    pub(super) fn is_drained(&self) -> bool {
        self.link.is_drained() && self.retired.is_empty()
    }

    /// Ends the connection, and makes new queue pairs for another one.
    pub(super) fn reopen(&mut self, table: &Table) -> Result<EndpointAddress, ConnectError> {
        self.close(table, Cause::Closed);
        self.next_check = Instant::now();
        self.check_time(table);
        if !self.link.is_drained() && self.retired.len() >= MAX_RETIRED {
            return Err(ConnectError::NotDrained(self.retired.len()));
        }
        let former = core::mem::replace(&mut self.link, Link::new(&self.device, &self.pd, &self.config)?);
        if !former.is_drained() {
            self.retired.push(former);
        }
        self.status.reset();
        Ok(self.link.address())
    }

    /// An immediate whose future was dropped before anybody looked at it.
    pub(super) fn put_back(&mut self, table: &Table, event: ImmEvent) {
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        self.link.put_back(&mut shared, event);
    }

    pub(super) fn path(&self) -> Option<Path> {
        self.link.path()
    }

    pub(super) fn counters(&self) -> EndpointCounters {
        let links = self.retired.iter().chain([&self.link]);
        EndpointCounters {
            leased_slots: links.map(Link::leased_slots).sum(),
            undrained_connections: self.retired.len() as u64 + u64::from(self.link.is_draining()),
            ..self.counters
        }
    }
}

impl Drop for Engine {
    /// The futures have let go: a future keeps its endpoint, and with it this engine. Queue pairs are destroyed before the memory of
    /// what is still at the device: the links go first, and then the table with the buffers.
    fn drop(&mut self) {
        self.retired.clear();
    }
}
