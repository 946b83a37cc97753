//! Every word of the structures in `layout.rs` that a peer can write, with forged values.
//!
//! [`fields`] takes the structures apart without `..`: a new field without a forgery does not compile.

use core::sync::atomic::Ordering::Relaxed;
use std::collections::HashSet;

use super::super::lane::{LANE_ENTRIES_AT, LaneEntry, LaneHeader};
use super::super::layout::{
    CQES_AT, CqHeader, Cqe, Header, OwnerLine, PeerLine, QpBlock, RECV_HEAD_WORDS, REGIONS_AT, RegionEntry,
    RegionKey, SrqHeader, recv_stride,
};
use super::super::lock::locked;
use super::super::peer_lines::{AssignedLine, LineUse};
use super::super::qp::QpShared;
use super::super::state::DeviceShared;
use super::{Attacker, Victim, load};
use crate::device::software::invalid_input_tests::shared_arc;
use crate::memory::segment::{Segment, SharedRef};

/// The structures whose fields are forged together, with one attacker process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Structure {
    Header,
    Region,
    Block,
    Line,
    Cq,
    Entries,
    Lane,
    Slots,
    Srq,
}

pub(super) const STRUCTURES: [Structure; 9] = [
    Structure::Header,
    Structure::Region,
    Structure::Block,
    Structure::Line,
    Structure::Cq,
    Structure::Entries,
    Structure::Lane,
    Structure::Slots,
    Structure::Srq,
];

/// A word of a segment.
#[derive(Clone, Debug)]
pub(super) struct Word {
    pub(super) name: String,
    /// In the segment with the attacker's peer lines, or in the device's segment.
    pub(super) in_lines: bool,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Word {
    pub(super) fn new(name: &str, offset: u64, bytes: u64) -> Word {
        Word { name: name.to_string(), in_lines: false, offset, bytes }
    }
}

struct Words<'a> {
    list: Vec<Word>,
    in_lines: bool,
    segment: &'a Segment,
}

impl Words<'_> {
    /// Adds all words of a field.
    fn add<T>(&mut self, name: &str, field: &T) {
        let base = self.segment.bytes(0, 1).unwrap().as_ptr().addr();
        let offset = (core::ptr::from_ref(field).addr() - base) as u64;
        let (size, align) = (size_of::<T>() as u64, align_of::<T>() as u64);
        self.add_words(name, offset, if align < 8 { 4 } else { 8 }, size);
    }

    /// Adds the words of `size` bytes at `offset`; of a long field, the first eight.
    fn add_words(&mut self, name: &str, offset: u64, bytes: u64, size: u64) {
        for i in 0..(size / bytes).min(8) {
            let name = if size == bytes { name.to_string() } else { format!("{name}[{i}]") };
            self.list.push(Word { name, in_lines: self.in_lines, offset: offset + i * bytes, bytes });
        }
    }
}

