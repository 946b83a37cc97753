//! The state of one connection: its queue pair, its rings, and the [`Flow`] that decides what goes where.
//!
//! - `mod.rs`: connect, call, reply, receive, fail.
//! - `posting.rs`: what is posted, by the rules of [`flush_policy`], and what its completions mean.
//! - `send_queue.rs`: the send queue and its account.
//! - `position_reads.rs`: when the peer's consumer position is read.
//! - `bulk_caller.rs`, `bulk_callee.rs`: payloads that do not fit into a ring.
//! - `raw.rs`: READ and WRITE of the application.
//!
//! A connection never calls into its context. The context polls the completion queues and decides when to flush.
//!
//! From the moment a failure is found ([`ConnectionCore::stop_receiving`]), nothing that the peer has written is parsed any more: not the
//! rest of the batch, and not the batches behind it. So what was attached to a call is returned exactly once, by `fail`.

mod bulk_callee;
mod bulk_caller;
mod position_reads;
mod posting;
mod raw;
mod send_queue;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{
    CallId, CallRefused, Content, Flow, FlowParams, Message, ReplyError, ReplyRefused, ReplyToken,
    RetainedSpace, RingBytes,
};

use super::address::{ConnectionAddress, ConnectionId};
use super::bulk_state::{BulkState, agreed_bulk_limit, bulk_limit};
use super::config::ConnectionConfig;
use super::counters::RunningCounters;
use super::error::{CallError, CallFailed, ConnectError, Failure, NoReply, NotCalled, NotReplied};
use super::flush_policy::{self, BATCHES_AHEAD, SendTiming};
use super::operation::RawCompletion;
use super::receive_policy::MAX_LINES_AHEAD;
use super::region_pool::PooledRegion;
use crate::device::{Access, ConnectConfig, DeviceError, Mr, Pd, QpState, RcQp, RemoteAddr, RingRegion};
use crate::memory::prefetch::{self, CACHE_LINE};
use crate::wait::Deadlines;

use position_reads::PositionReads;
pub(super) use posting::FlushOutcome;
pub(super) use send_queue::SendQueue;

/// The state of a connection, shared by its [`Connection`](super::Connection), its requests and its context.
pub(super) struct ConnectionCore<U> {
    /// Index and generation in the context's table.
    pub(super) key: u32,
    pub(super) qp_num: u32,
    /// The receive ring, which the peer writes to.
    pub(super) ring: RingRegion,
    /// Whether it is in the context's list of connections to flush.
    pub(super) is_scheduled: Cell<bool>,
    /// Whether requests may have become complete because one before them was refused.
    pub(super) has_refused_request: Cell<bool>,
    /// Whether a failure was found, so that nothing is parsed any more.
    has_stopped_receiving: Cell<bool>,
    state: RefCell<ConnectionState<U>>,
}

struct ConnectionState<U> {
    queue: SendQueue,
    /// The consumer position of this side, for the peer to READ.
    own_position: Mr,
    /// Where a READ of the peer's consumer position goes.
    peer_position: Mr,
    config: ConnectionConfig,
    connected: Option<ConnectedState<U>>,
    failure: Option<Failure>,
    /// Polls that have delayed the open batch, and since when.
    delayed_polls: u32,
    delayed_since: Option<Instant>,
    position_reads: PositionReads,
    /// Whether a batch arrived since the last probe.
    received_since_probe: bool,
    deadlines: Deadlines<CallId>,
    bulk: Option<Box<BulkState>>,
    pd: Rc<Pd>,
    /// Operations of the application that ended with the connection.
    raw_completions: VecDeque<RawCompletion>,
    /// What was attached to the call whose invalid response ended the connection. There is at most one: nothing is parsed
    /// after it.
    unreported_user: Option<U>,
}

