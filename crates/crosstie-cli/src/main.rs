//! The program `crosstie`: what this machine offers, and how fast it is.
//!
//! Exit status: 0 done, 1 the work failed, 2 the command line is wrong. Errors are one line on standard error.

mod bench;
mod doctor;
mod error;
mod kv;
mod report;
mod signals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use crosstie_bench::output;

use error::Error;

/// Communication by remote memory access: RDMA NICs, Soft-RoCE, or shared memory.
///
/// Without a command: the store's benchmark on two nodes of this machine, both backends in turns, with a table and a report.
#[derive(Debug, Parser)]
#[command(name = "crosstie", version)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What this machine offers, what is missing, and the command that mends it.
    Doctor {
        /// Print one JSON object instead of a table.
        #[arg(long)]
        json: bool,
        /// For the doctor's own child: read a word of the parent's memory.
        #[arg(long, hide = true, value_name = "ADDRESS")]
        read_parent: Option<usize>,
    },
    /// One measurement, beside what the machine itself allows.
    #[command(subcommand, arg_required_else_help = false)]
    Bench(bench::Command),
    /// The key-value store: run a node of it, and ask one.
    #[command(subcommand, arg_required_else_help = false)]
    Kv(kv::Command),
    /// Results of `bench kv --json` as one HTML page with plots, readable without a network.
    Report(report::Arguments),
}

fn main() -> ExitCode {
    let command = match CommandLine::try_parse() {
        Ok(line) => line.command,
        Err(error) => return answer(&error),
    };
    let done = match command {
        None => bench::demo(),
        Some(Command::Doctor { read_parent: Some(address), .. }) => print(&doctor::read_parent(address)),
        Some(Command::Doctor { json, .. }) => doctor::run(json),
        Some(Command::Bench(command)) => bench::run(&command),
        Some(Command::Kv(command)) => kv::run(&command),
        Some(Command::Report(arguments)) => report::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // What a child has to complain of, its parent hears and tells.
            if !crosstie_bench::is_child() {
                eprintln!("crosstie: {error}");
            }
            error.exit_code()
        }
    }
}

/// One JSON object on one line.
fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    Ok(output::json(value)?)
}

/// Writes to standard output. A reader that has closed it is an error, not a panic.
fn print(text: &str) -> Result<(), Error> {
    Ok(output::print(text)?)
}

/// Help as it is; what is wrong with a command line as one line.
fn answer(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return print(&error.render().to_string()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let text = error.render().to_string();
    let told: Vec<&str> = text
        .lines()
        .map(|line| line.trim().trim_start_matches("error: "))
        .filter(|line| {
            !line.is_empty() && !line.starts_with("Usage:") && !line.starts_with("For more information")
        })
        .collect();
    eprintln!("crosstie: {} (try --help)", told.join(" "));
    ExitCode::from(2)
}
