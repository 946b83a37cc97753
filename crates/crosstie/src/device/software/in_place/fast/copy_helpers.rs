//! Threads that help with long copies into the memory of another process.
//!
//! One thread copies about 10 GB/s with `process_vm_writev`, and 15 GB/s into memory that is mapped (`peer_mapping.rs`): far less than the memory can
//! do. So a long copy is cut into chunks; the
//! thread that posts the request takes chunks, and so do helper threads, if there are any and they are free. The poster returns
//! when all chunks are done: for everybody else it is as if the poster had made the copy itself. A helper that comes late finds
//! no chunk left; nobody waits for a helper that has not taken one.
//!
//! [`CopyJob`] has the words through which they agree. One job at a time; a poster that finds another one's job copies alone.
//! Helpers spin for [`SPIN`] after a job and park then, so that they are there for the next copies of a busy program. A poster with
//! a long copy wakes one helper, which wakes the next, because waking one takes as long as copying some ten KiB. Helpers exist once
//! per process, from its first long copy on, and only on machines with at least eight cores. The variable
//! `CROSSTIE_COPY_HELPERS` sets their number.

use core::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::copy_job::{CHUNK, CopyJob, MAX_CHUNKS, Transfer};

/// Copies of at least this many bytes are shared. For shorter ones the helpers cost more than they give: all_reduce of 256 KiB in NCCL,
/// with messages of 64 KiB, took 1.18 of the time without them. With messages of 128 KiB (1 MiB) it took 0.89 of the time, and 0.81 to
/// 0.95 with longer ones (16 cores).
pub(super) const MIN_SHARED: usize = 128 << 10;
/// How long a helper spins for the next job before it parks: longer than the pauses between the messages of a collective.
const SPIN: Duration = Duration::from_micros(300);
/// The most helpers.
const MAX_HELPERS: usize = 7;

/// Makes a copy; the result is 0 or an errno.
///
/// # Safety
///
/// `local..local + len` is valid for reads, and for writes if `write` is false. If `pid` is [`HERE`](super::copy_job::HERE), the same holds for
/// `remote`, with reads and writes exchanged.
pub(super) type CopyFunction = unsafe fn(&Transfer) -> i32;

/// Helper threads and their job.
#[derive(Debug)]
pub(super) struct CopyHelpers {
    copy: CopyFunction,
    /// Whether a poster has a job here.
    is_busy: AtomicBool,
    /// Helpers that are parked or about to park.
    parked: AtomicU32,
    /// The number of the current or last job. Helpers that spin load it again and again.
    number: OwnLine<AtomicU32>,
    job: OwnLine<CopyJob>,
}

/// A value with cache lines of its own: a thread that spins on one word does not delay threads that change another.
#[derive(Debug)]
#[repr(align(128))]
struct OwnLine<T>(T);

