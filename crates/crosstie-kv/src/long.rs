//! Requests for byte strings, and the two that ask a node about itself.
//!
//! ```text
//! request   0 kind u8 | 1 zero [3] | 4 rank u32 | 8 daemon u32 | 12 key_len u32 | 16 expected_len u32 | 20 value_len u32
//!          24 key | expected | value
//! response  0 status u8 | 1 zero [3] | 4 value_len u32
//!           8 value
//! ```
//!
//! Numbers are little-endian. A message has exactly the length that its header says, and every message has one form:
//! what [`Request::decode`] accepts, [`Request::encode`] makes again byte for byte. Bytes from another process are checked
//! whole before anything is made of them; whatever they are, the answer is a message or a [`Malformed`].
//!
//! ```
//! use crosstie_kv::long::{Call, Request};
//! let mut bytes = Vec::new();
//! let request = Request { rank: 1, daemon: 0, call: Call::Put { key: b"name", value: b"crosstie" } };
//! request.encode(&mut bytes)?;
//! assert_eq!(Request::decode(&bytes), Ok(request));
//! # Ok::<(), crosstie_kv::long::Malformed>(())
//! ```

use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes};

use crate::message::Status;

/// Bytes of a key at most.
pub const MAX_KEY: usize = 64 << 10;
/// Bytes of a value at most.
pub const MAX_VALUE: usize = 1 << 20;
/// Bytes of an encoded request at most: what shared memory carries. Only a compare-and-swap, with its two values, can meet it.
pub const MAX_REQUEST: usize = crosstie::ipc::MAX_MESSAGE;
/// Bytes of an encoded response at most.
pub const MAX_RESPONSE: usize = size_of::<ResponseHeader>() + MAX_VALUE;

/// A request, borrowed from the bytes it came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The node it is for.
    pub rank: u32,
    /// The daemon of that node.
    pub daemon: u32,
    /// What to do.
    pub call: Call<'a>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// Asks for the value of `key`.
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
    /// Stores `value` under `key` if there is none yet.
    Insert {
        /// The key.
        key: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// Stores `value` under `key` if its value is `expected`.
    CompareAndSwap {
        /// The key.
        key: &'a [u8],
        /// The value it must have.
        expected: &'a [u8],
        /// Its new value.
        value: &'a [u8],
    },
    /// Asks a node what it is. The answer's value is an [`Info`].
    Info,
    /// Asks a daemon for its shard's figures. The answer's value is a [`ShardStats`](crate::store::ShardStats).
    Stats,
}

/// A response, borrowed from the store or from the bytes it came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response<'a> {
    /// How it ended.
    pub status: Status,
    /// After a get, and where the status is [`Status::Mismatch`], the key's value; else what the call says; else nothing.
    pub value: &'a [u8],
}

/// How requests for other nodes travel. All nodes of a cluster have the same.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, TryFromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(u8)]
pub enum Backend {
    /// By the client's daemon to the daemon that holds the connection.
    Meta = 1,
    /// Straight into the ring of the one daemon that holds all connections.
    #[default]
    Delegation = 2,
}

impl Backend {
    /// The daemon that is connected with `rank`, of `daemons`.
    #[inline]
    pub fn holder(self, rank: u32, daemons: u32) -> u32 {
        match self {
            Backend::Meta => rank % daemons,
            Backend::Delegation => 0,
        }
    }
}

/// What a node is: the answer to [`Call::Info`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Info {
    /// [`Info::VERSION`]. A client of another version must not go on.
    pub version: u32,
    /// The node's rank.
    pub rank: u32,
    /// Nodes of the cluster.
    pub nodes: u32,
    /// Daemons of each node.
    pub daemons: u32,
    /// Requests that a client may have on their way to one daemon.
    pub queue_depth: u32,
    /// Clients that may be attached at a time.
    pub max_clients: u32,
    /// [`MAX_KEY`] of that node.
    pub max_key: u32,
    /// [`MAX_VALUE`] of that node.
    pub max_value: u32,
    /// Differs from one start of the node to the next.
    pub incarnation: u64,
    /// Bytes that each of its shards may take.
    pub memory_limit: u64,
    /// How requests for other nodes travel.
    pub backend: Backend,
    /// Zero.
    pub reserved: [u8; 3],
    /// How many clients have asked before: they take turns in choosing a daemon for requests that any can take.
    pub turn: u32,
}