/// All words of one structure that belongs to queue pair `qp`, or to the region with this key.
pub(super) fn fields(structure: Structure, device: &DeviceShared, qp: &QpShared, key: u32) -> Vec<Word> {
    let segment = &device.memory.segment;
    let mut peer_lines = locked(&device.peers.lines);
    // Of a datagram queue pair: the line of the sender that came last.
    let is_sender = |line: &AssignedLine| qp.is_datagram() && matches!(line.usage, LineUse::Datagrams { .. });
    let line_of_sender = || peer_lines.all().filter(is_sender).max_by_key(|line| line.tenure);
    let peer_line = qp.peer_line().or_else(line_of_sender);
    let lines = peer_line.as_ref().map(|peer| peer_lines.segment(&peer.gid).unwrap());
    let mut words = Words { list: Vec::new(), in_lines: false, segment };
    let owner_line = &qp.block.owner_line;
    let (recv_at, sges) = (owner_line.recv_at.load(Relaxed), owner_line.recv_sges.load(Relaxed));
    let cq_at = qp.block.recv_cq.load(Relaxed);
    match structure {
        Structure::Header => {
            let header: SharedRef<Header> = SharedRef::new(segment, 0).unwrap();
            let Header { magic, len } = &*header;
            words.add("Header.magic", magic);
            words.add("Header.len", len);
        }
        Structure::Region => {
            let at =
                REGIONS_AT + u64::from(RegionKey::from_bits(key).index()) * size_of::<RegionEntry>() as u64;
            let entry: SharedRef<RegionEntry> = SharedRef::new(segment, at).unwrap();
            let RegionEntry { key, access, pd, reserved, addr, len, offset } = &*entry;
            words.add("RegionEntry.key", key);
            words.add("RegionEntry.access", access);
            words.add("RegionEntry.pd", pd);
            words.add("RegionEntry.reserved", reserved);
            words.add("RegionEntry.addr", addr);
            words.add("RegionEntry.len", len);
            words.add("RegionEntry.offset", offset);
        }
        Structure::Block => {
            let QpBlock {
                connection,
                qp_num,
                kind,
                pd,
                access,
                peer_qp,
                rnr_timer,
                peer_gid,
                recv_cq,
                line,
                reserved,
                owner_line,
            } = &*qp.block;
            words.add("QpBlock.connection", connection);
            words.add("QpBlock.qp_num", qp_num);
            words.add("QpBlock.kind", kind);
            words.add("QpBlock.pd", pd);
            words.add("QpBlock.access", access);
            words.add("QpBlock.peer_qp", peer_qp);
            words.add("QpBlock.rnr_timer", rnr_timer);
            words.add("QpBlock.peer_gid", peer_gid);
            words.add("QpBlock.recv_cq", recv_cq);
            words.add("QpBlock.line", line);
            words.add("QpBlock.reserved", reserved);
            let OwnerLine { posted, recv_at, recv_depth, recv_sges, shared, lane_depth, lane_at } =
                owner_line;
            words.add("OwnerLine.posted", posted);
            words.add("OwnerLine.recv_at", recv_at);
            words.add("OwnerLine.recv_depth", recv_depth);
            words.add("OwnerLine.recv_sges", recv_sges);
            words.add("OwnerLine.shared", shared);
            words.add("OwnerLine.lane_depth", lane_depth);
            words.add("OwnerLine.lane_at", lane_at);
        }
        Structure::Line => {
            let (peer, lines) = (peer_line.unwrap(), lines.unwrap());
            let at = u64::from(peer.index) * size_of::<PeerLine>() as u64;
            let line: SharedRef<PeerLine> = SharedRef::new(&lines, at).unwrap();
            let mut words = Words { list: Vec::new(), in_lines: true, segment: &lines };
            let PeerLine { busy, claim, taken, cq_at, tenure } = &*line;
            words.add("PeerLine.busy", busy);
            words.add("PeerLine.claim", claim);
            words.add("PeerLine.taken", taken);
            words.add("PeerLine.cq_at", cq_at);
            words.add("PeerLine.tenure", tenure);
            return words.list;
        }
        Structure::Cq => {
            let header: SharedRef<CqHeader> = SharedRef::new(segment, cq_at).unwrap();
            let CqHeader { head, consumed, depth, overrun, mode, stalled, parker, reserved2, ready } =
                &*header;
            words.add("CqHeader.head", &head.word);
            words.add("CqHeader.consumed", &consumed.word);
            words.add("CqHeader.depth", depth);
            words.add("CqHeader.overrun", overrun);
            words.add("CqHeader.mode", mode);
            words.add("CqHeader.stalled", stalled);
            words.add("CqHeader.parker", parker);
            words.add("CqHeader.reserved2", &reserved2[0]);
            words.add("CqHeader.ready", ready);
        }
        Structure::Entries => {
            // The fields of an entry are private to the layout; these are its four words, in the first two entries.
            const { assert!(size_of::<Cqe>() == 32) };
            for i in 0..2 {
                words.add_words(&format!("Cqe[{i}]"), cq_at + CQES_AT + i * 32, 8, 32);
            }
        }
        Structure::Lane => {
            let at = owner_line.lane_at.load(Relaxed);
            let header: SharedRef<LaneHeader> = SharedRef::new(segment, at).unwrap();
            let LaneHeader { polled, consumed } = &*header;
            words.add("LaneHeader.polled", &polled.word);
            words.add("LaneHeader.consumed", &consumed.word);
            // The fields of an entry are private to the lane; these are the words of the first two.
            const { assert!(size_of::<LaneEntry>() == 64) };
            for i in 0..2 {
                words.add_words(&format!("LaneEntry[{i}]"), at + LANE_ENTRIES_AT + i * 64, 8, 64);
            }
        }
        Structure::Slots => {
            words.add_words("slot", recv_at, 8, (RECV_HEAD_WORDS as u64 + 2) * 8);
            words.add_words("second slot", recv_at + recv_stride(sges) as u64 * 8, 8, 32);
        }
        Structure::Srq => {
            let header: SharedRef<SrqHeader> = SharedRef::new(segment, recv_at).unwrap();
            let SrqHeader { posted, taken, depth, sges, pd, reserved, reserved2 } = &*header;
            words.add("SrqHeader.posted", &posted.word);
            words.add("SrqHeader.taken", &taken.word);
            words.add("SrqHeader.depth", depth);
            words.add("SrqHeader.sges", sges);
            words.add("SrqHeader.pd", pd);
            words.add("SrqHeader.reserved", reserved);
            words.add("SrqHeader.reserved2", &reserved2[0]);
            let depth = u64::from(depth.load(Relaxed));
            let slots_at = size_of::<SrqHeader>() as u64 + (16 * depth).next_multiple_of(64);
            words.add_words("SrqWord", recv_at + size_of::<SrqHeader>() as u64, 8, 16);
            words.add_words("SRQ slot", recv_at + slots_at, 8, (RECV_HEAD_WORDS as u64 + 2) * 8);
        }
    }
    words.list
}

