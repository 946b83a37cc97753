//! Events of a device, until the program collects them.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::lock::locked;
use crate::device::Event;

/// Events kept for a program that does not collect them; the oldest are dropped first.
const MAX_EVENTS: usize = 1024;

/// The events that were not collected yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    arrived: Condvar,
}

impl Events {
    pub(super) fn emit(&self, event: Event) {
        let mut queue = locked(&self.queue);
        if queue.len() == MAX_EVENTS {
            queue.pop_front();
        }
        queue.push_back(event);
        self.arrived.notify_one();
    }

    pub(super) fn wait(&self, timeout: Duration) -> Option<Event> {
        // None: without an end.
        let deadline = Instant::now().checked_add(timeout);
        let mut queue = locked(&self.queue);
        loop {
            if let Some(event) = queue.pop_front() {
                return Some(event);
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            queue = self.arrived.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
