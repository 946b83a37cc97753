//! What can go wrong for a client.

use std::time::Duration;

use crosstie::ipc;

use crate::wire::{MessageError, Status};

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
    /// The node is there, and says nothing.
    #[error(
        "the node {name:?} did not answer within {after:?}: it is stopped (SIGSTOP, a debugger), or overloaded; \
         let it go on, or give it more time"
    )]
    TimedOut {
        /// The name.
        name: String,
        /// How long it had.
        after: Duration,
    },
    /// The node went away while it was asked what it is.
    #[error("the node {name:?} ended while this client was attaching: try again when it is back")]
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
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone,
    /// The node that has the key is not there, or went before it answered: then the operation may have been done.
    #[error("rank {rank}, which has the key, is gone, or has not started yet: try again when it is up")]
    NodeGone {
        /// Its rank.
        rank: u32,
    },
    /// No answer came in time. The operation may have been done, may be done later, or never.
    #[error(
        "rank {rank} did not answer within {after:?}: it is stopped, overloaded or cut off; \
         what was asked may still be done, so look before you try again"
    )]
    TimedOut {
        /// The rank that has the key.
        rank: u32,
        /// How long it had.
        after: Duration,
    },
    /// The daemon that has the key has no memory left for it; nothing has changed.
    #[error(
        "rank {rank} has no memory left for this, and nothing has changed: delete keys, or start it with more memory"
    )]
    OutOfMemory {
        /// Its rank.
        rank: u32,
    },
    /// As many operations as the node allows were begun and have not ended: poll first.
    #[error("as many operations as the node allows are under way: poll for their answers, then try again")]
    Full,
    /// Byte strings need a lane of their own, and the node has as many clients with one as it may have.
    #[error("the node has as many clients as it may have: end one, or start it with more (max_clients)")]
    TooManyClients,
    /// The key or the value is too long.
    #[error(transparent)]
    TooLong(#[from] MessageError),
    /// The node answered in a way that it never should.
    #[error(
        "rank {rank} gave an answer that is none ({status:?}): build node and client from the same release"
    )]
    Unexpected {
        /// The rank that was asked.
        rank: u32,
        /// What it said; [`Status::Malformed`] also if it said nothing sensible.
        status: Status,
    },
}

/// Why an operation was not begun. The token comes back.
#[derive(Debug, thiserror::Error)]
pub enum BeginError<T> {
    /// As many operations as the node allows are under way: poll, then try again.
    #[error("as many operations as the node allows are under way: poll for their answers, then try again")]
    Full(T),
    /// The node that this client is attached to ended.
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone(T),
}

/// Why an operation on a byte string was not begun. The token comes back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BeginBytesError<T> {
    /// As many operations as the node allows are under way: poll, then try again.
    #[error("as many operations as the node allows are under way: poll for their answers, then try again")]
    Full(T),
    /// The node that this client is attached to ended.
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone(T),
    /// A key or a value is too long; or it was the first one at a daemon, which did not let us in.
    #[error("{cause}")]
    Refused {
        /// The token.
        token: T,
        /// Why.
        cause: Error,
    },
}

impl<T> From<BeginError<T>> for BeginBytesError<T> {
    fn from(error: BeginError<T>) -> BeginBytesError<T> {
        match error {
            BeginError::Full(token) => BeginBytesError::Full(token),
            BeginError::ServerGone(token) => BeginBytesError::ServerGone(token),
        }
    }
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
