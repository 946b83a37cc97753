//! The program `crosstie`: commands only. Benchmarks and reports are in `crosstie-bench`, the store is in `crosstie-kv`.
//!
//! Exit status: 0 success, 1 the command failed, 2 the command line is wrong. An error is one line on standard error.
//!
//! It is a library, which the program calls: cargo compiles a library while those that it uses still generate their code.

mod bench;
mod doctor;
mod error;
mod kv;
mod report;
mod signals;
mod sim;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use crosstie_bench::{demo, output};

use error::Error;

/// RPC, one-sided operations, messages over several rails, locks and barriers, and a key-value store over remote memory access:
/// on RDMA NICs, Soft-RoCE, or shared memory.
///
/// Start with `crosstie demo`.
#[derive(Debug, Parser)]
#[command(name = "crosstie", version)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Arguments),
    /// Check what this machine offers, what is missing, and how to fix it.
    Doctor {
        /// Print one JSON object instead of a table.
        #[arg(long)]
        json: bool,
        /// For the child process of doctor: read a word from the parent's memory.
        #[arg(long, hide = true, value_name = "ADDRESS")]
        read_parent: Option<usize>,
    },
    /// Run one benchmark; its result is compared with what the machine allows.
    #[command(subcommand, arg_required_else_help = false)]
    Bench(bench::Command),
    /// The key-value store: run a node, or send requests to one.
    #[command(subcommand, arg_required_else_help = false)]
    Kv(kv::Command),
    /// Draw results of `bench kv --json` as one HTML page with plots; it needs no network.
    Report(report::Arguments),
    Sim(sim::Arguments),
}

/// Runs the command that the command line names.
pub fn main() -> ExitCode {
    let parsed = with_negative_numbers(CommandLine::command()).try_get_matches();
    let command = match parsed.and_then(|matches| CommandLine::from_arg_matches(&matches)) {
        Ok(line) => line.command,
        Err(error) => return print_usage(&error),
    };
    let Some(command) = command else {
        let help = with_negative_numbers(CommandLine::command()).render_long_help();
        return print(&help.to_string()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    };
    let done = match command {
        Command::Demo(arguments) => bench::demo(&arguments),
        Command::Doctor { read_parent: Some(address), .. } => print(&doctor::read_parent(address)),
        Command::Doctor { json, .. } => doctor::run(json),
        Command::Bench(command) => bench::run(&command),
        Command::Kv(command) => kv::run(&command),
        Command::Report(arguments) => report::run(&arguments),
        Command::Sim(arguments) => sim::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A child process sends its error to its parent, which prints it.
            if !crosstie_bench::is_child() {
                let text = error.to_string();
                eprintln!("crosstie: {text}{}", error::advice(&text));
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

/// Lets `-1` be the value of an option, so that the error says which values the option takes.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let allow = |argument: clap::Arg| {
        let takes_values = argument.get_action().takes_values();
        argument.allow_negative_numbers(takes_values)
    };
    command.mut_args(allow).mut_subcommands(with_negative_numbers)
}

/// Prints help as it is, and a usage error as one line.
fn print_usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return print(&error.render().to_string()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let text = error.render().to_string();
    let lines: Vec<&str> = text
        .lines()
        .map(|line| line.trim().trim_start_matches("error: ").trim_start_matches("tip: "))
        .filter(|line| {
            !line.is_empty() && !line.starts_with("Usage:") && !line.starts_with("For more information")
        })
        .collect();
    // Other errors than these two continue their first line on the next ones.
    let separator = match error.kind() {
        ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument => "; ",
        _ => " ",
    };
    let hidden = bench::Command::CLIENT_PROCESS;
    let line = lines.join(separator).replace(&format!("{hidden}, "), "");
    eprintln!("crosstie: {line} (try --help)");
    ExitCode::from(2)
}
