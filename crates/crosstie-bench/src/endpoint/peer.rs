//! One side of `bench endpoint`: its endpoint, its buffers, and the measured loops, which are what a user of the library would write.
//!
//! ```text
//! target   memory that the other side's operations access: one slot for each operation that can be under way
//! pool     buffers, or batches with their buffers, for the operations of this side
//! ```
//!
//! The first 8 bytes of a payload are the number of its operation. The leading side ends a slice by a flag in its last message. On
//! several queue pairs, immediates may arrive in another order.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie::device::{Device, RemoteMemory};
use crosstie::endpoint::{
    Batch, Buffer, Completed, Endpoint, EndpointAddress, EndpointConfig, EndpointCounters, Lend, Local,
    OperationFuture, Progress, Remote,
};
use crosstie::telemetry::Histogram;
use zerocopy::{FromBytes, IntoBytes};

use super::Arguments;
use crate::device::Op;
use crate::error::Error;
use crate::limits::Throughput;
use crate::runner::{Connect, Counts, Exchange, Rank};
use crate::spin_wait::SpinWait;

/// Flag in the number of the last message of a slice.
const END: u64 = 1 << 31;
/// The other bits of a number.
const NUMBER: u64 = END - 1;
/// The value of every byte in the memory that reads read.
const PATTERN: u8 = 0x5A;
/// Immediates that can be under way, for small and for large operations.
const IMM_WINDOW: u32 = 256;
const LARGE_IMM_WINDOW: u32 = 4;
/// Receives that are posted at a time, if messages are small.
const RECEIVES: usize = 64;

/// One side.
pub(super) struct EndpointPeer {
    plan: Arguments,
    endpoint: Endpoint,
    target: Buffer,
    slots: usize,
    remote: Option<RemoteMemory>,
    buffers: Vec<Buffer>,
    batches: Vec<PagedBatch>,
    /// Receives that are waiting for messages.
    receives: VecDeque<OperationFuture<Buffer>>,
    spin: SpinWait,
    sent: u64,
    /// All messages before this number have been received.
    received: u64,
    /// Later messages that have been received.
    early: BTreeSet<u64>,
    /// The last message of the slice, if it is known.
    last: Option<u64>,
    leads: bool,
    tally: Tally,
    latency: Histogram,
    /// How long starting a batch took.
    issue: Histogram,
    counters_at_start: EndpointCounters,
}

/// What one side has counted.
#[derive(Clone, Copy, Default)]
struct Tally {
    messages: u64,
    batches: u64,
    blocks: u64,
    errors: u64,
}

/// A batch with one local buffer and one remote region.
struct PagedBatch {
    batch: Batch,
    local: Local,
    remote: Remote,
}

/// An operation that is under way.
enum Pending {
    Buffer(OperationFuture<Buffer>),
    Batch(OperationFuture<Batch>, Local, Remote),
}

impl EndpointPeer {
    pub(super) fn open(plan: &Arguments, device: &Device, rank: &Rank<'_>) -> Result<EndpointPeer, Error> {
        let imm_window = if plan.shape().payload <= 4096 { IMM_WINDOW } else { LARGE_IMM_WINDOW };
        let config = EndpointConfig {
            qps: plan.qps as u8,
            operations: (2 * plan.queue_depth + 2 * RECEIVES + 16) as u32,
            slots: (plan.queue_depth + 16).min(4095) as u16,
            messages: plan.queue_depth.clamp(RECEIVES, 1024) as u16,
            imm_window,
            // A side that gets nothing for 5 s gives up by itself.
            deadline: None,
            progress: if plan.progress_thread { Progress::Thread } else { Progress::Caller },
            ..EndpointConfig::default()
        };
        let endpoint = Endpoint::new(device, &Arc::new(device.alloc_pd()?), &config)?;
        // The other side may write that far ahead of the immediates that this side has taken, so a slot is not written again before it
        // was checked.
        // On several queue pairs, one immediate may come after many later ones.
        let ahead = if plan.op == Op::WriteImm { 2 * imm_window as usize } else { 0 };
        let slots = plan.queue_depth + 1 + ahead;
        let target = endpoint.allocate(slots * stride(plan))?;
        let fill = if plan.op == Op::Read { PATTERN } else { 0 };
        target.write(0, &vec![fill; slots * stride(plan)])?;
        let mut peer = EndpointPeer {
            plan: plan.clone(),
            endpoint,
            target,
            slots,
            remote: None,
            buffers: Vec::new(),
            batches: Vec::new(),
            receives: VecDeque::new(),
            spin: rank.spin,
            sent: 0,
            received: 0,
            early: BTreeSet::new(),
            last: None,
            leads: rank.number == 0,
            tally: Tally::default(),
            latency: Histogram::new(),
            issue: Histogram::new(),
            counters_at_start: EndpointCounters::default(),
        };
        for _ in 0..plan.queue_depth + 1 {
            let buffer = peer.endpoint.allocate(stride(plan))?;
            // Touches every page before the first slice.
            buffer.write(0, &vec![1; stride(plan)])?;
            peer.buffers.push(buffer);
        }
        Ok(peer)
    }

