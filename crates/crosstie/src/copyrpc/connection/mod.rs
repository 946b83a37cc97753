//! One connection: its queue pair, its rings, and the protocol that decides what goes where.
//!
//! - `mod.rs`: connect, call, reply, receive, fail.
//! - `posting.rs`: what is posted to the send queue, by the rules of [`flush_policy`], and what its
//!   completions mean.
//! - `position_reads.rs`: when the peer's consumer position is read.
//! - `bulk_caller.rs`, `bulk_callee.rs`: payloads that do not fit into a ring.
//! - `raw.rs`: READ and WRITE of the application.
//!
//! A connection never calls into its context. The context polls the completion queues and decides when to flush.
//!
//! From the moment a failure is found ([`Connection::stop_receiving`]), nothing that the peer has written is parsed any more: not the
//! rest of the batch, and not the batches behind it. So what was attached to a call is returned exactly once, by `fail`.

mod bulk_callee;
mod bulk_caller;
mod position_reads;
mod posting;
mod raw;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::{CompactHead, ConnectInfo};
use crosstie_protocol::copyrpc::{
    CompactMessage, Endpoint as Protocol, FlowParams, HeldSpace, ReceivedMessage, ReceivedRequest,
    ReceivedResponse, Refusal, ReplyError, ReplyToken, RingBytes, UsualMessage,
};

use super::address::{EndpointAddress, EndpointId};
use super::bulk_state::{BulkState, agreed_bulk_limit, bulk_limit};
use super::config::EndpointConfig;
use super::counters::RunningCounters;
use super::deadlines::Deadlines;
use super::error::{CallFailed, ConnectError, Failure, NotCalled, NotReplied};
use super::flush_policy::{self, BATCHES_AHEAD, LARGE_BATCH, SendTiming, WriteSignaling};
use super::operation::RawCompletion;
use super::region_pool::PooledRegion;
use crate::device::{Access, ConnectConfig, DeviceError, Mr, Pd, QpState, RcQp, RemoteAddr, RingRegion};
use crate::memory::prefetch::{self, CACHE_LINE};

use position_reads::PositionReads;
pub(super) use posting::FlushOutcome;

/// A connection, shared by its endpoint, its requests and its context.
pub(super) struct Connection<U> {
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
    qp: RcQp,
    /// The consumer position of this side, for the peer to READ.
    own_position: Mr,
    /// Where a READ of the peer's consumer position goes.
    peer_position: Mr,
    config: EndpointConfig,
    connected: Option<ConnectedState<U>>,
    failure: Option<Failure>,
    /// Work requests in the send queue that are not known to be complete.
    outstanding: u32,
    signaling: WriteSignaling,
    /// Bytes that the queue pair takes inline.
    max_inline: usize,
    /// Polls that have held the open batch back, and since when.
    held_polls: u32,
    held_since: Option<Instant>,
    position_reads: PositionReads,
    /// Whether a batch arrived since the last probe.
    received_since_probe: bool,
    deadlines: Deadlines,
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
    protocol: Protocol<U>,
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
    #[inline(always)]
    fn load_words(&self, offset: usize) -> [u64; 2] {
        // The protocol stays inside the ring, whose size it knows.
        RingRegion::load_words(self, offset)
    }
}

/// What becomes of the messages of a batch. They are at an offset of the ring, where they are lent. The methods return whether to go on.
pub(super) trait MessageHandler<U> {
    /// A short request.
    fn on_request(&mut self, offset: usize, len: usize, reply_token: ReplyToken) -> bool;

    /// A response. `user` is `None` if the call was abandoned.
    fn on_response(&mut self, user: Option<U>, offset: usize, len: usize) -> bool;
}

/// A message that is not short, or that has to wait for one that is not. If it is in the ring, it is lent.
pub(super) enum OtherMessage<U> {
    /// A short request in the ring.
    Request { offset: usize, len: usize, reply_token: ReplyToken },
    /// A response in the ring. `user` is `None` if the call was abandoned.
    Response { user: Option<U>, offset: usize, len: usize },
    /// A response in bulk memory.
    BulkResponse { user: Option<U>, region: PooledRegion, len: usize },
    /// The callee has no memory for the request.
    Refused { user: Option<U> },
    /// A request was queued: it is a bulk request, or it is behind one.
    RequestQueued,
}

