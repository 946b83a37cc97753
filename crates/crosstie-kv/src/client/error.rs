//! What can go wrong for a client.

use crosstie::ipc;

use crate::long::Malformed;
use crate::message::Status;

/// Why a client could not attach to a node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No node has that name.
    #[error("no live node on this machine has the name {name:?}: start it first")]
    NoNode {
        /// The name.
        name: String,
    },
    /// The node is there, but the connection was not made.
    #[error("attaching to {service:?}: {cause}")]
    Connect {
        /// Which service of the node.
        service: String,
        /// Why.
        cause: ipc::ConnectError,
    },
    /// The node went away while it was asked what it is.
    #[error("the node {name:?} went away: try again when it is back")]
    Gone {
        /// The name.
        name: String,
    },
    /// The node does not say what it is in a way that is understood here.
    #[error("the node {name:?} is of another release: build both from the same one")]
    OtherVersion {
        /// The name.
        name: String,
    },
}

/// Why an operation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The node that this client is attached to ended. The operation may have been done.
    #[error("the node that this client is attached to is gone: reconnect when it is back")]
    ServerGone,
    /// The node that has the key is not there, or went before it answered: then the operation may have been done.
    #[error("rank {rank}, which has the key, is gone: try again when it is back")]
    NodeGone {
        /// Its rank.
        rank: u32,
    },
    /// The daemon that has the key has no memory left for it; nothing has changed.
    #[error(
        "rank {rank} has no memory left for the key: delete others, or start it with a larger memory limit"
    )]
    OutOfMemory {
        /// Its rank.
        rank: u32,
    },
    /// As many operations as the node allows were begun and have not ended: poll first.
    #[error("as many operations as the node allows are under way: poll first")]
    Full,
    /// The key or the value is too long.
    #[error(transparent)]
    TooLong(#[from] Malformed),
    /// The node answered in a way that it never should.
    #[error("rank {rank} answered with {status:?}: is it of the same release?")]
    Unexpected {
        /// The rank that was asked.
        rank: u32,
        /// What it said.
        status: Status,
    },
}

/// Why an operation was not begun. The token comes back.
#[derive(Debug, thiserror::Error)]
pub enum BeginError<T> {
    /// As many operations as the node allows are under way: poll, then try again.
    #[error("as many operations as the node allows are under way: poll, then try again")]
    Full(T),
    /// The node that this client is attached to ended.
    #[error("the node that this client is attached to is gone: reconnect when it is back")]
    ServerGone(T),
}

impl<T> From<ipc::CallError<T>> for BeginError<T> {
    #[inline]
    fn from(error: ipc::CallError<T>) -> BeginError<T> {
        match error.is_back_pressure() {
            true => BeginError::Full(error.into_token()),
            false => BeginError::ServerGone(error.into_token()),
        }
    }
}
