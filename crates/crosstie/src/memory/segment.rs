//! Shared segments: anonymous memory that several processes map.
//!
//! A segment is a memfd. It has no name in any file system, so nothing is left behind however its users end. It is sealed
//! against resizing, so no process can make an access of another one fault. Its contents are accessed through [`Shared`]
//! types, which consist of atomics only, so that any bytes are a valid value.
//!
//! **A segment of another process** is taken for one only if the kernel says that it is such a file ([`Segment::open`]). Any process of
//! our user can hand over any file: one in huge pages, for example, raises SIGBUS where the machine has no huge page left.
//!
//! **What remains** (Linux `vm.overcommit_memory=2` only): the kernel charges a page when it is first touched, and raises SIGBUS in
//! the process that touches it if the machine's commit limit is reached.
//!
//! **Locked memory.** A program that locks all future memory (`mlockall(MCL_FUTURE)`) does not lock segments: of the 64 GiB of a device
//! only what is used takes memory. The kernel still compares the length with the limit on locked memory (`ulimit -l`), unless the
//! process has `CAP_IPC_LOCK`.
//!
//! **A forked child** does not have the memory of its parent's segments: other memory of the child may be at their addresses.

use core::any::type_name;
use core::fmt;
use core::ops::{Deref, Index};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use rustix::process::Resource;

use crate::local::socket::ReceivedFile;
use crate::process::Creator;

/// Types that may be placed in memory that other processes write.
///
/// # Safety
///
/// Any bit pattern is a valid value, padding is never read, all state is in atomics, and the alignment is at most a page.
pub(crate) unsafe trait Shared {}

// SAFETY: an atomic integer is valid for any bits.
unsafe impl Shared for AtomicU64 {}
// SAFETY: an atomic integer is valid for any bits.
unsafe impl Shared for AtomicU32 {}
// SAFETY: an array of such types.
unsafe impl<T: Shared, const N: usize> Shared for [T; N] {}

/// A mapped segment.
#[derive(Debug)]
pub(crate) struct Segment {
    base: NonNull<u8>,
    len: u64,
    fd: OwnedFd,
    creator: Creator,
}

// SAFETY: the mapping is not bound to a thread. All access is through atomics or copies that tolerate races.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// `f_type` of the file system of memfds, `TMPFS_MAGIC`. Those in huge pages belong to another one.
const TMPFS: u64 = 0x0102_1994;

/// Length of the longest segment: a peer does not take more of our address space with one.
pub(crate) const MAX_LEN: u64 = 1 << 40;

impl Segment {
    /// Creates a segment of zeros. The kernel allocates a page when it is first touched.
    pub(crate) fn create(len: u64) -> io::Result<Segment> {
        check_len(len)?;
        // The kernel would end the process with SIGXFSZ.
        if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current
            && len > limit
        {
            let why = format!(
                "a segment of {len} bytes exceeds the limit on file sizes (ulimit -f) of {limit} bytes"
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
        let fd = rustix::fs::memfd_create("crosstie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, len)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Segment::map(fd, len)
    }

    /// Maps a segment that another process created. Its size must be `len`, and it must be sealed.
    pub(crate) fn open(file: ReceivedFile, len: u64) -> io::Result<Segment> {
        check_len(len)?;
        let fd = file.take_if(is_segment).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "what the peer handed over is no sealed memory of ordinary pages",
            )
        })?;
        let size = rustix::fs::fstat(&fd)?.st_size;
        if u64::try_from(size) != Ok(len) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the segment of the peer has the wrong size",
            ));
        }
        Segment::map(fd, len)
    }

    fn map(fd: OwnedFd, len: u64) -> io::Result<Segment> {
        let size = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // Without access at first: after `mlockall(MCL_FUTURE)` the kernel would allocate all of it here.
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing object.
        let base =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), size, ProtFlags::empty(), flags, &fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let segment = Segment { base, len, fd, creator: Creator::this_process() };
        // SAFETY: all three are on our own mapping, to which nothing refers yet. The advice affects only what a fork copies: a forked
        // child must not access the memory of its parent's devices.
        unsafe {
            rustix::mm::munlock(base.as_ptr().cast(), size)?;
            rustix::mm::mprotect(base.as_ptr().cast(), size, MprotectFlags::READ | MprotectFlags::WRITE)?;
            rustix::mm::madvise(base.as_ptr().cast(), size, Advice::LinuxDontFork)?;
        }
        Ok(segment)
    }

    /// False in a forked child of the process that mapped it: the child does not have the mapping.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.creator.is_this_process()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The memfd, to hand over to a peer.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The address of `len` bytes at `offset`, if they are inside of the segment.
    #[inline]
    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        // SAFETY: inside the mapping, whose size fits the address space.
        (end <= self.len).then(|| unsafe { self.base.add(offset as usize) })
    }

    /// Asks the kernel to use huge pages for a range.
    pub(crate) fn advise_huge(&self, offset: u64, len: u64) {
        if let Some(start) = self.bytes(offset, len) {
            // SAFETY: advice on our own mapping; it changes no contents.
            // A failure (no huge pages configured) only costs speed, so it is ignored.
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), len as usize, Advice::LinuxHugepage) }.ok();
        }
    }

    /// Frees the pages of a range. It then reads as zeros in every process.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        rustix::fs::fallocate(&self.fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?;
        Ok(())
    }
}

