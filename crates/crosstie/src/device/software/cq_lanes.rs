//! The lanes of a completion queue: which of them a poll looks at. `ring/ready_set.rs` has the protocol.
//!
//! ```text
//!  hot      at most MAX_HOT lanes: every poll reads them; their writers announce nothing
//!  listed   lanes whose writers have set their bit in CqHeader::ready since they were last read
//!  others   are empty, or their writers are about to set the bit
//! ```
//!
//! A lane with entries becomes hot if there is room among the hot ones, or if one of them was empty in [`MIN_QUIET_POLLS`] polls.

use core::sync::atomic::Ordering::Acquire;
use std::sync::Arc;

use super::Cq;
use super::cq::{PendingFlush, RemovedQp};
use super::lane::LaneReader;
use super::qp::{QpShared, RecvSource};
use crate::device::Completion;

/// Most lanes that are looked at in every poll.
pub(super) const MAX_HOT: usize = 8;
/// A hot lane that was empty in so many polls can be replaced by another one. That takes a system call.
pub(super) const MIN_QUIET_POLLS: u32 = 1 << 16;

/// A queue pair that uses this queue.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) qp: Arc<QpShared>,
    /// Its lane, if its receives complete here.
    pub(super) lane: Option<LaneReader>,
}

impl Cq {
    /// Polls the lanes that are not hot and whose writers have announced entries.
    #[cold]
    pub(super) fn poll_listed(&mut self, max: usize, each: &mut impl FnMut(&Completion)) -> usize {
        let shared = self.shared.clone();
        shared.ring.header.ready.take(|index| {
            // A new queue pair was recorded before its peer could announce anything.
            if shared.version.load(Acquire) != self.seen_version {
                self.apply_changes();
            }
            self.list_lane(index);
        });
        let mut count = 0;
        while count < max
            && let Some(index) = self.listed.pop_front()
        {
            let Some(Some(Member { qp, lane: Some(lane) })) = self.qps.get_mut(index) else { continue };
            lane.is_listed = false;
            let found = lane.read(qp, max - count, &mut *each);
            count += found;
            // There may be more, which must not keep other lanes waiting.
            if found > 0 && !self.make_hot(index) && count >= max {
                self.list_lane(index);
            }
        }
        count
    }

    /// Has the lane of the queue pair with this index looked at.
    fn list_lane(&mut self, index: usize) {
        if let Some(Some(Member { lane: Some(lane), .. })) = self.qps.get_mut(index)
            && !lane.is_listed
        {
            lane.is_listed = true;
            self.listed.push_back(index);
        }
    }

    /// Looks at a lane in every poll from now on, if there is room for it among the hot ones, or if one of them has long been empty.
    /// Returns whether it is looked at in every poll.
    fn make_hot(&mut self, index: usize) -> bool {
        if self.hot.contains(&index) {
            return true;
        }
        if self.hot.len() == MAX_HOT {
            let is_quiet = |index: &usize| match self.qps.get(*index) {
                Some(Some(Member { lane: Some(lane), .. })) => lane.empty_polls >= MIN_QUIET_POLLS,
                _ => true,
            };
            let Some(at) = self.hot.iter().position(is_quiet) else { return false };
            let quiet = self.hot.swap_remove(at);
            if let Some(Some(Member { lane: Some(lane), .. })) = self.qps.get_mut(quiet) {
                lane.stop_polling();
                self.list_lane(quiet);
            }
        }
        self.hot.push(index);
        if let Some(Some(Member { lane: Some(lane), .. })) = self.qps.get_mut(index) {
            lane.start_polling();
        }
        true
    }

    pub(super) fn add_member(&mut self, qp: Arc<QpShared>) {
        let index = qp.index() as usize;
        if self.qps.len() <= index {
            self.qps.resize_with(index + 1, || None);
            // Later lists need no memory.
            self.listed.reserve(self.qps.len() - self.listed.len());
        }
        let completes_here = Arc::ptr_eq(&qp.recv_cq, &self.shared);
        let lane = qp.lane.as_ref().filter(|_| completes_here).map(LaneReader::new);
        self.qps[index] = Some(Member { qp, lane });
    }

    pub(super) fn remove_member(&mut self, removed: RemovedQp) {
        let qp = &removed.qp;
        let index = qp.index() as usize;
        let is_known = |member: &mut Member| member.qp.num == qp.num;
        if let Some(mut member) = self.qps.get_mut(index).and_then(|member| member.take_if(is_known)) {
            self.hot.retain(|hot| *hot != index);
            self.listed.retain(|listed| *listed != index);
            if let Some(lane) = &mut member.lane {
                lane.drop_entries(qp);
                // Receives that the peer had taken and not completed when it died.
                if let RecvSource::Shared(queue) = &qp.recv {
                    removed.taken.iter().for_each(|taken| queue.free_taken(*taken));
                }
            }
        }
        self.flushes
            .retain(|flush| !matches!(flush, PendingFlush::Connection(flushed) if flushed.num == qp.num));
        self.removed.push_back(removed);
    }
}
