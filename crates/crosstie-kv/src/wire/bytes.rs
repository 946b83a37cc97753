//! Requests and responses for byte-string keys, and the two requests about a node itself.
//!
//! ```text
//! request   0 kind u8 | 1 zero [3] | 4 rank u32 | 8 daemon u32 | 12 key_len u32 | 16 expected_len u32 | 20 value_len u32
//!          24 key | expected | value
//! response  0 status u8 | 1 zero [3] | 4 value_len u32
//!           8 value
//! ```
//!
//! Numbers are little-endian. A message has exactly the length that its header states. Every message has one encoding: what
//! [`BytesRequest::decode`] accepts, [`BytesRequest::encode`] encodes to the same bytes. Decoding checks all bytes before it
//! returns; whatever they are, the result is a message or a [`MessageError`].
//!
//! ```
//! use crosstie_kv::wire::{BytesOp, BytesRequest};
//! let mut bytes = Vec::new();
//! let request = BytesRequest { rank: 1, daemon: 0, op: BytesOp::Put { key: b"name", value: b"crosstie" } };
//! request.encode(&mut bytes)?;
//! assert_eq!(BytesRequest::decode(&bytes), Ok(request));
//! # Ok::<(), crosstie_kv::wire::MessageError>(())
//! ```

use crosstie::group;
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::Status;

/// The longest key, in bytes.
pub const MAX_KEY: usize = 64 << 10;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 1 << 20;
/// The longest encoded request, in bytes: the longest message that ipc carries. Only a compare-and-swap, which has two
/// values, can reach it.
pub const MAX_REQUEST: usize = crosstie::ipc::MAX_MESSAGE;
/// The longest encoded response, in bytes.
pub const MAX_RESPONSE: usize = size_of::<ResponseHeader>() + MAX_VALUE;

/// A request, borrowed from the bytes it was decoded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BytesRequest<'a> {
    /// The node that shall execute it.
    pub rank: u32,
    /// The daemon of that node.
    pub daemon: u32,
    /// The operation.
    pub op: BytesOp<'a>,
}

