//! The software device.
use super::*;
use core::time::Duration;

/// Sizes of a software device.
#[derive(Clone, Debug, Default)]
pub struct Config {}
macro_rules! skeleton { ($($n:ident),*) => { $( /// Skeleton.
#[derive(Debug)] pub struct $n; )* } }
skeleton!(Pd, Mr, Cq, Srq, RcQp, UdQp, Ah);
/// Skeleton.
#[derive(Clone, Debug)]
pub struct Device;
/// Skeleton.
#[derive(Clone, Debug)]
pub struct Breaker;
impl Breaker {
    pub(crate) fn fail(&self) {}
}
const NO: DeviceError = DeviceError::Unsupported("skeleton");
impl Device {
    pub(crate) fn open(_: &Config) -> Result<Self, DeviceError> {
        Err(NO)
    }
    pub(crate) fn attr(&self) -> &DeviceAttr {
        unreachable!()
    }
    pub(crate) fn address(&self) -> DeviceAddress {
        unreachable!()
    }
    pub(crate) fn alloc_pd(&self) -> Result<Pd, DeviceError> {
        Err(NO)
    }
    pub(crate) fn create_cq(&self, _: &CqConfig) -> Result<Cq, DeviceError> {
        Err(NO)
    }
    pub(crate) fn wait_event(&self, _: Duration) -> Result<Option<Event>, DeviceError> {
        Err(NO)
    }
}
impl Pd {
    pub(crate) fn allocate(&self, _: u32, _: usize, _: Access) -> Result<Mr, DeviceError> {
        Err(NO)
    }
    pub(crate) unsafe fn register(&self, _: u32, _: *mut u8, _: usize, _: Access) -> Result<Mr, DeviceError> {
        Err(NO)
    }
    pub(crate) fn create_srq(&self, _: u32, _: &SrqConfig) -> Result<Srq, DeviceError> {
        Err(NO)
    }
    pub(crate) fn create_rc(
        &self,
        _: u32,
        _: &QpConfig,
        _: &Cq,
        _: &Cq,
        _: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        Err(NO)
    }
    pub(crate) fn create_ud(
        &self,
        _: u32,
        _: &QpConfig,
        _: &Cq,
        _: &Cq,
        _: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        Err(NO)
    }
    pub(crate) fn create_ah(&self, _: &DeviceAddress) -> Result<Ah, DeviceError> {
        Err(NO)
    }
}
impl Ah {
    pub(crate) fn address(&self) -> DeviceAddress {
        unreachable!()
    }
}
impl Mr {
    pub(crate) fn addr(&self) -> u64 {
        0
    }
    pub(crate) fn len(&self) -> usize {
        0
    }
    pub(crate) fn lkey(&self) -> u32 {
        0
    }
    pub(crate) fn rkey(&self) -> u32 {
        0
    }
}
impl Cq {
    pub(crate) fn poll(&mut self, _: usize, _: impl FnMut(&Completion)) -> Result<usize, CqError> {
        Ok(0)
    }
    pub(crate) fn wait(&mut self, _: Duration) -> Result<bool, CqError> {
        Ok(false)
    }
}
impl Srq {
    pub(crate) fn post_recv(&mut self, _: &RecvWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
}
impl RcQp {
    pub(crate) fn qp_num(&self) -> u32 {
        0
    }
    pub(crate) fn state(&self) -> QpState {
        QpState::Reset
    }
    pub(crate) fn address(&self) -> QpAddress {
        unreachable!()
    }
    pub(crate) fn init(&mut self, _: Access) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn ready_to_receive(&mut self, _: &QpAddress, _: &ConnectConfig) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn ready_to_send(&mut self, _: &ConnectConfig) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn reset(&mut self) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn post(&mut self, _: &SendWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn batch_begin(&mut self) {}
    pub(crate) fn batch_post(&mut self, _: &SendWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn batch_submit(&mut self) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn post_recv(&mut self, _: &RecvWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn breaker(&self) -> Breaker {
        Breaker
    }
}
impl UdQp {
    pub(crate) fn qp_num(&self) -> u32 {
        0
    }
    pub(crate) fn state(&self) -> QpState {
        QpState::Reset
    }
    pub(crate) fn activate(&mut self, _: u32) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn fail(&mut self) -> Result<(), DeviceError> {
        Err(NO)
    }
    pub(crate) fn post(&mut self, _: &super::Ah, _: u32, _: u32, _: &SendWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
    pub(crate) fn post_recv(&mut self, _: &RecvWr<'_>) -> Result<(), PostError> {
        Ok(())
    }
}
