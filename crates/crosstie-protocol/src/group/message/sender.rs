//! The sending half of a channel: send buffer, send table, and one window for each destination.
//!
//! ```text
//!   places of one destination    |  free  | packet 4 | packet 5 | packet 6 |  free  |  free  |
//!                                          ^acked                            ^next_seq            limit: 9
//! ```
//!
//! Each destination has a *share* of places, so that one that does not answer takes no room of others. A message gets the next number of
//! its destination and stays in its place until it is acknowledged. Numbers from the receiver's *limit* on are not sent: it has no room for
//! them (credit). While packets are being sent again to a destination, new messages for it are only registered; they follow when
//! the refused message was acknowledged (RHiNET §5.1, §5.3.2). What happens after a refusal, a loss or silence is in `recovery.rs`.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use thiserror::Error;

use super::super::member::MemberId;
use super::super::packet::flags;
use super::options::{OnRefusal, Options};
use super::rank;
use super::round_trip::RoundTrip;

pub(super) const NONE: u32 = u32::MAX;

/// A packet to transmit. Its body is `len` bytes at `offset` of the send buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Outgoing {
    /// The destination.
    pub to: MemberId,
    /// The message number.
    pub seq: u32,
    /// For the header.
    pub attempt: u8,
    /// For the header.
    pub flags: u8,
    /// For the header.
    pub aux: u32,
    /// Names the packet: its destination and its number.
    pub entry: u64,
    /// Where the body is in the send buffer.
    pub offset: u32,
    /// Bytes of the body.
    pub len: u32,
    /// It was not transmitted before.
    pub is_first: bool,
}

/// Why a packet was not accepted for sending. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendRefusal {
    /// Too many packets to this destination are not acknowledged.
    #[error("too many packets to this member are not acknowledged: poll, then send again")]
    WindowFull,
    /// The destination has no room.
    #[error("this member has no room: poll, then send again when its application has received")]
    NoCredit,
    /// The destination is dead or unreachable.
    #[error("the member is dead or unreachable")]
    PeerGone,
}

/// A peer acknowledged, refused or asked for a packet that was never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("packet number {seq} was acknowledged or refused, but not sent")]
pub struct NotSent {
    /// The number.
    pub seq: u32,
}

