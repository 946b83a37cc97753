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

/// Counts the instructions of one operation, of which a test measures `operations`, and compares them with the limit.
fn assert_limit(test: &str, task: &str, operations: u32, limit: u64) {
    let each = callgrind::count(test, task) / u64::from(operations);
    println!("{task}: {each} instructions, limit {limit}");
    assert!(each <= limit, "{task}: {each} instructions, but {limit} are allowed");
}