impl<U> Connection<U> {
    pub(super) fn new(
        key: u32,
        pd: &Rc<Pd>,
        qp: RcQp,
        max_inline: u32,
        config: EndpointConfig,
    ) -> Result<Connection<U>, DeviceError> {
        let ring = pd.allocate(config.ring, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let own_position = pd.allocate(8, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let peer_position = pd.allocate(8, Access::LOCAL_WRITE)?;
        let state = ConnectionState {
            own_position,
            peer_position,
            config,
            connected: None,
            failure: None,
            outstanding: 0,
            signaling: WriteSignaling::new(),
            max_inline: max_inline as usize,
            held_polls: 0,
            held_since: None,
            position_reads: PositionReads::new(),
            received_since_probe: false,
            deadlines: Deadlines::default(),
            bulk: None,
            pd: pd.clone(),
            raw_completions: VecDeque::new(),
            unreported_user: None,
            qp,
        };
        let qp_num = state.qp.qp_num();
        Ok(Connection {
            key,
            qp_num,
            ring: RingRegion::new(ring),
            is_scheduled: Cell::new(false),
            has_refused_request: Cell::new(false),
            has_stopped_receiving: Cell::new(false),
            state: RefCell::new(state),
        })
    }

    pub(super) fn address(&self) -> EndpointAddress {
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
        EndpointAddress::new(state.qp.address(), &info)
    }

    pub(super) fn connect(
        &self,
        pd: &Pd,
        peer: &EndpointAddress,
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
            compact: flush_policy::sends_compact(state.max_inline),
        };
        let protocol = Protocol::new(&params)?;
        let limit = state.config.max_peer_ring.max(self.ring.len()) as u64;
        if info.ring_size > limit {
            return Err(ConnectError::PeerRing { size: info.ring_size, limit });
        }
        let staging = pd.allocate(info.ring_size as usize, Access::LOCAL_WRITE)?;
        let connect = ConnectConfig { access: Access::REMOTE_READ | Access::REMOTE_WRITE, ..*connect };
        state.qp.connect(&peer.qp(), &connect)?;
        let peer_ring = RemoteAddr { addr: info.ring_addr, rkey: info.ring_rkey };
        let peer_word = RemoteAddr { addr: info.consumer_addr, rkey: info.consumer_rkey };
        let max_bulk = agreed_bulk_limit(&state.config, &info, &protocol);
        let batch_ends = [0; BATCHES_AHEAD];
        state.connected = Some(ConnectedState {
            protocol,
            max_bulk,
            staging,
            peer_ring,
            peer_word,
            published_position: 0,
            batch_ends,
        });
        Ok(())
    }

    /// Makes a call and posts it at once, if it can go out alone. Returns `user` if the call was not made.
    #[inline(always)]
    pub(super) fn call_alone(
        &self,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
        counters: &RunningCounters,
    ) -> Option<U> {
        let mut state = self.state.borrow_mut();
        if !state.has_no_calls() {
            return Some(user);
        }
        state.post_call_alone(self.key, payload, allowance, user, deadline, counters)
    }

    /// Makes a call that can join the open batch, which goes out with the next poll. Returns `user` otherwise, and why the call is refused. No
    /// reason: [`place_call`](Connection::place_call) makes it, or says why not.
    #[inline(always)]
    pub(super) fn append_call(
        &self,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), (Option<Refusal>, U)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(connected) = &mut state.connected else { return Err((None, user)) };
        if flush_policy::is_direct_payload(payload.len(), state.max_inline) {
            return Err((None, user));
        }
        // Nothing can be appended after a failure.
        let (call, placement) =
            connected.protocol.append_call(payload.len(), allowance, LARGE_BATCH, user)?;
        state.deadlines.record(call, deadline, state.config.pending_calls);
        connected.write(&placement, payload);
        debug_assert!(self.is_scheduled.get());
        Ok(())
    }

    /// Makes a call that cannot join the open batch. `refusal`: why it is refused, if that is known.
    #[inline(never)]
    pub(super) fn place_call(
        &self,
        payload: &[u8],
        allowance: usize,
        (refusal, user): (Option<Refusal>, U),
        deadline: Option<Instant>,
        counters: &RunningCounters,
    ) -> Result<SendTiming, (NotCalled, U)> {
        let mut state = self.state.borrow_mut();
        match refusal {
            None => state.place_call(self.key, payload, allowance, user, deadline, counters),
            Some(refusal) => state
                .call_after_refusal(refusal, payload, allowance, user, deadline)
                .map(|()| SendTiming::WithNextPoll),
        }
    }

