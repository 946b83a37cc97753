//! The engine: posts work requests and takes completions. One thread at a time runs it.
//!
//! - `mod.rs`: takes submitted operations, keeps deadlines, replaces connections.
//! - `link.rs`: one connection: its queue pairs, and its begin, end and drain.
//! - `channel.rs`: one queue pair: how a work request is posted, and what is kept of it.
//! - `posting.rs`: from an operation to work requests.
//! - `transfer.rs`: READ, WRITE, batches, messages: from an operation to its slot.
//! - `message.rs`: `send` and `recv`.
//! - `withdrawal.rs`: messages and buffers of `recv`s that have ended.
//! - `immediate.rs`: `imm_recv` and credit for immediates.
//! - `completions.rs`: what a completion means.
//!
//! What they have in common is in small files without a connection: `shared.rs`, `slot.rs`, `taken.rs`, `unclaimed.rs`.

mod channel;
mod completions;
mod deadlines;
mod immediate;
mod link;
mod message;
mod posting;
mod shared;
mod slot;
mod taken;
mod transfer;
mod unclaimed;
mod withdrawal;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::EndpointAddress;
use super::cause::{Cause, ConnectError};
use super::config::{EndpointConfig, MAX_RETIRED};
use super::counters::EndpointCounters;
use super::operation::{Kind, Op, Operation, Table};
use super::path::Path;
use super::returned::Returned;
use super::status::Status;
use crate::device::{Device, DeviceError, Pd};
use crate::ring::operation_table::{FutureSide, OperationKey, ReservedEntry};
use crate::wait::PollClock;

use deadlines::Deadlines;
use link::Link;
use shared::Shared;
use transfer::Begun;

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
    spare: Option<ReservedEntry>,
}

/// What has become of an operation that was to be started.
pub(super) enum Started {
    /// It has completed, and needs no entry.
    Completed,
    /// It was taken.
    InFlight(FutureSide),
    /// There are too many.
    Refused,
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
            spare: None,
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

    /// Starts an operation, behind those that were submitted. If it is over then, it needs no entry: so it is on a device that executes requests
    /// while they are posted. Otherwise the device is polled, if that may end it.
    #[inline(always)]
    pub(super) fn start(
        &mut self,
        table: &Table,
        operation: &mut Operation,
        timeout: Option<Duration>,
    ) -> Started {
        self.take_submitted(table);
        let Some(entry) = self.spare.take().or_else(|| table.reserve()) else { return Started::Refused };
        if operation.kind == Kind::Send && self.link.pairing.waiting_buffers() == 0 {
            // The peer may have announced one.
            self.poll(table);
        } else if self.clock.is_due() {
            self.check_time(table);
        }
        let begun = self.link.begin(&mut self.counters, operation);
        if let Begun::Done = begun {
            self.counters.operations += 1;
            self.spare = Some(entry);
            return Started::Completed;
        }
        let kind = operation.kind;
        let (side, op) = table.lease_reserved(entry, operation.take());
        self.track(table, op, kind, begun);
        // A poll may find what it waits for. A `recv` waits for what the peer does when it has seen the buffer.
        if !matches!(kind, Kind::Recv(_)) && !side.word(table).is_ended() {
            self.poll(table);
        }
        if let Some(timeout) = timeout {
            self.add_deadline(table, side.key(), timeout);
        }
        Started::InFlight(side)
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
        if let Some(entry) = self.spare.take() {
            table.free_reserved(entry);
        }
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
            let begun = match op.is_ended(table) {
                true => Begun::Waits,
                false => op.with_value(table, |operation| self.link.begin(&mut self.counters, operation)),
            };
            self.track(table, op, kind, begun);
        });
        count
    }

    /// Keeps an operation that was begun.
    fn track(&mut self, table: &Table, op: Op, kind: Kind, begun: Begun) {
        let Engine { link, counters, status, .. } = self;
        counters.held_operations += 1;
        let mut shared = Shared { table, counters, status };
        if let Begun::Waits = begun {
            let ended = op.is_ended(table).then_some(Cause::Cancelled);
            if let Some(cause) = ended.or_else(|| link.refusal()) {
                shared.give_back_unposted(op, link.peer(), cause);
                return;
            }
            if matches!(kind, Kind::Recv(_) | Kind::ImmRecv) && self.returned.has_any() {
                self.returned.take().into_iter().for_each(|item| link.put_back(&mut shared, item));
            }
        }
        link.track(&mut shared, op, begun);
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

#[cfg(all(test, not(loom)))]
mod tests;
