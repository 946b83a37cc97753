//! Combined packets on a virtual network: random sizes, passes, losses and releases, with the bytes that a driver would copy.

use std::collections::{HashMap, VecDeque};
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::message::{
    COMBINED_PREFIX, Channel, Options, Outgoing, Received, SendRefusal, Verdict, check_combined,
    encode_prefix, first_combined,
};
use super::super::*;

const A: MemberId = MemberId::new(0);
const B: MemberId = MemberId::new(1);
const MTU: u32 = 256;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A sends a message of this many bytes.
    Send(usize),
    /// A's driver makes a pass.
    Pass,
    /// The oldest packet to B arrives; or is lost; or arrives and stays.
    Deliver,
    Lose,
    Duplicate,
    /// Two packets to B change places.
    Reorder,
    /// The oldest answer to A arrives, or is lost.
    Answer,
    LoseAnswer,
    /// B's application takes one packet.
    Take,
    /// B sends acknowledgements that could wait.
    Idle,
    /// Time passes.
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => prop_oneof![0usize..20, 0usize..130, Just(64), Just(MTU as usize)].prop_map(Step::Send),
        2 => Just(Step::Pass),
        6 => Just(Step::Deliver),
        1 => Just(Step::Lose),
        1 => Just(Step::Duplicate),
        1 => Just(Step::Reorder),
        3 => Just(Step::Answer),
        1 => Just(Step::LoseAnswer),
        3 => Just(Step::Take),
        1 => Just(Step::Idle),
        1 => Just(Step::Tick),
    ]
}

struct Pair {
    a: Channel,
    b: Channel,
    send_buffer: Vec<u8>,
    receive_buffer: Vec<u8>,
    to_b: VecDeque<(Header, Vec<u8>)>,
    to_a: VecDeque<Header>,
    /// Packets that B's application has not taken, and packets that wait for a missing one.
    inbox: VecDeque<(u64, u32, u32, u8)>,
    /// Content of packets when they were transmitted first: it never changes.
    transmitted: HashMap<u64, Vec<u8>>,
    sent: u64,
    taken: u64,
    now: u64,
}

