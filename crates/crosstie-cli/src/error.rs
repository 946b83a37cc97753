//! Why a command failed, and the exit status that says so.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crosstie::bootstrap;
use crosstie_kv::{client, node};

/// Why a command failed. Printed as one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A benchmark or a report failed.
    #[error(transparent)]
    Bench(#[from] crosstie_bench::Error),
    /// The ranks lost each other.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// The operating system said no.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What it answered.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// Not even the software device works.
    #[error("the software device does not work here: the table says why")]
    NoSoftwareDevice,
    /// A node of the store does not start.
    #[error(transparent)]
    Node(#[from] node::StartError),
    /// A node of the store ended by itself.
    #[error(transparent)]
    Panicked(#[from] node::Panicked),
    /// A node of the store has nowhere to listen.
    #[error("listening at {address}, this rank's entry of --nodes: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system answered.
        source: std::io::Error,
    },
    /// There is no node of the store to ask.
    #[error(
        "no live node of this user has the name {0:?} on this machine: start it with `crosstie kv serve --name {0}`"
    )]
    NoNode(String),
    /// A node of the store does not let us in.
    #[error(transparent)]
    Attach(client::AttachError),
    /// The store did not do what was asked.
    #[error(transparent)]
    Store(#[from] client::Error),
    /// The store has no such key.
    #[error("no such key: `crosstie kv put` makes one")]
    NoSuchKey,
    /// A compare-and-swap found another value.
    #[error("the key has another value than the expected one, nothing has changed: see `crosstie kv get`")]
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
    /// 2 where the command line is wrong, 1 where the work failed.
    pub(crate) fn exit_code(&self) -> ExitCode {
        let is_usage = match self {
            Error::Usage(_) => true,
            Error::Bench(error) => error.is_usage(),
            _ => false,
        };
        ExitCode::from(if is_usage { 2 } else { 1 })
    }
}