/// Why bytes are no message, or why a message cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Shorter than a header.
    #[error("a message of {len} bytes is shorter than a header")]
    Short {
        /// Its length.
        len: usize,
    },
    /// The header has a tag that is none, or something where zero must be.
    #[error("the header is none: a tag or a reserved byte has a value that is not defined")]
    Header,
    /// A key, or a value, is too long.
    #[error("a {part} of {len} bytes; it may have {limit} at most")]
    TooLong {
        /// "key", "value", "expected value", or "request" for all of it together.
        part: &'static str,
        /// Its length.
        len: usize,
        /// Its limit.
        limit: usize,
    },
    /// The request has a part that its kind does not have.
    #[error("the request has a key or a value that its kind does not have")]
    Superfluous,
    /// The header's lengths do not add up to the length of the message.
    #[error("a message of {actual} bytes whose header says {stated}")]
    Length {
        /// The sum of the header's lengths.
        stated: usize,
        /// The bytes there are.
        actual: usize,
    },
}

impl<'a> Request<'a> {
    /// The request in `bytes`, which must hold nothing else.
    pub fn decode(bytes: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let (header, body) = split_header::<RequestHeader>(bytes)?;
        let [key_len, expected_len, value_len] =
            [header.key_len, header.expected_len, header.value_len].map(|len| len as usize);
        check_lengths(key_len, expected_len, value_len)?;
        if header.reserved != [0; 3] {
            return Err(Malformed::Header);
        }
        if body.len() != key_len + expected_len + value_len {
            let stated = size_of::<RequestHeader>() + key_len + expected_len + value_len;
            return Err(Malformed::Length { stated, actual: bytes.len() });
        }
        let (key, rest) = body.split_at(key_len);
        let (expected, value) = rest.split_at(expected_len);
        let call = match header.kind {
            Kind::Get => Call::Get { key },
            Kind::Put => Call::Put { key, value },
            Kind::Delete => Call::Delete { key },
            Kind::Insert => Call::Insert { key, value },
            Kind::CompareAndSwap => Call::CompareAndSwap { key, expected, value },
            Kind::Info => Call::Info,
            Kind::Stats => Call::Stats,
        };
        let request = Request { rank: header.rank, daemon: header.daemon, call };
        let (_, parts) = request.call.parts();
        // A part that the kind does not have was dropped just now.
        if parts.iter().map(|part| part.len()).sum::<usize>() != body.len() {
            return Err(Malformed::Superfluous);
        }
        Ok(request)
    }

    /// Replaces what is in `to` by the request's bytes.
    pub fn encode(&self, to: &mut Vec<u8>) -> Result<(), Malformed> {
        to.clear();
        let (header, [key, expected, value]) = self.parts()?;
        to.reserve(header.len() + key.len() + expected.len() + value.len());
        for part in [&header, key, expected, value] {
            to.extend_from_slice(part);
        }
        Ok(())
    }

    /// What [`encode`](Request::encode) makes, without copying key and values: the header, and what comes after it.
    pub(crate) fn parts(&self) -> Result<([u8; REQUEST_HEADER], [&'a [u8]; 3]), Malformed> {
        let (kind, [key, expected, value]) = self.call.parts();
        check_lengths(key.len(), expected.len(), value.len())?;
        let [key_len, expected_len, value_len] = [key, expected, value].map(|part| part.len() as u32);
        let (rank, daemon, reserved) = (self.rank, self.daemon, [0; 3]);
        let header = RequestHeader { kind, reserved, rank, daemon, key_len, expected_len, value_len };
        Ok((zerocopy::transmute!(header), [key, expected, value]))
    }
}

impl<'a> Call<'a> {
    /// The key, where there is one.
    pub fn key(&self) -> Option<&'a [u8]> {
        match *self {
            Call::Get { key }
            | Call::Put { key, .. }
            | Call::Delete { key }
            | Call::Insert { key, .. }
            | Call::CompareAndSwap { key, .. } => Some(key),
            Call::Info | Call::Stats => None,
        }
    }

    /// Kind, and key, expected value, value.
    fn parts(&self) -> (Kind, [&'a [u8]; 3]) {
        match *self {
            Call::Get { key } => (Kind::Get, [key, &[], &[]]),
            Call::Put { key, value } => (Kind::Put, [key, &[], value]),
            Call::Delete { key } => (Kind::Delete, [key, &[], &[]]),
            Call::Insert { key, value } => (Kind::Insert, [key, &[], value]),
            Call::CompareAndSwap { key, expected, value } => (Kind::CompareAndSwap, [key, expected, value]),
            Call::Info => (Kind::Info, [&[], &[], &[]]),
            Call::Stats => (Kind::Stats, [&[], &[], &[]]),
        }
    }
}

impl<'a> Response<'a> {
    /// A response without a value.
    pub fn new(status: Status) -> Response<'static> {
        Response { status, value: &[] }
    }

