//! The errors of benchmarks and reports.

use std::path::PathBuf;

use crosstie::bootstrap;
use crosstie::device::{CqError, DeviceError, OutOfRegion, PostError, Status};
use crosstie_kv::Backend;
use crosstie_kv::client::{self, AttachError};
use crosstie_kv::node::{PeersMissing, StartError};

use crate::workload::PlanError;
use crate::{figures, history};

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
    /// Another rank failed.
    #[error("rank {rank}: {what}")]
    Rank {
        /// Which one.
        rank: u32,
        /// Its error.
        what: String,
    },
    /// Another rank sent something that is not in the protocol.
    #[error(
        "another rank sent an invalid message: run the same command and the same build of crosstie on all ranks"
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
    /// A node did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The nodes did not connect to each other.
    #[error(transparent)]
    Peers(#[from] PeersMissing),
    /// A client could not attach to its node.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The store could not be filled.
    #[error("the store could not be filled: {0}")]
    Fill(client::Error),
    /// The benchmark was interrupted before the first run.
    #[error("interrupted before anything was measured")]
    Interrupted,
    /// A client could not connect for byte strings.
    #[error("a client could not connect for byte-string operations: {0}")]
    Strings(client::Error),
    /// A client failed.
    #[error("client {client}: {what}")]
    Client {
        /// Which one, among those of this rank.
        client: usize,
        /// Why.
        what: String,
    },
    /// The clients of this rank sent nothing for this many seconds.
    #[error("the clients of this rank sent nothing for {0} s: they are stopped, or do not get their cores")]
    ClientsSilent(u64),
    /// Operations failed because a node was gone.
    #[error(
        "{0} operations ended because a node was gone or did not respond: the figures cover the time until then"
    )]
    NodesGone(u64),
    /// This machine has no address that other machines can reach.
    #[error(
        "this machine has no address that the other machines can reach: set CROSSTIE_RENDEZVOUS, or make its host name resolve to its address"
    )]
    NoAddress,
    /// The recorded history is not linearizable, or the check was not decided.
    #[error("linearizability check failed (backend {backend:?}, seed {seed}): {failure}")]
    Violation {
        /// Which one.
        backend: Backend,
        /// Of the workload.
        seed: u64,
        /// What it did.
        failure: history::Failure,
    },
    /// The benchmark ran, but some responses or data were wrong.
    #[error("{0} messages carried wrong data: report this as a bug, and include the command line")]
    WrongData(u64),
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Error {
        Error::Usage(error.to_string())
    }
}

/// Ranks and clients send each other JSON.
impl From<serde_json::Error> for Error {
    fn from(_: serde_json::Error) -> Error {
        Error::Protocol
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
