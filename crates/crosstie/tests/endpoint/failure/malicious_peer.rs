//! A peer that violates the protocol ends its own connection, with a cause, and does no other harm.

use crosstie::device::{
    Access, ConnectConfig, Cq, CqConfig, Data, Mr, Pd, QpConfig, RcQp, RecvWr, RemoteAddr, RemoteMemory,
    SendOp, SendWr,
};
use crosstie::endpoint::{Cause, Endpoint, EndpointAddress, EndpointConfig, Progress};
use crosstie_testkit::rng::{Random, seed};
use zerocopy::IntoBytes;

use super::pair::{HANG, device, endpoint, pattern};

/// A peer made of plain queue pairs: it can send anything.
struct RawPeer {
    transfers: RcQp,
    messages: RcQp,
    cq: Cq,
    /// Where the endpoint's control messages arrive, and where those for the endpoint go.
    controls: Mr,
    target: RemoteAddr,
    sent: u32,
    #[expect(dead_code, reason = "keeps its regions")]
    pd: Pd,
}

const RECEIVES: usize = 64;
/// Where control messages begin in the memory for them, and how many pieces the endpoint of [`config`] has.
const CONTROLS_AT: usize = 64;
const PIECES: u32 = 30;

fn connect(config: &EndpointConfig) -> (Endpoint, RawPeer) {
    connect_with(config, |_| ())
}

/// Connects an endpoint with a peer whose address is changed by `forge`.
fn connect_with(config: &EndpointConfig, forge: impl FnOnce(&mut [u8])) -> (Endpoint, RawPeer) {
    let raw = device();
    let pd = raw.alloc_pd().unwrap();
    let cq = raw.create_cq(&CqConfig { depth: 4096 }).unwrap();
    let qp = || pd.create_rc(&QpConfig { max_inline: 64, ..QpConfig::default() }, &cq, &cq, None).unwrap();
    let (mut transfers, mut messages) = (qp(), qp());
    let endpoint = endpoint(&device(), config);
    let controls = pd.allocate(CONTROLS_AT + RECEIVES * 32, Access::ALL).unwrap();
    let mut address = b"ctendp\x00\x03\x02\x00\x10\x00\x10\x00\x00\x00".to_vec();
    address.extend(controls.remote().rkey.to_le_bytes());
    address.extend(controls.remote().addr.to_le_bytes());
    address.extend(transfers.address().as_bytes());
    address.extend(messages.address().as_bytes());
    forge(&mut address);
    endpoint.connect(&EndpointAddress::from_bytes(&address).unwrap()).unwrap();
    let bytes = endpoint.address().to_bytes();
    let theirs =
        |at: usize| zerocopy::FromBytes::read_from_bytes(&bytes[28 + 32 * at..60 + 32 * at]).unwrap();
    let target = RemoteAddr {
        rkey: u32::from_le_bytes(bytes[16..20].try_into().unwrap()),
        addr: u64::from_le_bytes(bytes[20..28].try_into().unwrap()) + CONTROLS_AT as u64,
    };
    transfers.connect(&theirs(0), &ConnectConfig::default()).unwrap();
    messages.init(Access::ALL).unwrap();
    for number in 0..RECEIVES {
        messages.post_recv(&RecvWr { wr_id: 1000 + number as u64, sges: &[] }).unwrap();
    }
    messages.connect(&theirs(1), &ConnectConfig::default()).unwrap();
    (endpoint, RawPeer { transfers, messages, cq, controls, target, sent: 0, pd })
}

fn config() -> EndpointConfig {
    EndpointConfig {
        progress: Progress::Caller,
        deadline: None,
        messages: 4,
        imm_window: 4,
        ..EndpointConfig::default()
    }
}

/// The endpoint ends with this cause, and so do its operations.
fn assert_ends(endpoint: &Endpoint, peer: &mut RawPeer, what: &str) {
    let begin = std::time::Instant::now();
    while endpoint.ended().is_none() {
        endpoint.progress();
        peer.cq.poll(64, |_| ()).unwrap();
        assert!(begin.elapsed() < HANG, "{what}: not noticed");
    }
    assert_eq!(endpoint.ended(), Some(Cause::Violation), "{what}");
    assert_eq!(endpoint.counters().violations, 1);
}

