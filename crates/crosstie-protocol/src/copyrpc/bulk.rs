//! Descriptors of bulk payloads: payloads that are too long for a ring.
//!
//! A message with [`BULK_FLAG`](super::wire::BULK_FLAG) carries a descriptor instead of its payload.
//! - The payload of a bulk request is in the caller's memory. The descriptor says where, and the callee READs it.
//! - A bulk request also names a response buffer in the caller's memory. The callee WRITEs the response there, and then sends
//!   a message with its length.
//!
//! `docs/wire-format.md` draws the descriptors.
//!
//! Promise: decoding is total. Any bytes decode to a descriptor that a correct peer could have sent, or to a [`Violation`].
//! Whether an address and its key are valid is checked by the device.

use super::violation::Violation;

/// The longest bulk payload: 1 GiB.
pub const MAX_BULK: u32 = 1 << 30;
/// Bytes of the descriptor in a bulk request. If the request payload itself is short, it follows the descriptor.
pub const BULK_REQUEST_SIZE: usize = 32;
/// Bytes of a bulk response message: the length of what was written to the response buffer, or [`BULK_NO_MEMORY`].
pub const BULK_RESPONSE_SIZE: usize = 4;

/// The bulk response to a request that the callee did not READ, because it has no memory for it now.
pub const BULK_NO_MEMORY: u32 = 0;

/// What a bulk response says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkResponse {
    /// So many bytes were written to the response buffer: at least one.
    Written(u32),
    /// The callee has no memory for the request, and did not hand it out.
    NoMemory,
}

/// Memory of the caller that the callee may access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkMemory {
    /// Remote address.
    pub addr: u64,
    /// Bytes, from 1 to [`MAX_BULK`].
    pub len: u32,
    /// Remote key of that memory.
    pub rkey: u32,
}

/// The descriptor of a bulk request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkRequest {
    /// Where the request payload is. `None`: it follows the descriptor in the ring.
    pub request: Option<BulkMemory>,
    /// Where a response goes that is too long for the ring. `None`: the response must fit into the ring, and into what the call allows there.
    pub response_buffer: Option<BulkMemory>,
}

impl BulkRequest {
    /// Encodes the descriptor.
    pub fn encode(&self) -> [u8; BULK_REQUEST_SIZE] {
        let mut bytes = [0; BULK_REQUEST_SIZE];
        for (memory, at) in [(&self.request, 0), (&self.response_buffer, 16)] {
            if let Some(memory) = memory {
                bytes[at..at + 8].copy_from_slice(&memory.addr.to_le_bytes());
                bytes[at + 8..at + 12].copy_from_slice(&memory.len.to_le_bytes());
                bytes[at + 12..at + 16].copy_from_slice(&memory.rkey.to_le_bytes());
            }
        }
        bytes
    }

    /// Decodes the descriptor at the start of a bulk request of `payload_len` bytes. `limit` is the longest bulk payload that
    /// this side has announced to accept; zero if it accepts none.
    pub fn decode(
        bytes: &[u8; BULK_REQUEST_SIZE],
        payload_len: usize,
        limit: u32,
    ) -> Result<BulkRequest, Violation> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let memory = |at: usize| {
            let addr = u64::from(word(at)) | u64::from(word(at + 4)) << 32;
            let (len, rkey) = (word(at + 8), word(at + 12));
            if len == 0 {
                return if addr == 0 && rkey == 0 { Ok(None) } else { Err(Violation::BulkMalformed) };
            }
            if len > limit.min(MAX_BULK) {
                return Err(Violation::BulkTooLong { len, limit: limit.min(MAX_BULK) });
            }
            if addr.checked_add(u64::from(len)).is_none() {
                return Err(Violation::BulkMalformed);
            }
            Ok(Some(BulkMemory { addr, len, rkey }))
        };
        let bulk = BulkRequest { request: memory(0)?, response_buffer: memory(16)? };
        let fits = match bulk.request {
            Some(_) => payload_len == BULK_REQUEST_SIZE,
            None => payload_len >= BULK_REQUEST_SIZE && bulk.response_buffer.is_some(),
        };
        if fits { Ok(bulk) } else { Err(Violation::BulkMalformed) }
    }
}

