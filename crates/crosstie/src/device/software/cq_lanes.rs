//! The lanes of a completion queue: which of them a poll looks at. `ring/ready_set.rs` has the protocol.
//!
//! ```text
//!  hot      at most MAX_HOT lanes: every poll reads them; their writers announce nothing
//!  listed   lanes whose writers have set their bit in CqHeader::ready since they were last read
//!  others   are empty, or their writers are about to set the bit
//! ```
//!
//! A lane with entries becomes hot if there is room among the hot ones, or if one of them was empty in [`MIN_QUIET_POLLS`] polls.

use std::sync::Arc;

use super::Cq;
use super::cq::PendingFlush;
use super::cq_shared::RemovedQp;
use super::lane_reader::LaneReader;
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
    /// Its lane, if its receives complete here, unless the lane is hot.
    pub(super) lane: Option<LaneReader>,
}

/// A lane that is looked at in every poll. It is kept apart from the others, so that a look that finds nothing takes few instructions.
#[derive(Debug)]
pub(super) struct HotLane {
    pub(super) qp: Arc<QpShared>,
    pub(super) lane: LaneReader,
    /// [`Cq::polls`] when the lane had an entry.
    pub(super) last_used: u32,
    /// Whether the last look found an entry.
    pub(super) is_stream: bool,
}

impl Cq {
    /// Takes the next completion of a lane that is not hot and whose writer has announced entries.
    #[cold]
    #[inline(never)]
    pub(super) fn next_of_listed(&mut self, to: &mut Completion) -> bool {
        let shared = self.shared.clone();
        shared.ring.header.ready.take(|index| {
            // There was a notice of a new queue pair before its peer could announce anything.
            if self.has_new_notices() {
                self.apply_notices();
            }
            self.list_lane(index);
        });
        while let Some(index) = self.listed.pop_front() {
            let Some(Some(Member { qp, lane: Some(lane) })) = self.qps.get_mut(index) else { continue };
            lane.is_listed = false;
            if lane.read(qp, false, to) {
                // There may be more, which must not keep other lanes waiting.
                if !self.make_hot(index) {
                    self.list_lane(index);
                }
                return true;
            }
        }
        false
    }

    /// Has the lane of the queue pair with this index looked at, unless it is hot.
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
        if self.hot.len() == MAX_HOT {
            let is_quiet = |hot: &HotLane| self.polls.wrapping_sub(hot.last_used) >= MIN_QUIET_POLLS;
            let Some(at) = self.hot.iter().position(is_quiet) else { return false };
            let HotLane { qp, lane, .. } = self.hot.swap_remove(at);
            lane.stop_polling();
            let quiet = qp.index() as usize;
            if let Some(Some(member)) = self.qps.get_mut(quiet) {
                member.lane = Some(lane);
            }
            self.list_lane(quiet);
        }
        if let Some(Some(member)) = self.qps.get_mut(index)
            && let Some(lane) = member.lane.take()
        {
            lane.start_polling();
            self.hot.push(HotLane { qp: member.qp.clone(), lane, last_used: self.polls, is_stream: false });
        }
        true
    }

    /// The lane of a queue pair, hot or not.
    pub(super) fn lane_of(&mut self, qp: &QpShared) -> Option<&mut LaneReader> {
        match self.hot.iter().position(|hot| hot.qp.num == qp.num) {
            Some(at) => Some(&mut self.hot[at].lane),
            None => match self.qps.get_mut(qp.index() as usize) {
                Some(Some(member)) if member.qp.num == qp.num => member.lane.as_mut(),
                _ => None,
            },
        }
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

    pub(super) fn remove_member(&mut self, removed: &RemovedQp) {
        let qp = &removed.qp;
        let index = qp.index() as usize;
        let is_known = |member: &mut Member| member.qp.num == qp.num;
        if let Some(lane) = self.lane_of(qp) {
            lane.drop_entries(qp, qp.epoch());
            // Receives that the peer had taken and not completed when it died: free again, without a completion, unless they have
            // completed meanwhile.
            if let RecvSource::Shared(queue) = &qp.recv {
                for taken in &removed.taken {
                    queue.complete_taken(*taken);
                }
            }
        }
        self.hot.retain(|hot| hot.qp.num != qp.num);
        if self.qps.get_mut(index).and_then(|member| member.take_if(is_known)).is_some() {
            self.listed.retain(|listed| *listed != index);
        }
        let is_of_removed = |flush: &PendingFlush| matches!(flush, PendingFlush::Connection { qp: flushed, .. } if flushed.num == qp.num);
        self.flushes.retain(|flush| !is_of_removed(flush));
    }
}
