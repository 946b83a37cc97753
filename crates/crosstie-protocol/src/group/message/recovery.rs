//! What a sender does after a refusal, a loss, or silence.
//!
//! | what it learns | what it does |
//! | --- | --- |
//! | NACK, no room | goes back: waits for room (or, with [`OnRefusal::Retry`], for the back-off time), then sends everything from the refused number on again |
//! | more room | sends what waits for it |
//! | NACK, gap | goes back at once: the receiver has kept nothing behind the missing packet |
//! | NACK, missing numbers | sends these numbers again; new packets go on |
//! | an acknowledgement is late | sends the oldest packet again: a *probe*. The answer tells what is missing. A few times, after times that double |
//! | still nothing | goes back, after times that double; then gives the destination up |
//!
//! A transport that loses nothing has no time-outs: `resend_after` is `u64::MAX`. Then silence means that the receiver does not run.
//!
//! Each of these starts a new *attempt*, whose number every packet carries. A receiver knows from it which packets were sent after its
//! NACK, and a sender which NACKs speak of transmissions that it has repeated since.

use super::super::member::MemberId;
use super::super::packet::flags;
use super::options::{OnRefusal, Options};
use super::sender::{Flow, NONE, NotSent, Outgoing, Sender, outgoing};

/// The resend time-out doubles up to this factor.
const MAX_RESEND_FACTOR: u64 = 16;
/// Probes without an answer after which everything is sent again. A peer that is only slow answers one of them.
const MAX_PROBES: u8 = 4;

