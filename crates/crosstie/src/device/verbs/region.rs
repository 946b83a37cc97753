//! Memory regions: registering memory, and allocating memory to register.

use core::ptr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use rdma_mummy_sys as ffi;

use super::os_error;
use super::setup::{Pd, PdInner};
use crate::device::{Access, DeviceError};
use crate::process::Creator;

impl Pd {
    pub(crate) fn allocate(&self, len: usize, access: Access) -> Result<Mr, DeviceError> {
        // The device does not accept an empty region, so it gets one byte.
        let memory = Mapping::new(len.max(1))?;
        // SAFETY: the mapping is as long as requested, and moves into the `Mr`, which deregisters it before unmapping it.
        let mut mr = unsafe { self.register(memory.start, memory.len, access)? };
        mr.memory = Some(memory);
        Ok(mr)
    }

    /// # Safety
    ///
    /// As [`crate::device::Pd::register`].
    pub(crate) unsafe fn register(
        &self,
        start: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, DeviceError> {
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(DeviceError::BadAddress("remote writes and atomics need local write access"));
        }
        // SAFETY: the domain is live; the caller promised that the memory is valid.
        let mr = unsafe {
            ffi::ibv_reg_mr(self.inner.pd, start.cast(), len, self.inner.device.access_flags(access) as i32)
        };
        self.finish(mr, start)
    }

    pub(crate) fn register_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<Mr, DeviceError> {
        let flags = self.inner.device.access_flags(access) as i32;
        // SAFETY: the domain is live and the descriptor is open; the kernel checks the rest.
        let mr =
            unsafe { ffi::ibv_reg_dmabuf_mr(self.inner.pd, offset, len, address, fd.as_raw_fd(), flags) };
        self.finish(mr, ptr::without_provenance_mut(address as usize))
    }

    fn finish(&self, mr: *mut ffi::ibv_mr, start: *mut u8) -> Result<Mr, DeviceError> {
        if mr.is_null() {
            return Err(match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOSPC) => DeviceError::Exhausted { what: "regions" },
                Some(libc::ENOMEM) => {
                    os_error("register memory (raise the limit on locked memory, `ulimit -l`)", None)
                }
                code => os_error("register memory", code),
            });
        }
        // SAFETY: the call that returned it filled the structure in; it lives until the region is deregistered.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Mr { mr, start, lkey, rkey, memory: None, pd: self.inner.clone() })
    }
}

/// A registered region.
#[derive(Debug)]
pub(crate) struct Mr {
    /// Null once it is deregistered.
    mr: *mut ffi::ibv_mr,
    start: *mut u8,
    lkey: u32,
    rkey: u32,
    /// Memory that we allocated; unmapped after `drop` has deregistered it.
    memory: Option<Mapping>,
    pd: Arc<PdInner>,
}

// SAFETY: the handle is used for deregistration only, which any thread may do; the memory is not accessed through it.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    pub(crate) fn addr(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Mr {
    /// Deregisters the memory. If the driver refuses, the device may still access it: then the region is handed back.
    pub(crate) fn deregister(mut self) -> Result<(), Mr> {
        if self.try_deregister() { Ok(()) } else { Err(self) }
    }

    fn try_deregister(&mut self) -> bool {
        // In a forked child the region is still its parent's.
        if self.mr.is_null() || !self.pd.device.is_of_this_process() {
            return true;
        }
        // SAFETY: registered in `register`, and not deregistered: then it is null.
        let is_done = unsafe { ffi::ibv_dereg_mr(self.mr) } == 0;
        if is_done {
            self.mr = ptr::null_mut();
        }
        is_done
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        let is_done = self.try_deregister();
        debug_assert!(is_done, "deregister memory");
        if !is_done {
            // The device may still access the pages, so they are leaked rather than reused.
            core::mem::forget(self.memory.take());
        }
    }
}

/// Zeroed pages that we mapped.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    len: usize,
    creator: Creator,
}

impl Mapping {
    fn new(len: usize) -> Result<Mapping, DeviceError> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let failed = |e: rustix::io::Errno| DeviceError::Os { what: "map memory", source: e.into() };
        // SAFETY: an anonymous mapping at an address that the kernel chooses affects no existing memory.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(failed)?;
        let mapping = Mapping { start: start.cast(), len, creator: Creator::this_process() };
        // A forked child must not share these pages copy-on-write with the device.
        // SAFETY: the range is the mapping.
        unsafe { madvise(start, len, Advice::LinuxDontFork) }.map_err(failed)?;
        if len >= 2 << 20 {
            // A kernel without transparent huge pages returns an error; small pages work too.
            // SAFETY: the range is the mapping.
            unsafe { madvise(start, len, Advice::LinuxHugepage) }.unwrap_or(());
        }
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child does not have the mapping.
        if !self.creator.is_this_process() {
            return;
        }
        // SAFETY: mapped in `new`; the region that used it is deregistered.
        let unmapped = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmap a mapping of our own");
    }
}