/// Message `number` consists of this byte, and says its number if it is long enough.
fn message(number: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; len];
    if len >= 8 {
        bytes[..8].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

impl Pair {
    fn new(options: &Options) -> Pair {
        let channel = |me| Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, options).unwrap();
        Pair {
            a: channel(A),
            b: channel(B),
            send_buffer: vec![0; options.send_bytes(2)],
            receive_buffer: vec![0; options.receive_bytes(2)],
            to_b: VecDeque::new(),
            to_a: VecDeque::new(),
            inbox: VecDeque::new(),
            transmitted: HashMap::new(),
            sent: 0,
            taken: 0,
            now: 0,
        }
    }

    fn put(&mut self, packet: &Outgoing) {
        let header = self.a.data_header(packet);
        let start = packet.offset as usize;
        let body = self.send_buffer[start..start + packet.len as usize].to_vec();
        let before = self.transmitted.insert(packet.entry, body.clone());
        assert!(before.is_none() || !packet.is_first);
        assert!(before.is_none_or(|before| before == body), "a packet changed after it was transmitted");
        self.to_b.push_back((header, body));
    }

    fn close(&mut self) {
        if let Some(packet) = self.a.sender.close_packet(B, self.now) {
            self.put(&packet);
        }
    }

    /// What a driver does.
    fn send(&mut self, len: usize) -> Result<(), SendRefusal> {
        let bytes = message(self.sent, len);
        match self.a.sender.combine(B, 0, len as u32)? {
            Some(place) => {
                let at = place.offset as usize;
                self.send_buffer[at..at + COMBINED_PREFIX].copy_from_slice(&encode_prefix(len, 0));
                self.send_buffer[at + COMBINED_PREFIX..][..len].copy_from_slice(&bytes);
                if place.close {
                    self.close();
                }
            }
            None => {
                self.close();
                let (packet, transmit) =
                    self.a.sender.send(B, len as u32, Channel::WHOLE, len as u32, self.now)?;
                self.send_buffer[packet.offset as usize..][..len].copy_from_slice(&bytes);
                if transmit {
                    self.put(&packet);
                }
            }
        }
        self.sent += 1;
        Ok(())
    }

    fn pass(&mut self) {
        self.a.sender.expire(self.now);
        while let Some(packet) = self.a.sender.next_outgoing() {
            self.put(&packet);
        }
        assert!(!self.a.sender.has_open_packet(B) || self.a.sender.in_flight(B) > 0);
        let sender = &self.a.sender;
        self.transmitted.retain(|entry, _| sender.is_in_use(*entry));
    }

    fn deliver(&mut self, header: &Header, body: &[u8]) {
        let len = body.len() as u32;
        match self.b.on_packet(header, len, self.now).unwrap() {
            Received::Data(Verdict::Accepted { entry, .. }) => {
                self.receive_buffer[entry.offset as usize..][..body.len()].copy_from_slice(body);
                self.inbox.push_back((entry.number, entry.offset, len, header.flags));
                while let Some(next) = self.b.receiver.next_held(A).unwrap() {
                    self.inbox.push_back((next.entry.number, next.entry.offset, next.len, next.flags));
                }
            }
            Received::Data(Verdict::Held { entry }) => {
                self.receive_buffer[entry.offset as usize..][..body.len()].copy_from_slice(body);
            }
            _ => {}
        }
        self.answer(false);
    }

    fn answer(&mut self, idle: bool) {
        if idle {
            self.b.receiver.return_credit();
        }
        while let Some(answer) = self.b.receiver.next_answer(idle) {
            self.to_a.push_back(self.b.answer_header(&answer));
        }
    }

    fn take(&mut self) {
        let Some((entry, offset, len, packet_flags)) = self.inbox.pop_front() else { return };
        let body = &self.receive_buffer[offset as usize..][..len as usize];
        let mut messages = Vec::new();
        if packet_flags & flags::COMBINED != 0 {
            let count = check_combined(body, MTU).unwrap();
            let mut rest = body;
            while let Some((_, bytes)) = first_combined(rest) {
                messages.push(bytes);
                rest = &rest[COMBINED_PREFIX + bytes.len()..];
            }
            assert_eq!((messages.len() as u32, rest.len()), (count, 0));
        } else {
            messages.push(body);
        }
        for bytes in messages {
            assert_eq!(bytes, message(self.taken, bytes.len()), "message {} is another one", self.taken);
            self.taken += 1;
        }
        self.b.receiver.release(entry);
        self.answer(false);
    }

    fn step(&mut self, step: Step) {
        self.now += 1;
        match step {
            Step::Send(len) => _ = self.send(len),
            Step::Pass => self.pass(),
            Step::Deliver => {
                if let Some((header, body)) = self.to_b.pop_front() {
                    self.deliver(&header, &body);
                }
            }
            Step::Lose => _ = self.to_b.pop_front(),
            Step::Duplicate => {
                if let Some((header, body)) = self.to_b.front().cloned() {
                    self.deliver(&header, &body);
                }
            }
            Step::Reorder => {
                if self.to_b.len() > 1 {
                    let last = self.to_b.len() - 1;
                    self.to_b.swap(0, last);
                }
            }
            Step::Answer => {
                if let Some(header) = self.to_a.pop_front() {
                    self.a.on_packet(&header, 0, self.now).unwrap();
                }
            }
            Step::LoseAnswer => _ = self.to_a.pop_front(),
            Step::Take => self.take(),
            Step::Idle => self.answer(true),
            Step::Tick => self.now += 50,
        }
    }

    /// Everything arrives from now on.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            if self.taken == self.sent && self.a.sender.is_idle() {
                return;
            }
            self.pass();
            self.step(Step::Deliver);
            self.step(Step::Take);
            self.step(Step::Idle);
            self.step(Step::Answer);
        }
        panic!("{} of {} messages were taken", self.taken, self.sent);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * ProptestConfig::default().cases))]

    #[test]
    fn each_message_arrives_once_and_in_order(
        steps in prop::collection::vec(step(), 0..400),
        combine_from in prop_oneof![1u32..6, Just(u32::MAX)],
        receive_table in 2u32..16,
    ) {
        let options = Options {
            mtu: MTU, max_message: MTU, combine_from, receive_table, window: 8, send_table: 8, ack_every: 3,
            send_buffer: 1 << 12, receive_buffer: 1 << 12,
            backoff: 5, max_backoff: 20, resend_after: 40, min_resend_after: 20, ..Options::default()
        };
        let mut pair = Pair::new(&options);
        for step in steps {
            pair.step(step);
        }
        pair.finish();
        prop_assert_eq!(pair.b.receiver.in_use(), 0);
        if combine_from == u32::MAX {
            prop_assert_eq!(pair.a.sender.counters().combined, 0);
        }
    }

    /// A peer answers whatever it likes: the sender neither panics nor mixes up its packets.
    #[test]
    fn forged_answers_do_no_harm(
        steps in prop::collection::vec((step(), 0u8..5, 0u32..12, 0u32..4, 0u8..4), 0..200),
    ) {
        let options = Options { mtu: MTU, combine_from: 1, window: 8, send_table: 8, ack_every: 3, send_buffer: 1 << 12, ..Options::default() };
        let mut pair = Pair::new(&options);
        for (step, kind, seq, aux, nack_flags) in steps {
            match kind {
                0 => {
                    let acked = pair.a.sender.acked(B);
                    let header = Header {
                        group: 1, epoch: 1, sender: B, channel: 0, kind: PacketKind::ALL[1 + (aux as usize) % 3],
                        flags: nack_flags, attempt: 0, seq: acked.wrapping_add(seq), ack: acked.wrapping_add(seq / 2), aux,
                    };
                    pair.a.on_packet(&header, 0, pair.now).ok();
                    let sender = &pair.a.sender;
                    pair.transmitted.retain(|entry, _| sender.is_in_use(*entry));
                }
                _ => match step {
                    Step::Send(len) => _ = pair.send(len),
                    _ => pair.pass(),
                },
            }
        }
    }
}

