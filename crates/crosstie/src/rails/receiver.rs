//! The receiving end of a connection.

use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use crosstie_protocol::rails::{
    Arrival, CTS_LEN, ClearToSend, FenceEntry, Immediate, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, Receiver,
    Record, Violation, leader, rails_of,
};

use super::connect::Parts;
use super::context::Context;
use super::counters::ConnectionCounters;
use super::endpoint::{Agreement, CLEAR_TO_SEND, Endpoint, POST_RETRIES, PROBE, Role};
use super::error::{Cause, RequestError};
use super::frames::Frame;
use super::mailbox::{Mail, Mailbox, Order};
use super::memory::Memory;
use crate::copyrpc::poll_clock::PollClock;
use crate::device::{Completion, Data, MultiRegion, Opcode, PostError, SendOp, SendWr};

/// A receive that was accepted. [`RecvConnection::test`](super::RecvConnection::test) says when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecvRequest(u64);

/// One buffer of a receive.
#[derive(Clone, Debug)]
pub struct RecvBuffer<'a> {
    /// Its memory.
    pub memory: &'a Memory,
    /// The range of the memory.
    pub range: Range<usize>,
    /// The tag of the send that goes there.
    pub tag: u32,
}

/// The sizes of a receive that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    count: usize,
    sizes: [usize; MAX_GROUP],
}

impl Received {
    /// The bytes that arrived in each buffer, in the order of the buffers.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.count]
    }
}

/// A receive.
#[derive(Debug, Default)]
struct Request {
    message: u64,
    count: u8,
    is_taken: bool,
    is_done: bool,
    /// The first `count` are valid.
    wanted: [ClearToSend; MAX_GROUP],
    sizes: [usize; MAX_GROUP],
    has_record: bool,
    mask: Mask,
    /// The rail of its clear-to-send.
    clear_rail: u8,
    /// The buffer of a receive whose message may be staged: memory and offset.
    staged_into: Option<(Arc<MultiRegion>, usize)>,
}

#[derive(Debug)]
struct Rail {
    endpoint: Option<Box<Endpoint>>,
    epoch: u32,
    /// The last clear-to-send that was posted here, and since when nothing has shown that it arrived. Data that arrive on the
    /// rail do not show it: only one direction may work.
    last_clear: u64,
    unconfirmed_since: Option<u64>,
    probed_at: Option<u64>,
}

/// A fence that is not answered yet.
#[derive(Debug)]
struct Fence {
    rail: usize,
    epoch: u32,
    next: u64,
    entries: Vec<FenceEntry>,
    /// When completions that are missing have failed.
    deadline: u64,
}

impl Fence {
    /// Whether the message is not done for the sender.
    fn is_listed(&self, number: u64, slots: usize) -> bool {
        let (slot, generation) = (number as usize & (slots - 1), Immediate::generation_of(number, slots));
        self.entries.iter().any(|entry| usize::from(entry.slot) == slot && entry.generation == generation)
    }
}

/// The sender has closed the connection. It is done with the messages before `next` that are not in `open`.
#[derive(Debug)]
struct PeerClosed {
    next: u64,
    open: Vec<u64>,
    deadline: u64,
}

/// The receiving end of a connection. One thread at a time uses it.
///
/// All work is done inside the calls of [`irecv`](RecvCore::irecv) and [`test`](RecvCore::test): call one of them
/// while receives are outstanding.
#[derive(Debug)]
pub(super) struct RecvCore {
    context: Arc<Context>,
    mailbox: Arc<Mailbox>,
    agreed: Agreement,
    pub(super) counters: Arc<ConnectionCounters>,
    rails: [Rail; MAX_RAILS],
    up: Mask,
    protocol: Receiver,
    requests: Box<[Request]>,
    fences: Vec<Fence>,
    peer_closed: Option<PeerClosed>,
    /// Clear-to-sends wait for a rail.
    has_unsent: bool,
    ended: Option<Cause>,
    start: Instant,
    clock: PollClock,
    all_down_since: Option<u64>,
    events_seen: u64,
}

