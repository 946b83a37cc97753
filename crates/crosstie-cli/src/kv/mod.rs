//! `crosstie kv`: runs a node of the store, or one operation on it.

mod cores;
mod memory;
mod operations;
mod serve;
mod stats;

use std::time::Duration;

use clap::Subcommand;
use crosstie_kv::client::Client;
use crosstie_kv::node::MAX_NAME;

use crate::error::Error;

/// The default name of a node.
const DEFAULT_NAME: &str = "kv";
/// The default of `--timeout`: that of the library, see [`crosstie_kv::client::DEFAULT_TIMEOUT`].
const DEFAULT_TIMEOUT: &str = "10";
/// The largest `--timeout`, in seconds.
const MAX_TIMEOUT: f64 = 86_400.0;

/// The node to attach to, and the timeout.
#[derive(Debug, clap::Args)]
struct Target {
    /// The name of a node on this machine.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_NAME, value_parser = parse_name)]
    name: String,
    /// Give up when no response has come for this many seconds; the operation may still be done later.
    #[arg(long, value_name = "S", default_value = DEFAULT_TIMEOUT, value_parser = parse_seconds)]
    timeout: Duration,
}

impl Target {
    fn attach(&self) -> Result<Client, Error> {
        Ok(Client::attach_within(&self.name, self.timeout)?)
    }
}

/// Parses the argument of `--name`.
fn parse_name(text: &str) -> Result<String, String> {
    let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "._-/".contains(letter);
    if (1..=MAX_NAME).contains(&text.len()) && text.chars().all(is_allowed) {
        return Ok(text.to_owned());
    }
    Err(format!("use 1 to {MAX_NAME} letters, digits, '.', '_', '-' and '/'"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0 && *seconds <= MAX_TIMEOUT);
    let seconds = seconds.ok_or_else(|| format!("give seconds, above 0 and up to {MAX_TIMEOUT}"))?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Run a node of the key-value store, or one operation on it. A client needs no address: it attaches by name to a node of the same
/// user on the same machine, and reaches the keys of all nodes through it.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(serve::Arguments),
    Put(operations::Put),
    Get(operations::Get),
    Del(operations::Del),
    Cas(operations::Cas),
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
    fn parse_name_accepts_what_the_library_accepts() {
        let longest = "n".repeat(MAX_NAME);
        for right in ["kv", "a-B_9.c/d", &longest] {
            assert_eq!(parse_name(right), Ok(right.to_owned()));
        }
        for wrong in ["", "a b", "ä", "a:b", &format!("{longest}n")] {
            assert!(parse_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn parse_seconds_accepts_positive_numbers() {
        assert_eq!(parse_seconds(DEFAULT_TIMEOUT), Ok(crosstie_kv::client::DEFAULT_TIMEOUT));
        assert_eq!(parse_seconds("0.25"), Ok(Duration::from_millis(250)));
        for wrong in ["", "0", "-1", "inf", "NaN", "1e99", "5s"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
