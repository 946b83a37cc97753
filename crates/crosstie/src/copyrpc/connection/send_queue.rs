//! The send queue of a connection, and its account.
//!
//! At most [`SEND_DEPTH`] work requests are outstanding: those that the device has queued. (Some it executes while they are posted.) A WRITE of a
//! batch asks for a completion only once in [`SIGNAL_INTERVAL`], and that completion stands for itself and the unsignaled WRITEs before it. All
//! other work requests are signaled and stand for themselves.

use std::rc::Rc;

use crate::copyrpc::counters::RunningCounters;
use crate::copyrpc::flush_policy::{SEND_DEPTH, SIGNAL_INTERVAL, WriteSignaling};
use crate::copyrpc::wr_id::{SendKind, encode_wr_id};
use crate::device::{Batch, Data, PostError, Posted, RcQp, SendOp, SendWr, Sge};

pub(in crate::copyrpc) struct SendQueue {
    pub(super) qp: RcQp,
    pub(in crate::copyrpc) account: SendAccount,
}

/// What of the send queue is in use.
pub(in crate::copyrpc) struct SendAccount {
    /// The key of the connection.
    key: u32,
    /// Work requests that are not known to be complete.
    outstanding: u32,
    signaling: WriteSignaling,
    /// Bytes that the queue pair takes inline.
    pub(super) max_inline: usize,
    pub(in crate::copyrpc) counters: Rc<RunningCounters>,
}

/// Where work requests go: to the queue pair, or to a list for which the device gets one doorbell.
pub(super) trait Poster {
    fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError>;
}

impl Poster for RcQp {
    #[inline]
    fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        RcQp::post(self, wr)
    }
}

impl Poster for Batch<'_> {
    #[inline]
    fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        Batch::post(self, wr)
    }
}

impl SendQueue {
    pub(super) fn new(qp: RcQp, key: u32, max_inline: u32, counters: Rc<RunningCounters>) -> SendQueue {
        let (signaling, max_inline) = (WriteSignaling::new(), max_inline as usize);
        SendQueue { qp, account: SendAccount { key, outstanding: 0, signaling, max_inline, counters } }
    }

    /// Posts a READ or WRITE that has a completion of its own.
    pub(in crate::copyrpc) fn post_signaled(
        &mut self,
        kind: SendKind,
        op: SendOp,
        piece: Sge<'_>,
    ) -> Result<(), PostError> {
        let account = &mut self.account;
        if account.outstanding == SEND_DEPTH {
            return Err(PostError::Full);
        }
        let pieces = [piece];
        let wr = SendWr::new(encode_wr_id(account.key, kind), op, Data::Regions(&pieces));
        self.qp.post(&wr.signaled())?;
        account.outstanding += 1;
        account.counters.work_requests.add(1);
        account.counters.signaled.add(1);
        Ok(())
    }
}

impl SendAccount {
    /// Posts a WRITE to the peer's ring.
    #[inline(always)]
    pub(super) fn post_write(
        &mut self,
        poster: &mut impl Poster,
        op: SendOp,
        data: Data<'_>,
        len: usize,
    ) -> Result<(), PostError> {
        if self.outstanding == SEND_DEPTH {
            return Err(PostError::Full);
        }
        let is_due = self.signaling.is_due();
        let wr = SendWr::new(encode_wr_id(self.key, SendKind::Batch), op, data);
        let wr = if is_due { wr.signaled_if_queued() } else { wr };
        if poster.post(&wr)? == Posted::Queued {
            self.outstanding += 1;
            self.signaling.count_post(is_due);
            self.counters.signaled.add(usize::from(is_due));
        }
        self.counters.work_requests.add(1);
        self.counters.bytes.add(len);
        Ok(())
    }

    /// Notes that a signaled work request has completed, and with it those that it stands for.
    pub(super) fn note_completed(&mut self, kind: SendKind) {
        let count = if kind == SendKind::Batch { SIGNAL_INTERVAL } else { 1 };
        self.outstanding = self.outstanding.saturating_sub(count);
    }
}