impl RecvCore {
    pub(super) fn new(parts: Parts) -> RecvCore {
        let Parts { context, mailbox, agreed, endpoints, first_mask } = parts;
        let counters = ConnectionCounters::new(Role::Receiver, context.next_connection(), agreed.rails);
        context.add_counters(&counters);
        let mut protocol = Receiver::new(agreed.slots, agreed.rails);
        let all: Mask = (1 << agreed.rails) - 1;
        protocol.set_recent_mask(if first_mask & all != 0 { first_mask & all } else { all });
        let mut endpoints = endpoints.into_iter();
        RecvCore {
            mailbox,
            agreed,
            counters,
            rails: core::array::from_fn(|_| Rail {
                endpoint: endpoints.next().map(Box::new),
                epoch: 0,
                last_clear: 0,
                unconfirmed_since: None,
                probed_at: None,
            }),
            up: all,
            protocol,
            requests: (0..agreed.slots).map(|_| Request { is_taken: true, ..Request::default() }).collect(),
            fences: Vec::new(),
            peer_closed: None,
            has_unsent: false,
            ended: None,
            start: Instant::now(),
            clock: PollClock::new(),
            all_down_since: None,
            events_seen: 0,
            context,
        }
    }

    /// Why the connection has ended, if it has.
    pub(super) fn cause(&self) -> Option<&Cause> {
        self.ended.as_ref()
    }

    /// The rails that are in use: bit `r` is rail `r`.
    pub(super) fn rails_up(&self) -> Mask {
        self.up
    }

