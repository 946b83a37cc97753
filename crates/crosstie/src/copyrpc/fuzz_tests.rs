//! Fuzz targets: everything that a copyrpc peer can write: connect information, batches in the ring, immediates, consumer
//! positions, bulk descriptors, and typed messages.

use crosstie_protocol::copyrpc::wire::{self, CONNECT_INFO_SIZE, ConnectInfo, FlowMetadata, Header};
use crosstie_protocol::copyrpc::{
    BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkMemory, BulkRequest, BulkResponse, Content, Flow, FlowParams,
    MAX_BULK, MAX_RING, MIN_RING, Message, decode_bulk_response,
};

use crate::fuzzing::{Steps, fuzz};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");
const RING: usize = 1024;
const PARAMS: FlowParams = FlowParams {
    ring: RING as u64,
    peer_ring: 512,
    credit_limit: 128,
    peer_credit_limit: 256,
    pending_calls: 4,
    compact: true,
};

/// Input: `calls, read position`, then for each batch `immediate, number of bytes, bytes at the start of the batch`.
#[test]
fn fuzz_copyrpc_batches() {
    let metadata = |message_count| FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count }.encode();
    let request = Header { call_id: 1 << 16, credit_blocks: 2, payload_len: 5 };
    let response = Header { call_id: 1 << 16 | wire::RESPONSE_FLAG, credit_blocks: 2, payload_len: 4 };
    let bulk = Header { payload_len: 32 | wire::BULK_FLAG, ..request };
    let batch = |calls: u8, headers: &[Header]| {
        let mut bytes = metadata(headers.len() as u32).to_vec();
        for header in headers {
            let start = bytes.len();
            bytes.extend(header.encode());
            bytes.resize(start + wire::padded_size(header.ring_len()) as usize, 0);
        }
        let (imm, len) = ((bytes.len() / 32) as u8, bytes.len() as u8);
        [&[calls, 0, 0, imm, 0, 0, 0, len][..], &bytes].concat()
    };
    let examples =
        [batch(0, &[request]), batch(1, &[response]), batch(2, &[request, response]), batch(0, &[bulk])];
    fuzz(CRATE, "copyrpc_batches", examples, |input| {
        let mut steps = Steps(input);
        let mut flow = Flow::new(&PARAMS).expect("valid");
        let calls = steps.byte() % 5;
        let calls =
            (0..calls).take_while(|call| flow.call(Content::Bytes, 0, 20, u32::from(*call)).is_ok()).count();
        while let Some(write) = flow.next_write() {
            flow.write_posted(&write);
        }
        let read = u64::from(steps.byte()) | u64::from(steps.byte()) << 8;
        flow.position_read_done(read).ok();
        let (mut ring, mut position, mut told) = (vec![0; RING], 0u64, Vec::new());
        while !steps.is_empty() {
            let imm = u32::from_le_bytes([steps.byte(), steps.byte(), steps.byte(), steps.byte()]);
            let (at, len) = ((position % RING as u64) as usize, usize::from(steps.byte()));
            let bytes = steps.take(len.min(RING - at));
            ring[at..at + bytes.len()].copy_from_slice(bytes);
            if accept(&mut flow, imm, &ring, at, &mut told).is_none() {
                break;
            }
            position += wire::decode_imm(imm);
        }
        // Each caller got a response or can be told that there will be none, exactly once.
        told.extend(flow.abandon_all());
        told.sort_unstable();
        assert!(told.iter().copied().eq(0..calls as u32), "{told:?} of {calls}");
    });
}

