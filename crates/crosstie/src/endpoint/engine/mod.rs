//! The engine: posts work requests and takes completions. One thread at a time runs it.
//!
//! - `mod.rs`: takes submitted operations, keeps deadlines, replaces connections.
//! - `link.rs`: one connection: its queue pairs, and its begin, end and drain.
//! - `at_once.rs`: transfers that complete while they are started.
//! - `transfer.rs`: READ, WRITE, batches: from an operation to work requests.
//! - `message.rs`: `send` and `recv`.
//! - `unclaimed.rs`: messages and buffers of `recv`s that have ended.
//! - `immediate.rs`: `imm_recv` and credit for immediates.
//! - `completions.rs`: what a completion means.

mod at_once;
mod completions;
mod deadlines;
mod immediate;
mod link;
mod message;
mod transfer;
mod unclaimed;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::EndpointAddress;
use super::cause::{Cause, ConnectError, Peer, SUCCESS};
use super::config::{EndpointConfig, MAX_RETIRED};
use super::counters::EndpointCounters;
use super::operation::{Kind, Op, Operation, Table};
use super::path::Path;
use super::returned::Returned;
use super::shared::Status;
use crate::device::{Device, DeviceError, Pd};
use crate::ring::operation_table::{FutureSide, OperationKey, PrivateSide, SpareEntry};
use crate::wait::PollClock;

pub(super) use at_once::AtOnce;
use deadlines::Deadlines;
pub(super) use link::Link;

/// How often queue pairs are checked for ERR, and a drain is tried again.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Polls that take longer than this since the clock was read are slow: then each of them reads it. Nothing here is due to the millisecond.
const SLOW_POLLS: Duration = Duration::from_millis(1);
/// Less time than this begins with the next poll. More time begins when the clock is read next: after at most 64 polls or started
/// operations, and before a thread that waits or polls for the endpoint sleeps. [`EndpointConfig::deadline`] promises it.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

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
    returned: Arc<Returned>,
    /// For the next operation that [`start`](Engine::start) starts.
    spare: SpareEntry,
}

/// An operation that was started.
pub(super) enum Started {
    /// It has completed.
    Completed(Operation),
    InFlight(FutureSide),
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

    /// Gives an operation back, unless it has ended before.
    #[inline]
    fn give_back_if_live(&mut self, op: Op, code: u16) -> Result<(), Op> {
        op.give_back_if_live(self.table, code)?;
        self.counters.operations += 1;
        self.counters.held_operations -= 1;
        Ok(())
    }

    /// Gives an operation back of which nothing was posted. If it has ended before, it keeps its cause.
    #[cold]
    fn give_back_unposted(&mut self, mut op: Op, peer: Option<Peer>, cause: Cause) {
        let known = Cause::decode(op.cause(self.table)).unwrap_or(cause);
        op.with_value(self.table, |operation| operation.fail_all_blocks(peer, known));
        self.give_back(op, cause.encode());
    }
}

impl Engine {
    pub(super) fn new(
        device: &Device,
        pd: &Arc<Pd>,
        config: &EndpointConfig,
        status: &Arc<Status>,
        returned: &Arc<Returned>,
    ) -> Result<Engine, DeviceError> {
        Ok(Engine {
            device: device.clone(),
            pd: pd.clone(),
            config: config.clone(),
            link: Link::new(device, pd, config)?,
            retired: Vec::new(),
            deadlines: Deadlines::new(config.operations),
            clock: PollClock::with_slow(SLOW_POLLS),
            next_check: Instant::now(),
            counters: EndpointCounters::default(),
            status: status.clone(),
            returned: returned.clone(),
            spare: SpareEntry::default(),
        })
    }

    pub(super) fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    pub(super) fn address(&self) -> &EndpointAddress {
        self.link.address()
    }

    pub(super) fn connect(&mut self, peer: &EndpointAddress) -> Result<(), ConnectError> {
        self.link.connect(peer, &self.config)?;
        self.counters.connections += 1;
        self.status.connect(self.link.peer());
        Ok(())
    }

    /// Starts an operation at once, behind those that were submitted, and polls the device if that may end it. Hands the operation back if there
    /// are too many. An operation of which nothing is left to do, as is usual where the poster's thread executes it, comes back without a
    /// future.
    #[inline(always)]
    pub(super) fn start(
        &mut self,
        table: &Table,
        operation: Operation,
        timeout: Option<Duration>,
    ) -> Result<Started, Operation> {
        self.take_submitted(table);
        let kind = operation.kind;
        let (side, op) = table.lease_private(operation, &mut self.spare)?;
        self.start_operation(table, op, kind);
        // A poll may find what an operation waits for. A `recv` waits for what the peer does when it has seen the buffer.
        if !matches!(kind, Kind::Recv(_)) && !side.is_back(table) {
            self.poll(table);
        } else if self.clock.is_due() {
            self.check_time(table);
        }
        Ok(self.resolve(table, side, timeout))
    }

