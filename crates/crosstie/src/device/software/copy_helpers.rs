//! Threads that help with long copies into the memory of another process.
//!
//! `process_vm_writev` copies about 10 GB/s per thread, far less than the memory can do. So a long copy is cut into chunks; the
//! thread that posts the request takes chunks, and so do helper threads, if there are any and they are free. The poster returns
//! when all chunks are done: for everybody else it is as if the poster had made the copy itself. A helper that comes late finds
//! no chunk left; nobody waits for a helper that has not taken one.
//!
//! ```text
//!  poster                                    helper
//!  job = ..., done = 0
//!  next = (number, 0)
//!  number (Release)                  ----->  number (Acquire), read job
//!  take chunks: next += 1            <---->  take chunks: compare-and-swap of next, which names the job
//!  wait until done == chunks         <-----  done += 1 (Release)
//! ```
//!
//! One job at a time; a poster that finds another one's job copies alone. Helpers spin for [`SPIN`] after a job and park then. They
//! exist once per process, from its first long copy on, and only on machines with at least eight cores. The variable
//! `CROSSTIE_COPY_HELPERS` sets their number.

use core::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release, Ordering::SeqCst,
};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::thread::futex;

/// Copies of at least this many bytes are shared.
pub(super) const MIN_SHARED: usize = 64 << 10;
/// Copies of at least this many bytes wake helpers that are parked: that takes as long as copying a few chunks.
const MIN_WAKE: usize = 256 << 10;
const CHUNK: usize = 32 << 10;
/// How long a helper spins for the next job before it parks.
const SPIN: Duration = Duration::from_micros(50);
/// The most helpers.
const MAX_HELPERS: usize = 7;
/// Chunks in one job; the number of a chunk has 32 bits.
const MAX_CHUNKS: usize = 1 << 20;

/// A copy between this process and another one. The result is 0 or an errno.
pub(super) type Copy = unsafe fn(pid: i32, write: bool, remote: u64, local: u64, len: usize) -> i32;

/// Helper threads and their job.
#[derive(Debug)]
pub(super) struct CopyHelpers {
    copy: Copy,
    /// Whether a poster has a job here.
    is_busy: AtomicBool,
    /// The number of the current or last job.
    number: AtomicU32,
    /// Helpers that are parked or about to park.
    parked: AtomicU32,
    /// Upper half: the job's number. Lower half: the next chunk.
    next: AtomicU64,
    /// Chunks that are done, and the first error.
    done: AtomicU64,
    error: AtomicI32,
    // The job. Written while `is_busy` is ours and no chunk is taken.
    pid: AtomicI32,
    write: AtomicBool,
    remote: AtomicU64,
    local: AtomicU64,
    len: AtomicU64,
}

impl CopyHelpers {
    const fn new(copy: Copy) -> CopyHelpers {
        CopyHelpers {
            copy,
            is_busy: AtomicBool::new(false),
            number: AtomicU32::new(0),
            parked: AtomicU32::new(0),
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            error: AtomicI32::new(0),
            pid: AtomicI32::new(0),
            write: AtomicBool::new(false),
            remote: AtomicU64::new(0),
            local: AtomicU64::new(0),
            len: AtomicU64::new(0),
        }
    }