fn channel(me: MemberId) -> Channel {
    Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, &Options::default()).unwrap()
}

#[test]
fn lone_message_never_waits() {
    let mut a = channel(A);
    for _ in 0..Options::default().combine_from {
        assert_eq!(a.sender.combine(B, 0, 64), Ok(None));
        assert!(a.sender.send(B, 64, Channel::WHOLE, 64, 0).unwrap().1);
    }
    // The receiver is behind: messages wait until one of its answers has come.
    let place = a.sender.combine(B, 0, 64).unwrap().unwrap();
    assert!(!place.close);
    a.sender.on_ack(B, 1, 0).unwrap();
    assert!(a.sender.combine(B, 0, 64).unwrap().unwrap().close);
    let packet = a.sender.close_packet(B, 0).unwrap();
    assert_eq!((packet.len, packet.aux, packet.seq), (136, 136, Options::default().combine_from));
    assert_eq!(a.sender.combine(B, 0, 64).map(|place| place.is_some()), Ok(true));
    assert_eq!(a.sender.next_outgoing().map(|packet| (packet.len, packet.is_first)), Some((68, true)));
    assert_eq!((a.sender.counters().combined, a.sender.counters().resent), (1, 0));
}

#[test]
fn message_that_travels_alone_does_not_overtake_the_open_packet() {
    let mut a = channel(A);
    for _ in 0..Options::default().combine_from {
        a.sender.send(B, 64, Channel::WHOLE, 64, 0).unwrap();
    }
    let open = a.sender.combine(B, 0, 64).unwrap().unwrap();
    // A driver that forgets to close the packet.
    let (alone, transmit) = a.sender.send(B, 2048, Channel::WHOLE, 2048, 0).unwrap();
    assert!(!transmit && alone.seq == open.seq + 1);
    assert_eq!(a.sender.next_outgoing().map(|packet| packet.seq), Some(open.seq));
    assert_eq!(a.sender.next_outgoing().map(|packet| packet.seq), Some(alone.seq));
}

#[test]
fn combined_packet_with_other_flags_is_a_violation() {
    let mut b = channel(B);
    let header = |packet_flags| Header {
        group: 1,
        epoch: 1,
        sender: A,
        channel: 0,
        kind: PacketKind::Data,
        flags: packet_flags,
        attempt: 0,
        seq: 0,
        ack: 0,
        aux: 8,
    };
    let combined = flags::COMBINED | Channel::WHOLE;
    for forged in [flags::COMBINED, flags::COMBINED | flags::FIRST, combined | flags::FENCED, 0xff] {
        assert!(b.on_packet(&header(forged), 8, 0).is_err(), "{forged:#x}");
    }
    assert!(b.on_packet(&header(combined), 3, 0).is_err(), "shorter than a prefix");
    assert!(b.on_packet(&header(combined), 9, 0).is_err(), "another length than announced");
    assert!(b.on_packet(&header(combined | flags::ACK_NOW), 8, 0).is_ok());
}
