//! Why a command failed, and its exit status.

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
    /// A thread of a node of the store has panicked.
    #[error(transparent)]
    Panicked(#[from] node::Panicked),
    /// A node of the store cannot listen at its address.
    #[error("cannot listen at {address}, this rank's entry of --nodes: {source}")]
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
    /// The key has another value than the compare-and-swap expected.
    #[error(
        "the key does not have the expected value, so it was not changed: read it with `crosstie kv get`"
    )]
    OtherValue,
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
