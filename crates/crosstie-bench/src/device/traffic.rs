//! The measured loops: what a user of the library would write.
//!
//! The leading side has the clock and ends a slice by marking its last message; the following side answers or receives
//! until it sees the mark. A sender never overruns: at depth `n` it is at most `n` messages ahead of what the receiver said
//! it has consumed, and the receiver says so only after it has posted the receives anew.

use std::time::{Duration, Instant};

use crosstie::device::{Completion, QpState, SendOp, Status};
use crosstie::telemetry::Histogram;

use super::plan::Op;
use super::side::{Card, PATTERN, Side, holds};
use crate::error::Error;
use crate::limits::Pace;

/// In the immediate of a slice's last message.
const END: u32 = 1 << 31;
/// Completions to take in one poll.
const POLL: usize = 32;

/// A side with its place in the sequence of messages.
pub(super) struct Traffic {
    pub(super) side: Side,
    /// Messages sent and received so far.
    sent: u64,
    received: u64,
    /// The slots of the next message to send, of the next to receive, and of the next receive to post anew.
    send_slot: usize,
    recv_slot: usize,
    post_slot: usize,
    /// Receives that messages have used and that are not posted anew.
    spent: usize,
}

impl Traffic {
    pub(super) fn new(side: Side) -> Traffic {
        Traffic { side, sent: 0, received: 0, send_slot: 0, recv_slot: 0, post_slot: 0, spent: 0 }
    }

    /// Round trips, one at a time.
    pub(super) fn lead_ping_pong(&mut self, slice: Duration, latency: &mut Histogram) -> Result<Pace, Error> {
        let begin = Instant::now();
        let (mut last, mut turns) = (begin, 0);
        loop {
            let over = last - begin >= slice;
            self.say(over)?;
            // While the answer is on its way.
            self.repost()?;
            while self.hear(1)?.is_none() {}
            let now = Instant::now();
            latency.record((now - last).as_nanos() as u64);
            (last, turns) = (now, turns + 1);
            if over {
                self.side.out.settle(0, &mut self.side.patience)?;
                return Ok(Pace { turns, time: last - begin });
            }
        }
    }

    /// The other side of [`Traffic::lead_ping_pong`].
    pub(super) fn follow_ping_pong(&mut self) -> Result<(), Error> {
        loop {
            let Some(over) = self.hear(1)? else { continue };
            self.say(over)?;
            self.repost()?;
            if over {
                return self.side.out.settle(0, &mut self.side.patience);
            }
        }
    }

    /// Messages one way. Latencies are those of one message in flight at a time, from its post to the sight of its
    /// acknowledgement: reading the clock for every message would cost more than the message.
    pub(super) fn lead_stream(&mut self, slice: Duration, latency: &mut Histogram) -> Result<Pace, Error> {
        let (begin, first) = (Instant::now(), self.sent);
        let mut consumed = self.sent;
        let (mut sampled, mut sampled_at) = (self.sent, begin);
        loop {
            let over = sampled_at - begin >= slice;
            let room = self.side.depth as u64 - (self.sent - consumed);
            if room > 0 {
                // The mark goes alone, so that nothing follows it.
                self.say_many(if over { 1 } else { room }, over)?;
                if over {
                    break;
                }
            }
            consumed = self.await_consumed(consumed + 1)?;
            if consumed > sampled {
                let now = Instant::now();
                latency.record((now - sampled_at).as_nanos() as u64);
                (sampled, sampled_at) = (self.sent, now);
            }
        }
        self.await_consumed(self.sent)?;
        let time = begin.elapsed();
        self.side.out.settle(0, &mut self.side.patience)?;
        Ok(Pace { turns: self.sent - first, time })
    }

    /// The other side of [`Traffic::lead_stream`]: tells every quarter of the depth what it has consumed.
    pub(super) fn follow_stream(&mut self) -> Result<(), Error> {
        let quarter = (self.side.depth as u64 / 4).max(1);
        let consumed = self.side.peer()?.consumed();
        let mut told = self.received;
        loop {
            let Some(over) = self.hear(POLL)? else { continue };
            self.repost()?;
            if over || self.received - told >= quarter {
                told = self.received;
                let Side { out, qp, patience, .. } = &mut self.side;
                out.make_room(patience)?;
                out.word(told, consumed, |wr| qp.post(wr))?;
            }
            if over {
                return self.side.out.settle(0, &mut self.side.patience);
            }
        }
    }

    /// WRITE, READ and atomics: half of the depth is posted at a time, its last request signaled.
    pub(super) fn lead_one_sided(&mut self, slice: Duration, latency: &mut Histogram) -> Result<Pace, Error> {
        let (begin, first) = (Instant::now(), self.sent);
        let chunk = (self.side.depth / 2).max(1);
        let (mut in_flight, mut over) = (0, false);
        let (mut sampled, mut sampled_at) = (None, begin);
        loop {
            while !over && in_flight + chunk <= self.side.depth {
                self.operate(chunk)?;
                in_flight += chunk;
                sampled.get_or_insert(self.sent - 1);
            }
            let (mut done, mut failed) = (None, None);
            let count = self.side.out.cq.poll(POLL, |c| {
                failed = (!c.status.is_success()).then_some(c.status).or(failed);
                done = Some(c.wr_id);
            })?;
            if let Some(status) = failed {
                return Err(Error::Request { what: self.side.op.name(), status });
            }
            let Some(done) = done else {
                self.side.patience.idle()?;
                continue;
            };
            self.side.patience.reset();
            in_flight -= count * chunk;
            self.side.out.counters.completions += count as u64;
            self.look_at_brought(done)?;
            if sampled.is_some_and(|sampled| sampled <= done) {
                let now = Instant::now();
                latency.record((now - sampled_at).as_nanos() as u64);
                (sampled, sampled_at) = (None, now);
                over = now - begin >= slice;
            }
            if over && in_flight == 0 {
                return Ok(Pace { turns: self.sent - first, time: begin.elapsed() });
            }
        }
    }

