//! Completion handling: one receive CQ and one send CQ for all connections, and the shared receive queue (SRQ).
//!
//! - A completion on the receive CQ announces a batch. Its responses go to the callback of the poll, its requests to the queue
//!   of [`Context::recv`](super::Context::recv).
//! - A completion on the send CQ frees room in a send queue, or ends a READ or WRITE.
//! - Every batch uses one receive of the SRQ. A poll that finds nothing posts some again; when a third of the receives is used, all are
//!   posted again.
//!
//! The receive CQ cannot overflow. A refill posts at most as many receives as completions were polled since the last one, so receives in the
//! SRQ and completions in the CQ together do not become more. Only [`ContextCore::refill_all_receives`] can add to them: at most
//! [`Config::receives`](crate::copyrpc::Config::receives), and only if the CQ was seen empty, so that all others are in the SRQ.
//!
//! A completion with an error, or a batch that violates the protocol, marks its connection as broken. `liveness.rs` ends it.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use crosstie_protocol::copyrpc::wire::{COMPACT_FLAG, COMPACT_HEAD_SIZE, CompactHead, MAX_COMPACT_PAYLOAD};
use crosstie_protocol::copyrpc::{CompactMessage, HeldSpace, ReplyToken};

use super::request::PollHandler;
use super::{ContextCore, PollState, RecvHandle, RequestQueue, RingRequest};
use crate::copyrpc::connection::{Connection, MessageHandler, OtherMessage};
use crate::copyrpc::error::{CallFailed, Failure};
use crate::copyrpc::flush_policy::{MAX_COMPACT_BATCH, SEND_DEPTH};
use crate::copyrpc::payload::{Payload, ShortPayload};
use crate::copyrpc::wr_id::{SendKind, decode_wr_id};
use crate::device::software::CqParker;
use crate::device::{
    Completion, Cq, CqConfig, Device, DeviceError, NextReceive, Pd, PostError, QpConfig, RcQp, RecvWr, Srq,
    SrqConfig,
};
use crate::wait::Parker;

/// The most completions that are taken from a queue at a time.
const BURST: usize = 64;
/// The most receives that a poll posts because it has found nothing. The peer's answer takes longer.
const IDLE_REFILL: u32 = 8;
/// A poll that pauses in a batch has ended at least so many calls.
const MIN_ENDED: usize = 4;
/// The key of no connection.
const NO_CONNECTION: u32 = 0;

type CompactWords = [u64; MAX_COMPACT_BATCH / 8];

