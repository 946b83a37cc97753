//! A queue pair of a wrapped device, with its send requests.

use core::marker::PhantomData;
use std::collections::VecDeque;
use std::time::Instant;

use zerocopy::IntoBytes;

use super::super::{
    Data, DeviceAddress, PostError, Posted, QpConfig, QpState, RcQp, RecvWr, SendOp, SendWr, Sge, Status,
    UdQp,
};

/// A queue pair of either kind.
#[derive(Debug)]
pub(super) struct TrackedQp {
    pub(super) inner: InnerQp,
    pub(super) config: QpConfig,
    pub(super) send_cq: u32,
    pub(super) recv_cq: u32,
    /// RC: the connected device.
    pub(super) peer: Option<DeviceAddress>,
    pub(super) sends: VecDeque<TrackedSend>,
    /// The ids of the requests that take a place in the send queue, oldest first: those that have not completed, and those before
    /// which no completion was handed out yet.
    places: VecDeque<u64>,
    /// The tick since which the oldest stalled request has waited.
    pub(super) stalled_since: Option<u64>,
    /// Set if this module, not the wrapped device, moved the queue pair to ERR. The inner value is the status with which
    /// its oldest send request ends.
    pub(super) broken: Option<Option<Status>>,
    /// A receive failed, so that no later one succeeds.
    pub(super) receive_failed: bool,
}

/// The wrapped queue pair.
#[derive(Debug)]
pub(super) enum InnerQp {
    Rc(RcQp),
    Ud(UdQp),
}

/// A send request that has not completed.
#[derive(Debug)]
pub(super) struct TrackedSend {
    pub(super) id: u64,
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) state: SendState,
    /// On a link with a limited rate: when its bytes have passed the link.
    pub(super) due: Option<Instant>,
}

/// The state of a send request.
#[derive(Debug)]
pub(super) enum SendState {
    /// Posted to the wrapped device.
    Posted,
    /// Not posted yet: waits until the port is up.
    Stalled(StoredWr),
    /// Never posted: fails when it is the oldest.
    Lost(Status),
    /// Never posted: a datagram that is lost but succeeds.
    Dropped,
}

/// A copy of a request that outlives the call that posted it. If a region that it names is deregistered before the request is
/// posted, the wrapped device fails the request.
#[derive(Debug)]
pub(super) struct StoredWr {
    op: SendOp,
    inline: Option<Vec<u8>>,
    sges: Vec<Sge<'static>>,
    fence: bool,
}

impl TrackedQp {
    pub(super) fn new(inner: InnerQp, config: QpConfig, send_cq: u32, recv_cq: u32) -> TrackedQp {
        TrackedQp {
            inner,
            config,
            send_cq,
            recv_cq,
            peer: None,
            sends: VecDeque::new(),
            places: VecDeque::new(),
            stalled_since: None,
            broken: None,
            receive_failed: false,
        }
    }

    /// Whether it is in ERR, because of an injected fault or in the wrapped device.
    pub(super) fn is_in_error(&self) -> bool {
        self.broken.is_some() || self.inner.state() == QpState::Error
    }

    pub(super) fn fail_with(&mut self, oldest: Option<Status>) {
        if self.broken.is_none() {
            self.broken = Some(oldest);
            self.inner.fail();
        }
    }

    /// The status of the next send of a queue pair in ERR.
    pub(super) fn next_failure(&mut self) -> Status {
        self.broken.as_mut().and_then(Option::take).unwrap_or(Status::Flushed)
    }

    /// Records a request that was accepted.
    pub(super) fn push_send(&mut self, sent: TrackedSend) {
        self.places.push_back(sent.id);
        self.sends.push_back(sent);
    }

    /// Frees the places of a request and of those before it: its completion was handed out. An id of a request that was posted before
    /// the queue pair was reset is smaller than all others.
    pub(super) fn free_places(&mut self, id: u64) {
        let freed = self.places.iter().take_while(|place| **place <= id).count();
        self.places.drain(..freed);
    }

    /// Drops all send requests without completions.
    pub(super) fn clear_sends(&mut self) {
        self.sends.clear();
        self.places.clear();
    }