fn control(kind: u8, slot: u32, addr: u64, len: u64, rkey: u32, sequence: u32) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend(slot.to_le_bytes());
    bytes.extend(addr.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend(rkey.to_le_bytes());
    bytes.extend(sequence.to_le_bytes());
    bytes
}

impl RawPeer {
    /// Sends a control message.
    fn send(&mut self, bytes: &[u8]) {
        let piece = self.sent % PIECES;
        self.sent += 1;
        self.send_to(piece.into(), piece, bytes);
    }

    /// Writes bytes into a piece of the endpoint's memory for control messages, with an immediate that may name another one.
    fn send_to(&mut self, piece: u64, imm: u32, bytes: &[u8]) {
        let to = RemoteAddr { addr: self.target.addr + 32 * piece, ..self.target };
        let op = SendOp::WriteImm(to, imm);
        self.messages.post(&SendWr::new(1, op, Data::Inline(bytes)).signaled()).unwrap();
    }

    /// The buffer that the endpoint has announced: slot, memory.
    fn announced(&mut self, endpoint: &Endpoint) -> (u32, RemoteMemory) {
        let mut piece = None;
        while piece.is_none() {
            endpoint.progress();
            self.cq.poll(1, |completion| piece = completion.imm).unwrap();
        }
        let mut bytes = [0; 32];
        self.controls.read(CONTROLS_AT + piece.unwrap() as usize * 32, &mut bytes).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        (word(4), RemoteMemory { addr: long(8), len: long(16), rkey: word(24), reserved: 0 })
    }
}

#[test]
fn malformed_control_messages_end_the_connection() {
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("empty", vec![vec![]]),
        ("short", vec![vec![2; 31]]),
        ("unknown kind", vec![control(9, 0, 0, 0, 0, 0)]),
        ("not zero", vec![control(2, 5, 1, 0, 0, 0)]),
        ("out of order", vec![control(1, 0, 0, 8, 0, 1)]),
        ("too long", vec![control(1, 0, 0, u64::MAX, 0, 0)]),
        ("wraps", vec![control(1, 0, u64::MAX, 8, 0, 0)]),
        ("too many", (0..6).map(|number| control(1, number, 0, 8, 0, number)).collect()),
        ("forged credit", vec![control(2, 1000, 0, 0, 0, 0)]),
        ("answers without a withdrawal", vec![control(5, 0, 0, 0, 0, 0)]),
        ("knows a buffer that was not withdrawn", vec![control(6, 0, 0, 0, 0, 0)]),
    ];
    for (what, messages) in cases {
        let (endpoint, mut peer) = connect(&config());
        let recv = endpoint.recv(endpoint.allocate(64).unwrap(), ..).unwrap();
        messages.iter().for_each(|message| peer.send(message));
        assert_ends(&endpoint, &mut peer, what);
        let failed = recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::Violation, "{what}");
        assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), 64);
    }
}

