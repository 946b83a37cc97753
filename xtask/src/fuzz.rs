//! `cargo xtask fuzz`: fuzzes every decoder of peer bytes for some time, guided by coverage.
//!
//! The targets are unit tests whose names begin with `fuzz_`; `cargo test` runs each for less than a second, without coverage. This
//! command builds them with the coverage counters of LLVM, which needs no nightly compiler, and runs one after the other.
//! `crates/crosstie/tests/fuzzing/` is the fuzzer.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::error::Error;
use crate::process::{self, Outcome};
use crate::workspace;

/// The crates that have fuzz targets.
const CRATES: &[&str] = &["crosstie", "crosstie-kv"];
/// Coverage counters for every edge, traces of comparisons, and all checks of a debug build.
const FLAGS: &str = "--cfg crosstie_fuzz -C debug-assertions=yes -C overflow-checks=yes -C passes=sancov-module \
    -C llvm-args=-sanitizer-coverage-level=3 -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
    -C llvm-args=-sanitizer-coverage-trace-compares";
/// How long building may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(1200);
/// More targets than there are: for the timeout only.
const MAX_TARGETS: u64 = 100;

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Seconds for all targets together: each gets an equal part
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Fuzz only targets whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Write inputs that reach new code to the corpus in the tree
    #[arg(long)]
    save: bool,
}

/// `cargo xtask fuzz`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let filter = format!("fuzz_{}", options.only.trim_start_matches("fuzz_"));
    let mut targets = 0;
    let outcome = run_tests(&filter, BUILD_TIMEOUT, &["--list"], &[], |line| {
        targets += u64::from(line.contains("fuzz_") && line.ends_with(": test"));
        false
    })?;
    if outcome != (Outcome::Exited { success: true }) || targets == 0 {
        eprintln!("xtask: no fuzz target was built: see the output above, or check --only {}", options.only);
        return Ok(ExitCode::FAILURE);
    }
    let each = (options.seconds / targets).max(1);
    println!("fuzzing {targets} targets for {each} s each");
    let mut variables = vec![("CROSSTIE_FUZZ_SECONDS", each.to_string())];
    if options.save {
        variables.push(("CROSSTIE_FUZZ_SAVE", "1".into()));
    }
    let timeout = BUILD_TIMEOUT + Duration::from_secs(each * MAX_TARGETS);
    let arguments = ["--nocapture", "--test-threads=1"];
    let outcome = run_tests(&filter, timeout, &arguments, &variables, |_| true)?;
    Ok(match outcome {
        Outcome::Exited { success: true } => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

fn run_tests(
    filter: &str,
    timeout: Duration,
    arguments: &[&str],
    variables: &[(&str, String)],
    line: impl FnMut(&str) -> bool,
) -> Result<Outcome, Error> {
    let mut command = process::with_timeout(workspace::cargo(), timeout);
    command.current_dir(workspace::root()).args(["test", "--release", "--lib", "--no-fail-fast"]);
    for name in CRATES {
        command.args(["-p", name]);
    }
    // With a target the flags do not apply to build scripts and procedural macros, which could not be linked.
    command.args(["--target", &host()?, "--", filter]).args(arguments);
    command.env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", workspace::target().join("fuzz"));
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    process::run_streaming(&mut command, timeout, line)
}

/// The platform that the compiler builds for by default.
fn host() -> Result<String, Error> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let mut command = std::process::Command::new(rustc);
    let version = process::run_for_output(command.arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| Error::UnexpectedOutput {
        command: process::command_line(&command),
        what: "no line `host: …`".into(),
    })
}
