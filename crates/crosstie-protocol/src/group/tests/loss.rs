//! Loss in numbers: how many packets a sender sends again for each that was lost. In-order links, random losses from fixed seeds.

use std::collections::VecDeque;
use std::vec::Vec;

use super::super::message::{Channel, OnGap, Options, Received, SendRefusal, Verdict};
use super::super::*;

const A: MemberId = MemberId::new(0);
const B: MemberId = MemberId::new(1);
/// Steps that a packet is on its way. A sender sends one packet in a step.
const LATENCY: u64 = 10;

struct Link<P> {
    packets: VecDeque<(u64, P)>,
    lost: u64,
}

/// Two channels and the links between them. One step is one unit of time.
struct Pair {
    a: Channel,
    b: Channel,
    to_b: Link<(Header, u32)>,
    to_a: Link<Header>,
    now: u64,
    random: u64,
    /// Of 2^32.
    loss: u64,
    sent: u32,
    delivered: u32,
    /// Packets that B delivers later than they came.
    early: u64,
}

impl Pair {
    fn new(on_gap: OnGap, loss: f64, seed: u64) -> Pair {
        let options = Options {
            on_gap,
            resend_after: 40 * LATENCY,
            min_resend_after: 4 * LATENCY,
            ..Options::default()
        };
        let channel = |me| Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, &options).unwrap();
        Pair {
            a: channel(A),
            b: channel(B),
            to_b: Link { packets: VecDeque::new(), lost: 0 },
            to_a: Link { packets: VecDeque::new(), lost: 0 },
            now: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            loss: (loss * (1u64 << 32) as f64) as u64,
            sent: 0,
            delivered: 0,
            early: 0,
        }
    }

    fn is_lost(&mut self) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) < self.loss
    }

    fn put(&mut self, packet: &message::Outgoing) {
        let header = self.a.data_header(packet);
        if self.is_lost() {
            self.to_b.lost += 1;
        } else {
            self.to_b.packets.push_back((self.now + LATENCY, (header, packet.len)));
        }
    }

    /// Message k has k % 100 + 1 bytes, and is delivered as the k-th.
    fn deliver(&mut self, entry: u64, len: u32) {
        assert_eq!(len, self.delivered % 100 + 1, "message {} came out of order", self.delivered);
        self.delivered += 1;
        self.b.receiver.release(entry);
    }

    fn step(&mut self, messages: u32) {
        self.now += 1;
        while self.to_b.packets.front().is_some_and(|(time, _)| *time <= self.now) {
            let (_, (header, len)) = self.to_b.packets.pop_front().unwrap();
            let received = self.b.on_packet(&header, len, self.now).unwrap();
            if let Received::Data(Verdict::Accepted { entry, .. }) = received {
                self.deliver(entry.number, len);
                while let Some(next) = self.b.receiver.next_held(A).unwrap() {
                    self.deliver(next.entry.number, next.len);
                    self.early += 1;
                }
            }
        }
        if self.now.is_multiple_of(LATENCY) {
            self.b.receiver.return_credit();
        }
        while let Some(answer) = self.b.receiver.next_answer(self.now.is_multiple_of(LATENCY)) {
            let header = self.b.answer_header(&answer);
            if self.is_lost() {
                self.to_a.lost += 1;
            } else {
                self.to_a.packets.push_back((self.now + LATENCY, header));
            }
        }
        while self.to_a.packets.front().is_some_and(|(time, _)| *time <= self.now) {
            let (_, header) = self.to_a.packets.pop_front().unwrap();
            self.a.on_packet(&header, 0, self.now).unwrap();
        }
        self.a.sender.expire(self.now);
        if let Some(packet) = self.a.sender.next_outgoing() {
            self.put(&packet);
        } else if self.sent < messages {
            let len = self.sent % 100 + 1;
            if let Ok((packet, transmit)) = self.a.sender.send(B, len, Channel::WHOLE, len, self.now) {
                self.sent += 1;
                if transmit {
                    self.put(&packet);
                }
            }
        }
    }

    fn run(&mut self, messages: u32) {
        while self.delivered < messages || !self.a.sender.is_idle() {
            self.step(messages);
            assert!(self.now < u64::from(messages) * 1000, "{} of {messages} messages came", self.delivered);
        }
    }
}

