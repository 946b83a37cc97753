//! `crosstie kv`: a node of the store, and one question at a time to it.

mod ask;
mod serve;
mod stats;

use clap::Subcommand;

use crate::error::Error;

/// What a node is called, unless told.
const NAME: &str = "kv";

/// Nodes and their clients. A client needs no address: it attaches to a node of the same user on the same machine, by name,
/// and reaches the keys of all nodes through it. What each does is said where its arguments are.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(serve::Arguments),
    Put(ask::Put),
    Get(ask::Get),
    Del(ask::Del),
    Cas(ask::Cas),
    Stats(stats::Arguments),
}

pub(crate) fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Serve(arguments) => serve::run(arguments),
        Command::Put(arguments) => arguments.run(),
        Command::Get(arguments) => arguments.run(),
        Command::Del(arguments) => arguments.run(),
        Command::Cas(arguments) => arguments.run(),
        Command::Stats(arguments) => stats::run(arguments),
    }
}
