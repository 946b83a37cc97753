//! The measured loops.

use std::collections::VecDeque;
use std::time::Instant;

use crosstie::endpoint::Buffer;
use crosstie::group::{Channel, Group, GroupError, MemberId, RecvRequest, SendRequest, Tagged, TaggedFailed};
use crosstie::telemetry::Histogram;

use super::plan::{Kind, Mode, Plan};
use crate::error::Error;

/// The member to which all others send.
const RECEIVER: usize = 0;
/// Tagged messages in flight from each sender.
const TAGGED_DEPTH: usize = 16;
const TAG: u64 = 1;

/// One member's part of all slices.
pub(super) struct Slices<'g> {
    kind: Kind,
    group: &'g Group,
    channel: Option<Channel>,
    tagged: Option<TaggedPart>,
    payload: Vec<u8>,
    received: Vec<u8>,
    /// Next message number of each sender.
    next: Vec<u64>,
    sent: u64,
    contention: f64,
    random: u64,
    errors: u64,
    rounds: u64,
}

/// Buffers and requests of tagged messages.
struct TaggedPart {
    tagged: Tagged,
    free: Vec<Buffer>,
    sends: VecDeque<SendRequest>,
    receives: VecDeque<RecvRequest>,
}

fn tagged_failed(failed: TaggedFailed) -> Error {
    Error::rpc("the group")(failed.error)
}

impl TaggedPart {
    /// A buffer that nothing uses, or that of the oldest send.
    fn take_buffer(&mut self) -> Result<Buffer, Error> {
        match self.free.pop() {
            Some(buffer) => Ok(buffer),
            None => {
                let send = self.sends.pop_front().ok_or(Error::Protocol)?;
                send.wait().map_err(tagged_failed)
            }
        }
    }

    fn send(&mut self, to: MemberId, payload: &[u8]) -> Result<(), Error> {
        let buffer = self.take_buffer()?;
        // The number at the start; the rest does not change.
        buffer.write(0, &payload[..8]).map_err(|_| Error::Protocol)?;
        let send = self.tagged.isend(to, TAG, buffer, ..payload.len()).map_err(tagged_failed)?;
        self.sends.push_back(send);
        Ok(())
    }

    fn post_receives(&mut self, count: usize) -> Result<(), Error> {
        while self.receives.len() < count {
            let buffer = self.take_buffer()?;
            self.receives.push_back(self.tagged.irecv(None, Some(TAG), buffer).map_err(tagged_failed)?);
        }
        Ok(())
    }

    /// Waits for the next message. Its number, as bytes, comes to `received`.
    fn recv(&mut self, received: &mut Vec<u8>, left: usize) -> Result<MemberId, Error> {
        self.post_receives(left.min(TAGGED_DEPTH))?;
        let recv = self.receives.pop_front().ok_or(Error::Protocol)?;
        let (info, buffer) = recv.wait().map_err(tagged_failed)?;
        received.resize(info.len as usize, 0);
        buffer.read(0, &mut received[..8]).map_err(|_| Error::Protocol)?;
        self.free.push(buffer);
        Ok(info.from)
    }

    fn end_sends(&mut self) -> Result<(), Error> {
        while let Some(send) = self.sends.pop_front() {
            self.free.push(send.wait().map_err(tagged_failed)?);
        }
        Ok(())
    }
}

fn failed(error: GroupError) -> Error {
    Error::rpc("the group")(error)
}