/// Forged values of a word that holds `old`: near it, extreme, and values that are an offset, a length or an address elsewhere.
fn forged_values(word: &Word, old: u64, aimed: &[u64]) -> Vec<u64> {
    let mask = if word.bytes == 4 { u64::from(u32::MAX) } else { u64::MAX };
    let near = [
        old.wrapping_add(1),
        old.wrapping_sub(1),
        old ^ 1,
        old.rotate_left(1),
        !old,
        old ^ 1 << 31,
        old ^ 1 << 63,
    ];
    let extreme = [0, 1, 64, u64::MAX, u64::MAX - 1, u64::MAX >> 1, 1 << 31, 1 << 62];
    let mut values: Vec<u64> = near.iter().chain(&extreme).chain(aimed).map(|value| value & mask).collect();
    values.sort_unstable();
    values.dedup();
    values.retain(|value| *value != old);
    values
}

/// Whether a queue pair with this kind of queue has words in a structure that are not also those of another one.
fn has_own_words(queue: &str, structure: Structure) -> bool {
    use Structure::*;
    match queue {
        "own" => structure != Srq,
        "shared" => matches!(structure, Srq | Line),
        _ => matches!(structure, Block | Line | Cq | Entries | Srq),
    }
}

/// Each word of the victim's segment, and of the lines that the attacker writes.
#[test]
fn forged_words_in_the_segment_of_a_device_harm_only_the_connection_of_the_attacker() {
    let mut forgeries = 0;
    for structure in STRUCTURES {
        let mut victim = Victim::new();
        let mut attacker = Attacker::start();
        let aimed = victim.aimed_values();
        for queue in ["own", "shared", "datagram"] {
            if !has_own_words(queue, structure) {
                continue;
            }
            let mut at = 0;
            let mut values: Vec<u64> = Vec::new();
            let mut last = usize::MAX;
            loop {
                // New connections for each value.
                let (mut ends, remote) = victim.connect(&mut attacker);
                let mut outstanding = HashSet::new();
                ends.post_receives(&victim.buffers, &mut outstanding);
                // One message each, so that the attacker is attached and its line is open.
                assert_eq!(attacker.ask("traffic"), "done");
                victim.poll(&mut ends, &mut outstanding, "before");
                let words = {
                    let device = shared_arc(&victim.device);
                    let qp = device.qps.get(ends.qp_num(queue)).unwrap();
                    fields(structure, device, &qp, victim.target.remote().rkey)
                };
                let Some(word) = words.get(at) else { break };
                if last != at {
                    last = at;
                    let old = if word.in_lines {
                        1 << 8
                    } else {
                        load(&shared_arc(&victim.device).memory.segment, word)
                    };
                    values = forged_values(word, old, &aimed);
                }
                let Some(value) = values.pop() else {
                    at += 1;
                    continue;
                };
                let what = format!("{} of {queue} = {value:#x}", word.name);
                let old = attacker.store(word, value);
                victim.exchange(&mut ends, &mut outstanding, &mut attacker, remote, &what);
                if matches!(structure, Structure::Header | Structure::Region) {
                    attacker.store(word, old);
                }
                forgeries += 1;
            }
        }
        println!("{structure:?}: {forgeries} forgeries so far");
    }
    assert!(forgeries > 700, "only {forgeries} forgeries");
}

