//! Looks at the hot lanes of a completion queue for less than a poll costs. What they do not see, [`poll`](Cq::poll) finds.

use core::sync::atomic::Ordering::Relaxed;

use super::Cq;
use super::cq::{CqShared, POLLS_PER_HOLE_CHECK, is_full_check};
use super::cq_lanes::HotLane;
use crate::device::Completion;
use crate::device::cq::NextReceive;

/// Pause instructions after the poll that reached the end of a stream of entries.
const CATCH_UP_PAUSES: u32 = 4;

impl Cq {
    /// Takes the next receive of a hot lane, or says that there is nothing to poll, if that is certain at a glance.
    #[inline(always)]
    pub(crate) fn take_receive(&mut self, to: &mut Completion) -> NextReceive {
        let polls = self.polls.wrapping_add(1);
        if is_full_check(polls) {
            return NextReceive::Unknown;
        }
        self.polls = polls;
        // Each lane has its turn.
        for _ in 0..self.hot.len() {
            let at = if self.next_hot < self.hot.len() { self.next_hot } else { 0 };
            self.next_hot = at + 1;
            let hot = &mut self.hot[at];
            if hot.lane.has_news(&hot.qp) {
                return self.take_hot(at, to);
            }
            hot.is_stream = false;
        }
        if !self.is_quiet() {
            return NextReceive::Unknown;
        }
        self.pause_behind_stream();
        NextReceive::Nothing
    }

    #[inline(never)]
    fn take_hot(&mut self, at: usize, to: &mut Completion) -> NextReceive {
        let HotLane { qp, lane, last_used, is_stream } = &mut self.hot[at];
        let was_stream = core::mem::replace(is_stream, true);
        *last_used = self.polls;
        // Behind a stream, one look says that this poll has reached the end, and the next one that nothing has come meanwhile.
        self.looks_before_pause = if was_stream { 2 } else { 0 };
        match lane.take(qp, was_stream, to) {
            true => NextReceive::Taken { is_stream: was_stream },
            false => NextReceive::Unknown,
        }
    }

    /// Whether there is nothing outside of the hot lanes, and nothing else to do for a poll. Counts as an empty poll then.
    #[inline(always)]
    fn is_quiet(&mut self) -> bool {
        let CqShared { ring, notices, .. } = &*self.shared;
        let polls = self.empty_polls.wrapping_add(1);
        let is_quiet = self.is_ring_quiet()
            && self.notices.is_empty()
            && !self.has_listed_lanes()
            && ring.header.overrun.load(Relaxed) == 0
            && !notices.has_new(self.seen_notices)
            && !polls.is_multiple_of(POLLS_PER_HOLE_CHECK);
        if is_quiet {
            self.empty_polls = polls;
        }
        is_quiet
    }

    /// Reads at most one completion from the lane, if the queue has one that each poll reads; returns how many there were. `None` if it
    /// has not, or if it is time for a poll. What is elsewhere, [`poll`](Cq::poll) finds: it has to be called from time to time.
    #[inline(always)]
    pub(crate) fn poll_only_lane(&mut self, each: impl FnMut(&Completion)) -> Option<usize> {
        let [HotLane { qp, lane, last_used, .. }] = &mut self.hot[..] else { return None };
        let polls = self.polls.wrapping_add(1);
        if is_full_check(polls) {
            return None;
        }
        self.polls = polls;
        let count = lane.read(qp, 1, each);
        if count > 0 {
            *last_used = self.polls;
        }
        Some(count)
    }

    /// Called after a look that has found nothing. If the poller has just caught up with a stream, another look at once would take the
    /// cache line from the producer while it writes its next entry. A response to something sent just now takes longer than the pause
    /// anyway.
    #[inline(always)]
    pub(super) fn pause_behind_stream(&mut self) {
        if self.looks_before_pause > 0 {
            self.looks_before_pause -= 1;
            if self.looks_before_pause == 0 {
                for _ in 0..CATCH_UP_PAUSES {
                    core::hint::spin_loop();
                }
            }
        }
    }
}
