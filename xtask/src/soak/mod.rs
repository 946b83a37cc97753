//! `cargo xtask soak`: everything random that the project has, with fresh seeds and unkind settings, until the time is over.
//!
//! The work is a sequence of jobs, which one seed decides. Each job is a command of seconds: a simulation with random
//! parameters, a property test with many times its usual cases, a test that kills or stops processes, a workload over the
//! fault device, or a fuzz target with its corpus. The kinds take turns. A job that fails is printed with the command that
//! repeats it, and its output is kept in a file.
//!
//! `cargo xtask test` has a minute of it, with a seed made from the commit: new jobs for each commit, the same ones when the
//! step is repeated.

mod jobs;
mod programs;

use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;
use crosstie_testkit::rng;

use crate::error::{Error, with_path};
use crate::process::{self, Outcome};
use crate::workspace;
use jobs::{Job, Jobs, Kind};

/// How many lines of the output of a failed job are shown.
const SHOWN_LINES: usize = 25;

/// What to run, and for how long.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// How long to start jobs; the build comes before
    #[arg(long, value_name = "N", default_value_t = 10.0)]
    minutes: f64,
    /// The seed of the sequence of jobs; by default the time
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only jobs of this kind (repeatable)
    #[arg(long, value_enum, value_name = "KIND")]
    only: Vec<Kind>,
}

/// How many jobs passed, and the failed ones, each with the command that repeats it.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) passed: u64,
    pub(crate) failures: Vec<String>,
}

/// `cargo xtask soak`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let report = soak(options)?;
    for failure in &report.failures {
        println!("failed: {failure}");
    }
    println!("{} jobs passed, {} jobs failed", report.passed, report.failures.len());
    Ok(if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The step of `cargo xtask test`: a part of an hour, with jobs that the commit decides.
pub(crate) fn soak_commit(minutes: f64) -> Result<Report, Error> {
    soak(&Options { minutes, seed: Some(seed_of_commit()?), only: Vec::new() })
}

fn soak(options: &Options) -> Result<Report, Error> {
    let seed = options.seed.unwrap_or_else(rng::choose_seed);
    let is_short = options.minutes < 5.0;
    println!("seed {seed} (--seed {seed} repeats this sequence of jobs)");
    let mut jobs = Jobs::build(seed, &options.only, is_short)?;
    let logs = workspace::target().join("soak");
    fs::create_dir_all(&logs).map_err(with_path(&logs))?;

    let mut report = Report::default();
    let end = Instant::now() + Duration::from_secs_f64(options.minutes.max(0.0) * 60.0);
    while Instant::now() < end {
        let job = jobs.next();
        let began = Instant::now();
        let mut output = Vec::new();
        let outcome = run_job(&job, &mut output)?;
        let seconds = began.elapsed().as_secs_f32();
        let Some(problem) = outcome.problem(job.timeout) else {
            println!("passed {seconds:>6.1} s  {}", job.repeat);
            report.passed += 1;
            continue;
        };
        println!("FAILED {seconds:>6.1} s  {} ({problem})", job.repeat);
        for line in output.iter().skip(output.len().saturating_sub(SHOWN_LINES)) {
            println!("    {line}");
        }
        let log = logs.join(format!("{seed}-{}.log", report.passed as usize + report.failures.len()));
        fs::write(&log, output.join("\n") + "\n").map_err(with_path(&log))?;
        println!("    the whole output: {}", log.display());
        report.failures.push(job.repeat);
    }
    Ok(report)
}

/// Runs the job. Its output, both streams, goes to `output`.
fn run_job(job: &Job, output: &mut Vec<String>) -> Result<Outcome, Error> {
    // One shell, so that both streams are in their order in one pipe.
    let mut command: Command = process::with_timeout("sh", job.timeout);
    command.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(&job.program).args(&job.arguments);
    command.current_dir(&job.directory).envs(job.variables.iter().map(|(name, value)| (name, value)));
    process::run_streaming(&mut command, job.timeout, |line| {
        output.push(line.to_owned());
        false
    })
}

/// The first 64 bits of the commit. Without git it is always the same.
fn seed_of_commit() -> Result<u64, Error> {
    let mut git = Command::new("git");
    git.args(["rev-parse", "HEAD"]).current_dir(workspace::root());
    Ok(process::run_for_output(&mut git)
        .ok()
        .and_then(|commit| u64::from_str_radix(commit.get(..16)?, 16).ok())
        .unwrap_or(1))
}
