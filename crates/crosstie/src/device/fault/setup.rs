//! The objects of a wrapped device. Each holds the object that it wraps, or its number in the shared state.

use core::time::Duration;
use std::time::Instant;

use super::super::{
    self as device, Access, ConnectConfig, CqConfig, DeviceAddress, DeviceAttr, DeviceCounters, DeviceError,
    Event, FailHandle, QpAddress, QpConfig, QpState, SrqConfig, cq, srq,
};
use super::qp::InnerQp;
use super::state::State;
use super::{Control, Plan, SharedState};

/// How long a wait blocks before it looks for injected faults.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Ticks that one interval of waiting counts.
pub(super) const TICKS_PER_INTERVAL: u64 = 1000;

/// Additional depth of the wrapped completion queue, for the completions of unsignaled requests.
const HIDDEN_HEADROOM: u32 = 4096;

/// A wrapped device.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Box<device::Device>,
    /// As those of `inner`, and the port can fail.
    attr: DeviceAttr,
    state: SharedState,
}

impl Device {
    pub(crate) fn new(inner: device::Device, plan: Plan) -> Device {
        let attr = DeviceAttr { port_events: true, ..inner.attr().clone() };
        Device { inner: Box::new(inner), attr, state: SharedState::new(State::new(plan)) }
    }

    pub(crate) fn control(&self) -> Control {
        Control { state: self.state.clone() }
    }

    pub(crate) fn attr(&self) -> &DeviceAttr {
        &self.attr
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.address()
    }

    pub(crate) fn counters(&self) -> DeviceCounters {
        self.inner.counters()
    }

    pub(crate) fn has_dma_buf(&self) -> bool {
        self.inner.has_dma_buf()
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd { inner: Box::new(self.inner.alloc_pd()?), state: self.state.clone() })
    }

    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<Cq, DeviceError> {
        let inner_depth =
            config.depth.max(config.depth.saturating_add(HIDDEN_HEADROOM).min(self.attr().max_cqe));
        let inner = Box::new(self.inner.create_cq(&CqConfig { depth: inner_depth })?);
        let mut state = self.state.lock();
        let id = state.next_request_id() as u32;
        state.add_cq(id, config.depth, inner_depth);
        drop(state);
        Ok(Cq { inner, id, drained: Vec::new(), state: self.state.clone() })
    }

    pub(crate) fn wait_event(&self, timeout: Duration) -> Result<Option<Event>, DeviceError> {
        // None: without an end.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(event) = self.state.lock().next_event() {
                return Ok(Some(event));
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let event = self.inner.wait_event(left.min(POLL_INTERVAL))?;
            if event.is_some() || left.is_zero() {
                return Ok(event);
            }
            // An outage ends also if nobody uses the device meanwhile.
            let mut state = self.state.lock();
            if state.needs_ticks() {
                state.tick(TICKS_PER_INTERVAL);
            }
        }
    }
}

/// A wrapped protection domain.
#[derive(Debug)]
pub struct Pd {
    inner: Box<device::Pd>,
    state: SharedState,
}

impl Pd {
    pub(crate) fn inner(&self) -> &device::Pd {
        &self.inner
    }

    pub(crate) fn create_srq(&self, config: &SrqConfig) -> Result<Srq, DeviceError> {
        let inner = Box::new(self.inner.create_srq(config)?);
        let id = self.state.lock().next_request_id() as u32;
        Ok(Srq { inner, id, state: self.state.clone() })
    }

    pub(crate) fn create_rc(
        &self,
        config: &QpConfig,
        send_cq: &device::Cq,
        recv_cq: &device::Cq,
        srq: Option<&device::Srq>,
    ) -> Result<RcQp, DeviceError> {
        let (send, recv) = (wrapped_cq(send_cq)?, wrapped_cq(recv_cq)?);
        let srq = srq.map(wrapped_srq).transpose()?;
        let inner = self.inner.create_rc(config, &send.inner, &recv.inner, srq)?;
        let qp_num = self.state.lock().add_qp(InnerQp::Rc(inner), *config, send.id, recv.id);
        Ok(RcQp { qp_num, state: self.state.clone() })
    }

    pub(crate) fn create_ud(
        &self,
        config: &QpConfig,
        send_cq: &device::Cq,
        recv_cq: &device::Cq,
        srq: Option<&device::Srq>,
    ) -> Result<UdQp, DeviceError> {
        let (send, recv) = (wrapped_cq(send_cq)?, wrapped_cq(recv_cq)?);
        let srq = srq.map(wrapped_srq).transpose()?;
        let inner = self.inner.create_ud(config, &send.inner, &recv.inner, srq)?;
        let qp_num = self.state.lock().add_qp(InnerQp::Ud(inner), *config, send.id, recv.id);
        Ok(UdQp { qp_num, state: self.state.clone() })
    }