/// Whether a file is memory that no process can shrink, and that is not in huge pages. Calls nothing that blocks, whatever file it is: only
/// memory has seals, and only memory is asked for its file system.
fn is_segment(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS))
        && rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u64 == TMPFS)
}

fn check_len(len: u64) -> io::Result<()> {
    if len > MAX_LEN {
        let why = format!("a segment of {len} bytes exceeds the limit of {MAX_LEN} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(())
}

impl Drop for Segment {
    fn drop(&mut self) {
        // A forked child does not have the mapping.
        if !self.is_of_this_process() {
            return;
        }
        // SAFETY: the mapping is ours, and every reference into it holds an `Arc` of this segment.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A reference into a segment, which it keeps mapped.
pub(crate) struct SharedRef<T> {
    at: NonNull<T>,
    segment: Arc<Segment>,
}

// SAFETY: `T: Shared` is atomics only (enforced by the constructor), and the segment is `Send` and `Sync`.
unsafe impl<T> Send for SharedRef<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedRef<T> {}

impl<T: Shared> SharedRef<T> {
    /// The `T` at `offset`. None if it is not inside of the segment or not aligned.
    pub(crate) fn new(segment: &Arc<Segment>, offset: u64) -> Option<SharedRef<T>> {
        let at = segment.bytes(offset, size_of::<T>() as u64)?.cast::<T>();
        at.is_aligned().then(|| SharedRef { at, segment: segment.clone() })
    }
}

impl<T> SharedRef<T> {
    /// As [`Segment::is_of_this_process`].
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.segment.is_of_this_process()
    }
}

impl<T> Clone for SharedRef<T> {
    fn clone(&self) -> Self {
        SharedRef { at: self.at, segment: self.segment.clone() }
    }
}

impl<T> Deref for SharedRef<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: inside the segment that `self` keeps mapped, aligned, and `T: Shared` is valid for any bits.
        unsafe { self.at.as_ref() }
    }
}

/// An array in a segment, or in [private memory](SharedSlice::private), which it keeps mapped.
pub(crate) struct SharedSlice<T> {
    first: NonNull<T>,
    len: usize,
    /// For [`ring`](SharedSlice::ring): less than `len`, whatever that is.
    mask: usize,
    memory: Arc<dyn Send + Sync>,
}

/// Zeroed memory that only this process has mapped.
struct PrivateMemory {
    base: NonNull<u8>,
    size: usize,
}

// SAFETY: the mapping is not bound to a thread. All access is through atomics.
unsafe impl Send for PrivateMemory {}
// SAFETY: as above.
unsafe impl Sync for PrivateMemory {}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every reference into it holds an `Arc` of this object.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size) };
        debug_assert!(unmapped.is_ok());
    }
}

// SAFETY: as for `SharedRef`.
unsafe impl<T> Send for SharedSlice<T> {}
// SAFETY: as for `SharedRef`.
unsafe impl<T> Sync for SharedSlice<T> {}

impl<T: Shared> SharedSlice<T> {
    /// The `len` elements at `offset`. `None` if `len` is zero, or if they are not aligned or not inside of the segment.
    pub(crate) fn new(segment: &Arc<Segment>, offset: u64, len: usize) -> Option<SharedSlice<T>> {
        let mask = ring_mask(len)?;
        let size = (len as u64).checked_mul(size_of::<T>() as u64)?;
        let first = segment.bytes(offset, size)?.cast::<T>();
        first.is_aligned().then(|| SharedSlice { first, len, mask, memory: segment.clone() })
    }

    /// `len` zeroed elements in memory of this process, which no peer can write. The kernel allocates a page when it is
    /// first touched.
    pub(crate) fn private(len: usize) -> io::Result<SharedSlice<T>> {
        let mask = ring_mask(len).ok_or(io::ErrorKind::InvalidInput)?;
        let size = len.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no existing object.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // A mapping begins at a page, so it is aligned for every `Shared` type.
        let memory = Arc::new(PrivateMemory { base, size });
        Ok(SharedSlice { first: base.cast(), len, mask, memory })
    }

    /// The number of elements.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `len` elements from `start` on.
    #[inline]
    pub(crate) fn range(&self, start: usize, len: usize) -> &[T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: inside the elements; otherwise as for `SharedRef::deref`.
        unsafe { core::slice::from_raw_parts(self.first.add(start).as_ptr(), len) }
    }

