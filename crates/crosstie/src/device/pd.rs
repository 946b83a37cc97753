//! Protection domains: which queue pairs may access which regions.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

#[cfg(feature = "verbs")]
use super::verbs;
use super::{
    Access, Cq, DeviceAddress, DeviceError, Mr, QpConfig, RcQp, Srq, SrqConfig, UdQp, cq, dispatch, fault,
    mr, qp, software, srq,
};

/// A protection domain. Queue pairs can access the regions of their own domain only.
#[derive(Debug)]
pub struct Pd {
    id: u32,
    pub(crate) provider: Provider,
}

#[derive(Debug)]
pub(crate) enum Provider {
    Software(software::Pd),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Pd),
    Fault(fault::Pd),
}

/// Numbers are unique in this process across all devices, so that memory of another domain is recognised.
static NEXT_ID: AtomicU32 = AtomicU32::new(1);

impl Pd {
    pub(super) fn new(provider: Provider) -> Pd {
        let id = match &provider {
            Provider::Fault(x) => x.inner().id,
            _ => NEXT_ID.fetch_add(1, Relaxed),
        };
        Pd { id, provider }
    }

    /// Allocates and registers memory: zeroed, aligned to a page. Every provider accesses this memory fastest.
    pub fn allocate(&self, len: usize, access: Access) -> Result<Mr, DeviceError> {
        Ok(Mr::new(
            self.id,
            access,
            len,
            true,
            match &self.provider {
                Provider::Software(x) => mr::Provider::Software(x.allocate(self.id, len, access)?),
                #[cfg(feature = "verbs")]
                Provider::Verbs(x) => mr::Provider::Verbs(x.allocate(len, access)?),
                Provider::Fault(x) => return x.inner().allocate(len, access),
            },
        ))
    }

    /// Registers memory that the caller owns, in place.
    ///
    /// # Safety
    ///
    /// `start..start + len` must stay valid for reads, and for writes if `access` allows any, until the [`Mr`] is
    /// dropped. While requests, or peers that know the key, may access a part of it, the program must not use a Rust
    /// reference to that part: no shared reference while the part may be written, no unique reference while it may be
    /// accessed at all.
    pub unsafe fn register(&self, start: *mut u8, len: usize, access: Access) -> Result<Mr, DeviceError> {
        // SAFETY: the caller upholds this function's contract, which is also the providers' contract.
        unsafe {
            Ok(Mr::new(
                self.id,
                access,
                len,
                false,
                match &self.provider {
                    Provider::Software(x) => mr::Provider::Software(x.register(self.id, start, len, access)?),
                    #[cfg(feature = "verbs")]
                    Provider::Verbs(x) => mr::Provider::Verbs(x.register(start, len, access)?),
                    Provider::Fault(x) => return x.inner().register(start, len, access),
                },
            ))
        }
    }

    /// Registers memory that a DMA-BUF file descriptor names, for example memory of a GPU: `len` bytes from `offset`.
    /// Requests and peers name it by `address`, which need not be an address of this process; so the bytes cannot be read or
    /// written through the [`Mr`]. The descriptor may be closed afterwards. See [`Device::has_dma_buf`](super::Device::has_dma_buf).
    ///
    /// # Safety
    ///
    /// As for [`Pd::register`], if the memory is mapped into a process.
    pub unsafe fn register_dma_buf(
        &self,
        fd: std::os::fd::BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<Mr, DeviceError> {
        match &self.provider {
            Provider::Software(_) => {
                let _unused = (fd, offset, len, address, access);
                Err(DeviceError::BadAddress("the software device cannot register DMA-BUF memory"))
            }
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => {
                let provider = mr::Provider::Verbs(x.register_dma_buf(fd, offset, len, address, access)?);
                Ok(Mr::unmapped(self.id, access, len, provider))
            }
            // SAFETY: the caller's promise.
            Provider::Fault(x) => unsafe { x.inner().register_dma_buf(fd, offset, len, address, access) },
        }
    }

    /// Creates a shared receive queue.
    pub fn create_srq(&self, config: &SrqConfig) -> Result<Srq, DeviceError> {
        Ok(Srq::from(match &self.provider {
            Provider::Software(x) => srq::Provider::Software(x.create_srq(self.id, config)?),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => srq::Provider::Verbs(x.create_srq(config)?),
            Provider::Fault(x) => srq::Provider::Fault(x.create_srq(config)?),
        }))
    }

    /// Creates a reliable connected queue pair, in RESET. It takes receives from `srq` if one is given.
    pub fn create_rc(
        &self,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<RcQp, DeviceError> {
        Ok(RcQp::from(match &self.provider {
            Provider::Software(x) => {
                let (send, recv) = (cq::software(send_cq)?, cq::software(recv_cq)?);
                let srq = srq.map(srq::software).transpose()?;
                qp::RcProvider::Software(x.create_rc(self.id, config, send, recv, srq)?)
            }
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => {
                let (send, recv) = (cq::verbs(send_cq)?, cq::verbs(recv_cq)?);
                let srq = srq.map(srq::verbs).transpose()?;
                qp::RcProvider::Verbs(x.create_rc(config, send, recv, srq)?)
            }
            Provider::Fault(x) => qp::RcProvider::Fault(x.create_rc(config, send_cq, recv_cq, srq)?),
        }))
    }

    /// Creates an unreliable datagram queue pair, in RESET. It takes receives from `srq` if one is given.
    pub fn create_ud(
        &self,
        config: &QpConfig,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
    ) -> Result<UdQp, DeviceError> {
        Ok(UdQp::from(match &self.provider {
            Provider::Software(x) => {
                let (send, recv) = (cq::software(send_cq)?, cq::software(recv_cq)?);
                let srq = srq.map(srq::software).transpose()?;
                qp::UdProvider::Software(x.create_ud(self.id, config, send, recv, srq)?)
            }
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => {
                let (send, recv) = (cq::verbs(send_cq)?, cq::verbs(recv_cq)?);
                let srq = srq.map(srq::verbs).transpose()?;
                qp::UdProvider::Verbs(x.create_ud(config, send, recv, srq)?)
            }
            Provider::Fault(x) => qp::UdProvider::Fault(x.create_ud(config, send_cq, recv_cq, srq)?),
        }))
    }

    /// Creates an address handle for sending datagrams to a device.
    pub fn create_ah(&self, to: &DeviceAddress) -> Result<Ah, DeviceError> {
        Ok(Ah {
            provider: match &self.provider {
                Provider::Software(x) => AhProvider::Software(x.create_ah(to)?),
                #[cfg(feature = "verbs")]
                Provider::Verbs(x) => AhProvider::Verbs(x.create_ah(to)?),
                Provider::Fault(x) => AhProvider::Fault(x.create_ah(to)?),
            },
        })
    }
}

/// An address handle: a resolved device address that datagrams are sent to. See [`UdQp::post`].
#[derive(Debug)]
pub struct Ah {
    pub(crate) provider: AhProvider,
}

#[derive(Debug)]
pub(crate) enum AhProvider {
    Software(software::Ah),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Ah),
    Fault(fault::Ah),
}

impl Ah {
    /// The address of the device.
    pub fn address(&self) -> DeviceAddress {
        dispatch!(AhProvider, &self.provider, x => x.address())
    }
}