/// Parses one batch, replies to all requests and releases everything. None after a violation.
fn accept(flow: &mut Flow<u32>, imm: u32, ring: &[u8], from: usize, told: &mut Vec<u32>) -> Option<()> {
    flow.accept(imm, ring).ok()?;
    let end = from as u64 + wire::decode_imm(imm);
    while let Some(message) = flow.next_message(ring).ok()? {
        let (offset, len) = match message {
            Message::Request { reply_token, offset, len, .. } => {
                let longest = reply_token.max_len() as usize;
                let reply = flow.reply(Content::Bytes, reply_token, longest);
                assert!(reply.is_ok(), "a reply is always possible");
                (offset, len)
            }
            Message::Response { user, offset, len, .. } => {
                told.extend(user);
                (offset, len)
            }
        };
        assert!(from <= offset && (offset + len) as u64 <= end && offset + len <= RING);
        assert!(flow.state().invariant_holds());
        // Some are retained.
        if offset.is_multiple_of(64) {
            assert!(flow.retain().is_some_and(|space| flow.release(space)));
        }
    }
    while let Some(write) = flow.next_write() {
        flow.write_posted(&write);
    }
    Some(())
}

/// The 56 bytes that a peer sends before the first batch.
#[test]
fn fuzz_copyrpc_connect_info() {
    let info = ConnectInfo {
        ring_addr: 1 << 40,
        ring_size: 4096,
        consumer_addr: 1 << 41,
        credit_limit: 1024,
        ring_rkey: 5,
        consumer_rkey: 6,
        bulk_limit: 1 << 20,
    };
    fuzz(CRATE, "copyrpc_connect_info", [info.encode().to_vec()], |input| {
        let Ok(bytes) = <&[u8; CONNECT_INFO_SIZE]>::try_from(input) else { return };
        let Ok(info) = ConnectInfo::decode(bytes) else { return };
        assert_eq!(info.encode(), *bytes, "every field is decoded");
        let params = FlowParams { peer_ring: info.ring_size, peer_credit_limit: info.credit_limit, ..PARAMS };
        let legal = info.ring_size.is_power_of_two()
            && (MIN_RING..=MAX_RING).contains(&info.ring_size)
            && info.credit_limit >= 64;
        assert_eq!(Flow::<()>::new(&params).is_ok(), legal, "{info:?}");
    });
}

/// Descriptors in bulk messages. Input: `limit, length of the message`, then the descriptor.
#[test]
fn fuzz_copyrpc_bulk_descriptors() {
    let memory = BulkMemory { addr: 1 << 33, len: 70_000, rkey: 9 };
    let example = |request, response_buffer, len: u8| {
        let descriptor = BulkRequest { request, response_buffer }.encode();
        [&(1u32 << 20).to_le_bytes()[..], &[len], &descriptor].concat()
    };
    let examples = [
        example(Some(memory), Some(memory), 32),
        example(None, Some(memory), 60),
        example(Some(memory), None, 32),
        [&[0, 0, 1, 0, 4][..], &[9, 0, 0, 0]].concat(),
    ];
    fuzz(CRATE, "copyrpc_bulk_descriptors", examples, |input| {
        let mut steps = Steps(input);
        let limit = u32::from_le_bytes([steps.byte(), steps.byte(), steps.byte(), steps.byte()]);
        let len = usize::from(steps.byte());
        if let Ok(bytes) = <&[u8; BULK_REQUEST_SIZE]>::try_from(steps.0)
            && let Ok(bulk) = BulkRequest::decode(bytes, len, limit)
        {
            assert_eq!(bulk.encode(), *bytes);
            assert!(bulk.request.is_some() || bulk.response_buffer.is_some());
            for memory in [bulk.request, bulk.response_buffer].into_iter().flatten() {
                assert!(0 < memory.len && memory.len <= limit.min(MAX_BULK));
                assert!(memory.addr.checked_add(u64::from(memory.len)).is_some());
            }
        }
        if let Ok(bytes) = <&[u8; BULK_RESPONSE_SIZE]>::try_from(steps.0)
            && let Ok(response) = decode_bulk_response(bytes, len, Some(limit), steps.0[0] % 2 == 0)
        {
            assert_eq!(len, BULK_RESPONSE_SIZE);
            match response {
                BulkResponse::Written(written) => assert!(0 < written && written <= limit),
                BulkResponse::NoMemory => assert_eq!(*bytes, [0; 4]),
            }
        }
    });
}
