//! A completion queue with one lane: what a poll costs beside other work is the code that it executes.

use super::Cq;
use super::cq_lanes::HotLane;
use crate::device::Completion;

impl Cq {
    /// Reads at most one completion from the lane, if the queue has one that each poll reads; returns how many there were. `None` if it
    /// has not. What is elsewhere, [`poll`](Cq::poll) finds: it has to be called from time to time.
    #[inline(always)]
    pub(crate) fn poll_only_lane(&mut self, each: impl FnMut(&Completion)) -> Option<usize> {
        let [HotLane { qp, lane, last_used, .. }] = &mut self.hot[..] else { return None };
        self.polls = self.polls.wrapping_add(1);
        let count = lane.read(qp, 1, each);
        if count > 0 {
            *last_used = self.polls;
        }
        Some(count)
    }
}
