//! The measured loops: what a user of the library would write.
//!
//! The leading side reads the clock and ends a slice by a flag in its last message. The following side responds or receives until it
//! sees the flag. A sender never overruns the receiver: at depth `n` it is at most `n` messages ahead of the number of messages that
//! the receiver has reported as consumed, and the receiver reports a message only after it has reposted its receive.

use std::time::{Duration, Instant};

use crosstie::device::{Completion, Device, QpState, SendOp, Status};
use crosstie::telemetry::{Counters, Histogram};
use zerocopy::IntoBytes;

use super::connection::{Connection, PATTERN, PeerInfo, holds, slot_holds};
use super::{Op, Shape};
use crate::error::Error;
use crate::limits::Throughput;
use crate::runner::{Connect, Counts, Exchange, Rank};

/// Flag in the immediate of the last message of a slice.
const END: u32 = 1 << 31;
/// Most completions of one poll.
const POLL: usize = 32;

/// One side of a connection, with the sequence numbers of its messages.
pub(crate) struct Traffic {
    shape: Shape,
    leads: bool,
    connection: Connection,
    latency: Histogram,
    /// Messages sent and received so far.
    sent: u64,
    received: u64,
    /// The slots of the next message to send, of the next to receive, and of the next receive to repost.
    send_slot: usize,
    recv_slot: usize,
    post_slot: usize,
    /// Receives that messages have consumed and that are not reposted yet.
    used_receives: usize,
}

impl Traffic {
    pub(crate) fn open(
        shape: Shape,
        in_place: bool,
        device: &Device,
        rank: &Rank<'_>,
    ) -> Result<Traffic, Error> {
        Ok(Traffic {
            shape,
            leads: rank.number == 0,
            connection: Connection::new(shape, in_place, device, rank.spin)?,
            latency: Histogram::new(),
            sent: 0,
            received: 0,
            send_slot: 0,
            recv_slot: 0,
            post_slot: 0,
            used_receives: 0,
        })
    }

    /// Round trips, one at a time.
    fn lead_ping_pong(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let begin = Instant::now();
        let (mut last, mut round_trips) = (begin, 0);
        loop {
            let over = last - begin >= slice;
            self.send_one(over)?;
            // Reposts while the response is on its way.
            self.repost_receives()?;
            while self.receive(1)?.is_none() {}
            let now = Instant::now();
            self.latency.record((now - last).as_nanos() as u64);
            (last, round_trips) = (now, round_trips + 1);
            if over {
                self.connection.sender.wait_for_completions(0, &mut self.connection.spin)?;
                return Ok(Throughput { operations: round_trips, time: last - begin });
            }
        }
    }

    /// The other side of [`Traffic::lead_ping_pong`].
    fn follow_ping_pong(&mut self) -> Result<(), Error> {
        loop {
            let Some(over) = self.receive(1)? else { continue };
            self.send_one(over)?;
            self.repost_receives()?;
            if over {
                return self.connection.sender.wait_for_completions(0, &mut self.connection.spin);
            }
        }
    }