    /// Operations in one direction, `depth` at a time.
    fn lead_stream(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.sent);
        let mut now = begin;
        if (self.plan.queue_depth, self.plan.batch) == (1, 1) {
            while now - begin < slice {
                let at;
                (at, now) = self.run_one()?;
                self.latency.record((now - at).as_nanos() as u64);
            }
        }
        let mut pending: VecDeque<(Pending, Instant)> = VecDeque::with_capacity(self.plan.queue_depth);
        loop {
            let over = now - begin >= slice;
            while !over && pending.len() < self.plan.queue_depth {
                pending.push_back(self.start_next()?);
            }
            let Some((operation, at)) = pending.pop_front() else { break };
            now = self.finish(operation)?;
            self.latency.record((now - at).as_nanos() as u64);
        }
        let time = begin.elapsed();
        if self.plan.op.is_received() {
            let (last, _) = self.start(self.sent & NUMBER | END)?;
            self.finish(last)?;
            self.sent += 1;
        }
        Ok(Throughput { operations: (self.sent - first) * self.plan.batch as u64, time })
    }

    /// The other side of [`EndpointPeer::lead_stream`], for operations that it receives.
    fn follow_stream(&mut self) -> Result<(), Error> {
        loop {
            if self.receive()? {
                return Ok(());
            }
        }
    }

    /// Round trips, one at a time.
    fn lead_ping_pong(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let begin = Instant::now();
        let (mut last, mut round_trips) = (begin, 0);
        loop {
            let over = last - begin >= slice;
            let number = self.sent & NUMBER | if over { END } else { 0 };
            self.post_receives()?;
            let (sent, _) = self.start(number)?;
            self.receive()?;
            self.finish(sent)?;
            self.sent += 1;
            let now = Instant::now();
            self.latency.record((now - last).as_nanos() as u64);
            (last, round_trips) = (now, round_trips + 1);
            if over {
                return Ok(Throughput {
                    operations: round_trips * self.plan.batch as u64,
                    time: last - begin,
                });
            }
        }
    }

    /// The other side of [`EndpointPeer::lead_ping_pong`].
    fn follow_ping_pong(&mut self) -> Result<(), Error> {
        loop {
            let over = self.receive()?;
            let (sent, _) = self.start(self.sent & NUMBER)?;
            self.finish(sent)?;
            self.sent += 1;
            if over {
                return Ok(());
            }
        }
    }

    /// Starts the next operation of a stream.
    fn start_next(&mut self) -> Result<(Pending, Instant), Error> {
        let started = self.start(self.sent & NUMBER)?;
        if self.plan.batch > 1 {
            self.issue.record(started.1.elapsed().as_nanos() as u64);
        }
        self.sent += 1;
        Ok(started)
    }

    /// Starts operation `number`. Returns when the call began: the payload was filled before, as that of the bare queue pair was; the
    /// blocks of a batch are part of the call.
    fn start(&mut self, number: u64) -> Result<(Pending, Instant), Error> {
        if self.plan.batch > 1 {
            let at = Instant::now();
            return Ok((self.start_batch(number)?, at));
        }
        let (buffer, slot) = (self.take_buffer(number)?, self.slot(number));
        let at = Instant::now();
        Ok((Pending::Buffer(self.start_with(buffer, slot, number)?), at))
    }

    /// Runs the next operation where it is the only one in flight: waits for it where it was started. Returns when that began and
    /// ended.
    fn run_one(&mut self) -> Result<(Instant, Instant), Error> {
        let number = self.sent & NUMBER;
        self.sent += 1;
        let (buffer, slot) = (self.take_buffer(number)?, self.slot(number));
        let at = Instant::now();
        let future = self.start_with(buffer, slot, number)?;
        Ok((at, self.finish_buffer(future)?))
    }

    #[inline]
    fn take_buffer(&mut self, number: u64) -> Result<Buffer, Error> {
        let buffer = self.buffers.pop().ok_or(Error::Protocol)?;
        if self.plan.op != Op::Read {
            buffer.write(0, &number.to_le_bytes())?;
        }
        Ok(buffer)
    }

    #[inline]
    fn start_with(
        &mut self,
        buffer: Buffer,
        slot: usize,
        number: u64,
    ) -> Result<OperationFuture<Buffer>, Error> {
        // No `ok_or`: it would make and drop an error for each operation.
        let Some(remote) = self.remote else { return Err(Error::Protocol) };
        self.tally.messages += 1;
        let (endpoint, bytes, slot) = (&self.endpoint, ..self.plan.payload, slot as u64);
        let started = match self.plan.op {
            Op::Send => endpoint.send(buffer, bytes),
            Op::Read => endpoint.read(buffer, bytes, &remote, slot),
            Op::WriteImm => endpoint.write_imm(buffer, bytes, &remote, slot, number as u32),
            _ => endpoint.write(buffer, bytes, &remote, slot),
        };
        started.map_err(|refused| Error::rpc(self.plan.op.name())(refused.cause))
    }

    /// Where operation `number` goes.
    #[inline]
    fn slot(&self, number: u64) -> usize {
        ((number & NUMBER) % self.slots as u64) as usize * stride(&self.plan)
    }

    /// Starts a batch. Its blocks are scattered over the buffer and over the slot, so that none is next to the one before.
    fn start_batch(&mut self, number: u64) -> Result<Pending, Error> {
        let slot = self.slot(number);
        self.tally.messages += 1;
        let Arguments { op, batch: blocks, payload, .. } = self.plan;
        let PagedBatch { mut batch, local, remote } = self.batches.pop().ok_or(Error::Protocol)?;
        batch.clear_blocks();
        self.tally.batches += 1;
        self.tally.blocks += blocks as u64;
        if op != Op::Read {
            let buffer = batch.buffer(local).ok_or(Error::Protocol)?;
            buffer.write(0, &number.to_le_bytes())?;
        }
        let distance = payload.max(1).next_multiple_of(64);
        for block in 0..blocks {
            let place = scattered(block, blocks) * distance;
            batch
                .block(local, place, remote, (slot + place) as u64, payload)
                .map_err(Error::rpc("adding a block"))?;
        }
        if op == Op::WriteImm {
            batch.announce(number as u32).map_err(Error::rpc("announcing a batch"))?;
        }
        let started =
            if op == Op::Read { self.endpoint.read_batch(batch) } else { self.endpoint.write_batch(batch) };
        Ok(Pending::Batch(started.map_err(|refused| Error::rpc(op.name())(refused.cause))?, local, remote))
    }

    /// Waits until an operation has ended, and takes its buffer back. Returns when that was.
    fn finish(&mut self, pending: Pending) -> Result<Instant, Error> {
        match pending {
            Pending::Buffer(future) => self.finish_buffer(future),
            Pending::Batch(future, local, remote) => {
                let name = self.plan.op.name();
                let batch = wait(&self.endpoint, future, name, &self.plan, &mut self.spin)?.buffer;
                let now = Instant::now();
                if self.plan.op == Op::Read {
                    let buffer = batch.buffer(local).ok_or(Error::Protocol)?;
                    self.tally.errors += u64::from(number_in(buffer)? != u64::from_le_bytes([PATTERN; 8]));
                }
                self.batches.push(PagedBatch { batch, local, remote });
                Ok(now)
            }
        }
    }

    #[inline]
    fn finish_buffer(&mut self, future: OperationFuture<Buffer>) -> Result<Instant, Error> {
        let name = self.plan.op.name();
        let buffer = wait(&self.endpoint, future, name, &self.plan, &mut self.spin)?.buffer;
        let now = Instant::now();
        if self.plan.op == Op::Read {
            self.tally.errors += u64::from(number_in(&buffer)? != u64::from_le_bytes([PATTERN; 8]));
        }
        self.buffers.push(buffer);
        Ok(now)
    }

    /// Waits for the next message and checks it. Returns whether all messages of the slice have been received.
    fn receive(&mut self) -> Result<bool, Error> {
        let number = if self.plan.op == Op::Send {
            self.post_receives()?;
            let next = self.receives.pop_front().ok_or(Error::Protocol)?;
            let completed = wait(&self.endpoint, next, "recv", &self.plan, &mut self.spin)?;
            let number = number_in(&completed.buffer)?;
            self.tally.errors += u64::from(completed.bytes != self.plan.payload as u64);
            self.repost(completed.buffer)?;
            number
        } else {
            let next = self.endpoint.imm_recv().map_err(|refused| Error::rpc("imm_recv")(refused.cause))?;
            let completed = wait(&self.endpoint, next, "imm_recv", &self.plan, &mut self.spin)?;
            let imm = u64::from(completed.imm.ok_or(Error::Protocol)?);
            let mut number = [0; 8];
            let slot = (imm & NUMBER) as usize % self.slots;
            self.target.read(slot * stride(&self.plan), &mut number)?;
            self.tally.errors += u64::from(u64::from_le_bytes(number) as u32 != imm as u32);
            imm
        };
        self.record_received(number);
        Ok(self.last.take_if(|last| *last < self.received).is_some())
    }

    /// Counts a message that was received. One that is not expected, because of its order or because it was received before, is an
    /// error.
    fn record_received(&mut self, number: u64) {
        let expected = self.received & NUMBER;
        let ahead = (number & NUMBER).wrapping_sub(expected) & NUMBER;
        let position = self.received + ahead;
        let has_order = self.plan.op == Op::Send || self.plan.qps == 1;
        let is_expected =
            ahead == 0 || !has_order && ahead < self.slots as u64 && !self.early.contains(&position);
        if !is_expected {
            self.tally.errors += 1;
            // The number is wrong; it stands for the next message.
            self.received += 1;
            self.last = self.last.or((number & END != 0).then_some(self.received - 1));
            return;
        }
        if number & END != 0 {
            self.last = Some(position);
        }
        if ahead > 0 {
            self.early.insert(position);
            return;
        }
        self.received += 1;
        while !self.early.is_empty() && self.early.remove(&self.received) {
            self.received += 1;
        }
    }

    /// Keeps receives posted.
    fn post_receives(&mut self) -> Result<(), Error> {
        if self.plan.op != Op::Send {
            return Ok(());
        }
        let enough = if self.plan.payload <= 4096 { RECEIVES } else { self.plan.queue_depth + 1 };
        while self.receives.len() < enough {
            let buffer = self.endpoint.allocate(stride(&self.plan))?;
            self.repost(buffer)?;
        }
        Ok(())
    }

    fn repost(&mut self, buffer: Buffer) -> Result<(), Error> {
        let started = self.endpoint.recv(buffer, ..).map_err(|refused| Error::rpc("recv")(refused.cause))?;
        self.receives.push_back(started);
        Ok(())
    }
}