    /// The element at `position` modulo the length, which must be a power of two; otherwise it is some other element.
    #[inline]
    pub(crate) fn ring(&self, position: u64) -> &T {
        debug_assert!(self.len.is_power_of_two());
        let index = position as usize & self.mask;
        // SAFETY: `index <= mask < len` (`ring_mask`); otherwise as for `SharedRef::deref`.
        unsafe { self.first.add(index).as_ref() }
    }
}

/// One less than the largest power of two that is not greater than `len`. None if `len` is zero.
fn ring_mask(len: usize) -> Option<usize> {
    Some((1 << len.checked_ilog2()?) - 1)
}

impl<T> Clone for SharedSlice<T> {
    fn clone(&self) -> Self {
        SharedSlice { memory: self.memory.clone(), ..*self }
    }
}

impl<T: Shared> Index<usize> for SharedSlice<T> {
    type Output = T;
    #[inline]
    fn index(&self, index: usize) -> &T {
        assert!(index < self.len);
        // SAFETY: `index < len`; otherwise as for `SharedRef::deref`.
        unsafe { self.first.add(index).as_ref() }
    }
}

impl<T> fmt::Debug for SharedRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:p}", type_name::<T>(), self.at)
    }
}

impl<T> fmt::Debug for SharedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}; {}]@{:p}", type_name::<T>(), self.len, self.first)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ROLE: &str = "CROSSTIE_FILE_SIZE_LIMIT";

    /// Runs with a limit on file sizes when the next test starts it in a child process; does nothing in an ordinary run.
    #[test]
    fn process_with_a_file_size_limit() {
        if std::env::var_os(ROLE).is_none() {
            return;
        }
        let limit = rustix::process::Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
        rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
        assert!(Segment::create(1 << 20).is_ok());
        let error = Segment::create(2 << 20).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("ulimit -f"), "{error}");
    }

    #[test]
    fn segment_above_the_file_size_limit_is_an_error_and_no_signal() {
        if std::env::var_os(ROLE).is_some() {
            return;
        }
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "memory::segment::tests::process_with_a_file_size_limit", "--nocapture"])
            .env(ROLE, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}: {}", child.status, String::from_utf8_lossy(&child.stderr));
    }

    /// A memfd of this length that cannot be resized.
    fn sealed(flags: MemfdFlags, len: u64) -> OwnedFd {
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SEALS).unwrap();
        fd
    }

    #[test]
    fn only_sealed_memory_of_ordinary_pages_is_taken_for_a_segment() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::OpenOptionsExt;
        let huge_page = 2 << 20;
        assert!(Segment::open(sealed(MemfdFlags::empty(), huge_page).into(), huge_page).is_ok());
        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, huge_page).unwrap();
        let unwritable = sealed(MemfdFlags::empty(), huge_page);
        let path = format!("/proc/self/fd/{}", unwritable.as_raw_fd());
        let unwritable = std::fs::File::open(&path).unwrap();
        let reference =
            std::fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let files: [(&str, OwnedFd); 7] = [
            (
                "memory in huge pages, of which the machine may have none",
                sealed(MemfdFlags::HUGETLB, huge_page),
            ),
            ("memory that can be shortened", unsealed),
            ("memory that cannot be written", unwritable.into()),
            ("a reference to a file", reference.into()),
            ("a file", file.into()),
            ("a pipe", pipe),
            ("memory of another length", sealed(MemfdFlags::empty(), huge_page / 2)),
        ];
        for (what, file) in files {
            assert!(Segment::open(file.into(), huge_page).is_err(), "{what}");
        }
        let long = sealed(MemfdFlags::empty(), MAX_LEN * 2);
        assert!(Segment::open(long.into(), MAX_LEN * 2).is_err(), "longer than the limit");
    }

    const LOCKED_ROLE: &str = "CROSSTIE_LOCKED_MEMORY";

    /// Locks its memory when the next test starts it in a child process; does nothing in an ordinary run.
    #[test]
    fn process_that_locks_all_future_memory() {
        if std::env::var_os(LOCKED_ROLE).is_none() {
            return;
        }
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::FUTURE).unwrap();
        let shared_kib = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let before = shared_kib();
        let segment = Segment::create(256 << 20).unwrap();
        let taken = shared_kib() - before;
        assert!(taken < 1024, "{taken} KiB of a segment that nobody has touched");
        drop(segment);
    }

    #[test]
    fn segment_of_a_process_that_locks_its_memory_takes_none_before_it_is_used() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "memory::segment::tests::process_that_locks_all_future_memory", "--nocapture"])
            .env(LOCKED_ROLE, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}: {}", child.status, String::from_utf8_lossy(&child.stderr));
    }
}
