//! A global allocator that counts calls and live bytes, for tests with an allocation budget.
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! allocations::assert_none(format_args!("calls"), || pair.exchange(1000));
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The allocator of the system, with counters.
pub struct Counting;

/// Allocator calls of all threads so far.
static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Allocator calls of this thread so far.
    static OWN: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed: now, and the maximum so far.
    pub static LIVE_BYTES: Cell<[i64; 2]> = const { Cell::new([0; 2]) };
}

/// Does a piece of work, in which this thread must make no call to the allocator, also not to free memory. `what` is the work.
pub fn assert_none<R>(what: fmt::Arguments<'_>, work: impl FnOnce() -> R) -> R {
    let before = OWN.get();
    drop(black_box(Box::new(1)));
    assert_eq!(OWN.get() - before, 2, "the program has the allocator that counts");
    let before = OWN.get();
    let result = work();
    assert_eq!(OWN.get() - before, 0, "{what}: calls to the allocator");
    result
}

/// Counts the allocator calls that all threads make meanwhile.
pub fn of_process(work: impl FnOnce()) -> u64 {
    let before = ALL.load(Relaxed);
    work();
    ALL.load(Relaxed) - before
}

fn count_allocation(allocated: usize, freed: usize) {
    ALL.fetch_add(1, Relaxed);
    // A thread that is ending has no counters any more. Tests do not measure such threads.
    OWN.try_with(|count| count.set(count.get() + 1)).ok();
    // During a reallocation the old block exists until its bytes have been copied, so both count for the maximum.
    LIVE_BYTES
        .try_with(|live| {
            let [now, most] = live.get();
            live.set([now + allocated as i64 - freed as i64, most.max(now + allocated as i64)]);
        })
        .ok();
}

// SAFETY: every call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size(), 0);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        count_allocation(len, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, len) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count_allocation(0, layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}