/// What the sender has done. Exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SendCounters {
    /// Packets accepted for sending, each counted once.
    pub packets: u64,
    /// Messages that travel in the packet of an earlier one.
    pub combined: u64,
    /// Packets that were transmitted again.
    pub resent: u64,
    /// NACKs because the receiver had no room.
    pub refused: u64,
    /// NACKs because the receiver missed packets.
    pub gaps: u64,
    /// Times that the oldest packet was sent again because an acknowledgement was late.
    pub probes: u64,
    /// Times that a sender went back because nothing was acknowledged for too long.
    pub timeouts: u64,
    /// Requests of receivers to send a refused message again.
    pub resumed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flow {
    Open,
    /// Sending everything from the refused number on again.
    Resending,
    /// The receiver has no room: waits for the back-off time, or for its request.
    Paused,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Destination {
    /// The next new number, and the oldest that is not acknowledged.
    pub(super) next_seq: u32,
    pub(super) acked: u32,
    /// The receiver has room for numbers below this one.
    pub(super) limit: u32,
    /// The place of the next new packet.
    pub(super) next_place: u32,
    /// Chain of the records that are not acknowledged.
    pub(super) oldest: u32,
    pub(super) newest: u32,
    /// The record to transmit next from [`Sender::next_outgoing`].
    pub(super) resend: u32,
    pub(super) in_flight: u32,
    pub(super) flow: Flow,
    pub(super) attempt: u8,
    pub(super) listed: bool,
    /// The refused number; and the first number that waits until the refused one is acknowledged.
    pub(super) refused_seq: u32,
    pub(super) hold: u32,
    /// When to act without hearing from the peer. `u64::MAX`: never.
    pub(super) deadline: u64,
    pub(super) interval: u64,
    pub(super) heard_at: u64,
    pub(super) round_trip: RoundTrip,
    /// How often the oldest packet was sent again because an acknowledgement was late, without any answer.
    pub(super) probes: u8,
    /// Records that are marked as missing.
    pub(super) missing: u32,
    /// The newest record, while messages still join its packet. It was not transmitted.
    pub(super) open: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Record {
    pub(super) entry: u64,
    pub(super) seq: u32,
    pub(super) offset: u32,
    pub(super) len: u32,
    pub(super) aux: u32,
    pub(super) next: u32,
    pub(super) flags: u8,
    /// The attempt in which it was transmitted last.
    pub(super) attempt: u8,
    /// It was transmitted.
    pub(super) posted: bool,
    /// The receiver misses it: it is to be transmitted again.
    pub(super) missing: bool,
}

/// Send buffer, send table and windows of one channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    pub(super) options: Options,
    me: MemberId,
    /// Places of each destination.
    share: u32,
    in_use: u32,
    pub(super) records: Box<[Record]>,
    pub(super) destinations: Box<[Destination]>,
    /// Destinations with records to transmit.
    pub(super) listed: VecDeque<MemberId>,
    /// Destinations that were given up and not reported.
    pub(super) unreachable: VecDeque<MemberId>,
    /// The earliest deadline of a destination, or earlier.
    pub(super) deadline: u64,
    pub(super) counters: SendCounters,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::super::tests::BrokenRule>,
}

impl Sender {
    pub(super) fn new(options: &Options, me: MemberId, members: usize) -> Self {
        let share = options.send_share(members);
        let destination = Destination {
            next_seq: 0,
            acked: 0,
            limit: options.receive_share(members),
            next_place: 0,
            oldest: NONE,
            newest: NONE,
            resend: NONE,
            in_flight: 0,
            flow: Flow::Open,
            attempt: 0,
            listed: false,
            refused_seq: 0,
            hold: 0,
            deadline: u64::MAX,
            interval: options.resend_after,
            heard_at: 0,
            round_trip: RoundTrip::UNKNOWN,
            probes: 0,
            missing: 0,
            open: NONE,
        };
        Sender {
            options: *options,
            me,
            share,
            in_use: 0,
            records: (0..Options::peers(members) * share).map(|_| Record::UNUSED).collect(),
            destinations: (0..members)
                .map(|to| match to == me.index() {
                    true => Destination { flow: Flow::Gone, ..destination },
                    false => Destination { next_place: rank(me, MemberId::new(to)) * share, ..destination },
                })
                .collect(),
            listed: VecDeque::with_capacity(members),
            unreachable: VecDeque::with_capacity(members),
            deadline: u64::MAX,
            counters: SendCounters::default(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    /// Accepts one packet of `len` bytes. The caller copies the body to `offset` of the send buffer and, if the flag is true,
    /// transmits it now. Otherwise [`Sender::next_outgoing`] returns it when its turn comes. A packet that cannot be transmitted is
    /// given back: [`Sender::put_back`].
    #[inline]
    pub fn send(
        &mut self,
        to: MemberId,
        len: u32,
        flags: u8,
        aux: u32,
        now: u64,
    ) -> Result<(Outgoing, bool), SendRefusal> {
        let index = self.register(to, len, flags, aux)?;
        let destination = &mut self.destinations[to.index()];
        if destination.in_flight == 1 {
            destination.heard_at = now;
            destination.probes = 0;
            destination.interval = destination.late_after(&self.options);
            destination.deadline = now.saturating_add(destination.interval);
            self.deadline = self.deadline.min(destination.deadline);
        }
        let record = &mut self.records[index as usize];
        let transmit = destination.flow == Flow::Open && destination.resend == NONE;
        if transmit {
            record.posted = true;
            destination.round_trip.on_send(record.seq, now);
        } else if destination.resend == NONE {
            destination.resend = index;
        }
        Ok((Outgoing { is_first: true, ..outgoing(to, destination.attempt, record) }, transmit))
    }

    /// Gives a packet its place in the send buffer, its number and its record. Returns the index of the record.
    #[inline]
    pub(super) fn register(
        &mut self,
        to: MemberId,
        len: u32,
        flags: u8,
        aux: u32,
    ) -> Result<u32, SendRefusal> {
        self.check_room(to)?;
        let destination = &mut self.destinations[to.index()];
        destination.open = NONE;
        let index = destination.next_place;
        let base = rank(self.me, to) * self.share;
        destination.next_place = if index + 1 == base + self.share { base } else { index + 1 };
        let seq = destination.next_seq;
        destination.next_seq = seq.wrapping_add(1);
        self.records[index as usize] = Record {
            entry: u64::from(to.bits()) << 32 | u64::from(seq),
            seq,
            offset: index * self.options.send_place(),
            len,
            aux,
            next: NONE,
            flags,
            attempt: destination.attempt,
            posted: false,
            missing: false,
        };
        if destination.in_flight == 0 {
            destination.oldest = index;
        } else {
            self.records[destination.newest as usize].next = index;
        }
        destination.newest = index;
        destination.in_flight += 1;
        self.in_use += 1;
        self.counters.packets += 1;
        Ok(index)
    }

    /// Whether a packet more to this destination is accepted.
    #[inline]
    pub fn check_room(&self, to: MemberId) -> Result<(), SendRefusal> {
        let destination = &self.destinations[to.index()];
        if destination.flow == Flow::Gone {
            return Err(SendRefusal::PeerGone);
        }
        if destination.in_flight >= self.share {
            return Err(SendRefusal::WindowFull);
        }
        // Where packets get lost, an answer about new room may be lost, too: a single packet asks for another one.
        let asks = self.options.is_lossy() && destination.in_flight == 0;
        let has_credit = destination.next_seq.wrapping_sub(destination.limit) > u32::MAX / 2;
        let breaks_rule = rule_broken!(self, SendsBeyondCredit);
        if !has_credit && !asks && self.options.on_refusal != OnRefusal::Retry && !breaks_rule {
            return Err(SendRefusal::NoCredit);
        }
        Ok(())
    }

    /// The next packet to transmit again, or the open packet, if any. The caller may stop calling whenever its send queue is full.
    #[inline]
    pub fn next_outgoing(&mut self) -> Option<Outgoing> {
        self.next_outgoing_where(|_| true)
    }

    /// As [`Sender::next_outgoing`], of packets to members for which `has_room` is true.
    #[inline]
    pub fn next_outgoing_where(&mut self, mut has_room: impl FnMut(MemberId) -> bool) -> Option<Outgoing> {
        let mut left = self.listed.len();
        while left > 0
            && let Some(&to) = self.listed.front()
        {
            left -= 1;
            if !has_room(to) {
                // Later. Those behind it need not wait.
                self.listed.rotate_left(1);
                continue;
            }
            let destination = &mut self.destinations[to.index()];
            if destination.missing > 0 && destination.flow != Flow::Paused {
                return Some(self.next_missing(to));
            }
            let waits = destination.flow == Flow::Paused
                || destination.resend == NONE
                || (destination.flow == Flow::Resending
                    && self.records[destination.resend as usize].seq == destination.hold)
                || !may_transmit(&self.options, destination, self.records[destination.resend as usize].seq);
            if waits {
                destination.listed = false;
                self.listed.pop_front();
                continue;
            }
            let index = destination.resend;
            let is_open = index == destination.open;
            if is_open {
                destination.open = NONE;
            }
            let record = &mut self.records[index as usize];
            destination.resend = record.next;
            record.attempt = destination.attempt;
            let is_first = !core::mem::replace(&mut record.posted, true);
            let mut packet = Outgoing { is_first, ..outgoing(to, destination.attempt, record) };
            self.counters.resent += u64::from(!is_first);
            if record.next == NONE && (!is_open || destination.flow != Flow::Open) {
                packet.flags |= flags::ACK_NOW;
            }
            return Some(packet);
        }
        None
    }

    /// The driver could not transmit this packet, which it got last for this destination: [`Sender::next_outgoing`] returns it again.
    #[cold]
    pub fn put_back(&mut self, packet: &Outgoing) {
        let destination = &mut self.destinations[packet.to.index()];
        let mut index = destination.oldest;
        while index != NONE && self.records[index as usize].seq != packet.seq {
            index = self.records[index as usize].next;
        }
        let Some(record) = self.records.get_mut(index as usize).filter(|_| destination.in_flight > 0) else {
            return;
        };
        if packet.is_first {
            record.posted = false;
            destination.round_trip.stop();
        } else {
            self.counters.resent -= 1;
        }
        if destination.resend == record.next {
            destination.resend = index;
        } else if !record.missing {
            record.missing = true;
            destination.missing += 1;
        }
        self.list(packet.to);
    }

    /// Whether a poll at time `now` has anything to do here.
    #[inline]
    pub fn has_work(&self, now: u64) -> bool {
        !self.listed.is_empty() || now >= self.deadline
    }

    /// The earliest time at which [`Sender::expire`] has something to do. `None`: nothing waits.
    pub fn next_deadline(&self) -> Option<u64> {
        (self.deadline != u64::MAX).then_some(self.deadline)
    }

    /// Looks for destinations that have been silent for too long. Cheap while no deadline has passed.
    #[inline]
    pub fn expire(&mut self, now: u64) {
        if now >= self.deadline && !rule_broken!(self, NeverSendsAgain) {
            self.expire_destinations(now);
        }
    }

    /// The next destination that was given up. Its packets are gone, and it accepts no more.
    pub fn next_unreachable(&mut self) -> Option<MemberId> {
        self.unreachable.pop_front()
    }

    /// All packets below number `ack` have arrived. Returns how many of them are new.
    #[inline]
    pub fn on_ack(&mut self, from: MemberId, ack: u32, now: u64) -> Result<u32, NotSent> {
        let destination = &mut self.destinations[from.index()];
        let count = ack.wrapping_sub(destination.acked);
        if count == 0 {
            return Ok(0);
        }
        if count > destination.in_flight {
            // An acknowledgement that was overtaken by a newer one.
            if count > u32::MAX / 2 || destination.flow == Flow::Gone {
                return Ok(0);
            }
            return Err(NotSent { seq: ack.wrapping_sub(1) });
        }
        self.in_use -= count;
        for _ in 0..count {
            let record = &self.records[destination.oldest as usize];
            destination.missing -= u32::from(record.missing);
            if destination.resend == destination.oldest {
                destination.resend = record.next;
            }
            // A peer that acknowledges what was not transmitted.
            if destination.open == destination.oldest {
                destination.open = NONE;
            }
            destination.oldest = record.next;
        }
        destination.acked = ack;
        destination.in_flight -= count;
        destination.heard_at = now;
        destination.round_trip.on_ack(ack, now);
        destination.probes = 0;
        destination.interval = destination.late_after(&self.options);
        destination.deadline =
            if destination.in_flight == 0 { u64::MAX } else { now.saturating_add(destination.interval) };
        self.deadline = self.deadline.min(destination.deadline);
        if destination.flow != Flow::Open {
            self.end_recovery(from, ack);
        }
        Ok(count)
    }

    /// The destination is dead: its packets are gone, and it accepts no more.
    pub fn drop_destination(&mut self, to: MemberId) {
        let destination = &mut self.destinations[to.index()];
        self.in_use -= destination.in_flight;
        destination.flow = Flow::Gone;
        destination.in_flight = 0;
        destination.missing = 0;
        (destination.oldest, destination.resend, destination.open) = (NONE, NONE, NONE);
        destination.deadline = u64::MAX;
    }

    /// Whether the destination was dropped or given up.
    pub fn is_gone(&self, to: MemberId) -> bool {
        self.destinations[to.index()].flow == Flow::Gone
    }

    /// Packets to this destination that are not acknowledged.
    #[inline]
    pub fn in_flight(&self, to: MemberId) -> u32 {
        self.destinations[to.index()].in_flight
    }

    /// All packets to this destination with numbers below this one have arrived.
    #[inline]
    pub fn acked(&self, to: MemberId) -> u32 {
        self.destinations[to.index()].acked
    }

    /// The number that the next new packet to this destination gets.
    #[inline]
    pub fn next_seq(&self, to: MemberId) -> u32 {
        self.destinations[to.index()].next_seq
    }

    /// Whether every packet was acknowledged.
    pub fn is_idle(&self) -> bool {
        self.in_use == 0
    }

    /// Whether the packet with this [`Outgoing::entry`] is in the send buffer.
    pub fn is_in_use(&self, entry: u64) -> bool {
        let destination = self.destinations.get((entry >> 32) as usize);
        destination.is_some_and(|to| (entry as u32).wrapping_sub(to.acked) < to.in_flight)
    }

    /// Packets to each destination that the send buffer has room for.
    pub fn share(&self) -> u32 {
        self.share
    }

    /// What the sender has done.
    pub fn counters(&self) -> &SendCounters {
        &self.counters
    }
}

#[cfg(test)]
impl Sender {
    pub(super) fn rebase(&mut self, now: u64) {
        let back = |time: &mut u64| {
            if *time != u64::MAX {
                *time = time.saturating_sub(now);
            }
        };
        for destination in &mut self.destinations {
            back(&mut destination.deadline);
            destination.heard_at = 0;
            destination.round_trip.rebase(now);
        }
        back(&mut self.deadline);
        self.counters = SendCounters::default();
        // What is left in records that are free.
        if self.is_idle() {
            self.records.fill(Record::UNUSED);
            for (to, destination) in self.destinations.iter_mut().enumerate() {
                let to = MemberId::new(to);
                let base = if to == self.me { 0 } else { rank(self.me, to) * self.share };
                (destination.next_place, destination.newest) = (base, NONE);
            }
        }
    }
}

impl Record {
    const UNUSED: Record = Record {
        entry: 0,
        seq: 0,
        offset: 0,
        len: 0,
        aux: 0,
        next: NONE,
        flags: 0,
        attempt: 0,
        posted: false,
        missing: false,
    };
}

impl Destination {
    /// The time without an acknowledgement after which something was probably lost.
    #[inline]
    pub(super) fn late_after(&self, options: &Options) -> u64 {
        self.round_trip.timeout(options.min_resend_after, options.resend_after)
    }
}

/// Whether packet `seq` of the send buffer may be transmitted: the receiver has room for it, or nothing else would find out whether it has.
#[inline]
fn may_transmit(options: &Options, destination: &Destination, seq: u32) -> bool {
    options.on_refusal == OnRefusal::Retry
        || seq.wrapping_sub(destination.limit) > u32::MAX / 2
        || (options.is_lossy() && seq == destination.acked)
}

#[inline]
pub(super) fn outgoing(to: MemberId, attempt: u8, record: &Record) -> Outgoing {
    Outgoing {
        to,
        seq: record.seq,
        attempt,
        flags: record.flags,
        aux: record.aux,
        entry: record.entry,
        offset: record.offset,
        len: record.len,
        is_first: false,
    }
}
