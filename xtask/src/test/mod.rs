//! `cargo xtask test`: runs all checks in order and prints the failed tests and the totals at the end.
//!
//! A step without tests of its own (format, lints) counts as one test. A step that fails without a failed test (it does not
//! compile, it hangs, it runs no test at all) counts as one failed test. Every test that is ignored or skipped counts as
//! failed, too: every test must run.

mod counts;
mod dependencies;
mod steps;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use crate::build::{Artifact, build, cargo};
use crate::error::Error;
use crate::packages::Packages;
use crate::process::{self, Outcome};
use crate::{soak, vm, workspace};
use counts::{Counts, Tally};
use steps::{QUICK, STEPS, Step};

/// What to run.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Run only this step (repeatable)
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// A few minutes of it, for the loop of a developer: see `--quick --list`
    #[arg(long)]
    quick: bool,
    /// List the steps and what they check
    #[arg(long)]
    list: bool,
}

/// One piece of work of a step.
enum Work {
    /// Run a cargo command. With `tests`, its output must contain summary lines of tests, which are counted.
    Cargo {
        /// Its words.
        arguments: &'static str,
        variables: &'static [(&'static str, &'static str)],
        /// A subdirectory of the target directory, for compiler flags with which cargo would rebuild everything.
        target: Option<&'static str>,
        tests: bool,
    },
    /// Check licences, sources, and that the default build needs Rust alone.
    Dependencies,
    /// Run random jobs for so many minutes, with a seed made from the commit. Each counts as a test.
    Soak { minutes: f64 },
    /// Check that `cargo xtask vm` works.
    GuestCheck,
    /// Build a test program with all features and run it on kernel Soft-RoCE. The other programs and the shared library of
    /// its package, and these examples, are copied into the guest as well.
    Guest {
        test: &'static str,
        examples: &'static [&'static str],
        hosts: u8,
        /// Its words.
        arguments: &'static str,
    },
}

