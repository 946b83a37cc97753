//! The sending half of a channel: send buffer, send table, and one window for each destination.
//!
//! A message gets the next number of its destination and stays in the send buffer until it is acknowledged. While packets are
//! being sent again to a destination, new messages for it are only registered; they follow when the refused message was
//! acknowledged (RHiNET §5.1, §5.3.2). What happens after a refusal, a loss or silence is in `recovery.rs`.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use thiserror::Error;

use super::super::member::MemberId;
use super::super::packet::flags;
use super::buffer_ring::BufferRing;
use super::options::Options;
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
    /// The entry of the send table. Equal numbers are never reused.
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
    /// The send buffer or the send table is full.
    #[error("the send buffer or its table is full: poll, then send again")]
    BufferFull,
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
    /// The receiver misses it: it is to be transmitted again.
    pub(super) missing: bool,
}

/// Send buffer, send table and windows of one channel..
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    pub(super) options: Options,
    pub(super) ring: BufferRing,
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
    pub(super) fn new(options: &Options, members: usize) -> Self {
        let ring = BufferRing::new(options.send_buffer as usize, options.send_table as usize);
        let destination = Destination {
            next_seq: 0,
            acked: 0,
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
            records: (0..ring.entries()).map(|_| Record::UNUSED).collect(),
            ring,
            destinations: (0..members).map(|_| destination).collect(),
            listed: VecDeque::with_capacity(members),
            unreachable: VecDeque::with_capacity(members),
            deadline: u64::MAX,
            counters: SendCounters::default(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    /// Accepts one packet of `len` bytes. The caller copies the body to `offset` of the send buffer and, if the flag is true,
    /// transmits it now. Otherwise [`Sender::next_outgoing`] returns it when its turn comes.
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
        let record = &self.records[index as usize];
        let transmit = destination.flow == Flow::Open && destination.resend == NONE;
        if transmit {
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
        let destination = &self.destinations[to.index()];
        if destination.in_flight >= self.options.window {
            return Err(SendRefusal::WindowFull);
        }
        if destination.flow == Flow::Gone {
            return Err(SendRefusal::PeerGone);
        }
        if destination.open != NONE {
            self.end_open_packet(to);
        }
        let Some(entry) = self.ring.take(len as usize) else { return Err(SendRefusal::BufferFull) };
        let index = self.ring.index(entry.number);
        let destination = &mut self.destinations[to.index()];
        let seq = destination.next_seq;
        destination.next_seq = seq.wrapping_add(1);
        self.records[index] = Record {
            entry: entry.number,
            seq,
            offset: entry.offset,
            len,
            aux,
            next: NONE,
            flags,
            attempt: destination.attempt,
            missing: false,
        };
        if destination.in_flight == 0 {
            destination.oldest = index as u32;
        } else {
            self.records[destination.newest as usize].next = index as u32;
        }
        destination.newest = index as u32;
        destination.in_flight += 1;
        self.counters.packets += 1;
        Ok(index as u32)
    }

    /// How many packets [`Sender::send`] would accept for this destination at most, judging by window and table.
    #[inline]
    pub fn room(&self, to: MemberId) -> u32 {
        let window = self.options.window - self.destinations[to.index()].in_flight;
        window.min(self.ring.free_entries() as u32)
    }

    /// The next packet to transmit again, or the open packet, if any. The caller may stop calling whenever its send queue is full.
    #[inline]
    pub fn next_outgoing(&mut self) -> Option<Outgoing> {
        while let Some(&to) = self.listed.front() {
            let destination = &mut self.destinations[to.index()];
            if destination.missing > 0 && destination.flow != Flow::Paused {
                return Some(self.next_missing(to));
            }
            let waits = destination.flow == Flow::Paused
                || destination.resend == NONE
                || (destination.flow == Flow::Resending
                    && self.records[destination.resend as usize].seq == destination.hold);
            if waits {
                destination.listed = false;
                self.listed.pop_front();
                continue;
            }
            let index = destination.resend;
            let is_open = index == destination.open;
            if is_open {
                self.end_open_packet(to);
            }
            let destination = &mut self.destinations[to.index()];
            let record = &mut self.records[index as usize];
            destination.resend = record.next;
            record.attempt = destination.attempt;
            let mut packet = Outgoing { is_first: is_open, ..outgoing(to, destination.attempt, record) };
            self.counters.resent += u64::from(!is_open);
            if record.next == NONE && (!is_open || destination.flow != Flow::Open) {
                packet.flags |= flags::ACK_NOW;
            }
            return Some(packet);
        }
        None
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
        for _ in 0..count {
            let record = &self.records[destination.oldest as usize];
            self.ring.free(record.entry);
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
        let mut next = destination.oldest;
        for _ in 0..destination.in_flight {
            let record = &self.records[next as usize];
            self.ring.free(record.entry);
            next = record.next;
        }
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
        self.ring.used_entries() == 0
    }

    /// Send buffer and send table.
    pub fn buffer(&self) -> &BufferRing {
        &self.ring
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
