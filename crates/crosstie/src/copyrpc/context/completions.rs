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

use crosstie_protocol::copyrpc::wire::{COMPACT_FLAG, COMPACT_HEAD_SIZE, MAX_COMPACT_PAYLOAD};

use super::receives::{Receives, recv_cq_depth};
use super::request::PollHandler;
use super::{ContextCore, PollState, RecvHandle};
use crate::copyrpc::connection::{Arrival, BulkArrival, ConnectionCore};
use crate::copyrpc::error::{CallFailed, Failure};
use crate::copyrpc::flush_policy::{MAX_COMPACT_BATCH, SEND_DEPTH};
use crate::copyrpc::payload::{Payload, ShortPayload};
use crate::copyrpc::receive_policy::{IDLE_REFILL, MAX_COMPLETIONS, may_pause, most_responses};
use crate::copyrpc::wr_id::{SendKind, decode_wr_id};
use crate::device::{Completion, Cq, CqConfig, CqParker, Device, DeviceError, Pd, QpConfig, RcQp};
use crate::wait::Parker;

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
        max_connections: usize,
    ) -> Result<CompletionQueues, DeviceError> {
        let recv_cq = device.create_cq(&CqConfig { depth: recv_cq_depth(receives) })?;
        let send_cq = device.create_cq(&CqConfig { depth: max_connections as u32 * SEND_DEPTH })?;
        Ok(CompletionQueues {
            paused: Cell::new(NO_CONNECTION),
            send_completions: RefCell::new(Vec::with_capacity(MAX_COMPLETIONS)),
            receives: Receives::new(pd, receives)?,
            signaled_completed: Cell::new(0),
            posted_before_poll: Cell::new(0),
            is_recv_cq_drained: Cell::new(true),
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

    /// Whether the last poll has left a part of a batch to the next one.
    #[inline]
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

/// The bytes of a compact batch that came with its completion: its head, and its payload with bytes behind it that have no meaning.
struct CopiedBatch<'c> {
    head: [u64; 2],
    payload: &'c ShortPayload,
}

impl<'c> CopiedBatch<'c> {
    #[inline]
    fn new(imm: u32, completion: &'c Completion) -> Option<CopiedBatch<'c>> {
        let len = imm ^ COMPACT_FLAG;
        if len > MAX_COMPACT_PAYLOAD {
            return None;
        }
        let words: &CompactWords = completion.inline_words(COMPACT_HEAD_SIZE + len as usize)?;
        let [first, second, payload @ ..] = words;
        let head = [u64::from_le(*first), u64::from_le(*second)];
        Some(CopiedBatch { head, payload: zerocopy::transmute_ref!(payload) })
    }
}

impl<U> ContextCore<U> {
    /// Receives what the last poll has left, or what has arrived. Returns the number of responses.
    #[inline(always)]
    pub(super) fn poll_recv_cq(&self, state: &mut PollState<U>, handler: &mut impl PollHandler<U>) -> usize {
        let queues = &self.queues;
        if queues.is_paused() {
            let responses = self.resume_batch(handler);
            state.forget_closed();
            return responses;
        }
        if !self.take_completion(state) {
            if queues.receives.lack_some() {
                self.refill_receives(IDLE_REFILL);
            }
            return 0;
        }
        self.receive_all(state, handler)
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
        taken
    }

    /// Receives all that has arrived, beginning with the completion that was taken.
    #[inline(never)]
    fn receive_all(&self, state: &mut PollState<U>, handler: &mut impl PollHandler<U>) -> usize {
        let (queues, mut responses, mut taken) = (&self.queues, 0, 0);
        loop {
            taken += 1;
            self.receive(state, may_pause(taken, state.taken_before), &mut responses, handler);
            if queues.is_paused()
                || taken == MAX_COMPLETIONS
                || handler.has_enough()
                || !self.take_completion(state)
            {
                break;
            }
        }
        state.taken_before = taken;
        state.forget_closed();
        queues.receives.note_used(taken);
        self.counters.completions.add(taken);
        if queues.receives.are_few() {
            self.refill_receives(u32::MAX);
        }
        responses
    }

    /// Receives the batch that the completion announces. `may_pause`: see [`receive_batch`](ContextCore::receive_batch).
    #[inline(always)]
    fn receive(
        &self,
        state: &mut PollState<U>,
        may_pause: bool,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) {
        let PollState { completion, recent, .. } = state;
        let is_recent = |connection: &Rc<ConnectionCore<U>>| {
            connection.qp_num == completion.qp_num && !connection.has_stopped_receiving()
        };
        if !recent.as_ref().is_some_and(is_recent) {
            *recent = self.connection_by_qp(completion.qp_num);
        }
        let Some(connection) = recent else { return };
        if connection.has_stopped_receiving() {
            return;
        }
        if !completion.status.is_success() {
            return self.mark_broken(connection.clone(), Failure::Broken(completion.status));
        }
        let Some(imm) = completion.imm else { return };
        let received = match CopiedBatch::new(imm, completion) {
            Some(copied) => {
                self.receive_batch::<true>(connection, Some(imm), Some(copied), false, responses, handler)
            }
            None => self.receive_batch::<false>(connection, Some(imm), None, may_pause, responses, handler),
        };
        if let Err(failure) = received {
            self.mark_broken(connection.clone(), failure);
        }
    }

    /// Receives what the last poll has left.
    #[inline(never)]
    fn resume_batch(&self, handler: &mut impl PollHandler<U>) -> usize {
        let (key, mut responses) = (self.queues.paused.replace(NO_CONNECTION), 0);
        if let Some(connection) = self.connection_by_key(key)
            && let Err(failure) =
                self.receive_batch::<false>(&connection, None, None, false, &mut responses, handler)
        {
            self.mark_broken(connection, failure);
        }
        responses
    }

    /// Receives the batch that `imm` announced, or the rest of the one before. If `may_pause`, it stops after half of many pending calls, so
    /// that the application makes new ones while the others are still to be received. It stops, too, when the handler has enough. The next
    /// poll continues. `COPIED`: whether the batch is `copied`, for the compiler, because each message asks.
    #[inline(never)]
    fn receive_batch<const COPIED: bool>(
        &self,
        connection: &Rc<ConnectionCore<U>>,
        imm: Option<u32>,
        copied: Option<CopiedBatch<'_>>,
        may_pause: bool,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) -> Result<(), Failure> {
        let copied = copied.filter(|_| COPIED);
        if let Some(imm) = imm {
            connection.accept(imm, copied.as_ref().map(|copied| &copied.head))?;
        }
        let most = if may_pause { most_responses(connection.pending_calls()) } else { usize::MAX };
        while let Some(arrival) = connection.next_message(COPIED)? {
            let payload_at = |offset, len| match &copied {
                Some(copied) => Payload::from_copy(copied.payload, len),
                None => Payload::in_ring(&connection.ring, offset, len),
            };
            match arrival {
                Arrival::Request { reply_token, offset, len } => {
                    handler.on_request(connection, payload_at(offset, len), Some(reply_token));
                }
                Arrival::Response { user: Some(user), offset, len } => {
                    *responses += 1;
                    handler.on_response(user, Ok(payload_at(offset, len)));
                }
                // The call was abandoned.
                Arrival::Response { user: None, .. } => {}
                Arrival::Bulk(arrival) => self.receive_bulk(connection, arrival, responses, handler),
            }
            if COPIED {
                // It has one message.
                break;
            }
            if *responses >= most || handler.has_enough() {
                connection.finish_message();
                if !connection.batch_ended() {
                    self.queues.paused.set(connection.key);
                }
                break;
            }
        }
        // The peer should know which ring space is free. That of a copied batch was published at once.
        if !COPIED || connection.may_have_news() {
            self.schedule_flush(connection);
        }
        Ok(())
    }

    /// Receives a bulk message, or a request that has to wait for one.
    #[inline(never)]
    fn receive_bulk(
        &self,
        connection: &Rc<ConnectionCore<U>>,
        arrival: BulkArrival<U>,
        responses: &mut usize,
        handler: &mut impl PollHandler<U>,
    ) {
        match arrival {
            BulkArrival::Response { user, region, len } => {
                if let Some(user) = user {
                    *responses += 1;
                    handler.on_response(user, Ok(Payload::new(region.mr(), 0, len)));
                }
                connection.put_back_response(region);
            }
            BulkArrival::Refused { user } => {
                if let Some(user) = user {
                    *responses += 1;
                    handler.on_response(user, Err(CallFailed::NoMemory));
                }
            }
            BulkArrival::RequestQueued => {
                self.collect_ready(connection);
                // Those behind it must not come before it.
                handler.on_queued_requests();
            }
        }
    }

    /// Collects queued requests that are complete now, and operations that have completed.
    #[inline(never)]
    pub(super) fn collect_ready(&self, connection: &Rc<ConnectionCore<U>>) {
        while let Some(completion) = connection.take_raw_completion() {
            self.counters.raw_completed.add(1);
            self.raw_completions.borrow_mut().push_back(completion);
        }
        let Some(core) = self.weak_self.upgrade() else { return };
        while let Some(request) = connection.take_ready_request() {
            let handle = RecvHandle::from_queued(connection.clone(), core.clone(), request);
            self.requests.borrow_mut().push_back(handle);
        }
    }

    /// Whether a work request that asked for a completion may still have to complete, or, if `or_error`, an error of another one that was posted
    /// since the last poll of the send CQ. (The check of the peers finds errors that come later.)
    pub(super) fn expects_send_completion(&self, or_error: bool) -> bool {
        let (queues, counters) = (&self.queues, &self.counters);
        counters.signaled.get() != queues.signaled_completed.get()
            || or_error && counters.work_requests.get() != queues.posted_before_poll.get()
    }

    /// Polls the send CQ once. Returns whether it had completions, and whether the application should hear of any of them.
    pub(super) fn poll_send_cq(&self) -> (bool, bool) {
        let mut completions = self.queues.send_completions.borrow_mut();
        completions.clear();
        let polled = self
            .queues
            .send_cq
            .borrow_mut()
            .poll(MAX_COMPLETIONS, |completion| completions.push(*completion));
        if let Err(error) = polled {
            self.mark_all_broken(Failure::Queue(error));
            return (false, true);
        }
        let mut has_news = false;
        self.counters.completions.add(completions.len());
        self.queues.posted_before_poll.set(self.counters.work_requests.get());
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
