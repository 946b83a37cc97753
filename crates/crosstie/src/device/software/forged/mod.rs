//! A real second process of the same user that forges what it can write, on purpose and one thing at a time.
//!
//! ```text
//!  this process                                             attacker (another process of the same user)
//!  victim device:  queue pairs `own`, `shared`  <=========> two connected queue pairs
//!                  datagram queue pair          <=========> and one for datagrams
//!                  SRQ, target, guards                      forges words and completions in the victim's segment, and
//!  honest device:  queue pair  <---> victim                 words of its own segment, which the victim reads when it sends
//! ```
//!
//! After each forgery all sides exchange messages. What must hold: nobody panics or hangs; memory that the attacker was not given
//! is unchanged; a receive completes at most once and never with more bytes than it has; honest peers with completion queues of
//! their own go on.
//!
//! The attacker writes words at offsets that this process computes from `layout.rs` (`fields.rs`), and completions (`completions.rs`)
//! through [`forge_completion`], the only function that knows how an entry lies in memory.

mod completions;
mod fields;
mod identity;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::collections::HashSet;

use crosstie_testkit::child::{self, Child};
use crosstie_testkit::wait::until;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use self::fields::{STRUCTURES, Word, fields};
use super::cq_ring::{CqRing, NewCqe};
use super::ends::{connect, small_device};
use super::invalid_input_tests::shared_arc;
use super::lane::{LANE_ENTRIES_AT, NewEntry};
use super::layout::{CQES_AT, CqHeader, Cqe, HEAP_AT, IN_PLACE, LINES_PER_PEER, PeerLine, QpNum};
use super::link::Link;
use crate::device::*;
use crate::memory::segment::{Segment, SharedRef, SharedSlice};
use crate::region::OwnedRegion;
use crate::ring::reservation;

const POISON: u8 = 0xC7;
/// Bytes of a receive.
const RECEIVE: usize = 64;
const MESSAGE: &[u8; 16] = b"sixteen bytes...";
/// The key of datagrams.
const KEY: u32 = 7;

/// Errors come soon.
fn impatient() -> ConnectConfig {
    ConnectConfig { rnr_retry: 0, timeout: 1, retry_count: 0, ..ConnectConfig::default() }
}

/// Stores `value` and returns what was there.
fn store(segment: &Segment, word: &Word, value: u64) -> u64 {
    let at = segment.bytes(word.offset, word.bytes).unwrap().as_ptr();
    // SAFETY: an aligned word inside the segment, which is accessed with atomics only.
    unsafe {
        match word.bytes {
            4 => AtomicU32::from_ptr(at.cast()).swap(value as u32, Relaxed).into(),
            _ => AtomicU64::from_ptr(at.cast()).swap(value, Relaxed),
        }
    }
}

fn load(segment: &Segment, word: &Word) -> u64 {
    let at = segment.bytes(word.offset, word.bytes).unwrap().as_ptr();
    // SAFETY: as above.
    unsafe {
        match word.bytes {
            4 => AtomicU32::from_ptr(at.cast()).load(Relaxed).into(),
            _ => AtomicU64::from_ptr(at.cast()).load(Relaxed),
        }
    }
}

// ----------------------------------------------------------------------------------------------------- the attacker

/// One end of the two connections: one with its own receives, one with those of an SRQ. And a datagram queue pair.
struct Ends {
    cq: Cq,
    own: RcQp,
    shared: RcQp,
    srq: Srq,
    datagram_cq: Cq,
    datagram: UdQp,
    /// Where its datagrams go.
    to: Option<(Ah, u32)>,
    next_wr: u64,
}

