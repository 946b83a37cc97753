//! A queue pair of a wrapped device and the sends that are on their way through it.

use core::marker::PhantomData;
use std::collections::VecDeque;

use super::super::{
    Data, DeviceAddress, PostError, QpConfig, QpState, RcQp, RecvWr, SendOp, SendWr, Sge, Status, UdQp,
};

/// A queue pair of either kind.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) inner: Inner,
    pub(super) config: QpConfig,
    pub(super) send_cq: u32,
    pub(super) recv_cq: u32,
    /// Where an RC queue pair is connected to.
    pub(super) peer: Option<DeviceAddress>,
    pub(super) sends: VecDeque<Sent>,
    /// Since when the oldest stalled request has waited.
    pub(super) stalled_since: Option<u64>,
    /// Broken from here, not by the wrapped device; with the status that its oldest send request ends with.
    pub(super) broken: Option<Option<Status>>,
}

#[derive(Debug)]
pub(super) enum Inner {
    Rc(RcQp),
    Ud(UdQp),
}

#[derive(Debug)]
pub(super) struct Sent {
    pub(super) id: u64,
    pub(super) wr_id: u64,
    pub(super) signaled: bool,
    pub(super) place: Place,
}

/// Where a send request is.
#[derive(Debug)]
pub(super) enum Place {
    /// In the wrapped device.
    Gone,
    /// Here, waiting for the port.
    Stalled(Stored),
    /// Nowhere: fails when it is the oldest.
    Lost(Status),
    /// Nowhere: a datagram that succeeds all the same.
    Dropped,
}

/// A request that outlives the call it was posted by. Its memory is the device's until its completion, as ever.
#[derive(Debug)]
pub(super) struct Stored {
    op: SendOp,
    inline: Option<Vec<u8>>,
    sges: Vec<Sge<'static>>,
    fence: bool,
}

impl Endpoint {
    pub(super) fn new(inner: Inner, config: QpConfig, send_cq: u32, recv_cq: u32) -> Endpoint {
        Endpoint {
            inner,
            config,
            send_cq,
            recv_cq,
            peer: None,
            sends: VecDeque::new(),
            stalled_since: None,
            broken: None,
        }
    }

    /// In ERR, whoever put it there.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some() || self.inner.state() == QpState::Error
    }

    pub(super) fn break_with(&mut self, oldest: Option<Status>) {
        if self.broken.is_none() {
            self.broken = Some(oldest);
            self.inner.fail();
        }
    }

    /// How the next send of a broken queue pair ends.
    pub(super) fn next_failure(&mut self) -> Status {
        self.broken.as_mut().and_then(Option::take).unwrap_or(Status::Flushed)
    }

    /// What the wrapped device would have refused, for requests that it does not see now.
    pub(super) fn check(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        match self.inner.state() {
            QpState::ReadyToSend | QpState::Error => {}
            state => return Err(PostError::WrongState(state)),
        }
        let fetches = matches!(wr.op, SendOp::Read(_) | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. });
        let atomic = fetches && !matches!(wr.op, SendOp::Read(_));
        if matches!(self.inner, Inner::Ud(_)) && !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
            return Err(PostError::Invalid("datagrams can only be sent"));
        }
        match wr.data {
            Data::Inline(_) if fetches => return Err(PostError::Invalid("what is fetched needs a region")),
            Data::Inline(bytes) if bytes.len() > self.config.max_inline as usize => {
                return Err(PostError::InlineTooLong {
                    len: bytes.len(),
                    max: self.config.max_inline as usize,
                });
            }
            Data::Inline(_) => {}
            Data::Regions(sges) => {
                let max = self.config.max_send_sge as usize;
                if sges.len() > max {
                    return Err(PostError::TooManySges { count: sges.len(), max });
                }
                if atomic && sges.iter().map(|s| u64::from(s.len())).sum::<u64>() != 8 {
                    return Err(PostError::Invalid("an atomic fetches 8 bytes"));
                }
            }
        }
        if self.sends.len() >= self.config.max_send_wr as usize {
            return Err(PostError::Full);
        }
        Ok(())
    }
}

impl Inner {
    pub(super) fn qp_num(&self) -> u32 {
        match self {
            Inner::Rc(qp) => qp.qp_num(),
            Inner::Ud(qp) => qp.qp_num(),
        }
    }

    pub(super) fn state(&self) -> QpState {
        match self {
            Inner::Rc(qp) => qp.state(),
            Inner::Ud(qp) => qp.state(),
        }
    }

    pub(super) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        match self {
            Inner::Rc(qp) => qp.post(wr),
            Inner::Ud(_) => Err(PostError::Invalid("a datagram needs an address")),
        }
    }

    pub(super) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        match self {
            Inner::Rc(qp) => qp.post_recv(wr),
            Inner::Ud(qp) => qp.post_recv(wr),
        }
    }

    fn fail(&mut self) {
        match self {
            Inner::Rc(qp) => qp.fail_handle().fail(),
            Inner::Ud(qp) => {
                if qp.fail().is_err() {
                    // Not active yet, so there is nothing to break.
                }
            }
        }
    }
}

impl Sent {
    /// Makes a completion in the wrapped queue that the caller's queue has no room for.
    pub(super) fn is_silent(&self) -> bool {
        !self.signaled && matches!(self.place, Place::Gone)
    }
}

impl Stored {
    pub(super) fn new(wr: &SendWr<'_>) -> Stored {
        let (inline, sges) = match wr.data {
            Data::Inline(bytes) => (Some(bytes.to_vec()), Vec::new()),
            Data::Regions(sges) => (None, sges.iter().map(detach).collect()),
        };
        Stored { op: wr.op, inline, sges, fence: wr.fence }
    }

    pub(super) fn with<R>(&self, wr_id: u64, f: impl FnOnce(&SendWr<'_>) -> R) -> R {
        let data = match &self.inline {
            Some(bytes) => Data::Inline(bytes),
            None => Data::Regions(&self.sges),
        };
        f(&SendWr { wr_id, op: self.op, data, signaled: true, fence: self.fence })
    }
}

/// The piece without its borrow: it is only given to the wrapped device, which checks the key again.
fn detach(sge: &Sge<'_>) -> Sge<'static> {
    Sge { addr: sge.addr, len: sge.len, lkey: sge.lkey, pd: sge.pd, access: sge.access, region: PhantomData }
}
