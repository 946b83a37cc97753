//! What clients, daemons and nodes say to each other about 8-byte keys and values.
//!
//! One request and one response type, on every way: through shared memory, between daemons and between nodes. Bytes from
//! another process are checked by zerocopy on arrival: a tag that is none makes no message.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Op {
    /// Asks for the value of `key`.
    Get = 1,
    /// Stores `value` under `key`.
    Put = 2,
    /// Removes `key`.
    Delete = 3,
    /// Stores `value` under `key` if there is none yet.
    Insert = 4,
    /// Stores `value` under `key` if its value is `expected`.
    CompareAndSwap = 5,
}

/// A request: 32 bytes, so that it fits in one cache line with what carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// Zero.
    pub reserved: [u8; 3],
    /// The node that has the key.
    pub rank: u32,
    /// The key.
    pub key: u64,
    /// The new value, where there is one.
    pub value: u64,
    /// The value that [`Op::CompareAndSwap`] expects.
    pub expected: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
pub enum Status {
    /// Done. After a get, `value` is the key's.
    Done = 1,
    /// There is no such key.
    NotFound = 2,
    /// An insert or a compare-and-swap found another value, which is in `value`.
    Mismatch = 3,
    /// The shard has no memory left for it; nothing has changed.
    OutOfMemory = 4,
    /// The node that has the key is not there, or went before it answered: then the request may have been done.
    NodeGone = 5,
    /// The request names a node or a shard that does not have the key.
    Misrouted = 6,
    /// The request breaks the rules of its format or a limit. Only long requests do, see [`crate::long`].
    Malformed = 7,
}

/// A response: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Response {
    /// How it ended.
    pub status: Status,
    /// Zero.
    pub reserved: [u8; 7],
    /// See [`Status`]; zero where it says nothing.
    pub value: u64,
}

impl Request {
    /// A request without a new or an expected value.
    pub fn new(op: Op, rank: u32, key: u64) -> Request {
        Request { op, reserved: [0; 3], rank, key, value: 0, expected: 0 }
    }
}

impl Response {
    /// A response that ends as `status`.
    pub fn new(status: Status, value: u64) -> Response {
        Response { status, reserved: [0; 7], value }
    }
}

const _: () = assert!(size_of::<Request>() == 32 && size_of::<Response>() == 16);
