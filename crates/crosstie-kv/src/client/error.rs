//! The errors of a client.

use std::time::Duration;

use crosstie::ipc;

use crate::wire::{MessageError, Status};

/// Why a client could not attach to a node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No running node has that name.
    #[error("no running node of this user on this machine has the name {name:?}: start it first")]
    NoNode {
        /// The name.
        name: String,
    },
    /// The node is running, but the connection failed.
    #[error("cannot connect to the service {service:?} of the node: {cause}")]
    Connect {
        /// The service of the node.
        service: String,
        /// Why.
        cause: ipc::ConnectError,
    },
    /// The node is running, but does not respond.
    #[error(
        "the node {name:?} did not answer within {after:?}: it is stopped (SIGSTOP, a debugger) or overloaded; \
         let it continue, or use a longer timeout"
    )]
    TimedOut {
        /// The name.
        name: String,
        /// The timeout.
        after: Duration,
    },
    /// The node ended while the client was attaching.
    #[error("the node {name:?} ended while this client was attaching: try again when it is back")]
    Gone {
        /// The name.
        name: String,
    },
    /// The node's description is invalid or of another version, or its services are.
    #[error("the node {name:?} runs another release than this client: use the same release for both")]
    OtherVersion {
        /// The name.
        name: String,
    },
}

/// Why an operation did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The node that this client is attached to has ended. The operation may have been done.
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone,
    /// The node that owns the key is not connected, or went away before it responded. In the second case the operation may have been
    /// done.
    #[error("rank {rank}, which owns the key, is gone or has not started yet: try again when it is up")]
    NodeGone {
        /// Its rank.
        rank: u32,
    },
    /// No response came within the timeout. The operation may have been done, may be done later, or never.
    #[error(
        "rank {rank} did not answer within {after:?}: it is stopped, overloaded or disconnected; \
         the operation may still be done, so check the key before you try again"
    )]
    TimedOut {
        /// The rank that owns the key.
        rank: u32,
        /// The timeout.
        after: Duration,
    },
    /// The shard that owns the key has no memory left. Nothing has changed.
    #[error(
        "rank {rank} has no memory left for this key and value; nothing has changed: \
         delete keys, or start the node with more memory"
    )]
    OutOfMemory {
        /// Its rank.
        rank: u32,
    },
    /// A node has no registered memory for a message of this length now. Nothing has changed, and the same operation may succeed
    /// later. Only byte strings of another node need such memory.
    #[error(
        "there is no registered memory now for a message of this length to or from rank {rank}; nothing has changed: \
         try again, or give the device more memory (ulimit -l)"
    )]
    NoRegisteredMemory {
        /// The rank that owns the key.
        rank: u32,
    },
    /// As many operations as the node allows are in flight: poll first.
    #[error("as many operations as the node allows are in flight: poll for their responses, then try again")]
    Full,
    /// The first operation on a byte string connects a separate lane, and the node has as many clients with one as it allows.
    #[error(
        "the node has as many clients as it allows: end one, or start the node with a larger max_clients"
    )]
    TooManyClients,
    /// The key or a value is too long.
    #[error(transparent)]
    TooLong(#[from] MessageError),
    /// The node sent a response that is invalid, or that does not fit the request.
    #[error("rank {rank} sent an invalid response ({status:?}): use the same release for node and client")]
    Unexpected {
        /// The rank that owns the key.
        rank: u32,
        /// The status in the response; [`Status::Malformed`] also if the response could not be decoded.
        status: Status,
    },
}

/// Why an operation was not begun. The token comes back.
#[derive(Debug, thiserror::Error)]
pub enum BeginError<T> {
    /// As many operations as the node allows are in flight: poll, then try again.
    #[error("as many operations as the node allows are in flight: poll for their responses, then try again")]
    Full(T),
    /// The node that this client is attached to has ended.
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone(T),
}

/// Why an operation on a byte string was not begun. The token comes back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BeginBytesError<T> {
    /// As many operations as the node allows are in flight: poll, then try again.
    #[error("as many operations as the node allows are in flight: poll for their responses, then try again")]
    Full(T),
    /// The node that this client is attached to has ended.
    #[error("the node that this client is attached to has ended: reconnect when it is back")]
    ServerGone(T),
    /// A key or a value is too long, or the first operation at a daemon could not connect.
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
        match error.cause.is_back_pressure() {
            true => BeginError::Full(error.token),
            false => BeginError::ServerGone(error.token),
        }
    }
}