    /// Replies to a request, and releases its ring space.
    #[inline(always)]
    pub(super) fn reply(
        &self,
        mut token: ReplyToken,
        space: &mut Option<HeldSpace>,
        payload: &[u8],
        counters: &RunningCounters,
    ) -> Result<SendTiming, (NotReplied, Option<ReplyToken>)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(connected) = &mut state.connected else { return Err((Failure::Closed.into(), None)) };
        // Nothing can be appended after a failure.
        if !flush_policy::is_direct_payload(payload.len(), state.max_inline) {
            token = match connected.protocol.append_reply(token, payload.len(), LARGE_BATCH) {
                Ok(placement) => {
                    connected.write(&placement, payload);
                    if let Some(space) = space.take() {
                        connected.protocol.release(space);
                    }
                    return Ok(SendTiming::WithItsBatch);
                }
                Err((None, token)) => token,
                Err((Some(ReplyError::TooLong { max, .. }), token)) => {
                    return Err((NotReplied::TooLong { len: payload.len(), max }, Some(token)));
                }
                Err((Some(_), _)) => return Err((Failure::Closed.into(), None)),
            };
        }
        if let Some(failure) = state.failure {
            return Err((failure.into(), None));
        }
        if connected.protocol.is_last_reply(&token) {
            token = match state.post_reply_alone(self.key, token, space, payload, counters) {
                Ok(()) => return Ok(SendTiming::Sent),
                Err(token) => token,
            };
        }
        state.place_reply(self.key, token, space, payload, counters)
    }

    /// Notes that a failure was found: nothing is parsed from here on.
    pub(super) fn stop_receiving(&self) {
        self.has_stopped_receiving.set(true);
    }

    #[inline]
    pub(super) fn has_stopped_receiving(&self) -> bool {
        self.has_stopped_receiving.get()
    }

    /// Accepts the batch that an immediate announced.
    #[inline]
    pub(super) fn accept_batch(&self, imm: u32) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        state.received_since_probe = true;
        let Some(connected) = &mut state.connected else { return Ok(()) };
        // All lines at once: one after the other, each of them would come from the cache of the sender while nothing else is done.
        let batch = connected.protocol.announced_batch(imm);
        let end = batch.end.min(batch.start + flush_policy::MAX_LINES_AHEAD * CACHE_LINE);
        let mut at = batch.start;
        while at < end {
            prefetch::for_read(self.ring.as_ptr().wrapping_add(at));
            at += CACHE_LINE;
        }
        connected.protocol.accept_batch(imm, &self.ring).map_err(Failure::Violation)
    }

    /// As [`accept_compact`](Connection::accept_compact), for a request, in the usual case: the receive ring is free, and everything is as it
    /// should be. `None`: nothing was accepted.
    #[inline(always)]
    pub(super) fn accept_compact_request(
        &self,
        payload_len: u32,
        head: &CompactHead,
    ) -> Option<(ReplyToken, bool)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, &state.bulk) else { return None };
        let reply_token = connected.protocol.try_accept_request(payload_len, head)?;
        connected.publish_position(&state.own_position);
        let may_have_news = connected.protocol.may_have_news();
        state.received_since_probe = true;
        Some((reply_token, may_have_news))
    }

    /// As [`accept_compact_request`](Connection::accept_compact_request), for a response. Returns what was attached to its call, if it was not
    /// abandoned.
    #[inline(always)]
    pub(super) fn accept_compact_response(
        &self,
        payload_len: u32,
        head: &CompactHead,
    ) -> Option<(Option<U>, bool)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, &state.bulk) else { return None };
        let user = connected.protocol.try_accept_response(payload_len, head)?;
        connected.publish_position(&state.own_position);
        let may_have_news = connected.protocol.may_have_news();
        state.received_since_probe = true;
        Some((user, may_have_news))
    }

    /// Accepts a compact batch whose bytes came with the completion. Returns its message, and whether a flush may have something to
    /// do because of it. `None`: nothing was accepted, because of bulk messages that this one may have to wait for; the batch is in
    /// the ring, too.
    pub(super) fn accept_compact(
        &self,
        payload_len: u32,
        head: &CompactHead,
    ) -> Result<Option<(CompactMessage<U>, bool)>, Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (Some(connected), None) = (&mut state.connected, &state.bulk) else { return Ok(None) };
        state.received_since_probe = true;
        let message = connected.protocol.accept_compact(payload_len, head).map_err(Failure::Violation)?;
        let may_have_news = connected.protocol.may_have_news();
        connected.publish_position(&state.own_position);
        Ok(Some((message, may_have_news)))
    }

    /// Continues with the batch. Returns at its end, at a message that the handler does not take, or if the handler has enough.
    #[inline(always)]
    pub(super) fn receive_messages<H: MessageHandler<U>>(
        &self,
        handler: &mut H,
    ) -> Result<Option<OtherMessage<U>>, Failure> {
        // Otherwise a callback has closed the endpoint, or a post of the callback has failed.
        while !self.has_stopped_receiving() {
            let mut guard = self.state.borrow_mut();
            let state = &mut *guard;
            let Some(connected) = &mut state.connected else { break };
            let message = match &state.bulk {
                Some(bulk) if bulk.has_queued_requests() || bulk.has_bulk_calls() => None,
                _ => connected.protocol.next_usual_message(&self.ring),
            };
            let goes_on = match message {
                Some(UsualMessage::Request { offset, len, reply_token }) => {
                    drop(guard);
                    handler.on_request(offset, len, reply_token)
                }
                Some(UsualMessage::Response { user, offset, len }) => {
                    drop(guard);
                    handler.on_response(user, offset, len)
                }
                None => return state.receive_other(&self.ring),
            };
            if !goes_on {
                self.pass();
                break;
            }
        }
        Ok(None)
    }

    /// Holds the ring space of the message that was returned last.
    pub(super) fn hold(&self) -> Option<HeldSpace> {
        self.state.borrow_mut().connected.as_mut()?.protocol.hold()
    }

    /// Ends the loan of the message that was returned last, before the next one is asked for.
    pub(super) fn pass(&self) {
        if let Some(connected) = &mut self.state.borrow_mut().connected {
            connected.protocol.pass();
        }
    }

    /// Whether the batch that was accepted last has no further message.
    pub(super) fn has_received_batch(&self) -> bool {
        let state = self.state.borrow();
        state.connected.as_ref().is_none_or(|connected| connected.protocol.has_received_batch())
    }

    #[inline]
    pub(super) fn release(&self, space: HeldSpace) {
        if let Some(connected) = &mut self.state.borrow_mut().connected {
            connected.protocol.release(space);
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
        state.qp.fail().ok();
        state.deadlines = Deadlines::default();
        state.position_reads = PositionReads::new();
        state.end_operations(EndpointId(self.key), cause);
        let unreported = state.unreported_user.take();
        let pending = state.connected.as_mut().map(|connected| connected.protocol.abandon_all());
        unreported.into_iter().chain(pending.into_iter().flatten()).collect()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.borrow().failure
    }

    /// Whether the device has moved the queue pair to the error state.
    pub(super) fn is_broken(&self) -> bool {
        let state = self.state.borrow();
        state.failure.is_none() && state.connected.is_some() && state.qp.state() == QpState::Error
    }

    /// Calls that wait for their response.
    pub(super) fn pending_calls(&self) -> usize {
        let state = self.state.borrow();
        match &state.connected {
            Some(connected) if state.failure.is_none() => connected.protocol.flow_state().pending,
            _ => 0,
        }
    }

    /// Ends calls whose deadline has passed. Returns the earliest deadline of a call that is pending.
    pub(super) fn expire_deadlines(
        &self,
        now: Instant,
        expired: &mut VecDeque<(U, CallFailed)>,
    ) -> Option<Instant> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let connected = state.connected.as_mut()?;
        while let Some(call) = state.deadlines.pop_expired(now) {
            let user = connected.protocol.abandon(call);
            expired.extend(user.map(|user| (user, CallFailed::TimedOut)));
        }
        state.deadlines.earliest(|call| connected.protocol.is_pending(call))
    }

    /// The longest request and the longest response.
    pub(super) fn max_lengths(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let ConnectedState { protocol, max_bulk, .. } = state.connected.as_ref()?;
        let (request, response) = (protocol.max_request_len(), protocol.max_response_len());
        Some((request.max(*max_bulk) as usize, response.max(*max_bulk) as usize))
    }

    /// The longest request and the longest response that travel in the rings.
    pub(super) fn max_ring_lengths(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let protocol = &state.connected.as_ref()?.protocol;
        Some((protocol.max_request_len() as usize, protocol.max_response_len() as usize))
    }
}

