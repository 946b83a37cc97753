//! Queue pairs, to which requests are posted.

use core::cell::Cell;
use core::marker::PhantomData;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{
    Access, Ah, ConnectConfig, DeviceError, PostError, Posted, QpAddress, QpState, RecvWr, SendWr, dispatch,
    fault, software,
};

/// A reliable connected queue pair: it has one peer. Every message arrives once and in order, or the connection breaks.
#[derive(Debug)]
// What a post needs is on one cache line.
#[repr(align(64))]
pub struct RcQp {
    pub(crate) provider: RcProvider,
    /// One thread at a time: `Send`, not `Sync`.
    not_sync: PhantomData<Cell<()>>,
}

impl From<RcProvider> for RcQp {
    fn from(provider: RcProvider) -> Self {
        RcQp { provider, not_sync: PhantomData }
    }
}

#[derive(Debug)]
pub(crate) enum RcProvider {
    Software(software::RcQp),
    #[cfg(feature = "verbs")]
    Verbs(verbs::RcQp),
    Fault(fault::RcQp),
}

impl RcQp {
    /// Its number on this device.
    pub fn qp_num(&self) -> u32 {
        dispatch!(RcProvider, &self.provider, x => x.qp_num())
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        dispatch!(RcProvider, &self.provider, x => x.state())
    }

    /// The address that the peer needs to connect to it.
    pub fn address(&self) -> QpAddress {
        dispatch!(RcProvider, &self.provider, x => x.address())
    }

    /// Moves from RESET to INIT: receives can be posted.
    pub fn init(&mut self, access: Access) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.init(access))
    }

    /// Moves from INIT to RTR: the peer's requests are executed.
    pub fn ready_to_receive(&mut self, peer: &QpAddress, config: &ConnectConfig) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.ready_to_receive(peer, config))
    }

    /// Moves from RTR to RTS: send requests can be posted.
    pub fn ready_to_send(&mut self, config: &ConnectConfig) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.ready_to_send(config))
    }

    /// Moves from RESET or INIT to RTS.
    pub fn connect(&mut self, peer: &QpAddress, config: &ConnectConfig) -> Result<(), DeviceError> {
        if self.state() == QpState::Reset {
            self.init(config.access)?;
        }
        self.ready_to_receive(peer, config)?;
        self.ready_to_send(config)
    }

    /// Moves to ERR: every outstanding request is flushed.
    pub fn fail(&mut self) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.fail())
    }

    /// Moves to RESET: every outstanding request is dropped without a completion. The queue pair can be connected again.
    ///
    /// On the software device this fails with [`DeviceError::PeerBusy`] if the peer is stopped inside an operation: it may
    /// still write into a receive. The queue pair is then in ERR. Try again later, or drop the queue pair and create another.
    pub fn reset(&mut self) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.reset())
    }

    /// The same without waiting for the peer: on the software device, [`reset`](RcQp::reset) waits up to a second for a peer that is
    /// inside an operation, and this fails at once. Try again later.
    pub fn try_reset(&mut self) -> Result<(), DeviceError> {
        dispatch!(RcProvider, &mut self.provider, x => x.try_reset())
    }

    /// Posts one request, and says whether the device has executed it already.
    ///
    /// ```
    /// use crosstie::device::*;
    ///
    /// # fn f(qp: &mut RcQp, wr: &SendWr<'_>, outstanding: &mut u32) -> Result<(), PostError> {
    /// match qp.post(wr)? {
    ///     Posted::Done => {} // nothing to wait for
    ///     Posted::Queued => *outstanding += 1,
    /// }
    /// # Ok(()) }
    /// ```
    #[inline(always)]
    pub fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        match &mut self.provider {
            RcProvider::Software(x) => x.post(wr),
            _ => self.post_to_other(wr),
        }
    }

    // A function of its own, so that a request to the software device stays in registers.
    #[inline(never)]
    fn post_to_other(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        dispatch!(RcProvider, &mut self.provider, x => x.post(wr))
    }

    /// Posts a request that is older than the borrows of the regions it names. It fails if one of them was deregistered.
    pub(crate) fn post_detached(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        dispatch!(RcProvider, &mut self.provider, x => x.post_detached(wr))
    }

    /// Looks to the peer as if this end were stopped inside an operation, until it is called with false. A request must have been
    /// posted before.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn pretend_operation(&self, is_inside: bool) {
        let RcProvider::Software(qp) = &self.provider else { panic!("not a software device") };
        qp.pretend_operation(is_inside);
    }

    /// Posts several requests with one doorbell. If `fill` returns an error, the requests that were accepted before are
    /// still posted.
    #[inline]
    pub fn post_batch<E: From<PostError>>(
        &mut self,
        fill: impl FnOnce(&mut Batch<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        dispatch!(RcProvider, &mut self.provider, x => x.batch_begin());
        let filled = fill(&mut Batch { qp: self });
        let submitted = dispatch!(RcProvider, &mut self.provider, x => x.batch_submit());
        filled.and(submitted.map_err(E::from))
    }

    /// Posts one receive. Queue pairs with a shared receive queue refuse it.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        dispatch!(RcProvider, &mut self.provider, x => x.post_recv(wr))
    }

    /// A handle that can move this queue pair to ERR from any thread.
    pub(crate) fn fail_handle(&self) -> FailHandle {
        match &self.provider {
            RcProvider::Software(x) => FailHandle::Software(x.fail_handle()),
            #[cfg(feature = "verbs")]
            RcProvider::Verbs(x) => FailHandle::Verbs(x.fail_handle()),
            RcProvider::Fault(x) => x.fail_handle(),
        }
    }
}

