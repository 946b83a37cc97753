//! `crosstie bench NAME`: runs one benchmark of [`crosstie_bench`] and prints its result.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Subcommand;
use crosstie_bench::kv::command as kv;
use crosstie_bench::summary::Summary;
use crosstie_bench::{copyrpc, demo, device, endpoint, group, node, rails};

use crate::error::Error;
use crate::signals;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Device(device::Arguments),
    /// RPC through shared memory, with a separate lane for each client.
    Ipc(node::Arguments),
    /// RPC through shared memory, with one ring that all clients share.
    Delegation(node::Arguments),
    /// RPC between the threads of one process.
    Flux(node::Arguments),
    Copyrpc(copyrpc::Arguments),
    Rails(rails::Arguments),
    /// Locks of a process group: a distributed queue with fencing tokens. Every member is a process.
    Lock(group::Arguments),
    /// Barriers of a process group. Every member is a process.
    Barrier(group::Arguments),
    /// Messages of a process group: SEND/RECEIVE over RC or UD queue pairs.
    ///
    /// Every member is a process. All members send to member 0, and slices of round trips between members 0 and 1 give the
    /// latencies; minimal code that streams the same messages between the same two processes gives the limit.
    Message(group::Arguments),
    Endpoint(endpoint::Arguments),
    Kv(kv::Arguments),
    /// For `bench kv --processes`: run one client as a process.
    #[command(hide = true, name = Command::CLIENT_PROCESS)]
    KvClient,
}

impl Command {
    /// The subcommand that is not for users.
    pub(crate) const CLIENT_PROCESS: &'static str = "kv-client";
}

/// `crosstie demo`.
pub(crate) fn demo(arguments: &demo::Arguments) -> Result<(), Error> {
    Ok(demo::run(arguments, interrupt_flag()?.as_ref())?)
}

/// `crosstie bench NAME`.
pub(crate) fn run(command: &Command) -> Result<(), Error> {
    let (kind, arguments) = match command {
        Command::Device(arguments) => {
            return print_summary(device::run(&device::Plan::new(arguments)?)?, arguments.json);
        }
        Command::Copyrpc(arguments) => {
            return print_summary(copyrpc::run(&copyrpc::Plan::new(arguments)?)?, arguments.json);
        }
        Command::Rails(arguments) => {
            let summary = rails::run(&rails::Plan::new(arguments)?)?;
            crate::print(&if arguments.json { crate::json(&summary)? } else { summary.table() })?;
            return match summary.errors() {
                0 => Ok(()),
                errors => Err(crosstie_bench::Error::WrongData(errors).into()),
            };
        }
        Command::Lock(arguments) => return run_group(group::Kind::Lock, arguments),
        Command::Barrier(arguments) => return run_group(group::Kind::Barrier, arguments),
        Command::Message(arguments) => return run_group(group::Kind::Message, arguments),
        Command::Endpoint(arguments) => {
            return print_summary(endpoint::run(&endpoint::Plan::new(arguments)?)?, arguments.json);
        }
        Command::Kv(arguments) => return Ok(kv::run(arguments, interrupt_flag()?.as_ref())?),
        Command::KvClient => {
            // The first signal does not end a client: its node does, so that the last operations are counted.
            interrupt_flag()?;
            return Ok(kv::client()?);
        }
        Command::Ipc(arguments) => (node::Kind::Ipc, arguments),
        Command::Delegation(arguments) => (node::Kind::Delegation, arguments),
        Command::Flux(arguments) => (node::Kind::Flux, arguments),
    };
    print_summary(node::run(&node::Plan::new(kind, arguments)?)?, arguments.json)
}

fn run_group(kind: group::Kind, arguments: &group::Arguments) -> Result<(), Error> {
    let Some(summary) = group::run(&group::Plan::new(kind, arguments)?)? else { return Ok(()) };
    crate::print(&if arguments.json { crate::json(&summary)? } else { summary.table() })?;
    if summary.errors > 0 { Err(crosstie_bench::Error::WrongData(summary.errors).into()) } else { Ok(()) }
}

/// Prints the result, if this process is the leading rank.
fn print_summary(summary: Option<Summary>, as_json: bool) -> Result<(), Error> {
    let Some(summary) = summary else { return Ok(()) };
    crate::print(&if as_json { crate::json(&summary)? } else { summary.table() })?;
    if summary.errors > 0 { Err(crosstie_bench::Error::WrongData(summary.errors).into()) } else { Ok(()) }
}

/// Installs the signal handlers and returns the flag that the first SIGINT or SIGTERM sets.
fn interrupt_flag() -> Result<Arc<AtomicBool>, Error> {
    signals::install().map_err(|source| Error::Os { what: "installing signal handlers", source })
}