impl Ends {
    fn new(device: &Device, pd: &Pd) -> Ends {
        let cq = device.create_cq(&CqConfig { depth: 16 }).unwrap();
        let srq = pd.create_srq(&SrqConfig { max_wr: 8, max_sge: 1 }).unwrap();
        let config = QpConfig { max_recv_wr: 8, ..QpConfig::default() };
        let own = pd.create_rc(&config, &cq, &cq, None).unwrap();
        let shared = pd.create_rc(&config, &cq, &cq, Some(&srq)).unwrap();
        let datagram_cq = device.create_cq(&CqConfig { depth: 16 }).unwrap();
        let mut datagram = pd.create_ud(&config, &datagram_cq, &datagram_cq, None).unwrap();
        datagram.activate(KEY).unwrap();
        Ends { cq, own, shared, srq, datagram_cq, datagram, to: None, next_wr: 0 }
    }

    fn connect(&mut self, pd: &Pd, own: &QpAddress, shared: &QpAddress, datagram: u32) {
        self.own.connect(own, &impatient()).unwrap();
        self.shared.connect(shared, &impatient()).unwrap();
        self.to = Some((pd.create_ah(&own.device).unwrap(), datagram));
    }

    /// The number of the queue pair that uses this kind of queue.
    fn qp_num(&self, queue: &str) -> u32 {
        match queue {
            "own" => self.own.qp_num(),
            "shared" => self.shared.qp_num(),
            _ => self.datagram.qp_num(),
        }
    }

    /// Posts receives until the queues are full. Adds their `wr_id`s to `outstanding`.
    fn post_receives(&mut self, buffers: &Mr, outstanding: &mut HashSet<u64>) {
        for queue in 0..3 {
            loop {
                let slot = self.next_wr as usize % 32;
                let sges = [buffers.sge(slot * 128..slot * 128 + RECEIVE).unwrap()];
                let wr = RecvWr { wr_id: 1 << 32 | self.next_wr, sges: &sges };
                let posted = match queue {
                    0 => self.own.post_recv(&wr),
                    1 => self.srq.post_recv(&wr),
                    _ => self.datagram.post_recv(&wr),
                };
                match posted {
                    Ok(()) => assert!(outstanding.insert(wr.wr_id)),
                    Err(PostError::Full) => break,
                    Err(error) => panic!("{error:?}"),
                }
                self.next_wr += 1;
            }
        }
    }

