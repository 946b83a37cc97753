//! How many instructions the operations of each layer take, with an optimized build: `cargo test --release -p crosstie --test
//! instructions`. Instructions are the same in every run, where times are not.
//!
//! A limit is at most 5 % above what was reached. When a change makes an operation cheaper, lower its limit; the tests print what they
//! counted (`-- --nocapture`).

#![cfg(not(debug_assertions))]

mod callgrind;
mod copyrpc;
mod device;
mod endpoint;
mod node;
mod split_loads;

/// How often a task is measured that takes more instructions than its limit. Some of them are for what is due every few milliseconds, and on
/// a busy machine that is more often.
const ATTEMPTS: usize = 3;

/// Counts the instructions of one operation, of which a test measures `operations`, and compares them with the limit.
fn assert_limit(test: &str, task: &str, operations: u32, limit: u64) {
    let count = || callgrind::count(test, task) / u64::from(operations);
    let mut each = count();
    for _ in 1..ATTEMPTS {
        if each > limit {
            each = each.min(count());
        }
    }
    println!("{task}: {each} instructions, limit {limit}");
    assert!(each <= limit, "{task}: {each} instructions, but {limit} are allowed");
}
