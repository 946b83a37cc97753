//! Why a benchmark failed.

use std::path::PathBuf;

use crosstie::bootstrap;
use crosstie::device::{CqError, DeviceError, OutOfRegion, PostError, Status};

use crate::{figures, kv};

/// Why a benchmark failed. Its text is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
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
    Rpc {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Nothing came for long.
    #[error("nothing came from the other side for {0} s: it is stopped, or starved of its core")]
    NoProgress(u64),
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
    PlanFile {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The store's benchmark failed, or ended early.
    #[error(transparent)]
    Kv(kv::Error),
    /// The figures are there, but some of the data was wrong.
    #[error("{0} messages carried wrong data: report this as a bug, with the command line")]
    WrongData(u64),
}

impl From<kv::Error> for Error {
    fn from(error: kv::Error) -> Error {
        match error {
            kv::Error::Plan(text) => Error::Usage(text),
            kv::Error::Workload(error) => Error::Usage(error.to_string()),
            error => Error::Kv(error),
        }
    }
}

impl Error {
    /// Whether the command line, or a file that it names, is wrong; otherwise the work failed.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Usage(_) | Error::PlanFile { .. })
    }

    /// Makes one of what the library answered.
    pub(crate) fn rpc<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl Fn(E) -> Error {
        move |source| Error::Rpc { what, source: source.into() }
    }

    /// Makes one of a system call's answer.
    pub(crate) fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::Os { what, source: errno.into() }
    }
}
