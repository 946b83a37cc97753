//! A malicious peer: whatever it writes, it ends its own connection.

use std::collections::BTreeSet;
use std::time::Instant;

use crosstie::copyrpc::{
    CallFailed, ConnectError, Connection, ConnectionAddress, ConnectionConfig, Context, Failure,
};
use crosstie::device::{
    Access, ConnectConfig, CqConfig, Data, Device, DeviceSpec, Mr, QpAddress, QpConfig, QpState, RcQp,
    RecvWr, RemoteAddr, SendOp, SendWr,
};
use crosstie_protocol::copyrpc::wire::{
    COMPACT_FLAG, CompactHead, ConnectInfo, FlowMetadata, Header, encode_imm,
};
use crosstie_protocol::copyrpc::{RingBytes, Violation};
use crosstie_testkit::rng::{Random, seed};
use zerocopy::{FromBytes, IntoBytes};

use super::test_peer::{TIMEOUT, TestPeer, User, Workload, exercise, ring, sides};

/// Offset of copyrpc's part of an address, behind the device's part.
const INFO_AT: usize = size_of::<QpAddress>();
/// Offset of the word with the consumer position, behind the ring.
const CONSUMER_AT: usize = 4096;

/// A queue pair that pretends to be a copyrpc connection and writes arbitrary bytes.
pub(crate) struct MaliciousPeer {
    pub(crate) qp: RcQp,
    victim: ConnectInfo,
    /// The ring that the victim writes its calls to, and at [`CONSUMER_AT`] the word that it READs.
    pub(crate) ring: Mr,
}

impl MaliciousPeer {
    /// Connects to a new connection of `context`.
    pub(crate) fn connect(
        device: &Device,
        context: &Context<User>,
        config: &ConnectionConfig,
    ) -> (MaliciousPeer, Connection<User>) {
        let connection = context.create_connection(config).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&CqConfig::default()).unwrap();
        let mut qp = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        qp.init(Access::ALL).unwrap();
        (0..64).for_each(|_| qp.post_recv(&RecvWr { wr_id: 0, sges: &[] }).unwrap());
        let ring = pd.allocate(8192, Access::ALL).unwrap();
        let address = connection.address();
        let victim = ConnectInfo::decode(address.as_bytes()[INFO_AT..].try_into().unwrap()).unwrap();
        let (at, rkey) = (ring.remote().addr, ring.remote().rkey);
        let info = ConnectInfo {
            ring_addr: at,
            ring_rkey: rkey,
            consumer_addr: at + CONSUMER_AT as u64,
            consumer_rkey: rkey,
            ..victim
        };
        let own = [qp.address().as_bytes(), &info.encode()].concat();
        let own = ConnectionAddress::read_from_bytes(&own).unwrap();
        let theirs = QpAddress::read_from_bytes(&address.as_bytes()[..INFO_AT]).unwrap();
        qp.connect(&theirs, &ConnectConfig { access: Access::ALL, ..ConnectConfig::default() }).unwrap();
        connection.connect(&own, &ConnectConfig::default()).unwrap();
        (MaliciousPeer { qp, victim, ring }, connection)
    }

    /// Writes bytes into the victim's ring and announces them.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8], imm: u32) {
        let to = RemoteAddr { addr: self.victim.ring_addr + offset, rkey: self.victim.ring_rkey };
        for (i, part) in bytes.chunks(128).enumerate() {
            let to = RemoteAddr { addr: to.addr + 128 * i as u64, ..to };
            self.qp.post(&SendWr::new(0, SendOp::Write(to), Data::Inline(part))).ok();
        }
        self.qp.post(&SendWr::new(0, SendOp::WriteImm(to, imm), Data::Inline(&[]))).ok();
    }

    /// The same with one WRITE. The device can deliver the bytes with the completion.
    pub(crate) fn write_at_once(&mut self, offset: u64, bytes: &[u8], imm: u32) {
        let to = RemoteAddr { addr: self.victim.ring_addr + offset, rkey: self.victim.ring_rkey };
        self.qp.post(&SendWr::new(0, SendOp::WriteImm(to, imm), Data::Inline(bytes))).ok();
    }
}

