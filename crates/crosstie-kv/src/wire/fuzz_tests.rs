//! Fuzz targets: the messages of clients, daemons and nodes.

use zerocopy::{FromBytes, IntoBytes, TryFromBytes};

use super::*;
use crate::Backend;
use crate::fuzzing::fuzz;
use crate::sharding::{ShardId, ShardMap};
use crate::store::{Shard, ShardStats};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// Requests for byte strings: every message has one encoding, and a shard executes it within its memory.
#[test]
fn fuzz_kv_bytes_requests() {
    let (key, value) = (&b"key"[..], &b"value"[..]);
    let ops = [
        BytesOp::Get { key },
        BytesOp::Put { key, value },
        BytesOp::Delete { key },
        BytesOp::Insert { key, value },
        BytesOp::CompareAndSwap { key, expected: b"old", value },
        BytesOp::Info,
        BytesOp::Stats,
        BytesOp::FencedPut { key, token: Token::new(&[1; 16]), value },
        BytesOp::FencedDelete { key, token: Token::new(&[2; 16]) },
        BytesOp::Fence { key, token: Token::new(&[3; 16]) },
    ];
    let examples = ops.map(|op| {
        let mut bytes = Vec::new();
        BytesRequest { rank: 0, daemon: 0, op }.encode(&mut bytes).unwrap();
        bytes
    });
    let mut shard = Shard::new(64 << 10);
    let mut again = Vec::new();
    fuzz(CRATE, "kv_bytes_requests", examples, |input| {
        let Ok(request) = BytesRequest::decode(input) else { return };
        request.encode(&mut again).unwrap();
        assert_eq!(again, input, "a message has one encoding");
        if request.op.key().is_some() {
            let response = shard.apply_bytes(&request.op);
            assert!(response.encoded_len() <= MAX_RESPONSE);
        }
        assert!(shard.stats().bytes <= 64 << 10);
    });
}

/// Responses for byte strings, and the values in them that describe a node and a shard.
#[test]
fn fuzz_kv_bytes_responses() {
    let info = NodeInfo {
        version: NodeInfo::VERSION,
        rank: 0,
        nodes: 2,
        daemons: 1,
        queue_depth: 32,
        max_clients: 4,
        max_key: 9,
        max_value: 9,
        incarnation: 1,
        memory_limit: 1 << 20,
        backend: Backend::Meta,
        reserved: [0; 3],
        attach_count: 0,
    };
    let values = [&b""[..], b"value", info.as_bytes()];
    let examples = values.map(|value| {
        let mut bytes = Vec::new();
        BytesResponse { status: Status::Done, value }.encode(&mut bytes).unwrap();
        bytes
    });
    let mut again = Vec::new();
    fuzz(CRATE, "kv_bytes_responses", examples, |input| {
        let Ok(response) = BytesResponse::decode(input) else { return };
        response.encode(&mut again).unwrap();
        assert_eq!(again, input, "a message has one encoding");
        if let Some(info) = NodeInfo::decode(response.value) {
            assert_eq!(info.as_bytes(), response.value);
        }
        if let Ok(stats) = ShardStats::read_from_bytes(response.value) {
            assert_eq!(stats.as_bytes(), response.value);
        }
    });
}

/// Requests and responses for words.
#[test]
fn fuzz_kv_words() {
    let ops = [Op::Get, Op::Put, Op::Delete, Op::Insert, Op::CompareAndSwap];
    let examples = ops.map(|op| WordRequest::new(op, 0, 7).as_bytes().to_vec());
    let examples = examples.into_iter().chain([WordResponse::new(Status::Done, 7).as_bytes().to_vec()]);
    let mut shard = Shard::new(64 << 10);
    let map = ShardMap::new(3, 2).unwrap();
    fuzz(CRATE, "kv_words", examples, |input| {
        if let Ok(request) = WordRequest::try_read_from_bytes(input) {
            shard.apply(&request);
            let ShardId { rank, daemon } = map.shard_of_word(request.key);
            assert!(rank < 3 && daemon < 2 && shard.stats().bytes <= 64 << 10);
        }
        if let Ok(response) = WordResponse::try_read_from_bytes(input) {
            assert_eq!(response.as_bytes(), input);
        }
    });
}
