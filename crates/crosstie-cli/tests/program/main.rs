//! The program `crosstie` as its users start it: commands, exit statuses, JSON, error texts.

mod bench_kv;
mod command_line;
mod kv_serve;
mod report;
mod sim;
mod troubleshooting;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by a test that benchmarks: benchmarks are pinned to the same two cores, so that they run one at a time.
fn lock_cores() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}