    /// Refuses what the wrapped device would refuse, and a request for which the send queue has no place: the wrapped device may have
    /// more places, and may refuse requests later than they are posted here.
    pub(super) fn check(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        match self.inner.state() {
            QpState::ReadyToSend | QpState::Error => {}
            state => return Err(PostError::WrongState(state)),
        }
        let fetches = matches!(wr.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let atomic = fetches && !matches!(wr.op, SendOp::Read(_));
        if matches!(self.inner, InnerQp::Ud(_)) && !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
            return Err(PostError::Invalid("a datagram can only be SEND or SEND+IMM"));
        }
        let len = wr.data.len();
        match wr.data {
            Data::Regions(sges) => {
                let max = self.config.max_send_sge as usize;
                if sges.len() > max {
                    return Err(PostError::TooManySges { count: sges.len(), max });
                }
                if atomic && len != 8 {
                    return Err(PostError::Invalid("an atomic returns 8 bytes: give one entry of 8 bytes"));
                }
            }
            _ if fetches => {
                return Err(PostError::Invalid(
                    "READ and atomics return data: give a region, not inline data",
                ));
            }
            _ if len > self.config.max_inline.into() => {
                return Err(PostError::InlineTooLong {
                    len: len as usize,
                    max: self.config.max_inline as usize,
                });
            }
            _ => {}
        }
        if self.places.len() >= self.config.max_send_wr as usize {
            return Err(PostError::Full);
        }
        Ok(())
    }
}

impl InnerQp {
    pub(super) fn qp_num(&self) -> u32 {
        match self {
            InnerQp::Rc(qp) => qp.qp_num(),
            InnerQp::Ud(qp) => qp.qp_num(),
        }
    }

    pub(super) fn state(&self) -> QpState {
        match self {
            InnerQp::Rc(qp) => qp.state(),
            InnerQp::Ud(qp) => qp.state(),
        }
    }

    /// Posts a stored request.
    pub(super) fn post_detached(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        match self {
            InnerQp::Rc(qp) => qp.post_detached(wr),
            InnerQp::Ud(_) => Err(PostError::Invalid("a datagram needs an address handle")),
        }
    }

    pub(super) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        match self {
            InnerQp::Rc(qp) => qp.post_recv(wr),
            InnerQp::Ud(qp) => qp.post_recv(wr),
        }
    }

    fn fail(&mut self) {
        match self {
            InnerQp::Rc(qp) => qp.fail_handle().fail(),
            InnerQp::Ud(qp) => {
                if qp.fail().is_err() {
                    // It is not active yet, so there is nothing to flush.
                }
            }
        }
    }
}

impl TrackedSend {
    /// Whether it produces a completion in the wrapped queue that the caller will not see.
    pub(super) fn is_hidden(&self) -> bool {
        !self.signaled && matches!(self.state, SendState::Posted)
    }
}

impl StoredWr {
    pub(super) fn new(wr: &SendWr<'_>) -> StoredWr {
        let (inline, sges) = match wr.data {
            Data::Inline(bytes) => (Some(bytes.to_vec()), Vec::new()),
            Data::InlineHead { head, bytes } => (Some([head.as_bytes(), bytes].concat()), Vec::new()),
            Data::Regions(sges) => (None, sges.iter().map(detach).collect()),
        };
        StoredWr { op: wr.op, inline, sges, fence: wr.fence }
    }

    pub(super) fn with<R>(&self, wr_id: u64, f: impl FnOnce(&SendWr<'_>) -> R) -> R {
        let data = match &self.inline {
            Some(bytes) => Data::Inline(bytes),
            None => Data::Regions(&self.sges),
        };
        f(&SendWr { fence: self.fence, ..SendWr::new(wr_id, self.op, data).signaled() })
    }
}

/// The entry without its borrow: only `RcQp::post_detached` gets it, which checks the key again.
fn detach(sge: &Sge<'_>) -> Sge<'static> {
    Sge { addr: sge.addr, len: sge.len, lkey: sge.lkey, pd: sge.pd, access: sge.access, region: PhantomData }
}
