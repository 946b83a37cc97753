//! Shared receive queues: one queue of receives for many queue pairs.

use core::cell::Cell;
use core::marker::PhantomData;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{DeviceError, PostError, RecvWr, dispatch, fault, software};

/// A shared receive queue. In a completion, `qp_num` is the queue pair that took the receive.
#[derive(Debug)]
pub struct Srq {
    pub(crate) provider: Provider,
    /// One thread at a time: `Send`, not `Sync`.
    not_sync: PhantomData<Cell<()>>,
}

impl From<Provider> for Srq {
    fn from(provider: Provider) -> Self {
        Srq { provider, not_sync: PhantomData }
    }
}

#[derive(Debug)]
pub(crate) enum Provider {
    Software(software::Srq),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Srq),
    Fault(fault::Srq),
}

impl Srq {
    /// Posts one receive.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        dispatch!(Provider, &mut self.provider, x => x.post_recv(wr))
    }
}

pub(super) fn software(srq: &Srq) -> Result<&software::Srq, DeviceError> {
    match &srq.provider {
        Provider::Software(x) => Ok(x),
        _ => Err(DeviceError::WrongDevice("the shared receive queue")),
    }
}

#[cfg(feature = "verbs")]
pub(super) fn verbs(srq: &Srq) -> Result<&verbs::Srq, DeviceError> {
    match &srq.provider {
        Provider::Verbs(x) => Ok(x),
        _ => Err(DeviceError::WrongDevice("the shared receive queue")),
    }
}
