//! The receiving end of a connection.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | receives, their results, completions |
//! | `clear_to_send.rs` | telling the sender about receives |
//! | `repair.rs` | rails that fail and return, and the end of the connection |

mod clear_to_send;
mod repair;

use core::ops::Range;
use std::sync::Arc;

use crosstie_protocol::rails::{
    Arrival, ClearToSend, Immediate, MAX_GROUP, MAX_RAILS, Mask, RECORD_LEN, Receiver, Record, Violation,
    leader,
};

use super::agreement::{Agreement, Role};
use super::config::SLOW_POLLS;
use super::context::Context;
use super::counters::ConnectionCounters;
use super::endpoint::{CLEAR_TO_SEND, Endpoint, POLL_BATCH, PROBE};
use super::error::{Cause, RequestError};
use super::mailbox::Mailbox;
use super::memory::Memory;
use super::parts::Parts;
use crate::device::{Completion, Mr, MultiRegion, Opcode, clock};
use crate::wait::PollClock;
use repair::{Fence, PeerClosed};

/// A receive that was accepted. [`RecvConnection::test`](crate::rails::RecvConnection::test) says when it is done.
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

/// A receive. One with one buffer needs the beginning only.
#[derive(Debug, Default)]
#[repr(C)]
struct Request {
    message: u64,
    count: u8,
    is_taken: bool,
    is_done: bool,
    has_record: bool,
    mask: Mask,
    /// The rail of its clear-to-sends.
    clear_rail: u8,
    /// The first `count` are valid.
    buffers: [Buffer; MAX_GROUP],
}

/// A buffer of a receive.
#[derive(Debug, Default)]
struct Buffer {
    wanted: ClearToSend,
    /// What arrived in it.
    size: usize,
    /// Its memory, until the receive is done.
    memory: Option<Arc<MultiRegion>>,
}

#[derive(Debug)]
#[repr(C)]
struct Rail {
    endpoint: Option<Box<Endpoint>>,
    epoch: u32,
    /// The last clear-to-send that was posted here, and whether nothing has shown yet that it arrived. Data that arrive on the
    /// rail do not show it: only one direction may work.
    last_clear: u64,
    is_unconfirmed: bool,
    /// When `check_time` first saw `is_unconfirmed` set.
    unconfirmed_since: Option<u64>,
    probed_at: Option<u64>,
}

impl Rail {
    /// All clear-to-sends that were posted here have arrived.
    #[inline]
    fn confirm_clears(&mut self) {
        (self.is_unconfirmed, self.unconfirmed_since, self.probed_at) = (false, None, None);
    }
}

