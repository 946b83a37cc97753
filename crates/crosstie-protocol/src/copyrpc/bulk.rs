//! Payloads beyond what a ring carries: what a bulk message says of them.
//!
//! A message with [`BULK_FLAG`](super::wire::BULK_FLAG) carries no payload but says where it is. The bytes of a request lie in
//! memory of the caller, and whoever was called READs them; those of a response are WRITTEN to memory of the caller, which
//! the request has named, before the message that announces them. `docs/wire-format.md` has the pictures.
//!
//! Promise: decoding is total. Any bytes give a descriptor that an honest peer could have sent, or a [`Violation`].
//! Whether the addresses are any, the device finds out.

use super::violation::Violation;

/// The longest bulk payload: 1 GiB.
pub const MAX_BULK: u32 = 1 << 30;
/// Bytes of the descriptor in a bulk request. A request without memory of its own follows behind it.
pub const BULK_REQUEST_SIZE: usize = 32;
/// Bytes of a bulk response: the length of what was written.
pub const BULK_RESPONSE_SIZE: usize = 4;

/// Memory of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkMemory {
    /// Remote address.
    pub addr: u64,
    /// Bytes, from 1 to [`MAX_BULK`].
    pub len: u32,
    /// Key that opens it.
    pub rkey: u32,
}

/// What a bulk request says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkRequest {
    /// Where the request is; `None`: behind the descriptor.
    pub request: Option<BulkMemory>,
    /// Where a response goes that is too long for the ring; `None`: the ring's allowance is all there is.
    pub landing: Option<BulkMemory>,
}

impl BulkRequest {
    /// The descriptor as bytes.
    pub fn encode(&self) -> [u8; BULK_REQUEST_SIZE] {
        let mut bytes = [0; BULK_REQUEST_SIZE];
        for (memory, at) in [(&self.request, 0), (&self.landing, 16)] {
            if let Some(memory) = memory {
                bytes[at..at + 8].copy_from_slice(&memory.addr.to_le_bytes());
                bytes[at + 8..at + 12].copy_from_slice(&memory.len.to_le_bytes());
                bytes[at + 12..at + 16].copy_from_slice(&memory.rkey.to_le_bytes());
            }
        }
        bytes
    }

    /// The descriptor in these bytes, which began a bulk request of `payload_len` bytes. `limit`: the longest bulk payload
    /// that this side has announced to take; zero if none at all.
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
        let bulk = BulkRequest { request: memory(0)?, landing: memory(16)? };
        let fits = match bulk.request {
            Some(_) => payload_len == BULK_REQUEST_SIZE,
            None => payload_len >= BULK_REQUEST_SIZE && bulk.landing.is_some(),
        };
        if fits { Ok(bulk) } else { Err(Violation::BulkMalformed) }
    }
}

