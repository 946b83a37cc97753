//! The measured loops.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crosstie::endpoint::Buffer;
use crosstie::group::{
    Channel, Counters, Group, GroupError, MemberId, PacketKind, RecvRequest, SendRequest, Tagged,
    TaggedFailed,
};
use crosstie::telemetry::Histogram;

use super::{Arguments, Kind, Mode};
use crate::error::Error;
use crate::limits::Throughput;
use crate::runner::{Counts, Exchange, Rank};

/// The member to which all others send.
const RECEIVER: usize = 0;
/// Tagged messages in flight from each sender.
const TAGGED_DEPTH: usize = 16;
const TAG: u64 = 1;

/// One member's part of all slices. Every member runs the same number of operations.
pub(super) struct Slices {
    kind: Kind,
    // Field order: dropped before the group.
    carrier: Option<Carrier>,
    group: Group,
    /// Operations of the next slice, and how long it should take.
    ops: u64,
    slice: Duration,
    messages: Messages,
    contention: f64,
    random: u64,
    rounds: u64,
    latency: Histogram,
    counters_at_start: Counters,
}

/// The messages of one member: those that it sends, and those that it receives.
struct Messages {
    payload: Vec<u8>,
    received: Vec<u8>,
    /// Next message number of each sender.
    next: Vec<u64>,
    sent: u64,
    errors: u64,
}

