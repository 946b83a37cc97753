//! `crosstie bench NAME`: one measurement each. The measurements are [`crosstie_bench`]'s.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Subcommand;
use crosstie_bench::kv::command as kv;
use crosstie_bench::summary::Summary;
use crosstie_bench::{copyrpc, device, node};

use crate::error::Error;
use crate::signals;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
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
    Kv(kv::Arguments),
    /// For the store's benchmark: one of its clients, as a process.
    #[command(hide = true)]
    KvClient,
}

/// `crosstie` without a command.
pub(crate) fn demo() -> Result<(), Error> {
    Ok(kv::demo(interrupt()?.as_ref())?)
}

/// `crosstie bench NAME`.
pub(crate) fn run(command: &Command) -> Result<(), Error> {
    let (kind, arguments) = match command {
        Command::Device(arguments) => {
            return tell(device::run(&device::Plan::new(arguments)?)?, arguments.json);
        }
        Command::Copyrpc(arguments) => {
            return tell(copyrpc::run(&copyrpc::Plan::new(arguments)?)?, arguments.json);
        }
        Command::Kv(arguments) => return Ok(kv::run(arguments, interrupt()?.as_ref())?),
        Command::KvClient => {
            // The first signal is ignored: the client's node ends it, so that the last operations are counted.
            interrupt()?;
            return Ok(kv::client()?);
        }
        Command::Ipc(arguments) => (node::Kind::Ipc, arguments),
        Command::Delegation(arguments) => (node::Kind::Delegation, arguments),
        Command::Flux(arguments) => (node::Kind::Flux, arguments),
    };
    tell(node::run(&node::Plan::new(kind, arguments)?)?, arguments.json)
}

/// The report, where this process leads.
fn tell(summary: Option<Summary>, as_json: bool) -> Result<(), Error> {
    let Some(summary) = summary else { return Ok(()) };
    crate::print(&if as_json { crate::json(&summary)? } else { summary.table() })?;
    if summary.errors > 0 { Err(crosstie_bench::Error::WrongData(summary.errors).into()) } else { Ok(()) }
}

/// A flag that SIGINT and SIGTERM set.
fn interrupt() -> Result<Arc<AtomicBool>, Error> {
    signals::ask_to_end().map_err(|source| Error::Os { what: "catching signals", source })
}