/// `cargo xtask test`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let steps = if options.quick { QUICK } else { STEPS };
    if options.list {
        for step in steps {
            println!("{:<14} {}", step.name, step.shows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let selected = select_steps(steps, &options.only)?;
    selected.iter().flat_map(|step| required_packages(step)).collect::<Packages>().install()?;

    let began = Instant::now();
    let mut lines = Vec::new();
    let mut total = Counts::default();
    let mut failures = Vec::new();
    for step in selected {
        println!("\n== {}: {}", step.name, step.shows);
        let started = Instant::now();
        let (counts, failed) = run_step(step);
        failures.extend(failed.into_iter().map(|failure| format!("failed in {}: {failure}", step.name)));
        let mut line = format!("{:<14} {:>6.1} s  {counts}", step.name, started.elapsed().as_secs_f32());
        if counts.ignored > 0 {
            line += &format!(", {} did not run", counts.ignored);
        }
        println!("-- {line}");
        lines.push(line);
        total += counts;
    }

    println!("\n{}\n{:<14} {:>6.1} s", lines.join("\n"), "total", began.elapsed().as_secs_f32());
    if total.ignored > 0 {
        println!("{} tests did not run; they count as failed", total.ignored);
        total.failed += total.ignored;
    }
    for failure in failures {
        println!("{failure}");
    }
    println!("{total}");
    Ok(if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn select_steps(steps: &'static [Step], only: &[String]) -> Result<Vec<&'static Step>, Error> {
    if only.is_empty() {
        return Ok(steps.iter().collect());
    }
    let named = |name: &String| steps.iter().find(|step| step.name == name);
    only.iter().map(|name| named(name).ok_or_else(|| Error::NoSuchStep(name.clone()))).collect()
}

fn required_packages(step: &Step) -> impl Iterator<Item = &'static str> {
    let boots_guests = step.work.iter().any(|work| matches!(work, Work::Guest { .. } | Work::GuestCheck));
    let guests: &[&str] = if boots_guests { vm::PACKAGES } else { &[] };
    step.packages.iter().chain(guests).copied()
}

/// Runs all work of a step, counts its tests and names what failed. A step that cannot do its work counts as failed.
fn run_step(step: &Step) -> (Counts, Vec<String>) {
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    for work in step.work {
        let mut tally = Tally::default();
        let problem = match run_work(work, Duration::from_secs(step.timeout), &mut tally) {
            Ok(problem) => problem,
            Err(error) => Some(error.to_string()),
        };
        tally.end();
        if let Some(problem) = problem {
            println!("{}: {problem}", step.name);
            tally.counts.failed = tally.counts.failed.max(1);
            if tally.failures.is_empty() {
                tally.failures.append(&mut tally.without_summary);
            }
            if tally.failures.is_empty() {
                tally.failures.push(problem);
            }
        }
        counts += tally.counts;
        failures.append(&mut tally.failures);
    }
    (counts, failures)
}

/// Does the work and tallies its tests. Returns what went wrong, if anything.
fn run_work(work: &Work, timeout: Duration, tally: &mut Tally) -> Result<Option<String>, Error> {
    match *work {
        Work::Cargo { arguments, variables, target, tests } => {
            let mut command = cargo(timeout, &arguments.split(' ').collect::<Vec<_>>());
            command.envs(variables.iter().copied());
            if let Some(directory) = target {
                command.env("CARGO_TARGET_DIR", workspace::target().join(directory));
            }
            let outcome = process::run_streaming(&mut command, timeout, |line| {
                if tests {
                    tally.read_line(line);
                }
                true
            })?;
            if !tests && (outcome == Outcome::Exited { success: true }) {
                tally.counts.passed += 1;
            }
            Ok(outcome
                .problem(timeout)
                .or_else(|| (tally.counts.total() == 0).then(|| "it ran no tests".into())))
        }
        Work::Dependencies => {
            let violations = dependencies::find_violations()?;
            tally.counts.passed += u64::from(violations.is_empty());
            tally.counts.failed += violations.len() as u64;
            Ok((!violations.is_empty()).then(|| violations.join("\n")))
        }
        Work::Soak { minutes } => {
            let report = soak::soak_commit(minutes)?;
            tally.counts.passed += report.passed;
            tally.counts.failed += report.failures.len() as u64;
            tally.failures.extend(report.failures);
            Ok(None)
        }
        Work::GuestCheck => {
            let (passed, failed) = vm::check()?;
            tally.counts += Counts { passed, failed, ignored: 0 };
            Ok(None)
        }
        Work::Guest { test, examples, hosts, arguments } => {
            let (program, files) = build_test(test, examples, timeout)?;
            let program = program.to_string_lossy().into_owned();
            let words = arguments.split(' ').map(str::to_owned);
            let mut options = vm::Options::new([program].into_iter().chain(words));
            options.hosts = hosts;
            options.files = files;
            options.timeout = timeout.as_secs();
            let status = vm::boot(&options, &mut |line| {
                tally.read_line(line);
            })?;
            Ok(match status {
                0 if tally.counts.total() == 0 => Some("it ran no tests".into()),
                0 => None,
                status => Some(format!("it ended with status {status} in the guest")),
            })
        }
    }
}

/// Builds a test program, and examples. Returns its path and the paths of the programs that it may start.
fn build_test(test: &str, examples: &[&str], timeout: Duration) -> Result<(PathBuf, Vec<PathBuf>), Error> {
    const FEATURES: [&str; 3] = ["--workspace", "--features", steps::FEATURES];
    let mut built = build(&[&["test", "--test", test, "--no-run"][..], &FEATURES].concat(), timeout)?;
    if !examples.is_empty() {
        // `cargo test --example` would build their tests.
        let named = examples.iter().flat_map(|example| ["--example", example]);
        let words: Vec<&str> = ["build"].into_iter().chain(FEATURES).chain(named).collect();
        built.extend(build(&words, timeout)?);
    }
    let others = built.iter().filter(|artifact| artifact.is("bin") || artifact.is("example"));
    let others = others.filter_map(|artifact| artifact.executable.clone());
    let others = others.chain(built.iter().filter_map(Artifact::shared_library)).collect();
    let program = built.iter().find(|artifact| artifact.is("test") && artifact.target.name == test);
    let program = program.and_then(|artifact| artifact.executable.clone());
    program.map(|program| (program, others)).ok_or_else(|| Error::UnexpectedOutput {
        command: "cargo test --no-run".into(),
        what: format!("it built no program for the test {test}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_are_unique() {
        for steps in [STEPS, QUICK] {
            let mut names: Vec<_> = steps.iter().map(|step| step.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), steps.len());
            assert!(matches!(select_steps(steps, &["no-such-step".into()]), Err(Error::NoSuchStep(_))));
        }
    }
}
