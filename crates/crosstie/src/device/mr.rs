//! Memory regions: memory that a device can access.

use core::marker::PhantomData;
use core::ops::Range;
use core::time::Duration;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{Access, DeregisterError, OutOfRegion, RemoteMemory, Sge, software};
use crate::memory::copy;
use crate::memory::shared_bytes::SharedBytes;

/// A registered region. Dropping it deregisters the memory: its keys are invalid from then on, and no peer accesses memory
/// that the program uses.
///
/// A peer of the software device may be inside an operation on the region at that moment, or be stopped there.
///
/// - Memory of [`Pd::allocate`](super::Pd::allocate): the drop does not wait. The device keeps the memory, and uses it again
///   when the peer has left or is dead. [`Device::counters`](super::Device::counters) says how much memory is kept.
/// - Memory of [`Pd::register`](super::Pd::register): the drop waits until no peer of the same protection domain is inside
///   the operation any more, however long that takes, because the caller gets the memory back. [`Mr::deregister`] waits for
///   a limited time.
///
/// [`Mr::write`] and [`Mr::read`] copy bytes in and out. A peer may be writing at the same moment, so there is no safe way to
/// borrow the bytes. [`Mr::as_ptr`] is for callers that synchronise with the peer themselves.
#[derive(Debug)]
pub struct Mr {
    /// The address that the device and peers know.
    addr: u64,
    /// The address in this process, 0 if there is none. The software device may add a tag to it for `addr`.
    start: usize,
    len: usize,
    lkey: u32,
    rkey: u32,
    pd: u32,
    access: Access,
    /// How many bytes the program may write: none if the memory is not mapped here, or was registered in place without a right to
    /// write.
    writable: usize,
    provider: Provider,
}

#[derive(Debug)]
pub(crate) enum Provider {
    Software(software::Mr),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Mr),
}

impl Mr {
    /// `is_ours`: the memory was allocated by the device.
    pub(super) fn new(pd: u32, access: Access, len: usize, is_ours: bool, provider: Provider) -> Mr {
        let (addr, start, lkey, rkey) = match &provider {
            Provider::Software(x) => (x.addr(), x.pointer().addr(), x.lkey(), x.rkey()),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => (x.addr(), x.addr() as usize, x.lkey(), x.rkey()),
        };
        let is_writable = start != 0 && (is_ours || access.contains(Access::LOCAL_WRITE));
        let writable = if is_writable { len } else { 0 };
        Mr { addr, start, len, lkey, rkey, pd, access, writable, provider }
    }

    /// A region whose address is not one of this process.
    #[cfg(feature = "verbs")]
    pub(super) fn unmapped(pd: u32, access: Access, len: usize, provider: Provider) -> Mr {
        Mr { start: 0, writable: 0, ..Mr::new(pd, access, len, false, provider) }
    }