/// Decodes a bulk response of `payload_len` bytes. `response_buffer` is the size of the buffer that the call named, if it named
/// one; `is_request_bulk` says whether the call had its request in memory, so that the callee needed memory for it.
pub fn decode_bulk_response(
    bytes: &[u8; BULK_RESPONSE_SIZE],
    payload_len: usize,
    response_buffer: Option<u32>,
    is_request_bulk: bool,
) -> Result<BulkResponse, Violation> {
    let len = u32::from_le_bytes(*bytes);
    if payload_len == BULK_RESPONSE_SIZE && len == BULK_NO_MEMORY && is_request_bulk {
        return Ok(BulkResponse::NoMemory);
    }
    let Some(limit) = response_buffer else { return Err(Violation::BulkNotRequested) };
    if payload_len != BULK_RESPONSE_SIZE || len == BULK_NO_MEMORY {
        return Err(Violation::BulkMalformed);
    }
    if len > limit {
        return Err(Violation::BulkTooLong { len, limit });
    }
    Ok(BulkResponse::Written(len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMORY: BulkMemory = BulkMemory { addr: 0x0102_0304_0506_0708, len: 0x1_0000, rkey: 9 };

    #[test]
    fn descriptor_layout_does_not_change() {
        let bulk = BulkRequest { request: Some(MEMORY), response_buffer: None };
        let bytes = bulk.encode();
        assert_eq!(bytes[..16], [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 0, 9, 0, 0, 0]);
        assert_eq!(bytes[16..], [0; 16]);
        assert_eq!(BulkRequest::decode(&bytes, 32, MAX_BULK), Ok(bulk));
    }

    #[test]
    fn invalid_descriptors_are_violations() {
        let both = BulkRequest { request: Some(MEMORY), response_buffer: Some(MEMORY) }.encode();
        let response_buffer = BulkRequest { request: None, response_buffer: Some(MEMORY) }.encode();
        let malformed = Err(Violation::BulkMalformed);
        assert!(BulkRequest::decode(&both, 32, MAX_BULK).is_ok());
        assert!(BulkRequest::decode(&response_buffer, 32, MAX_BULK).is_ok());
        assert!(BulkRequest::decode(&response_buffer, 99, MAX_BULK).is_ok(), "the request payload follows");
        assert_eq!(
            BulkRequest::decode(&both, 33, MAX_BULK),
            malformed,
            "bytes after a descriptor that names request memory"
        );
        assert_eq!(
            BulkRequest::decode(&[0; 32], 32, MAX_BULK),
            malformed,
            "neither request memory nor response buffer"
        );
        assert_eq!(
            BulkRequest::decode(&both, 32, 0xffff),
            Err(Violation::BulkTooLong { len: 0x1_0000, limit: 0xffff })
        );
        assert_eq!(
            BulkRequest::decode(&response_buffer, 32, 0),
            Err(Violation::BulkTooLong { len: 0x1_0000, limit: 0 })
        );
        let with = |at: usize, value: u8| {
            let mut bytes = both;
            bytes[at] = value;
            BulkRequest::decode(&bytes, 32, u32::MAX)
        };
        assert_eq!(with(11, 0x41), Err(Violation::BulkTooLong { len: 0x4101_0000, limit: MAX_BULK }));
        assert_eq!(with(10, 0), malformed, "an address with length zero");
        let far = BulkMemory { addr: u64::MAX - 5, ..MEMORY };
        let far = BulkRequest { request: Some(far), response_buffer: None }.encode();
        assert_eq!(
            BulkRequest::decode(&far, 32, MAX_BULK),
            malformed,
            "the range wraps around the address space"
        );
    }

    #[test]
    fn bulk_response_length_is_checked_against_the_response_buffer() {
        let five = 5u32.to_le_bytes();
        for is_request_bulk in [false, true] {
            let decode =
                |bytes: &[u8; 4], len, buffer| decode_bulk_response(bytes, len, buffer, is_request_bulk);
            assert_eq!(decode(&five, 4, Some(5)), Ok(BulkResponse::Written(5)));
            assert_eq!(decode(&five, 4, Some(4)), Err(Violation::BulkTooLong { len: 5, limit: 4 }));
            assert_eq!(decode(&five, 4, None), Err(Violation::BulkNotRequested));
            assert_eq!(decode(&five, 5, Some(5)), Err(Violation::BulkMalformed));
        }
    }

    #[test]
    fn only_a_request_in_memory_can_be_refused_for_lack_of_memory() {
        let refusal = BULK_NO_MEMORY.to_le_bytes();
        assert_eq!(decode_bulk_response(&refusal, 4, Some(5), true), Ok(BulkResponse::NoMemory));
        assert_eq!(decode_bulk_response(&refusal, 4, None, true), Ok(BulkResponse::NoMemory));
        assert_eq!(decode_bulk_response(&refusal, 4, Some(5), false), Err(Violation::BulkMalformed));
        assert_eq!(decode_bulk_response(&refusal, 4, None, false), Err(Violation::BulkNotRequested));
        assert_eq!(decode_bulk_response(&refusal, 3, Some(5), true), Err(Violation::BulkMalformed));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_descriptor_or_a_violation(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 32),
                proptest::collection::vec(prop_oneof![4 => Just(0u8), 1 => any::<u8>()], 32),
            ],
            payload_len in 0usize..80, limit in prop_oneof![any::<u32>(), Just(0), Just(MAX_BULK)],
        ) {
            let bytes: [u8; 32] = bytes.try_into().unwrap();
            if let Ok(bulk) = BulkRequest::decode(&bytes, payload_len, limit) {
                prop_assert_eq!(bulk.encode(), bytes, "each descriptor has exactly one encoding");
                let parts = [bulk.request, bulk.response_buffer];
                prop_assert!(parts.iter().any(Option::is_some));
                for part in parts.iter().flatten() {
                    prop_assert!(part.len > 0 && part.len <= limit && part.len <= MAX_BULK);
                    prop_assert!(part.addr.checked_add(u64::from(part.len)).is_some());
                }
                prop_assert!(payload_len >= 32);
            }
        }

        #[test]
        fn descriptors_survive_encode_and_decode(
            a in any::<u32>(), len in 1..=MAX_BULK, rkey in any::<u32>(), which in 1..4u8,
        ) {
            let memory = BulkMemory { addr: u64::from(a) << 12, len, rkey };
            let bulk = BulkRequest {
                request: (which & 1 != 0).then_some(memory),
                response_buffer: (which & 2 != 0).then_some(memory),
            };
            prop_assert_eq!(BulkRequest::decode(&bulk.encode(), 32, MAX_BULK), Ok(bulk));
        }
    }
}