/// What exists once the peer's address is known.
struct ConnectedState<U> {
    flow: Flow<U>,
    /// The longest bulk payload of this connection; zero if it carries none.
    max_bulk: u32,
    /// The staging ring: batches are built here at the offsets that they will have in the peer's ring.
    staging: Mr,
    peer_ring: RemoteAddr,
    /// The word with the peer's consumer position.
    peer_word: RemoteAddr,
    /// The consumer position of this side that was stored last for the peer to READ.
    published_position: u64,
    /// Where the last batches ended.
    batch_ends: [u64; BATCHES_AHEAD],
}

impl RingBytes for RingRegion {
    #[inline]
    fn load_words(&self, offset: usize) -> [u64; 2] {
        // The protocol stays inside the ring, whose size it knows.
        RingRegion::load_words(self, offset)
    }
}

/// A message that has arrived. Its payload is in the ring, or in the completion that it came with, until the next one is asked for.
pub(super) enum Arrival<U> {
    Request {
        reply_token: ReplyToken,
        offset: usize,
        len: usize,
    },
    /// `user` is `None` if the call was abandoned.
    Response {
        user: Option<U>,
        offset: usize,
        len: usize,
    },
    Bulk(BulkArrival<U>),
}

/// What a bulk message has become.
pub(super) enum BulkArrival<U> {
    /// A response in bulk memory.
    Response { user: Option<U>, region: PooledRegion, len: usize },
    /// The callee has no memory for the request.
    Refused { user: Option<U> },
    /// A request was queued: it is a bulk request, or it is behind one.
    RequestQueued,
}

impl<U> ConnectionCore<U> {
    pub(super) fn new(
        key: u32,
        pd: &Rc<Pd>,
        qp: RcQp,
        max_inline: u32,
        config: ConnectionConfig,
        counters: &Rc<RunningCounters>,
    ) -> Result<ConnectionCore<U>, DeviceError> {
        let ring = pd.allocate(config.ring, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let own_position = pd.allocate(8, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let peer_position = pd.allocate(8, Access::LOCAL_WRITE)?;
        let qp_num = qp.qp_num();
        let state = ConnectionState {
            queue: SendQueue::new(qp, key, max_inline, counters.clone()),
            own_position,
            peer_position,
            config,
            connected: None,
            failure: None,
            delayed_polls: 0,
            delayed_since: None,
            position_reads: PositionReads::new(),
            received_since_probe: false,
            deadlines: Deadlines::default(),
            bulk: None,
            pd: pd.clone(),
            raw_completions: VecDeque::new(),
            unreported_user: None,
        };
        Ok(ConnectionCore {
            key,
            qp_num,
            ring: RingRegion::new(ring),
            is_scheduled: Cell::new(false),
            has_refused_request: Cell::new(false),
            has_stopped_receiving: Cell::new(false),
            state: RefCell::new(state),
        })
    }

    pub(super) fn address(&self) -> ConnectionAddress {
        let state = self.state.borrow();
        let (ring, position) = (self.ring.remote(), state.own_position.remote());
        let info = ConnectInfo {
            ring_addr: ring.addr,
            ring_size: self.ring.len() as u64,
            consumer_addr: position.addr,
            credit_limit: state.config.credit as u64,
            ring_rkey: ring.rkey,
            consumer_rkey: position.rkey,
            bulk_limit: u64::from(bulk_limit(&state.config)),
        };
        ConnectionAddress::new(state.queue.qp.address(), &info)
    }

    pub(super) fn connect(
        &self,
        pd: &Pd,
        peer: &ConnectionAddress,
        connect: &ConnectConfig,
    ) -> Result<(), ConnectError> {
        let mut state = self.state.borrow_mut();
        if state.connected.is_some() || state.failure.is_some() {
            return Err(ConnectError::Connected);
        }
        let info = peer.info().map_err(ConnectError::Address)?;
        let params = FlowParams {
            ring: self.ring.len() as u64,
            peer_ring: info.ring_size,
            credit_limit: state.config.credit as u64,
            peer_credit_limit: info.credit_limit,
            pending_calls: state.config.pending_calls,
            compact: flush_policy::sends_compact(state.queue.account.max_inline),
        };
        let flow = Flow::new(&params)?;
        let limit = state.config.max_peer_ring.max(self.ring.len()) as u64;
        if info.ring_size > limit {
            return Err(ConnectError::PeerRing { size: info.ring_size, limit });
        }
        let staging = pd.allocate(info.ring_size as usize, Access::LOCAL_WRITE)?;
        let connect = ConnectConfig { access: Access::REMOTE_READ | Access::REMOTE_WRITE, ..*connect };
        state.queue.qp.connect(&peer.qp(), &connect)?;
        let peer_ring = RemoteAddr { addr: info.ring_addr, rkey: info.ring_rkey };
        let peer_word = RemoteAddr { addr: info.consumer_addr, rkey: info.consumer_rkey };
        let max_bulk = agreed_bulk_limit(&state.config, &info, &flow);
        let batch_ends = [0; BATCHES_AHEAD];
        state.connected = Some(ConnectedState {
            flow,
            max_bulk,
            staging,
            peer_ring,
            peer_word,
            published_position: 0,
            batch_ends,
        });
        Ok(())
    }

    /// Makes a call. It goes out at once if it `may_go_alone` and is the only one; or with the next flush.
    #[inline(always)]
    pub(super) fn call(
        &self,
        payload: &[u8],
        response_len: usize,
        user: U,
        deadline: Option<Instant>,
        may_go_alone: bool,
    ) -> Result<SendTiming, CallError<U>> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, state.failure) else {
            let cause = state.failure.map_or(NotCalled::NotConnected, NotCalled::Failed);
            return Err(CallError { cause, user });
        };
        let goes_alone = may_go_alone && connected.flow.is_only_call();
        match connected.flow.call(Content::Bytes, payload.len(), response_len, user) {
            Ok((call, placement)) => {
                state.deadlines.set(call.index(), call, deadline);
                Ok(connected.send(&mut state.queue, &placement, payload, goes_alone))
            }
            Err(CallRefused { cause, user }) => {
                state.call_after_refusal(cause, payload, response_len, user, deadline)
            }
        }
    }