#[test]
fn each_lost_packet_is_sent_again_about_once() {
    const MESSAGES: u32 = 20_000;
    for loss in [0.001, 0.01, 0.05] {
        for seed in 1..=5 {
            let mut pair = Pair::new(OnGap::Selective, loss, seed);
            pair.run(MESSAGES);
            let (lost, resent) = (pair.to_b.lost, pair.a.sender.counters().resent);
            std::println!("loss {loss}, seed {seed}: {lost} lost, {resent} resent, {} steps", pair.now);
            assert!(lost > 0 && pair.early > 0);
            // A probe repeats a packet of which only the acknowledgement was lost; after a second silence everything is repeated.
            let counters = pair.a.sender.counters();
            assert!(resent <= lost + counters.probes + 64 * counters.timeouts, "{counters:?}");
            assert!(resent * 10 <= lost * 13, "{resent} packets were sent again for {lost} lost ones");
            assert_eq!(pair.b.receiver.in_use(), 0);
        }
    }
}

#[test]
fn throughput_with_one_percent_loss_is_at_least_nine_tenths() {
    const MESSAGES: u32 = 20_000;
    let steps = |on_gap, loss| {
        let mut pair = Pair::new(on_gap, loss, 7);
        pair.run(MESSAGES);
        (pair.now as f64, pair.a.sender.counters().resent)
    };
    let (without, _) = steps(OnGap::Selective, 0.0);
    let (selective, resent) = steps(OnGap::Selective, 0.01);
    let (back, resent_back) = steps(OnGap::GoBack, 0.01);
    std::println!(
        "{without} steps without loss; {selective} ({resent} resent), going back {back} ({resent_back} resent)"
    );
    assert!(without / selective >= 0.9, "{}", without / selective);
    assert!(resent_back > 5 * resent, "going back resends whole windows");
}

#[test]
fn one_lost_packet_is_sent_again_alone_whichever_it_is() {
    // The last packet has none behind it that would reveal the gap: the probe repeats it.
    for victim in 0..20u32 {
        let mut pair = Pair::new(OnGap::Selective, 0.0, 1);
        while pair.now < 3 * LATENCY + u64::from(victim) || pair.delivered < 20 {
            let before = pair.to_b.packets.len();
            let sent = pair.sent;
            pair.step(20);
            if pair.sent == sent + 1 && sent == victim && pair.to_b.packets.len() > before.saturating_sub(1) {
                pair.to_b.packets.pop_back();
            }
            assert!(pair.now < 100_000);
        }
        pair.run(20);
        assert_eq!(pair.a.sender.counters().resent, 1, "packet {victim}: {:?}", pair.a.sender.counters());
    }
}

#[test]
fn nack_names_all_missing_numbers_even_if_they_do_not_fit_into_one() {
    let options = Options { window: 128, ..Options::default() };
    let channel = |me| Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, &options).unwrap();
    let (mut a, mut b) = (channel(A), channel(B));
    let headers: Vec<Header> = (0..100)
        .map(|_| {
            let (packet, _) = a.sender.send(B, 8, Channel::WHOLE, 8, 0).unwrap();
            a.data_header(&packet)
        })
        .collect();
    // Every third packet arrives, and the last one.
    let arrives = |seq: u32| seq.is_multiple_of(3) || seq == 99;
    for header in headers.iter().filter(|header| arrives(header.seq)) {
        let received = b.on_packet(header, 8, 0).unwrap();
        match received {
            Received::Data(Verdict::Accepted { .. }) => assert_eq!(header.seq, 0),
            received => assert!(matches!(received, Received::Data(Verdict::Held { .. })), "{received:?}"),
        }
    }
    let mut nacks = 0;
    while let Some(answer) = b.receiver.next_answer(false) {
        assert_eq!(answer.kind, PacketKind::Nack);
        // An answer that could not be sent is sent again, and says the same.
        b.receiver.put_back(&answer);
        let answer = b.receiver.next_answer(false).unwrap();
        nacks += 1;
        a.on_packet(&b.answer_header(&answer), 0, 0).unwrap();
    }
    let mut resent = Vec::new();
    while let Some(packet) = a.sender.next_outgoing() {
        resent.push(packet.seq);
    }
    assert_eq!(resent, (0..100).filter(|seq| !arrives(*seq)).collect::<Vec<_>>());
    assert!(nacks >= 3, "{nacks} NACKs name 33 numbers each");
}

