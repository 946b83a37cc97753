//! The sending half of a channel: send buffer, send table, and one window for each destination.
//!
//! A message gets the next number of its destination and stays in the send buffer until it is acknowledged. While packets are
//! being sent again to a destination, new messages for it are only registered; they follow when the refused message was
//! acknowledged (RHiNET §5.1, §5.3.2).

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use thiserror::Error;

use super::super::member::MemberId;
use super::super::packet::flags;
use super::buffer_ring::BufferRing;
use super::options::{OnRefusal, Options};

const NONE: u32 = u32::MAX;
/// The resend time-out doubles up to this factor.
const MAX_RESEND_FACTOR: u64 = 16;

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
    /// Packets that were transmitted again.
    pub resent: u64,
    /// NACKs because the receiver had no room.
    pub refused: u64,
    /// NACKs because the receiver missed a packet.
    pub gaps: u64,
    /// Times that a sender went back because nothing was acknowledged for too long.
    pub timeouts: u64,
    /// Requests of receivers to send a refused message again.
    pub resumed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Flow {
    Open,
    /// Sending everything from the refused number on again.
    Resending,
    /// The receiver has no room: waits for the back-off time, or for its request.
    Paused,
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Destination {
    /// The next new number, and the oldest that is not acknowledged.
    next_seq: u32,
    acked: u32,
    /// Chain of the records that are not acknowledged.
    oldest: u32,
    newest: u32,
    /// The record to transmit next from [`Sender::next_outgoing`].
    resend: u32,
    in_flight: u32,
    flow: Flow,
    attempt: u8,
    listed: bool,
    /// The refused number; and the first number that waits until the refused one is acknowledged.
    refused_seq: u32,
    hold: u32,
    /// When to act without hearing from the peer. `u64::MAX`: never.
    deadline: u64,
    interval: u64,
    heard_at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Record {
    entry: u64,
    seq: u32,
    offset: u32,
    len: u32,
    aux: u32,
    next: u32,
    flags: u8,
}

/// Send buffer, send table and windows of one channel..
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    options: Options,
    ring: BufferRing,
    records: Box<[Record]>,
    destinations: Box<[Destination]>,
    /// Destinations with records to transmit.
    listed: VecDeque<MemberId>,
    /// Destinations that were given up and not reported.
    unreachable: VecDeque<MemberId>,
    /// The earliest deadline of a destination, or earlier.
    deadline: u64,
    counters: SendCounters,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::super::tests::BrokenRule>,
}

impl Sender {
    pub(super) fn new(options: &Options, members: usize) -> Self {
        let ring = BufferRing::new(options.send_buffer as usize, options.send_table as usize);
        let record = Record { entry: 0, seq: 0, offset: 0, len: 0, aux: 0, next: NONE, flags: 0 };
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
        };
        Sender {
            options: *options,
            records: (0..ring.entries()).map(|_| record).collect(),
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
        let destination = &mut self.destinations[to.index()];
        if destination.in_flight >= self.options.window {
            return Err(SendRefusal::WindowFull);
        }
        if destination.flow == Flow::Gone {
            return Err(SendRefusal::PeerGone);
        }
        let Some(entry) = self.ring.take(len as usize) else { return Err(SendRefusal::BufferFull) };
        let index = self.ring.index(entry.number);
        let seq = destination.next_seq;
        destination.next_seq = seq.wrapping_add(1);
        self.records[index] =
            Record { entry: entry.number, seq, offset: entry.offset, len, aux, next: NONE, flags };
        if destination.in_flight == 0 {
            destination.oldest = index as u32;
            destination.heard_at = now;
            destination.interval = self.options.resend_after;
            destination.deadline = now.saturating_add(self.options.resend_after);
            self.deadline = self.deadline.min(destination.deadline);
        } else {
            self.records[destination.newest as usize].next = index as u32;
        }
        destination.newest = index as u32;
        destination.in_flight += 1;
        self.counters.packets += 1;
        let transmit = destination.flow == Flow::Open && destination.resend == NONE;
        if !transmit && destination.resend == NONE {
            destination.resend = index as u32;
        }
        Ok((outgoing(to, destination.attempt, &self.records[index]), transmit))
    }

    /// How many packets [`Sender::send`] would accept for this destination at most, judging by window and table.
    #[inline]
    pub fn room(&self, to: MemberId) -> u32 {
        let window = self.options.window - self.destinations[to.index()].in_flight;
        window.min(self.ring.free_entries() as u32)
    }

    /// The next packet to transmit again, if any. The caller may stop calling whenever its send queue is full.
    #[inline]
    pub fn next_outgoing(&mut self) -> Option<Outgoing> {
        while let Some(&to) = self.listed.front() {
            let destination = &mut self.destinations[to.index()];
            let waits = destination.flow == Flow::Paused
                || destination.resend == NONE
                || (destination.flow == Flow::Resending
                    && self.records[destination.resend as usize].seq == destination.hold);
            if waits {
                destination.listed = false;
                self.listed.pop_front();
                continue;
            }
            let record = &self.records[destination.resend as usize];
            destination.resend = record.next;
            self.counters.resent += 1;
            let mut packet = outgoing(to, destination.attempt, record);
            packet.flags |= if record.next == NONE { flags::ACK_NOW } else { 0 };
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
            if destination.resend == destination.oldest {
                destination.resend = record.next;
            }
            destination.oldest = record.next;
        }
        destination.acked = ack;
        destination.in_flight -= count;
        destination.heard_at = now;
        destination.interval = self.options.resend_after;
        destination.deadline =
            if destination.in_flight == 0 { u64::MAX } else { now.saturating_add(destination.interval) };
        if destination.flow != Flow::Open {
            self.end_recovery(from, ack);
        }
        Ok(count)
    }

    /// The receiver refuses packet `seq`: it has no room, or (`gap`) it has missed that packet.
    #[cold]
    pub fn on_nack(
        &mut self,
        from: MemberId,
        seq: u32,
        attempt: u8,
        gap: bool,
        now: u64,
    ) -> Result<(), NotSent> {
        self.on_ack(from, seq, now)?;
        let destination = &mut self.destinations[from.index()];
        // Stale: the packet was acknowledged, or packets were sent again since.
        if destination.flow == Flow::Gone || seq != destination.acked || attempt != destination.attempt {
            return Ok(());
        }
        if destination.in_flight == 0 {
            return Err(NotSent { seq });
        }
        destination.heard_at = now;
        // A refusal that follows a refusal of the same number doubles the back-off.
        let again = destination.flow != Flow::Open && destination.refused_seq == seq;
        self.go_back(from);
        let destination = &mut self.destinations[from.index()];
        if gap {
            self.counters.gaps += 1;
            destination.interval = self.options.resend_after;
            destination.deadline = now.saturating_add(destination.interval);
            self.list(from);
        } else {
            self.counters.refused += 1;
            destination.flow = Flow::Paused;
            let first = match self.options.on_refusal {
                OnRefusal::Retry => self.options.backoff,
                OnRefusal::WaitForRequest => self.options.max_backoff,
            };
            destination.interval = match (again, self.options.on_refusal) {
                (true, OnRefusal::Retry) => (destination.interval * 2).clamp(first, self.options.max_backoff),
                _ => first,
            };
            destination.deadline = now.saturating_add(destination.interval);
        }
        self.deadline = self.deadline.min(self.destinations[from.index()].deadline);
        Ok(())
    }

    /// The receiver has room again for packet `seq`, which it refused.
    #[cold]
    pub fn on_resume(&mut self, from: MemberId, seq: u32, now: u64) -> Result<(), NotSent> {
        self.on_ack(from, seq, now)?;
        let destination = &mut self.destinations[from.index()];
        if destination.flow == Flow::Paused && destination.refused_seq == seq {
            destination.flow = Flow::Resending;
            destination.interval = self.options.resend_after;
            destination.deadline = now.saturating_add(destination.interval);
            self.deadline = self.deadline.min(destination.deadline);
            self.counters.resumed += 1;
            self.list(from);
        }
        Ok(())
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
        (destination.oldest, destination.resend) = (NONE, NONE);
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

    #[cold]
    fn expire_destinations(&mut self, now: u64) {
        self.deadline = u64::MAX;
        for index in 0..self.destinations.len() {
            let destination = &mut self.destinations[index];
            if now >= destination.deadline {
                let to = MemberId::new(index);
                if now.saturating_sub(destination.heard_at) >= self.options.give_up_after {
                    self.unreachable.push_back(to);
                    self.drop_destination(to);
                    continue;
                }
                if destination.flow == Flow::Paused {
                    // Blind retry, or the safety net for a lost request.
                    destination.flow = Flow::Resending;
                } else {
                    destination.interval =
                        (destination.interval * 2).min(self.options.resend_after * MAX_RESEND_FACTOR);
                    self.counters.timeouts += 1;
                    self.go_back(to);
                }
                let destination = &mut self.destinations[index];
                destination.deadline =
                    now.saturating_add(destination.interval.max(self.options.resend_after));
                self.list(to);
            }
            self.deadline = self.deadline.min(self.destinations[index].deadline);
        }
    }

    /// Everything that is not acknowledged is to be transmitted again.
    fn go_back(&mut self, to: MemberId) {
        let destination = &mut self.destinations[to.index()];
        destination.attempt = destination.attempt.wrapping_add(1);
        destination.flow = Flow::Resending;
        destination.refused_seq = destination.acked;
        destination.hold = destination.next_seq;
        destination.resend = destination.oldest;
    }

    /// Ends the recovery if the refused packet has arrived.
    #[cold]
    fn end_recovery(&mut self, from: MemberId, ack: u32) {
        let destination = &mut self.destinations[from.index()];
        let behind = ack.wrapping_sub(destination.refused_seq);
        if destination.flow != Flow::Gone && behind != 0 && behind <= u32::MAX / 2 {
            destination.flow = Flow::Open;
            if destination.resend != NONE {
                self.list(from);
            }
        }
    }

    fn list(&mut self, to: MemberId) {
        let destination = &mut self.destinations[to.index()];
        if !destination.listed {
            destination.listed = true;
            self.listed.push_back(to);
        }
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
        }
        back(&mut self.deadline);
        self.counters = SendCounters::default();
        // What is left in records that are free.
        let unused = Record { entry: 0, seq: 0, offset: 0, len: 0, aux: 0, next: NONE, flags: 0 };
        if self.is_idle() {
            self.records.fill(unused);
        }
    }
}

#[inline]
fn outgoing(to: MemberId, attempt: u8, record: &Record) -> Outgoing {
    Outgoing {
        to,
        seq: record.seq,
        attempt,
        flags: record.flags,
        aux: record.aux,
        entry: record.entry,
        offset: record.offset,
        len: record.len,
    }
}
