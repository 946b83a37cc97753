//! The budgets of all layers: what an operation may cost.
//!
//! - It makes no call to the allocator, which this program's allocator counts, and no system call: a filter kills a child process at its
//!   first one. Where a cost must not grow with a number (of queue pairs, of connections), it is counted with both.
//! - In an optimized build it stays within its limit on instructions: `cargo test --release -p crosstie --test budget instruction`.
//!   Instructions are the same in every run, where times are not. A limit is a quarter above what was reached when it was set, so that a
//!   change that makes the code simpler can cost a little, and one that doubles a cost is seen. The tests print what they counted
//!   (`-- --nocapture`).
//!
//! Both sides of an operation run in one thread, so that counts are exact, except where [`device`] says otherwise.

mod copyrpc;
mod device;
mod endpoint;
#[cfg(not(debug_assertions))]
#[path = "../harness/ends.rs"]
mod ends;
mod group;
mod local;
#[cfg(not(debug_assertions))]
mod messages;

use crosstie_testkit::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;
