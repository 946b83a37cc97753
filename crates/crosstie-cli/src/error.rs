//! Why a command failed, and its exit status.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crosstie::bootstrap;
use crosstie_kv::{client, node};

/// Why a command failed. The program prints it as one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// A benchmark or a report failed.
    #[error(transparent)]
    Bench(#[from] crosstie_bench::Error),
    /// The ranks of the job could not connect to each other, or lost their connection.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// Checks of a simulation failed.
    #[error("{0} simulated runs broke a rule; repeat one with its --seed and --seeds 1")]
    SimulationFailed(usize),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// What failed.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The software device does not work.
    #[error(
        "the software device does not work on this machine: see \"software device\" in the table for the reason"
    )]
    NoSoftwareDevice,
    /// A node of the store did not start.
    #[error(transparent)]
    Node(#[from] node::StartError),
    /// A node of the store has ended by itself.
    #[error(transparent)]
    NodeEnded(#[from] node::NodeEnded),
    /// A node of the store cannot listen at its address.
    #[error("cannot listen at {address}, this rank's entry of --nodes: {source}: {}", listen_advice(source))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// No node of the store has this name.
    #[error(
        "no live node of this user has the name {0:?} on this machine: start it with `crosstie kv serve --name {0}`"
    )]
    NoNode(String),
    /// The node of the store did not accept this client.
    #[error(transparent)]
    Attach(client::AttachError),
    /// The store did not complete the operation.
    #[error(transparent)]
    Store(#[from] client::Error),
    /// The store has no such key.
    #[error("no such key: create it with `crosstie kv put`")]
    NoSuchKey,
    /// The store has no such key to delete.
    #[error("no such key, so nothing was deleted: with --word a key is a number, without it a byte string")]
    NothingDeleted,
    /// The key has another value than the compare-and-swap expected.
    #[error(
        "the key does not have the expected value, so it was not changed: read it with `crosstie kv get`"
    )]
    OtherValue,
}

fn listen_advice(source: &std::io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::AddrInUse => "stop the program that uses this port, or give another port on all nodes",
        ErrorKind::AddrNotAvailable => "this machine does not have the address; check --rank and --nodes",
        ErrorKind::PermissionDenied => "give a port from 1024 on",
        _ => "check --rank and --nodes",
    }
}

/// What to do if the text of an error ends with an error of the system that many operations can have.
pub(crate) fn advice(text: &str) -> &'static str {
    // Errors of other processes arrive as text.
    match text.rsplit_once("(os error ").map(|(_, number)| number.trim_end_matches(')')) {
        Some("12") => {
            ": raise the limit on memory (`ulimit -v unlimited`, or that of the container), or ask for less"
        }
        Some("13" | "30") => ": check the permissions, or use another directory",
        Some("23" | "24") => ": raise the limit on open files (`ulimit -n`)",
        Some("28") => ": free some space, or use another directory",
        _ => "",
    }
}

impl From<client::AttachError> for Error {
    fn from(error: client::AttachError) -> Error {
        match error {
            client::AttachError::NoNode { name } => Error::NoNode(name),
            error => Error::Attach(error),
        }
    }
}

impl Error {
    /// 2 if the command line is wrong, 1 if the command failed.
    pub(crate) fn exit_code(&self) -> ExitCode {
        let is_usage = match self {
            Error::Usage(_) => true,
            Error::Bench(error) => error.is_usage(),
            _ => false,
        };
        ExitCode::from(if is_usage { 2 } else { 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_follows_an_error_of_the_system_at_the_end_of_the_text() {
        assert!(advice("creating the server: Too many open files (os error 24)").contains("ulimit -n"));
        assert!(advice("x.json: Permission denied (os error 13)").contains("another directory"));
        for text in
            ["", "no such key", "x: No such file or directory (os error 2)", "a (os error 24): stop it"]
        {
            assert_eq!(advice(text), "", "{text}");
        }
    }
}
