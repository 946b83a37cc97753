//! Shared memory that both sides of a benchmark map, for the plain code that measures what the machine allows.
//!
//! This file and the registration of memory in place (`device/connection.rs`) are the only ones of the crate with `unsafe`
//! (`docs/decisions/plain-shared-memory.md`). It checks bounds. `limits/` decides which side accesses which bytes when.

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::AtomicU64;
use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::Error;

/// Environment variable of a child process with the file descriptor of its parent's region.
pub(crate) const VARIABLE: &str = "CROSSTIE_BENCH_ARENA";

/// A shared mapping, zeroed when new.
#[derive(Debug)]
pub(crate) struct SharedRegion {
    start: NonNull<u8>,
    len: usize,
    file: File,
}

// SAFETY: `start` points to a mapping that only this value owns and that any thread may access. `word` returns atomics. `put` and
// `get` copy bytes; their contracts do not depend on the thread.
unsafe impl Send for SharedRegion {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Creates a region. Child processes inherit its descriptor.
    pub(crate) fn create(len: usize) -> Result<SharedRegion, Error> {
        let file = File::from(
            memfd_create("crosstie-bench", MemfdFlags::empty()).map_err(Error::os("memfd_create"))?,
        );
        ftruncate(&file, len as u64).map_err(Error::os("sizing the memory for the limits"))?;
        SharedRegion::map(file, len)
    }

    /// Maps the region whose descriptor the parent process put into the environment; `None` if the variable is not set.
    pub(crate) fn inherited(len: usize) -> Result<Option<SharedRegion>, Error> {
        let Some(fd) = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<u32>().ok()) else {
            return Ok(None);
        };
        let opened = File::options().read(true).write(true).open(format!("/proc/self/fd/{fd}"));
        let file =
            opened.map_err(|source| Error::Os { what: "the parent's memory for the limits", source })?;
        SharedRegion::map(file, len).map(Some)
    }

    fn map(file: File, len: usize) -> Result<SharedRegion, Error> {
        // SAFETY: a new mapping at an address that the kernel chooses, so it overlaps nothing.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let start = NonNull::new(start.map_err(Error::os("mapping the memory for the limits"))?.cast());
        Ok(SharedRegion { start: start.ok_or(Error::Protocol)?, len, file })
    }

    /// The value of [`VARIABLE`] for a child process.
    pub(crate) fn descriptor(&self) -> String {
        self.file.as_raw_fd().to_string()
    }

    /// The 8-byte word at `offset`, a multiple of 8.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.len - 8);
        // SAFETY: the assertion keeps the word inside the mapping, which is page-aligned and lives as long as `self`. Other code accesses
        // the mapping by atomics, or by copies that the protocols of `limits/` keep apart from this word.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// Copies bytes in. The caller's protocol must keep all other threads away from them meanwhile.
    #[inline]
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: the assertion keeps the range inside the mapping. `bytes` is a Rust slice, so it does not overlap the mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len()) };
    }

    /// Copies bytes out. The caller's protocol must keep writers away from them meanwhile.
    #[inline]
    pub(crate) fn get(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: as in `put`.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// A ring of `count` slots (a power of two) at `offset`, a multiple of 64. Each slot holds a number and `payload` bytes.
    pub(crate) fn slot_ring(&self, offset: usize, count: usize, payload: usize) -> SlotRing<'_> {
        let stride = SlotRing::stride(payload);
        assert!(offset.is_multiple_of(64) && count.is_power_of_two());
        assert!(offset <= self.len && SlotRing::len(count, payload) <= self.len - offset);
        // SAFETY: the assertions above keep the ring inside the mapping.
        let start = unsafe { self.start.add(offset) };
        SlotRing { start, mask: count as u64 - 1, stride, payload, region: PhantomData }
    }
}

/// A ring of slots for messages. Its bounds are checked once; every index is taken modulo the number of slots.
///
/// ```text
/// slot   0 number | 8 payload | ... | next slot, at the next cache line
/// ```
pub(crate) struct SlotRing<'a> {
    start: NonNull<u8>,
    mask: u64,
    stride: usize,
    payload: usize,
    region: PhantomData<&'a SharedRegion>,
}

impl SlotRing<'_> {
    /// Bytes that a ring takes.
    pub(crate) fn len(count: usize, payload: usize) -> usize {
        count * SlotRing::stride(payload)
    }

    fn stride(payload: usize) -> usize {
        (8 + payload).next_multiple_of(64)
    }

    /// The number of a slot.
    #[inline(always)]
    pub(crate) fn number(&self, index: u64) -> &AtomicU64 {
        // SAFETY: `at` stays inside the region, which outlives `'a`, and is aligned to a cache line.
        unsafe { AtomicU64::from_ptr(self.at(index).as_ptr().cast()) }
    }

    /// Copies a payload in. The caller's protocol must keep all other threads away from the slot meanwhile.
    #[inline(always)]
    pub(crate) fn put<M: AsRef<[u8]> + ?Sized>(&self, index: u64, message: &M) {
        let bytes = message.as_ref();
        assert!(bytes.len() <= self.payload);
        // SAFETY: a slot has room for the payload after its number. `bytes` is a Rust slice, so it does not overlap the mapping.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(index).add(8).as_ptr(), bytes.len()) };
    }

    /// Copies a payload out. The caller's protocol must keep writers away from the slot meanwhile.
    #[inline(always)]
    pub(crate) fn get<M: AsMut<[u8]> + ?Sized>(&self, index: u64, message: &mut M) {
        let bytes = message.as_mut();
        assert!(bytes.len() <= self.payload);
        // SAFETY: as in `put`.
        unsafe { ptr::copy_nonoverlapping(self.at(index).add(8).as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    #[inline(always)]
    fn at(&self, index: u64) -> NonNull<u8> {
        // SAFETY: the masked index is below the number of slots, and `SharedRegion::slot_ring` checked that all slots are inside the mapping.
        unsafe { self.start.add((index & self.mask) as usize * self.stride) }
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference into it outlives `self`.
        if let Err(errno) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            eprintln!("crosstie: unmapping the memory for the limits: {errno}");
        }
    }
}
