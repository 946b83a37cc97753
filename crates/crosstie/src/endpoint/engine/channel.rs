//! A queue pair and what is outstanding on it.

use crosstie_protocol::endpoint::send_queue::{SendQueue, WorkRequest};
use crosstie_protocol::endpoint::slots::{MAX_SLOTS, SlotKey};
use crosstie_protocol::endpoint::wr_id::{WorkKind, WrId};

use crate::device::{Data, PostError, Posted, RcQp, SendOp, SendWr, Signal};

/// Work requests of one queue pair of which at least one is signaled.
pub(super) const SIGNAL_INTERVAL: u32 = 16;
/// The slot of work requests that belong to no operation.
const NO_SLOT: SlotKey = SlotKey { index: (MAX_SLOTS - 1) as u16, generation: 0 };
/// A work request that belongs to no operation.
pub(super) const CONTROL: WorkRequest =
    WorkRequest { kind: WorkKind::Control, slot: NO_SLOT, first_block: 0, blocks: 0, signaled: false };

/// See the [module](self).
pub(super) struct Channel {
    pub(super) qp: RcQp,
    pub(super) sends: SendQueue<SIGNAL_INTERVAL>,
    /// Receives that are kept posted.
    pub(super) receives: u32,
    /// Receives among the completions that were taken together, if they are counted.
    pub(super) used_receives: u32,
}

impl Channel {
    /// Posts a request. The send queue has room.
    #[inline(always)]
    pub(super) fn post(
        &mut self,
        index: usize,
        wr: SendWr<'_>,
        request: WorkRequest,
    ) -> Result<Posted, PostError> {
        let Channel { qp, sends, .. } = self;
        post(sends, index, wr, request, |wr| qp.post(wr))
    }

    /// Posts a request that is flushed, because the queue pair is in ERR. Its completion tells that the requests before it are over: those
    /// that were not signaled and have succeeded have none of their own.
    pub(super) fn mark_end(&mut self, index: usize) {
        if self.sends.unsignaled() > 0 && self.sends.room() > 0 {
            // Without it the drain waits for the limit.
            self.post(index, SendWr::new(0, SendOp::Send, Data::Inline(&[])).signaled(), CONTROL).ok();
        }
    }
}

/// Posts a request with `post`, and keeps a record of it if the device has not executed it. It asks for a completion if `wr` does, or if one
/// is due.
#[inline(always)]
pub(super) fn post(
    sends: &mut SendQueue<SIGNAL_INTERVAL>,
    index: usize,
    mut wr: SendWr<'_>,
    request: WorkRequest,
    post: impl FnOnce(&SendWr<'_>) -> Result<Posted, PostError>,
) -> Result<Posted, PostError> {
    let signaled = wr.signal != Signal::OnFailure || sends.is_signal_due();
    wr.signal = match (signaled, sends.unsignaled()) {
        (false, _) => Signal::OnFailure,
        (true, 0) => Signal::IfQueued,
        // Its completion is that of the requests before it, too.
        (true, _) => Signal::Always,
    };
    let WorkRequest { kind, slot, .. } = request;
    wr.wr_id = WrId { kind, qp: index as u8, slot, position: sends.next_position() }.encode();
    let posted = post(&wr)?;
    if posted == Posted::Queued {
        sends.push(WorkRequest { signaled, ..request });
    }
    Ok(posted)
}