/// A batch of requests, see [`RcQp::post_batch`].
#[derive(Debug)]
pub struct Batch<'qp> {
    qp: &'qp mut RcQp,
}

impl Batch<'_> {
    /// Adds one request.
    #[inline]
    pub fn post(&mut self, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        dispatch!(RcProvider, &mut self.qp.provider, x => x.batch_post(wr))
    }
}

/// Moves a queue pair to ERR from any thread.
#[derive(Clone, Debug)]
pub(crate) enum FailHandle {
    Software(software::FailHandle),
    #[cfg(feature = "verbs")]
    Verbs(verbs::FailHandle),
}

impl FailHandle {
    pub(crate) fn fail(&self) {
        match self {
            FailHandle::Software(x) => x.fail(),
            #[cfg(feature = "verbs")]
            FailHandle::Verbs(x) => x.fail(),
        }
    }
}

/// An unreliable datagram queue pair: it can send to any peer, one datagram per request, and datagrams may get lost. A
/// received datagram begins with 40 bytes (the GRH); `byte_len` includes them.
#[derive(Debug)]
pub struct UdQp {
    pub(crate) provider: UdProvider,
    /// One thread at a time: `Send`, not `Sync`.
    not_sync: PhantomData<Cell<()>>,
}

impl From<UdProvider> for UdQp {
    fn from(provider: UdProvider) -> Self {
        UdQp { provider, not_sync: PhantomData }
    }
}

#[derive(Debug)]
pub(crate) enum UdProvider {
    Software(software::UdQp),
    #[cfg(feature = "verbs")]
    Verbs(verbs::UdQp),
    Fault(fault::UdQp),
}

impl UdQp {
    /// Length of the header in front of every received datagram.
    pub const GRH: usize = 40;

    /// Its number on this device.
    pub fn qp_num(&self) -> u32 {
        dispatch!(UdProvider, &self.provider, x => x.qp_num())
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        dispatch!(UdProvider, &self.provider, x => x.state())
    }

    /// Moves from RESET to RTS. Datagrams with another `qkey` are dropped.
    pub fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        dispatch!(UdProvider, &mut self.provider, x => x.activate(qkey))
    }

    /// Moves to ERR: every outstanding request is flushed.
    pub fn fail(&mut self) -> Result<(), DeviceError> {
        dispatch!(UdProvider, &mut self.provider, x => x.fail())
    }

    /// Posts a SEND or SEND+IMM to queue pair `qp_num` of the device `to`.
    #[inline]
    pub fn post(&mut self, to: &Ah, qp_num: u32, qkey: u32, wr: &SendWr<'_>) -> Result<Posted, PostError> {
        dispatch!(UdProvider, &mut self.provider, x => x.post(to, qp_num, qkey, wr))
    }

    /// Posts one receive. Queue pairs with a shared receive queue refuse it.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        dispatch!(UdProvider, &mut self.provider, x => x.post_recv(wr))
    }
}