    /// Replies to a request, and releases its ring space. The reply goes out at once if it is the last; or with the next flush.
    #[inline(always)]
    pub(super) fn reply(
        &self,
        token: ReplyToken,
        space: &mut Option<RetainedSpace>,
        payload: &[u8],
    ) -> Result<SendTiming, NoReply> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, state.failure) else {
            return Err(NoReply::ended(state.failure.unwrap_or(Failure::Closed)));
        };
        let goes_alone = flush_policy::may_go_alone(payload.len()) && connected.flow.is_last_reply(&token);
        let placement = match connected.flow.reply(Content::Bytes, token, payload.len()) {
            Ok(placement) => placement,
            Err(ReplyRefused { cause: ReplyError::TooLong { len, max }, token }) => {
                return Err(NoReply { cause: NotReplied::TooLong { len, max }, token: Some(token) });
            }
            Err(_) => return Err(NoReply::ended(Failure::Closed)),
        };
        if let Some(space) = space.take() {
            connected.flow.release(space);
        }
        let timing = connected.send(&mut state.queue, &placement, payload, goes_alone);
        if timing == SendTiming::Sent {
            connected.publish_position(&state.own_position);
        }
        Ok(timing)
    }

    /// Notes that a failure was found: nothing is parsed from here on.
    pub(super) fn stop_receiving(&self) {
        self.has_stopped_receiving.set(true);
    }

    #[inline]
    pub(super) fn has_stopped_receiving(&self) -> bool {
        self.has_stopped_receiving.get()
    }

    /// Accepts the batch that an immediate announced. `head`: that of a compact batch, if it came with the completion.
    #[inline(always)]
    pub(super) fn accept(&self, imm: u32, head: Option<&[u64; 2]>) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        state.received_since_probe = true;
        let Some(connected) = &mut state.connected else { return Ok(()) };
        let accepted = match head {
            Some(head) => connected.flow.accept(imm, head),
            None => {
                // All lines at once: one after the other, each of them would come from the cache of the sender while nothing else
                // is done.
                let batch = connected.flow.announced_batch(imm);
                let end = batch.end.min(batch.start + MAX_LINES_AHEAD * CACHE_LINE);
                for at in (batch.start..end).step_by(CACHE_LINE) {
                    prefetch::for_read(self.ring.as_ptr().wrapping_add(at));
                }
                connected.flow.accept(imm, &self.ring)
            }
        };
        accepted.map_err(Failure::Violation)
    }

    /// The next message of the batch, `None` at its end. If the batch `is_copied`, because it came with the completion, its ring space is free
    /// at once.
    #[inline(always)]
    pub(super) fn next_message(&self, is_copied: bool) -> Result<Option<Arrival<U>>, Failure> {
        // A callback may have closed the connection, or a post of the callback has failed.
        if self.has_stopped_receiving() {
            return Ok(None);
        }
        let mut guard = self.state.borrow_mut();
        let state = &mut *guard;
        let Some(connected) = &mut state.connected else { return Ok(None) };
        let Some(message) = connected.flow.next_message(&self.ring).map_err(Failure::Violation)? else {
            return Ok(None);
        };
        let arrival = match message {
            Message::Request { reply_token, offset, len, is_bulk: false } if state.bulk.is_none() => {
                connected.finish_copied(is_copied, &state.own_position);
                drop(guard);
                return Ok(Some(Arrival::Request { reply_token, offset, len }));
            }
            Message::Response { user, offset, len, is_bulk: false, .. } if state.bulk.is_none() => {
                connected.finish_copied(is_copied, &state.own_position);
                drop(guard);
                return Ok(Some(Arrival::Response { user, offset, len }));
            }
            Message::Request { reply_token, offset, len, is_bulk } => {
                let message = Message::Request { reply_token, offset, len, is_bulk };
                state.receive_with_bulk(&self.ring, message)
            }
            Message::Response { call, user, offset, len, is_bulk } => {
                let message = Message::Response { call, user, offset, len, is_bulk };
                state.receive_with_bulk(&self.ring, message)
            }
        };
        if let Some(connected) = &mut state.connected {
            connected.finish_copied(is_copied, &state.own_position);
        }
        arrival.map(Some)
    }

    /// Whether a flush may have something to do though no message was placed.
    #[inline]
    pub(super) fn may_have_news(&self) -> bool {
        let state = self.state.borrow();
        state.connected.as_ref().is_some_and(|connected| connected.flow.may_have_news())
    }

    /// Retains the ring space of the message that was returned last.
    pub(super) fn retain(&self) -> Option<RetainedSpace> {
        self.state.borrow_mut().connected.as_mut()?.flow.retain()
    }

    /// Frees the ring space of the message that was returned last, before the next one is asked for. Not if it is retained.
    pub(super) fn finish_message(&self) {
        if let Some(connected) = &mut self.state.borrow_mut().connected {
            connected.flow.finish_message();
        }
    }

    /// Whether the batch that was accepted last has no further message.
    pub(super) fn batch_ended(&self) -> bool {
        let state = self.state.borrow();
        state.connected.as_ref().is_none_or(|connected| connected.flow.batch_ended())
    }

    #[inline]
    pub(super) fn release(&self, space: RetainedSpace) {
        if let Some(connected) = &mut self.state.borrow_mut().connected {
            connected.flow.release(space);
        }
    }

    /// Whether a READ, or another operation with a completion of its own, is under way.
    pub(super) fn has_operations(&self) -> bool {
        let state = self.state.borrow();
        state.position_reads.is_under_way || state.bulk.as_ref().is_some_and(|bulk| bulk.has_operations())
    }

    /// When the next READ of the peer's position is due, if it has to wait.
    pub(super) fn next_position_read(&self) -> Option<Instant> {
        self.state.borrow().position_reads.next()
    }

    /// Ends the connection. Returns what was attached to its pending calls.
    pub(super) fn fail(&self, cause: Failure) -> Vec<U> {
        self.stop_receiving();
        let mut state = self.state.borrow_mut();
        if state.failure.is_some() {
            return Vec::new();
        }
        state.failure = Some(cause);
        // So that the peer notices too. A queue pair that cannot be moved to the error state is in it already.
        state.queue.qp.fail().ok();
        state.deadlines = Deadlines::default();
        state.position_reads = PositionReads::new();
        state.end_operations(ConnectionId(self.key), cause);
        let unreported = state.unreported_user.take();
        let pending = state.connected.as_mut().map(|connected| connected.flow.abandon_all());
        unreported.into_iter().chain(pending.into_iter().flatten()).collect()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.borrow().failure
    }

    /// Whether the device has moved the queue pair to the error state.
    pub(super) fn is_broken(&self) -> bool {
        let state = self.state.borrow();
        state.failure.is_none() && state.connected.is_some() && state.queue.qp.state() == QpState::Error
    }

    /// Calls that wait for their response.
    pub(super) fn pending_calls(&self) -> usize {
        let state = self.state.borrow();
        match &state.connected {
            Some(connected) if state.failure.is_none() => connected.flow.state().pending,
            _ => 0,
        }
    }

    /// Ends calls whose deadline has passed. Returns the earliest deadline of a call that is pending, or an earlier time.
    pub(super) fn expire_deadlines(
        &self,
        now: Instant,
        expired: &mut VecDeque<(U, CallFailed)>,
    ) -> Option<Instant> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let connected = state.connected.as_mut()?;
        state.deadlines.expire(now, |call, has_passed| {
            if has_passed {
                let user = connected.flow.abandon(call);
                expired.extend(user.map(|user| (user, CallFailed::TimedOut)));
            }
            connected.flow.is_pending(call)
        });
        state.deadlines.next()
    }

    /// The longest request and the longest response.
    pub(super) fn max_lengths(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let ConnectedState { flow, max_bulk, .. } = state.connected.as_ref()?;
        let (request, response) = (flow.max_request_len(), flow.max_response_len());
        Some((request.max(*max_bulk as usize), response.max(*max_bulk as usize)))
    }

    /// The longest request and the longest response that travel in the rings.
    pub(super) fn max_ring_lengths(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let flow = &state.connected.as_ref()?.flow;
        Some((flow.max_request_len(), flow.max_response_len()))
    }
}