#[test]
fn malicious_peer_ends_only_its_own_connection() {
    let mut random = Random(seed());
    let (mut left, mut right) = sides(Workload::Small);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let (mut violations, mut accepted) = (BTreeSet::new(), 0);
    for round in 0..1500 {
        let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &ring(1024));
        let mut own = Vec::new();
        if round % 3 == 0 {
            // Calls of the victim, which the malicious peer may try to answer.
            for number in 0..3 {
                assert!(connection.call(b"ask", 8, (7, number)).is_ok());
                own.push(number);
            }
            left.open.extend(own.iter().map(|number| (7, *number)));
        }
        let mut at = 0;
        for _ in 0..8 {
            let (bytes, imm) = invalid_batch(&mut random, 1024 - at);
            match random.below(2) {
                0 => malicious.write(at, &bytes, imm),
                _ => malicious.write_at_once(at, &bytes, imm),
            }
            at = (at + u64::from(imm) * 32).min(1024) % 1024;
            left.context.poll(|user, answer| {
                assert!(left.open.remove(&user), "{user:?} ends once");
                if answer.is_ok() {
                    accepted += 1;
                }
            });
            while let Some(request) = left.context.recv() {
                let bytes = request.data().to_vec();
                if random.below(2) == 0 {
                    request.reply(&bytes[..bytes.len().min(8)]).ok();
                }
            }
        }
        let begin = Instant::now();
        while malicious.qp.state() != QpState::Error
            && connection.failure().is_none()
            && begin.elapsed().as_millis() < 2
        {
            left.turn();
        }
        if let Some(failure) = connection.failure() {
            assert!(matches!(failure, Failure::Violation(_) | Failure::Broken(_)), "{failure}");
            if let Failure::Violation(violation) = failure {
                violations.insert(format!("{violation:?}").split([' ', '{']).next().unwrap().to_owned());
            }
            assert_eq!(connection.pending_calls(), 0);
            assert!(!left.open.iter().any(|(index, _)| *index == 7), "calls of a connection that is over");
        }
        for user in connection.close() {
            assert!(left.open.remove(&user));
        }
        left.open.retain(|(index, _)| *index != 7);
        if round % 50 == 0 {
            left.failed.clear();
            exercise(&mut left, &mut right, 20, "the honest connection");
            assert!(left.failed.is_empty());
        }
    }
    println!(
        "violations seen: {violations:?}; {accepted} answers were believable; {:?}",
        left.context.counters()
    );
    assert!(violations.len() >= 6, "{violations:?}");
    assert!(left.connections[0].failure().is_none());
}

/// Values of a field that holds `value` in a correct batch: near it, extreme, and with single bits changed.
fn forged(value: u64, bits: u32) -> impl Iterator<Item = u64> {
    let near = [value.wrapping_add(1), value.wrapping_sub(1), value.wrapping_add(32), value.wrapping_sub(32)];
    let extreme = [0, 1, 31, 32, 1024, 1 << 16, u64::MAX, u64::MAX - 31, u64::MAX >> 1];
    let flipped = (0..bits).map(move |bit| value ^ 1 << bit);
    let mask = u64::MAX >> (64 - bits);
    near.into_iter().chain(extreme).chain(flipped).map(move |value| value & mask)
}

/// One batch of a request, or of the response to the victim's only call, with one field forged.
struct ForgedBatch {
    what: String,
    bytes: Vec<u8>,
    imm: u32,
}

/// Every field of a batch, forged. The structures are taken apart without `..`: a new field without a forgery does not compile.
fn forged_batches(metadata: FlowMetadata, header: Header) -> Vec<ForgedBatch> {
    let FlowMetadata { consumer_pos, credit_grant, message_count } = metadata;
    let Header { call_id, credit_blocks, payload_len } = header;
    let imm = encode_imm(64);
    let mut batches = Vec::new();
    let mut add = |name: &str, value: u64, metadata: FlowMetadata, header: Header, imm: u32| {
        let bytes = [&metadata.encode()[..], &header.encode(), b"payload!"].concat();
        batches.push(ForgedBatch { what: format!("{name} = {value:#x}"), bytes, imm });
    };
    add("a correct batch: imm", imm.into(), metadata, header, imm);
    for value in forged(consumer_pos, 64) {
        add("consumer_pos", value, FlowMetadata { consumer_pos: value, ..metadata }, header, imm);
    }
    for value in forged(credit_grant, 64) {
        add("credit_grant", value, FlowMetadata { credit_grant: value, ..metadata }, header, imm);
    }
    for value in forged(message_count.into(), 32) {
        add("message_count", value, FlowMetadata { message_count: value as u32, ..metadata }, header, imm);
    }
    for value in forged(call_id.into(), 32) {
        add("call_id", value, metadata, Header { call_id: value as u32, ..header }, imm);
    }
    for value in forged(credit_blocks.into(), 32) {
        add("credit_blocks", value, metadata, Header { credit_blocks: value as u32, ..header }, imm);
    }
    for value in forged(payload_len.into(), 32) {
        add("payload_len", value, metadata, Header { payload_len: value as u32, ..header }, imm);
    }
    for value in forged(imm.into(), 32) {
        add("imm", value, metadata, header, value as u32);
    }
    batches
}