    /// Posts every kind of request. Any outcome but a panic is allowed: the peer's words are forged.
    fn post_sends(&mut self, remote: RemoteMemory, local: &Mr) {
        let data = [local.sge(0..16).unwrap()];
        let eight = [local.sge(0..8).unwrap()];
        for qp in [&mut self.own, &mut self.shared] {
            for (op, data) in [
                (SendOp::Send, Data::Inline(MESSAGE)),
                (SendOp::WriteImm(remote.at(0), 7), Data::Regions(&data)),
                (SendOp::Write(remote.at(64)), Data::Inline(MESSAGE)),
                (SendOp::Read(remote.at(128)), Data::Regions(&data)),
                (SendOp::FetchAdd { remote: remote.at(256), add: 1 }, Data::Regions(&eight)),
                (SendOp::SendImm(8), Data::Regions(&data)),
            ] {
                match qp.post(&SendWr::new(5, op, data).signaled()) {
                    Ok(_) | Err(PostError::Full | PostError::WrongState(_)) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
        let (ah, qp_num) = self.to.as_ref().unwrap();
        for data in [Data::Inline(MESSAGE), Data::Regions(&data)] {
            match self.datagram.post(ah, *qp_num, KEY, &SendWr::new(5, SendOp::Send, data).signaled()) {
                // No line for this sender: the peer forges that, too.
                Ok(_) | Err(PostError::Full | PostError::WrongState(_) | PostError::Device(_)) => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    }
}

fn decode<T: FromBytes>(text: &str) -> T {
    T::read_from_bytes(&child::from_hex(text)).unwrap()
}

/// A completion as the attacker writes it; any bits.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ForgedCompletion {
    request: u64,
    qp_num: u32,
    byte_len: u32,
    detail: u32,
    kind: u8,
    opcode: u8,
    status: u8,
    /// Epoch in the upper seven bits, then whether there is an immediate.
    epoch_and_imm: u8,
    /// 1: an entry of the queue pair's lane, 0: an entry of the ring.
    in_lane: u32,
    /// Lane: positions that are left out before it.
    skip: u32,
}

impl ForgedCompletion {
    /// A completion that a correct peer would write. Taken apart without `..`: a new field must be forged, too.
    fn like(new: NewCqe, request: u64) -> ForgedCompletion {
        let NewCqe { kind, opcode, status, request: _, qp_num, byte_len, detail, has_imm, epoch } = new;
        ForgedCompletion {
            request,
            qp_num,
            byte_len,
            detail,
            kind: kind as u8,
            opcode: opcode as u8,
            status: status as u8,
            epoch_and_imm: epoch << 1 | u8::from(has_imm),
            in_lane: 0,
            skip: 0,
        }
    }

    /// A completed receive in slot `slot` of a queue pair, as its peer would write it.
    fn in_lane(new: NewEntry, qp_num: u32, slot: u64) -> ForgedCompletion {
        let NewEntry { opcode, status, byte_len, imm } = new;
        ForgedCompletion {
            request: slot,
            qp_num,
            byte_len,
            detail: imm.unwrap_or(0),
            kind: 0,
            opcode: opcode as u8,
            status: status as u8,
            epoch_and_imm: u8::from(imm.is_some()),
            in_lane: 1,
            skip: 0,
        }
    }
}

/// Writes an entry into the lane of a queue pair that is connected to the attacker, and counts it as a correct peer does.
fn forge_lane_entry(link: &Link, cq_at: u64, forged: &ForgedCompletion) -> bool {
    let index = QpNum::from_bits(forged.qp_num).index() as usize;
    let block = &link.qps[index];
    let lines: SharedSlice<PeerLine> = SharedSlice::new(&link.lines, 0, LINES_PER_PEER as usize).unwrap();
    let line = &lines[block.line.load(Relaxed) as usize];
    let owner_line = &block.owner_line;
    let (at, depth) = (owner_line.lane_at.load(Relaxed), u64::from(owner_line.lane_depth.load(Relaxed)));
    let position = line.taken.load(Relaxed) + u64::from(forged.skip);
    line.taken.store(position + 1, Relaxed);
    let tag = u64::from(forged.status) << 8
        | u64::from(forged.opcode & 7)
        | u64::from(forged.epoch_and_imm & 1) << 3
        | 1 << 4;
    let head = tag << 48 | (forged.request & 0xFFFF) << 32 | (position + 1) & 0xFFFF_FFFF;
    let entry = at + LANE_ENTRIES_AT + position % depth * 64;
    let detail = u64::from(forged.detail) << 32 | u64::from(forged.byte_len);
    for (at, value) in [(8, detail), (16, u64::MAX), (0, head)] {
        store(&link.segment, &Word::new("", entry + at, 8), value);
    }
    let header: SharedRef<CqHeader> = SharedRef::new(&link.segment, cq_at).unwrap();
    header.ready.add(index);
    true
}

/// Writes a completion into the queue at `cq_at`, as a correct peer does it, but with any contents. False if the queue is full.
fn forge_completion(link: &Link, cq_at: u64, forged: &ForgedCompletion) -> bool {
    if forged.in_lane != 0 {
        return forge_lane_entry(link, cq_at, forged);
    }
    const { assert!(size_of::<Cqe>() == 32) };
    let ring = CqRing::new(&link.segment, cq_at).unwrap();
    let Ok(position) = ring.reserve(&AtomicU64::new(reservation::IDLE)) else { return false };
    let tag = u32::from_le_bytes([forged.kind, forged.opcode, forged.status, forged.epoch_and_imm]);
    let words = [
        (24, u64::from(forged.detail) << 32 | u64::from(tag)),
        (16, u64::from(forged.byte_len) << 32 | u64::from(forged.qp_num)),
        (8, forged.request),
    ];
    let entry = cq_at + CQES_AT + position % ring.depth() * 32;
    for (at, value) in words {
        store(&link.segment, &Word::new("", entry + at, 8), value);
    }
    ring.cqes.ring(position).publish(position);
    true
}

fn encode(value: &(impl IntoBytes + Immutable)) -> String {
    child::to_hex(value.as_bytes())
}

/// Runs as the attacker when the tests of this module start it in a child process; does nothing in an ordinary run.
#[test]
fn attacker_process() {
    if !child::is_child() {
        return;
    }
    let device = small_device();
    let pd = device.alloc_pd().unwrap();
    let memory = pd.allocate(4096, Access::ALL).unwrap();
    let mut ends: Option<Ends> = None;
    let mut open_hellos = Vec::new();
    let mut outstanding = HashSet::new();
    let mut victim: Option<(DeviceAddress, RemoteMemory)> = None;
    let say = |text: &str| child::write(text.as_bytes());
    loop {
        let line = String::from_utf8(child::read()).unwrap();
        let order: Vec<&str> = line.split(' ').collect();
        match order[..] {
            ["connect", own, shared, datagram, target] => {
                drop(ends.take());
                outstanding.clear();
                let (own, shared): (QpAddress, QpAddress) = (decode(own), decode(shared));
                let mut new = Ends::new(&device, &pd);
                new.connect(&pd, &own, &shared, datagram.parse().unwrap());
                new.post_receives(&memory, &mut outstanding);
                let addresses = [new.own.address(), new.shared.address()];
                let datagram = new.datagram.qp_num();
                victim = Some((own.device, decode(target)));
                ends = Some(new);
                let [own, shared] = addresses.map(|address| encode(&address));
                say(&format!("{own} {shared} {datagram} {}", encode(&memory.remote())));
            }
            // Forges a word of the victim's device.
            ["store", lines, offset, bytes, value] => {
                let link = shared_arc(&device).link(&victim.unwrap().0).unwrap();
                let [offset, bytes, value] = [offset, bytes, value].map(|number| number.parse().unwrap());
                let word = Word { in_lines: lines == "lines", ..Word::new("", offset, bytes) };
                let segment = if word.in_lines { &link.lines } else { &link.segment };
                say(&store(segment, &word, value).to_string());
            }
            // Lists the words of its own device.
            ["words", structure, queue] => {
                let ends = ends.as_ref().unwrap();
                let structure = STRUCTURES[structure.parse::<usize>().unwrap()];
                let list = own_words(structure, &device, ends, &memory, queue);
                say(&list.len().to_string());
                for word in list {
                    let old = load(&shared_arc(&device).memory.segment, &word);
                    say(&format!("{} {} {} {old}", word.name.replace(' ', "-"), word.offset, word.bytes));
                }
            }
            // Forges a word of its own device.
            ["store-own", offset, bytes, value] => {
                let [offset, bytes, value] = [offset, bytes, value].map(|number| number.parse().unwrap());
                let word = Word::new("", offset, bytes);
                say(&store(&shared_arc(&device).memory.segment, &word, value).to_string());
            }
            ["complete", cq_at, count, forged] => {
                let link = shared_arc(&device).link(&victim.unwrap().0).unwrap();
                let forged: ForgedCompletion = decode(forged);
                let (at, count) = (cq_at.parse().unwrap(), count.parse().unwrap());
                let written = (0..count).filter(|_| forge_completion(&link, at, &forged)).count();
                say(&written.to_string());
            }
            // Says HELLO with the name of another device, or with as many names of its own as the device takes.
            ["hello", to, name] => say(&identity::say_hello(&decode(to), &decode(name)).to_string()),
            ["hellos", to, count] => {
                identity::say_hellos(&decode(to), count.parse().unwrap(), &mut open_hellos);
                let statuses: Vec<String> =
                    open_hellos.iter().map(|hello| hello.status.to_string()).collect();
                say(&statuses.join(" "));
            }
            ["traffic"] => {
                let ends = ends.as_mut().unwrap();
                ends.post_sends(victim.unwrap().1, &memory);
                poll_some(&mut ends.cq, &mut |_| {});
                poll_some(&mut ends.datagram_cq, &mut |_| {});
                say("done");
            }
            _ => panic!("unknown order {line:?}"),
        }
    }
}

fn own_words(
    structure: fields::Structure,
    device: &Device,
    ends: &Ends,
    memory: &Mr,
    queue: &str,
) -> Vec<Word> {
    let shared = shared_arc(device);
    fields(structure, shared, &shared.qps.get(ends.qp_num(queue)).unwrap(), memory.remote().rkey)
}

/// Polls for a short while.
fn poll_some(cq: &mut Cq, each: &mut dyn FnMut(&Completion)) {
    for _ in 0..40 {
        let mut count = 0;
        // An overrun is an error that a forged word may cause.
        if cq
            .poll(16, |completion| {
                count += 1;
                each(completion);
            })
            .is_err()
        {
            return;
        }
        assert!(count <= 16);
        std::thread::yield_now();
    }
}

struct Attacker(Child);

impl Attacker {
    fn start() -> Attacker {
        Attacker(Child::start(attacker_process, "attacks"))
    }

    fn order(&mut self, order: &str) {
        self.0.write(order.as_bytes());
    }

    fn answer(&mut self) -> String {
        self.0.read_text()
    }

    fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    fn store(&mut self, word: &Word, value: u64) -> u64 {
        let segment = if word.in_lines { "lines" } else { "main" };
        self.ask(&format!("store {segment} {} {} {value}", word.offset, word.bytes)).parse().unwrap()
    }
}

// ------------------------------------------------------------------------------------------------------- the victim

/// The victim, with an honest peer, and memory that the attacker was not given.
struct Victim {
    device: Device,
    pd: Pd,
    target: Mr,
    buffers: Mr,
    honest: Honest,
    /// Not registered.
    outside: Vec<u8>,
    /// Registered in place in another protection domain.
    #[expect(dead_code, reason = "keeps the memory registered")]
    in_place: OwnedRegion<Vec<u8>>,
    in_place_at: *const u8,
}

/// A device of this process that follows the protocol, and its connections to the victim, with their own completion queues.
struct Honest {
    device: Device,
    guard: Mr,
    cq: Cq,
    own: RcQp,
    victim_cq: Cq,
    victim_own: RcQp,
    next: u64,
}

impl Victim {
    fn new() -> Victim {
        let device = small_device();
        let pd = device.alloc_pd().unwrap();
        let target = pd.allocate(4096, Access::ALL).unwrap();
        let buffers = pd.allocate(8192, Access::ALL).unwrap();
        let other_pd = device.alloc_pd().unwrap();
        let memory = vec![POISON; 4096];
        let in_place_at = memory.as_ptr();
        let in_place = OwnedRegion::register(&other_pd, memory, Access::LOCAL_WRITE).unwrap();
        let honest = Honest::new(&device, &pd);
        Victim { device, pd, target, buffers, honest, outside: vec![POISON; 4096], in_place, in_place_at }
    }

    /// Values that name something of the victim that the attacker must not reach, or the end of something.
    fn aimed_values(&self) -> Vec<u64> {
        let segment = shared_arc(&self.device).memory.segment.len();
        vec![
            self.outside.as_ptr().expose_provenance() as u64,
            self.in_place_at.expose_provenance() as u64,
            segment,
            segment - 64,
            HEAP_AT,
            IN_PLACE,
        ]
    }

    fn connect(&self, attacker: &mut Attacker) -> (Ends, RemoteMemory) {
        let mut ends = Ends::new(&self.device, &self.pd);
        let [own, shared] = [&ends.own, &ends.shared].map(|qp| encode(&qp.address()));
        let (datagram, target) = (ends.datagram.qp_num(), encode(&self.target.remote()));
        let answer = attacker.ask(&format!("connect {own} {shared} {datagram} {target}"));
        let parts: Vec<&str> = answer.split_whitespace().collect();
        ends.connect(&self.pd, &decode(parts[0]), &decode(parts[1]), parts[2].parse().unwrap());
        (ends, decode(parts[3]))
    }

    /// All sides exchange messages after a forgery. `outstanding` are the receives that were posted before it.
    fn exchange(
        &mut self,
        ends: &mut Ends,
        outstanding: &mut HashSet<u64>,
        attacker: &mut Attacker,
        remote: RemoteMemory,
        what: &str,
    ) {
        attacker.order("traffic");
        ends.post_sends(remote, &self.target);
        self.poll(ends, outstanding, what);
        assert_eq!(attacker.answer(), "done", "{what}");
        ends.post_receives(&self.buffers, outstanding);
        self.poll(ends, outstanding, what);
        self.check(what);
    }

    fn poll(&mut self, ends: &mut Ends, outstanding: &mut HashSet<u64>, what: &str) {
        let mut check = |completion: &Completion| {
            let is_recv = matches!(completion.opcode, Opcode::Recv | Opcode::RecvWriteImm);
            if is_recv && completion.status == Status::Success {
                assert!(outstanding.remove(&completion.wr_id), "{what}: not outstanding: {completion:?}");
            }
            if completion.opcode == Opcode::Recv && completion.status == Status::Success {
                assert!(
                    completion.byte_len as usize <= RECEIVE,
                    "{what}: longer than the receive: {completion:?}"
                );
            }
        };
        poll_some(&mut ends.cq, &mut check);
        poll_some(&mut ends.datagram_cq, &mut check);
    }

    /// Honest peers go on, and no memory has changed that the attacker was not given.
    fn check(&mut self, what: &str) {
        self.honest.exchange(&self.buffers, what);
        assert!(self.outside.iter().all(|byte| *byte == POISON), "{what}: memory that is not registered");
        // SAFETY: `in_place` owns the memory, which nobody has a right to write.
        let in_place = unsafe { core::slice::from_raw_parts(self.in_place_at, 4096) };
        assert!(in_place.iter().all(|byte| *byte == POISON), "{what}: memory of another protection domain");
        let mut guard = [0; 4096];
        self.honest.guard.read(0, &mut guard).unwrap();
        assert!(guard.iter().all(|byte| *byte == POISON), "{what}: memory of another device");
    }
}

impl Honest {
    fn new(victim: &Device, victim_pd: &Pd) -> Honest {
        let device = small_device();
        let pd = device.alloc_pd().unwrap();
        let guard = pd.allocate(4096, Access::ALL).unwrap();
        guard.write(0, &[POISON; 4096]).unwrap();
        let cq = device.create_cq(&CqConfig { depth: 16 }).unwrap();
        let victim_cq = victim.create_cq(&CqConfig { depth: 16 }).unwrap();
        let mut own = pd.create_rc(&QpConfig::default(), &cq, &cq, None).unwrap();
        let mut victim_own = victim_pd.create_rc(&QpConfig::default(), &victim_cq, &victim_cq, None).unwrap();
        connect(&mut own, &mut victim_own);
        Honest { device, guard, cq, own, victim_cq, victim_own, next: 0 }
    }

    /// A message from the honest device to the victim, and one back.
    fn exchange(&mut self, buffers: &Mr, what: &str) {
        self.next += 1;
        let text = self.next.to_le_bytes();
        let at = 4096 + self.next as usize % 16 * 64;
        self.victim_own
            .post_recv(&RecvWr { wr_id: self.next, sges: &[buffers.sge(at..at + 64).unwrap()] })
            .unwrap();
        self.own.post(&SendWr::new(self.next, SendOp::Send, Data::Inline(&text)).signaled()).unwrap();
        for cq in [&mut self.victim_cq, &mut self.cq] {
            let mut got = Completion::default();
            until(format_args!("{what}: an honest peer goes on"), || cq.next(&mut got).unwrap());
            assert_eq!((got.wr_id, got.status), (self.next, Status::Success), "{what}: an honest peer");
        }
        let mut arrived = [0; 8];
        buffers.read(at, &mut arrived).unwrap();
        assert_eq!(arrived, text, "{what}: the message of an honest peer");
    }
}
