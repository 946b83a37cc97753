//! Deadlines, dead peers, and the end of broken connections.
//!
//! | check | when | what |
//! | --- | --- | --- |
//! | deadlines | when the earliest one has passed | calls whose deadline has passed end as timed out |
//! | peers | every [`CHECK_INTERVAL`] | queue pairs in the error state end their connection |
//! | probe, refill | with a check of the peers, at most every [`FULL_CHECK_INTERVAL`] | a silent peer with calls to answer is probed by a READ; receives that were used without a completion are posted again |
//! | failures | with the next poll | broken connections end, and all calls that ended are reported |
//!
//! All of it goes by time. Polls read the clock as [`poll_clock`](crate::wait::poll_clock) says; a wait reads it each time that
//! it wakes up, and wakes up for the earliest deadline and for the peers.
//!
//! A failure can be found deep inside a flush or a callback. So it is only noted there ([`ContextCore::mark_broken`]); the
//! connection ends at the end of the poll, when nothing else is borrowed. Until then nothing more of it is parsed. Calls that ended are
//! kept until their callback runs, so that a callback that panics hides no other call.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::ContextCore;
use super::request::PollHandler;
use crate::copyrpc::connection::ConnectionCore;
use crate::copyrpc::error::{CallFailed, Failure};
use crate::device::Status;
use crate::wait::PollClock;

/// The least time between two checks of the peers, however fast polls are.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// The least time between two probes of a silent peer, and between two searches of the receive queue for receives that were used
/// without a completion: such a search visits every receive.
const FULL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

pub(super) struct Liveness<U> {
    pub(super) clock: PollClock,
    /// Connections that failed and have not been ended.
    broken: RefCell<Vec<(Rc<ConnectionCore<U>>, Failure)>>,
    /// Calls that ended without a response and have not been reported.
    ended: RefCell<VecDeque<(U, CallFailed)>>,
    /// Whether there are any of both.
    has_failures: Cell<bool>,
    /// No pending call has an earlier deadline.
    next_deadline: Cell<Option<Instant>>,
    next_check: Cell<Instant>,
    next_full_check: Cell<Instant>,
}

impl<U> Liveness<U> {
    pub(super) fn new() -> Liveness<U> {
        Liveness {
            clock: PollClock::new(),
            broken: RefCell::default(),
            ended: RefCell::default(),
            has_failures: Cell::new(false),
            next_deadline: Cell::new(None),
            next_check: Cell::new(Instant::now()),
            next_full_check: Cell::new(Instant::now()),
        }
    }

    /// Whether connections or calls have failed that the next poll will report.
    pub(super) fn has_failures(&self) -> bool {
        self.has_failures.get()
    }

    /// Lets the next poll, or the one that is under way, end what has failed.
    fn note_failure(&self) {
        self.has_failures.set(true);
        self.clock.read_soon();
    }

    /// No pending call has an earlier deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline.get()
    }

    /// Notes that a call with a deadline is made.
    pub(super) fn note_deadline(&self, deadline: Instant) {
        let next = self.next_deadline.get().map_or(deadline, |next| next.min(deadline));
        self.next_deadline.set(Some(next));
    }
}

impl<U> ContextCore<U> {
    /// Notes that a connection failed. The end of the poll ends it; until then nothing more of it is parsed.
    #[cold]
    pub(super) fn mark_broken(&self, connection: Rc<ConnectionCore<U>>, failure: Failure) {
        connection.stop_receiving();
        self.liveness.broken.borrow_mut().push((connection, failure));
        self.liveness.note_failure();
    }

    pub(super) fn mark_all_broken(&self, failure: Failure) {
        let connections = self.connections.borrow();
        for connection in connections.iter() {
            self.mark_broken(connection.clone(), failure);
        }
    }

    /// Does the checks that are due, ends broken connections, and reports calls that ended. Returns how many there were.
    #[cold]
    pub(super) fn check_liveness(&self, handler: &mut impl PollHandler<U>) -> usize {
        let now = self.liveness.clock.read();
        if now >= self.liveness.next_check.get() {
            // Errors of work requests that have not asked for a completion.
            self.poll_send_cq();
        }
        self.check_time(now, self.queues.is_recv_cq_drained());
        self.end_broken_connections();
        let mut count = 0;
        loop {
            // If the callback panics, the next poll continues with the others.
            let next = self.liveness.ended.borrow_mut().pop_front();
            let Some((user, cause)) = next else { break };
            count += 1;
            handler.on_response(user, Err(cause));
        }
        // A callback may have found another failure. The next poll ends that connection.
        self.liveness.has_failures.set(!self.liveness.broken.borrow().is_empty());
        count
    }

    /// Does what is due at `now`: deadlines and peers. `is_drained`: the receive CQ was seen empty.
    pub(super) fn check_time(&self, now: Instant, is_drained: bool) {
        if self.liveness.next_deadline.get().is_some_and(|deadline| deadline <= now) {
            self.expire_deadlines(now);
        }
        if now >= self.liveness.next_check.get() {
            self.liveness.next_check.set(now + CHECK_INTERVAL);
            let is_full_check = now >= self.liveness.next_full_check.get();
            if is_full_check {
                self.liveness.next_full_check.set(now + FULL_CHECK_INTERVAL);
                if is_drained {
                    self.refill_all_receives();
                }
            }
            self.check_peers(is_full_check);
        }
    }

    fn expire_deadlines(&self, now: Instant) {
        let mut ended = self.liveness.ended.borrow_mut();
        let connections = self.connections.borrow();
        let next =
            connections.iter().filter_map(|connection| connection.expire_deadlines(now, &mut ended)).min();
        self.liveness.next_deadline.set(next);
        if !ended.is_empty() {
            self.liveness.note_failure();
        }
    }

    /// Finds connections whose queue pair is in the error state, and probes silent peers.
    fn check_peers(&self, probe: bool) {
        for connection in self.connections.borrow().iter() {
            let checked = if connection.is_broken() {
                Err(Failure::Broken(Status::RetryExceeded))
            } else if probe {
                connection.probe_peer()
            } else {
                Ok(())
            };
            if let Err(failure) = checked {
                self.mark_broken(connection.clone(), failure);
            }
        }
    }

    fn end_broken_connections(&self) {
        for (connection, failure) in self.liveness.broken.take() {
            if connection.failure().is_some() {
                continue;
            }
            let users = connection.fail(failure);
            self.collect_ready(&connection);
            self.counters.failures.add(1);
            self.counters.violations.add(usize::from(matches!(failure, Failure::Violation(_))));
            let ended = users.into_iter().map(|user| (user, CallFailed::Connection(failure)));
            self.liveness.ended.borrow_mut().extend(ended);
        }
    }
}