/// An operation on a byte-string key, or a request about the node itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BytesOp<'a> {
    /// Reads the value of `key`.
    Get {
        /// The key.
        key: &'a [u8],
    },
    /// Stores `value` under `key`.
    Put {
        /// The key.
        key: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// Removes `key`.
    Delete {
        /// The key.
        key: &'a [u8],
    },
    /// Stores `value` under `key` if the key does not exist.
    Insert {
        /// The key.
        key: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// Stores `value` under `key` if the current value is `expected`.
    CompareAndSwap {
        /// The key.
        key: &'a [u8],
        /// The value that it must have.
        expected: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// Stores `value` under `key`, unless the key has seen a newer fencing token.
    FencedPut {
        /// The key.
        key: &'a [u8],
        /// The token of the lock that protects the key.
        token: Token<'a>,
        /// Its new value.
        value: &'a [u8],
    },
    /// Removes `key`, unless it has seen a newer fencing token. The key remembers the token.
    FencedDelete {
        /// The key.
        key: &'a [u8],
        /// The token of the lock that protects the key.
        token: Token<'a>,
    },
    /// Lets the key refuse older fencing tokens from now on, without changing its value.
    Fence {
        /// The key.
        key: &'a [u8],
        /// The token of the lock that protects the key.
        token: Token<'a>,
    },
    /// Reads the description of a node. The response's value is a [`NodeInfo`](super::NodeInfo).
    Info,
    /// Reads the statistics of a daemon's shard. The response's value is a [`ShardStats`](crate::store::ShardStats).
    Stats,
}

/// A [fencing token](crosstie::group::Token) as a request carries it: 16 bytes, view and count, little-endian, in the place of the
/// expected value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token<'a>(&'a [u8; group::Token::ENCODED]);

impl<'a> Token<'a> {
    /// The token in these bytes.
    pub fn new(bytes: &'a [u8; group::Token::ENCODED]) -> Token<'a> {
        Token(bytes)
    }

    /// The token.
    pub fn get(self) -> group::Token {
        group::Token::from_bytes(self.0)
    }
}

/// A response, borrowed from the store or from the bytes it was decoded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BytesResponse<'a> {
    /// How the request ended.
    pub status: Status,
    /// The key's value, after a get and with [`Status::Mismatch`]; the newest token with [`Status::Fenced`]. The requests about a node have the value that [`BytesOp`]
    /// says. Else empty.
    pub value: &'a [u8],
}

/// Why bytes are not a valid message, or why a message cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message is shorter than a header.
    #[error("the message has {len} bytes, which is shorter than a header")]
    TooShort {
        /// Its length.
        len: usize,
    },
    /// The header has an undefined kind or status, or a reserved byte that is not zero.
    #[error("invalid header: undefined kind or status, or a reserved byte that is not zero")]
    InvalidHeader,
    /// A key, a value or the whole request is too long.
    #[error("the {field} has {len} bytes; the limit is {limit}")]
    TooLong {
        /// "key", "value", "expected value", or "request" for all of them together.
        field: &'static str,
        /// Its length.
        len: usize,
        /// Its limit.
        limit: usize,
    },
    /// The request has a key or a value that its kind does not have.
    #[error("the request has a key or a value that its kind does not allow")]
    UnexpectedField,
    /// A fencing token does not have 16 bytes.
    #[error("the fencing token has {len} bytes instead of 16")]
    InvalidToken {
        /// Its length.
        len: usize,
    },
    /// The lengths in the header do not add up to the length of the message.
    #[error("the message has {actual} bytes, but its header states {stated}")]
    LengthMismatch {
        /// The sum of the header's lengths.
        stated: usize,
        /// The actual length.
        actual: usize,
    },
}

impl<'a> BytesRequest<'a> {
    /// Decodes the request in `bytes`, which must hold nothing else.
    pub fn decode(bytes: &'a [u8]) -> Result<BytesRequest<'a>, MessageError> {
        let (header, body) = split_header::<RequestHeader>(bytes)?;
        let [key_len, expected_len, value_len] =
            [header.key_len, header.expected_len, header.value_len].map(|len| len as usize);
        check_lengths(key_len, expected_len, value_len)?;
        if header.reserved != [0; 3] {
            return Err(MessageError::InvalidHeader);
        }
        if body.len() != key_len + expected_len + value_len {
            let stated = size_of::<RequestHeader>() + key_len + expected_len + value_len;
            return Err(MessageError::LengthMismatch { stated, actual: bytes.len() });
        }
        let (key, rest) = body.split_at(key_len);
        let (expected, value) = rest.split_at(expected_len);
        let op = match header.kind {
            Kind::Get => BytesOp::Get { key },
            Kind::Put => BytesOp::Put { key, value },
            Kind::Delete => BytesOp::Delete { key },
            Kind::Insert => BytesOp::Insert { key, value },
            Kind::CompareAndSwap => BytesOp::CompareAndSwap { key, expected, value },
            Kind::FencedPut => BytesOp::FencedPut { key, token: token_of(expected)?, value },
            Kind::FencedDelete => BytesOp::FencedDelete { key, token: token_of(expected)? },
            Kind::Fence => BytesOp::Fence { key, token: token_of(expected)? },
            Kind::Info => BytesOp::Info,
            Kind::Stats => BytesOp::Stats,
        };
        let request = BytesRequest { rank: header.rank, daemon: header.daemon, op };
        let (_, fields) = request.op.fields();
        // `op` does not hold a field that its kind does not have: then the lengths differ.
        if fields.iter().map(|field| field.len()).sum::<usize>() != body.len() {
            return Err(MessageError::UnexpectedField);
        }
        Ok(request)
    }

    /// Replaces the contents of `to` with the encoded request.
    pub fn encode(&self, to: &mut Vec<u8>) -> Result<(), MessageError> {
        to.clear();
        let (header, [key, expected, value]) = self.encode_header()?;
        to.reserve(header.len() + key.len() + expected.len() + value.len());
        for field in [&header, key, expected, value] {
            to.extend_from_slice(field);
        }
        Ok(())
    }

    /// Encodes without copying key and values: returns the header, and the fields that follow it in this order.
    pub(crate) fn encode_header(&self) -> Result<([u8; REQUEST_HEADER], [&'a [u8]; 3]), MessageError> {
        let (kind, [key, expected, value]) = self.op.fields();
        check_lengths(key.len(), expected.len(), value.len())?;
        let [key_len, expected_len, value_len] = [key, expected, value].map(|field| field.len() as u32);
        let (rank, daemon, reserved) = (self.rank, self.daemon, [0; 3]);
        let header = RequestHeader { kind, reserved, rank, daemon, key_len, expected_len, value_len };
        Ok((zerocopy::transmute!(header), [key, expected, value]))
    }
}

impl<'a> BytesOp<'a> {
    /// The key. `None` for the requests about a node.
    pub fn key(&self) -> Option<&'a [u8]> {
        match *self {
            BytesOp::Get { key }
            | BytesOp::Put { key, .. }
            | BytesOp::Delete { key }
            | BytesOp::Insert { key, .. }
            | BytesOp::CompareAndSwap { key, .. }
            | BytesOp::FencedPut { key, .. }
            | BytesOp::FencedDelete { key, .. }
            | BytesOp::Fence { key, .. } => Some(key),
            BytesOp::Info | BytesOp::Stats => None,
        }
    }

    /// The kind, and the fields in the order of the message: key, expected value, value.
    fn fields(&self) -> (Kind, [&'a [u8]; 3]) {
        match *self {
            BytesOp::Get { key } => (Kind::Get, [key, &[], &[]]),
            BytesOp::Put { key, value } => (Kind::Put, [key, &[], value]),
            BytesOp::Delete { key } => (Kind::Delete, [key, &[], &[]]),
            BytesOp::Insert { key, value } => (Kind::Insert, [key, &[], value]),
            BytesOp::CompareAndSwap { key, expected, value } => {
                (Kind::CompareAndSwap, [key, expected, value])
            }
            BytesOp::FencedPut { key, token, value } => (Kind::FencedPut, [key, token.0, value]),
            BytesOp::FencedDelete { key, token } => (Kind::FencedDelete, [key, token.0, &[]]),
            BytesOp::Fence { key, token } => (Kind::Fence, [key, token.0, &[]]),
            BytesOp::Info => (Kind::Info, [&[], &[], &[]]),
            BytesOp::Stats => (Kind::Stats, [&[], &[], &[]]),
        }
    }
}

impl<'a> BytesResponse<'a> {
    /// A response without a value.
    pub fn new(status: Status) -> BytesResponse<'static> {
        BytesResponse { status, value: &[] }
    }

    /// Decodes the response in `bytes`, which must hold nothing else.
    pub fn decode(bytes: &'a [u8]) -> Result<BytesResponse<'a>, MessageError> {
        let (header, value) = split_header::<ResponseHeader>(bytes)?;
        check_length("value", header.value_len as usize, MAX_VALUE)?;
        if header.reserved != [0; 3] {
            return Err(MessageError::InvalidHeader);
        }
        if value.len() != header.value_len as usize {
            let stated = size_of::<ResponseHeader>() + header.value_len as usize;
            return Err(MessageError::LengthMismatch { stated, actual: bytes.len() });
        }
        Ok(BytesResponse { status: header.status, value })
    }

    /// Replaces the contents of `to` with the encoded response.
    pub fn encode(&self, to: &mut Vec<u8>) -> Result<(), MessageError> {
        to.clear();
        let header = self.encode_header()?;
        to.reserve(self.encoded_len());
        to.extend_from_slice(&header);
        to.extend_from_slice(self.value);
        Ok(())
    }

    /// Encodes the header alone. The value follows it in the message.
    pub(crate) fn encode_header(&self) -> Result<[u8; RESPONSE_HEADER], MessageError> {
        check_length("value", self.value.len(), MAX_VALUE)?;
        let value_len = self.value.len() as u32;
        Ok(zerocopy::transmute!(ResponseHeader { status: self.status, reserved: [0; 3], value_len }))
    }

    /// The length of the encoded response, in bytes.
    pub fn encoded_len(&self) -> usize {
        size_of::<ResponseHeader>() + self.value.len()
    }
}

/// The first byte of a request. No value is one of [`Op`](super::Op): between nodes, requests for words and for byte strings
/// share a connection, and the first byte tells them apart.
#[derive(Clone, Copy, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(u8)]
enum Kind {
    Get = 17,
    Put = 18,
    Delete = 19,
    Insert = 20,
    CompareAndSwap = 21,
    Info = 22,
    Stats = 23,
    FencedPut = 24,
    FencedDelete = 25,
    Fence = 26,
}

fn token_of(bytes: &[u8]) -> Result<Token<'_>, MessageError> {
    bytes.try_into().map(Token).map_err(|_| MessageError::InvalidToken { len: bytes.len() })
}

#[derive(TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RequestHeader {
    kind: Kind,
    reserved: [u8; 3],
    rank: u32,
    daemon: u32,
    key_len: u32,
    expected_len: u32,
    value_len: u32,
}

#[derive(TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ResponseHeader {
    status: Status,
    reserved: [u8; 3],
    value_len: u32,
}

