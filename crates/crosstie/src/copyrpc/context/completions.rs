//! Completion handling: one receive CQ and one send CQ for all connections.
//!
//! - A completion on the receive CQ announces a batch. Its responses go to the callback of the poll, its requests to the queue
//!   of [`Context::recv`](super::Context::recv).
//! - A completion on the send CQ frees room in a send queue, or ends a READ or WRITE.
//!
//! A completion with an error, or a batch that violates the protocol, marks its connection as broken. `liveness.rs` ends it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crosstie_protocol::copyrpc::wire::{COMPACT_FLAG, COMPACT_HEAD_SIZE, CompactHead, MAX_COMPACT_PAYLOAD};
use crosstie_protocol::copyrpc::{CompactMessage, ReplyToken};

use super::receives::{IDLE_REFILL, Receives, recv_cq_depth};
use super::request::PollHandler;
use super::{ContextCore, PollState, RecvHandle};
use crate::copyrpc::connection::{Connection, MessageHandler, OtherMessage};
use crate::copyrpc::error::{CallFailed, Failure};
use crate::copyrpc::flush_policy::{MAX_COMPACT_BATCH, SEND_DEPTH};
use crate::copyrpc::payload::{Payload, ShortPayload};
use crate::copyrpc::wr_id::{SendKind, decode_wr_id};
use crate::device::CqParker;
use crate::device::{Completion, Cq, CqConfig, Device, DeviceError, Pd, QpConfig, RcQp};
use crate::wait::Parker;

/// The most completions that are taken from a queue at a time.
pub(super) const BURST: usize = 64;
/// A poll that pauses in a batch has ended at least so many calls.
const MIN_ENDED: usize = 4;
/// The key of no connection.
const NO_CONNECTION: u32 = 0;

type CompactWords = [u64; MAX_COMPACT_BATCH / 8];

pub(super) struct CompletionQueues {
    /// The key of the connection whose last batch was received in part, if any.
    paused: Cell<u32>,
    /// A buffer for the completions of one poll.
    send_completions: RefCell<Vec<Completion>>,
    receives: Receives,
    /// Work requests that have asked for a completion and got it, with success.
    signaled_completed: Cell<u64>,
    /// Work requests that were posted before the last poll of the send CQ.
    posted_before_poll: Cell<u64>,
    /// Whether the last poll of the receive CQ left nothing there.
    is_recv_cq_drained: Cell<bool>,
    /// Whether the last look at it found a completion.
    is_stream: Cell<bool>,
    recv_cq: RefCell<Cq>,
    send_cq: RefCell<Cq>,
    /// The parker of the receive CQ, where the device has one.
    recv_parker: Option<CqParker>,
}

impl CompletionQueues {
    pub(super) fn new(
        device: &Device,
        pd: &Pd,
        receives: u32,
        max_endpoints: usize,
    ) -> Result<CompletionQueues, DeviceError> {
        let recv_cq = device.create_cq(&CqConfig { depth: recv_cq_depth(receives) })?;
        let send_cq = device.create_cq(&CqConfig { depth: max_endpoints as u32 * SEND_DEPTH })?;
        Ok(CompletionQueues {
            paused: Cell::new(NO_CONNECTION),
            send_completions: RefCell::new(Vec::with_capacity(BURST)),
            receives: Receives::new(pd, receives)?,
            signaled_completed: Cell::new(0),
            posted_before_poll: Cell::new(0),
            is_recv_cq_drained: Cell::new(true),
            is_stream: Cell::new(false),
            recv_parker: recv_cq.parker(),
            recv_cq: RefCell::new(recv_cq),
            send_cq: RefCell::new(send_cq),
        })
    }

    /// Creates a queue pair that uses these queues.
    pub(super) fn create_qp(&self, pd: &Pd, config: &QpConfig) -> Result<RcQp, DeviceError> {
        let (send, recv) = (self.send_cq.borrow(), self.recv_cq.borrow());
        pd.create_rc(config, &send, &recv, Some(&self.receives.srq()))
    }

    /// Whether the last poll of the receive CQ left nothing there.
    pub(super) fn is_recv_cq_drained(&self) -> bool {
        self.is_recv_cq_drained.get()
    }

    /// Whether the last poll has left a part of a batch, or a whole one, to the next one.
    #[inline(always)]
    pub(super) fn is_paused(&self) -> bool {
        self.paused.get() != NO_CONNECTION
    }

    /// Whether the receive CQ has a completion or an error.
    pub(super) fn has_recv_completion(&self) -> bool {
        self.recv_cq.borrow_mut().is_ready()
    }

    /// The parker that is notified of each completion of the receive CQ, where the device has one.
    pub(super) fn recv_parker(&self) -> Option<&Parker> {
        self.recv_parker.as_ref().map(CqParker::parker)
    }

