//! The sending end of a connection.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | sends, their results, completions |
//! | `transfer.rs` | where the bytes of a message are, and where they go |
//! | `posting.rs` | how a message is split, and how its parts are posted |
//! | `repair.rs` | rails that fail and return, and the end of the connection |

mod posting;
mod repair;
mod transfer;

use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

use crosstie_protocol::rails::{CTS_LEN, MAX_GROUP, MAX_RAILS, Mask, Sender};

use super::agreement::{Agreement, Role};
use super::config::{SLOW_POLLS, Split};
use super::context::Context;
use super::counters::ConnectionCounters;
use super::endpoint::{Endpoint, PROBE};
use super::error::{Cause, RequestError};
use super::load::RailLoad;
use super::mailbox::Mailbox;
use super::memory::Memory;
use super::parts::Parts;
use crate::device::{Completion, clock};
use crate::wait::PollClock;
use transfer::{Source, Transfer};

/// A send that was accepted. [`SendConnection::test`](super::SendConnection::test) says when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendRequest(u64);

/// The sends of one message: one cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Message {
    number: u64,
    count: u8,
    /// Sends whose result the program has not taken.
    untaken: u8,
    is_done: bool,
    mask: Mask,
    lens: [u32; MAX_GROUP],
}

const _: () = assert!(size_of::<Message>() == 64);

/// What is known about a rail.
#[derive(Debug)]
#[repr(C)]
struct Rail {
    endpoint: Option<Box<Endpoint>>,
    epoch: u32,
    /// Requests under way.
    outstanding: u32,
    load: RailLoad,
    /// When a completion arrived, or the first request was posted, in nanoseconds.
    progress_at: u64,
    probed_at: Option<u64>,
}

impl Rail {
    /// A part is under way.
    #[inline]
    fn add_part(&mut self, bytes: u64, now: u64) {
        if self.outstanding == 0 {
            self.progress_at = now;
        }
        self.load.add(bytes);
        self.outstanding += 1;
    }

    /// A part is not under way any more.
    #[inline]
    fn remove_part(&mut self, bytes: u64) {
        self.load.remove(bytes);
        self.outstanding = self.outstanding.saturating_sub(1);
    }
}

/// The sending end of a connection. One thread at a time uses it.
///
/// A message is sent when the receiver has posted a buffer for it. Sends and receives match in order; inside a group, the tag
/// chooses the buffer. All work is done inside the calls of [`isend`](SendCore::isend) and
/// [`test`](SendCore::test): call one of them while sends are under way.
#[derive(Debug)]
#[repr(C)]
pub(super) struct SendCore {
    // What a message over one rail needs comes first, in few cache lines.
    messages: Box<[Message]>,
    transfers: Box<[Transfer]>,
    clock: PollClock,
    up: Mask,
    mailbox: Arc<Mailbox>,
    pub(super) counters: Arc<ConnectionCounters>,
    /// That of the context.
    context_id: u64,
    protocol: Sender,
    agreed: Agreement,
    rails: [Rail; MAX_RAILS],
    split: Split,
    ended: Option<Cause>,
    all_down_since: Option<u64>,
    events_seen: u64,
    context: Arc<Context>,
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
            rails: core::array::from_fn(|rail| Rail {
                endpoint: endpoints.next().map(Box::new),
                epoch: 0,
                load: context.loads.get(rail).cloned().map(RailLoad::on).unwrap_or_default(),
                outstanding: 0,
                progress_at: 0,
                probed_at: None,
            }),
            up: (1 << agreed.rails) - 1,
            protocol: Sender::new(agreed.slots),
            messages: (0..agreed.slots).map(|_| Message::default()).collect(),
            transfers: (0..agreed.slots).map(|_| Transfer::default()).collect(),
            context_id: context.id,
            split: context.config.split,
            ended: None,
            clock: PollClock::with_slow(SLOW_POLLS),
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
    pub(super) fn isend(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        tag: u32,
    ) -> Result<Option<SendRequest>, RequestError> {
        // A connection that has ended has no rails.
        if self.mailbox.has_mail() || self.up == 0 {
            self.read_mail();
            if let Some(cause) = &self.ended {
                return Err(cause.clone().into());
            }
        }
        let number = self.protocol.next_message();
        let slot = number as usize & (self.agreed.slots - 1);
        if self.messages[slot].untaken > 0 || self.up == 0 {
            self.progress();
            return Ok(None);
        }
        if self.transfers[slot].is_empty() && !self.read_clears(number, slot)? {
            return Ok(None);
        }
        if memory.context != self.context_id {
            return Err(RequestError::WrongMemory);
        }
        let Some((index, room)) = self.transfers[slot].find_free(tag) else { return Ok(None) };
        let source = Source::new(memory, range)?;
        if u64::from(source.len) > room {
            return Err(RequestError::TooLong { len: source.len as usize, room: room as usize });
        }
        if self.transfers[slot].match_source(index, source, memory) {
            self.send_message(number, slot);
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
            let known = number == next && self.transfers[slot].has_source(index);
            return if known { Ok(None) } else { Err(RequestError::NoSuchRequest) };
        }
        if message.number != number || message.untaken & (1 << index) == 0 {
            return Err(RequestError::NoSuchRequest);
        }
        if !message.is_done {
            return Ok(None);
        }
        message.untaken &= !(1 << index);
        Ok(Some(message.lens[index] as usize))
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
        self.check_time_if_due();
    }

