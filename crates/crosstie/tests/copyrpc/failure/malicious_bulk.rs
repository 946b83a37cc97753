//! Descriptors of a malicious peer.

use std::time::{Duration, Instant};

use crosstie::copyrpc::Failure;
use crosstie::device::{Device, DeviceSpec, Status};
use crosstie_protocol::copyrpc::wire::{BULK_FLAG, FlowMetadata, Header, RESPONSE_FLAG, encode_imm};
use crosstie_protocol::copyrpc::{BulkMemory, BulkRequest, MAX_BULK, Violation};
use crosstie_testkit::rng::{Random, seed};
use crosstie_testkit::wait::{find, until};

use super::malicious_peer::MaliciousPeer;
use super::test_peer::{LONG, TIMEOUT, Workload, bulk, exercise, sides};

/// Writes one message at the start of the victim's ring.
fn send(malicious: &mut MaliciousPeer, header: Header, payload: &[u8]) {
    send_at(malicious, 0, header, payload);
}

/// Writes one message at an offset of the victim's ring. Returns where the next one goes.
fn send_at(malicious: &mut MaliciousPeer, offset: u64, header: Header, payload: &[u8]) -> u64 {
    let metadata = FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 1 };
    let mut bytes = [&metadata.encode()[..], &header.encode(), payload].concat();
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    malicious.write(offset, &bytes, encode_imm(bytes.len() as u64));
    offset + bytes.len() as u64
}

/// The header of a bulk message.
fn bulk_header(call_id: u32, credit_blocks: u32, len: usize) -> Header {
    Header { call_id, credit_blocks, payload_len: len as u32 | BULK_FLAG }
}

#[test]
fn malicious_descriptors_end_only_their_own_connection() {
    let mut random = Random(seed());
    let (mut left, mut right) = sides(Workload::Bulk);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    // What is sent, and the violation that must end the victim's connection (`None`: the device ends it). The victim has made two
    // calls before, the second with a response buffer of `LONG` bytes.
    let good = BulkMemory { addr: 1 << 40, len: 70_000, rkey: 0x1234 };
    let ask = |request: Option<BulkMemory>, response_buffer| {
        BulkRequest { request, response_buffer }.encode().to_vec()
    };
    let header = bulk_header;
    let request = |payload: Vec<u8>| (header(1 << 16, 2, payload.len()), payload);
    let answer = |call: u32, payload: &[u8]| {
        // Blocks that each call has reserved; the second has room for a short response.
        let blocks = if call == 1 { 3 } else { 2 };
        (header((1 << 16 | call) | RESPONSE_FLAG, blocks, payload.len()), payload.to_vec())
    };
    let long = |len| BulkMemory { len, ..good };
    let too_long = |len, limit| Some(Violation::BulkTooLong { len, limit });
    let malformed = Some(Violation::BulkMalformed);
    let mut cases = vec![
        ("a request of 4 GiB", request(ask(Some(long(u32::MAX)), None)), too_long(u32::MAX, 1 << 20)),
        (
            "one beyond what was announced",
            request(ask(Some(long(1 << 20 | 1)), None)),
            too_long(1 << 20 | 1, 1 << 20),
        ),
        (
            "a response buffer beyond what was announced",
            request(ask(None, Some(long(MAX_BULK)))),
            too_long(MAX_BULK, 1 << 20),
        ),
        ("an invalid address", request(ask(Some(good), None)), None),
        ("no key", request(ask(Some(BulkMemory { rkey: 0, ..good }), None)), None),
        ("an invalid response buffer", request(ask(None, Some(good))), None),
        ("the end of memory", request(ask(Some(BulkMemory { addr: u64::MAX - 5, ..good }), None)), malformed),
        ("nothing", request(vec![0; 32]), malformed),
        ("too short", request(vec![1; 20]), malformed),
        ("empty", request(vec![]), malformed),
        ("more behind it", request([ask(Some(good), None), vec![1; 8]].concat()), malformed),
        (
            "a bulk response that was not requested",
            answer(0, &[1, 0, 0, 0]),
            Some(Violation::BulkNotRequested),
        ),
        (
            "a response to an unknown call",
            answer(9, &[1, 0, 0, 0]),
            Some(Violation::UnknownCall { call_id: 1 << 16 | 9 }),
        ),
        (
            "one that is too long",
            answer(1, &(LONG as u32 + 1).to_le_bytes()),
            too_long(LONG as u32 + 1, LONG as u32),
        ),
        ("one of nothing", answer(1, &[0; 4]), malformed),
        ("one without a length", answer(1, &[]), malformed),
        ("one with too much", answer(1, &[1, 0, 0, 0, 0]), malformed),
    ];
    for _ in 0..200 {
        let payload: Vec<u8> = (0..4).flat_map(|_| random.next().to_le_bytes()).collect();
        cases.push(("at random", request(payload), None));
    }
    for (what, (header, payload), expected) in cases {
        let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &bulk(1 << 20));
        let before = left.context.counters();
        connection.call(b"without", 20, (7, 0)).unwrap();
        connection.call(b"with", LONG, (7, 1)).unwrap();
        left.open.extend([(7, 0), (7, 1)]);
        left.context.flush();
        send(&mut malicious, header, &payload);
        let begin = Instant::now();
        while connection.failure().is_none() {
            left.context.poll(|user, answer| {
                assert!(left.open.remove(&user), "{user:?} ends once");
                assert!(answer.is_err(), "{what}: {user:?}");
            });
            while let Some(request) = left.context.recv() {
                // A valid descriptor with only a response buffer: reply to it.
                assert!(request.data().is_empty());
                let len = request.response_limit() as usize;
                assert!(request.reply(&vec![1; len]).is_ok(), "{what}");
            }
            assert!(begin.elapsed() < TIMEOUT, "{what}: nothing ends");
        }
        let failure = connection.failure().unwrap();
        match expected {
            Some(violation) => assert_eq!(failure, Failure::Violation(violation), "{what}"),
            None if what == "at random" => {}
            None => assert_eq!(failure, Failure::Broken(Status::RemoteAccess), "{what}"),
        }
        assert!(
            !left.open.iter().any(|(index, _)| *index == 7),
            "{what}: calls of a connection that is over"
        );
        assert_eq!(left.context.counters().failures, before.failures + 1);
    }
    // A side that announces no bulk memory accepts no bulk request.
    let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &bulk(0));
    send(&mut malicious, header(1 << 16, 2, 32), &ask(Some(good), None));
    until("the connection ends", || {
        left.turn();
        connection.failure().is_some()
    });
    assert_eq!(
        connection.failure(),
        Some(Failure::Violation(Violation::BulkTooLong { len: 70_000, limit: 0 }))
    );
    exercise(&mut left, &mut right, 30, "the honest connection");
    assert!(left.connections[0].failure().is_none() && left.failed.is_empty());
}

