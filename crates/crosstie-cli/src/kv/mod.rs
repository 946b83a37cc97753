//! `crosstie kv`: a node of the store, and one question at a time to it.

mod ask;
mod serve;
mod stats;

use std::time::Duration;

use clap::Subcommand;
use crosstie_kv::client::Client;

use crate::error::Error;

/// What a node is called, unless told.
const NAME: &str = "kv";
/// What `--timeout` is, unless told: as for programs, see [`crosstie_kv::client::DEFAULT_TIMEOUT`].
const TIMEOUT: &str = "10";
/// What it may be, in seconds.
const LONGEST_TIMEOUT: f64 = 86_400.0;

/// Whom to ask, and for how long.
#[derive(Debug, clap::Args)]
struct Target {
    /// The node to ask, on this machine.
    #[arg(long, value_name = "NAME", default_value = NAME)]
    name: String,
    /// Give up if no answer comes for so many seconds; what was asked may still be done then.
    #[arg(long, value_name = "S", default_value = TIMEOUT, value_parser = seconds)]
    timeout: Duration,
}

impl Target {
    fn attach(&self) -> Result<Client, Error> {
        Ok(Client::attach_within(&self.name, self.timeout)?)
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0 && *seconds <= LONGEST_TIMEOUT);
    let seconds = seconds.ok_or_else(|| format!("give seconds, above 0 and up to {LONGEST_TIMEOUT}"))?;
    Ok(Duration::from_secs_f64(seconds))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_seconds() {
        assert_eq!(seconds(TIMEOUT), Ok(crosstie_kv::client::DEFAULT_TIMEOUT));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for wrong in ["", "0", "-1", "inf", "NaN", "1e99", "5s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