    /// Looks whether the receiver's clear-to-sends for the next message have arrived.
    #[inline]
    fn read_clears(&mut self, number: u64, slot: usize) -> Result<bool, RequestError> {
        let at = slot * self.agreed.max_group * CTS_LEN;
        for nth in 0..self.agreed.rails {
            // They most likely come over the rail of their slot.
            let rail = (slot + nth) % self.agreed.rails;
            let Some(endpoint) = &self.rails[rail].endpoint else { continue };
            match self.transfers[slot].read(&endpoint.memory, at, number, self.agreed.max_group) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(violation) => {
                    self.end(Cause::Violation(violation));
                    return Err(Cause::Violation(violation).into());
                }
            }
        }
        self.check_time_if_due();
        Ok(false)
    }

    /// Nothing moves while the program asks in a loop, but a rail may have failed.
    #[inline]
    fn check_time_if_due(&mut self) {
        if self.clock.is_due() {
            self.clock.read();
            self.check_time();
        }
    }

    /// Polls the completions of a rail.
    fn poll_rail(&mut self, rail: usize) {
        let Some(mut endpoint) = self.rails[rail].endpoint.take() else { return };
        let mut has_failed = false;
        let mut now = None;
        let polled = endpoint.poll(|completion| {
            let now = *now.get_or_insert_with(clock::now);
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
        if !completion.status.is_success() {
            self.counters.rails[rail].completions.add(1);
            return false;
        }
        if completion.wr_id == PROBE {
            let state = &mut self.rails[rail];
            (state.probed_at, state.progress_at) = (None, now);
            self.counters.rails[rail].completions.add(1);
            return true;
        }
        let (number, attempt) = (completion.wr_id >> 8, (completion.wr_id >> 4 & 15) as u8);
        let bytes = self.protocol.part(number, attempt, rail).map_or(0, |part| part.bytes());
        self.rails[rail].remove_part(bytes);
        self.finish_part(number, attempt, rail, bytes, Some(now));
        true
    }

    /// A part of so many bytes has arrived; `now` if that is measured.
    #[inline]
    fn finish_part(&mut self, number: u64, attempt: u8, rail: usize, bytes: u64, now: Option<u64>) {
        let (state, cells) = (&mut self.rails[rail], &self.counters.rails[rail]);
        cells.completions.add(1);
        if let Some(now) = now {
            (state.probed_at, state.progress_at) = (None, now);
            let posted_at = self.transfers[number as usize & (self.agreed.slots - 1)].posted_at;
            if let Some(since) = posted_at.filter(|_| attempt == 0) {
                cells.latencies.record(now.saturating_sub(since));
                state.load.record(bytes, since, now);
                cells.rate.store(state.load.rate().unwrap_or(0), Relaxed);
            }
        }
        if self.protocol.part_done(number, attempt, rail) {
            self.finish_message(number);
        }
    }

    fn finish_message(&mut self, number: u64) {
        let message = &mut self.messages[number as usize & (self.agreed.slots - 1)];
        message.is_done = true;
        self.counters.masks[usize::from(message.mask)].add(1);
    }

    fn now(&self) -> u64 {
        clock::now()
    }
}
