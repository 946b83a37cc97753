//! Which connections have something to post.
//!
//! Every call, reply and release puts its connection on a list, each connection at most once. A poll flushes all
//! connections on the list. A connection stays on the list while it delays a batch, has a READ to post later or waits for
//! completions. While any connection waits for completions, every poll looks at the send CQ.
//!
//! What one flush posts, and in which form, is decided by [`flush_policy`](crate::copyrpc::flush_policy).

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::ContextCore;
use crate::copyrpc::connection::{ConnectionCore, FlushOutcome};
use crate::copyrpc::flush_policy::SendTiming;

pub(super) struct FlushList<U> {
    /// Connections with something to post, each once.
    connections: RefCell<Vec<Rc<ConnectionCore<U>>>>,
    /// Whether the list is not empty. A cell of its own: most polls look at nothing else.
    has_connections: Cell<bool>,
    /// Whether a connection waits for completions.
    awaits_completions: Cell<bool>,
}

impl<U> FlushList<U> {
    pub(super) fn new() -> FlushList<U> {
        FlushList {
            connections: RefCell::new(Vec::with_capacity(64)),
            has_connections: Cell::new(false),
            awaits_completions: Cell::new(false),
        }
    }

    #[inline]
    pub(super) fn has_connections(&self) -> bool {
        self.has_connections.get()
    }

    #[inline]
    pub(super) fn awaits_completions(&self) -> bool {
        self.awaits_completions.get()
    }
}

impl<U> ContextCore<U> {
    /// Lets the next poll flush a connection.
    #[inline]
    pub(super) fn schedule_flush(&self, connection: &Rc<ConnectionCore<U>>) {
        if !connection.is_scheduled.replace(true) {
            self.flush_list.has_connections.set(true);
            self.flush_list.connections.borrow_mut().push(connection.clone());
        }
    }

    /// Flushes a connection after a message was written: now, or with the next poll.
    #[inline(always)]
    pub(super) fn flush_after_write(&self, connection: &Rc<ConnectionCore<U>>, timing: SendTiming) {
        match timing {
            SendTiming::Sent => return,
            SendTiming::WithNextPoll => {}
            SendTiming::Now => {
                if let Err(failure) = connection.flush(false) {
                    self.mark_broken(connection.clone(), failure);
                }
            }
        }
        self.schedule_flush(connection);
    }

    /// Flushes all connections on the list. `may_delay`: small batches may wait for the next poll.
    pub(super) fn flush_connections(&self, may_delay: bool) {
        let mut connections = self.flush_list.connections.borrow_mut();
        let mut awaits_completions = false;
        let mut has_refused_requests = false;
        let mut next = 0;
        while let Some(connection) = connections.get(next) {
            let outcome = match connection.flush(may_delay) {
                Ok(outcome) => outcome,
                Err(failure) => {
                    self.mark_broken(connection.clone(), failure);
                    FlushOutcome::Done
                }
            };
            has_refused_requests |= connection.has_refused_request.get();
            awaits_completions |= outcome == FlushOutcome::AwaitsCompletions;
            if outcome == FlushOutcome::Done {
                connection.is_scheduled.set(false);
                connections.swap_remove(next);
            } else {
                next += 1;
            }
        }
        self.flush_list.has_connections.set(!connections.is_empty());
        self.flush_list.awaits_completions.set(awaits_completions);
        drop(connections);
        if has_refused_requests {
            self.collect_behind_refused();
        }
    }

    /// Collects requests that may have become complete because one before them was refused.
    #[cold]
    fn collect_behind_refused(&self) {
        let connections = self.connections.borrow();
        for connection in connections.iter() {
            if connection.has_refused_request.take() {
                self.collect_ready(connection);
            }
        }
    }
}