impl Connect for EndpointPeer {
    fn address(&self) -> Vec<u8> {
        [self.target.remote().as_bytes(), &self.endpoint.address().to_bytes()].concat()
    }

    fn connect(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let (remote, address) = RemoteMemory::read_from_prefix(bytes).map_err(|_| Error::Protocol)?;
        let address = EndpointAddress::from_bytes(address).map_err(|_| Error::Protocol)?;
        self.endpoint.connect(&address).map_err(Error::rpc("connecting the endpoints"))?;
        self.remote = Some(remote);
        if self.plan.batch > 1 {
            for buffer in self.buffers.drain(..) {
                let mut batch = Batch::with_capacity(self.plan.batch);
                let (local, remote) = (batch.local(buffer), batch.remote(remote));
                self.batches.push(PagedBatch { batch, local, remote });
            }
        }
        Ok(())
    }
}

impl Exchange for EndpointPeer {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        match (self.leads, self.plan.shape().is_ping_pong()) {
            (true, true) => self.lead_ping_pong(slice).map(Some),
            (true, false) => self.lead_stream(slice).map(Some),
            (false, true) => self.follow_ping_pong().map(|()| None),
            (false, false) if self.plan.op.is_received() => self.follow_stream().map(|()| None),
            (false, false) => {
                // It does not notice the operations, and has nothing else to do.
                self.endpoint.progress();
                Ok(None)
            }
        }
    }

    fn reset(&mut self) {
        self.tally = Tally { errors: self.tally.errors, ..Tally::default() };
        self.latency.clear();
        self.issue.clear();
        self.counters_at_start = self.endpoint.counters();
    }

    fn counts(&self) -> Counts {
        let (before, now) = (&self.counters_at_start, self.endpoint.counters());
        let Tally { messages, batches, blocks, errors } = self.tally;
        let counters = [
            ("work_requests", now.work_requests - before.work_requests),
            ("completions", now.operations - before.operations),
            ("bytes", messages * self.plan.shape().payload as u64),
            ("messages", messages),
            ("batches", batches),
            ("blocks", blocks),
            ("stale_completions", now.stale_completions),
            ("empty_receive_queues", now.empty_receive_queues),
        ];
        let (latency, issue) = (self.latency.clone(), self.issue.clone());
        Counts { latency, issue, ..Counts::new(counters, errors) }
    }
}

