//! Deadlines, dead peers, and the end of broken connections.
//!
//! The clock costs more than a poll, so polls are counted and the clock is read rarely:
//!
//! | check | when | what |
//! | --- | --- | --- |
//! | deadlines | every [`DEADLINE_INTERVAL`]th poll while calls have deadlines | calls whose deadline has passed end as timed out |
//! | peers | after [`IDLE_POLLS`] polls without news, and every [`BUSY_POLLS`]th poll; at most every [`CHECK_INTERVAL`] | queue pairs in the error state end their connection |
//! | probe | with a check of the peers, at most every [`PROBE_INTERVAL`] | a silent peer with calls to answer is probed by a READ |
//! | broken | the poll after a failure was found | the connection ends, and with it its pending calls |
//!
//! A failure can be found deep inside a flush or a callback. So it is only noted there ([`ContextCore::mark_broken`]); the
//! connection ends at the end of the poll, when no other borrow is held.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::ContextCore;
use crate::copyrpc::connection::Connection;
use crate::copyrpc::error::{CallFailed, Failure};
use crate::copyrpc::payload::Payload;
use crate::device::Status;

/// Polls without news before the peers are checked.
pub(super) const IDLE_POLLS: u32 = 1024;
/// Polls of any kind before the peers are checked: other connections may be busy while one peer is dead.
pub(super) const BUSY_POLLS: u32 = 1 << 12;
/// Polls between two checks of the deadlines.
pub(super) const DEADLINE_INTERVAL: u32 = 64;
/// The least time between two checks of the peers, however fast polls are.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// The least time between two probes of a silent peer.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

pub(super) struct Liveness<U> {
    /// Connections that failed and have not been ended.
    broken: RefCell<Vec<(Rc<Connection<U>>, Failure)>>,
    has_broken: Cell<bool>,
    /// Whether any call may have a deadline.
    has_deadlines: Cell<bool>,
    next_check: Cell<Instant>,
    next_probe: Cell<Instant>,
}

impl<U> Liveness<U> {
    pub(super) fn new() -> Liveness<U> {
        Liveness {
            broken: RefCell::default(),
            has_broken: Cell::new(false),
            has_deadlines: Cell::new(false),
            next_check: Cell::new(Instant::now()),
            next_probe: Cell::new(Instant::now()),
        }
    }

    #[inline(always)]
    pub(super) fn has_broken(&self) -> bool {
        self.has_broken.get()
    }

    #[inline(always)]
    pub(super) fn has_deadlines(&self) -> bool {
        self.has_deadlines.get()
    }

    /// Notes that a call with a deadline is made.
    pub(super) fn note_deadline(&self) {
        self.has_deadlines.set(true);
    }
}

impl<U> ContextCore<U> {
    /// Notes that a connection failed. The end of the poll ends it.
    #[cold]
    pub(super) fn mark_broken(&self, connection: Rc<Connection<U>>, failure: Failure) {
        self.liveness.broken.borrow_mut().push((connection, failure));
        self.liveness.has_broken.set(true);
    }

    pub(super) fn mark_all_broken(&self, failure: Failure) {
        let connections = self.connections.borrow();
        for connection in connections.iter().filter_map(|slot| slot.connection.clone()) {
            self.mark_broken(connection, failure);
        }
    }

    /// Does the checks that are due, and ends broken connections. Returns the number of calls that ended.
    #[cold]
    pub(super) fn check_liveness(
        &self,
        check_peers: bool,
        expire_deadlines: bool,
        on_response: &mut impl FnMut(U, Result<Payload<'_>, CallFailed>),
    ) -> usize {
        self.idle_polls.set(if check_peers { 0 } else { self.idle_polls.get() });
        let mut ended = Vec::new();
        if check_peers || expire_deadlines {
            let now = Instant::now();
            if expire_deadlines {
                self.expire_deadlines(now, &mut ended);
            }
            if check_peers && now >= self.liveness.next_check.get() {
                self.liveness.next_check.set(now + CHECK_INTERVAL);
                self.check_peers(now);
            }
        }
        self.end_broken_connections(&mut ended);
        let count = ended.len();
        for (user, cause) in ended {
            on_response(user, Err(cause));
        }
        count
    }

    fn expire_deadlines(&self, now: Instant, ended: &mut Vec<(U, CallFailed)>) {
        let mut has_more = false;
        for connection in self.connections.borrow().iter().filter_map(|slot| slot.connection.as_ref()) {
            has_more |= connection.expire_deadlines(now, ended);
        }
        self.liveness.has_deadlines.set(has_more);
    }

    /// Finds connections whose queue pair is in the error state, and probes silent peers.
    fn check_peers(&self, now: Instant) {
        self.refill_all_receives();
        let probe = now >= self.liveness.next_probe.get();
        if probe {
            self.liveness.next_probe.set(now + PROBE_INTERVAL);
        }
        for connection in self.connections.borrow().iter().filter_map(|slot| slot.connection.as_ref()) {
            let checked = if connection.is_broken() {
                Err(Failure::Broken(Status::RetryExceeded))
            } else if probe {
                connection.probe_peer(&mut self.counters.borrow_mut())
            } else {
                Ok(())
            };
            if let Err(failure) = checked {
                self.mark_broken(connection.clone(), failure);
            }
        }
    }

    fn end_broken_connections(&self, ended: &mut Vec<(U, CallFailed)>) {
        self.liveness.has_broken.set(false);
        for (connection, failure) in self.liveness.broken.take() {
            if connection.failure().is_some() {
                continue;
            }
            let users = connection.fail(failure);
            self.collect_ready(&connection);
            let mut counters = self.counters.borrow_mut();
            counters.failures += 1;
            counters.violations += u64::from(matches!(failure, Failure::Violation(_)));
            ended.extend(users.into_iter().map(|user| (user, CallFailed::Connection(failure))));
        }
    }
}