#[test]
fn nack_for_packets_that_were_never_sent_is_a_violation() {
    let options = Options::default();
    let mut a = Channel::new(GroupId { group: 1, epoch: 1 }, 0, A, 2, &options).unwrap();
    for _ in 0..3 {
        a.sender.send(B, 8, Channel::WHOLE, 8, 0).unwrap();
    }
    assert!(a.sender.on_missing(B, 0, (3, 0), 0, 0).is_err());
    assert!(a.sender.on_missing(B, 0, (0, 0b100), 0, 0).is_err());
    assert!(a.sender.on_missing(B, 4, (0, 0), 0, 0).is_err());
    assert!(a.sender.on_missing(B, 2, (0, 1), 0, 0).is_ok(), "a NACK that was overtaken");
    assert!(a.sender.next_outgoing().is_none());
    assert!(a.sender.on_missing(B, 2, (2, 0), 0, 0).is_ok());
    assert_eq!(a.sender.next_outgoing().map(|packet| packet.seq), Some(2));
}

/// A sender with `sent` packets on their way, a receiver, and the headers of the packets.
fn pair_with_packets(options: &Options, sent: u32) -> (Channel, Channel, Vec<Header>) {
    let channel = |me| Channel::new(GroupId { group: 1, epoch: 1 }, 0, me, 2, options).unwrap();
    let (mut a, b) = (channel(A), channel(B));
    let headers = (0..sent).map(|_| send_one(&mut a)).collect();
    (a, b, headers)
}

fn send_one(a: &mut Channel) -> Header {
    let (packet, transmit) = a.sender.send(B, 8, Channel::WHOLE, 8, 0).unwrap();
    assert!(transmit);
    a.data_header(&packet)
}

fn arrive(b: &mut Channel, header: &Header) -> Verdict {
    match b.on_packet(header, 8, 0).unwrap() {
        Received::Data(verdict) => verdict,
        received => panic!("{received:?}"),
    }
}

/// The numbers that the receiver asks for, after the sender has heard of them and sent them again.
fn repeat_missing(a: &mut Channel, b: &mut Channel) -> Vec<Header> {
    while let Some(answer) = b.receiver.next_answer(false) {
        a.on_packet(&b.answer_header(&answer), 0, 0).unwrap();
    }
    let mut repeated = Vec::new();
    while let Some(packet) = a.sender.next_outgoing() {
        repeated.push(a.data_header(&packet));
    }
    repeated
}

#[test]
fn second_copy_of_a_held_packet_takes_no_room() {
    let (_, mut b, headers) = pair_with_packets(&Options::default(), 2);
    assert!(matches!(arrive(&mut b, &headers[1]), Verdict::Held { .. }));
    assert_eq!(arrive(&mut b, &headers[1]), Verdict::Duplicate);
    assert_eq!(b.receiver.in_use(), 1);
}

