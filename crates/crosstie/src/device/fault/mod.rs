//! Faults on purpose: wraps another device.
use super::*;
use core::time::Duration;
/// What shall fail.
#[derive(Clone, Debug)]
pub struct Plan {}
impl Plan {
    /// A plan from a seed.
    pub fn from_seed(_: u64) -> Plan {
        Plan {}
    }
}
/// Wrapped device.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Box<super::Device>,
}
/// Wrapped domain.
#[derive(Debug)]
pub struct Pd {
    inner: Box<super::Pd>,
}
/// Wrapped queue.
#[derive(Debug)]
pub struct Cq {
    inner: Box<super::Cq>,
}
/// Wrapped queue.
#[derive(Debug)]
pub struct Srq {
    inner: Box<super::Srq>,
}
/// Wrapped queue pair.
#[derive(Debug)]
pub struct RcQp {
    inner: Box<super::RcQp>,
}
/// Wrapped queue pair.
#[derive(Debug)]
pub struct UdQp {
    inner: Box<super::UdQp>,
}
/// Wrapped handle.
#[derive(Debug)]
pub struct Ah {
    inner: Box<super::Ah>,
}
impl Device {
    pub(crate) fn new(inner: super::Device, _: Plan) -> Device {
        Device { inner: Box::new(inner) }
    }
    pub(crate) fn attr(&self) -> &DeviceAttr {
        self.inner.attr()
    }
    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.address()
    }
    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Ok(Pd { inner: Box::new(self.inner.alloc_pd()?) })
    }
    pub(crate) fn create_cq(&self, c: &CqConfig) -> Result<Cq, DeviceError> {
        Ok(Cq { inner: Box::new(self.inner.create_cq(c)?) })
    }
    pub(crate) fn wait_event(&self, t: Duration) -> Result<Option<Event>, DeviceError> {
        self.inner.wait_event(t)
    }
}
impl Pd {
    pub(crate) fn inner(&self) -> &super::Pd {
        &self.inner
    }
    pub(crate) fn create_srq(&self, c: &SrqConfig) -> Result<Srq, DeviceError> {
        Ok(Srq { inner: Box::new(self.inner.create_srq(c)?) })
    }
    pub(crate) fn create_rc(
        &self,
        c: &QpConfig,
        s: &super::Cq,
        r: &super::Cq,
        q: Option<&super::Srq>,
    ) -> Result<RcQp, DeviceError> {
        Ok(RcQp {
            inner: Box::new(self.inner.create_rc(
                c,
                inner_cq(s)?,
                inner_cq(r)?,
                q.map(inner_srq).transpose()?,
            )?),
        })
    }
    pub(crate) fn create_ud(
        &self,
        c: &QpConfig,
        s: &super::Cq,
        r: &super::Cq,
        q: Option<&super::Srq>,
    ) -> Result<UdQp, DeviceError> {
        Ok(UdQp {
            inner: Box::new(self.inner.create_ud(
                c,
                inner_cq(s)?,
                inner_cq(r)?,
                q.map(inner_srq).transpose()?,
            )?),
        })
    }
    pub(crate) fn create_ah(&self, a: &DeviceAddress) -> Result<Ah, DeviceError> {
        Ok(Ah { inner: Box::new(self.inner.create_ah(a)?) })
    }
}
fn inner_cq(cq: &super::Cq) -> Result<&super::Cq, DeviceError> {
    match &cq.provider {
        cq::Provider::Fault(x) => Ok(&x.inner),
        _ => Err(DeviceError::Foreign("the completion queue")),
    }
}
fn inner_srq(srq: &super::Srq) -> Result<&super::Srq, DeviceError> {
    match &srq.provider {
        srq::Provider::Fault(x) => Ok(&x.inner),
        _ => Err(DeviceError::Foreign("the shared receive queue")),
    }
}
impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        self.inner.address()
    }
}
impl Cq {
    pub(crate) fn poll(&mut self, max: usize, each: &mut dyn FnMut(&Completion)) -> Result<usize, CqError> {
        self.inner.poll(max, each)
    }
    pub(crate) fn wait(&mut self, t: Duration) -> Result<bool, CqError> {
        self.inner.wait(t)
    }
}
impl Srq {
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.inner.post_recv(wr)
    }
}
impl RcQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.inner.qp_num()
    }
    pub(crate) fn state(&self) -> QpState {
        self.inner.state()
    }
    pub(crate) fn address(&self) -> QpAddress {
        self.inner.address()
    }
    pub(crate) fn init(&mut self, a: Access) -> Result<(), DeviceError> {
        self.inner.init(a)
    }
    pub(crate) fn ready_to_receive(&mut self, p: &QpAddress, c: &ConnectConfig) -> Result<(), DeviceError> {
        self.inner.ready_to_receive(p, c)
    }
    pub(crate) fn ready_to_send(&mut self, c: &ConnectConfig) -> Result<(), DeviceError> {
        self.inner.ready_to_send(c)
    }
    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.inner.fail()
    }
    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        self.inner.reset()
    }
    pub(crate) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.inner.post(wr)
    }
    pub(crate) fn batch_begin(&mut self) {}
    pub(crate) fn batch_post(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.inner.post(wr)
    }
    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.inner.post_recv(wr)
    }
    pub(crate) fn breaker(&self) -> Breaker {
        self.inner.breaker()
    }
}
impl UdQp {
    pub(crate) fn qp_num(&self) -> u32 {
        self.inner.qp_num()
    }
    pub(crate) fn state(&self) -> QpState {
        self.inner.state()
    }
    pub(crate) fn activate(&mut self, q: u32) -> Result<(), DeviceError> {
        self.inner.activate(q)
    }
    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        self.inner.fail()
    }
    pub(crate) fn post(&mut self, to: &super::Ah, n: u32, k: u32, wr: &SendWr<'_>) -> Result<(), PostError> {
        match &to.provider {
            pd::AhProvider::Fault(x) => self.inner.post(&x.inner, n, k, wr),
            _ => Err(PostError::Invalid("the address handle belongs to another device")),
        }
    }
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.inner.post_recv(wr)
    }
}
