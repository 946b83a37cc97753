//! The messages between clients, daemons and nodes.
//!
//! The store has two keyspaces, each with its own messages:
//!
//! - [*words*](WordRequest): 8-byte keys with 8-byte values. Requests and responses have a fixed size and fit in a cache line.
//! - [*byte strings*](BytesRequest): keys up to [`MAX_KEY`] and values up to [`MAX_VALUE`] bytes. Requests and responses are a
//!   header followed by the bytes. The requests for a node's [`NodeInfo`] and for a shard's statistics have the same format.
//!
//! The same messages travel through shared memory, between daemons and between nodes. Between nodes both kinds share a
//! connection; the first byte of a request tells them apart. `docs/wire-format.md` draws all layouts.
//!
//! Bytes from another process are validated completely before they are used. Invalid bytes are an error, never a message.
//! What nodes say to each other about their connection is not here but in the control plane of [`node`](crate::node).

mod bytes;
#[cfg(test)]
mod fuzz_tests;
mod info;
mod words;

pub use bytes::{
    BytesOp, BytesRequest, BytesResponse, MAX_KEY, MAX_REQUEST, MAX_RESPONSE, MAX_VALUE, MessageError, Token,
};
pub use info::NodeInfo;
pub use words::{WordRequest, WordResponse};

pub(crate) use bytes::RESPONSE_HEADER;

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// An operation on an 8-byte key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Op {
    /// Reads the value of `key`.
    Get = 1,
    /// Stores `value` under `key`.
    Put = 2,
    /// Removes `key`.
    Delete = 3,
    /// Stores `value` under `key` if the key does not exist.
    Insert = 4,
    /// Stores `value` under `key` if the current value is `expected`.
    CompareAndSwap = 5,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Status {
    /// Done. After a get, the response holds the key's value.
    Done = 1,
    /// The key does not exist.
    NotFound = 2,
    /// An insert or a compare-and-swap found another value, which the response holds.
    Mismatch = 3,
    /// The shard has no memory left for the request. Nothing has changed.
    OutOfMemory = 4,
    /// The node that owns the key is not connected, or the connection ended before the response came. In the second case the
    /// request may have been done.
    NodeGone = 5,
    /// The request was sent to a node or a daemon that does not own the key.
    Misrouted = 6,
    /// The request violates its format or a limit. Only byte-string requests can.
    Malformed = 7,
    /// A node has no registered memory for a message of this length now. Nothing has changed, and the same request may succeed
    /// later. Only byte-string requests for another node need such memory.
    NoRegisteredMemory = 8,
    /// The key has seen a newer fencing token than that of the request. Nothing has changed. The response holds the newest token.
    Fenced = 9,
}