    /// Posts `count` one-sided operations, the last one signaled.
    #[inline]
    fn operate(&mut self, count: usize) -> Result<(), Error> {
        let peer = self.side.peer()?;
        let Side { out, qp, op, payload, depth, .. } = &mut self.side;
        let (sent, slot) = (&mut self.sent, &mut self.send_slot);
        out.counters.batches += 1;
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
                out.operation(*sent, at, op, left == 0, |wr| batch.post(wr))?;
                *sent += 1;
            }
            Ok(())
        })
    }

    /// Looks at what a READ or an atomic brought.
    #[inline]
    fn look_at_brought(&mut self, seq: u64) -> Result<(), Error> {
        let Side { op, payload, depth, out, errors, .. } = &mut self.side;
        let expected = match op {
            Op::Read => u64::from_ne_bytes([PATTERN; 8]),
            Op::Cas | Op::Faa => seq,
            _ => return Ok(()),
        };
        let slot = if *depth == 1 { 0 } else { (seq % *depth as u64) as usize };
        *errors += u64::from(!holds(&out.source, *payload, slot, expected)?);
        Ok(())
    }

    /// Posts one message.
    #[inline]
    fn say(&mut self, over: bool) -> Result<(), Error> {
        let peer = self.side.peer()?;
        let Side { out, qp, patience, op, payload, depth, .. } = &mut self.side;
        out.make_room(patience)?;
        out.counters.batches += 1;
        let slot = step(&mut self.send_slot, *depth);
        let message = message(&peer, *op, *payload, slot, self.sent, over);
        out.message(self.sent, slot, message, |wr| qp.post(wr))?;
        self.sent += 1;
        Ok(())
    }

    /// Posts messages and tells the device once.
    #[inline]
    fn say_many(&mut self, count: u64, over: bool) -> Result<(), Error> {
        let peer = self.side.peer()?;
        let Side { out, qp, patience, op, payload, depth, .. } = &mut self.side;
        let (sent, slot) = (&mut self.sent, &mut self.send_slot);
        out.make_room(patience)?;
        out.counters.batches += 1;
        qp.post_batch(|batch| {
            for _ in 0..count {
                let at = step(slot, *depth);
                let message = message(&peer, *op, *payload, at, *sent, over);
                out.message(*sent, at, message, |wr| batch.post(wr))?;
                *sent += 1;
            }
            Ok(())
        })
    }

    /// Takes what has arrived, up to `max` messages. `None` if nothing was there; otherwise whether the last message of the slice was among it.
    #[inline]
    fn hear(&mut self, max: usize) -> Result<Option<bool>, Error> {
        let Side { recv_cq, slots, payload, op, receives, depth, .. } = &mut self.side;
        let places = if *op == Op::Send { *receives } else { *depth };
        let (received, slot) = (&mut self.received, &mut self.recv_slot);
        let (mut over, mut failed, mut wrong) = (false, None, 0);
        let count = recv_cq.poll(max, |c| {
            if !c.status.is_success() {
                failed = Some(c.status);
                return;
            }
            let held = holds(slots, *payload, step(slot, places), *received);
            wrong += u64::from(!held.unwrap_or(false) || c.byte_len as usize != *payload);
            over = is_end(c);
            *received += 1;
        })?;
        if let Some(status) = failed {
            return Err(Error::Request { what: "receive", status });
        }
        if count == 0 {
            self.side.patience.idle()?;
            return Ok(None);
        }
        self.side.patience.reset();
        self.side.out.counters.completions += count as u64;
        self.side.errors += wrong;
        self.spent += count;
        Ok(Some(over))
    }

    /// Posts the receives anew that messages have used.
    #[inline]
    fn repost(&mut self) -> Result<(), Error> {
        while self.spent > 0 {
            let slot = step(&mut self.post_slot, self.side.receives);
            self.side.post_receive(slot)?;
            self.spent -= 1;
        }
        Ok(())
    }

    /// Waits until the other side has consumed at least `count` messages, and says how many.
    #[inline]
    fn await_consumed(&mut self, count: u64) -> Result<u64, Error> {
        loop {
            let consumed = self.side.consumed()?;
            if consumed >= count {
                self.side.patience.reset();
                return Ok(consumed.min(self.sent));
            }
            let gave_way = self.side.patience.idle()?;
            if gave_way && self.side.qp.state() == QpState::Error {
                return Err(Error::Request { what: self.side.op.name(), status: Status::Flushed });
            }
        }
    }
}

/// The request for message `seq`.
#[inline]
fn message(peer: &Card, op: Op, payload: usize, slot: usize, seq: u64, over: bool) -> SendOp {
    let mark = if over { END } else { 0 };
    match op {
        Op::Send if over => SendOp::SendImm(END),
        Op::Send => SendOp::Send,
        _ => SendOp::WriteImm(peer.slot(payload, slot), (seq as u32 & !END) | mark),
    }
}

fn is_end(completion: &Completion) -> bool {
    completion.imm.is_some_and(|imm| imm & END != 0)
}

/// Steps a slot forward and says where it was.
#[inline]
fn step(slot: &mut usize, count: usize) -> usize {
    let at = *slot;
    *slot = if at + 1 == count { 0 } else { at + 1 };
    at
}