/// Waits for an operation: polls, or parks if the endpoint has a thread of its own.
#[inline]
fn wait<B: Lend>(
    endpoint: &Endpoint,
    mut future: OperationFuture<B>,
    what: &'static str,
    plan: &Arguments,
    spin: &mut SpinWait,
) -> Result<Completed<B>, Error> {
    let ended = if plan.progress_thread {
        future.wait()
    } else {
        loop {
            if let Some(ended) = future.try_take() {
                break ended;
            }
            endpoint.progress();
            if !future.is_ended() {
                spin.idle()?;
            }
        }
    };
    spin.reset();
    ended.map_err(|failed| Error::rpc(what)(failed.cause))
}

fn number_in(buffer: &Buffer) -> Result<u64, Error> {
    let mut number = [0; 8];
    buffer.read(0, &mut number)?;
    Ok(u64::from_le_bytes(number))
}

/// Distance between two slots, and length of a buffer.
fn stride(plan: &Arguments) -> usize {
    plan.payload.max(1).next_multiple_of(64) * plan.batch
}

/// The place of a block among all: a permutation that leaves the first block in its place and puts no two neighbours side by side.
fn scattered(block: usize, blocks: usize) -> usize {
    // Even places first, then odd ones, each from both ends.
    let half = blocks.div_ceil(2);
    if block < half { 2 * block } else { 2 * (block - half) + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_blocks_are_a_permutation_without_neighbours() {
        for blocks in [1, 2, 3, 8, 1001] {
            let places: Vec<usize> = (0..blocks).map(|block| scattered(block, blocks)).collect();
            let mut sorted = places.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..blocks));
            assert_eq!(places[0], 0);
            assert!(blocks < 3 || places.windows(2).all(|pair| pair[0] + 1 != pair[1]), "{places:?}");
        }
    }
}