    /// The response in `bytes`, which must hold nothing else.
    pub fn decode(bytes: &'a [u8]) -> Result<Response<'a>, Malformed> {
        let (header, value) = split_header::<ResponseHeader>(bytes)?;
        check_length("value", header.value_len as usize, MAX_VALUE)?;
        if header.reserved != [0; 3] {
            return Err(Malformed::Header);
        }
        if value.len() != header.value_len as usize {
            let stated = size_of::<ResponseHeader>() + header.value_len as usize;
            return Err(Malformed::Length { stated, actual: bytes.len() });
        }
        Ok(Response { status: header.status, value })
    }

    /// Replaces what is in `to` by the response's bytes.
    pub fn encode(&self, to: &mut Vec<u8>) -> Result<(), Malformed> {
        to.clear();
        let header = self.header()?;
        to.reserve(self.encoded_len());
        to.extend_from_slice(&header);
        to.extend_from_slice(self.value);
        Ok(())
    }

    /// What [`encode`](Response::encode) makes, up to the value.
    pub(crate) fn header(&self) -> Result<[u8; RESPONSE_HEADER], Malformed> {
        check_length("value", self.value.len(), MAX_VALUE)?;
        let value_len = self.value.len() as u32;
        Ok(zerocopy::transmute!(ResponseHeader { status: self.status, reserved: [0; 3], value_len }))
    }

    /// Bytes that [`encode`](Response::encode) makes.
    pub fn encoded_len(&self) -> usize {
        size_of::<ResponseHeader>() + self.value.len()
    }
}

impl Info {
    /// Changes when a client of before could no longer speak to a node of today.
    pub const VERSION: u32 = 1;