    /// Decides whether a started operation needs a future.
    #[inline(always)]
    fn resolve(&mut self, table: &Table, side: PrivateSide, timeout: Option<Duration>) -> Started {
        // What an `imm_recv` or a `recv` has brought must not be lost if its future is dropped, so it has one.
        let needs_none = |operation: &Operation| !matches!(operation.kind, Kind::ImmRecv | Kind::Recv(_));
        match side.resolve(table, &mut self.spare, SUCCESS, needs_none) {
            Ok(operation) => Started::Completed(operation),
            Err(side) => {
                if let Some(timeout) = timeout {
                    self.add_deadline(table, side.key(), timeout);
                }
                Started::InFlight(side)
            }
        }
    }

    #[inline]
    fn add_deadline(&mut self, table: &Table, key: OperationKey, timeout: Duration) {
        self.deadlines.add(key, timeout, |key| table.is_live(key));
        if timeout < SHORT_TIMEOUT {
            self.clock.read_soon();
        }
    }

    /// Gives up what is kept for the next operation, because a thread without the engine needs it.
    pub(super) fn free_spare(&mut self, table: &Table) {
        table.free_spare(&mut self.spare);
    }

    /// Takes what was submitted, polls the device, and posts what waits. Returns how much happened.
    #[inline]
    pub(super) fn run(&mut self, table: &Table, reap: bool) -> usize {
        let mut count = self.take_submitted(table);
        count += self.poll(table);
        if reap {
            let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
            count += self.link.reap_ended(&mut shared);
        }
        count
    }

    /// Polls the device, posts what waits, and does what is due by time.
    #[inline]
    fn poll(&mut self, table: &Table) -> usize {
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        let mut count = self.link.poll(&mut shared);
        count += self.link.post_waiting(&mut shared);
        if !self.retired.is_empty() || self.clock.is_due() {
            count += self.check_time(table);
        }
        count
    }

    #[inline]
    pub(super) fn take_submitted(&mut self, table: &Table) -> usize {
        if table.has_submitted() { self.take_all_submitted(table) } else { 0 }
    }

    fn take_all_submitted(&mut self, table: &Table) -> usize {
        let mut count = 0;
        table.take_submitted(|mut op| {
            count += 1;
            let (kind, timeout) = op.with_value(table, |operation| (operation.kind, operation.timeout));
            if let Some(timeout) = timeout {
                self.add_deadline(table, op.key(), timeout);
            }
            self.start_operation(table, op, kind);
        });
        count
    }

    #[inline]
    fn start_operation(&mut self, table: &Table, op: Op, kind: Kind) {
        let Engine { link, counters, status, .. } = self;
        counters.held_operations += 1;
        let mut shared = Shared { table, counters, status };
        if op.is_ended(table) {
            shared.give_back_unposted(op, link.peer(), Cause::Cancelled);
            return;
        }
        if let Some(cause) = link.refusal() {
            shared.give_back_unposted(op, link.peer(), cause);
            return;
        }
        match kind {
            Kind::Send => link.start_send(&mut shared, op),
            Kind::Recv(_) | Kind::ImmRecv => {
                if self.returned.has_any() {
                    self.returned.take().into_iter().for_each(|item| link.put_back(&mut shared, item));
                }
                match kind {
                    Kind::ImmRecv => link.start_imm_recv(&mut shared, op),
                    _ => link.start_recv(&mut shared, op),
                }
            }
            _ => link.start_transfer(&mut shared, op),
        }
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
    pub(super) fn max_sleep(&mut self, table: &Table, now: Instant) -> Duration {
        // Time passes without polls.
        self.clock.read_soon();
        let next_deadline = self.deadlines.next(now, |key| table.is_live(key));
        let until_deadline = next_deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(now));
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
        Ok(self.link.address().clone())
    }

    /// Takes the immediates and messages whose futures were dropped before anybody looked at them.
    pub(super) fn put_back_returned(&mut self, table: &Table) {
        let mut shared = Shared { table, counters: &mut self.counters, status: &self.status };
        self.returned.take().into_iter().for_each(|item| self.link.put_back(&mut shared, item));
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
