//! What the tests of all crates share. It knows no other crate of this workspace, so that unit tests can use it, too.
//!
//! | module | what it has |
//! | --- | --- |
//! | [`child`] | a process that is this program again, with a task |
//! | [`allocations`] | an allocator that counts |
//! | [`seccomp`] | system calls that are forbidden |
//! | [`callgrind`] | counts of instructions |
//! | [`actor`] | processes that are stopped or killed at an instruction of an operation |
//! | [`trace`] | processes that are stepped through, one instruction at a time |
//! | [`footprint`] | what this process uses: processor time, descriptors, mappings |
//! | [`hosts`] | programs on two hosts |
//! | [`rng`] | random numbers with a seed |
//! | [`wait`] | waiting for what must happen |

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub mod actor;
pub mod allocations;
pub mod callgrind;
pub mod child;
pub mod footprint;
pub mod hosts;
pub mod rng;
pub mod seccomp;
pub mod trace;
pub mod wait;

/// A name that no other test uses, nor another run.
pub fn fresh_name(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}