const _: () = assert!(cfg!(target_endian = "little"), "messages are little-endian and are read in place");
const _: () =
    assert!(MAX_REQUEST >= size_of::<RequestHeader>() + MAX_KEY + MAX_VALUE && MAX_RESPONSE <= MAX_REQUEST);
pub(crate) const REQUEST_HEADER: usize = 24;
pub(crate) const RESPONSE_HEADER: usize = 8;

fn split_header<H: TryFromBytes + KnownLayout>(bytes: &[u8]) -> Result<(H, &[u8]), MessageError> {
    let (header, rest) =
        bytes.split_at_checked(size_of::<H>()).ok_or(MessageError::TooShort { len: bytes.len() })?;
    Ok((H::try_read_from_bytes(header).map_err(|_| MessageError::InvalidHeader)?, rest))
}

fn check_lengths(key: usize, expected: usize, value: usize) -> Result<(), MessageError> {
    check_length("key", key, MAX_KEY)?;
    check_length("expected value", expected, MAX_VALUE)?;
    check_length("value", value, MAX_VALUE)?;
    check_length("request", size_of::<RequestHeader>() + key + expected + value, MAX_REQUEST)
}

fn check_length(field: &'static str, len: usize, limit: usize) -> Result<(), MessageError> {
    if len > limit { Err(MessageError::TooLong { field, len, limit }) } else { Ok(()) }
}

#[cfg(test)]
#[path = "bytes_tests.rs"]
mod tests;
