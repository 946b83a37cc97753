//! Counts the instructions of a piece of work with callgrind (Debian package `valgrind`).
//!
//! The test starts its own program again under callgrind, with a task. There it prepares everything, and calls [`measure`] for the
//! work. Callgrind counts only what is executed inside [`measure`], on its thread, so the preparation does not count:
//!
//! ```ignore
//! #[test]
//! fn call_stays_within_its_instruction_limit() {
//!     if child::is_child() {
//!         let pair = Pair::new();
//!         pair.call();                                      // sets up what the first call sets up
//!         return callgrind::measure(&mut || (0..1000).for_each(|_| pair.call()));
//!     }
//!     let each = callgrind::count(call_stays_within_its_instruction_limit, "call") / 1000;
//!     assert!(each <= 150, "{each} instructions");
//! }
//! ```
//!
//! Counts are the same in every run only if one thread does all the work. Valgrind limits the address space: use small segments.

use std::io::Write;
use std::process::Command;

use crate::child;

/// Introduces the line that tells where the work begins and ends.
pub const MEASURED: &str = "crosstie measures between";

/// Runs the work that is counted.
pub fn measure(work: &mut dyn FnMut()) {
    // In one piece: another tool of valgrind prints lines of its own in between.
    let [begin, end] =
        [crosstie_measured as *const (), work_done as *const ()].map(|function| function as usize);
    std::io::stderr().write_all(format!("{MEASURED} {begin:x} {end:x}\n").as_bytes()).unwrap();
    crosstie_measured(work);
    work_done();
}

/// Callgrind knows the function by this name, behind the names of its modules.
#[inline(never)]
fn crosstie_measured(work: &mut dyn FnMut()) {
    work();
}

#[inline(never)]
fn work_done() {
    std::hint::black_box(MEASURED);
}

/// Counts the instructions of the work that a test [measures](measure) when it is given a task.
pub fn count(test: impl Fn(), task: &str) -> u64 {
    let mut valgrind = Command::new("valgrind");
    valgrind.args([
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        "--toggle-collect=*crosstie_measured*",
    ]);
    valgrind.arg(std::env::current_exe().unwrap());
    let output = child::command_under(valgrind, test, task).output().unwrap_or_else(|error| {
        panic!("valgrind cannot be started ({error}): install the Debian package `valgrind`")
    });
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{task}: {output:?}");
    let collected = text.lines().find_map(|line| line.split_once("Collected : "));
    let count = collected.and_then(|(_, count)| count.trim().parse().ok()).expect(&text);
    assert!(count > 0, "nothing was measured when the task was {task:?}");
    count
}

/// Compares the instructions of operations with their limits. Each task makes so many operations, and has a limit for one.
///
/// A limit is a quarter above what was reached when it was set: a change that makes code simpler may cost a little, and one that doubles
/// a cost is seen.
pub fn assert_limits<T: Fn() + Copy>(test: T, limits: &[(&str, u32, u64)]) {
    /// How often a task is measured that takes more than its limit. Some instructions are for what is due every few milliseconds, and
    /// on a busy machine that is more often.
    const ATTEMPTS: usize = 3;
    let mut over = Vec::new();
    for &(task, operations, limit) in limits {
        let each = || count(test, task) / u64::from(operations);
        let mut least = each();
        for _ in 1..ATTEMPTS {
            if least > limit {
                least = least.min(each());
            }
        }
        println!("{task}: {least} instructions, limit {limit}");
        if least > limit {
            over.push(format!("{task}: {least} instructions, but {limit} are allowed"));
        }
    }
    assert!(over.is_empty(), "{}", over.join("\n"));
}
