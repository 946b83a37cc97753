//! What the tests of all crates share. It knows no other crate of this workspace, so that unit tests can use it, too.
//!
//! | module | what it has |
//! | --- | --- |
//! | [`child`] | a process that is this program again, with a task |
//! | [`allocations`] | an allocator that counts |
//! | [`seccomp`] | system calls that are forbidden |
//! | [`callgrind`] | counts of instructions |
//! | [`trace`], [`footprint`] | processes that are stepped through and killed, and what they leave behind |
//! | [`hosts`] | programs on two hosts |
//! | [`rng`] | random numbers with a seed |

pub mod allocations;
pub mod callgrind;
pub mod child;
pub mod footprint;
pub mod hosts;
pub mod rng;
pub mod seccomp;
pub mod trace;