    /// The helpers of this process, if it has any.
    pub(super) fn of_process(copy: Copy) -> Option<&'static CopyHelpers> {
        static HELPERS: OnceLock<Option<&'static CopyHelpers>> = OnceLock::new();
        *HELPERS.get_or_init(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let default = if cores >= 8 { (cores / 4).min(3) } else { 0 };
            let chosen = std::env::var("CROSSTIE_COPY_HELPERS").ok().and_then(|count| count.parse().ok());
            CopyHelpers::start(chosen.unwrap_or(default).min(MAX_HELPERS), copy)
        })
    }

    fn start(count: usize, copy: Copy) -> Option<&'static CopyHelpers> {
        if count == 0 {
            return None;
        }
        // The threads use it until the process ends.
        let helpers: &'static CopyHelpers = Box::leak(Box::new(CopyHelpers::new(copy)));
        let started = (0..count).filter(|_| {
            let thread = std::thread::Builder::new().name("crosstie-copy".into()).stack_size(64 << 10);
            thread.spawn(move || helpers.help()).is_ok()
        });
        (started.count() > 0).then_some(helpers)
    }

    /// Copies `len` bytes, with the helpers if they are free. The result is 0 or an errno.
    ///
    /// # Safety
    ///
    /// As for the function `copy` with these arguments.
    pub(super) unsafe fn copy(&self, pid: i32, write: bool, remote: u64, local: u64, len: usize) -> i32 {
        let chunks = len.div_ceil(CHUNK);
        // Acquire, partner: the Release store below; the last job is over.
        if chunks > MAX_CHUNKS || self.is_busy.swap(true, Acquire) {
            // SAFETY: the caller's promise.
            return unsafe { (self.copy)(pid, write, remote, local, len) };
        }
        let number = self.number.load(Relaxed).wrapping_add(1);
        self.pid.store(pid, Relaxed);
        self.write.store(write, Relaxed);
        self.remote.store(remote, Relaxed);
        self.local.store(local, Relaxed);
        self.len.store(len as u64, Relaxed);
        self.error.store(0, Relaxed);
        self.done.store(0, Relaxed);
        self.next.store(u64::from(number) << 32, Relaxed);
        // SeqCst: before the load of `parked`; partner: the helper's store of `parked` before its load of `number`. It is also
        // the Release for the helper's Acquire load of the number.
        self.number.store(number, SeqCst);
        if len >= MIN_WAKE && self.parked.load(SeqCst) > 0 {
            // It fails for no reason that matters: then the poster copies alone.
            futex::wake(&self.number, futex::Flags::PRIVATE, u32::MAX >> 1).ok();
        }
        // SAFETY: the caller's promise.
        unsafe { self.take_chunks(number) };
        let mut spins = 0u32;
        // Acquire, partner: the Release additions in `take_chunks`: all bytes are there, and `local` is not used any more.
        while self.done.load(Acquire) < chunks as u64 {
            spins += 1;
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            }
            core::hint::spin_loop();
        }
        let error = self.error.load(Relaxed);
        // Release, partner: the Acquire swap above.
        self.is_busy.store(false, Release);
        error
    }

    /// Copies chunks of this job until none is left, or until the job is over.
    ///
    /// # Safety
    ///
    /// If a chunk of this job can be taken, the copy is allowed: the poster of the job waits for it.
    unsafe fn take_chunks(&self, number: u32) {
        // What is read here belongs to the job if a chunk can be taken afterwards: the job is open then, and these words change
        // only after it is over.
        let (pid, write) = (self.pid.load(Relaxed), self.write.load(Relaxed));
        let (remote, local) = (self.remote.load(Relaxed), self.local.load(Relaxed));
        let len = self.len.load(Relaxed) as usize;
        loop {
            let next = self.next.load(Relaxed);
            let start = (next as u32 as usize) * CHUNK;
            if (next >> 32) as u32 != number || start >= len {
                return;
            }
            // AcqRel: the loads above are not moved behind it.
            if self.next.compare_exchange_weak(next, next + 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            let size = CHUNK.min(len - start);
            // SAFETY: the caller's promise: a chunk was taken, so the poster waits for us.
            let error = unsafe { (self.copy)(pid, write, remote + start as u64, local + start as u64, size) };
            if error != 0 {
                self.error.store(error, Relaxed);
            }
            // Release, partner: the poster's Acquire load of `done`.
            self.done.fetch_add(1, Release);
        }
    }

    /// What a helper thread does.
    fn help(&self) {
        let mut seen = 0;
        let mut idle_since = Instant::now();
        loop {
            // Acquire, partner: the store in `copy`.
            let number = self.number.load(Acquire);
            if number != seen {
                // SAFETY: the poster of a job allows its copy until all chunks are done, and waits for those that are taken.
                unsafe { self.take_chunks(number) };
                seen = number;
                idle_since = Instant::now();
                continue;
            }
            for _ in 0..64 {
                core::hint::spin_loop();
            }
            if idle_since.elapsed() > SPIN {
                // SeqCst, partner: `copy` stores the number before it loads `parked`. One of the two sees the other's store; and
                // the kernel does not let a thread sleep whose word has changed.
                self.parked.fetch_add(1, SeqCst);
                if self.number.load(SeqCst) == seen {
                    // It ends with an error when the word has changed.
                    futex::wait(&self.number, futex::Flags::PRIVATE, seen, None).ok();
                }
                self.parked.fetch_sub(1, SeqCst);
                idle_since = Instant::now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies inside this process; an address below 4096 is invalid.
    unsafe fn local_copy(_pid: i32, write: bool, remote: u64, local: u64, len: usize) -> i32 {
        if remote < 4096 {
            return libc::EFAULT;
        }
        let (remote, local) = (remote as *mut u8, local as *mut u8);
        let (from, to) = if write { (local, remote) } else { (remote, local) };
        // SAFETY: the tests give valid ranges that do not overlap.
        unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
        0
    }

    fn check_copy(helpers: &CopyHelpers, len: usize, write: bool) {
        let mut local: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        let mut remote: Vec<u8> = (0..len).map(|at| (at % 241) as u8 ^ 0x80).collect();
        let wanted = if write { local.clone() } else { remote.clone() };
        // SAFETY: both vectors have this length.
        let rc =
            unsafe { helpers.copy(0, write, remote.as_mut_ptr() as u64, local.as_mut_ptr() as u64, len) };
        assert_eq!(rc, 0);
        assert!(local == wanted && remote == wanted, "{len} bytes");
    }

    #[test]
    fn all_bytes_are_copied_whatever_the_helpers_do() {
        let helpers = CopyHelpers::start(3, local_copy).unwrap();
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, MIN_SHARED, MIN_WAKE, 1 << 20, (3 << 20) + 17] {
            for round in 0..20 {
                check_copy(helpers, len, round % 2 == 0);
                if round % 5 == 4 {
                    // Long enough for the helpers to park.
                    std::thread::sleep(2 * SPIN);
                }
            }
        }
    }

    #[test]
    fn posters_that_come_at_once_all_get_their_bytes() {
        let helpers = CopyHelpers::start(2, local_copy).unwrap();
        std::thread::scope(|scope| {
            for poster in 0..4 {
                scope.spawn(move || {
                    (0..60).for_each(|round| check_copy(helpers, 100_000 * (poster + 1) + round, true))
                });
            }
        });
    }

    #[test]
    fn an_error_of_a_chunk_is_returned_and_the_next_copy_works() {
        let helpers = CopyHelpers::start(2, local_copy).unwrap();
        let mut local = vec![0u8; 1 << 20];
        // SAFETY: the invalid address is recognised.
        let rc = unsafe { helpers.copy(0, true, 0, local.as_mut_ptr() as u64, 4000) };
        assert_eq!(rc, libc::EFAULT);
        check_copy(helpers, 1 << 20, true);
    }

    #[test]
    fn no_helpers_are_started_if_none_are_wanted() {
        assert!(CopyHelpers::start(0, local_copy).is_none());
    }
}