#[test]
fn control_messages_elsewhere_end_the_connection() {
    // No more than the peer has.
    let credit = control(2, 16, 0, 0, 0, 0);
    type Post<'a> = &'a dyn Fn(&mut RawPeer);
    let cases: [(&str, Post<'_>); 4] = [
        ("no such piece", &|peer| peer.send_to(0, PIECES, &credit)),
        ("last number", &|peer| peer.send_to(0, (1 << 12) - 1, &credit)),
        ("generation without parts", &|peer| peer.send_to(0, 1 << 12, &credit)),
        ("SEND", &|peer| {
            peer.messages.post(&SendWr::new(1, SendOp::Send, Data::Inline(&[])).signaled()).unwrap();
        }),
    ];
    for (what, post) in cases {
        let (endpoint, mut peer) = connect(&config());
        peer.send_to(3, 3, &credit);
        endpoint.progress();
        assert_eq!(endpoint.ended(), None, "any piece, in any order");
        post(&mut peer);
        assert_ends(&endpoint, &mut peer, what);
    }
}

/// The memory for control messages that the peer names does not exist, or is too short.
#[test]
fn announcing_into_memory_that_does_not_exist_ends_the_connection() {
    type Forge = fn(&mut [u8]);
    let cases: [(&str, Forge); 3] = [
        ("key", |address| address[16] ^= 0x55),
        ("address", |address| address[20..28].fill(0xff)),
        ("length", |address| {
            let at = u64::from_le_bytes(address[20..28].try_into().unwrap());
            address[20..28].copy_from_slice(&(at + (CONTROLS_AT + RECEIVES * 32 - 64) as u64).to_le_bytes());
        }),
    ];
    for (what, forge) in cases {
        let (endpoint, mut peer) = connect_with(&config(), forge);
        let recv = endpoint.recv(endpoint.allocate(64).unwrap(), ..).unwrap();
        let begin = std::time::Instant::now();
        while endpoint.ended().is_none() {
            endpoint.progress();
            peer.cq.poll(64, |_| ()).unwrap();
            assert!(begin.elapsed() < HANG, "{what}: not noticed");
        }
        assert!(matches!(endpoint.ended(), Some(Cause::RemoteAccess(_))), "{what}: {:?}", endpoint.ended());
        let failed = recv.wait().unwrap_err();
        assert_eq!(failed.cause, Cause::Flushed, "{what}");
        assert_eq!(failed.buffer.wait_for(HANG).unwrap().len(), 64);
    }
}

#[test]
fn forged_immediates_end_the_connection() {
    let config = config();
    // Data for a buffer that was never announced, of another generation, on a queue pair without a part, twice, and too long.
    for what in ["unknown", "generation", "parts", "twice", "too long", "flood"] {
        let (endpoint, mut peer) = connect(&config);
        let recv = endpoint.recv(endpoint.allocate(64).unwrap(), ..32).unwrap();
        let (slot, memory) = peer.announced(&endpoint);
        assert_eq!(memory.len, 32);
        let mut write = |imm: u32, len: usize| {
            let bytes = pattern(len, 1);
            peer.messages
                .post(&SendWr::new(1, SendOp::WriteImm(memory.at(0), imm), Data::Inline(&bytes)))
                .unwrap();
        };
        let part = 1 << 24;
        match what {
            "unknown" => write(part | (slot + 1), 8),
            "generation" => write(part | (slot + (1 << 12)), 8),
            "parts" => write(2 << 24 | slot, 8),
            "twice" => (0..2).for_each(|_| write(part | slot, 8)),
            "too long" => write(part | slot, 33),
            _ => {
                // More immediates than there is credit for.
                let target = endpoint.allocate(8).unwrap();
                for imm in 0..5 {
                    let op = SendOp::WriteImm(target.remote().at(0), imm);
                    peer.transfers.post(&SendWr::new(1, op, Data::Inline(&[0; 8]))).unwrap();
                }
            }
        }
        assert_ends(&endpoint, &mut peer, what);
        // The message that was right was delivered.
        match recv.wait() {
            Ok(done) => assert_eq!((what, done.bytes), ("twice", 8)),
            Err(failed) => assert_eq!(failed.cause, Cause::Violation, "{what}"),
        }
    }
}

/// Whatever bytes arrive: no panic, no hang, and what the endpoint returns is one of its causes.
#[test]
fn random_bytes_do_no_harm() {
    let mut random = Random(seed());
    for _ in 0..200 {
        let (endpoint, mut peer) = connect(&config());
        let recv = endpoint.recv(endpoint.allocate(64).unwrap(), ..).unwrap();
        let send = endpoint.send(endpoint.allocate(64).unwrap(), ..).unwrap();
        for _ in 0..4 {
            let mut bytes: Vec<u8> = (0..32).map(|_| [0, 0, random.next() as u8][random.index(3)]).collect();
            bytes[0] = random.below(8) as u8;
            peer.send(&bytes);
        }
        for _ in 0..50 {
            endpoint.progress();
            peer.cq.poll(64, |_| ()).unwrap();
        }
        endpoint.close();
        for future in [recv, send] {
            if let Err(failed) = future.wait() {
                failed.buffer.wait_for(HANG).unwrap();
            }
        }
        assert_eq!(endpoint.counters().leased_slots, 0);
    }
}
