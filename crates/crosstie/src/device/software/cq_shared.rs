//! The part of a completion queue that its queue pairs and the service thread share with its poller, and what they tell the poller.

use std::sync::Arc;

use super::cq_ring::CqRing;
use super::device_memory::Allocation;
use super::layout::taker_of_qp;
use super::qp::{QpShared, RecvSource};
use super::shared_recv::{SharedRecvQueue, TakenSlot};
use crate::device::Status;
use crate::ring::notices::Notices;

/// The part of a completion queue that its queue pairs share with it.
#[derive(Debug)]
pub(super) struct CqShared {
    pub(super) ring: CqRing,
    memory: Allocation,
    pub(super) notices: Notices<Notice>,
}

/// What the poller has to learn of, beside entries.
#[derive(Debug)]
pub(super) enum Notice {
    /// A queue pair uses this queue from now on.
    Added(Arc<QpShared>),
    /// A queue pair is gone; it has no entry in the ring at or behind the position of the notice.
    Removed(RemovedQp),
    /// The peer of this queue pair, which is in ERR, completes no more receives: the remaining ones are flushed, unless the queue pair
    /// was reset since, and is in another epoch.
    Flush { qp: Arc<QpShared>, epoch: u64 },
    /// Receives that nobody will complete. If several queues have a notice of them, the last one whose notice is due returns them, with
    /// completions of one of its own queue pairs.
    Return { returned: Arc<ReturnedRecvs>, qp_num: u32 },
}

/// Receives of a shared receive queue that the poller returns to the program, if they have not completed by the time when it has read what
/// their takers published. They were collected when the takers were gone, so it does not matter who got a taker's number since.
#[derive(Debug)]
pub(super) struct ReturnedRecvs {
    pub(super) queue: Arc<SharedRecvQueue>,
    pub(super) taken: Vec<TakenSlot>,
    pub(super) status: Status,
}

/// A queue pair that is gone. No peer is inside an operation on it.
#[derive(Debug)]
pub(super) struct RemovedQp {
    pub(super) qp: Arc<QpShared>,
    /// The receives of a shared receive queue that its peer had taken. The next queue pair with the same index can take others before
    /// the poller learns of the removal.
    pub(super) taken: Vec<TakenSlot>,
}

impl CqShared {
    pub(super) fn new(ring: CqRing, memory: Allocation) -> CqShared {
        CqShared { ring, memory, notices: Notices::new() }
    }

    /// Offset of the queue in the segment.
    pub(super) fn at(&self) -> u64 {
        self.memory.at()
    }

    /// Adds a queue pair whose completions will arrive here.
    pub(super) fn add_qp(&self, qp: &Arc<QpShared>) {
        self.post_notice(Notice::Added(qp.clone()));
    }

    /// Removes a queue pair whose peer is not inside an operation.
    pub(super) fn remove_qp(&self, qp: &Arc<QpShared>) {
        let taken = match &qp.recv {
            RecvSource::Shared(queue) => queue.taken_by(taker_of_qp(qp.num)),
            _ => Vec::new(),
        };
        self.post_notice(Notice::Removed(RemovedQp { qp: qp.clone(), taken }));
    }

    /// Posts a notice behind everything that has been reserved in the ring.
    pub(super) fn post_notice(&self, notice: Notice) {
        let must_wake = matches!(notice, Notice::Flush { .. } | Notice::Return { .. });
        self.notices.post(&self.ring.header.head.word, notice);
        if must_wake {
            self.ring.header.parker.wake();
        }
    }
}