#[test]
fn packet_that_is_lost_again_is_named_again() {
    let (mut a, mut b, headers) = pair_with_packets(&Options::default(), 4);
    arrive(&mut b, &headers[1]);
    let repeated = repeat_missing(&mut a, &mut b);
    assert_eq!(repeated.iter().map(|header| header.seq).collect::<Vec<_>>(), [0]);
    // Packets that were sent before the sender knew say nothing new.
    arrive(&mut b, &headers[2]);
    arrive(&mut b, &headers[3]);
    assert!(repeat_missing(&mut a, &mut b).is_empty());
    // A packet that was sent after the repeated one, which has not come.
    let later = send_one(&mut a);
    arrive(&mut b, &later);
    let repeated = repeat_missing(&mut a, &mut b);
    assert_eq!(repeated.iter().map(|header| header.seq).collect::<Vec<_>>(), [0]);
    assert!(matches!(arrive(&mut b, &repeated[0]), Verdict::Accepted { .. }));
}

#[test]
fn lost_nack_is_repeated_after_more_packets() {
    let options = Options { ack_every: 4, ..Options::default() };
    let (mut a, mut b, headers) = pair_with_packets(&options, 10);
    arrive(&mut b, &headers[1]);
    let lost = b.receiver.next_answer(false).unwrap();
    assert_eq!((lost.kind, lost.seq), (PacketKind::Nack, 0));
    let mut came = 0;
    while b.receiver.next_answer(false).is_none() {
        came += 1;
        arrive(&mut b, &headers[1 + came]);
        assert!(came <= 4, "the NACK is not repeated");
    }
    // The sender has heard the first NACK after all, and repeated the packet: the second one is stale.
    a.on_packet(&b.answer_header(&lost), 0, 0).unwrap();
    assert_eq!(repeat_missing(&mut a, &mut b).len(), 1);
    a.on_packet(&b.answer_header(&lost), 0, 0).unwrap();
    assert!(repeat_missing(&mut a, &mut b).is_empty());
}

#[test]
fn held_packets_take_no_room_of_another_sender() {
    let options = Options { receive_table: 8, ..Options::default() };
    let channel =
        |me| Channel::new(GroupId { group: 1, epoch: 1 }, 0, MemberId::new(me), 3, &options).unwrap();
    let (mut a, mut b, mut c) = (channel(0), channel(1), channel(2));
    // The first packet is lost, and the sender stops.
    for number in 0..4 {
        let header = send_one(&mut a);
        if number > 0 {
            assert!(matches!(arrive(&mut b, &header), Verdict::Held { .. }));
        }
    }
    assert_eq!(a.sender.send(B, 8, Channel::WHOLE, 8, 0), Err(SendRefusal::NoCredit));
    // Another one sends for ever.
    for number in 0..100 {
        let header = send_one(&mut c);
        let Verdict::Accepted { entry, .. } = arrive(&mut b, &header) else { panic!("packet {number}") };
        assert!(b.receiver.release(entry.number));
        while let Some(answer) = b.receiver.next_answer(true) {
            if answer.to.index() == 2 {
                c.on_packet(&b.answer_header(&answer), 0, 0).unwrap();
            }
        }
    }
}

#[test]
fn destination_that_does_not_acknowledge_takes_no_room_of_another_one() {
    let options = Options { send_table: 8, window: 8, ack_every: 8, ..Options::default() };
    let mut a = Channel::new(GroupId { group: 1, epoch: 1 }, 0, A, 3, &options).unwrap();
    let stopped = MemberId::new(2);
    for _ in 0..4 {
        a.sender.send(stopped, 8, Channel::WHOLE, 8, 0).unwrap();
    }
    assert_eq!(a.sender.send(stopped, 8, Channel::WHOLE, 8, 0), Err(SendRefusal::WindowFull));
    for number in 0..100 {
        send_one(&mut a);
        a.sender.on_ack(B, number + 1, 0).unwrap();
        a.sender.on_limit(B, number + 9, 0);
    }
}