    /// Waits for a completion or an error on the receive CQ.
    pub(super) fn wait_recv(&self, timeout: Duration) -> bool {
        self.recv_cq.borrow_mut().wait(timeout).unwrap_or(true)
    }
}

/// The bytes of a compact batch, if they came with the completion.
#[inline(always)]
fn compact_words(imm: u32, completion: &Completion) -> Option<&CompactWords> {
    let len = imm ^ COMPACT_FLAG;
    if len > MAX_COMPACT_PAYLOAD {
        return None;
    }
    completion.inline_words(COMPACT_HEAD_SIZE + len as usize)
}

/// The payload of a compact batch.
#[inline(always)]
fn short_payload(words: &[u64; size_of::<ShortPayload>() / 8]) -> &ShortPayload {
    zerocopy::transmute_ref!(words)
}

impl<U> ContextCore<U> {
    /// Receives what the last poll has left, or what has arrived. Returns the number of responses.
    #[inline(always)]
    pub(super) fn poll_recv_cq(&self, state: &mut PollState<U>, handler: &mut impl PollHandler<U>) -> usize {
        let queues = &self.queues;
        if queues.is_paused() {
            let responses = self.receive_rest(handler);
            state.forget_closed();
            return responses;
        }
        let is_stream = queues.is_stream.get();
        if !self.take_completion(state) {
            if queues.receives.lack_some() {
                self.refill_receives(IDLE_REFILL);
            }
            return 0;
        }
        self.receive_all(is_stream, state, handler)
    }

    /// Takes the next completion of the receive CQ. False if there is none; then nothing is left there.
    #[inline(always)]
    fn take_completion(&self, state: &mut PollState<U>) -> bool {
        let taken = self.queues.recv_cq.borrow_mut().next(&mut state.completion);
        let taken = taken.unwrap_or_else(|error| {
            self.mark_all_broken(Failure::Queue(error));
            false
        });
        self.queues.is_recv_cq_drained.set(!taken);
        self.queues.is_stream.set(taken);
        taken
    }

    /// Receives what has arrived, beginning with the completion that was taken: all of it, if the last look found one, too; otherwise the
    /// application sees this one before another one is looked for.
    // Never inline: the poll that finds nothing is short, and this has the registers for itself.
    #[inline(never)]
    fn receive_all(
        &self,
        is_stream: bool,
        state: &mut PollState<U>,
        handler: &mut impl PollHandler<U>,
    ) -> usize {
        let (queues, mut taken, mut responses) = (&self.queues, 0, 0);
        loop {
            taken += 1;
            self.receive_recent(state, || taken == 1, &mut responses, handler);
            if !is_stream
                || queues.is_paused()
                || taken == BURST
                || handler.has_enough()
                || !self.take_completion(state)
            {
                break;
            }
        }
        self.count_receives(taken);
        if queues.receives.are_few() {
            self.refill_receives(u32::MAX);
        }
        responses
    }

    /// Receives the batch that the completion announces.
    #[inline(always)]
    fn receive_recent(
        &self,
        state: &mut PollState<U>,
        is_only: impl FnOnce() -> bool,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) {
        let PollState { completion, recent } = &mut *state;
        let is_recent = |connection: &Rc<Connection<U>>| {
            connection.qp_num == completion.qp_num && !connection.has_stopped_receiving()
        };
        if !recent.as_ref().is_some_and(is_recent) {
            *recent = self.connection_by_qp(completion.qp_num);
        }
        let Some(connection) = recent else { return };
        self.receive(connection, completion, is_only, responses, handler);
        state.forget_closed();
    }

    #[inline(always)]
    fn count_receives(&self, count: usize) {
        self.queues.receives.note_used(count);
        self.counters.count_receives(count);
    }

    /// Receives the batch that a completion announces. `is_only`: whether it is the only one that this poll has found.
    #[inline(always)]
    fn receive(
        &self,
        connection: &Rc<Connection<U>>,
        completion: &Completion,
        is_only: impl FnOnce() -> bool,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) {
        if connection.has_stopped_receiving() {
            return;
        }
        if !completion.status.is_success() {
            return self.mark_broken(connection.clone(), Failure::Broken(completion.status));
        }
        let Some(imm) = completion.imm else { return };
        let received = match compact_words(imm, completion) {
            Some(words) => {
                if self.receive_usual_compact(connection, imm, words, responses, handler) {
                    return;
                }
                self.receive_compact(connection, imm, words, responses, handler)
            }
            None => self.receive_batch(connection, Some(imm), is_only(), responses, handler),
        };
        match received {
            Ok(true) => {}
            Ok(false) => self.queues.paused.set(connection.key),
            Err(failure) => self.mark_broken(connection.clone(), failure),
        }
    }