    /// Starts to receive into one buffer, or into a group of buffers: each takes one send, chosen by its tag. `None` if too many
    /// receives are outstanding: test them first. The memory must not be used before [`test`](RecvCore::test) says that
    /// the receive is done.
    pub(super) fn irecv(&mut self, buffers: &[RecvBuffer<'_>]) -> Result<Option<RecvRequest>, RequestError> {
        if self.mailbox.has_mail() || self.ended.is_some() {
            self.read_mail();
            if let Some(cause) = &self.ended {
                return Err(cause.clone().into());
            }
        }
        let (max_group, max_message) = (self.agreed.max_group, self.context.max_message);
        let bad_group = RequestError::BadGroup { max_group, max_message };
        if buffers.is_empty() || buffers.len() > max_group {
            return Err(bad_group);
        }
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        if !self.requests[slot].is_taken {
            self.progress();
            return Ok(None);
        }
        // The slot is free, so its request can be written in place; it begins when its number is stored.
        let request = &mut self.requests[slot];
        for (index, buffer) in buffers.iter().enumerate() {
            if buffer.memory.context != self.context.id {
                return Err(RequestError::WrongMemory);
            }
            let (mut addrs, mut rkeys) = ([0; MAX_RAILS], [0; MAX_RAILS]);
            for rail in 0..self.agreed.rails {
                let region = buffer.memory.regions.region(rail);
                addrs[rail] = region.sge(buffer.range.clone())?.addr;
                rkeys[rail] = region.remote().rkey;
            }
            let size = buffer.range.len() as u64;
            if size > max_message {
                return Err(bad_group);
            }
            let (index_byte, count) = (index as u8, buffers.len() as u8);
            request.wanted[index] =
                ClearToSend { addrs, rkeys, size, tag: buffer.tag, index: index_byte, count };
        }
        // Of a group only the record arrives with an immediate; its sizes are checked with the record.
        let room = if buffers.len() == 1 { buffers[0].range.len() as u64 } else { u64::MAX };
        let Some(number) = self.protocol.post(room) else { return Ok(None) };
        let staged_into = (buffers.len() == 1 && self.agreed.staging > 0)
            .then(|| (buffers[0].memory.regions.clone(), buffers[0].range.start));
        request.message = number;
        request.count = buffers.len() as u8;
        (request.is_taken, request.is_done, request.has_record) = (false, false, false);
        request.sizes = [0; MAX_GROUP];
        (request.mask, request.clear_rail) = (0, 0);
        request.staged_into = staged_into;
        self.refill();
        self.send_clear(number);
        Ok(Some(RecvRequest(number)))
    }

    /// Whether a receive is done, and how many bytes arrived in each buffer. After that the request is over.
    #[inline]
    pub(super) fn test(&mut self, request: RecvRequest) -> Result<Option<Received>, RequestError> {
        let slot = request.0 as usize & (self.agreed.slots - 1);
        if let Some(received) = self.take_result(slot, request.0)? {
            return Ok(Some(received));
        }
        self.progress();
        if let Some(received) = self.take_result(slot, request.0)? {
            return Ok(Some(received));
        }
        match &self.ended {
            Some(cause) => Err(cause.clone().into()),
            None => Ok(None),
        }
    }

    #[inline]
    fn take_result(&mut self, slot: usize, number: u64) -> Result<Option<Received>, RequestError> {
        let request = &mut self.requests[slot];
        if request.message != number || request.is_taken {
            return Err(RequestError::NoSuchRequest);
        }
        if !request.is_done {
            return Ok(None);
        }
        request.is_taken = true;
        Ok(Some(Received { count: request.count.into(), sizes: request.sizes }))
    }

    /// Whether something is under way that must not wait for the program's next call.
    pub(super) fn needs_attention(&self) -> bool {
        self.ended.is_none() && (!self.fences.is_empty() || self.peer_closed.is_some())
    }

    /// Makes progress without asking for a request: polls completions, posts receives, handles failures.
    pub(super) fn progress(&mut self) {
        if self.mailbox.has_mail() {
            self.read_mail();
        }
        for rail in 0..self.agreed.rails {
            self.poll_rail(rail);
        }
        if !self.fences.is_empty() {
            self.handle_fences();
        }
        if self.peer_closed.is_some() {
            self.finish_peer_closed();
        }
        if self.clock.is_due() {
            self.clock.read();
            self.check_time();
        }
        self.refill();
    }

    /// Posts receives where too few are left. A rail never has fewer receives than messages that may arrive on it.
    #[inline]
    fn refill(&mut self) {
        let config = &self.context.config;
        let low = config.low_water.max(self.protocol.outstanding() as u32 + 16);
        let high = config.high_water.max(low);
        for rail in 0..self.agreed.rails {
            if let Some(endpoint) = &mut self.rails[rail].endpoint
                && endpoint.posted < low
                && endpoint.refill(low, high).is_err()
            {
                self.report_rail(rail);
            }
        }
    }

    /// The rail for the clear-to-send of a slot: that of the slot, if messages arrive on it; so a rail that carries no bytes
    /// carries no clear-to-sends either.
    #[inline]
    fn clear_rail(&self, slot: usize) -> Option<usize> {
        let preferred = slot % self.agreed.rails;
        let recent = self.protocol.recent_mask() & self.up;
        if recent & (1 << preferred) != 0 {
            return Some(preferred);
        }
        leader(recent).or(leader(self.up))
    }

    /// Tells the sender about a request.
    fn send_clear(&mut self, number: u64) {
        let slot = number as usize & (self.agreed.slots - 1);
        while let Some(rail) = self.clear_rail(slot) {
            let now = self.now();
            let request = &self.requests[slot];
            let state = &mut self.rails[rail];
            let Some(endpoint) = state.endpoint.as_deref_mut() else { break };
            let posted = post_clear(endpoint, request, slot, rail, self.agreed.max_group);
            if let Ok(retries) = posted {
                state.unconfirmed_since.get_or_insert(now);
                state.last_clear = number;
                self.requests[slot].clear_rail = rail as u8;
                let cells = &self.counters.rails[rail];
                cells.work_requests.add(1);
                cells.retries.add(retries);
                return;
            }
            self.report_rail(rail);
        }
        self.has_unsent = true;
    }

    /// Sends the clear-to-sends again of all requests that the sender may not know.
    fn resend_clears(&mut self) {
        self.has_unsent = false;
        let numbers: Vec<u64> = self.protocol.open_messages().collect();
        for number in numbers {
            if self.protocol.is_untouched(number) {
                self.send_clear(number);
            }
        }
    }

    fn poll_rail(&mut self, rail: usize) {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return };
        let (mut has_failed, mut violation) = (false, None);
        let mut consumed = 0;
        let (memory, staging) = (&endpoint.memory, &endpoint.staging);
        let polled = endpoint.cq.poll(super::endpoint::POLL_BATCH, |completion| {
            match self.handle_completion(rail, completion, memory, staging.as_ref(), &mut consumed) {
                Ok(true) => {}
                Ok(false) => has_failed = true,
                Err(found) => violation = violation.or(Some(found)),
            }
        });
        endpoint.posted -= consumed.min(endpoint.posted);
        self.rails[rail].endpoint = Some(endpoint);
        if let Some(violation) = violation {
            self.end(Cause::Violation(violation));
        } else if has_failed || polled.is_err() {
            self.report_rail(rail);
        }
    }