/// The receiving end of a connection. One thread at a time uses it.
///
/// All work is done inside the calls of [`irecv`](RecvCore::irecv) and [`test`](RecvCore::test): call one of them
/// while receives are outstanding.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RecvCore {
    // What a message over one rail needs comes first, in few cache lines.
    mailbox: Arc<Mailbox>,
    requests: Box<[Request]>,
    protocol: Receiver,
    agreed: Agreement,
    /// Those of the context.
    context_id: u64,
    max_message: u64,
    low_water: u32,
    high_water: u32,
    pub(super) counters: Arc<ConnectionCounters>,
    clock: PollClock,
    fences: Vec<Fence>,
    peer_closed: Option<PeerClosed>,
    up: Mask,
    /// Clear-to-sends wait for a rail.
    has_unsent: bool,
    rails: [Rail; MAX_RAILS],
    ended: Option<Cause>,
    all_down_since: Option<u64>,
    events_seen: u64,
    context: Arc<Context>,
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
                is_unconfirmed: false,
                unconfirmed_since: None,
                probed_at: None,
            }),
            up: all,
            protocol,
            requests: (0..agreed.slots).map(|_| Request { is_taken: true, ..Request::default() }).collect(),
            context_id: context.id,
            max_message: context.max_message,
            low_water: context.config.low_water,
            high_water: context.config.high_water,
            fences: Vec::new(),
            peer_closed: None,
            has_unsent: false,
            ended: None,
            clock: PollClock::with_slow(SLOW_POLLS),
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
        // A connection that has ended has no rails.
        if self.mailbox.has_mail() || self.up == 0 {
            self.read_mail();
            if let Some(cause) = &self.ended {
                return Err(cause.clone().into());
            }
        }
        let (max_group, max_message) = (self.agreed.max_group, self.max_message);
        let bad_group = RequestError::BadGroup { max_group, max_message };
        if buffers.is_empty() || buffers.len() > max_group {
            return Err(bad_group);
        }
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        let request = &mut self.requests[slot];
        if !request.is_taken {
            self.progress();
            return Ok(None);
        }
        // The slot is free, so its request can be written in place; it begins when its number is stored.
        for (index, buffer) in buffers.iter().enumerate() {
            let RecvBuffer { memory, ref range, tag } = *buffer;
            if memory.context != self.context_id {
                return Err(RequestError::WrongMemory);
            }
            let (addrs, size) = memory.resolve(range.clone())?;
            if u64::from(size) > max_message {
                return Err(bad_group);
            }
            let (index_byte, count) = (index as u8, buffers.len() as u8);
            let (rkeys, size) = (memory.keys.rkeys, size.into());
            request.buffers[index].wanted = ClearToSend { addrs, rkeys, size, tag, index: index_byte, count };
        }
        // Of a group only the record arrives with an immediate; its sizes are checked with the record.
        let room = if buffers.len() == 1 { request.buffers[0].wanted.size } else { u64::MAX };
        let Some(number) = self.protocol.post(room) else { return Ok(None) };
        request.message = number;
        request.count = buffers.len() as u8;
        (request.is_taken, request.is_done, request.has_record) = (false, false, false);
        (request.mask, request.clear_rail) = (0, 0);
        for (state, buffer) in request.buffers.iter_mut().zip(buffers) {
            (state.size, state.memory) = (0, Some(buffer.memory.regions.clone()));
        }
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
        self.progress_until(Some(slot));
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
        let (count, mut sizes) = (request.count.into(), [0; MAX_GROUP]);
        for (size, buffer) in sizes.iter_mut().zip(&request.buffers[..count]) {
            *size = buffer.size;
        }
        Ok(Some(Received { count, sizes }))
    }

    /// Whether something is under way that must not wait for the program's next call.
    pub(super) fn needs_attention(&self) -> bool {
        self.ended.is_none() && (!self.fences.is_empty() || self.peer_closed.is_some())
    }

    /// Makes progress without asking for a request: polls completions, posts receives, handles failures.
    pub(super) fn progress(&mut self) {
        self.progress_until(None);
    }

    /// Makes progress. No more completions are polled when the receive in `slot` is done.
    fn progress_until(&mut self, slot: Option<usize>) {
        if self.mailbox.has_mail() {
            self.read_mail();
        }
        let (is_due, mut has_consumed) = (self.clock.is_due(), false);
        for rail in 0..self.agreed.rails {
            has_consumed |= self.poll_rail(rail, slot);
        }
        if !self.fences.is_empty() {
            self.handle_fences();
        }
        if self.peer_closed.is_some() {
            self.finish_peer_closed();
        }
        if is_due {
            self.clock.read();
            self.check_time();
        }
        if is_due || has_consumed {
            self.refill();
        }
    }

    /// Posts receives where too few are left. A rail never has fewer receives than messages that may arrive on it.
    #[inline]
    fn refill(&mut self) {
        let low = self.low_water.max(self.protocol.outstanding() as u32 + 16);
        let high = self.high_water.max(low);
        for rail in 0..self.agreed.rails {
            if let Some(endpoint) = &mut self.rails[rail].endpoint
                && endpoint.posted < low
                && endpoint.refill(low, high).is_err()
            {
                self.report_rail(rail);
            }
        }
    }

    /// Polls the completions of a rail, until the receive in slot `until` is done. Returns whether receives were consumed.
    pub(super) fn poll_rail(&mut self, rail: usize, until: Option<usize>) -> bool {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return false };
        let (mut has_failed, mut violation) = (false, None);
        let mut consumed = 0;
        let mut completion = Completion::default();
        for _ in 0..POLL_BATCH {
            match endpoint.cq.next(&mut completion) {
                Ok(true) => {}
                Ok(false) => break,
                Err(_) => {
                    has_failed = true;
                    break;
                }
            }
            let Endpoint { memory, staging, .. } = &*endpoint;
            match self.handle_completion(rail, &completion, memory, staging.as_ref(), &mut consumed) {
                Ok(true) => {}
                Ok(false) => has_failed = true,
                Err(found) => violation = violation.or(Some(found)),
            }
            if until.is_some_and(|slot| self.requests[slot].is_done) {
                break;
            }
        }
        endpoint.posted -= consumed.min(endpoint.posted);
        self.rails[rail].endpoint = Some(endpoint);
        if let Some(violation) = violation {
            self.end(Cause::Violation(violation));
        } else if has_failed {
            self.report_rail(rail);
        }
        consumed > 0
    }

    /// `Ok(false)` if the completion says that the rail failed.
    #[inline]
    fn handle_completion(
        &mut self,
        rail: usize,
        completion: &Completion,
        records: &Mr,
        staging: Option<&Mr>,
        consumed: &mut u32,
    ) -> Result<bool, Violation> {
        let cells = &self.counters.rails[rail];
        cells.completions.add(1);
        if !completion.status.is_success() {
            return Ok(false);
        }
        if matches!(completion.wr_id, CLEAR_TO_SEND | PROBE) && completion.opcode == Opcode::Write {
            self.rails[rail].confirm_clears();
            return Ok(true);
        }
        *consumed += 1;
        cells.receives.add(1);
        let imm = completion.imm.map(Immediate::from_bits);
        let imm = imm.ok_or(Violation::UnknownSlot { rail, slot: 0 })?;
        let arrival = self.protocol.arrive(rail, imm, completion.byte_len)?;
        let slot = usize::from(imm.slot);
        let request = &mut self.requests[slot];
        let count = usize::from(request.count);
        if count == 1 {
            cells.bytes.add(completion.byte_len.into());
        }
        if imm.attempt == 0 {
            request.mask = imm.mask;
            // The sender had the clear-to-send, and all earlier ones of the same queue pair.
            let state = &mut self.rails[usize::from(request.clear_rail)];
            if state.last_clear == request.message {
                state.confirm_clears();
            }
        }
        if count > 1 && leader(imm.mask) == Some(rail) {
            read_record(request, slot, records)?;
        }
        let Arrival::Complete { message: _, bytes, staged } = arrival else { return Ok(true) };
        let buffer = &mut request.buffers[0];
        if count == 1 {
            buffer.size = bytes as usize;
        } else if !request.has_record {
            return Err(Violation::BadRecord { slot: imm.slot });
        }
        if staged {
            // One part, on this rail: the staging memory is here. Its length was checked against the buffer's.
            let from = slot * self.agreed.staging as usize;
            let too_long =
                Violation::TooLong { slot: imm.slot, got: bytes, room: self.agreed.staging.into() };
            let (Some(staging), Some(memory), 1) = (staging, &buffer.memory, count) else {
                return Err(too_long);
            };
            let region = memory.region(0);
            let offset = buffer.wanted.addrs[0].wrapping_sub(region.remote().addr) as usize;
            if bytes > u64::from(self.agreed.staging)
                || region.copy_from(offset, staging, from, bytes as usize).is_err()
            {
                return Err(too_long);
            }
            self.counters.staged.add(1);
        }
        request.buffers[..count].iter_mut().for_each(|buffer| buffer.memory = None);
        request.is_done = true;
        self.counters.masks[usize::from(request.mask)].add(1);
        Ok(true)
    }

    fn now(&self) -> u64 {
        clock::now()
    }
}

/// Reads the sizes of a group that the leader rail has written.
fn read_record(request: &mut Request, slot: usize, records: &Mr) -> Result<(), Violation> {
    let bad = Violation::BadRecord { slot: slot as u8 };
    let bytes = records.load::<RECORD_LEN>(slot * RECORD_LEN).map_err(|_| bad)?;
    let record = Record::decode(&bytes, request.message).ok_or(bad)?;
    for (buffer, size) in request.buffers[..request.count.into()].iter_mut().zip(record.sizes) {
        if size > buffer.wanted.size {
            return Err(bad);
        }
        buffer.size = size as usize;
    }
    request.has_record = true;
    Ok(())
}
