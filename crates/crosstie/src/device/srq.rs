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

    /// Posts up to `count` receives like this one, with one doorbell for many. Returns how many were posted: fewer if the queue becomes full, or if the device refuses one.
    /// An error says why there is not even one.
    ///
    /// ```
    /// use crosstie::device::*;
    ///
    /// let device = Device::open_software(&software::Config::default())?;
    /// let mut srq = device.alloc_pd()?.create_srq(&SrqConfig { max_wr: 100, max_sge: 1 })?;
    /// let wr = RecvWr { wr_id: 0, sges: &[] };
    /// assert_eq!(srq.post_recvs(&wr, 70), Ok(70));
    /// assert_eq!(srq.post_recvs(&wr, 70), Ok(30));
    /// assert_eq!(srq.post_recvs(&wr, 70), Err(PostError::Full));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn post_recvs(&mut self, wr: &RecvWr<'_>, count: u32) -> Result<u32, PostError> {
        dispatch!(Provider, &mut self.provider, x => x.post_recvs(wr, count))
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
