//! `cargo xtask test`: every check, in order, and one line at the end.
//!
//! A step without tests of its own (format, lints) counts as one. A step that fails without a failed test (it does
//! not compile, it hangs, it runs no test at all) counts as one failed, and so does every test that is
//! ignored or skipped: what is there must run.

mod counts;
mod dependencies;
mod steps;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;

use crate::error::Error;
use crate::packages::Packages;
use crate::process::{self, Ended};
use crate::{vm, workspace};
use counts::Counts;
use steps::{STEPS, Step};

/// What to run.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Run this step alone (repeatable)
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Name the steps and what they show
    #[arg(long)]
    list: bool,
}

/// A piece of a step's work.
enum Work {
    /// A cargo command. With `tests` its output is searched for summaries of tests, and must have some.
    Cargo {
        arguments: &'static [&'static str],
        variables: &'static [(&'static str, &'static str)],
        /// A target directory of its own, under the usual one: for flags that would rebuild everything.
        target: Option<&'static str>,
        tests: bool,
    },
    /// Licences, sources, and what the default build needs.
    Dependencies,
    /// What `cargo xtask vm` promises.
    GuestCheck,
    /// A test program, built here with the feature `verbs` and run on kernel Soft-RoCE, with its package's own programs
    /// beside it.
    Guest { test: &'static str, hosts: u8, arguments: &'static [&'static str] },
}

/// `cargo xtask test`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    if options.list {
        for step in STEPS {
            println!("{:<14} {}", step.name, step.shows);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = choose(&options.only)?;
    chosen.iter().flat_map(|step| packages(step)).collect::<Packages>().install()?;

    let began = Instant::now();
    let mut lines = Vec::new();
    let mut whole = Counts::default();
    for step in chosen {
        println!("\n== {}: {}", step.name, step.shows);
        let started = Instant::now();
        let counts = judge(step);
        let mut line = format!("{:<14} {:>6.1} s  {counts}", step.name, started.elapsed().as_secs_f32());
        if counts.ignored > 0 {
            line += &format!(", {} did not run", counts.ignored);
        }
        println!("-- {line}");
        lines.push(line);
        whole += counts;
    }

    println!("\n{}\n{:<14} {:>6.1} s", lines.join("\n"), "whole", began.elapsed().as_secs_f32());
    if whole.ignored > 0 {
        println!("{} tests did not run, and count as failed", whole.ignored);
        whole.failed += whole.ignored;
    }
    println!("{whole}");
    Ok(if whole.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn choose(only: &[String]) -> Result<Vec<&'static Step>, Error> {
    if only.is_empty() {
        return Ok(STEPS.iter().collect());
    }
    let named = |name: &String| STEPS.iter().find(|step| step.name == name);
    only.iter().map(|name| named(name).ok_or_else(|| Error::NoSuchStep(name.clone()))).collect()
}

fn packages(step: &Step) -> impl Iterator<Item = &'static str> {
    let boots = step.work.iter().any(|work| matches!(work, Work::Guest { .. } | Work::GuestCheck));
    let guests: &[&str] = if boots { vm::PACKAGES } else { &[] };
    step.packages.iter().chain(guests).copied()
}

/// Runs a step to its end and counts. Whatever keeps it from its work is a failure of the step.
fn judge(step: &Step) -> Counts {
    let mut counts = Counts::default();
    for work in step.work {
        let mut own = Counts::default();
        let complaint = match perform(work, Duration::from_secs(step.limit), &mut own) {
            Ok(complaint) => complaint,
            Err(error) => Some(error.to_string()),
        };
        if let Some(complaint) = complaint {
            println!("{}: {complaint}", step.name);
            own.failed = own.failed.max(1);
        }
        counts += own;
    }
    counts
}

/// Does the work, adds to the counts, and says what is wrong, if anything.
fn perform(work: &Work, limit: Duration, counts: &mut Counts) -> Result<Option<String>, Error> {
    match *work {
        Work::Cargo { arguments, variables, target, tests } => {
            let mut command = cargo(limit, arguments);
            command.envs(variables.iter().copied());
            if let Some(directory) = target {
                command.env("CARGO_TARGET_DIR", workspace::target().join(directory));
            }
            let ended = process::stream(&mut command, limit, |line| {
                if tests && let Some(more) = Counts::of_line(line) {
                    *counts += more;
                }
                true
            })?;
            if !tests && (ended == Ended::Itself { success: true }) {
                counts.passed += 1;
            }
            Ok(complaint(&ended, limit).or_else(|| (counts.total() == 0).then(|| "it ran no test".into())))
        }
        Work::Dependencies => {
            let complaints = dependencies::complaints()?;
            counts.passed += u64::from(complaints.is_empty());
            counts.failed += complaints.len() as u64;
            Ok((!complaints.is_empty()).then(|| complaints.join("\n")))
        }
        Work::GuestCheck => {
            let (passed, failed) = vm::check()?;
            *counts += Counts { passed, failed, ignored: 0 };
            Ok(None)
        }
        Work::Guest { test, hosts, arguments } => {
            let (program, files) = match build(test, limit)? {
                Ok(built) => built,
                Err(complaint) => return Ok(Some(complaint)),
            };
            let mut words = vec![program.to_string_lossy().into_owned()];
            words.extend(arguments.iter().map(|&word| word.to_owned()));
            let mut options = vm::Options::new(words);
            options.hosts = hosts;
            options.files = files;
            options.timeout = limit.as_secs();
            let status = vm::boot(&options, &mut |line| {
                if let Some(more) = Counts::of_line(line) {
                    *counts += more;
                }
            })?;
            Ok(match status {
                0 if counts.total() == 0 => Some("it ran no test".into()),
                0 => None,
                status => Some(format!("ended with status {status} in the guest")),
            })
        }
    }
}

/// Builds a test program and returns its path and those of the programs it may start, or what is wrong.
fn build(test: &str, limit: Duration) -> Result<Result<(PathBuf, Vec<PathBuf>), String>, Error> {
    let features = "crosstie/verbs,crosstie-cli/verbs";
    let arguments = ["test", "--workspace", "--features", features, "--test", test, "--no-run"];
    let mut command = cargo(limit, &arguments);
    command.arg("--message-format=json-render-diagnostics");
    let mut program = None;
    let mut others = Vec::new();
    let ended = process::stream(&mut command, limit, |line| {
        program = executable(line, "test", Some(test)).or(program.take());
        others.extend(executable(line, "bin", None));
        false
    })?;
    Ok(match (complaint(&ended, limit), program) {
        (Some(complaint), _) => Err(complaint),
        (None, Some(program)) => Ok((program, others)),
        (None, None) => Err(format!("cargo built no program for the test {test}")),
    })
}

/// The program of a kind, and of a name if one is given, that one of cargo's messages says it built.
fn executable(message: &str, kind: &str, name: Option<&str>) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let target = &message["target"];
    let fits = message["reason"] == "compiler-artifact"
        && target["kind"][0] == kind
        && name.is_none_or(|name| target["name"] == name);
    if !fits {
        return None;
    }
    message["executable"].as_str().map(PathBuf::from)
}

