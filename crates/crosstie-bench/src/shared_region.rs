//! Memory that both sides of a benchmark map, for the plain code that measures what the machine allows.
//!
//! This is the only file of the program with `unsafe` beside the registration of memory in place
//! (`docs/decisions/plain-shared-memory.md`). It promises bounds; who touches what when is up to `limits/`.

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::AtomicU64;
use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::Error;

/// Names the descriptor of the parent's region in a child's environment.
pub(crate) const VARIABLE: &str = "CROSSTIE_BENCH_ARENA";

/// A shared mapping, zeroed when new.
#[derive(Debug)]
pub(crate) struct SharedRegion {
    start: NonNull<u8>,
    len: usize,
    file: File,
}

// SAFETY: `start` points to a mapping of its own that any thread may touch; `word` gives atomics, and the contracts of
// `put` and `get` are about bytes, not threads.
unsafe impl Send for SharedRegion {}
// SAFETY: as above.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// A new one, which processes started from here inherit.
    pub(crate) fn create(len: usize) -> Result<SharedRegion, Error> {
        let file = File::from(
            memfd_create("crosstie-bench", MemfdFlags::empty()).map_err(Error::os("memfd_create"))?,
        );
        ftruncate(&file, len as u64).map_err(Error::os("sizing the memory for the limits"))?;
        SharedRegion::map(file, len)
    }

    /// The one that a parent process left in the environment.
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
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is there.
        let start = unsafe {
            mmap(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let start = NonNull::new(start.map_err(Error::os("mapping the memory for the limits"))?.cast());
        Ok(SharedRegion { start: start.ok_or(Error::Protocol)?, len, file })
    }

    /// What to put into [`VARIABLE`] for a child.
    pub(crate) fn descriptor(&self) -> String {
        self.file.as_raw_fd().to_string()
    }

    /// The word at `offset`, a multiple of 8.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.len - 8);
        // SAFETY: inside the mapping, which is aligned to a page and lives as long as `self`. Only atomics and the
        // byte copies of a disciplined protocol touch it.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    /// Copies bytes in. The caller's protocol keeps everybody else away from them.
    #[inline]
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: inside the mapping; `bytes` is a Rust slice and so no part of it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len()) };
    }

    /// Copies bytes out. The caller's protocol keeps writers away from them.
    #[inline]
    pub(crate) fn get(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset <= self.len && bytes.len() <= self.len - offset);
        // SAFETY: as in `put`.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Cuts `count` places (a power of two) from `offset` on, a multiple of 64, each for a number and `payload` bytes.
    pub(crate) fn slot_ring(&self, offset: usize, count: usize, payload: usize) -> SlotRing<'_> {
        let stride = SlotRing::stride(payload);
        assert!(offset.is_multiple_of(64) && count.is_power_of_two());
        assert!(offset <= self.len && SlotRing::len(count, payload) <= self.len - offset);
        // SAFETY: inside the mapping, by the line above.
        let start = unsafe { self.start.add(offset) };
        SlotRing { start, mask: count as u64 - 1, stride, payload, region: PhantomData }
    }
}

/// SlotRing for messages, checked once: every index is taken modulo their count.
///
/// ```text
/// place   0 number | 8 payload | ... | the next place, from a new line
/// ```
pub(crate) struct SlotRing<'a> {
    start: NonNull<u8>,
    mask: u64,
    stride: usize,
    payload: usize,
    region: PhantomData<&'a SharedRegion>,
}

impl SlotRing<'_> {
    /// How much of an region they take.
    pub(crate) fn len(count: usize, payload: usize) -> usize {
        count * SlotRing::stride(payload)
    }

    fn stride(payload: usize) -> usize {
        (8 + payload).next_multiple_of(64)
    }

    /// The number of a place.
    #[inline(always)]
    pub(crate) fn number(&self, index: u64) -> &AtomicU64 {
        // SAFETY: `at` stays inside the region, whose life `'a` bounds ours, and is aligned to a line.
        unsafe { AtomicU64::from_ptr(self.at(index).as_ptr().cast()) }
    }

    /// Copies a payload in. The caller's protocol keeps everybody else away from it.
    #[inline(always)]
    pub(crate) fn put<M: AsRef<[u8]> + ?Sized>(&self, index: u64, message: &M) {
        let bytes = message.as_ref();
        assert!(bytes.len() <= self.payload);
        // SAFETY: behind the number a place has room for the payload; `bytes` is a Rust slice and so no part of it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(index).add(8).as_ptr(), bytes.len()) };
    }

    /// Copies a payload out. The caller's protocol keeps writers away from it.
    #[inline(always)]
    pub(crate) fn get<M: AsMut<[u8]> + ?Sized>(&self, index: u64, message: &mut M) {
        let bytes = message.as_mut();
        assert!(bytes.len() <= self.payload);
        // SAFETY: as in `put`.
        unsafe { ptr::copy_nonoverlapping(self.at(index).add(8).as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    #[inline(always)]
    fn at(&self, index: u64) -> NonNull<u8> {
        // SAFETY: the masked index is below the count of places, which `SharedRegion::places` found to be inside the mapping.
        unsafe { self.start.add((index & self.mask) as usize * self.stride) }
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives `self`.
        if let Err(errno) = unsafe { munmap(self.start.as_ptr().cast(), self.len) } {
            eprintln!("crosstie: unmapping the memory for the limits: {errno}");
        }
    }
}
