//! Bytes that a correct peer never writes: each gives a typed error, never a panic, and the flow reads nothing outside of
//! what was announced.

use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

use super::super::wire::{self, CompactHead, FlowMetadata, HEADER_SIZE, Header};
use super::super::*;

const PARAMS: FlowParams = FlowParams {
    ring: 1024,
    peer_ring: 512,
    credit_limit: 128,
    peer_credit_limit: 256,
    pending_calls: 4,
    compact: false,
};

/// A ring that checks that only announced bytes are read.
struct Announced<'a> {
    bytes: &'a [u8],
    from: usize,
    to: usize,
}

impl RingBytes for Announced<'_> {
    fn load_words(&self, offset: usize) -> [u64; 2] {
        assert!(
            self.from <= offset && offset + 16 <= self.to,
            "reads {offset}+16 of {}..{}",
            self.from,
            self.to
        );
        self.bytes.load_words(offset)
    }
}

fn announced_bytes(imm: u32) -> u64 {
    match imm & wire::COMPACT_FLAG {
        0 => wire::decode_imm(imm),
        _ => wire::compact_size(imm & !wire::COMPACT_FLAG),
    }
}

/// Feeds batches until one is refused. Adds the callers that got a response to `answered`.
fn feed(flow: &mut Flow<u32>, ring: &[u8], imms: &[u32], answered: &mut Vec<u32>) -> Result<(), Violation> {
    let mut position = 0u64;
    for &imm in imms {
        let from = (position % 1024) as usize;
        let delta = announced_bytes(imm);
        let to = (from as u64 + delta).min(1024) as usize;
        let announced = Announced { bytes: ring, from, to };
        flow.accept(imm, &announced)?;
        position += delta;
        while let Some(message) = flow.next_message(&announced)? {
            let (offset, len) = match message {
                Message::Request { reply_token, offset, len, .. } => {
                    // A reply must be possible, whatever the bytes were.
                    let longest = reply_token.max_len() as usize;
                    assert!(flow.reply(Content::Bytes, reply_token, longest).is_ok());
                    assert!(flow.state().invariant_holds());
                    (offset, len)
                }
                Message::Response { user, offset, len, .. } => {
                    answered.extend(user);
                    (offset, len)
                }
            };
            assert!(from <= offset && offset + len <= to);
            // Every other message is retained, and released at once.
            if answered.len().is_multiple_of(2) {
                let space = flow.retain().expect("it is the current message");
                assert!(flow.release(space) && flow.retain().is_none());
            }
        }
        while let Some(write) = flow.next_write() {
            flow.write_posted(&write);
        }
    }
    Ok(())
}

/// Each caller got a response or can be told that there will be none, exactly once.
fn assert_each_caller_is_told_once(mut flow: Flow<u32>, mut answered: Vec<u32>, calls: u32) {
    answered.extend(flow.abandon_all());
    answered.sort_unstable();
    assert_eq!(answered, (0..calls).collect::<Vec<_>>());
}