#[test]
fn invalid_bulk_responses_in_one_burst_end_every_call() {
    let (mut left, mut right) = sides(Workload::Bulk);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &bulk(1 << 20));
    let far = Duration::from_secs(3600);
    connection.call_within(b"first", LONG, (7, 0), far).unwrap();
    connection.call(b"second", LONG, (7, 1)).unwrap();
    connection.call(b"third", LONG, (7, 2)).unwrap();
    left.open.extend([(7, 0), (7, 1), (7, 2)]);
    left.context.flush();
    // All of them arrive before the victim polls: two responses that are too long, and a request.
    let mut at = 0;
    for call in 0..2 {
        let header = bulk_header((1 << 16 | call) | RESPONSE_FLAG, 3, 4);
        at = send_at(&mut malicious, at, header, &(LONG as u32 + 1).to_le_bytes());
    }
    send_at(&mut malicious, at, Header { call_id: 1 << 16, credit_blocks: 2, payload_len: 4 }, b"more");
    let begin = Instant::now();
    while connection.failure().is_none() || left.open.iter().any(|(index, _)| *index == 7) {
        left.context.poll(|user, result| {
            assert!(left.open.remove(&user), "{user:?} ends once");
            assert!(result.is_err(), "{user:?}");
        });
        assert!(begin.elapsed() < TIMEOUT, "calls that never end: {:?}", left.open);
    }
    assert!(left.context.recv().is_none(), "a request from behind the invalid responses");
    exercise(&mut left, &mut right, 30, "the honest connection");
}

#[test]
fn nothing_is_parsed_after_the_end_of_a_connection() {
    let (mut left, mut right) = sides(Workload::Bulk);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &bulk(1 << 20));
    connection.call(b"with a buffer", LONG, (7, 0)).unwrap();
    left.open.insert((7, 0));
    left.context.flush();
    // A valid bulk request, which the victim keeps.
    let memory = malicious.ring.remote();
    let descriptor = |len| {
        let from = BulkMemory { addr: memory.addr, len, rkey: memory.rkey };
        BulkRequest { request: Some(from), response_buffer: None }.encode()
    };
    let mut at = send_at(&mut malicious, 0, bulk_header(1 << 16, 2, 32), &descriptor(4000));
    let kept = find("a request", || {
        left.context.poll(|user, _| panic!("{user:?}: nothing was answered"));
        left.context.recv()
    });
    // More batches than one poll receives: the first ends the connection, the last is another bulk request.
    let header = bulk_header((1 << 16) | RESPONSE_FLAG, 3, 4);
    at = send_at(&mut malicious, at, header, &(LONG as u32 + 1).to_le_bytes());
    let empty = FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 0 };
    for _ in 0..64 {
        malicious.write(at, &empty.encode(), encode_imm(32));
        at += 32;
    }
    send_at(&mut malicious, at, bulk_header(1 << 16, 2, 32), &descriptor(5000));
    let mut ended = 0;
    for _ in 0..10 {
        ended += left.context.poll(|user, result| assert!(left.open.remove(&user) && result.is_err()));
        assert!(left.context.recv().is_none(), "a request of a connection that is over");
    }
    assert_eq!((ended, connection.failure().is_some()), (1, true));
    drop(kept);
    exercise(&mut left, &mut right, 30, "the honest connection");
}