    /// `Ok(false)` if the completion says that the rail failed.
    #[inline]
    fn handle_completion(
        &mut self,
        rail: usize,
        completion: &Completion,
        records: &crate::device::Mr,
        staging: Option<&crate::device::Mr>,
        consumed: &mut u32,
    ) -> Result<bool, Violation> {
        let cells = &self.counters.rails[rail];
        cells.completions.add(1);
        if !completion.status.is_success() {
            return Ok(false);
        }
        if matches!(completion.wr_id, CLEAR_TO_SEND | PROBE) && completion.opcode == Opcode::Write {
            let state = &mut self.rails[rail];
            (state.unconfirmed_since, state.probed_at) = (None, None);
            return Ok(true);
        }
        *consumed += 1;
        cells.receives.add(1);
        let Some(imm) = completion.imm.map(Immediate::from_bits) else {
            return Err(Violation::UnknownSlot { rail, slot: 0 });
        };
        let slot = usize::from(imm.slot);
        let count = self.requests.get(slot).map_or(1, |request| request.count);
        if count == 1 {
            cells.bytes.add(completion.byte_len.into());
        }
        let arrival = self.protocol.arrive(rail, imm, completion.byte_len)?;
        let request = &mut self.requests[slot];
        if imm.attempt == 0 {
            request.mask = imm.mask;
            // The sender had the clear-to-send, and all earlier ones of the same queue pair.
            let state = &mut self.rails[usize::from(request.clear_rail)];
            if state.last_clear == request.message {
                (state.unconfirmed_since, state.probed_at) = (None, None);
            }
        }
        if count > 1 && leader(imm.mask) == Some(rail) {
            read_record(request, slot, records)?;
        }
        let Arrival::Complete { message: _, bytes, staged } = arrival else { return Ok(true) };
        if count == 1 {
            request.sizes[0] = bytes as usize;
        } else if !request.has_record {
            return Err(Violation::BadRecord { slot: imm.slot });
        }
        let held = request.staged_into.take();
        if staged {
            // One part, on this rail: the staging memory is here. Its length was checked against the buffer's.
            let from = slot * self.agreed.staging as usize;
            let too_long =
                Violation::TooLong { slot: imm.slot, got: bytes, room: self.agreed.staging.into() };
            let (Some(staging), Some((memory, offset))) = (staging, held) else { return Err(too_long) };
            if bytes > u64::from(self.agreed.staging)
                || memory.region(0).copy_from(offset, staging, from, bytes as usize).is_err()
            {
                return Err(too_long);
            }
            self.counters.staged.add(1);
        }
        request.is_done = true;
        self.counters.messages.add(1);
        self.counters.masks[usize::from(request.mask)].add(1);
        Ok(true)
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// How long the completion of a message that was acknowledged may take.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the sizes of a group that the leader rail has written.
fn read_record(request: &mut Request, slot: usize, records: &crate::device::Mr) -> Result<(), Violation> {
    let bad = Violation::BadRecord { slot: slot as u8 };
    let bytes = records.load::<RECORD_LEN>(slot * RECORD_LEN).map_err(|_| bad)?;
    let record = Record::decode(&bytes, request.message).ok_or(bad)?;
    for (index, wanted) in request.wanted[..usize::from(request.count)].iter().enumerate() {
        if record.sizes[index] > wanted.size {
            return Err(bad);
        }
        request.sizes[index] = record.sizes[index] as usize;
    }
    request.has_record = true;
    Ok(())
}

/// Writes the clear-to-sends of a request into the sender's memory. Returns how often the queue was full.
///
/// A queue pair has a completion for the slot with the number of its rail only: one in each round through the slots. That is
/// enough to know how far it has come.
fn post_clear(
    endpoint: &mut Endpoint,
    request: &Request,
    slot: usize,
    rail: usize,
    max_group: usize,
) -> Result<u64, PostError> {
    let at = slot * max_group * CTS_LEN;
    let op = SendOp::Write(endpoint.peer.at(at as u64));
    let mut first = [0; CTS_LEN];
    for (index, wanted) in request.wanted[..usize::from(request.count)].iter().enumerate() {
        let bytes = wanted.encode(request.message);
        if request.count == 1 {
            first = bytes;
        } else {
            endpoint
                .source
                .write(at + index * CTS_LEN, &bytes)
                .map_err(|_| PostError::Invalid("a slot is outside the table"))?;
        }
    }
    let len = usize::from(request.count) * CTS_LEN;
    let mut retries = 0;
    loop {
        let source = endpoint
            .source
            .sge(at..at + len)
            .map_err(|_| PostError::Invalid("a slot is outside the table"))?;
        let sges = [source];
        let data = if request.count == 1 { Data::Inline(&first) } else { Data::Regions(&sges) };
        let wr = SendWr { wr_id: CLEAR_TO_SEND, op, data, signaled: slot == rail, fence: false };
        match endpoint.qps[0].post(&wr) {
            Ok(()) => return Ok(retries),
            Err(PostError::Full) if retries < POST_RETRIES => retries += 1,
            Err(error) => return Err(error),
        }
    }
}

// Failures and their repair.
impl RecvCore {
    #[cold]
    fn read_mail(&mut self) {
        for mail in self.mailbox.take_mail() {
            match mail {
                Mail::Fence { rail, epoch, next, entries } => {
                    if rail < self.agreed.rails && self.rails[rail].epoch == epoch {
                        let deadline = self.now() + COMPLETION_TIMEOUT.as_nanos() as u64;
                        self.fences.push(Fence { rail, epoch, next, entries, deadline });
                    }
                }
                Mail::Returned { rail, endpoint } => {
                    let state = &mut self.rails[rail];
                    state.epoch = endpoint.epoch;
                    state.endpoint = Some(endpoint);
                    (state.unconfirmed_since, state.probed_at) = (None, None);
                    self.up |= 1 << rail;
                    self.all_down_since = None;
                    self.counters.rails[rail].returns.add(1);
                    self.counters.rails[rail].is_up.store(1, Relaxed);
                    if self.has_unsent {
                        self.resend_clears();
                    }
                }
                Mail::RailError { .. } | Mail::Answer { .. } => {}
                Mail::PeerClosed { next, open } => {
                    let deadline = self.now() + COMPLETION_TIMEOUT.as_nanos() as u64;
                    self.peer_closed = Some(PeerClosed { next, open, deadline });
                    self.finish_peer_closed();
                }
                Mail::Ended(cause) => {
                    // What arrived before the end counts.
                    (0..self.agreed.rails).for_each(|rail| self.poll_rail(rail));
                    self.end(cause);
                }
            }
        }
        self.handle_fences();
    }

    /// The rail does not work at this end: the sender will stop using it, and fence it.
    #[cold]
    fn report_rail(&mut self, rail: usize) {
        if self.up & (1 << rail) == 0 {
            return;
        }
        self.take_out(rail);
        let epoch = self.rails[rail].epoch;
        self.mailbox.put_order(Order::Send(Frame::RailError { rail, epoch }));
    }

    fn take_out(&mut self, rail: usize) {
        if self.up & (1 << rail) == 0 {
            return;
        }
        self.up &= !(1 << rail);
        if self.up == 0 {
            self.all_down_since = Some(self.now());
        }
        self.has_unsent = true;
        self.counters.rails[rail].failures.add(1);
        self.counters.rails[rail].is_up.store(0, Relaxed);
    }

    /// Closes the rails that the sender has stopped using, and answers what has arrived on them.
    fn handle_fences(&mut self) {
        let mut at = 0;
        while at < self.fences.len() && self.ended.is_none() {
            let rail = self.fences[at].rail;
            self.take_out(rail);
            if let Some(endpoint) = &mut self.rails[rail].endpoint {
                endpoint.fail();
            }
            // What has arrived counts. If the sender takes a message for done, its completions are under way, and a reset
            // would remove them.
            self.drain(rail);
            let fence = &self.fences[at];
            if self.is_completion_missing(fence.next, |number| fence.is_listed(number, self.agreed.slots)) {
                if self.now() > fence.deadline {
                    return self.end(Cause::LostCompletion);
                }
                at += 1;
                continue;
            }
            // A queue pair that is reset cannot receive any more; a peer that is inside an operation is waited for, without
            // blocking.
            let is_closed = match &mut self.rails[rail].endpoint {
                Some(endpoint) => endpoint.qps.iter_mut().all(|qp| qp.reset().is_ok()),
                None => true,
            };
            self.drain(rail);
            if !is_closed {
                at += 1;
                continue;
            }
            self.rails[rail].endpoint = None;
            let Fence { rail, epoch, entries, .. } = self.fences.swap_remove(at);
            let answers = entries.iter().map(|entry| self.protocol.fence(rail, *entry)).collect();
            match answers {
                Ok(entries) => self.mailbox.put_order(Order::Send(Frame::Answer { rail, epoch, entries })),
                Err(violation) => self.end(Cause::Violation(violation)),
            }
            if self.up != 0 {
                self.resend_clears();
            }
        }
    }

    /// Whether a message before `next` is done for the sender, where it is not `open`, and not for us. Its completions are under
    /// way on any rail, or a device has failed after it acknowledged and before it completed.
    fn is_completion_missing(&self, next: u64, open: impl Fn(u64) -> bool) -> bool {
        self.protocol.open_messages().take_while(|number| *number < next).any(|number| !open(number))
    }

    /// Ends the connection when everything has arrived that the sender, which has closed it, is done with.
    #[cold]
    fn finish_peer_closed(&mut self) {
        (0..self.agreed.rails).for_each(|rail| self.drain(rail));
        let Some(PeerClosed { next, open, deadline }) = &self.peer_closed else { return };
        if !self.is_completion_missing(*next, |number| open.contains(&number)) {
            self.end(Cause::PeerClosed);
        } else if self.now() > *deadline {
            self.end(Cause::LostCompletion);
        }
    }

    fn drain(&mut self, rail: usize) {
        loop {
            let before = self.counters.rails[rail].completions.get();
            self.poll_rail(rail);
            if self.counters.rails[rail].completions.get() == before || self.ended.is_some() {
                return;
            }
        }
    }

    /// Probes rails on which clear-to-sends may be stuck, and notices events of the ports.
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
        rails_of(failed & self.up).for_each(|rail| self.report_rail(rail));
        for rail in rails_of(self.up) {
            let state = &mut self.rails[rail];
            match (state.probed_at, state.unconfirmed_since) {
                (Some(since), _) if now.saturating_sub(since) > probe => self.report_rail(rail),
                (None, Some(since)) if now.saturating_sub(since) > stall => {
                    state.probed_at = Some(now);
                    let Some(endpoint) = state.endpoint.as_deref_mut() else { continue };
                    if endpoint.post_probe(0).is_err() {
                        self.report_rail(rail);
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
        for rail in &mut self.rails {
            if let Some(mut endpoint) = rail.endpoint.take() {
                endpoint.fail();
            }
        }
        for request in &mut self.requests {
            request.staged_into = None;
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