impl<U> ConnectionState<U> {
    /// Makes a call that cannot join the open batch.
    fn place_call(
        &mut self,
        key: u32,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
        counters: &RunningCounters,
    ) -> Result<SendTiming, (NotCalled, U)> {
        if let Some(failure) = self.failure {
            return Err((failure.into(), user));
        }
        let direct = self.can_post_directly(payload.len());
        let Some(connected) = &mut self.connected else { return Err((NotCalled::NotConnected, user)) };
        let (Ok(len), Ok(response)) = (u32::try_from(payload.len()), u32::try_from(allowance)) else {
            return Err((NotCalled::TooLong(payload.len().max(allowance)), user));
        };
        let (call, placement) = match connected.protocol.call(len, response, user) {
            Ok(called) => called,
            Err((refusal, user)) => {
                return self
                    .call_after_refusal(refusal, payload, allowance, user, deadline)
                    .map(|()| SendTiming::WithNextPoll);
            }
        };
        self.deadlines.record(call, deadline, self.config.pending_calls);
        let is_posted = direct && self.post_payload_directly(key, &placement, payload, counters);
        let Some(connected) = &mut self.connected else { return Ok(SendTiming::WithNextPoll) };
        if !is_posted {
            connected.write(&placement, payload);
        }
        Ok(connected.send_timing())
    }