    /// Receives what the last poll has left.
    #[cold]
    fn receive_rest(&self, handler: &mut impl PollHandler<U>) -> usize {
        let (key, mut responses) = (self.queues.paused.replace(NO_CONNECTION), 0);
        if let Some(connection) = self.connection_by_key(key)
            && !connection.has_stopped_receiving()
        {
            match self.receive_batch(&connection, None, false, &mut responses, handler) {
                Ok(true) => {}
                Ok(false) => self.queues.paused.set(key),
                Err(failure) => self.mark_broken(connection, failure),
            }
        }
        responses
    }

    /// Receives a compact batch whose bytes came with the completion.
    #[cold]
    #[inline(never)]
    fn receive_compact(
        &self,
        connection: &Rc<Connection<U>>,
        imm: u32,
        words: &CompactWords,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) -> Result<bool, Failure> {
        let [first, second, payload @ ..] = words;
        let (head, payload) = (CompactHead::from_words(*first, *second), short_payload(payload));
        let len = imm ^ COMPACT_FLAG;
        let Some((message, may_have_news)) = connection.accept_compact(len, &head)? else {
            return self.receive_batch(connection, Some(imm), false, responses, handler);
        };
        if may_have_news {
            self.schedule_flush(connection);
        }
        match message {
            CompactMessage::Response { user: Some(user) } => {
                *responses += 1;
                handler.on_rare_response(user, Ok(Payload::from_copy(payload, len as usize)));
            }
            CompactMessage::Response { user: None } => {}
            CompactMessage::Request { reply_token } => {
                handler.on_copied_request(self, connection, payload, len, reply_token);
            }
        }
        Ok(true)
    }

    /// As [`receive_compact`](ContextCore::receive_compact), in the usual case: the receive ring is free, and everything is as it should be.
    /// False if nothing was received.
    #[inline(always)]
    fn receive_usual_compact(
        &self,
        connection: &Rc<Connection<U>>,
        imm: u32,
        words: &CompactWords,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) -> bool {
        let [first, second, payload @ ..] = words;
        let (head, payload) = (CompactHead::from_words(*first, *second), short_payload(payload));
        let len = imm ^ COMPACT_FLAG;
        if head.is_response() {
            let Some((user, may_have_news)) = connection.accept_compact_response(len, &head) else {
                return false;
            };
            if may_have_news {
                self.schedule_flush(connection);
            }
            if let Some(user) = user {
                *responses += 1;
                handler.on_response(user, Ok(Payload::from_copy(payload, len as usize)));
            }
        } else {
            let Some((reply_token, may_have_news)) = connection.accept_compact_request(len, &head) else {
                return false;
            };
            if may_have_news {
                self.schedule_flush(connection);
            }
            handler.on_copied_request(self, connection, payload, len, reply_token);
        }
        true
    }

    /// Receives the batch that `imm` announced, or the rest of the one before. Returns whether it was received to its end: if `may_pause`, it
    /// stops after half of many pending calls, so that the application makes new ones while the others are still to be received. It stops, too,
    /// when the handler has enough.
    fn receive_batch(
        &self,
        connection: &Rc<Connection<U>>,
        imm: Option<u32>,
        may_pause: bool,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) -> Result<bool, Failure> {
        let mut most = usize::MAX;
        if let Some(imm) = imm {
            connection.accept_batch(imm)?;
        }
        if may_pause {
            most = (connection.pending_calls() / 2).max(MIN_ENDED);
        }
        self.schedule_flush(connection);
        let is_at_end = loop {
            let mut batch = BatchHandler { core: self, connection, responses, most, handler };
            let other = connection.receive_messages(&mut batch)?;
            let is_at_end = other.is_none();
            if let Some(other) = other {
                self.receive_other(connection, other, responses, handler);
            }
            if *responses >= most || handler.has_enough() {
                connection.pass();
                break connection.has_received_batch();
            }
            if is_at_end {
                break true;
            }
        };
        // The peer should know which ring space is free. Callbacks may have flushed the connection.
        self.schedule_flush(connection);
        Ok(is_at_end)
    }

    /// Receives a message that is not short, or that has to wait for one.
    #[cold]
    fn receive_other(
        &self,
        connection: &Rc<Connection<U>>,
        message: OtherMessage<U>,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) {
        match message {
            OtherMessage::Request { offset, len, reply_token } => {
                handler.on_ring_request(self, connection, offset, len, reply_token);
            }
            OtherMessage::Response { user, offset, len } => {
                if let Some(user) = user {
                    *responses += 1;
                    handler.on_rare_response(user, Ok(Payload::in_ring(&connection.ring, offset, len)));
                }
            }
            OtherMessage::BulkResponse { user, region, len } => {
                if let Some(user) = user {
                    *responses += 1;
                    handler.on_rare_response(user, Ok(Payload::new(region.mr(), 0, len)));
                }
                connection.put_back_response(region);
            }
            OtherMessage::Refused { user } => {
                if let Some(user) = user {
                    *responses += 1;
                    handler.on_rare_response(user, Err(CallFailed::NoMemory));
                }
            }
            OtherMessage::RequestQueued => {
                self.collect_ready(connection);
                // Those behind it must not come before it.
                handler.on_queued_requests();
            }
        }
    }