/// Metadata and headers that are nearly valid, so that the later checks are reached too.
fn nearly_valid_ring() -> impl Strategy<Value = Vec<u8>> {
    let metadata = (0u64..4, 0u64..12, prop_oneof![0u32..6, Just(u32::MAX)], 0u8..40).prop_map(
        |(consumer, grant, count, slip)| {
            let mut bytes =
                FlowMetadata { consumer_pos: consumer * 32, credit_grant: grant * 32, message_count: count }
                    .encode()
                    .to_vec();
            if slip < 2 {
                bytes[usize::from(slip) * 20] ^= 1;
            }
            bytes
        },
    );
    let header = (0u32..6, any::<bool>(), 0u32..6, 0u32..80, 0u8..4);
    let header = header.prop_map(|(index, response, blocks, len, bulk)| {
        let flag = if response { wire::RESPONSE_FLAG } else { 0 };
        let payload_len = len | if bulk == 0 { wire::BULK_FLAG } else { 0 };
        let header = Header { call_id: (1 << 16 | index) | flag, credit_blocks: blocks, payload_len };
        let mut bytes = header.encode().to_vec();
        bytes.resize(32, 0xaa);
        bytes
    });
    let head = (0u32..6, any::<bool>(), 0u32..6, 0u32..12, prop_oneof![0u32..4, any::<u32>()]);
    let head = head.prop_map(|(index, response, credit_blocks, grant_blocks, consumer_blocks)| {
        let flag = if response { wire::RESPONSE_FLAG } else { 0 };
        let call_id = (1 << 16 | index) | flag;
        let mut bytes =
            CompactHead { call_id, credit_blocks, grant_blocks, consumer_blocks }.encode().to_vec();
        bytes.resize(32, 0xbb);
        bytes
    });
    proptest::collection::vec(prop_oneof![metadata, header, head], 32).prop_map(|blocks| blocks.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16 * ProptestConfig::default().cases))]

    #[test]
    fn any_bytes_parse_to_messages_or_a_violation(
        ring in prop_oneof![proptest::collection::vec(any::<u8>(), 1024), nearly_valid_ring()],
        imms in proptest::collection::vec(prop_oneof![
            8 => 0u32..10,
            6 => (0u32..36).prop_map(|len| wire::COMPACT_FLAG | len),
            1 => 0u32..40,
            1 => any::<u32>(),
        ], 1..12),
        calls in 0u32..5,
        word in prop_oneof![any::<u64>(), 0u64..512],
    ) {
        let mut flow = Flow::new(&PARAMS).unwrap();
        let calls = (0..calls).take_while(|call| flow.call(Content::Bytes, 0, 20, *call).is_ok()).count() as u32;
        while let Some(write) = flow.next_write() {
            flow.write_posted(&write);
        }
        if let Err(violation) = flow.position_read_done(word) {
            let expected = matches!(
                violation,
                Violation::ConsumerMisaligned { .. } | Violation::ConsumerBeyondSent { .. }
            );
            prop_assert!(expected, "{}", violation);
        }
        let mut answered = Vec::new();
        if let Err(violation) = feed(&mut flow, &ring, &imms, &mut answered) {
            let text = std::format!("{violation}");
            prop_assert!(text.contains("peer"), "{}", text);
        }
        assert_each_caller_is_told_once(flow, answered, calls);
    }

    #[test]
    fn any_connect_information_is_accepted_or_refused(
        bytes in proptest::collection::vec(any::<u8>(), wire::CONNECT_INFO_SIZE),
        ring in any::<u64>(), limit in any::<u64>(), power in 0u32..64,
    ) {
        let bytes: [u8; wire::CONNECT_INFO_SIZE] = bytes.try_into().unwrap();
        prop_assert!(wire::ConnectInfo::decode(&bytes).is_err() || &bytes[..4] == b"xRPC");
        for peer_ring in [ring, 1 << power] {
            let params = FlowParams { peer_ring, peer_credit_limit: limit, ..PARAMS };
            let made = Flow::<()>::new(&params);
            let legal = peer_ring.is_power_of_two() && (MIN_RING..=MAX_RING).contains(&peer_ring) && limit >= 64;
            prop_assert_eq!(made.is_ok(), legal);
        }
    }
}

/// A ring with one batch of these messages at its start, and the immediate for it.
fn batch(metadata: FlowMetadata, messages: &[Header]) -> (Vec<u8>, u32) {
    let mut ring = vec![0; 1024];
    ring[..32].copy_from_slice(&metadata.encode());
    let mut at = 32;
    for header in messages {
        ring[at..][..HEADER_SIZE].copy_from_slice(&header.encode());
        at += wire::padded_size(header.ring_len()) as usize;
    }
    (ring, wire::encode_imm(at as u64))
}

fn metadata(message_count: u32) -> FlowMetadata {
    FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count }
}

fn violation_of(ring: &[u8], imm: u32, calls: u32) -> Violation {
    let mut flow = Flow::new(&PARAMS).unwrap();
    for call in 0..calls {
        assert!(flow.call(Content::Bytes, 0, 20, call).is_ok());
    }
    while let Some(write) = flow.next_write() {
        flow.write_posted(&write);
    }
    let mut answered = Vec::new();
    let violation = feed(&mut flow, ring, &[imm], &mut answered).unwrap_err();
    assert_each_caller_is_told_once(flow, answered, calls);
    violation
}

