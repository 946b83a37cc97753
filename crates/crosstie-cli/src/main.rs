//! The program `crosstie`: what this machine offers, and how fast it is.
//!
//! Exit status: 0 done, 1 the work failed, 2 the command line is wrong. Errors are one line on standard error.

mod bench;
mod doctor;
mod error;
mod kv;
mod report;
mod signals;
mod table;

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use bench::report::Report;
use bench::{copyrpc, device, node};
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
    Bench(Bench),
    /// The key-value store: run a node of it, and ask one.
    #[command(subcommand, arg_required_else_help = false)]
    Kv(kv::Command),
    /// Results of `bench kv --json` as one HTML page with plots, readable without a network.
    Report(report::Arguments),
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Operations of one connected queue pair.
    Device(device::Arguments),
    /// Calls through shared memory, each client with a lane of its own.
    Ipc(node::Arguments),
    /// Calls through shared memory, all clients through one ring.
    Delegation(node::Arguments),
    /// Calls between the threads of one process.
    Flux(node::Arguments),
    /// Calls between nodes, many to a WRITE with immediate.
    Copyrpc(copyrpc::Arguments),
    /// The key-value store: a cluster of nodes and their clients.
    Kv(bench::kv::Arguments),
    /// For the store's benchmark: one of its clients, as a process.
    #[command(hide = true)]
    KvClient,
}

fn main() -> ExitCode {
    let command = match CommandLine::try_parse() {
        Ok(line) => line.command,
        Err(error) => return answer(&error),
    };
    let done = match command {
        None => bench::kv::main_job(),
        Some(Command::Doctor { read_parent: Some(address), .. }) => print(&doctor::read_parent(address)),
        Some(Command::Doctor { json, .. }) => doctor::run(json),
        Some(Command::Bench(bench)) => measure(&bench),
        Some(Command::Kv(command)) => kv::run(&command),
        Some(Command::Report(arguments)) => report::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // What a child has to complain of, its parent hears and tells.
            if !bench::is_child() {
                eprintln!("crosstie: {error}");
            }
            error.exit_code()
        }
    }
}

fn measure(bench: &Bench) -> Result<(), Error> {
    let (kind, arguments) = match bench {
        Bench::Device(arguments) => {
            return tell(device::run(&device::Plan::new(arguments)?)?, arguments.json);
        }
        Bench::Copyrpc(arguments) => {
            return tell(copyrpc::run(&copyrpc::Plan::new(arguments)?)?, arguments.json);
        }
        Bench::Kv(arguments) => return bench::kv::run(arguments),
        Bench::KvClient => return bench::kv::client(),
        Bench::Ipc(arguments) => (node::Kind::Ipc, arguments),
        Bench::Delegation(arguments) => (node::Kind::Delegation, arguments),
        Bench::Flux(arguments) => (node::Kind::Flux, arguments),
    };
    tell(node::run(&node::Plan::new(kind, arguments)?)?, arguments.json)
}

/// The report, where this process leads.
fn tell(report: Option<Report>, as_json: bool) -> Result<(), Error> {
    let Some(report) = report else { return Ok(()) };
    print(&if as_json { json(&report)? } else { report.table() })?;
    if report.errors > 0 { Err(Error::WrongData(report.errors)) } else { Ok(()) }
}

/// One object, one line.
fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    let text = serde_json::to_string(value);
    text.map(|text| text + "\n").map_err(|source| Error::Os { what: "JSON", source: source.into() })
}

/// To standard output; a reader that went away is an error, not a panic.
fn print(text: &str) -> Result<(), Error> {
    let written = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
    written.map_err(|source| Error::Os { what: "standard output", source })
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