impl<T> core::ops::Deref for OwnLine<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl CopyHelpers {
    /// The helpers of this process, if it has any.
    pub(super) fn of_process(copy: CopyFunction) -> Option<&'static CopyHelpers> {
        static HELPERS: OnceLock<Option<&'static CopyHelpers>> = OnceLock::new();
        *HELPERS.get_or_init(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let default = if cores >= 8 { (cores / 4).min(3) } else { 0 };
            let chosen = std::env::var("CROSSTIE_COPY_HELPERS").ok().and_then(|count| count.parse().ok());
            CopyHelpers::start(chosen.unwrap_or(default).min(MAX_HELPERS), copy)
        })
    }

    fn start(count: usize, copy: CopyFunction) -> Option<&'static CopyHelpers> {
        if count == 0 {
            return None;
        }
        // The threads use it until the process ends.
        let helpers: &'static CopyHelpers = Box::leak(Box::new(CopyHelpers {
            copy,
            is_busy: AtomicBool::new(false),
            parked: AtomicU32::new(0),
            number: OwnLine(AtomicU32::new(0)),
            job: OwnLine(CopyJob::new()),
        }));
        let started = (0..count).filter(|_| {
            let thread = std::thread::Builder::new().name("crosstie-copy".into()).stack_size(64 << 10);
            thread.spawn(move || helpers.help()).is_ok()
        });
        (started.count() > 0).then_some(helpers)
    }

    /// Makes a copy, with the helpers if they are free. The result is 0 or an errno.
    ///
    /// # Safety
    ///
    /// As for [`CopyFunction`].
    pub(super) unsafe fn copy(&self, transfer: &Transfer) -> i32 {
        let len = transfer.len;
        // Acquire, partner: the Release store below; the last job is over.
        if len.div_ceil(CHUNK) > MAX_CHUNKS || self.is_busy.swap(true, Acquire) {
            // SAFETY: the caller's promise.
            return unsafe { (self.copy)(transfer) };
        }
        let number = self.number.load(Relaxed).wrapping_add(1);
        self.job.open(number, transfer);
        // SeqCst: before the load of `parked`; partner: the helper's store of `parked` before its load of `number`.
        self.number.store(number, SeqCst);
        self.wake_one();
        self.take_chunks(number);
        let mut spins = 0u32;
        while !self.job.is_done(len) {
            spins += 1;
            if spins.is_multiple_of(256) {
                std::thread::yield_now();
            }
            core::hint::spin_loop();
        }
        let error = self.job.error();
        // Release, partner: the Acquire swap above.
        self.is_busy.store(false, Release);
        error
    }

    fn take_chunks(&self, number: u32) {
        // SAFETY: the poster of the job promised that its memory is valid until the job is done, and `copy` waits for that. A chunk
        // is inside what the poster named.
        self.job.take_chunks(number, |chunk| unsafe { (self.copy)(chunk) });
    }

    /// Wakes a helper, if one is parked.
    fn wake_one(&self) {
        if self.parked.load(SeqCst) > 0 {
            // It fails for no reason that matters: then others make the copy.
            futex::wake(&self.number, futex::Flags::PRIVATE, 1).ok();
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
                self.take_chunks(number);
                seen = number;
                idle_since = Instant::now();
                continue;
            }
            // Looks often: a job may be over in some microseconds. The clock is read rarely.
            for _ in 0..64 {
                core::hint::spin_loop();
                if self.number.load(Relaxed) != seen {
                    break;
                }
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
                if self.job.bytes_left() >= 2 * CHUNK {
                    self.wake_one();
                }
                idle_since = Instant::now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies inside this process; an address below 4096 is invalid.
    unsafe fn local_copy(transfer: &Transfer) -> i32 {
        let Transfer { write, remote, local, len, .. } = *transfer;
        if len > 0 && remote < 4096 {
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
        let (remote_at, local_at) = (remote.as_mut_ptr() as u64, local.as_mut_ptr() as u64);
        // SAFETY: both vectors have this length.
        let rc =
            unsafe { helpers.copy(&Transfer { pid: 0, write, remote: remote_at, local: local_at, len }) };
        assert_eq!(rc, 0);
        assert!(local == wanted && remote == wanted, "{len} bytes");
    }

    #[test]
    fn all_bytes_are_copied_whatever_the_helpers_do() {
        let helpers = CopyHelpers::start(3, local_copy).unwrap();
        for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, MIN_SHARED, 1 << 20, (3 << 20) + 17] {
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
        let invalid =
            Transfer { pid: 0, write: true, remote: 0, local: local.as_mut_ptr() as u64, len: 4000 };
        // SAFETY: `local` is valid; the invalid address is recognised.
        let rc = unsafe { helpers.copy(&invalid) };
        assert_eq!(rc, libc::EFAULT);
        check_copy(helpers, 1 << 20, true);
    }

    #[test]
    fn no_helpers_are_started_if_none_are_wanted() {
        assert!(CopyHelpers::start(0, local_copy).is_none());
    }
}
