//! `crosstie bench NAME`: runs one benchmark of [`crosstie_bench`] and prints its result.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Subcommand;
use crosstie_bench::kv::command as kv;
use crosstie_bench::{copyrpc, demo, device, endpoint, group, local_rpc, rails};

use crate::error::Error;
use crate::signals;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Device(device::Arguments),
    /// RPC through shared memory, with a separate lane for each client.
    Ipc(local_rpc::Arguments),
    /// RPC through shared memory, with one ring that all clients share.
    Delegation(local_rpc::Arguments),
    /// RPC between the threads of one process.
    Flux(local_rpc::Arguments),
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

/// `crosstie bench NAME`. Only the leading rank has a result to print.
pub(crate) fn run(command: &Command) -> Result<(), Error> {
    let summary = match command {
        Command::Device(arguments) => arguments.run()?,
        Command::Ipc(arguments) => arguments.run(local_rpc::Kind::Ipc)?,
        Command::Delegation(arguments) => arguments.run(local_rpc::Kind::Delegation)?,
        Command::Flux(arguments) => arguments.run(local_rpc::Kind::Flux)?,
        Command::Copyrpc(arguments) => arguments.run()?,
        Command::Rails(arguments) => Some(arguments.run()?),
        Command::Lock(arguments) => arguments.run(group::Kind::Lock)?,
        Command::Barrier(arguments) => arguments.run(group::Kind::Barrier)?,
        Command::Message(arguments) => arguments.run(group::Kind::Message)?,
        Command::Endpoint(arguments) => arguments.run()?,
        Command::Kv(arguments) => return Ok(kv::run(arguments, interrupt_flag()?.as_ref())?),
        Command::KvClient => {
            // The first signal does not end a client: its node does, so that the last operations are counted.
            interrupt_flag()?;
            return Ok(kv::client()?);
        }
    };
    Ok(summary.map_or(Ok(()), |summary| summary.print())?)
}

/// Installs the signal handlers and returns the flag that the first SIGINT or SIGTERM sets.
fn interrupt_flag() -> Result<Arc<AtomicBool>, Error> {
    signals::install().map_err(|source| Error::Os { what: "installing signal handlers", source })
}
