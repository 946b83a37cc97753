//! Waiting for a context together with other sources, see [`park_any`](crate::park_any).

use std::time::Duration;

use super::liveness::IDLE_POLLS;
use super::{Context, OPERATION_WAIT_SLICE};
use crate::wait::Parker;
use crate::wait::any::sealed::Waitable;

/// The longest park while calls have deadlines.
const DEADLINE_WAIT_SLICE: Duration = Duration::from_millis(1);

impl<U> Waitable for Context<U> {
    fn parker(&self) -> Option<&Parker> {
        self.core.queues.recv_parker()
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        let core = &self.core;
        if core.queues.has_send_completion() {
            // The next poll looks at the send CQ.
            core.flush_list.await_completions();
            return true;
        }
        core.queues.has_recv_completion()
            || !core.requests.borrow().is_empty()
            || !core.raw_completions.borrow().is_empty()
            || core.liveness.has_broken()
    }

    /// Sends everything: no batch is held back while nobody polls.
    fn prepare_park(&self) {
        self.flush();
        // Time passes without polls. The next poll checks deadlines and peers.
        self.core.idle_polls.set(IDLE_POLLS);
    }

    fn max_park(&self) -> Option<Duration> {
        let core = &self.core;
        match () {
            // The completion of an operation appears in the send CQ, which notifies nobody.
            () if core.has_operations() => Some(OPERATION_WAIT_SLICE),
            () if core.liveness.has_deadlines() => Some(DEADLINE_WAIT_SLICE),
            () => None,
        }
    }
}