    /// Deregisters the memory, as dropping it does, but waits at most `timeout` for a peer that is inside an operation. If
    /// the time is over, the error hands the region back and names the peer's process. The region is then closed to new
    /// operations; `deregister` can be called again, which waits only for those operations that were under way the first
    /// time.
    ///
    /// Only memory of [`Pd::register`](super::Pd::register) on a software device can fail this way; on a verbs device, any region whose
    /// deregistration the driver refuses, at once and without a process.
    pub fn deregister(self, timeout: Duration) -> Result<(), DeregisterError> {
        let Mr { addr, start, len, lkey, rkey, pd, access, writable, provider } = self;
        let (provider, process) = match provider {
            Provider::Software(x) => match x.deregister(timeout) {
                Ok(()) => return Ok(()),
                Err((x, process)) => (Provider::Software(x), process),
            },
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => match x.deregister() {
                Ok(()) => return Ok(()),
                Err(x) => (Provider::Verbs(x), None),
            },
        };
        let region = Mr { addr, start, len, lkey, rkey, pd, access, writable, provider };
        Err(DeregisterError { region, process })
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The operations that are allowed on it.
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Pointer to the first byte, in this process. NULL if the memory is not mapped here, see
    /// [`Pd::register_dma_buf`](super::Pd::register_dma_buf).
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.start)
    }

    /// What a peer needs to access it: address, length and rkey.
    ///
    /// The address is the one of [`Mr::as_ptr`]; on the software device it may also have a tag in its upper 16 bits, which
    /// keeps peers from reaching this region with an address and key of a region that was given back. On verbs, whether an
    /// old key is refused depends on the NIC, which uses its keys again.
    #[inline]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { addr: self.addr, len: self.len as u64, rkey: self.rkey, reserved: 0 }
    }

    /// A scatter/gather entry for a range of it.
    #[inline]
    pub fn sge(&self, range: Range<usize>) -> Result<Sge<'_>, OutOfRegion> {
        let len = range.end.wrapping_sub(range.start);
        if range.end > self.len || range.start > range.end || len > u32::MAX as usize {
            return Err(OutOfRegion { offset: range.start, len, region: self.len });
        }
        Ok(Sge {
            addr: self.addr + range.start as u64,
            len: len as u32,
            lkey: self.lkey,
            pd: self.pd,
            access: self.access,
            region: PhantomData,
        })
    }

    /// Copies bytes into the region. Peers and requests that access the same bytes at the same time may see any mixture of
    /// old and new bytes.
    ///
    /// Memory that was registered in place without [`Access::LOCAL_WRITE`] cannot be written.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, bytes.len(), self.writable)?;
        // SAFETY: `to..to + len` is inside the registered region, which is valid for writes until `self` is dropped;
        // `bytes` could overlap it only through references that the caller of `Pd::register` promised not to use.
        unsafe { copy::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region. If peers or requests write the same bytes at the same time, the result may be any
    /// mixture of old and new bytes.
    #[inline]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        let from = self.checked(offset, bytes.len(), self.readable())?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { copy::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// A range of the region, to be copied out.
    #[inline(always)]
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Result<SharedBytes<'_>, OutOfRegion> {
        let from = self.checked(offset, len, self.readable())?;
        // SAFETY: `from..from + len` is inside the registered region, which is valid for reads until `self` is dropped.
        Ok(unsafe { SharedBytes::new(from, len) })
    }

    /// Copies bytes from another region into this one.
    #[inline]
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        from: &Mr,
        at: usize,
        len: usize,
    ) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, len, self.writable)?;
        let from = from.checked(at, len, from.readable())?;
        // SAFETY: both ranges are inside registered regions, which are valid until the regions are dropped. Regions of
        // different memory do not overlap; if the same memory was registered twice, the bytes are some mixture, as on a NIC.
        unsafe { copy::copy(from, to, len) };
        Ok(())
    }

    /// As [`write`](Mr::write), for a few bytes at an offset that is a multiple of 8.
    #[inline]
    pub(crate) fn store<const N: usize>(&self, offset: usize, bytes: &[u8; N]) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, N, self.writable)?;
        assert!(to.cast::<u64>().is_aligned());
        // SAFETY: inside the region, to which there are no references, and aligned.
        unsafe { copy::store(bytes, to) };
        Ok(())
    }

    /// As [`store`](Mr::store), with more bytes behind the first ones.
    #[inline(always)]
    pub(crate) fn store_both<const N: usize>(
        &self,
        offset: usize,
        head: &[u8; N],
        tail: &[u8],
    ) -> Result<(), OutOfRegion> {
        // No overflow: no slice is longer than `isize::MAX`.
        let to = self.checked(offset, N + tail.len(), self.writable)?;
        assert!(to.cast::<u64>().is_aligned());
        // SAFETY: `N + tail.len()` bytes at `to` are inside the region. For the head as in `store`, for the tail as in `write`.
        unsafe {
            copy::store(head, to);
            copy::copy(tail.as_ptr(), to.add(N), tail.len());
        }
        Ok(())
    }

    /// As [`read`](Mr::read), for a few bytes at an offset that is a multiple of 8.
    #[inline]
    pub(crate) fn load<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRegion> {
        let from = self.checked(offset, N, self.readable())?;
        assert!(from.cast::<u64>().is_aligned());
        // SAFETY: as in `store`.
        Ok(unsafe { copy::load(from) })
    }

    /// How many bytes the program may read: none if the memory is not mapped here.
    #[inline]
    fn readable(&self) -> usize {
        if self.start == 0 { 0 } else { self.len }
    }

    /// `limit` is `readable` or `writable`. An unmapped region has zero bytes at NULL.
    #[inline]
    fn checked(&self, offset: usize, len: usize, limit: usize) -> Result<*mut u8, OutOfRegion> {
        match offset.checked_add(len) {
            // SAFETY: `offset <= limit <= self.len`, so the result is inside the region or one past its end.
            Some(end) if end <= limit => Ok(unsafe { self.as_ptr().add(offset) }),
            _ => Err(OutOfRegion { offset, len, region: limit }),
        }
    }
}