    /// Replies to a request, and releases its ring space. The reply cannot join the open batch.
    #[inline(never)]
    fn place_reply(
        &mut self,
        key: u32,
        token: ReplyToken,
        space: &mut Option<HeldSpace>,
        payload: &[u8],
        counters: &RunningCounters,
    ) -> Result<SendTiming, (NotReplied, Option<ReplyToken>)> {
        let direct = self.can_post_directly(payload.len());
        let Some(connected) = &mut self.connected else { return Err((Failure::Closed.into(), None)) };
        let too_long = |token: ReplyToken| {
            (NotReplied::TooLong { len: payload.len(), max: token.max_len() }, Some(token))
        };
        let Ok(len) = u32::try_from(payload.len()) else { return Err(too_long(token)) };
        match connected.protocol.reply(token, len) {
            Ok(placement) => {
                let is_posted = direct && self.post_payload_directly(key, &placement, payload, counters);
                let Some(connected) = &mut self.connected else { return Ok(SendTiming::WithNextPoll) };
                if !is_posted {
                    connected.write(&placement, payload);
                }
                if let Some(space) = space.take() {
                    connected.protocol.release(space);
                }
                Ok(connected.send_timing())
            }
            Err((ReplyError::TooLong { .. }, token)) => Err(too_long(token)),
            Err((_, _)) => Err((Failure::Closed.into(), None)),
        }
    }

    /// Whether the connection is established, and no call is pending.
    #[inline(always)]
    fn has_no_calls(&self) -> bool {
        self.failure.is_none()
            && self.connected.as_ref().is_some_and(|connected| connected.protocol.has_no_calls())
    }

    /// The next message of the batch, if it is not a usual one, or has to wait for one that is not. `None` at the end of the batch.
    #[cold]
    #[inline(never)]
    fn receive_other(&mut self, ring: &RingRegion) -> Result<Option<OtherMessage<U>>, Failure> {
        let Some(connected) = &mut self.connected else { return Ok(None) };
        match connected.protocol.next_message(ring).map_err(Failure::Violation)? {
            None => Ok(None),
            Some(ReceivedMessage::Request(ReceivedRequest { offset, len, bulk, reply_token })) => {
                if bulk || self.bulk.as_ref().is_some_and(|bulk| bulk.has_queued_requests()) {
                    self.queue_request(ring, offset, len, bulk, reply_token)?;
                    return Ok(Some(OtherMessage::RequestQueued));
                }
                Ok(Some(OtherMessage::Request { offset, len, reply_token }))
            }
            Some(ReceivedMessage::Response(ReceivedResponse { call, user, offset, len, bulk })) => {
                if bulk || self.bulk.as_ref().is_some_and(|bulk| bulk.has_bulk_calls()) {
                    return self.accept_bulk_response(ring, call, user, offset, len, bulk).map(Some);
                }
                Ok(Some(OtherMessage::Response { user, offset, len }))
            }
        }
    }

    #[inline]
    fn bulk(&mut self) -> &mut BulkState {
        self.bulk.get_or_insert_with(|| Box::new(BulkState::new(&self.config)))
    }
}