impl<'g> Slices<'g> {
    pub(super) fn new(plan: &Plan, group: &'g Group) -> Result<Slices<'g>, Error> {
        let channel = match plan.kind {
            Kind::Message if plan.arguments.mode == Mode::Bytes => {
                let mut options = group.channel_options();
                if plan.arguments.loss > 0.0 {
                    // The device loses nothing, but this measurement does.
                    (options.resend_after, options.min_resend_after) = (2_000_000, 50_000);
                }
                Some(group.open_channel(1, &options).map_err(failed)?)
            }
            _ => None,
        };
        let tagged = match plan.kind {
            Kind::Message if plan.arguments.mode != Mode::Bytes => {
                let mut options = group.tagged_options();
                options.eager_max = if plan.arguments.mode == Mode::Eager { u32::MAX } else { 0 };
                if plan.arguments.loss > 0.0 {
                    (options.channel.resend_after, options.channel.min_resend_after) = (2_000_000, 50_000);
                }
                let tagged = group.open_tagged(1, &options).map_err(failed)?;
                let buffer = || {
                    let buffer = group.allocate(plan.arguments.payload as usize).map_err(failed)?;
                    buffer
                        .write(0, &vec![7; plan.arguments.payload as usize])
                        .map_err(|_| Error::Protocol)?;
                    Ok(buffer)
                };
                let free = (0..2 * TAGGED_DEPTH).map(|_| buffer()).collect::<Result<_, Error>>()?;
                Some(TaggedPart { tagged, free, sends: VecDeque::new(), receives: VecDeque::new() })
            }
            _ => None,
        };
        Ok(Slices {
            kind: plan.kind,
            group,
            channel,
            tagged,
            payload: vec![7; plan.arguments.payload as usize],
            received: Vec::with_capacity(plan.arguments.payload as usize),
            next: vec![0; group.members()],
            sent: 0,
            contention: plan.arguments.contention,
            random: 0x9e37_79b9_7f4a_7c15 ^ group.member().index() as u64,
            errors: 0,
            rounds: 0,
        })
    }

    pub(super) fn reset(&mut self) {
        self.errors = 0;
        self.rounds = 0;
    }

    pub(super) fn errors(&self) -> u64 {
        self.errors
    }

    /// Rounds of the barrier, with those that separate slices.
    pub(super) fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Operations that count for one of a slice: barriers are counted once, locks and messages for each member.
    pub(super) fn per_op(&self) -> u64 {
        match self.kind {
            Kind::Barrier => 1,
            Kind::Lock => self.group.members() as u64,
            Kind::Message => self.group.members() as u64 - 1,
        }
    }

    /// Runs `ops` operations. Returns the seconds that they took.
    pub(super) fn run(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        match self.kind {
            Kind::Barrier => self.run_barriers(ops, latency),
            Kind::Lock => self.run_locks(ops, latency),
            Kind::Message => self.run_stream(ops),
        }
    }

    fn run_barriers(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        let barrier = self.group.barrier(0);
        barrier.wait().map_err(failed)?;
        self.rounds += 1 + ops;
        let begin = Instant::now();
        let mut last = begin;
        for _ in 0..ops {
            barrier.wait().map_err(failed)?;
            let now = Instant::now();
            latency.record((now - last).as_nanos() as u64);
            last = now;
        }
        Ok((last - begin).as_secs_f64())
    }

    fn run_locks(&mut self, ops: u64, latency: &mut Histogram) -> Result<f64, Error> {
        let (shared, own) = (self.group.lock(0), self.group.lock(self.group.member().index() as u32 + 1));
        self.group.barrier(0).wait().map_err(failed)?;
        let begin = Instant::now();
        for _ in 0..ops {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let contended = (self.random >> 11) as f64 / (1u64 << 53) as f64 <= self.contention;
            let asked = Instant::now();
            let guard = if contended { shared.acquire() } else { own.acquire() }.map_err(failed)?;
            latency.record(asked.elapsed().as_nanos() as u64);
            drop(guard);
        }
        self.group.barrier(0).wait().map_err(failed)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// All members send `ops` messages each to member 0.
    fn run_stream(&mut self, ops: u64) -> Result<f64, Error> {
        if self.tagged.is_some() {
            return self.run_tagged_stream(ops);
        }
        let channel = self.channel.clone().ok_or(Error::Protocol)?;
        self.group.barrier(0).wait().map_err(failed)?;
        let begin = Instant::now();
        if self.group.member().index() == RECEIVER {
            for _ in 0..ops * self.per_op() {
                let from = channel.recv_into(&mut self.received).map_err(failed)?;
                self.check(from);
            }
        } else {
            for _ in 0..ops {
                self.stamp();
                channel.send(MemberId::new(RECEIVER), &self.payload).map_err(failed)?;
            }
        }
        let elapsed = begin.elapsed().as_secs_f64();
        channel.flush().map_err(failed)?;
        Ok(elapsed)
    }

    fn run_tagged_stream(&mut self, ops: u64) -> Result<f64, Error> {
        let mut part = self.tagged.take().ok_or(Error::Protocol)?;
        let receives = self.group.member().index() == RECEIVER;
        let messages = ops * self.per_op();
        if receives {
            part.post_receives((messages as usize).min(TAGGED_DEPTH))?;
        }
        self.group.barrier(0).wait().map_err(failed)?;
        let begin = Instant::now();
        if receives {
            for number in 0..messages {
                let from = part.recv(&mut self.received, (messages - number) as usize)?;
                self.check(from);
            }
        } else {
            for _ in 0..ops {
                self.stamp();
                part.send(MemberId::new(RECEIVER), &self.payload)?;
            }
            part.end_sends()?;
        }
        let elapsed = begin.elapsed().as_secs_f64();
        self.tagged = Some(part);
        Ok(elapsed)
    }

    fn run_tagged_round_trips(&mut self, ops: u64, latency: &mut Histogram) -> Result<(), Error> {
        let mut part = self.tagged.take().ok_or(Error::Protocol)?;
        self.group.barrier(0).wait().map_err(failed)?;
        let me = self.group.member().index();
        if me < 2 {
            for _ in 0..ops {
                let begin = Instant::now();
                part.post_receives(1)?;
                for step in 0..2 {
                    if step == me {
                        self.stamp();
                        part.send(MemberId::new(1 - me), &self.payload)?;
                    } else {
                        let from = part.recv(&mut self.received, 1)?;
                        self.check(from);
                    }
                }
                latency.record(begin.elapsed().as_nanos() as u64);
            }
            part.end_sends()?;
        }
        self.tagged = Some(part);
        Ok(())
    }

    /// Round trips between members 0 and 1.
    pub(super) fn run_round_trips(&mut self, ops: u64, latency: &mut Histogram) -> Result<(), Error> {
        if self.tagged.is_some() {
            return self.run_tagged_round_trips(ops, latency);
        }
        let channel = self.channel.clone().ok_or(Error::Protocol)?;
        self.group.barrier(0).wait().map_err(failed)?;
        let me = self.group.member().index();
        if me < 2 {
            for _ in 0..ops {
                let begin = Instant::now();
                for step in 0..2 {
                    if step == me {
                        self.stamp();
                        channel.send(MemberId::new(1 - me), &self.payload).map_err(failed)?;
                    } else {
                        let from = channel.recv_into(&mut self.received).map_err(failed)?;
                        self.check(from);
                    }
                }
                latency.record(begin.elapsed().as_nanos() as u64);
            }
        }
        channel.flush().map_err(failed)
    }

    /// Numbers the next message.
    fn stamp(&mut self) {
        self.payload[..8].copy_from_slice(&self.sent.to_le_bytes());
        self.sent += 1;
    }

    /// Counts a message that is not the next one of its sender, or has another length.
    fn check(&mut self, from: MemberId) {
        let next = &mut self.next[from.index()];
        let number = self.received.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        if number != Some(*next) || self.received.len() != self.payload.len() {
            self.errors += 1;
        }
        *next = number.unwrap_or(*next) + 1;
    }
}
