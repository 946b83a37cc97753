//! Memory regions: memory that a device can access.

use core::marker::PhantomData;
use core::ops::Range;

#[cfg(feature = "verbs")]
use super::verbs;
use super::{Access, OutOfRegion, RemoteMemory, Sge, software};
use crate::memory::copy;

/// A registered region. Dropping it deregisters the memory: when the drop returns, no peer accesses the memory any more,
/// and its keys are invalid.
///
/// [`Mr::write`] and [`Mr::read`] copy bytes in and out. A peer may be writing at the same moment, so there is no safe way to
/// borrow the bytes. [`Mr::as_ptr`] is for callers that synchronise with the peer themselves.
#[derive(Debug)]
pub struct Mr {
    addr: u64,
    len: usize,
    lkey: u32,
    rkey: u32,
    pd: u32,
    access: Access,
    #[expect(dead_code, reason = "holds the registration")]
    provider: Provider,
}

#[derive(Debug)]
pub(crate) enum Provider {
    Software(software::Mr),
    #[cfg(feature = "verbs")]
    Verbs(verbs::Mr),
}

impl Mr {
    pub(super) fn new(pd: u32, access: Access, provider: Provider) -> Mr {
        let (addr, len, lkey, rkey) = match &provider {
            Provider::Software(x) => (x.addr(), x.len(), x.lkey(), x.rkey()),
            #[cfg(feature = "verbs")]
            Provider::Verbs(x) => (x.addr(), x.len(), x.lkey(), x.rkey()),
        };
        Mr { addr, len, lkey, rkey, pd, access, provider }
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

    /// Pointer to the first byte, in this process.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.addr as usize)
    }

    /// What a peer needs to access it: address, length and rkey.
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
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, bytes.len())?;
        // SAFETY: `to..to + len` is inside the registered region, which is valid for writes until `self` is dropped;
        // `bytes` could overlap it only through references that the caller of `Pd::register` promised not to use.
        unsafe { copy::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region. If peers or requests write the same bytes at the same time, the result may be any
    /// mixture of old and new bytes.
    #[inline]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfRegion> {
        let from = self.checked(offset, bytes.len())?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { copy::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// As [`write`](Mr::write), for a few bytes at an offset that is a multiple of 8.
    #[inline]
    pub(crate) fn store<const N: usize>(&self, offset: usize, bytes: &[u8; N]) -> Result<(), OutOfRegion> {
        let to = self.checked(offset, N)?;
        assert!(to.cast::<u64>().is_aligned());
        // SAFETY: inside the region, to which there are no references, and aligned.
        unsafe { copy::store(bytes, to) };
        Ok(())
    }

    /// As [`read`](Mr::read), for a few bytes at an offset that is a multiple of 8.
    #[inline]
    pub(crate) fn load<const N: usize>(&self, offset: usize) -> Result<[u8; N], OutOfRegion> {
        let from = self.checked(offset, N)?;
        assert!(from.cast::<u64>().is_aligned());
        // SAFETY: as in `store`.
        Ok(unsafe { copy::load(from) })
    }

    #[inline]
    fn checked(&self, offset: usize, len: usize) -> Result<*mut u8, OutOfRegion> {
        match offset.checked_add(len) {
            // SAFETY: `offset <= self.len`, so the result is inside the region or one past its end.
            Some(end) if end <= self.len => Ok(unsafe { self.as_ptr().add(offset) }),
            _ => Err(OutOfRegion { offset, len, region: self.len }),
        }
    }
}
