//! Why a command failed, and the exit status that says so.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use crosstie::bootstrap;
use crosstie::device::{CqError, DeviceError, OutOfRegion, PostError, Status};
use crosstie_kv::{bench, client, figures, node};

/// Why a command failed. Printed as one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A device or an object on it could not be set up.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A request was refused.
    #[error("request refused: {0}")]
    Post(#[from] PostError),
    /// A completion queue broke.
    #[error(transparent)]
    Cq(#[from] CqError),
    /// A range was not inside its region.
    #[error(transparent)]
    Region(#[from] OutOfRegion),
    /// A request failed.
    #[error("a {what} failed: {status}")]
    Request {
        /// Of which kind.
        what: &'static str,
        /// Why.
        status: Status,
    },
    /// What carries requests and responses failed.
    #[error("{what}: {source}")]
    Exchange {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nothing came for long.
    #[error("nothing came from the other side for {0} s: it is stopped, or starved of its core")]
    Stuck(u64),
    /// The two sides lost each other.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// The other side failed, for this reason.
    #[error("the other side: {0}")]
    Peer(String),
    /// The other side speaks another version.
    #[error("the other side answered out of protocol: run the same build on both sides")]
    Protocol,
    /// The operating system said no.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What it answered.
        source: std::io::Error,
    },
    /// A file of figures could not be read.
    #[error(transparent)]
    Figures(#[from] figures::ReadError),
    /// A file could not be written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// More than a report shows.
    #[error("{count} results, and a report shows at most {limit}: make several reports")]
    TooManyResults {
        /// How many there are.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// A file that says what to measure does not.
    #[error("{path}: {what}", path = path.display())]
    Sweep {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The store's benchmark failed, or ended early.
    #[error(transparent)]
    Kv(bench::Error),
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
    /// The figures are there, but some of the data was wrong.
    #[error("{0} messages carried wrong data: report this as a bug, with the command line")]
    WrongData(u64),
}

impl From<client::AttachError> for Error {
    fn from(error: client::AttachError) -> Error {
        match error {
            client::AttachError::NoNode { name } => Error::NoNode(name),
            error => Error::Attach(error),
        }
    }
}

impl From<bench::Error> for Error {
    fn from(error: bench::Error) -> Error {
        match error {
            bench::Error::Plan(text) => Error::Usage(text),
            bench::Error::Workload(error) => Error::Usage(error.to_string()),
            error => Error::Kv(error),
        }
    }
}

impl Error {
    /// 2 where the command line is wrong, 1 where the work failed.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(if matches!(self, Error::Usage(_) | Error::Sweep { .. }) { 2 } else { 1 })
    }

    /// Makes one of what the library answered.
    pub(crate) fn exchange<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl Fn(E) -> Error {
        move |source| Error::Exchange { what, source: source.into() }
    }

    /// Makes one of a system call's answer.
    pub(crate) fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::Os { what, source: errno.into() }
    }
}
