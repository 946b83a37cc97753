//! Requests and responses for 8-byte keys.
//!
//! ```text
//! request   0 op u8 | 1 zero [3] | 4 rank u32 | 8 key u64 | 16 value u64 | 24 expected u64
//! response  0 status u8 | 1 zero [7] | 8 value u64
//! ```
//!
//! Numbers are little-endian. zerocopy validates the bytes of another process when they arrive: an undefined operation or
//! status is not decoded.

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::{Op, Status};

/// A request for an 8-byte key: 32 bytes, so that it fits in one cache line together with the header of its transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WordRequest {
    /// The operation.
    pub op: Op,
    /// Zero.
    pub reserved: [u8; 3],
    /// The node that owns the key.
    pub rank: u32,
    /// The key.
    pub key: u64,
    /// The new value, for operations that have one.
    pub value: u64,
    /// The value that [`Op::CompareAndSwap`] expects.
    pub expected: u64,
}

/// A response for an 8-byte key: 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WordResponse {
    /// How the request ended.
    pub status: Status,
    /// Zero.
    pub reserved: [u8; 7],
    /// The value that [`Status`] describes, else zero.
    pub value: u64,
}

impl WordRequest {
    /// A request without a new or an expected value.
    pub fn new(op: Op, rank: u32, key: u64) -> WordRequest {
        WordRequest { op, reserved: [0; 3], rank, key, value: 0, expected: 0 }
    }
}

impl WordResponse {
    /// A response with this status and value.
    #[inline]
    pub fn new(status: Status, value: u64) -> WordResponse {
        WordResponse { status, reserved: [0; 7], value }
    }
}

const _: () = assert!(size_of::<WordRequest>() == 32 && size_of::<WordResponse>() == 16);
