//! Memory that is registered on several devices at once.

use core::time::Duration;

use super::{Access, DeregisterError, DeviceError, Mr, OutOfRegion, Pd};

/// The same memory, registered in several protection domains, usually of different devices.
///
/// ```
/// use crosstie::device::{Access, Device, MultiRegion};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let devices = [Device::open(&"software".parse()?)?, Device::open(&"software".parse()?)?];
/// let domains = [devices[0].alloc_pd()?, devices[1].alloc_pd()?];
/// let memory = MultiRegion::allocate(&domains, 4096, Access::ALL)?;
/// memory.region(0).write(8, b"hello")?;
/// let mut bytes = [0; 5];
/// memory.region(1).read(8, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct MultiRegion {
    /// Regions of memory that the first region owns come before it, so that they are dropped first. `regions[0]` is that of
    /// the last domain.
    regions: Vec<Mr>,
}

impl MultiRegion {
    /// Allocates memory in the first domain and registers it in the others.
    pub fn allocate(domains: &[Pd], len: usize, access: Access) -> Result<MultiRegion, DeviceError> {
        let Some((first, others)) = domains.split_first() else {
            return Err(DeviceError::Exhausted { what: "devices" });
        };
        let owner = first.allocate(len, access)?;
        let mut regions = Vec::with_capacity(domains.len());
        for domain in others.iter().rev() {
            // SAFETY: the memory belongs to `owner`, which is dropped after this region: `drop` and `deregister` go through
            // the vector from its start, and `owner` is the last. `Mr` gives out no references to its bytes.
            regions.push(unsafe { domain.register(owner.as_ptr(), len, access)? });
        }
        regions.push(owner);
        Ok(MultiRegion { regions })
    }

    /// Registers memory of the caller, in place, in all domains.
    ///
    /// # Safety
    ///
    /// As for [`Pd::register`], until this object is dropped or [deregistered](MultiRegion::deregister).
    pub unsafe fn register(
        domains: &[Pd],
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<MultiRegion, DeviceError> {
        let mut regions = Vec::with_capacity(domains.len());
        for domain in domains.iter().rev() {
            // SAFETY: the caller's promise.
            regions.push(unsafe { domain.register(start, len, access)? });
        }
        Ok(MultiRegion { regions })
    }

    /// Registers memory that a DMA-BUF file descriptor names in all domains, see [`Pd::register_dma_buf`].
    ///
    /// # Safety
    ///
    /// As for [`Pd::register_dma_buf`], until this object is dropped or [deregistered](MultiRegion::deregister).
    pub unsafe fn register_dma_buf(
        domains: &[Pd],
        fd: std::os::fd::BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<MultiRegion, DeviceError> {
        let mut regions = Vec::with_capacity(domains.len());
        for domain in domains.iter().rev() {
            // SAFETY: the caller's promise.
            regions.push(unsafe { domain.register_dma_buf(fd, offset, len, address, access)? });
        }
        Ok(MultiRegion { regions })
    }

    /// The region in domain `index`.
    #[inline]
    pub fn region(&self, index: usize) -> &Mr {
        &self.regions[self.regions.len() - 1 - index]
    }

    /// The number of domains.
    pub fn domains(&self) -> usize {
        self.regions.len()
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.regions.last().map_or(0, Mr::len)
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies bytes into the memory, see [`Mr::write`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        self.region(0).write(offset, bytes)
    }

    /// Copies bytes out of the memory, see [`Mr::read`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        self.region(0).read(offset, bytes)
    }

    /// Deregisters the memory everywhere, see [`Mr::deregister`]. If a peer is inside an operation for longer than `timeout`,
    /// the error hands back the regions that are left.
    pub fn deregister(mut self, timeout: Duration) -> Result<(), (MultiRegion, Option<u32>)> {
        self.regions.reverse();
        while let Some(region) = self.regions.pop() {
            if let Err(DeregisterError { region, process }) = region.deregister(timeout) {
                self.regions.push(region);
                self.regions.reverse();
                return Err((self, process));
            }
        }
        Ok(())
    }
}