impl<U> ConnectedState<U> {
    /// Frees the ring space of the message that was taken last, if it came with its completion.
    #[inline]
    fn finish_copied(&mut self, is_copied: bool, own_position: &Mr) {
        if is_copied {
            self.flow.finish_message();
            self.publish_position(own_position);
        }
    }
}

impl<U> ConnectionState<U> {
    /// A message of a connection that has bulk messages: one of them, or one that may have to wait for one.
    #[inline(never)]
    fn receive_with_bulk(&mut self, ring: &RingRegion, message: Message<U>) -> Result<Arrival<U>, Failure> {
        let (has_queued, has_calls) = self
            .bulk
            .as_ref()
            .map_or((false, false), |bulk| (bulk.has_queued_requests(), bulk.has_bulk_calls()));
        match message {
            Message::Request { reply_token, offset, len, is_bulk } if is_bulk || has_queued => {
                self.queue_request(ring, offset, len, is_bulk, reply_token)?;
                Ok(Arrival::Bulk(BulkArrival::RequestQueued))
            }
            Message::Request { reply_token, offset, len, .. } => {
                Ok(Arrival::Request { reply_token, offset, len })
            }
            Message::Response { call, user, offset, len, is_bulk } if is_bulk || has_calls => {
                self.accept_bulk_response(ring, call, user, offset, len, is_bulk)
            }
            Message::Response { user, offset, len, .. } => Ok(Arrival::Response { user, offset, len }),
        }
    }

    fn bulk(&mut self) -> &mut BulkState {
        self.bulk.get_or_insert_with(|| Box::new(BulkState::new(&self.config)))
    }
}