#[test]
fn each_violation_is_reported_by_its_own_error() {
    let request = |blocks, payload_len| Header { call_id: 1 << 16, credit_blocks: blocks, payload_len };
    let response = |call_id: u32, blocks, payload_len| Header {
        call_id: call_id | wire::RESPONSE_FLAG,
        credit_blocks: blocks,
        payload_len,
    };
    let one = |header| batch(metadata(1), &[header]);

    let (ring, imm) = one(request(2, 0));
    assert_eq!(violation_of(&ring, 0, 0), Violation::ShortBatch { delta: 0 });
    assert_eq!(violation_of(&ring, 33, 0), Violation::Overrun { delta: 1056, free: 1024 });
    assert_eq!(violation_of(&ring, imm + 1, 0), Violation::TrailingBytes { unused: 32 });
    assert_eq!(violation_of(&ring, imm - 1, 0), Violation::MessageTooLong { needs: 32, left: 0 });
    let (ring, imm) = one(request(1, 0));
    assert_eq!(violation_of(&ring, imm, 0), Violation::CreditTooSmall { blocks: 1 });
    let (ring, imm) = one(request(5, 0));
    assert_eq!(violation_of(&ring, imm, 0), Violation::CreditOverrun { credit: 160, available: 128 });
    let (ring, _) = one(request(2, u32::MAX));
    assert_eq!(violation_of(&ring, 4, 0), Violation::MessageTooLong { needs: (1 << 31) + 32, left: 96 });

    let (ring, imm) = one(response(1 << 16, 2, 0));
    assert_eq!(violation_of(&ring, imm, 0), Violation::UnknownCall { call_id: 1 << 16 });
    let (ring, imm) = batch(metadata(2), &[response(1 << 16, 2, 0), response(1 << 16, 2, 0)]);
    assert_eq!(violation_of(&ring, imm, 1), Violation::UnknownCall { call_id: 1 << 16 }, "answered twice");
    let (ring, imm) = one(response(1 << 16, 3, 0));
    assert_eq!(violation_of(&ring, imm, 1), Violation::CreditMismatch { blocks: 3, used: 2 });
    let (ring, imm) = one(response(1 << 16, 2, 21));
    assert_eq!(violation_of(&ring, imm, 1), Violation::ResponseTooLong { payload_len: 21, allowed: 20 });

    let (ring, imm) = batch(metadata(wire::WRAP_MESSAGE_COUNT), &[]);
    assert_eq!(violation_of(&ring, imm, 0), Violation::BadWrap { offset: 0, delta: 32 });
    let (ring, imm) = batch(FlowMetadata { credit_grant: 32, ..metadata(0) }, &[]);
    assert_eq!(violation_of(&ring, imm, 0), Violation::GrantOverLimit { granted: 288, limit: 256 });
    let (ring, imm) = batch(FlowMetadata { credit_grant: u64::MAX - 31, ..metadata(0) }, &[]);
    assert!(matches!(violation_of(&ring, imm, 0), Violation::GrantOverLimit { .. }));
    // The violation is found at the last message of the batch, which is a response. Its caller must still be told.
    let (ring, imm) = batch(FlowMetadata { credit_grant: 96, ..metadata(1) }, &[response(1 << 16, 2, 4)]);
    assert_eq!(violation_of(&ring, imm, 1), Violation::GrantOverLimit { granted: 288, limit: 256 });
    let (ring, imm) = batch(FlowMetadata { consumer_pos: 96, ..metadata(0) }, &[]);
    assert_eq!(violation_of(&ring, imm, 1), Violation::ConsumerBeyondSent { position: 96, sent: 64 });
}

