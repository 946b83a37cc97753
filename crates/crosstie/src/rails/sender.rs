//! The sending end of a connection.

use core::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crosstie_protocol::rails::{
    CTS_LEN, Chunk, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, RailLoad, Rates, Record, SendError, Sender,
    fixed_split, leader, rails_of, split,
};

use super::config::Split;
use super::connect::Parts;
use super::context::Context;
use super::counters::ConnectionCounters;
use super::endpoint::{Agreement, Endpoint, POST_RETRIES, PROBE, Role};
use super::error::{Cause, RequestError};
use super::frames::Frame;
use super::head::{Head, Source};
use super::mailbox::{Mail, Mailbox, Order};
use super::memory::Memory;
use crate::copyrpc::poll_clock::PollClock;
use crate::device::{Completion, Data, PostError, RemoteAddr, SendOp, SendWr, Sge};
use core::sync::atomic::Ordering::Relaxed;

/// A send that was accepted. [`SendConnection::test`](super::SendConnection::test) says when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendRequest(u64);

/// The sends of one message.
#[derive(Debug, Default)]
struct Message {
    number: u64,
    count: u8,
    /// Sends whose result the program has not taken.
    untaken: u8,
    is_done: bool,
    mask: Mask,
    sources: [Source; MAX_GROUP],
    targets: [Target; MAX_GROUP],
    /// When its first attempt was posted, per rail.
    posted_at: [u64; MAX_RAILS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Target {
    addrs: [u64; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
}

/// What is known about a rail.
#[derive(Debug)]
struct Rail {
    endpoint: Option<Box<Endpoint>>,
    epoch: u32,
    rates: Rates,
    /// Bytes and requests under way.
    queued: u64,
    outstanding: u32,
    /// When a completion arrived, or the first request was posted, in nanoseconds.
    progress_at: u64,
    probed_at: Option<u64>,
}

/// The sending end of a connection. One thread at a time uses it.
///
/// A message is sent when the receiver has posted a buffer for it. Sends and receives match in order; inside a group, the tag
/// chooses the buffer. All work is done inside the calls of [`isend`](SendCore::isend) and
/// [`test`](SendCore::test): call one of them while sends are under way.
#[derive(Debug)]
pub(super) struct SendCore {
    context: Arc<Context>,
    mailbox: Arc<Mailbox>,
    agreed: Agreement,
    pub(super) counters: Arc<ConnectionCounters>,
    rails: [Rail; MAX_RAILS],
    up: Mask,
    protocol: Sender,
    messages: Box<[Message]>,
    head: Head,
    split: Split,
    ended: Option<Cause>,
    start: Instant,
    clock: PollClock,
    all_down_since: Option<u64>,
    events_seen: u64,
}

/// `wr_id` of a part: message, attempt and rail.
fn wr_id(message: u64, attempt: u8, rail: usize) -> u64 {
    message << 8 | u64::from(attempt) << 4 | rail as u64
}

impl SendCore {
    pub(super) fn new(parts: Parts) -> SendCore {
        let Parts { context, mailbox, agreed, endpoints, .. } = parts;
        let counters = ConnectionCounters::new(Role::Sender, context.next_connection(), agreed.rails);
        context.add_counters(&counters);
        let mut endpoints = endpoints.into_iter();
        SendCore {
            mailbox,
            agreed,
            counters,
            rails: core::array::from_fn(|_| Rail {
                endpoint: endpoints.next().map(Box::new),
                epoch: 0,
                rates: Rates::default(),
                queued: 0,
                outstanding: 0,
                progress_at: 0,
                probed_at: None,
            }),
            up: (1 << agreed.rails) - 1,
            protocol: Sender::new(agreed.slots),
            messages: (0..agreed.slots).map(|_| Message::default()).collect(),
            head: Head::default(),
            split: context.config.split,
            ended: None,
            start: Instant::now(),
            clock: PollClock::new(),
            all_down_since: None,
            events_seen: 0,
            context,
        }
    }

    /// Changes how messages are split, from the next one on.
    pub(super) fn set_split(&mut self, split: Split) {
        self.split = split;
    }

    /// Why the connection has ended, if it has.
    pub(super) fn cause(&self) -> Option<&Cause> {
        self.ended.as_ref()
    }

    /// The rails that are in use: bit `r` is rail `r`.
    pub(super) fn rails_up(&self) -> Mask {
        self.up
    }

    /// Starts to send `range` of `memory`. `None` if the receiver has not posted a buffer yet, or none with this tag in its
    /// current group: try again. The memory must not be changed before [`test`](SendCore::test) says that the send is
    /// done.
    #[inline]
    pub(super) fn isend(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        tag: u32,
    ) -> Result<Option<SendRequest>, RequestError> {
        if self.mailbox.has_mail() || self.ended.is_some() {
            self.read_mail();
            if let Some(cause) = &self.ended {
                return Err(cause.clone().into());
            }
        }
        if self.head.is_empty() && !self.look_for_head()? {
            return Ok(None);
        }
        self.isend_ready(memory, range, tag)
    }

    /// As [`isend`](SendCore::isend), when the receiver's clear-to-send has arrived.
    fn isend_ready(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        tag: u32,
    ) -> Result<Option<SendRequest>, RequestError> {
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        if self.messages[slot].untaken > 0 || self.up == 0 {
            self.progress();
            return Ok(None);
        }
        if memory.context != self.context.id {
            return Err(RequestError::WrongMemory);
        }
        let Some((index, room)) = self.head.find_free(tag) else { return Ok(None) };
        // Checks the range on every rail.
        let mut source = Source::default();
        for rail in 0..self.agreed.rails {
            let sge = memory.regions.region(rail).sge(range.clone())?;
            source.addrs[rail] = sge.addr;
            source.len = sge.len;
            source.lkeys[rail] = sge.lkey;
            source.domains[rail] = sge.pd;
        }
        if u64::from(source.len) > room {
            return Err(RequestError::TooLong { len: source.len as usize, room: room as usize });
        }
        self.head.match_source(index, source);
        if self.head.is_matched() {
            self.send_head(number, slot);
        }
        Ok(Some(SendRequest(number << 3 | index as u64)))
    }

    /// Whether a send is done, and how many bytes it sent. After that the request is over.
    #[inline]
    pub(super) fn test(&mut self, request: SendRequest) -> Result<Option<usize>, RequestError> {
        let (number, index) = (request.0 >> 3, (request.0 & 7) as usize);
        let slot = number as usize & (self.agreed.slots - 1);
        if let Some(len) = self.take_result(slot, number, index)? {
            return Ok(Some(len));
        }
        self.progress();
        if let Some(len) = self.take_result(slot, number, index)? {
            return Ok(Some(len));
        }
        match &self.ended {
            Some(cause) => Err(cause.clone().into()),
            None => Ok(None),
        }
    }

    #[inline]
    fn take_result(&mut self, slot: usize, number: u64, index: usize) -> Result<Option<usize>, RequestError> {
        let next = self.protocol.next_message();
        let message = &mut self.messages[slot];
        if number >= next {
            // A send of the group that is not complete yet.
            let known = number == next && self.head.has_source(index);
            return if known { Ok(None) } else { Err(RequestError::NoSuchRequest) };
        }
        if message.number != number || message.untaken & (1 << index) == 0 {
            return Err(RequestError::NoSuchRequest);
        }
        if !message.is_done {
            return Ok(None);
        }
        message.untaken &= !(1 << index);
        Ok(Some(message.sources[index].len as usize))
    }

    /// Whether something is under way that must not wait for the program's next call.
    pub(super) fn needs_attention(&self) -> bool {
        self.ended.is_none() && self.protocol.has_lost()
    }

    /// Makes progress without asking for a request: polls completions, handles failures, sends lost parts again.
    pub(super) fn progress(&mut self) {
        if self.mailbox.has_mail() {
            self.read_mail();
        }
        for rail in 0..self.agreed.rails {
            if self.rails[rail].outstanding > 0 {
                self.poll_rail(rail);
            }
        }
        if self.protocol.has_lost() && self.up != 0 {
            self.replay_lost();
        }
        if self.clock.is_due() {
            self.clock.read();
            self.check_time();
        }
    }

    /// Looks whether the receiver's clear-to-send for the next message has arrived.
    #[inline]
    fn look_for_head(&mut self) -> Result<bool, RequestError> {
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        let at = slot * self.agreed.max_group * CTS_LEN;
        for nth in 0..self.agreed.rails {
            // It most likely comes over the rail of its slot.
            let rail = (slot + nth) % self.agreed.rails;
            let Some(endpoint) = &self.rails[rail].endpoint else { continue };
            let Ok(sequence) = endpoint.memory.load::<8>(at + 48) else { continue };
            if u64::from_le_bytes(sequence) != number + 1 {
                continue;
            }
            match self.head.read(&endpoint.memory, at, number, self.agreed.max_group) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(violation) => {
                    self.end(Cause::Violation(violation));
                    return Err(Cause::Violation(violation).into());
                }
            }
        }
        // Nothing moves while the program asks in a loop, but a rail may have failed.
        if self.clock.is_due() {
            self.clock.read();
            self.check_time();
        }
        Ok(false)
    }

    /// Sends the message whose sends are all matched.
    fn send_head(&mut self, number: u64, slot: usize) {
        let mut lens = [[0; MAX_RAILS]; MAX_GROUP];
        let message = &mut self.messages[slot];
        let (mut count, mut total) = (0, 0u64);
        for (source, wanted) in self.head.take() {
            message.sources[count] = *source;
            message.targets[count] = Target { addrs: wanted.addrs, rkeys: wanted.rkeys };
            total += u64::from(source.len);
            count += 1;
        }
        message.number = number;
        message.count = count as u8;
        message.untaken = ((1u16 << count) - 1) as u8;
        message.is_done = false;
        let now = self.now();
        let loads = self.loads();
        let len = self.messages[slot].sources[0].len;
        let is_staged = count == 1 && len > 0 && len <= self.agreed.staging;
        let min_part = if is_staged { u32::MAX } else { self.context.config.min_part };
        for (index, lens) in lens.iter_mut().enumerate().take(count) {
            *lens = self.split_message(self.messages[slot].sources[index].len, &loads, min_part);
        }
        let empty_rail = if total == 0 { self.idle_rail(&loads) } else { 0 };
        let lens = &lens[..count];
        let Ok((_, mask)) = self.protocol.begin(lens, empty_rail) else {
            // The slot is free: all results of its last message were taken, which needs that it is done.
            return self.end(Cause::PeerError("its slot is in use".into()));
        };
        self.messages[slot].mask = mask;
        self.messages[slot].posted_at = [now; MAX_RAILS];
        if is_staged {
            self.counters.staged.add(1);
        }
        self.post_attempt(number, 0, mask, is_staged, now);
    }

    /// The rate and the load of each rail, as they are now.
    #[inline]
    fn loads(&self) -> [RailLoad; MAX_RAILS] {
        let hint = self.context.hint();
        core::array::from_fn(|rail| {
            if self.up & (1 << rail) == 0 {
                return RailLoad::default();
            }
            let state = &self.rails[rail];
            let rate = state.rates.rate().unwrap_or(self.context.link_rates[rail].into());
            RailLoad { rate: hint.apply(rail, rate), queued: state.queued }
        })
    }

    /// How many bytes of a buffer go over each rail.
    #[inline]
    fn split_message(&self, len: u32, loads: &[RailLoad; MAX_RAILS], min_part: u32) -> [u32; MAX_RAILS] {
        let lens = match self.split {
            Split::Adaptive => split(len, loads, min_part),
            Split::Fixed(weights) => {
                let usable: [u32; MAX_RAILS] =
                    core::array::from_fn(|rail| if self.up & (1 << rail) != 0 { weights[rail] } else { 0 });
                match (min_part, usable.iter().position(|weight| *weight > 0)) {
                    // All rails with a weight are down: any rail is better than none.
                    (_, None) => split(len, loads, min_part),
                    (u32::MAX, Some(rail)) => {
                        let mut lens = [0; MAX_RAILS];
                        lens[rail] = len;
                        lens
                    }
                    _ => fixed_split(len, &usable),
                }
            }
        };
        if lens == [0; MAX_RAILS] && len > 0 {
            // The hint excludes all rails that are up.
            let mut lens = lens;
            lens[leader(self.up).unwrap_or(0)] = len;
            return lens;
        }
        lens
    }

    /// The rail for a message without bytes.
    fn idle_rail(&self, loads: &[RailLoad; MAX_RAILS]) -> usize {
        let lens = self.split_message(1, loads, u32::MAX);
        lens.iter().position(|len| *len > 0).unwrap_or(0)
    }

    /// Posts the parts of an attempt.
    fn post_attempt(&mut self, number: u64, attempt: u8, mask: Mask, is_staged: bool, now: u64) {
        let mut failed: Mask = 0;
        for rail in rails_of(mask) {
            if self.post_part(number, attempt, mask, rail, is_staged, now).is_err() {
                failed |= 1 << rail;
            }
        }
        rails_of(failed).for_each(|rail| self.fail_rail(rail));
    }

    fn post_part(
        &mut self,
        number: u64,
        attempt: u8,
        mask: Mask,
        rail: usize,
        is_staged: bool,
        now: u64,
    ) -> Result<(), PostError> {
        let Some(part) = self.protocol.part(number, attempt, rail) else { return Ok(()) };
        let (chunks, bytes) = (part.chunks, part.bytes());
        let imm = self.protocol.immediate(number, mask, attempt, is_staged);
        let slot = usize::from(imm.slot);
        let message = &self.messages[slot];
        let state = &mut self.rails[rail];
        let cells = &self.counters.rails[rail];
        if state.outstanding == 0 {
            state.progress_at = now;
        }
        state.queued += bytes;
        state.outstanding += 1;
        let Some(endpoint) = state.endpoint.as_deref_mut() else { return Err(PostError::Full) };
        let qp = endpoint.take_qp();
        let id = wr_id(number, attempt, rail);
        let target = |index: usize, chunk: Chunk| RemoteAddr {
            addr: message.targets[index].addrs[rail].wrapping_add(chunk.offset.into()),
            rkey: message.targets[index].rkeys[rail],
        };
        let mut requests = 1;
        if message.count == 1 {
            let to = if is_staged {
                endpoint.peer_staging.at(slot as u64 * u64::from(self.agreed.staging))
            } else {
                target(0, chunks[0])
            };
            let sges = [message.sources[0].sge(rail, chunks[0])];
            let data = if bytes == 0 { Data::Inline(&[]) } else { Data::Regions(&sges) };
            let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
            post(endpoint, qp, &wr, attempt > 0, cells)?;
        } else {
            for (index, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| chunk.len > 0) {
                let sges = [message.sources[index].sge(rail, *chunk)];
                let wr = SendWr::new(id, SendOp::Write(target(index, *chunk)), Data::Regions(&sges));
                post(endpoint, qp, &wr, true, cells)?;
                requests += 1;
            }
            let at = slot * RECORD_LEN;
            let len = Record::len_of(message.count.into());
            let is_leader = leader(mask) == Some(rail);
            if is_leader {
                let sizes = core::array::from_fn(|index| u64::from(message.sources[index].len));
                // The offset is inside: a slot is below the number of slots.
                endpoint.source.write(at, &Record { sizes }.encode(number)).map_err(|_| PostError::Full)?;
            }
            let source = endpoint.source.sge(at..at + len).map_err(|_| PostError::Full)?;
            let sges = [Sge::detached(source.addr, source.len, source.lkey, source.pd, source.access)];
            let data = if is_leader { Data::Regions(&sges) } else { Data::Inline(&[]) };
            let to = endpoint.peer.at(at as u64);
            let wr = SendWr::new(id, SendOp::WriteImm(to, imm.bits()), data).signaled();
            post(endpoint, qp, &wr, false, cells)?;
        }
        cells.bytes.add(bytes);
        cells.work_requests.add(requests);
        cells.payload_requests.add(requests);
        Ok(())
    }

    /// Polls the completions of a rail.
    fn poll_rail(&mut self, rail: usize) {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return };
        let mut has_failed = false;
        let mut now = None;
        let polled = endpoint.poll(|completion| {
            let now = *now.get_or_insert_with(|| self.start.elapsed().as_nanos() as u64);
            has_failed |= !self.handle_completion(rail, completion, now);
        });
        self.rails[rail].endpoint = Some(endpoint);
        if has_failed || polled.is_err() {
            self.fail_rail(rail);
        }
    }

    /// Returns false if the completion says that the rail failed.
    #[inline]
    fn handle_completion(&mut self, rail: usize, completion: &Completion, now: u64) -> bool {
        let (state, cells) = (&mut self.rails[rail], &self.counters.rails[rail]);
        cells.completions.add(1);
        if !completion.status.is_success() {
            return false;
        }
        state.probed_at = None;
        if completion.wr_id == PROBE {
            state.progress_at = now;
            return true;
        }
        let (number, attempt) = (completion.wr_id >> 8, (completion.wr_id >> 4 & 15) as u8);
        let bytes = self.protocol.part(number, attempt, rail).map_or(0, |part| part.bytes());
        let slot = number as usize & (self.agreed.slots - 1);
        let since = self.messages[slot].posted_at[rail];
        if attempt == 0 {
            cells.latencies.record(now.saturating_sub(since));
            state.rates.record(bytes, now.saturating_sub(since.max(state.progress_at)));
            cells.rate.store(state.rates.rate().unwrap_or(0), Relaxed);
        }
        state.progress_at = now;
        state.queued = state.queued.saturating_sub(bytes);
        state.outstanding = state.outstanding.saturating_sub(1);
        if self.protocol.part_done(number, attempt, rail) {
            self.finish_message(number);
        }
        true
    }

    fn finish_message(&mut self, number: u64) {
        let message = &mut self.messages[number as usize & (self.agreed.slots - 1)];
        message.is_done = true;
        self.counters.messages.add(1);
        self.counters.masks[usize::from(message.mask)].add(1);
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// Posts a request; a queue that is full is tried again. `is_old`: the borrow of its memory is over.
#[inline]
fn post(
    endpoint: &mut Endpoint,
    qp: usize,
    wr: &SendWr<'_>,
    is_old: bool,
    cells: &super::counters::RailCells,
) -> Result<(), PostError> {
    let mut tries = 0;
    loop {
        let posted = if is_old { endpoint.qps[qp].post_detached(wr) } else { endpoint.qps[qp].post(wr) };
        match posted {
            Err(PostError::Full) if tries < POST_RETRIES => {
                cells.retries.add(1);
                tries += 1;
            }
            posted => return posted,
        }
    }
}

// Failures and their repair.
impl SendCore {
    #[cold]
    fn read_mail(&mut self) {
        for mail in self.mailbox.take_mail() {
            match mail {
                Mail::RailError { rail, epoch } => {
                    if rail < self.agreed.rails && self.rails[rail].epoch == epoch {
                        self.fail_rail(rail);
                    }
                }
                Mail::Answer { rail, epoch, entries } => {
                    if rail >= self.agreed.rails
                        || self.rails[rail].epoch != epoch
                        || self.up & (1 << rail) != 0
                    {
                        continue;
                    }
                    for entry in entries {
                        self.count_replays(rail, &entry);
                        let mut done = None;
                        self.protocol.fence_answer(rail, entry, |number| done = Some(number));
                        done.into_iter().for_each(|number| self.finish_message(number));
                    }
                    let epoch = epoch.wrapping_add(1);
                    self.mailbox.put_order(Order::Rebuild { rail, epoch });
                    if self.up != 0 {
                        self.replay_lost();
                    }
                }
                Mail::Returned { rail, endpoint } => {
                    let state = &mut self.rails[rail];
                    state.epoch = endpoint.epoch;
                    state.endpoint = Some(endpoint);
                    state.rates.clear();
                    (state.queued, state.outstanding, state.probed_at) = (0, 0, None);
                    self.up |= 1 << rail;
                    self.all_down_since = None;
                    self.counters.rails[rail].returns.add(1);
                    self.counters.rails[rail].is_up.store(1, Relaxed);
                    self.replay_lost();
                }
                Mail::Fence { .. } => {}
                Mail::PeerClosed { next, open } => {
                    (0..self.agreed.rails).for_each(|rail| self.poll_rail(rail));
                    // The receiver has these messages; their acknowledgements may be late or lost.
                    let done: Vec<u64> = self.protocol.open_messages().collect();
                    for number in done.into_iter().filter(|n| *n < next && !open.contains(n)) {
                        if self.protocol.message_done(number) {
                            self.finish_message(number);
                        }
                    }
                    self.end(Cause::PeerClosed);
                }
                Mail::Ended(cause) => {
                    (0..self.agreed.rails).for_each(|rail| self.poll_rail(rail));
                    self.end(cause);
                }
            }
        }
    }

    /// Counts the parts of a message that are lost.
    fn count_replays(&self, rail: usize, answer: &crosstie_protocol::rails::FenceEntry) {
        let Some(message) = self.messages.get(usize::from(answer.slot)) else { return };
        for attempt in 0..16 {
            let lost = self.protocol.part(message.number, attempt, rail).filter(|part| {
                part.state == crosstie_protocol::rails::PartState::Fenced
                    && answer.attempts & (1 << attempt) == 0
            });
            if let Some(part) = lost {
                self.counters.rails[rail].replays.add(1);
                self.counters.rails[rail].replayed_bytes.add(part.bytes());
            }
        }
    }

    /// Takes a rail out, and asks the receiver what has arrived on it.
    #[cold]
    fn fail_rail(&mut self, rail: usize) {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return };
        endpoint.fail();
        // What had completed before counts.
        loop {
            let now = self.now();
            let polled = endpoint.poll(|completion| {
                self.handle_completion(rail, completion, now);
            });
            if !matches!(polled, Ok(1..)) {
                break;
            }
        }
        drop(endpoint);
        let state = &mut self.rails[rail];
        (state.queued, state.outstanding, state.probed_at) = (0, 0, None);
        self.up &= !(1 << rail);
        if self.up == 0 {
            self.all_down_since = Some(self.now());
        }
        self.counters.rails[rail].failures.add(1);
        self.counters.rails[rail].is_up.store(0, Relaxed);
        let mut entries = Vec::new();
        self.protocol.fail_rail(rail, |entry| entries.push(entry));
        let (epoch, next) = (self.rails[rail].epoch, self.protocol.next_message());
        self.mailbox.put_order(Order::Send(Frame::Fence { rail, epoch, next, entries }));
    }

    /// Sends lost parts again over the rails that are up.
    fn replay_lost(&mut self) {
        while self.up != 0
            && let Some((number, count, chunks)) = self.protocol.next_lost()
        {
            let loads = self.loads();
            let mut lens = [[0; MAX_RAILS]; MAX_GROUP];
            let count = usize::from(count);
            for (lens, chunk) in lens.iter_mut().zip(&chunks).take(count) {
                *lens = self.split_message(chunk.len, &loads, self.context.config.min_part);
            }
            let rail = leader(self.up).unwrap_or(0);
            match self.protocol.replay(number, &lens[..count], rail) {
                Ok((attempt, mask)) => {
                    let now = self.now();
                    self.post_attempt(number, attempt, mask, false, now);
                }
                Err(SendError::TooManyAttempts(_) | SendError::SlotInUse(_)) => {
                    return self.end(Cause::TooManyReplays);
                }
            }
        }
    }

    /// Takes out rails that make no progress, and notices events of the ports.
    fn check_time(&mut self) {
        let now = self.now();
        let config = &self.context.config;
        let (stall, probe) = (config.stall_timeout.as_nanos() as u64, config.probe_timeout.as_nanos() as u64);
        let give_up = config.give_up.as_nanos() as u64;
        if self.all_down_since.is_some_and(|since| now.saturating_sub(since) > give_up) {
            return self.end(Cause::AllRailsDown);
        }
        let failed = self.context.failed_rails(&mut self.events_seen, |rail, qp_num| {
            self.rails[rail].endpoint.as_ref().is_some_and(|e| e.qps.iter().any(|qp| qp.qp_num() == qp_num))
        });
        rails_of(failed & self.up).for_each(|rail| self.fail_rail(rail));
        for rail in 0..self.agreed.rails {
            let state = &mut self.rails[rail];
            if state.outstanding == 0 {
                continue;
            }
            match state.probed_at {
                Some(since) if now.saturating_sub(since) > probe => self.fail_rail(rail),
                None if now.saturating_sub(state.progress_at) > stall => {
                    state.probed_at = Some(now);
                    let Some(endpoint) = state.endpoint.as_deref_mut() else { continue };
                    let qp = endpoint.take_qp();
                    if endpoint.post_probe(qp).is_err() {
                        self.fail_rail(rail);
                        continue;
                    }
                    self.counters.rails[rail].probes.add(1);
                    self.counters.rails[rail].work_requests.add(1);
                }
                _ => {}
            }
        }
    }

    /// Ends the connection: all requests end with `cause`.
    fn end(&mut self, cause: Cause) {
        if self.ended.is_some() {
            return;
        }
        if let Cause::Violation(violation) = &cause {
            self.counters.violations[violation.kind()].add(1);
        }
        let last = match &cause {
            Cause::Closed | Cause::PeerClosed | Cause::PeerGone | Cause::PeerError(_) => {
                let open = self.protocol.open_messages().collect();
                Frame::Close { next: self.protocol.next_message(), open }
            }
            cause => Frame::Error(cause.to_string()),
        };
        self.mailbox.put_order(Order::Close(last));
        // Nothing may touch the program's memory any more.
        for rail in &mut self.rails {
            if let Some(mut endpoint) = rail.endpoint.take() {
                endpoint.fail();
            }
        }
        self.up = 0;
        self.ended = Some(cause);
    }

    /// The program has dropped the connection. Returns the mailbox, to wait for the end of the control thread without the lock.
    pub(super) fn close(&mut self) -> Arc<Mailbox> {
        self.end(Cause::Closed);
        self.mailbox.clone()
    }

    /// Ends the connection at once.
    pub(super) fn abort(&mut self) {
        self.end(Cause::Aborted);
    }
}
