//! Counts the instructions of a piece of work with callgrind (Debian package `valgrind`).
//!
//! The test starts its own program again under callgrind, with a task. There it prepares everything, and calls [`measure`] for the
//! work. Callgrind counts only what is executed inside [`measure`], on its thread, so the preparation does not count:
//!
//! ```ignore
//! #[test]
//! fn a_call_stays_within_its_instruction_budget() {
//!     const NAME: &str = "a_call_stays_within_its_instruction_budget";
//!     if let Some(task) = callgrind::task() {
//!         let pair = Pair::new();
//!         pair.call();                                      // sets up what the first call sets up
//!         callgrind::measure(&mut || (0..1000).for_each(|_| pair.call()));
//!         return;
//!     }
//!     let each = callgrind::count(NAME, "call") as f64 / 1000.0;
//!     assert!(each <= 123.0, "{each} instructions");
//! }
//! ```
//!
//! Counts are the same in every run only if one thread does all the work. Valgrind limits the address space: use small segments.

use std::io::Write;
use std::process::{Command, Stdio};

/// Environment variable that tells a child process its task.
const TASK: &str = "CROSSTIE_CALLGRIND_TASK";

/// The task of this process, if it is one that callgrind runs.
pub(crate) fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Introduces the line that tells where the work begins and ends.
pub(crate) const MEASURED: &str = "crosstie measures between";

/// Runs the work that is counted.
pub(crate) fn measure(work: &mut dyn FnMut()) {
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

/// Runs a test with a task, under valgrind with these arguments. `test` is the name of the test as its program lists it, with its module.
pub(crate) fn valgrind(arguments: &[&str], test: &str, task: &str) -> Command {
    let mut command = Command::new("valgrind");
    command
        .args(arguments)
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(TASK, task)
        .stdin(Stdio::null());
    command
}

/// Counts the instructions of the work that a test [measures](measure) when it is given a task.
pub(crate) fn count(test: &str, task: &str) -> u64 {
    let tool = ["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*crosstie_measured*"];
    let output = valgrind(&tool, test, task).output();
    let output = output.unwrap_or_else(|error| {
        panic!("valgrind cannot be started ({error}): install the Debian package `valgrind`")
    });
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{task}: {output:?}");
    let collected = text.lines().find_map(|line| line.split_once("Collected : "));
    let count = collected.and_then(|(_, count)| count.trim().parse().ok()).expect(&text);
    assert!(count > 0, "{test} has measured nothing when its task was {task:?}");
    count
}