#[test]
fn each_violation_of_a_compact_batch_is_reported_by_its_own_error() {
    let compact = |head: CompactHead| {
        let mut ring = vec![0; 1024];
        ring[..16].copy_from_slice(&head.encode());
        ring
    };
    let imm = |len: u32| wire::COMPACT_FLAG | len;
    let request = CompactHead { call_id: 1 << 16, credit_blocks: 2, grant_blocks: 0, consumer_blocks: 0 };
    let response = CompactHead { call_id: 1 << 16 | wire::RESPONSE_FLAG, ..request };

    let ring = compact(request);
    assert_eq!(violation_of(&ring, imm(33), 0), Violation::CompactTooLong { payload_len: 33 });
    assert_eq!(violation_of(&ring, u32::MAX, 0), Violation::CompactTooLong { payload_len: u32::MAX >> 1 });
    let ring = compact(CompactHead { credit_blocks: 1, ..request });
    assert_eq!(violation_of(&ring, imm(8), 0), Violation::CreditTooSmall { blocks: 1 });
    let ring = compact(CompactHead { credit_blocks: 5, ..request });
    assert_eq!(violation_of(&ring, imm(8), 0), Violation::CreditOverrun { credit: 160, available: 128 });
    let ring = compact(CompactHead { grant_blocks: 1, ..request });
    assert_eq!(violation_of(&ring, imm(8), 0), Violation::GrantOverLimit { granted: 288, limit: 256 });
    let ring = compact(CompactHead { grant_blocks: u32::MAX, ..request });
    assert!(matches!(violation_of(&ring, imm(8), 0), Violation::GrantOverLimit { .. }));
    // One call: 64 bytes were sent.
    let ring = compact(CompactHead { consumer_blocks: 3, ..request });
    assert_eq!(violation_of(&ring, imm(8), 1), Violation::ConsumerBeyondSent { position: 96, sent: 64 });

    assert_eq!(violation_of(&compact(response), imm(8), 0), Violation::UnknownCall { call_id: 1 << 16 });
    let ring = compact(CompactHead { credit_blocks: 3, ..response });
    assert_eq!(violation_of(&ring, imm(8), 1), Violation::CreditMismatch { blocks: 3, used: 2 });
    let too_long = Violation::ResponseTooLong { payload_len: 21, allowed: 20 };
    assert_eq!(violation_of(&compact(response), imm(21), 1), too_long);
    let ring = compact(CompactHead { grant_blocks: 3, ..response });
    assert_eq!(violation_of(&ring, imm(4), 1), Violation::GrantOverLimit { granted: 288, limit: 256 });
}

/// The head of a compact batch has only the low bits of the position.
#[test]
fn position_in_a_compact_batch_is_found_from_its_low_bits() {
    let mut flow = Flow::new(&FlowParams { credit_limit: 128, ..PARAMS }).unwrap();
    let mut ring = vec![0; 1024];
    // Each round the peer has released everything, and a ring of 512 bytes lets 64 bytes of every call through.
    for round in 1..=100_000u64 {
        let (call, _) = flow.call(Content::Bytes, 0, 20, ()).unwrap();
        while let Some(write) = flow.next_write() {
            flow.write_posted(&write);
        }
        let sent = flow.progress().posted;
        let head = CompactHead {
            call_id: call.bits() | wire::RESPONSE_FLAG,
            credit_blocks: 2,
            grant_blocks: 2,
            consumer_blocks: (sent / 32) as u32,
        };
        let offset = ((round - 1) * 32 % 1024) as usize;
        ring[offset..][..16].copy_from_slice(&head.encode());
        flow.accept(wire::COMPACT_FLAG, ring.as_slice()).unwrap();
        let Ok(Some(Message::Response { offset: at, .. })) = flow.next_message(ring.as_slice()) else {
            panic!("no response in round {round}");
        };
        flow.finish_message();
        assert_eq!((flow.progress().released, at), (sent, offset + 16));
    }
}

/// After one valid batch, so that the end of the ring is nearer than the free space is long.
#[test]
fn batches_that_cross_the_end_of_the_ring_are_violations() {
    let accept = |imm, second: FlowMetadata| {
        let mut flow: Flow<()> = Flow::new(&PARAMS).unwrap();
        let request = Header { call_id: 1 << 16, credit_blocks: 2, payload_len: 0 };
        let (mut ring, first) = batch(metadata(1), &[request]);
        flow.accept(first, ring.as_slice()).unwrap();
        assert!(matches!(flow.next_message(ring.as_slice()), Ok(Some(Message::Request { .. }))));
        ring[64..96].copy_from_slice(&second.encode());
        flow.accept(imm, ring.as_slice())
    };
    assert_eq!(accept(31, metadata(1)), Err(Violation::AcrossEnd { offset: 64, delta: 992 }));
    assert_eq!(accept(30, metadata(1)), Ok(()));
    let marker = metadata(wire::WRAP_MESSAGE_COUNT);
    assert_eq!(accept(1, marker), Err(Violation::BadWrap { offset: 64, delta: 32 }));
}