/// The length that a bulk response of `payload_len` bytes announces. `landing`: bytes of the memory that its call named, if
/// it did.
pub fn decode_bulk_response(
    bytes: &[u8; BULK_RESPONSE_SIZE],
    payload_len: usize,
    landing: Option<u32>,
) -> Result<u32, Violation> {
    let len = u32::from_le_bytes(*bytes);
    let Some(limit) = landing else { return Err(Violation::BulkUnasked) };
    if payload_len != BULK_RESPONSE_SIZE || len == 0 {
        return Err(Violation::BulkMalformed);
    }
    if len > limit {
        return Err(Violation::BulkTooLong { len, limit });
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MEMORY: BulkMemory = BulkMemory { addr: 0x0102_0304_0506_0708, len: 0x1_0000, rkey: 9 };

    #[test]
    fn the_layout_is_pinned() {
        let bulk = BulkRequest { request: Some(MEMORY), landing: None };
        let bytes = bulk.encode();
        assert_eq!(bytes[..16], [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 0, 9, 0, 0, 0]);
        assert_eq!(bytes[16..], [0; 16]);
        assert_eq!(BulkRequest::decode(&bytes, 32, MAX_BULK), Ok(bulk));
    }

    #[test]
    fn what_no_honest_peer_says_is_refused() {
        let both = BulkRequest { request: Some(MEMORY), landing: Some(MEMORY) }.encode();
        let landing = BulkRequest { request: None, landing: Some(MEMORY) }.encode();
        let malformed = Err(Violation::BulkMalformed);
        assert!(BulkRequest::decode(&both, 32, MAX_BULK).is_ok());
        assert!(BulkRequest::decode(&landing, 32, MAX_BULK).is_ok());
        assert!(BulkRequest::decode(&landing, 99, MAX_BULK).is_ok(), "the request follows");
        assert_eq!(BulkRequest::decode(&both, 33, MAX_BULK), malformed, "something behind a descriptor");
        assert_eq!(BulkRequest::decode(&[0; 32], 32, MAX_BULK), malformed, "nothing bulky about it");
        assert_eq!(
            BulkRequest::decode(&both, 32, 0xffff),
            Err(Violation::BulkTooLong { len: 0x1_0000, limit: 0xffff })
        );
        assert_eq!(
            BulkRequest::decode(&landing, 32, 0),
            Err(Violation::BulkTooLong { len: 0x1_0000, limit: 0 })
        );
        let with = |at: usize, value: u8| {
            let mut bytes = both;
            bytes[at] = value;
            BulkRequest::decode(&bytes, 32, u32::MAX)
        };
        assert_eq!(with(11, 0x41), Err(Violation::BulkTooLong { len: 0x4101_0000, limit: MAX_BULK }));
        assert_eq!(with(10, 0), malformed, "an address of nothing");
        let far = BulkMemory { addr: u64::MAX - 5, ..MEMORY };
        let far = BulkRequest { request: Some(far), landing: None }.encode();
        assert_eq!(BulkRequest::decode(&far, 32, MAX_BULK), malformed, "around the end of memory");
    }

    #[test]
    fn responses_are_measured_against_their_call() {
        let five = 5u32.to_le_bytes();
        assert_eq!(decode_bulk_response(&five, 4, Some(5)), Ok(5));
        assert_eq!(decode_bulk_response(&five, 4, Some(4)), Err(Violation::BulkTooLong { len: 5, limit: 4 }));
        assert_eq!(decode_bulk_response(&five, 4, None), Err(Violation::BulkUnasked));
        assert_eq!(decode_bulk_response(&five, 5, Some(5)), Err(Violation::BulkMalformed));
        assert_eq!(decode_bulk_response(&[0; 4], 4, Some(5)), Err(Violation::BulkMalformed));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_descriptor_or_a_violation(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 32),
                proptest::collection::vec(prop_oneof![4 => Just(0u8), 1 => any::<u8>()], 32),
            ],
            payload_len in 0usize..80, limit in prop_oneof![any::<u32>(), Just(0), Just(MAX_BULK)],
        ) {
            let bytes: [u8; 32] = bytes.try_into().unwrap();
            if let Ok(bulk) = BulkRequest::decode(&bytes, payload_len, limit) {
                prop_assert_eq!(bulk.encode(), bytes, "one form for one meaning");
                let parts = [bulk.request, bulk.landing];
                prop_assert!(parts.iter().any(Option::is_some));
                for part in parts.iter().flatten() {
                    prop_assert!(part.len > 0 && part.len <= limit && part.len <= MAX_BULK);
                    prop_assert!(part.addr.checked_add(u64::from(part.len)).is_some());
                }
                prop_assert!(payload_len >= 32);
            }
        }

        #[test]
        fn descriptors_survive_the_way(
            a in any::<u32>(), len in 1..=MAX_BULK, rkey in any::<u32>(), which in 1..4u8,
        ) {
            let memory = BulkMemory { addr: u64::from(a) << 12, len, rkey };
            let bulk = BulkRequest {
                request: (which & 1 != 0).then_some(memory),
                landing: (which & 2 != 0).then_some(memory),
            };
            prop_assert_eq!(BulkRequest::decode(&bulk.encode(), 32, MAX_BULK), Ok(bulk));
        }
    }
}