    /// Collects queued requests that are complete now, and operations that have completed.
    #[cold]
    pub(super) fn collect_ready(&self, connection: &Rc<Connection<U>>) {
        while let Some(completion) = connection.take_raw_completion() {
            self.counters.borrow_mut().raw_completed += 1;
            self.raw_completions.borrow_mut().push_back(completion);
        }
        let Some(core) = self.weak_self.upgrade() else { return };
        while let Some(request) = connection.take_ready_request() {
            let handle = RecvHandle::from_queued(connection.clone(), core.clone(), request);
            self.requests.borrow_mut().push_other(handle);
        }
    }

    /// Whether a work request that asked for a completion may still have to complete, or, if `any`, an error of another one that was posted
    /// since the last poll of the send CQ. (The check of the peers finds errors that come later.)
    pub(super) fn expects_send_completion(&self, any: bool) -> bool {
        let (queues, counters) = (&self.queues, self.counters.borrow_mut());
        counters.signaled != queues.signaled_completed.get()
            || any && counters.work_requests != queues.posted_before_poll.get()
    }

    /// Polls the send CQ once. Returns whether it had completions, and whether the application should hear of any of them.
    pub(super) fn poll_send_cq(&self) -> (bool, bool) {
        let mut completions = self.queues.send_completions.borrow_mut();
        completions.clear();
        let polled = self.queues.send_cq.borrow_mut().poll(BURST, |completion| completions.push(*completion));
        if let Err(error) = polled {
            self.mark_all_broken(Failure::Queue(error));
            return (false, true);
        }
        let mut has_news = false;
        let mut counters = self.counters.borrow_mut();
        counters.completions += completions.len() as u64;
        self.queues.posted_before_poll.set(counters.work_requests);
        drop(counters);
        let succeeded = completions.iter().filter(|completion| completion.status.is_success()).count() as u64;
        self.queues.signaled_completed.set(self.queues.signaled_completed.get() + succeeded);
        for completion in completions.iter() {
            let (key, kind) = decode_wr_id(completion.wr_id);
            let Some(connection) = self.connection_by_key(key) else { continue };
            let completed = if completion.status.is_success() {
                connection.complete_send(kind)
            } else {
                Err(Failure::Broken(completion.status))
            };
            match completed {
                Ok(is_news) => {
                    has_news |= is_news;
                    if matches!(kind, SendKind::Operation(_)) {
                        self.collect_ready(&connection);
                    }
                    self.schedule_flush(&connection);
                }
                Err(failure) => self.mark_broken(connection, failure),
            }
        }
        (!completions.is_empty(), has_news)
    }

    /// Posts up to `most` receives again.
    #[inline(never)]
    pub(super) fn refill_receives(&self, most: u32) {
        if let Err(error) = self.queues.receives.refill(most) {
            self.mark_all_broken(Failure::Refused(error));
        }
    }

    /// Posts as many receives as the queue takes. Receives of a queue pair that is gone were used without a completion. Only after
    /// the receive CQ was seen empty.
    pub(super) fn refill_all_receives(&self) {
        self.queues.receives.forget_all();
        self.refill_receives(u32::MAX);
    }
}

/// What becomes of the messages of a batch: they go to the handler of the poll.
struct BatchHandler<'p, U, H> {
    core: &'p ContextCore<U>,
    connection: &'p Rc<Connection<U>>,
    responses: &'p mut usize,
    /// So many responses are enough.
    most: usize,
    handler: &'p mut H,
}

impl<U, H: PollHandler<U>> MessageHandler<U> for BatchHandler<'_, U, H> {
    #[inline(always)]
    fn on_request(&mut self, offset: usize, len: usize, reply_token: ReplyToken) -> bool {
        self.handler.on_ring_request(self.core, self.connection, offset, len, reply_token);
        !self.handler.has_enough()
    }

    #[inline(always)]
    fn on_response(&mut self, user: Option<U>, offset: usize, len: usize) -> bool {
        if let Some(user) = user {
            *self.responses += 1;
            self.handler.on_response(user, Ok(Payload::in_ring(&self.connection.ring, offset, len)));
        }
        *self.responses < self.most
    }
}