    /// The answer's value as what it is, if it is one of this version.
    pub fn decode(value: &[u8]) -> Option<Info> {
        Info::try_read_from_bytes(value).ok().filter(|info| info.version == Info::VERSION)
    }
}

/// No number is one of [`Op`](crate::message::Op): between nodes both kinds of request travel on one connection, and the first
/// byte tells them apart.
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

const _: () = assert!(cfg!(target_endian = "little"), "messages are read as they lie in memory");
const _: () =
    assert!(MAX_REQUEST >= size_of::<RequestHeader>() + MAX_KEY + MAX_VALUE && MAX_RESPONSE <= MAX_REQUEST);
pub(crate) const REQUEST_HEADER: usize = 24;
pub(crate) const RESPONSE_HEADER: usize = 8;
const _: () = assert!(size_of::<Info>() == 56);

fn split_header<H: TryFromBytes + KnownLayout>(bytes: &[u8]) -> Result<(H, &[u8]), Malformed> {
    let (header, rest) =
        bytes.split_at_checked(size_of::<H>()).ok_or(Malformed::Short { len: bytes.len() })?;
    Ok((H::try_read_from_bytes(header).map_err(|_| Malformed::Header)?, rest))
}

fn check_lengths(key: usize, expected: usize, value: usize) -> Result<(), Malformed> {
    check_length("key", key, MAX_KEY)?;
    check_length("expected value", expected, MAX_VALUE)?;
    check_length("value", value, MAX_VALUE)?;
    check_length("request", size_of::<RequestHeader>() + key + expected + value, MAX_REQUEST)
}

fn check_length(part: &'static str, len: usize, limit: usize) -> Result<(), Malformed> {
    if len > limit { Err(Malformed::TooLong { part, len, limit }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..40)
    }

    fn call<'a>(kind: u8, key: &'a [u8], expected: &'a [u8], value: &'a [u8]) -> Call<'a> {
        match kind {
            17 => Call::Get { key },
            18 => Call::Put { key, value },
            19 => Call::Delete { key },
            20 => Call::Insert { key, value },
            21 => Call::CompareAndSwap { key, expected, value },
            22 => Call::Info,
            _ => Call::Stats,
        }
    }

    /// Bytes that begin nearly as messages do, so that more than the first check is reached.
    fn nearly() -> impl Strategy<Value = Vec<u8>> {
        let small = || prop_oneof![3 => 0u32..20, 1 => any::<u32>()];
        (16u8..25, any::<[bool; 3]>(), any::<u64>(), [small(), small(), small()], bytes()).prop_map(
            |(kind, odd, place, lengths, body)| {
                let mut bytes = vec![kind];
                bytes.extend(odd.map(|odd| u8::from(odd && kind == 19)));
                bytes.extend(place.to_le_bytes());
                lengths.iter().for_each(|len| bytes.extend(len.to_le_bytes()));
                bytes.extend(body);
                bytes
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            place in any::<[u32; 2]>(), kind in 17u8..24, key in bytes(), expected in bytes(), value in bytes(),
        ) {
            let request = Request { rank: place[0], daemon: place[1], call: call(kind, &key, &expected, &value) };
            let mut encoded = vec![7; 3];
            request.encode(&mut encoded).unwrap();
            prop_assert_eq!(Request::decode(&encoded), Ok(request));
            for len in 0..encoded.len() {
                prop_assert!(Request::decode(&encoded[..len]).is_err());
            }
            encoded.push(0);
            prop_assert!(Request::decode(&encoded).is_err());

            let response = Response { status: Status::Mismatch, value: &value };
            response.encode(&mut encoded).unwrap();
            prop_assert_eq!(encoded.len(), response.encoded_len());
            prop_assert_eq!(Response::decode(&encoded), Ok(response));
            encoded.push(0);
            prop_assert!(Response::decode(&encoded).is_err());
        }

        /// Arbitrary bytes are refused, or are the one form of a message.
        #[test]
        fn any_bytes_are_refused_or_canonical(
            bytes in prop_oneof![prop::collection::vec(any::<u8>(), 0..80), nearly()],
        ) {
            let mut again = Vec::new();
            if let Ok(request) = Request::decode(&bytes) {
                request.encode(&mut again).unwrap();
                prop_assert_eq!(&again, &bytes);
            }
            if let Ok(response) = Response::decode(&bytes) {
                response.encode(&mut again).unwrap();
                prop_assert_eq!(&again, &bytes);
            }
            prop_assert!(Info::decode(&bytes).is_none_or(|info| info.as_bytes() == bytes));
        }
    }

    /// Every message with one byte changed, in every way.
    #[test]
    fn one_wrong_byte_is_refused_or_another_message() {
        let (mut bytes, mut again) = (Vec::new(), Vec::new());
        for kind in 17..24 {
            let call = call(kind, b"a key", b"expected", b"value");
            Request { rank: 1, daemon: 2, call }.encode(&mut bytes).unwrap();
            for (at, byte) in (0..bytes.len()).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
                let right = std::mem::replace(&mut bytes[at], byte);
                if let Ok(request) = Request::decode(&bytes) {
                    request.encode(&mut again).unwrap();
                    assert_eq!(again, bytes);
                }
                bytes[at] = right;
            }
        }
        Response { status: Status::Done, value: b"value" }.encode(&mut bytes).unwrap();
        for (at, byte) in (0..bytes.len()).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
            let right = std::mem::replace(&mut bytes[at], byte);
            if let Ok(response) = Response::decode(&bytes) {
                response.encode(&mut again).unwrap();
                assert_eq!(again, bytes);
            }
            bytes[at] = right;
        }
    }

    #[test]
    fn limits_hold_in_both_directions() {
        let (key, value) = (vec![0; MAX_KEY + 1], vec![1; MAX_VALUE + 1]);
        let mut encoded = Vec::new();
        let at = |call| Request { rank: 0, daemon: 0, call };
        let full = Call::Put { key: &key[1..], value: &value[1..] };
        at(full).encode(&mut encoded).unwrap();
        assert_eq!(Request::decode(&encoded).unwrap().call, full);
        let rest = MAX_REQUEST - size_of::<RequestHeader>() - 1 - MAX_VALUE;
        let full = Call::CompareAndSwap { key: b"k", expected: &value[1..], value: &value[..rest] };
        at(full).encode(&mut encoded).unwrap();
        assert_eq!(encoded.len(), MAX_REQUEST);
        assert_eq!(Request::decode(&encoded).unwrap().call, full);
        let beyond = Call::CompareAndSwap { key: b"ke", expected: &value[1..], value: &value[..rest] };
        assert!(matches!(at(beyond).encode(&mut encoded), Err(Malformed::TooLong { part: "request", .. })));
        let longest = Response { status: Status::Done, value: &value[1..] };
        longest.encode(&mut encoded).unwrap();
        assert_eq!(encoded.len(), MAX_RESPONSE);

        for call in [
            Call::Get { key: &key },
            Call::Put { key: b"k", value: &value },
            Call::CompareAndSwap { key: b"k", expected: &value, value: b"" },
        ] {
            assert!(matches!(at(call).encode(&mut encoded), Err(Malformed::TooLong { .. })), "{call:?}");
        }
        // The same, said by a peer.
        at(Call::Get { key: b"" }).encode(&mut encoded).unwrap();
        encoded.extend_from_slice(&key);
        encoded[12..16].copy_from_slice(&(key.len() as u32).to_le_bytes());
        assert_eq!(
            Request::decode(&encoded),
            Err(Malformed::TooLong { part: "key", len: MAX_KEY + 1, limit: MAX_KEY })
        );
    }

    #[test]
    fn a_get_with_a_value_is_superfluous() {
        let mut encoded = Vec::new();
        let put = Request { rank: 0, daemon: 0, call: Call::Put { key: b"k", value: b"v" } };
        put.encode(&mut encoded).unwrap();
        for kind in [17, 19, 22, 23] {
            encoded[0] = kind;
            assert_eq!(Request::decode(&encoded), Err(Malformed::Superfluous));
        }
        encoded[0] = 24;
        assert_eq!(Request::decode(&encoded), Err(Malformed::Header));
    }
}