    /// Messages in one direction. Only one message in flight at a time is timed, from its post until the sender sees that it was
    /// consumed: reading the clock for every message would cost more than the message.
    fn lead_stream(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.sent);
        let mut consumed = self.sent;
        let (mut sampled, mut sampled_at) = (self.sent, begin);
        loop {
            let over = sampled_at - begin >= slice;
            let room = self.connection.depth as u64 - (self.sent - consumed);
            if room > 0 {
                // The last message is posted alone, so that nothing follows it.
                self.send_batch(if over { 1 } else { room }, over)?;
                if over {
                    break;
                }
            }
            consumed = self.wait_for_consumed(consumed + 1)?;
            if consumed > sampled {
                let now = Instant::now();
                self.latency.record((now - sampled_at).as_nanos() as u64);
                (sampled, sampled_at) = (self.sent, now);
            }
        }
        self.wait_for_consumed(self.sent)?;
        let time = begin.elapsed();
        self.connection.sender.wait_for_completions(0, &mut self.connection.spin)?;
        Ok(Throughput { operations: self.sent - first, time })
    }

    /// The other side of [`Traffic::lead_stream`]: reports the number of consumed messages every quarter of the depth.
    fn follow_stream(&mut self) -> Result<(), Error> {
        let quarter = (self.connection.depth as u64 / 4).max(1);
        let consumed = self.connection.peer()?.consumed();
        let mut reported = self.received;
        loop {
            let Some(over) = self.receive(POLL)? else { continue };
            self.repost_receives()?;
            if over || self.received - reported >= quarter {
                reported = self.received;
                let Connection { sender, qp, spin, .. } = &mut self.connection;
                sender.make_room(spin)?;
                sender.word(reported, consumed, |wr| qp.post(wr))?;
            }
            if over {
                return self.connection.sender.wait_for_completions(0, &mut self.connection.spin);
            }
        }
    }

    /// WRITE, READ and atomics: posts half of the depth at a time and signals the last request.
    fn lead_one_sided(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.sent);
        let chunk = (self.connection.depth / 2).max(1);
        let (mut in_flight, mut over) = (0, false);
        let (mut sampled, mut sampled_at) = (None, begin);
        loop {
            while !over && in_flight + chunk <= self.connection.depth {
                self.post_one_sided(chunk)?;
                in_flight += chunk;
                sampled.get_or_insert(self.sent - 1);
            }
            let (mut done, mut failed) = (None, None);
            let count = self.connection.sender.cq.poll(POLL, |c| {
                failed = (!c.status.is_success()).then_some(c.status).or(failed);
                done = Some(c.wr_id);
            })?;
            if let Some(status) = failed {
                return Err(Error::Request { what: self.connection.op.name(), status });
            }
            let Some(done) = done else {
                self.connection.spin.idle()?;
                continue;
            };
            self.connection.spin.reset();
            in_flight -= count * chunk;
            self.connection.sender.counters.completions += count as u64;
            self.verify_result(done)?;
            if sampled.is_some_and(|sampled| sampled <= done) {
                let now = Instant::now();
                self.latency.record((now - sampled_at).as_nanos() as u64);
                (sampled, sampled_at) = (None, now);
                over = now - begin >= slice;
            }
            if over && in_flight == 0 {
                return Ok(Throughput { operations: self.sent - first, time: begin.elapsed() });
            }
        }
    }

    /// Posts `count` one-sided operations, the last one signaled.
    #[inline]
    fn post_one_sided(&mut self, count: usize) -> Result<(), Error> {
        let peer = self.connection.peer()?;
        let Connection { sender, qp, op, payload, depth, .. } = &mut self.connection;
        let (sent, slot) = (&mut self.sent, &mut self.send_slot);
        sender.counters.batches += 1;
        qp.post_batch(|batch| {
            for left in (0..count).rev() {
                let at = step(slot, *depth);
                let op = match op {
                    Op::Read => SendOp::Read(peer.slot(*payload, at)),
                    Op::Cas => SendOp::CompareSwap {
                        remote: peer.slot(*payload, 0),
                        compare: *sent,
                        swap: *sent + 1,
                    },
                    Op::Faa => SendOp::FetchAdd { remote: peer.slot(*payload, 0), add: 1 },
                    _ => SendOp::Write(peer.slot(*payload, at)),
                };
                sender.operation(*sent, at, op, left == 0, |wr| batch.post(wr))?;
                *sent += 1;
            }
            Ok(())
        })
    }

    /// Checks what a READ or an atomic returned.
    #[inline]
    fn verify_result(&mut self, seq: u64) -> Result<(), Error> {
        let Connection { op, payload, depth, sender, errors, .. } = &mut self.connection;
        let expected = match op {
            Op::Read => u64::from_ne_bytes([PATTERN; 8]),
            Op::Cas | Op::Faa => seq,
            _ => return Ok(()),
        };
        let slot = if *depth == 1 { 0 } else { (seq % *depth as u64) as usize };
        *errors += u64::from(!slot_holds(&sender.source, *payload, slot, expected)?);
        Ok(())
    }

    /// Posts one message.
    #[inline]
    fn send_one(&mut self, over: bool) -> Result<(), Error> {
        let peer = self.connection.peer()?;
        let Connection { sender, qp, spin, op, payload, depth, .. } = &mut self.connection;
        sender.make_room(spin)?;
        sender.counters.batches += 1;
        let slot = step(&mut self.send_slot, *depth);
        let message = message(&peer, *op, *payload, slot, self.sent, over);
        sender.message(self.sent, slot, message, |wr| qp.post(wr))?;
        self.sent += 1;
        Ok(())
    }

    /// Posts messages as one batch, with one doorbell.
    #[inline]
    fn send_batch(&mut self, count: u64, over: bool) -> Result<(), Error> {
        let peer = self.connection.peer()?;
        let Connection { sender, qp, spin, op, payload, depth, .. } = &mut self.connection;
        let (sent, slot) = (&mut self.sent, &mut self.send_slot);
        sender.make_room(spin)?;
        sender.counters.batches += 1;
        qp.post_batch(|batch| {
            for _ in 0..count {
                let at = step(slot, *depth);
                let message = message(&peer, *op, *payload, at, *sent, over);
                sender.message(*sent, at, message, |wr| batch.post(wr))?;
                *sent += 1;
            }
            Ok(())
        })
    }

    /// Polls for up to `max` received messages. Returns `None` if no message has arrived; otherwise whether the last message of the slice was among them.
    #[inline]
    fn receive(&mut self, max: usize) -> Result<Option<bool>, Error> {
        let Connection { recv_cq, slots, payload, op, receives, depth, .. } = &mut self.connection;
        let slot_count = if *op == Op::Send { *receives } else { *depth };
        let (received, slot) = (&mut self.received, &mut self.recv_slot);
        let (mut over, mut failed, mut wrong) = (false, None, 0);
        let count = recv_cq.poll(max, |c| {
            if !c.status.is_success() {
                failed = Some(c.status);
                return;
            }
            let slot = step(slot, slot_count);
            // A short message may come with its completion; then its slot need not be read.
            let held = match c.inline_data() {
                Some(bytes) => holds(bytes, *received),
                None => slot_holds(slots, *payload, slot, *received).unwrap_or(false),
            };
            wrong += u64::from(!held || c.byte_len as usize != *payload);
            over = is_end(c);
            *received += 1;
        })?;
        if let Some(status) = failed {
            return Err(Error::Request { what: "receive", status });
        }
        if count == 0 {
            self.connection.spin.idle()?;
            return Ok(None);
        }
        self.connection.spin.reset();
        self.connection.sender.counters.completions += count as u64;
        self.connection.errors += wrong;
        self.used_receives += count;
        Ok(Some(over))
    }

    /// Reposts the receives that messages have consumed.
    #[inline]
    fn repost_receives(&mut self) -> Result<(), Error> {
        while self.used_receives > 0 {
            let slot = step(&mut self.post_slot, self.connection.receives);
            self.connection.post_receive(slot)?;
            self.used_receives -= 1;
        }
        Ok(())
    }

    /// Waits until the other side has consumed at least `count` messages, and returns how many.
    #[inline]
    fn wait_for_consumed(&mut self, count: u64) -> Result<u64, Error> {
        loop {
            let consumed = self.connection.consumed()?;
            if consumed >= count {
                self.connection.spin.reset();
                return Ok(consumed.min(self.sent));
            }
            let has_yielded = self.connection.spin.idle()?;
            if has_yielded && self.connection.qp.state() == QpState::Error {
                return Err(Error::Request { what: self.connection.op.name(), status: Status::Flushed });
            }
        }
    }
}

