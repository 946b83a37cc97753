//! `cargo xtask split-loads`: counts loads of bytes that were stored in other pieces shortly before, in several stores or only some of
//! them.
//!
//! A processor hands bytes to a load before they have reached the cache, if one store has all of them. Otherwise the load waits until that
//! store and all before it have reached the cache, and one of them may be waiting for a cache line of another core. A count of instructions
//! does not show that. Usually a struct is built field by field and then copied whole.
//!
//! The work is that of a test that measures it with [`callgrind`]. Valgrind's tool `lackey` prints every access to memory:
//!
//! ```text
//! I  0401a7b0,3      an instruction at an address, of so many bytes
//!  S 1ffeffe7e0,8    it stores to an address so many bytes (L: loads, M: both)
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Args;
use crosstie_testkit::{callgrind, child};

use crate::build;
use crate::error::Error;
use crate::packages::Packages;
use crate::process::start_error;

/// Most stores that are on their way to the cache at a time: those that the store buffer of a processor has room for.
const STORES: usize = 56;
/// So many instructions later a store has reached the cache, unless it or one before it has to wait.
const RECENT: u64 = 64;
/// How long building may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(1200);

/// Which test measures the work.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The test, as the program `budget` lists it: copyrpc::calls_stay_within_their_instruction_limits
    test: String,
    /// One of its tasks, which it prints with `--nocapture`: "one call at a time"
    task: String,
}

/// `cargo xtask split-loads`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    ["valgrind"].into_iter().collect::<Packages>().install()?;
    let loads = find(&build_budget()?, options)?;
    for (at, count) in &loads {
        println!(
            "{count:>8} at crosstie_measured {} {:#x}",
            if *at < 0 { '-' } else { '+' },
            at.unsigned_abs()
        );
    }
    println!("{} loads of what was just stored in other pieces", loads.values().sum::<u64>());
    Ok(ExitCode::SUCCESS)
}

/// Builds the program that has the budgets, optimized, and returns its path.
fn build_budget() -> Result<PathBuf, Error> {
    let words = ["test", "--release", "-p", "crosstie", "--test", "budget", "--no-run"];
    let built = build::build(&words, BUILD_TIMEOUT)?;
    let program = built.into_iter().find(|artifact| artifact.is("test")).and_then(|test| test.executable);
    program.ok_or_else(|| Error::UnexpectedOutput { command: "cargo test".into(), what: "no program".into() })
}

struct Store {
    from: u64,
    end: u64,
    /// Instructions that were executed before.
    time: u64,
}

fn address(digits: &str) -> u64 {
    u64::from_str_radix(digits, 16).unwrap()
}

/// The loads: how many each instruction has executed, by its distance from the function that does the work.
fn find(program: &Path, Options { test, task }: &Options) -> Result<BTreeMap<i64, u64>, Error> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"]).arg(program);
    valgrind.args([test, "--exact", "--nocapture"]).env(child::TASK, task);
    valgrind.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = valgrind.spawn().map_err(|source| start_error(&valgrind, source))?;
    let (mut begin, mut end, mut is_measured) = (0, 0, false);
    let (mut instruction, mut time) = (0, 0);
    let mut stores: VecDeque<Store> = VecDeque::new();
    let mut loads = BTreeMap::new();
    let (mut trace, mut line) = (BufReader::new(child.stderr.take().unwrap()), String::new());
    loop {
        line.clear();
        if trace.read_line(&mut line).unwrap() == 0 {
            break;
        }
        if let Some((_, places)) = line.split_once(callgrind::MEASURED) {
            let (from, to) = places.trim().split_once(' ').unwrap();
            (begin, end) = (address(from), address(to));
        }
        let (Some(kind @ ("I  " | " L " | " S " | " M ")), Some((at, len))) =
            (line.get(..3), line.get(3..).and_then(|access| access.split_once(',')))
        else {
            continue;
        };
        let from = address(at);
        if kind == "I  " {
            (instruction, time) = (from, time + 1);
            is_measured = instruction == begin || is_measured && instruction != end;
            continue;
        }
        if !is_measured {
            continue;
        }
        let to = from + len.trim_end().parse::<u64>().unwrap();
        if kind != " S " {
            let last = stores.iter().rev().find(|store| store.from < to && from < store.end);
            let is_split =
                |store: &Store| (from < store.from || store.end < to) && time - store.time < RECENT;
            if last.is_some_and(is_split) {
                *loads.entry(instruction as i64 - begin as i64).or_default() += 1;
            }
        }
        if kind != " L " {
            if stores.len() == STORES {
                stores.pop_front();
            }
            stores.push_back(Store { from, end: to, time });
        }
    }
    let status = child.wait().map_err(|source| start_error(&valgrind, source))?;
    if !status.success() || begin == 0 {
        let what = format!("the test {test} has measured nothing with the task {task:?} ({status})");
        return Err(Error::UnexpectedOutput { command: program.display().to_string(), what });
    }
    Ok(loads)
}
