//! The errors of benchmarks and reports.

use std::path::PathBuf;

use crosstie::bootstrap;
use crosstie::device::{CqError, DeviceError, OutOfRegion, PostError, Status};

use crate::{figures, kv};

/// Why a benchmark failed. Its text is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// A device, or an object on it, could not be created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device refused a work request.
    #[error("the device refused a work request: {0}")]
    Post(#[from] PostError),
    /// A completion queue failed.
    #[error(transparent)]
    Cq(#[from] CqError),
    /// A range was outside of its memory region.
    #[error(transparent)]
    Region(#[from] OutOfRegion),
    /// A work request completed with an error.
    #[error("a {what} completed with an error: {status}")]
    Request {
        /// Its operation.
        what: &'static str,
        /// Its completion status.
        status: Status,
    },
    /// An RPC failed.
    #[error("{what}: {source}")]
    Rpc {
        /// What failed.
        what: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The other side sent nothing for this many seconds.
    #[error("the other side sent nothing for {0} s: its process is stopped, or does not get its core")]
    NoProgress(u64),
    /// The processes of the benchmark could not connect to each other, or lost their connection.
    #[error(transparent)]
    Bootstrap(#[from] bootstrap::Error),
    /// The other side failed. The text is its error.
    #[error("the other side failed: {0}")]
    Peer(String),
    /// The other side sent something that is not in the protocol.
    #[error(
        "the other side sent an invalid message: run the same command and the same build of crosstie on both sides"
    )]
    Protocol,
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// What failed.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file of results could not be read.
    #[error(transparent)]
    Figures(#[from] figures::ReadError),
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Parts of the demo failed. The text names them.
    #[error("parts of the demo failed: {0}")]
    Parts(String),
    /// There are more results than a report shows.
    #[error("{count} results are too many: a report shows at most {limit}, make several reports")]
    TooManyResults {
        /// The number of results.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A plan file is wrong.
    #[error("{path}: {what}", path = path.display())]
    PlanFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The benchmark of the store failed, or ended early.
    #[error(transparent)]
    Kv(kv::Error),
    /// The benchmark ran, but some responses or data were wrong.
    #[error("{0} messages carried wrong data: report this as a bug, and include the command line")]
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
    /// Whether the command line or a plan file is wrong. If false, the benchmark failed.
    pub fn is_usage(&self) -> bool {
        matches!(self, Error::Usage(_) | Error::PlanFile { .. })
    }

    /// Turns an error of the library into [`Error::Rpc`].
    pub(crate) fn rpc<E: std::error::Error + Send + Sync + 'static>(
        what: &'static str,
    ) -> impl Fn(E) -> Error {
        move |source| Error::Rpc { what, source: source.into() }
    }

    /// Turns the errno of a system call into [`Error::Os`].
    pub(crate) fn os(what: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::Os { what, source: errno.into() }
    }
}