pub(super) struct CompletionQueues {
    /// What a poll of the receive CQ found, with the keys of the connections.
    arrivals: RefCell<VecDeque<(u32, Completion)>>,
    /// Whether the last poll has left some of them to the next one.
    has_arrivals: Cell<bool>,
    /// The key of the connection whose last batch was received in part, if any.
    paused: Cell<u32>,
    /// A buffer for the completions of one poll.
    send_completions: RefCell<Vec<Completion>>,
    srq: RefCell<Srq>,
    /// Work requests that have asked for a completion and got it, with success.
    signaled_completed: Cell<u64>,
    /// Work requests that were posted before the last poll of the send CQ.
    posted_before_poll: Cell<u64>,
    /// Receives that are posted and not used, as far as is known, and the number at which they are posted again.
    posted_receives: Cell<u32>,
    refill_at: u32,
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
        max_endpoints: usize,
    ) -> Result<CompletionQueues, DeviceError> {
        // A device may round the number of receives up, to less than twice as many. `refill_all_receives` can fill the SRQ while all
        // of them become completions, and post as many as configured.
        let recv_cq = device.create_cq(&CqConfig { depth: recv_cq_depth(receives) })?;
        let send_cq = device.create_cq(&CqConfig { depth: max_endpoints as u32 * SEND_DEPTH })?;
        let srq = pd.create_srq(&SrqConfig { max_wr: receives, max_sge: 1 })?;
        Ok(CompletionQueues {
            arrivals: RefCell::new(VecDeque::with_capacity(BURST)),
            has_arrivals: Cell::new(false),
            paused: Cell::new(NO_CONNECTION),
            send_completions: RefCell::new(Vec::with_capacity(BURST)),
            srq: RefCell::new(srq),
            signaled_completed: Cell::new(0),
            posted_before_poll: Cell::new(0),
            posted_receives: Cell::new(0),
            refill_at: (u64::from(receives) * 2 / 3) as u32,
            is_recv_cq_drained: Cell::new(true),
            recv_parker: recv_cq.parker(),
            recv_cq: RefCell::new(recv_cq),
            send_cq: RefCell::new(send_cq),
        })
    }

    /// Creates a queue pair that uses these queues.
    pub(super) fn create_qp(&self, pd: &Pd, config: &QpConfig) -> Result<RcQp, DeviceError> {
        let (send, recv) = (self.send_cq.borrow(), self.recv_cq.borrow());
        pd.create_rc(config, &send, &recv, Some(&self.srq.borrow()))
    }

    /// Whether the last poll of the receive CQ left nothing there.
    pub(super) fn is_recv_cq_drained(&self) -> bool {
        self.is_recv_cq_drained.get()
    }

    /// Whether the last poll has left a part of a batch, or a whole one, to the next one.
    #[inline(always)]
    pub(super) fn is_paused(&self) -> bool {
        self.paused.get() != NO_CONNECTION || self.has_arrivals.get()
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

/// Completions that the receive CQ is asked for, if so many receives are kept posted.
fn recv_cq_depth(receives: u32) -> u32 {
    3 * receives + BURST as u32
}

/// Posts receives until as many are posted as are to be kept. `post` posts up to a number of receives and returns how many it has posted.
/// Returns why the queue refused one, unless it is full.
fn refill(
    posted: &Cell<u32>,
    receives: u32,
    mut post: impl FnMut(u32) -> Result<u32, PostError>,
) -> Option<PostError> {
    while posted.get() < receives {
        match post(receives - posted.get()) {
            Ok(count) => posted.set(posted.get() + count),
            // The queue holds as many as it can.
            Err(PostError::Full) => posted.set(receives),
            Err(error) => return Some(error),
        }
    }
    None
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
        let next = queues.recv_cq.borrow_mut().take_receive(&mut state.completion);
        match next {
            NextReceive::Nothing => {
                queues.is_recv_cq_drained.set(true);
                if queues.posted_receives.get() + IDLE_REFILL <= self.config.receives {
                    self.refill_receives(IDLE_REFILL);
                }
                0
            }
            NextReceive::Taken { is_stream: false } => self.receive_one(state, handler),
            next => self.receive_all(next, state, handler),
        }
    }

    /// Receives what a completion announces that came alone: another one is not looked for before the application has seen this one.
    // Never inline: the poll that finds nothing is short, and this has the registers for itself.
    #[inline(never)]
    fn receive_one(&self, state: &mut PollState<U>, handler: &mut impl PollHandler<U>) -> usize {
        let (queues, mut responses) = (&self.queues, 0);
        queues.is_recv_cq_drained.set(false);
        let is_only = || !queues.recv_cq.borrow().may_have_receives();
        self.receive_recent(state, is_only, &mut responses, handler);
        self.count_receives(1);
        if queues.posted_receives.get() <= queues.refill_at {
            self.refill_receives(u32::MAX);
        }
        responses
    }

    /// Receives all that has arrived, beginning with the completion that was taken, if any.
    #[inline(never)]
    fn receive_all(
        &self,
        mut next: NextReceive,
        state: &mut PollState<U>,
        handler: &mut impl PollHandler<U>,
    ) -> usize {
        let (queues, mut taken, mut responses) = (&self.queues, 0, 0);
        while let NextReceive::Taken { is_stream } = next {
            taken += 1;
            let is_only = || taken == 1 && !queues.recv_cq.borrow().may_have_receives();
            self.receive_recent(state, is_only, &mut responses, handler);
            if !is_stream || queues.is_paused() || taken == BURST || handler.has_enough() {
                break;
            }
            next = queues.recv_cq.borrow_mut().take_receive(&mut state.completion);
        }
        queues.is_recv_cq_drained.set(matches!(next, NextReceive::Nothing));
        self.count_receives(taken);
        if (matches!(next, NextReceive::Unknown) || taken == BURST) && !queues.is_paused() {
            taken += self.poll_arrivals(&mut responses, handler);
            state.forget_closed();
        }
        if taken > 0 && queues.posted_receives.get() <= queues.refill_at {
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

    /// Polls the receive CQ once. Returns the number of completions; 1 for an error.
    #[cold]
    fn poll_arrivals(&self, responses: &mut usize, handler: &mut impl PollHandler<U>) -> usize {
        let queues = &self.queues;
        let polled = {
            let (qp_table, mut arrivals) = (self.qp_table.borrow(), queues.arrivals.borrow_mut());
            queues.recv_cq.borrow_mut().poll(BURST, |completion| {
                let key = qp_table.get(completion.qp_num).unwrap_or(NO_CONNECTION);
                arrivals.push_back((key, *completion));
            })
        };
        let polled = match polled {
            Ok(polled) => polled,
            Err(error) => {
                self.mark_all_broken(Failure::Queue(error));
                return 1;
            }
        };
        queues.is_recv_cq_drained.set(polled < BURST);
        self.count_receives(polled);
        self.receive_arrivals(responses, handler);
        polled
    }

    /// Receives what the polls of the receive CQ have found, until the handler has enough.
    #[cold]
    fn receive_arrivals(&self, responses: &mut usize, handler: &mut impl PollHandler<U>) {
        let queues = &self.queues;
        let is_only = queues.arrivals.borrow().len() == 1;
        loop {
            let next = queues.arrivals.borrow_mut().pop_front();
            let Some((key, completion)) = next else { break };
            if let Some(connection) = self.connection_by_key(key) {
                self.receive(&connection, &completion, || is_only, responses, handler);
            }
            if queues.paused.get() != NO_CONNECTION || handler.has_enough() {
                break;
            }
        }
        queues.has_arrivals.set(!queues.arrivals.borrow().is_empty());
    }

    #[inline(always)]
    fn count_receives(&self, count: usize) {
        let posted = &self.queues.posted_receives;
        posted.set(posted.get().saturating_sub(count as u32));
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
        if self.queues.has_arrivals.get() && self.queues.paused.get() == NO_CONNECTION {
            self.receive_arrivals(&mut responses, handler);
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
            let other = {
                let requests = None;
                let mut batch = BatchHandler { core: self, connection, requests, responses, most, handler };
                connection.receive_messages(&mut batch)?
            };
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
        let posted = &self.queues.posted_receives;
        let refused = {
            let mut srq = self.queues.srq.borrow_mut();
            let wr = RecvWr { wr_id: 0, sges: &[] };
            let receives = self.config.receives.min(posted.get().saturating_add(most));
            refill(posted, receives, |count| srq.post_recvs(&wr, count))
        };
        match refused {
            None => {}
            // The receives that are left are enough for now. The next check of the peers tries again.
            Some(_) if posted.get() > 0 => {}
            Some(error) => self.mark_all_broken(Failure::Refused(error)),
        }
    }

    /// Posts as many receives as the queue takes. Receives of a queue pair that is gone were used without a completion. Only after
    /// the receive CQ was seen empty.
    pub(super) fn refill_all_receives(&self) {
        self.queues.posted_receives.set(0);
        self.refill_receives(u32::MAX);
    }
}

/// What becomes of the messages of a batch: they go to the handler of the poll, and requests that it does not take to the queue.
struct BatchHandler<'p, U, H> {
    core: &'p ContextCore<U>,
    connection: &'p Rc<Connection<U>>,
    /// The queue, while requests follow one another.
    requests: Option<RefMut<'p, RequestQueue<U>>>,
    responses: &'p mut usize,
    /// So many responses are enough.
    most: usize,
    handler: &'p mut H,
}

impl<U, H: PollHandler<U>> MessageHandler<U> for BatchHandler<'_, U, H> {
    const LENDS_REQUESTS: bool = H::LENDS_REQUESTS;

    #[inline(always)]
    fn on_lent_request(&mut self, offset: usize, len: usize, reply_token: ReplyToken) -> bool {
        self.handler.on_ring_request(self.core, self.connection, offset, len, reply_token);
        !self.handler.has_enough()
    }

    #[inline(always)]
    fn on_held_request(&mut self, offset: usize, len: usize, space: HeldSpace, reply_token: ReplyToken) {
        // Rings are shorter than 4 GiB.
        let (offset, len, space) = (offset as u32, len as u32, Some(space));
        let requests = self.requests.get_or_insert_with(|| self.core.requests.borrow_mut());
        // First the slot: the request then goes there without a detour.
        let slot = requests.next_slot();
        let connection = self.connection.clone();
        slot.fill(RingRequest { connection, offset, len, space, reply_token });
    }

    #[inline(always)]
    fn on_response(&mut self, user: Option<U>, offset: usize, len: usize) -> bool {
        self.requests = None;
        if let Some(user) = user {
            *self.responses += 1;
            self.handler.on_response(user, Ok(Payload::in_ring(&self.connection.ring, offset, len)));
        }
        *self.responses < self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Random, seed};

    /// The queues of a NIC: a receive leaves the SRQ when a message arrives, and its completion waits in the CQ. The SRQ may have more
    /// room than it was asked for.
    struct Nic {
        room: u32,
        in_srq: u32,
        in_cq: u32,
        posted: Cell<u32>,
        is_drained: bool,
    }

    impl Nic {
        /// Messages arrive; `lost` of them for queue pairs that are gone, whose receives are used without a completion.
        fn receive(&mut self, messages: u32, lost: u32) {
            let messages = messages.min(self.in_srq);
            self.in_srq -= messages;
            self.in_cq += messages - lost.min(messages);
        }

        fn refill(&mut self, receives: u32) {
            let (room, in_srq) = (self.room, &mut self.in_srq);
            let refused = refill(&self.posted, receives, |count| {
                let count = count.min(room - *in_srq);
                *in_srq += count;
                if count > 0 { Ok(count) } else { Err(PostError::Full) }
            });
            assert_eq!(refused, None);
        }

        /// As `poll_recv_cq` and `refill_receives`.
        fn poll(&mut self, receives: u32) {
            let taken = self.in_cq.min(BURST as u32);
            self.in_cq -= taken;
            self.is_drained = taken < BURST as u32;
            self.posted.set(self.posted.get().saturating_sub(taken));
            if taken > 0 && 3 * self.posted.get() <= 2 * receives {
                self.refill(receives);
            } else if taken == 0 {
                self.refill(receives.min(self.posted.get() + IDLE_REFILL));
            }
        }
    }

    /// The most receives and completions at a time of a random run, as a part of what the CQ was asked for. `only_if_drained`:
    /// all receives are posted again only if the CQ was seen empty.
    fn fullest(random: &mut Random, only_if_drained: bool) -> f64 {
        let receives = 1 + random.below(200) as u32;
        let room = receives + random.below(receives.into()) as u32;
        let mut nic = Nic { room, in_srq: 0, in_cq: 0, posted: Cell::new(0), is_drained: true };
        nic.refill(receives);
        let mut highest = 0;
        for _ in 0..2000 {
            match random.below(4) {
                0 => nic.receive(random.below(2 * u64::from(room)) as u32, 0),
                1 => nic.receive(random.below(8) as u32, random.below(8) as u32),
                2 => nic.poll(receives),
                // The check of the peers. Messages arrive between the look at the CQ and the posts.
                _ if nic.is_drained || !only_if_drained => {
                    nic.receive(random.below(2 * u64::from(room)) as u32, 0);
                    nic.posted.set(0);
                    nic.refill(receives);
                    // It is done again only after another poll.
                    nic.is_drained = false;
                }
                _ => {}
            }
            highest = highest.max(nic.in_srq + nic.in_cq);
        }
        // Receives that were lost come back.
        while !nic.is_drained {
            nic.poll(receives);
        }
        nic.posted.set(0);
        nic.refill(receives);
        assert!(nic.in_srq >= receives, "{} of {receives} receives", nic.in_srq);
        f64::from(highest) / f64::from(recv_cq_depth(receives))
    }

    #[test]
    fn receives_and_completions_never_exceed_the_completion_queue() {
        let mut random = Random(seed());
        let highest = (0..300).map(|_| fullest(&mut random, true)).fold(0.0, f64::max);
        println!("at most {highest:.2} of the completion queue was used");
        assert!(highest <= 1.0, "{highest} times the completion queue");
        // The same run finds an overflow if the rule is broken.
        let highest = (0..300).map(|_| fullest(&mut random, false)).fold(0.0, f64::max);
        assert!(highest > 1.0, "the test does not notice a broken rule: {highest}");
    }
}