impl Sender {
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
        if destination.flow == Flow::Gone || seq != destination.acked {
            return Ok(());
        }
        if destination.in_flight == 0 {
            return Err(NotSent { seq });
        }
        // Stale: the packet was sent again since.
        if is_newer(self.records[destination.oldest as usize].attempt, attempt) {
            return Ok(());
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
            destination.limit = seq;
            let Options { backoff, max_backoff, .. } = self.options;
            let (first, longest) = match self.options.on_refusal {
                OnRefusal::Retry => (backoff, max_backoff),
                // The safety net for a lost answer.
                OnRefusal::WaitForRequest if self.options.is_lossy() => {
                    (max_backoff, max_backoff.saturating_mul(MAX_RESEND_FACTOR))
                }
                OnRefusal::WaitForRequest => (u64::MAX, u64::MAX),
            };
            destination.interval =
                if again { destination.interval.saturating_mul(2).clamp(first, longest) } else { first };
            destination.deadline = now.saturating_add(destination.interval);
        }
        self.deadline = self.deadline.min(self.destinations[from.index()].deadline);
        Ok(())
    }

    /// The receiver has everything below `ack`, and later packets, but not number `missing.0`. Bit `i` of `missing.1`: nor number
    /// `missing.0 + 1 + i`. `attempt`: the attempt of the packet by which it knows.
    #[cold]
    pub fn on_missing(
        &mut self,
        from: MemberId,
        ack: u32,
        missing: (u32, u32),
        attempt: u8,
        now: u64,
    ) -> Result<(), NotSent> {
        self.on_ack(from, ack, now)?;
        let destination = &mut self.destinations[from.index()];
        if matches!(destination.flow, Flow::Gone | Flow::Paused) {
            return Ok(());
        }
        let (first, others) = missing;
        let last = first.wrapping_add(u32::BITS - others.leading_zeros());
        if (destination.in_flight..=u32::MAX / 2).contains(&last.wrapping_sub(destination.acked)) {
            return Err(NotSent { seq: last });
        }
        destination.heard_at = now;
        let before = destination.missing;
        let mut next = destination.oldest;
        for _ in 0..destination.in_flight {
            // From here on everything is transmitted again anyway.
            if next == destination.resend {
                break;
            }
            let record = &mut self.records[next as usize];
            let is_named = match record.seq.wrapping_sub(first) {
                0 => true,
                behind @ 1..=u32::BITS => others >> (behind - 1) & 1 == 1,
                _ => false,
            };
            if is_named && !record.missing && !is_newer(record.attempt, attempt) {
                record.missing = true;
                destination.missing += 1;
            }
            next = record.next;
        }
        if destination.missing != before {
            self.counters.gaps += 1;
            self.start_attempt(from, now);
        }
        Ok(())
    }

    /// The receiver has room for packets with numbers below `limit`. Older answers change nothing.
    #[inline]
    pub fn on_limit(&mut self, from: MemberId, limit: u32, now: u64) {
        let destination = &mut self.destinations[from.index()];
        let more = limit.wrapping_sub(destination.limit);
        if more == 0 || more > u32::MAX / 2 {
            return;
        }
        destination.limit = limit;
        if destination.flow == Flow::Paused || destination.resend != NONE {
            self.go_on(from, now);
        }
    }

    /// There is room for what was refused, or waits.
    #[cold]
    fn go_on(&mut self, from: MemberId, now: u64) {
        let destination = &mut self.destinations[from.index()];
        if destination.flow == Flow::Paused {
            destination.flow = Flow::Resending;
            destination.interval = self.options.resend_after;
            destination.deadline = now.saturating_add(destination.interval);
            self.deadline = self.deadline.min(destination.deadline);
            self.counters.resumed += 1;
        }
        if destination.flow != Flow::Gone {
            self.list(from);
        }
    }

    #[cold]
    pub(super) fn expire_destinations(&mut self, now: u64) {
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
                let can_probe = self.options.min_resend_after < self.options.resend_after
                    && destination.round_trip.is_known()
                    && destination.probes < MAX_PROBES;
                if destination.flow == Flow::Paused {
                    // Blind retry, or the safety net for a lost request.
                    destination.flow = Flow::Resending;
                } else {
                    let longest = self.options.resend_after.saturating_mul(MAX_RESEND_FACTOR);
                    destination.interval =
                        destination.interval.saturating_mul(2).clamp(self.options.resend_after, longest);
                    if can_probe {
                        self.probe(to, now);
                    } else {
                        self.counters.timeouts += 1;
                        self.go_back(to);
                    }
                }
                let destination = &mut self.destinations[index];
                destination.deadline =
                    now.saturating_add(destination.interval.max(self.options.resend_after));
                self.list(to);
            }
            self.deadline = self.deadline.min(self.destinations[index].deadline);
        }
    }

    /// Sends the oldest packet again: the answer tells what has arrived.
    fn probe(&mut self, to: MemberId, now: u64) {
        let destination = &mut self.destinations[to.index()];
        let oldest = &mut self.records[destination.oldest as usize];
        if !oldest.missing && destination.resend != destination.oldest {
            oldest.missing = true;
            destination.missing += 1;
        }
        destination.probes += 1;
        self.counters.probes += 1;
        self.start_attempt(to, now);
    }

    /// Packets are to be transmitted again.
    fn start_attempt(&mut self, to: MemberId, now: u64) {
        let destination = &mut self.destinations[to.index()];
        destination.attempt = destination.attempt.wrapping_add(1);
        destination.round_trip.stop();
        destination.deadline = now.saturating_add(destination.late_after(&self.options));
        self.deadline = self.deadline.min(destination.deadline);
        self.list(to);
    }

    /// The first packet that the receiver misses.
    #[cold]
    pub(super) fn next_missing(&mut self, to: MemberId) -> Outgoing {
        let destination = &mut self.destinations[to.index()];
        let mut next = destination.oldest;
        while !self.records[next as usize].missing {
            next = self.records[next as usize].next;
        }
        let record = &mut self.records[next as usize];
        record.missing = false;
        record.attempt = destination.attempt;
        destination.missing -= 1;
        self.counters.resent += 1;
        let mut packet = outgoing(to, destination.attempt, record);
        packet.flags |= flags::ACK_NOW;
        packet
    }

    /// Everything that is not acknowledged is to be transmitted again.
    fn go_back(&mut self, to: MemberId) {
        let destination = &mut self.destinations[to.index()];
        destination.attempt = destination.attempt.wrapping_add(1);
        destination.flow = Flow::Resending;
        destination.refused_seq = destination.acked;
        destination.hold = destination.next_seq;
        destination.resend = destination.oldest;
        destination.round_trip.stop();
        // A second NACK for the same transmission is stale from now on.
        self.records[destination.oldest as usize].attempt = destination.attempt;
        let mut next = destination.oldest;
        while destination.missing > 0 && next != NONE {
            let record = &mut self.records[next as usize];
            destination.missing -= u32::from(core::mem::take(&mut record.missing));
            next = record.next;
        }
    }

    /// Ends the recovery if the refused packet has arrived.
    #[cold]
    pub(super) fn end_recovery(&mut self, from: MemberId, ack: u32) {
        let destination = &mut self.destinations[from.index()];
        let behind = ack.wrapping_sub(destination.refused_seq);
        if destination.flow != Flow::Gone && behind != 0 && behind <= u32::MAX / 2 {
            destination.flow = Flow::Open;
            if destination.resend != NONE {
                self.list(from);
            }
        }
    }

    pub(super) fn list(&mut self, to: MemberId) {
        let destination = &mut self.destinations[to.index()];
        if !destination.listed {
            destination.listed = true;
            self.listed.push_back(to);
        }
    }
}

/// Whether `attempt` is later than `other`.
fn is_newer(attempt: u8, other: u8) -> bool {
    (attempt.wrapping_sub(other) as i8) > 0
}
