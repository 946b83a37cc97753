//! Waiting for a context together with other sources, see [`park_any`](crate::park_any).

use std::time::{Duration, Instant};

use super::{Context, OPERATION_WAIT_SLICE};
use crate::wait::Parker;
use crate::wait::any::sealed::Waitable;

impl<U> Waitable for Context<U> {
    fn parker(&self) -> Option<&Parker> {
        self.core.queues.recv_parker()
    }

    fn is_expecting(&self) -> bool {
        true
    }

    fn is_ready(&self, _: bool) -> bool {
        let core = &self.core;
        let (_, has_news) = core.poll_send_cq();
        has_news || core.queues.has_recv_completion() || core.has_something_to_report()
    }

    /// Sends everything: no batch is held back while nobody polls.
    fn prepare_park(&self) {
        self.flush();
        // Time passes without polls. The next poll checks deadlines and peers.
        self.core.liveness.clock.read_soon();
    }

    fn max_park(&self) -> Option<Duration> {
        // What the completion queue notifies nobody of: completions of operations, the next READ of a peer's position, deadlines.
        let now = Instant::now();
        let core = &self.core;
        let mut at = core.liveness.next_deadline();
        for connection in core.connections.borrow().iter().filter_map(|slot| slot.connection.as_ref()) {
            if connection.has_operations() {
                at = Some(at.map_or(now + OPERATION_WAIT_SLICE, |at| at.min(now + OPERATION_WAIT_SLICE)));
            }
            if let Some(read) = connection.next_position_read() {
                at = Some(at.map_or(read, |at| at.min(read)));
            }
        }
        at.map(|at| at.saturating_duration_since(now))
    }
}