/// A packet that the driver could not post is transmitted first, and counts as sent once.
#[test]
fn packet_that_was_put_back_is_transmitted_before_later_ones() {
    let mut a = Channel::new(GroupId { group: 1, epoch: 1 }, 0, A, 2, &Options::default()).unwrap();
    let (first, transmit) = a.sender.send(B, 8, Channel::WHOLE, 8, 0).unwrap();
    assert!(transmit);
    a.sender.put_back(&first);
    assert!(!a.sender.send(B, 8, Channel::WHOLE, 8, 0).unwrap().1, "not before the first one");
    let again = a.sender.next_outgoing().unwrap();
    assert_eq!((again.seq, again.is_first), (0, true));
    a.sender.put_back(&again);
    // No room in the queue of this member: others would be served, nothing is lost.
    assert_eq!(a.sender.next_outgoing_where(|to| to != B), None);
    let seqs: Vec<u32> = core::iter::from_fn(|| a.sender.next_outgoing()).map(|packet| packet.seq).collect();
    assert_eq!(seqs, [0, 1]);
    assert_eq!(a.sender.counters().resent, 0);
}

/// The receiver has less room than the sender assumes. It is refused once, and knows better from then on.
#[test]
fn sender_that_assumes_too_much_room_is_refused_once() {
    let small =
        Options { receive_table: 4, resend_after: u64::MAX, give_up_after: u64::MAX, ..Options::default() };
    let mut a =
        Channel::new(GroupId { group: 1, epoch: 1 }, 0, A, 2, &Options { receive_table: 1024, ..small })
            .unwrap();
    let mut b = Channel::new(GroupId { group: 1, epoch: 1 }, 0, B, 2, &small).unwrap();
    let mut to_b: Vec<Header> = (0..8).map(|_| send_one(&mut a)).collect();
    let (mut delivered, mut inbox) = (0, std::collections::VecDeque::new());
    for _ in 0..1000 {
        for header in core::mem::take(&mut to_b) {
            if let Verdict::Accepted { entry, .. } = arrive(&mut b, &header) {
                inbox.push_back(entry.number);
            }
        }
        if let Some(entry) = inbox.pop_front() {
            delivered += 1;
            b.receiver.release(entry);
        }
        while let Some(answer) = b.receiver.next_answer(true) {
            a.on_packet(&b.answer_header(&answer), 0, 0).unwrap();
        }
        while let Some(packet) = a.sender.next_outgoing() {
            to_b.push(a.data_header(&packet));
        }
        while let Ok((packet, true)) = a.sender.send(B, 8, Channel::WHOLE, 8, 0) {
            to_b.push(a.data_header(&packet));
        }
    }
    assert!(delivered > 900, "{delivered}");
    assert_eq!(b.receiver.counters().refused, 1);
    assert_eq!(a.sender.counters().resent, 4);
}

#[test]
fn second_refusal_of_the_same_transmission_is_ignored() {
    let (mut a, _, _) = pair_with_packets(&Options::default(), 3);
    a.sender.on_nack(B, 0, 0, false, 0).unwrap();
    a.sender.on_nack(B, 0, 0, false, 0).unwrap();
    assert_eq!(a.sender.counters().refused, 1);
    assert!(a.sender.next_outgoing().is_none(), "it waits for the receiver's request");
    a.sender.on_limit(B, 3, 0);
    assert_eq!(a.sender.next_outgoing().map(|packet| (packet.seq, packet.attempt)), Some((0, 1)));
}

#[test]
fn data_packet_in_the_other_direction_acknowledges() {
    let (mut a, mut b, headers) = pair_with_packets(&Options::default(), 3);
    // The first acknowledgement also tells the limit.
    arrive(&mut b, &headers[0]);
    let first = b.receiver.next_answer(true).unwrap();
    a.on_packet(&b.answer_header(&first), 0, 0).unwrap();
    headers[1..].iter().for_each(|header| _ = arrive(&mut b, header));
    let (packet, _) = b.sender.send(A, 8, Channel::WHOLE, 8, 0).unwrap();
    let header = b.data_header(&packet);
    assert_eq!(a.sender.in_flight(B), 2);
    arrive(&mut a, &header);
    assert_eq!(a.sender.in_flight(B), 0);
    assert_eq!(b.receiver.next_answer(true), None, "nothing is left to acknowledge");
}
