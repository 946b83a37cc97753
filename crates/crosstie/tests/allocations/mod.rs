//! A global allocator that counts the calls and the live bytes of each thread, for tests with an allocation budget.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Allocator calls made by this thread so far.
    pub static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed: now, and the maximum so far.
    pub static LIVE_BYTES: Cell<[i64; 2]> = const { Cell::new([0; 2]) };
}

fn count_allocation(allocated: usize, freed: usize) {
    // A thread that is ending has no counters any more. Tests do not measure such threads.
    ALLOCATIONS.try_with(|count| count.set(count.get() + 1)).ok();
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

#[global_allocator]
static ALLOCATOR: Counting = Counting;
