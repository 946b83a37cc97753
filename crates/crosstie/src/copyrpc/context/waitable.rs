//! Waiting for a context together with other sources, see [`park_any`](crate::park_any).

use std::time::{Duration, Instant};

use super::{Context, WAIT_SLICE};
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

    /// Sends everything: no batch is delayed while nobody polls.
    fn prepare_park(&self) {
        self.flush();
        // Time passes without polls. The next poll checks deadlines and peers.
        self.core.liveness.clock.read_soon();
    }

    /// The completion of an operation appears in the send CQ, which notifies nobody; a deadline may pass, and a READ of the
    /// peer's position may be due.
    fn max_park(&self) -> Option<Duration> {
        let slice = self.core.wait_slice(Instant::now());
        (slice < WAIT_SLICE).then_some(slice)
    }
}
