//! Waiting for what must happen. A test that waits longer than [`TIMEOUT`] fails, and says what did not happen.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Limit on anything that should happen, and no measure of how fast it is.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// How long [`eventually`] sleeps between two looks.
const PAUSE: Duration = Duration::from_micros(200);

/// Calls `done` until it returns true. For what this thread does itself in `done`, such as polling both ends of a connection: it does not
/// sleep.
#[track_caller]
pub fn until(what: impl Display, mut done: impl FnMut() -> bool) {
    find(what, || done().then_some(()));
}

/// As [`until`], and returns what `step` has found.
#[track_caller]
pub fn find<T>(what: impl Display, mut step: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    for round in 1u64.. {
        if let Some(found) = step() {
            return found;
        }
        // On a busy machine a yield takes milliseconds, and most of what is waited for takes many rounds of this thread alone.
        if round.is_multiple_of(64) {
            assert!(begun.elapsed() < TIMEOUT, "waited {TIMEOUT:?} in vain: {what}");
            std::thread::yield_now();
        }
    }
    unreachable!("u64 is not used up")
}

/// Waits until `done` returns true. For what other threads and processes do: it sleeps in between.
#[track_caller]
pub fn eventually(what: impl Display, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < TIMEOUT, "waited {TIMEOUT:?} in vain: {what}");
        std::thread::sleep(PAUSE);
    }
}
