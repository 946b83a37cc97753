//! `cargo xtask figures`: measures what `docs/PERFORMANCE.md` and the README claim, and writes their tables.
//!
//! Every round runs every measurement once, so that disturbances of the machine affect all of them. What was measured is kept in
//! `docs/figures/measured.json`, for each machine with its processor, the commit, and the spread over the rounds. Every figure in the
//! documents is made from that file alone ([`documents`]). A figure that was not measured again keeps the commit that it was measured on,
//! so no figure can look newer than it is. A test of this task compares the documents with the file. `cargo xtask bench-peers --record`
//! adds the comparison with other systems to the same file.
//!
//! A machine without cargo can measure, too: carry this program and `crosstie` there, run it with `--program`, `--commit` and
//! `--output`, and add the result here with `--merge`.

mod documents;
mod list;
mod measured;
mod plot;
mod tables;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use serde_json::Value;

use self::list::{FIGURES, Figure};
pub(crate) use self::measured::median;
use self::measured::{Machine, Measured, Sample};
use crate::error::Error;
use crate::process::{self, run_for_output, run_inheriting_output, with_timeout};
use crate::workspace;

/// The longest time that one measurement may take.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds for each measurement
    #[arg(long, value_name = "S", default_value_t = 0.5)]
    seconds: f64,
    /// Measure only figures of this table (repeatable)
    #[arg(long, value_name = "TABLE")]
    only: Vec<String>,
    /// Write the figures from what was measured before into the documents, and measure nothing
    #[arg(long, conflicts_with_all = ["only", "output"])]
    tables: bool,
    /// Measure this program instead of building one
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// The commit of that program
    #[arg(long, value_name = "HASH", requires = "program")]
    commit: Option<String>,
    /// Write what was measured to this file, and change no document
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Add what `--output` wrote on another machine, and measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "output", "program"])]
    merge: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let stored = workspace::root().join(measured::PATH);
    if options.tables || options.merge.is_some() {
        let mut measured = Measured::read(&stored)?;
        if let Some(file) = &options.merge {
            measured.merge(Measured::read(file)?);
            measured.write(&stored)?;
        }
        documents::write_all(&measured)?;
        return Ok(ExitCode::SUCCESS);
    }
    let program = match &options.program {
        Some(program) => program.clone(),
        None => build_program()?,
    };
    let commit = match &options.commit {
        Some(commit) => commit.clone(),
        None => current_commit()?,
    };
    let mut samples: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for round in 1..=options.rounds {
        for figure in selected(&options.only) {
            eprintln!("xtask: round {round} of {}: {}", options.rounds, figure.id);
            let sample = measure(figure, &program, options.seconds)?;
            samples.entry(&figure.id).or_default().push(sample);
        }
    }
    let fresh = Measured::new(&Machine::this()?, &commit, options.seconds, &samples);
    match &options.output {
        Some(file) => fresh.write(file)?,
        None => {
            let mut measured = Measured::read(&stored)?;
            measured.merge(fresh);
            measured.write(&stored)?;
            documents::write_all(&measured)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Stores a comparison with other systems that was measured here, and writes the documents.
pub(crate) fn record_peers(found: &Value) -> Result<(), Error> {
    let stored = workspace::root().join(measured::PATH);
    let mut measured = Measured::read(&stored)?;
    measured.merge(Measured::of_peers(&Machine::this()?, &current_commit()?, found));
    measured.write(&stored)?;
    documents::write_all(&measured)
}

fn selected(only: &[String]) -> impl Iterator<Item = &'static Figure> {
    FIGURES.iter().filter(|figure| only.is_empty() || only.contains(&figure.table))
}

fn build_program() -> Result<PathBuf, Error> {
    let mut build = Command::new(workspace::cargo());
    build.current_dir(workspace::root()).args(["build", "--release", "-p", "crosstie-cli"]);
    run_inheriting_output(&mut build)?;
    Ok(workspace::target().join("release/crosstie"))
}

/// The short hash of the commit that is checked out, with a `+` if files differ from it.
fn current_commit() -> Result<String, Error> {
    let git = |arguments: &[&str]| {
        run_for_output(Command::new("git").current_dir(workspace::root()).args(arguments))
    };
    let hash = git(&["rev-parse", "--short=9", "HEAD"])?.trim().to_owned();
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Ok(if changes.is_empty() { hash } else { hash + "+" })
}

/// Runs one benchmark once.
fn measure(figure: &Figure, program: &PathBuf, seconds: f64) -> Result<Sample, Error> {
    let mut command = with_timeout(program, TIMEOUT);
    command.arg("bench").args(figure.arguments.split(' '));
    command.args(["--json", "--duration", &seconds.to_string()]);
    let text = run_for_output(&mut command)?;
    let unexpected =
        |what: String| Error::UnexpectedOutput { command: process::command_line(&command), what };
    let found: Value = serde_json::from_str(&text).map_err(|error| unexpected(format!("{error}: {text}")))?;
    // A benchmark of several configurations prints one object for each.
    let found = found.get(0).unwrap_or(&found);
    figure.metric.sample(found).ok_or_else(|| unexpected(format!("figures are missing: {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_can_be_selected() {
        for figure in &*FIGURES {
            assert!(selected(&[figure.table.to_owned()]).any(|each| each.id == figure.id));
        }
        assert_eq!(selected(&[]).count(), FIGURES.len());
    }
}