/// Every field of a compact batch, forged.
fn forged_compact_batches(head: CompactHead) -> Vec<ForgedBatch> {
    let CompactHead { call_id, credit_blocks, grant_blocks, consumer_blocks } = head;
    let imm = COMPACT_FLAG | 8;
    let mut batches = Vec::new();
    let mut add = |name: &str, value: u64, head: CompactHead, imm: u32| {
        let bytes = [&head.encode()[..], b"payload!"].concat();
        batches.push(ForgedBatch { what: format!("compact: {name} = {value:#x}"), bytes, imm });
    };
    add("a correct batch: imm", imm.into(), head, imm);
    for value in forged(call_id.into(), 32) {
        add("call_id", value, CompactHead { call_id: value as u32, ..head }, imm);
    }
    for value in forged(credit_blocks.into(), 32) {
        add("credit_blocks", value, CompactHead { credit_blocks: value as u32, ..head }, imm);
    }
    for value in forged(grant_blocks.into(), 32) {
        add("grant_blocks", value, CompactHead { grant_blocks: value as u32, ..head }, imm);
    }
    for value in forged(consumer_blocks.into(), 32) {
        add("consumer_blocks", value, CompactHead { consumer_blocks: value as u32, ..head }, imm);
    }
    for value in forged(imm.into(), 32) {
        add("imm", value, head, value as u32);
    }
    batches
}

/// A peer forges one field at a time: positions, grants, counts, call numbers, credit, lengths, the immediate. The victim hands
/// out what is correct, or ends this connection with a violation; each of its calls ends once; others go on.
#[test]
fn every_forged_field_of_a_batch_is_a_violation_or_does_no_harm() {
    let (mut left, mut right) = sides(Workload::Small);
    let device = Device::open(&DeviceSpec::Software).unwrap();
    let (mut violations, mut accepted, mut total) = (0, 0, 0);
    for is_response in [false, true] {
        let metadata = FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 1 };
        let mut number = 0;
        loop {
            let (mut malicious, connection) = MaliciousPeer::connect(&device, &left.context, &ring(1024));
            let (mut header, mut metadata) =
                (Header { call_id: 1, credit_blocks: 2, payload_len: 8 }, metadata);
            if is_response {
                connection.call(b"question", 8, (7, 7)).unwrap();
                left.context.flush();
                // The request that the victim has just written, in a compact batch: its answer has the same number and credit.
                let bytes = || {
                    let mut bytes = [0; 24];
                    malicious.ring.read(0, &mut bytes).unwrap();
                    bytes
                };
                let begin = Instant::now();
                while !bytes().ends_with(b"question") {
                    left.turn();
                    assert!(begin.elapsed() < TIMEOUT);
                }
                let request = CompactHead::from_words(bytes().load_words(0));
                header.call_id = request.call_id | 1 << 31;
                header.credit_blocks = request.credit_blocks;
                metadata.consumer_pos = 32;
            }
            let mut batches = forged_batches(metadata, header);
            batches.extend(forged_compact_batches(CompactHead::new(&metadata, &header)));
            let Some(batch) = batches.get(number) else { break };
            number += 1;
            total += 1;
            let what = &batch.what;
            if number % 2 == 0 {
                malicious.write(0, &batch.bytes, batch.imm);
            } else {
                malicious.write_at_once(0, &batch.bytes, batch.imm);
            }
            let (mut ended, mut requests) = (Vec::new(), 0);
            for _ in 0..4 {
                left.context.poll(|user, answer| ended.push((user, answer.map(|bytes| bytes.to_vec()))));
                while let Some(request) = left.context.recv() {
                    requests += 1;
                    assert!(request.data().len() <= 1024, "{what}");
                    drop(request);
                }
            }
            assert!(requests <= 1, "{what}: {requests} requests");
            match connection.failure() {
                Some(failure) => {
                    assert!(matches!(failure, Failure::Violation(_)), "{what}: {failure}");
                    violations += 1;
                }
                None => accepted += 1,
            }
            let user: Vec<User> = ended.into_iter().map(|(user, _)| user).collect();
            let left_over = connection.close();
            let expected = if is_response { vec![(7, 7)] } else { vec![] };
            assert_eq!([user, left_over].concat(), expected, "{what}: every call ends once");
        }
    }
    exercise(&mut left, &mut right, 100, "beside forged batches");
    println!("{total} batches: {violations} violations, {accepted} accepted");
    assert!(violations > 2 * accepted && accepted > 2, "{violations} violations, {accepted} accepted");
}

