use proptest::prelude::*;

use super::*;
use crate::wire::NodeInfo;

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..40)
}

fn op_of<'a>(kind: u8, key: &'a [u8], expected: &'a [u8], value: &'a [u8]) -> BytesOp<'a> {
    match kind {
        17 => BytesOp::Get { key },
        18 => BytesOp::Put { key, value },
        19 => BytesOp::Delete { key },
        20 => BytesOp::Insert { key, value },
        21 => BytesOp::CompareAndSwap { key, expected, value },
        22 => BytesOp::Info,
        24 => BytesOp::FencedPut { key, token: Token::new(&[8; 16]), value },
        25 => BytesOp::FencedDelete { key, token: Token::new(&[9; 16]) },
        26 => BytesOp::Fence { key, token: Token::new(&[7; 16]) },
        _ => BytesOp::Stats,
    }
}

/// Bytes with a nearly valid header, so that the later checks are reached, too.
fn nearly_valid() -> impl Strategy<Value = Vec<u8>> {
    let small = || prop_oneof![3 => 0u32..20, 1 => any::<u32>()];
    (16u8..28, any::<[bool; 3]>(), any::<u64>(), [small(), small(), small()], bytes()).prop_map(
        |(kind, nonzero, shard, lengths, body)| {
            let mut bytes = vec![kind];
            bytes.extend(nonzero.map(|nonzero| u8::from(nonzero && kind == 19)));
            bytes.extend(shard.to_le_bytes());
            lengths.iter().for_each(|len| bytes.extend(len.to_le_bytes()));
            bytes.extend(body);
            bytes
        },
    )
}

proptest! {
    #[test]
    fn decode_returns_what_was_encoded(
        shard in any::<[u32; 2]>(), kind in 17u8..27, key in bytes(), expected in bytes(), value in bytes(),
    ) {
        let request = BytesRequest { rank: shard[0], daemon: shard[1], op: op_of(kind, &key, &expected, &value) };
        let mut encoded = vec![7; 3];
        request.encode(&mut encoded).unwrap();
        prop_assert_eq!(BytesRequest::decode(&encoded), Ok(request));
        for len in 0..encoded.len() {
            prop_assert!(BytesRequest::decode(&encoded[..len]).is_err());
        }
        encoded.push(0);
        prop_assert!(BytesRequest::decode(&encoded).is_err());

        let response = BytesResponse { status: Status::Mismatch, value: &value };
        response.encode(&mut encoded).unwrap();
        prop_assert_eq!(encoded.len(), response.encoded_len());
        prop_assert_eq!(BytesResponse::decode(&encoded), Ok(response));
        encoded.push(0);
        prop_assert!(BytesResponse::decode(&encoded).is_err());
    }

    /// Arbitrary bytes are rejected, or are the only encoding of a message.
    #[test]
    fn arbitrary_bytes_are_rejected_or_canonical(
        bytes in prop_oneof![prop::collection::vec(any::<u8>(), 0..80), nearly_valid()],
    ) {
        let mut again = Vec::new();
        if let Ok(request) = BytesRequest::decode(&bytes) {
            request.encode(&mut again).unwrap();
            prop_assert_eq!(&again, &bytes);
        }
        if let Ok(response) = BytesResponse::decode(&bytes) {
            response.encode(&mut again).unwrap();
            prop_assert_eq!(&again, &bytes);
        }
        prop_assert!(NodeInfo::decode(&bytes).is_none_or(|info| info.as_bytes() == bytes));
    }
}

/// Every message with one byte replaced by every value.
#[test]
fn message_with_one_changed_byte_is_rejected_or_canonical() {
    let (mut bytes, mut again) = (Vec::new(), Vec::new());
    for kind in 17..27 {
        let op = op_of(kind, b"a key", b"expected", b"value");
        BytesRequest { rank: 1, daemon: 2, op }.encode(&mut bytes).unwrap();
        for (at, byte) in (0..bytes.len()).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
            let original = std::mem::replace(&mut bytes[at], byte);
            if let Ok(request) = BytesRequest::decode(&bytes) {
                request.encode(&mut again).unwrap();
                assert_eq!(again, bytes);
            }
            bytes[at] = original;
        }
    }
    BytesResponse { status: Status::Done, value: b"value" }.encode(&mut bytes).unwrap();
    for (at, byte) in (0..bytes.len()).flat_map(|at| (0..=255).map(move |byte| (at, byte))) {
        let original = std::mem::replace(&mut bytes[at], byte);
        if let Ok(response) = BytesResponse::decode(&bytes) {
            response.encode(&mut again).unwrap();
            assert_eq!(again, bytes);
        }
        bytes[at] = original;
    }
}

#[test]
fn encode_and_decode_enforce_the_length_limits() {
    let (key, value) = (vec![0; MAX_KEY + 1], vec![1; MAX_VALUE + 1]);
    let mut encoded = Vec::new();
    let request = |op| BytesRequest { rank: 0, daemon: 0, op };
    let full = BytesOp::Put { key: &key[1..], value: &value[1..] };
    request(full).encode(&mut encoded).unwrap();
    assert_eq!(BytesRequest::decode(&encoded).unwrap().op, full);
    let rest = MAX_REQUEST - size_of::<RequestHeader>() - 1 - MAX_VALUE;
    let full = BytesOp::CompareAndSwap { key: b"k", expected: &value[1..], value: &value[..rest] };
    request(full).encode(&mut encoded).unwrap();
    assert_eq!(encoded.len(), MAX_REQUEST);
    assert_eq!(BytesRequest::decode(&encoded).unwrap().op, full);
    let beyond = BytesOp::CompareAndSwap { key: b"ke", expected: &value[1..], value: &value[..rest] };
    assert!(matches!(
        request(beyond).encode(&mut encoded),
        Err(MessageError::TooLong { field: "request", .. })
    ));
    let longest = BytesResponse { status: Status::Done, value: &value[1..] };
    longest.encode(&mut encoded).unwrap();
    assert_eq!(encoded.len(), MAX_RESPONSE);

    for op in [
        BytesOp::Get { key: &key },
        BytesOp::Put { key: b"k", value: &value },
        BytesOp::CompareAndSwap { key: b"k", expected: &value, value: b"" },
    ] {
        assert!(matches!(request(op).encode(&mut encoded), Err(MessageError::TooLong { .. })), "{op:?}");
    }
    // The same limit for a message of a peer.
    request(BytesOp::Get { key: b"" }).encode(&mut encoded).unwrap();
    encoded.extend_from_slice(&key);
    encoded[12..16].copy_from_slice(&(key.len() as u32).to_le_bytes());
    assert_eq!(
        BytesRequest::decode(&encoded),
        Err(MessageError::TooLong { field: "key", len: MAX_KEY + 1, limit: MAX_KEY })
    );
}

#[test]
fn request_with_a_field_its_kind_lacks_is_rejected() {
    let mut encoded = Vec::new();
    let put = BytesRequest { rank: 0, daemon: 0, op: BytesOp::Put { key: b"k", value: b"v" } };
    put.encode(&mut encoded).unwrap();
    for kind in [17, 19, 22, 23] {
        encoded[0] = kind;
        assert_eq!(BytesRequest::decode(&encoded), Err(MessageError::UnexpectedField));
    }
    for kind in 24..27 {
        encoded[0] = kind;
        assert_eq!(BytesRequest::decode(&encoded), Err(MessageError::InvalidToken { len: 0 }));
    }
    encoded[0] = 27;
    assert_eq!(BytesRequest::decode(&encoded), Err(MessageError::InvalidHeader));
}