impl Messages {
    /// Numbers the next message.
    fn stamp(&mut self) -> &[u8] {
        self.payload[..8].copy_from_slice(&self.sent.to_le_bytes());
        self.sent += 1;
        &self.payload
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

/// How messages travel.
enum Carrier {
    Bytes(Channel),
    Tagged(TaggedMessages),
}

impl Carrier {
    fn open(plan: &Arguments, group: &Group) -> Result<Carrier, Error> {
        // The device loses nothing, but with `--loss` this measurement does.
        let resend = (plan.loss > 0.0).then_some((2_000_000, 50_000));
        if plan.mode == Mode::Bytes {
            let mut options = group.channel_options();
            (options.resend_after, options.min_resend_after) =
                resend.unwrap_or((options.resend_after, options.min_resend_after));
            return Ok(Carrier::Bytes(group.open_channel(1, &options).map_err(failed)?));
        }
        let mut options = group.tagged_options();
        options.eager_max = if plan.mode == Mode::Eager { u32::MAX } else { 0 };
        (options.channel.resend_after, options.channel.min_resend_after) =
            resend.unwrap_or((options.channel.resend_after, options.channel.min_resend_after));
        let tagged = group.open_tagged(1, &options).map_err(failed)?;
        let buffer = |_| {
            let buffer = group.allocate(plan.payload).map_err(failed)?;
            buffer.write(0, &vec![7; plan.payload])?;
            Ok(buffer)
        };
        let free = (0..2 * TAGGED_DEPTH).map(buffer).collect::<Result<_, Error>>()?;
        let (sends, receives) = (VecDeque::new(), VecDeque::new());
        Ok(Carrier::Tagged(TaggedMessages { tagged, free, sends, receives }))
    }

    /// Prepares for so many messages that will arrive.
    fn expect(&mut self, messages: u64) -> Result<(), Error> {
        match self {
            Carrier::Bytes(_) => Ok(()),
            Carrier::Tagged(tagged) => tagged.post_receives(messages),
        }
    }

    fn send(&mut self, to: usize, payload: &[u8]) -> Result<(), Error> {
        match self {
            Carrier::Bytes(channel) => channel.send(MemberId::new(to), payload).map_err(failed),
            Carrier::Tagged(tagged) => tagged.send(MemberId::new(to), payload),
        }
    }

    /// Waits for the next message; `left` will still arrive. Checks it.
    fn recv(&mut self, messages: &mut Messages, left: u64) -> Result<(), Error> {
        let from = match self {
            Carrier::Bytes(channel) => channel.recv_into(&mut messages.received).map_err(failed)?,
            Carrier::Tagged(tagged) => tagged.recv(&mut messages.received, left)?,
        };
        messages.check(from);
        Ok(())
    }

    /// Waits until all messages are sent.
    fn flush(&mut self) -> Result<(), Error> {
        match self {
            Carrier::Bytes(channel) => channel.flush().map_err(failed),
            Carrier::Tagged(tagged) => tagged.end_sends(),
        }
    }
}

/// Buffers and requests of tagged messages.
struct TaggedMessages {
    tagged: Tagged,
    free: Vec<Buffer>,
    sends: VecDeque<SendRequest>,
    receives: VecDeque<RecvRequest>,
}

fn failed(error: GroupError) -> Error {
    Error::rpc("the group")(error)
}

fn tagged_failed(failed: TaggedFailed) -> Error {
    Error::rpc("the group")(failed.error)
}

impl TaggedMessages {
    /// A buffer that nothing uses, or that of the oldest send.
    fn take_buffer(&mut self) -> Result<Buffer, Error> {
        match self.free.pop() {
            Some(buffer) => Ok(buffer),
            None => self.sends.pop_front().ok_or(Error::Protocol)?.wait().map_err(tagged_failed),
        }
    }

    fn send(&mut self, to: MemberId, payload: &[u8]) -> Result<(), Error> {
        let buffer = self.take_buffer()?;
        // The number at the start; the rest does not change.
        buffer.write(0, &payload[..8])?;
        let send = self.tagged.isend(to, TAG, buffer, ..payload.len()).map_err(tagged_failed)?;
        self.sends.push_back(send);
        Ok(())
    }

    fn post_receives(&mut self, left: u64) -> Result<(), Error> {
        while (self.receives.len() as u64) < left.min(TAGGED_DEPTH as u64) {
            let buffer = self.take_buffer()?;
            self.receives.push_back(self.tagged.irecv(None, Some(TAG), buffer).map_err(tagged_failed)?);
        }
        Ok(())
    }

    /// Waits for the next message. Its number, as bytes, comes to `received`.
    fn recv(&mut self, received: &mut Vec<u8>, left: u64) -> Result<MemberId, Error> {
        self.post_receives(left)?;
        let recv = self.receives.pop_front().ok_or(Error::Protocol)?;
        let (info, buffer) = recv.wait().map_err(tagged_failed)?;
        received.resize(info.len as usize, 0);
        buffer.read(0, &mut received[..8])?;
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

impl Slices {
    pub(super) fn open(kind: Kind, plan: &Arguments, rank: &mut Rank<'_>) -> Result<Slices, Error> {
        let device = rank.device()?;
        let group = Group::join(rank.collective.job, &device, &plan.config(kind, rank.number));
        let group = group.map_err(Error::rpc("joining the group"))?;
        let carrier = (kind == Kind::Message).then(|| Carrier::open(plan, &group)).transpose()?;
        let messages = Messages {
            payload: vec![7; plan.payload],
            received: Vec::with_capacity(plan.payload),
            next: vec![0; group.members()],
            sent: 0,
            errors: 0,
        };
        Ok(Slices {
            kind,
            carrier,
            ops: 1000,
            slice: Duration::ZERO,
            messages,
            contention: plan.contention,
            random: 0x9e37_79b9_7f4a_7c15 ^ group.member().index() as u64,
            rounds: 0,
            latency: Histogram::new(),
            counters_at_start: group.counters(),
            group,
        })
    }

    fn member(&self) -> usize {
        self.group.member().index()
    }

    /// Operations of all members for one of a slice: barriers are counted once, locks and messages for each member.
    fn per_op(&self) -> u64 {
        match self.kind {
            Kind::Barrier => 1,
            Kind::Lock => self.group.members() as u64,
            Kind::Message => self.group.members() as u64 - 1,
        }
    }

    /// Starts together with the other members.
    fn start(&self) -> Result<Instant, Error> {
        self.group.barrier(0).wait().map_err(failed)?;
        Ok(Instant::now())
    }

    fn run_barriers(&mut self) -> Result<Duration, Error> {
        let begin = self.start()?;
        self.rounds += 1 + self.ops;
        let barrier = self.group.barrier(0);
        let mut last = begin;
        for _ in 0..self.ops {
            barrier.wait().map_err(failed)?;
            let now = Instant::now();
            self.latency.record((now - last).as_nanos() as u64);
            last = now;
        }
        Ok(last - begin)
    }

    fn run_locks(&mut self) -> Result<Duration, Error> {
        let (shared, own) = (self.group.lock(0), self.group.lock(self.member() as u32 + 1));
        let begin = self.start()?;
        for _ in 0..self.ops {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let contended = (self.random >> 11) as f64 / (1u64 << 53) as f64 <= self.contention;
            let asked = Instant::now();
            let guard = if contended { shared.acquire() } else { own.acquire() }.map_err(failed)?;
            self.latency.record(asked.elapsed().as_nanos() as u64);
            drop(guard);
        }
        self.group.barrier(0).wait().map_err(failed)?;
        Ok(begin.elapsed())
    }

    /// All members send messages to member 0.
    fn run_stream(&mut self) -> Result<Duration, Error> {
        let (receives, arriving) = (self.member() == RECEIVER, self.ops * self.per_op());
        if receives {
            self.carrier()?.expect(arriving)?;
        }
        let begin = self.start()?;
        let (ops, messages) = (self.ops, &mut self.messages);
        let carrier = self.carrier.as_mut().ok_or(Error::Protocol)?;
        if receives {
            for number in 0..arriving {
                carrier.recv(messages, arriving - number)?;
            }
        } else {
            for _ in 0..ops {
                carrier.send(RECEIVER, messages.stamp())?;
            }
        }
        let elapsed = begin.elapsed();
        carrier.flush()?;
        Ok(elapsed)
    }

    /// Round trips between members 0 and 1.
    fn run_round_trips(&mut self, count: u64) -> Result<(), Error> {
        self.start()?;
        let member = self.member();
        let (messages, latency) = (&mut self.messages, &mut self.latency);
        let carrier = self.carrier.as_mut().ok_or(Error::Protocol)?;
        if member < 2 {
            for _ in 0..count {
                let begin = Instant::now();
                carrier.expect(1)?;
                for step in 0..2 {
                    if step == member {
                        carrier.send(1 - member, messages.stamp())?;
                    } else {
                        carrier.recv(messages, 1)?;
                    }
                }
                latency.record(begin.elapsed().as_nanos() as u64);
            }
        }
        carrier.flush()
    }

    fn carrier(&mut self) -> Result<&mut Carrier, Error> {
        self.carrier.as_mut().ok_or(Error::Protocol)
    }
}

impl Exchange for Slices {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        self.slice = slice;
        let time = match self.kind {
            Kind::Barrier => self.run_barriers()?,
            Kind::Lock => self.run_locks()?,
            Kind::Message => {
                let time = self.run_stream()?;
                self.run_round_trips((self.ops / 8).clamp(8, 2000))?;
                time
            }
        };
        let operations = self.ops * self.per_op();
        Ok((self.member() == 0).then_some(Throughput { operations, time }))
    }

    /// The next slice has as many operations as fit into its time.
    fn slice_done(&mut self, total: Throughput) {
        let ops = self.ops;
        let wanted = ops as f64 * self.slice.as_secs_f64() / total.time.as_secs_f64().max(1e-6);
        self.ops = (wanted as u64).clamp(ops / 4, ops * 4).clamp(8, 1 << 22);
    }

    fn reset(&mut self) {
        (self.messages.errors, self.rounds) = (0, 0);
        self.latency.clear();
        self.counters_at_start = self.group.counters();
    }

    fn counts(&self) -> Counts {
        let (before, now) = (&self.counters_at_start, self.group.counters());
        let sent = |kind: PacketKind| now.sent(kind) - before.sent(kind);
        let since = |count: fn(&Counters) -> u64| count(&now) - count(before);
        let resent = since(|counters| counters.resent);
        let combined = since(|counters| counters.combined);
        let leads = self.member() == 0;
        let mut counters = vec![("messages", PacketKind::ALL.into_iter().map(sent).sum())];
        let kinds = PacketKind::ALL.into_iter().map(|kind| (kind.name(), sent(kind)));
        counters.extend(kinds.filter(|(_, count)| *count > 0));
        match self.kind {
            Kind::Lock => counters.extend([
                ("acquisitions", since(|counters| counters.locks.acquired + counters.locks.reacquired)),
                ("reacquired", since(|counters| counters.locks.reacquired)),
                ("handed_over", since(|counters| counters.locks.handed_over)),
            ]),
            // The same on all members.
            Kind::Barrier => counters.push(("rounds", if leads { self.rounds } else { 0 })),
            Kind::Message => counters.extend([
                ("sent", sent(PacketKind::Data) + combined - resent),
                ("delivered", since(|counters| counters.delivered)),
                ("acks", sent(PacketKind::Ack)),
                ("nacks", sent(PacketKind::Nack)),
                ("resent", resent),
                ("dropped", since(|counters| counters.injected_losses)),
                ("refused", since(|counters| counters.refused)),
                ("discarded", since(|counters| counters.discarded)),
                ("unsent", since(|counters| counters.unsent)),
                ("held", since(|counters| counters.held)),
                ("combined", combined),
            ]),
        }
        let counts = Counts::new(counters, self.messages.errors);
        // Latencies are those of the leading member.
        if leads { Counts { latency: self.latency.clone(), ..counts } } else { counts }
    }
}