/// Bytes and an immediate: random, or nearly valid.
fn invalid_batch(random: &mut Random, room: u64) -> (Vec<u8>, u32) {
    let blocks = 1 + random.below((room / 32).clamp(1, 8));
    let mut bytes: Vec<u8> = (0..blocks * 32).map(|_| random.next() as u8).collect();
    if random.below(4) > 0 {
        let message_count = match random.below(6) {
            0 => random.next() as u32,
            1 => u32::MAX,
            _ => random.below(3) as u32,
        };
        let small =
            |random: &mut Random| if random.below(3) == 0 { random.next() } else { 32 * random.below(4) };
        let consumer_pos = small(random);
        let credit_grant = small(random);
        let metadata = FlowMetadata { consumer_pos, credit_grant, message_count };
        bytes[..32].copy_from_slice(&metadata.encode());
        if bytes.len() >= 64 {
            let response = if random.below(2) == 0 { 0x8000_0000 } else { 0 };
            let call_id = (random.below(4) as u32 | 1 << 16 | response)
                ^ if random.below(4) == 0 { 1 << 20 } else { 0 };
            let payload_len =
                if random.below(4) == 0 { random.next() as u32 } else { random.below(40) as u32 };
            let header = Header { call_id, credit_blocks: random.below(4) as u32, payload_len };
            bytes[32..44].copy_from_slice(&header.encode());
        }
    }
    let imm = match random.below(5) {
        0 => random.next() as u32,
        1 => random.below(40) as u32,
        2 => COMPACT_FLAG | random.below(36) as u32,
        _ => encode_imm(bytes.len() as u64),
    };
    (bytes, imm)
}

#[test]
fn invalid_consumer_position_is_a_violation() {
    let (context, device) =
        (TestPeer::software(Workload::Small).context, Device::open(&DeviceSpec::Software).unwrap());
    let (malicious, connection) = MaliciousPeer::connect(&device, &context, &ring(256));
    malicious.ring.write(CONSUMER_AT, &0x1234_5678_u64.to_le_bytes()).unwrap();
    connection.call(b"ask", 8, (0, 0)).unwrap();
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() {
        connection.call(b"ask", 8, (0, 1)).ok();
        context.poll(|_, answer| ended = Some(answer.err()));
        assert!(begin.elapsed() < TIMEOUT, "{:?}", context.counters());
    }
    let Some(Some(CallFailed::Connection(Failure::Violation(violation)))) = ended else {
        panic!("{ended:?}")
    };
    assert!(matches!(violation, Violation::ConsumerMisaligned { .. } | Violation::ConsumerBeyondSent { .. }));
    assert_eq!(context.counters().violations, 1);
}

/// Batches that a correct peer writes, but not in this place or so often.
#[test]
fn batches_without_news_and_wrong_wrap_markers_are_violations() {
    let (context, device) =
        (TestPeer::software(Workload::Small).context, Device::open(&DeviceSpec::Software).unwrap());
    let empty = FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 0 };
    let marker = FlowMetadata { message_count: u32::MAX, ..empty };
    for (batches, metadata, announced, expected) in [
        (1, empty, 32, "EmptyBatch"),
        // A position is news once.
        (2, FlowMetadata { consumer_pos: 32, ..empty }, 32, "EmptyBatch"),
        // It skips the whole ring.
        (1, marker, 1024, "BadWrap"),
    ] {
        let (mut malicious, connection) = MaliciousPeer::connect(&device, &context, &ring(1024));
        connection.call(b"ask", 8, (0, 0)).unwrap();
        context.flush();
        for batch in 0..batches {
            assert_eq!(connection.failure(), None, "batch {batch} of {batches}");
            malicious.write(32 * batch, &metadata.encode(), encode_imm(announced));
            (0..3).for_each(|_| _ = context.poll(|_, _| ()));
        }
        let failure = connection.failure();
        let Some(Failure::Violation(violation)) = failure else { panic!("{expected}: {failure:?}") };
        assert!(format!("{violation:?}").starts_with(expected), "after {batches} batches: {violation:?}");
    }
}

#[test]
fn connect_refuses_a_peer_ring_above_the_limit() {
    let context = TestPeer::software(Workload::Small).context;
    let config = ring(1024);
    let (here, there) =
        (context.create_connection(&config).unwrap(), context.create_connection(&config).unwrap());
    let address = there.address();
    let info = ConnectInfo::decode(address.as_bytes()[INFO_AT..].try_into().unwrap()).unwrap();
    let claimed = ConnectInfo { ring_size: 1 << 26, ..info };
    let address = [&address.as_bytes()[..INFO_AT], &claimed.encode()].concat();
    let address = ConnectionAddress::read_from_bytes(&address).unwrap();
    let refused = here.connect(&address, &ConnectConfig::default());
    let limit = config.max_peer_ring as u64;
    assert!(
        matches!(refused, Err(ConnectError::PeerRing { size, limit: ours }) if (size, ours) == (1 << 26, limit)),
        "64 MiB because the peer says so: {refused:?}"
    );
    // The connection can still be connected.
    here.connect(&there.address(), &ConnectConfig::default()).unwrap();
}
