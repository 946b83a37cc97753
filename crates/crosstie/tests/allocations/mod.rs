//! Counts what each thread asks of the allocator, for tests that allow nothing or so and so much.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Calls of this thread to the allocator so far.
    pub static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed, and the most that this was.
    pub static HELD: Cell<[i64; 2]> = const { Cell::new([0; 2]) };
}

fn count_allocation(allocated: usize, freed: usize) {
    // A thread that is ending has no counter any more, and is none of ours.
    ALLOCATIONS.try_with(|count| count.set(count.get() + 1)).ok();
    // What a reallocation replaces is there until it has been copied.
    HELD.try_with(|held| {
        let [now, most] = held.get();
        held.set([now + allocated as i64 - freed as i64, most.max(now + allocated as i64)]);
    })
    .ok();
}

// SAFETY: everything is passed on to the system's allocator as it came.
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