/// Each word of the attacker's own segment, which the victim reads when it sends to the attacker.
#[test]
fn forged_words_in_the_segment_of_a_peer_harm_only_the_connection_to_it() {
    let mut forgeries = 0;
    for (number, structure) in STRUCTURES.into_iter().enumerate() {
        if structure == Structure::Line {
            // The victim writes these; what it reads from there is forged above.
            continue;
        }
        let mut victim = Victim::new();
        let mut attacker = Attacker::start();
        let aimed = victim.aimed_values();
        for queue in ["own", "shared", "datagram"].into_iter().filter(|queue| has_own_words(queue, structure))
        {
            let (mut at, mut values, mut last): (usize, Vec<u64>, usize) = (0, Vec::new(), usize::MAX);
            loop {
                let (mut ends, remote) = victim.connect(&mut attacker);
                let count: usize = attacker.ask(&format!("words {number} {queue}")).parse().unwrap();
                let words: Vec<(Word, u64)> = (0..count)
                    .map(|_| {
                        let answer = attacker.answer();
                        let parts: Vec<&str> = answer.split(' ').collect();
                        let [offset, bytes, old] = [1, 2, 3].map(|i| parts[i].parse().unwrap());
                        (Word::new(parts[0], offset, bytes), old)
                    })
                    .collect();
                let Some((word, old)) = words.get(at) else { break };
                if last != at {
                    last = at;
                    values = forged_values(word, *old, &aimed);
                }
                let Some(value) = values.pop() else {
                    at += 1;
                    continue;
                };
                let what = format!("{} of the attacker = {value:#x}", word.name);
                // Half of the time the victim has attached before, and has read most words already.
                if value.count_ones() % 2 == 0 {
                    ends.post_sends(remote, &victim.target);
                }
                attacker.ask(&format!("store-own {} {} {value}", word.offset, word.bytes));
                let mut outstanding = HashSet::new();
                ends.post_receives(&victim.buffers, &mut outstanding);
                victim.exchange(&mut ends, &mut outstanding, &mut attacker, remote, &what);
                attacker.ask(&format!("store-own {} {} {old}", word.offset, word.bytes));
                forgeries += 1;
            }
        }
        println!("{structure:?}: {forgeries} forgeries so far");
    }
    assert!(forgeries > 600, "only {forgeries} forgeries");
}

/// The attacker lists every entry of its completion queue as stalled, and says that there is room for ever. A producer that looked
/// for an entry without a limit would never return.
#[test]
fn peer_that_lists_all_its_entries_as_stalled_does_not_hold_up_a_post() {
    let mut victim = Victim::new();
    let mut attacker = Attacker::start();
    let number = STRUCTURES.iter().position(|structure| *structure == Structure::Cq).unwrap();
    let (mut ends, remote) = victim.connect(&mut attacker);
    let count: usize = attacker.ask(&format!("words {number} own")).parse().unwrap();
    for _ in 0..count {
        let answer = attacker.answer();
        let parts: Vec<&str> = answer.split(' ').collect();
        let value: u64 = match parts[0] {
            "CqHeader.depth" => 4,
            "CqHeader.consumed" => 1 << 61,
            "CqHeader.stalled[0]" => 4,
            stalled if stalled.starts_with("CqHeader.stalled[") => {
                stalled["CqHeader.stalled[".len()..stalled.len() - 1].parse().unwrap()
            }
            _ => continue,
        };
        attacker.order(&format!("store-own {} {} {value}", parts[1], parts[2]));
    }
    // The answers to the orders; the words were listed before.
    for _ in 0..8 {
        attacker.answer();
    }
    let mut outstanding = HashSet::new();
    ends.post_receives(&victim.buffers, &mut outstanding);
    victim.exchange(&mut ends, &mut outstanding, &mut attacker, remote, "all entries stalled");
}