    pub(crate) fn create_ah(&self, to: &DeviceAddress) -> Result<Ah, DeviceError> {
        Ok(Ah { inner: Box::new(self.inner.create_ah(to)?) })
    }
}

fn wrapped_cq(queue: &device::Cq) -> Result<&Cq, DeviceError> {
    match &queue.provider {
        cq::Provider::Fault(x) => Ok(x),
        _ => Err(DeviceError::WrongDevice("the completion queue")),
    }
}

fn wrapped_srq(queue: &device::Srq) -> Result<&device::Srq, DeviceError> {
    match &queue.provider {
        srq::Provider::Fault(x) => Ok(&x.inner),
        _ => Err(DeviceError::WrongDevice("the shared receive queue")),
    }
}

/// A wrapped completion queue.
#[derive(Debug)]
pub struct Cq {
    pub(super) inner: Box<device::Cq>,
    pub(super) id: u32,
    /// Buffer for completions on their way from the wrapped queue to the state.
    pub(super) drained: Vec<device::Completion>,
    pub(super) state: SharedState,
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.state.lock().remove_cq(self.id);
    }
}

/// A wrapped shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pub(super) inner: Box<device::Srq>,
    pub(super) id: u32,
    pub(super) state: SharedState,
}

impl Drop for Srq {
    fn drop(&mut self) {
        self.state.lock().remove_srq(self.id);
    }
}

/// A wrapped address handle.
#[derive(Debug)]
pub struct Ah {
    pub(super) inner: Box<device::Ah>,
}

impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.address()
    }
}

/// A wrapped reliable connected queue pair.
#[derive(Debug)]
pub struct RcQp {
    pub(super) qp_num: u32,
    pub(super) state: SharedState,
}

impl RcQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.qp_num
    }

    pub(crate) fn state(&self) -> QpState {
        self.with(|qp| qp.state())
    }

    pub(crate) fn address(&self) -> QpAddress {
        self.with(|qp| qp.address())
    }

    pub(crate) fn init(&mut self, access: Access) -> Result<(), DeviceError> {
        self.with(|qp| qp.init(access))
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        peer: &QpAddress,
        config: &ConnectConfig,
    ) -> Result<(), DeviceError> {
        if self.state.lock().is_killed(&peer.device) {
            return Err(DeviceError::Unreachable("the fault plan has killed its device".to_owned()));
        }
        self.with(|qp| qp.ready_to_receive(peer, config))?;
        self.state.lock().qp(self.qp_num).peer = Some(peer.device);
        Ok(())
    }

    pub(crate) fn ready_to_send(&mut self, config: &ConnectConfig) -> Result<(), DeviceError> {
        self.with(|qp| qp.ready_to_send(config))
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.with(|qp| qp.fail())?;
        self.state.lock().advance_sends(self.qp_num);
        Ok(())
    }

    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        self.with(|qp| qp.reset())?;
        self.forget_requests();
        Ok(())
    }

    pub(crate) fn try_reset(&mut self) -> Result<(), DeviceError> {
        self.with(|qp| qp.try_reset())?;
        self.forget_requests();
        Ok(())
    }

    fn forget_requests(&self) {
        let mut state = self.state.lock();
        state.clear_qp(self.qp_num);
        state.drop_held_completions(self.qp_num);
    }

    pub(crate) fn fail_handle(&self) -> FailHandle {
        self.with(|qp| qp.fail_handle())
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut device::RcQp) -> R) -> R {
        match &mut self.state.lock().qp(self.qp_num).inner {
            InnerQp::Rc(qp) => f(qp),
            InnerQp::Ud(_) => unreachable!("an RC handle names an RC queue pair"),
        }
    }
}

impl Drop for RcQp {
    fn drop(&mut self) {
        // The wrapped queue pair is dropped outside the lock, because that may take long.
        let qp = self.state.lock().remove_qp(self.qp_num);
        drop(qp);
    }
}

/// A wrapped datagram queue pair.
#[derive(Debug)]
pub struct UdQp {
    pub(super) qp_num: u32,
    pub(super) state: SharedState,
}

impl UdQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.qp_num
    }

    pub(crate) fn state(&self) -> QpState {
        self.with(|qp| qp.state())
    }

    pub(crate) fn activate(&mut self, qkey: u32) -> Result<(), DeviceError> {
        self.with(|qp| qp.activate(qkey))
    }

    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.with(|qp| qp.fail())?;
        self.state.lock().advance_sends(self.qp_num);
        Ok(())
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut device::UdQp) -> R) -> R {
        match &mut self.state.lock().qp(self.qp_num).inner {
            InnerQp::Ud(qp) => f(qp),
            InnerQp::Rc(_) => unreachable!("a datagram handle names a datagram queue pair"),
        }
    }
}

impl Drop for UdQp {
    fn drop(&mut self) {
        let qp = self.state.lock().remove_qp(self.qp_num);
        drop(qp);
    }
}