impl Connect for Traffic {
    fn address(&self) -> Vec<u8> {
        self.connection.peer_info().as_bytes().to_vec()
    }

    fn connect(&mut self, address: &[u8]) -> Result<(), Error> {
        self.connection.connect(address)
    }
}

impl Exchange for Traffic {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        match (self.leads, self.shape.op.is_received(), self.shape.is_ping_pong()) {
            (true, _, true) => self.lead_ping_pong(slice).map(Some),
            (true, true, false) => self.lead_stream(slice).map(Some),
            (true, false, _) => self.lead_one_sided(slice).map(Some),
            (false, _, true) => self.follow_ping_pong().map(|()| None),
            (false, true, false) => self.follow_stream().map(|()| None),
            (false, false, _) => Ok(None),
        }
    }

    fn reset(&mut self) {
        self.latency.clear();
        self.connection.sender.counters = Counters::default();
    }

    fn counts(&self) -> Counts {
        let Connection { sender, errors, .. } = &self.connection;
        let counters = Counters::NAMES.into_iter().zip(sender.counters.to_words());
        Counts { latency: self.latency.clone(), ..Counts::new(counters, *errors) }
    }
}

/// The operation that sends message `seq`.
#[inline]
fn message(peer: &PeerInfo, op: Op, payload: usize, slot: usize, seq: u64, over: bool) -> SendOp {
    let flag = if over { END } else { 0 };
    match op {
        Op::Send if over => SendOp::SendImm(END),
        Op::Send => SendOp::Send,
        _ => SendOp::WriteImm(peer.slot(payload, slot), (seq as u32 & !END) | flag),
    }
}

fn is_end(completion: &Completion) -> bool {
    completion.imm.is_some_and(|imm| imm & END != 0)
}

/// Advances a slot index and returns its old value.
#[inline]
fn step(slot: &mut usize, count: usize) -> usize {
    let at = *slot;
    *slot = if at + 1 == count { 0 } else { at + 1 };
    at
}