#[test]
fn bulk_messages_are_parsed_among_other_messages() {
    // Between other messages, so that the test sees their offsets.
    let request = |payload_len| Header { call_id: 1 << 16, credit_blocks: 2, payload_len };
    let answer =
        Header { call_id: 1 << 16 | wire::RESPONSE_FLAG, credit_blocks: 2, payload_len: 4 | wire::BULK_FLAG };
    let (ring, imm) = batch(metadata(3), &[request(32 | wire::BULK_FLAG), answer, request(5)]);
    let mut flow = Flow::new(&PARAMS).unwrap();
    let (_, placement) = flow.call(Content::Bulk, 40, 0, 'u').unwrap();
    assert_eq!((placement.header.ring_len(), placement.header.is_bulk()), (40, true));
    assert_eq!(flow.call(Content::Bulk, flow.max_request_len() + 1, 0, 'v').unwrap_err().user, 'v');
    flow.accept(imm, ring.as_slice()).unwrap();
    let mut seen = Vec::new();
    while let Some(message) = flow.next_message(ring.as_slice()).unwrap() {
        match message {
            Message::Request { reply_token, offset, len, is_bulk } => {
                seen.push((offset, len, is_bulk));
                let placement = flow.reply(Content::Bulk, reply_token, BULK_RESPONSE_SIZE).unwrap();
                assert_eq!((placement.header.ring_len(), placement.header.is_bulk()), (4, true));
                assert!(flow.state().invariant_holds());
            }
            Message::Response { user, offset, len, is_bulk, .. } => {
                assert_eq!(user, Some('u'));
                seen.push((offset, len, is_bulk));
            }
        }
    }
    assert_eq!(seen, [(44, 32, true), (108, 4, true), (140, 5, false)]);
}

#[test]
fn consumer_position_of_the_peer_never_moves_back() {
    let mut flow = Flow::new(&PARAMS).unwrap();
    assert!(flow.call(Content::Bytes, 0, 20, ()).is_ok());
    let write = flow.next_write().unwrap();
    flow.write_posted(&write);
    let announce = |flow: &mut Flow<()>, at: usize, consumer_pos| {
        let mut ring = vec![0; 1024];
        ring[at..][..32].copy_from_slice(&FlowMetadata { consumer_pos, ..metadata(0) }.encode());
        flow.accept(1, ring.as_slice())
    };
    assert_eq!(flow.position_read_done(64), Ok(()));
    assert_eq!(flow.state().in_flight, 0);
    assert_eq!(announce(&mut flow, 0, 32), Ok(()), "older than the READ: stale, but valid");
    assert_eq!(flow.state().in_flight, 0, "nothing moved back");
    assert_eq!(
        announce(&mut flow, 32, 0),
        Err(Violation::ConsumerWentBack { position: 0, before: 32 }),
        "older than the batch before it"
    );
    assert_eq!(flow.position_read_done(32), Err(Violation::ConsumerWentBack { position: 32, before: 64 }));
    assert_eq!(flow.position_read_done(33), Err(Violation::ConsumerMisaligned { position: 33 }));
}

#[test]
fn calls_that_can_never_fit_are_refused_at_once() {
    for ring in [256u64, 512, 4096, 1 << 20] {
        let params = FlowParams {
            ring,
            peer_ring: ring,
            credit_limit: ring,
            peer_credit_limit: ring,
            pending_calls: 1,
            compact: true,
        };
        let mut flow = Flow::new(&params).unwrap();
        let (request, response) = (flow.max_request_len(), flow.max_response_len());
        assert!(request >= 20 && response >= 20);
        assert_eq!(
            flow.call(Content::Bytes, request + 1, 0, 'u').unwrap_err(),
            CallRefused { cause: Refusal::TooLong { len: request + 1, max: request }, user: 'u' }
        );
        assert_eq!(
            flow.call(Content::Bytes, 0, response + 1, 'u').unwrap_err(),
            CallRefused { cause: Refusal::ResponseTooLong { len: response + 1, max: response }, user: 'u' }
        );
        assert!(flow.call(Content::Bytes, usize::MAX, usize::MAX, 'u').is_err());
        assert!(flow.call(Content::Bytes, request, response, 'u').is_ok(), "the longest fits");
        let refused = CallRefused { cause: Refusal::TooManyCalls, user: 'u' };
        assert_eq!(flow.call(Content::Bytes, 0, 0, 'u').unwrap_err(), refused);
    }
    let params = FlowParams { ring: 128, ..PARAMS };
    assert_eq!(Flow::<()>::new(&params).unwrap_err(), FlowParamsError::RingSize { size: 128 });
    let params = FlowParams { peer_credit_limit: 63, ..PARAMS };
    assert_eq!(Flow::<()>::new(&params).unwrap_err(), FlowParamsError::CreditLimit { limit: 63 });
    let params = FlowParams { pending_calls: 0, ..PARAMS };
    assert_eq!(Flow::<()>::new(&params).unwrap_err(), FlowParamsError::PendingCalls { calls: 0 });
}