fn cargo(limit: Duration, arguments: &[&str]) -> Command {
    let mut command = process::bounded(workspace::cargo(), limit);
    command.args(arguments).current_dir(workspace::root());
    command
}

fn complaint(ended: &Ended, limit: Duration) -> Option<String> {
    match ended {
        Ended::Itself { success: true } => None,
        Ended::Itself { success: false } => Some("it failed, see above".into()),
        Ended::PastLimit => Some(format!("it hung: no end within {} s", limit.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_steps_are_unique() {
        let mut names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        assert!(matches!(choose(&["no-such-step".into()]), Err(Error::NoSuchStep(_))));
    }

    #[test]
    fn the_built_program_is_found_among_the_messages() {
        let message = r#"{"reason":"compiler-artifact","target":{"kind":["test"],"name":"conformance"},"executable":"/t/conformance-1"}"#;
        assert_eq!(executable(message, "test", Some("conformance")), Some("/t/conformance-1".into()));
        assert_eq!(executable(message, "test", Some("other")), None);
        assert_eq!(executable(message, "bin", None), None);
        assert_eq!(executable("Compiling", "test", Some("conformance")), None);
        let message = r#"{"reason":"compiler-artifact","target":{"kind":["bin"],"name":"tool"},"executable":"/t/tool"}"#;
        assert_eq!(executable(message, "bin", None), Some("/t/tool".into()));
    }
}
