//! Processes that are stopped or killed at one instruction of one operation.
//!
//! A program without Rust's test harness starts itself again with arguments that name a role:
//!
//! ```ignore
//! fn main() {
//!     if let Some("caller") = std::env::args().nth(1).as_deref() {
//!         let client = connect();
//!         actor::report_ready().unwrap();
//!         actor::operation(true, || client.call());
//!         return;
//!     }
//!     let mut caller = Actor::start(&["caller"])?;
//!     caller.expect("ready")?;
//!     caller.go()?;
//!     caller.stop_after(100)?;
//!     check_that_others_go_on();
//!     caller.end(End::Kill)?;
//! }
//! ```

use std::fmt::Debug;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use crate::rng::Random;
use crate::trace;
pub use crate::wait::TIMEOUT;

/// What a check returns.
pub type Fallible<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Instructions of one operation at which a role is stopped. `CROSSTIE_STRESS_SECONDS`, set to any value, stops at every one.
pub const STOPS_PER_SWEEP: u64 = 24;

/// How a stopped process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It runs on.
    Continue,
    /// It is killed.
    Kill,
}

/// A process of this program that plays a role. It prints `ready` before the operation in which it is stopped, and `done` when it has
/// continued and all its checks have passed.
pub struct Actor {
    /// The process.
    pub child: Child,
    /// Its standard input.
    pub input: ChildStdin,
    /// Its standard output.
    pub output: BufReader<ChildStdout>,
}

impl Actor {
    /// Starts this program with these arguments.
    pub fn start(arguments: &[&str]) -> Fallible<Actor> {
        Actor::start_with(arguments, &[])
    }

    /// The same, with these environment variables, too.
    pub fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Fallible<Actor> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no stdin")?;
        let output = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        Ok(Actor { child, input, output })
    }

    /// Waits for its next line.
    pub fn expect(&mut self, expected: &str) -> Fallible {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        check(line.trim() == expected, format!("the process printed {line:?}, not {expected}"))
    }

    /// Lets it go on after [`report_ready`].
    pub fn go(&mut self) -> Fallible {
        Ok(self.input.write_all(b"go\n")?)
    }

    /// Lets it execute `steps` instructions after its [`stop_here`](trace::stop_here), and stops the whole process there. Returns how
    /// many it executed: fewer if the operation has ended before.
    pub fn stop_after(&mut self, steps: u64) -> Fallible<u64> {
        let executed = trace::step(self.child.id(), steps)?;
        trace::detach_stopped(self.child.id())?;
        wait_for("the process to stop", || is_stopped(self.child.id()))?;
        Ok(executed)
    }

    /// Lets it continue and waits until it is done, or kills it.
    pub fn end(&mut self, end: End) -> Fallible {
        match end {
            End::Continue => {
                self.signal(libc::SIGCONT)?;
                self.expect("done")
            }
            End::Kill => self.kill(),
        }
    }

    /// Kills it. It must not have ended before.
    pub fn kill(&mut self) -> Fallible {
        self.child.kill()?;
        let status = self.child.wait()?;
        check(status.signal() == Some(libc::SIGKILL), format!("the process ended by itself: {status}"))
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) -> Fallible {
        // SAFETY: a system call without memory arguments; the child is ours and not reaped.
        match unsafe { libc::kill(self.child.id() as libc::pid_t, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// What an actor does at the start: reports, and waits for [`Actor::go`].
pub fn report_ready() -> Fallible {
    println!("ready");
    std::io::stdin().lock().read_line(&mut String::new())?;
    Ok(())
}

/// The operation in which an actor is stopped. With `measure`, it ends with a second stop, which gives the number of its instructions.
pub fn operation<R>(measure: bool, operation: impl FnOnce() -> R) -> R {
    trace::stop_here();
    let result = operation();
    if measure {
        trace::stop_here();
    }
    result
}

/// Stops an operation at about `stops` instructions all over it; every second time the process is killed instead of continued. `run` gets the number
/// of instructions and the end; with `u64::MAX` it stops at the operation's end. It returns the number of executed instructions.
pub fn sweep(
    what: &str,
    stops: u64,
    random: &mut Random,
    mut run: impl FnMut(u64, End) -> Fallible<u64>,
) -> Fallible {
    let total = run(u64::MAX, End::Kill).map_err(|e| format!("{what}: {e}"))?;
    let all = std::env::var_os("CROSSTIE_STRESS_SECONDS").is_some();
    let stride = if all { 1 } else { total.div_ceil(stops).max(1) };
    let (mut at, mut count) = (1 + random.below(stride), 0);
    while at < total {
        let end = if count % 2 == 0 { End::Continue } else { End::Kill };
        run(at, end).map_err(|e| format!("{what}, stopped at instruction {at} of {total}, {end:?}: {e}"))?;
        (at, count) = (at + stride, count + 1);
    }
    println!("{what}: stopped at {count} of {total} instructions");
    check(count > 1, "the operation has no instructions: the test shows nothing")
}

/// Whether every thread of a process is stopped: one that is inside a system call may stop later.
pub fn is_stopped(process: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task"));
    tasks.into_iter().flatten().flatten().all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    })
}

/// An error unless it holds.
pub fn check(holds: bool, what: impl Debug) -> Fallible {
    if holds { Ok(()) } else { Err(format!("{what:?}").into()) }
}

/// Waits until something is done.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) -> Fallible {
    let begun = Instant::now();
    for round in 1u64.. {
        if done() {
            break;
        }
        // On a busy machine a yield takes milliseconds, and most of what is waited for takes many rounds of this thread alone.
        if round.is_multiple_of(64) {
            if begun.elapsed() > TIMEOUT {
                return Err(format!("waited too long for {what}").into());
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Where the threads of this process and of its children are, in one line.
pub fn describe_processes() -> String {
    let own = std::process::id();
    let children = std::fs::read_to_string(format!("/proc/self/task/{own}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    std::iter::once(own).chain(children).map(describe_threads).collect::<Vec<_>>().join("; ")
}

fn describe_threads(process: u32) -> String {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let threads = tasks.map(|task| {
        let stat = read(task.path().join("stat"));
        let state = stat.rsplit(')').next().unwrap_or_default().trim_start().chars().next().unwrap_or('?');
        format!("{} {state} {}", read(task.path().join("comm")), read(task.path().join("wchan")))
    });
    format!("process {process}: {}", threads.collect::<Vec<_>>().join(", "))
}
