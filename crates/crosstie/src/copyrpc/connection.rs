//! One connection: its queue pair, its rings, and the protocol that says what goes where.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{
    CallId, EmitKind, Endpoint as Protocol, Held, Owed, Placed, Progress, ReplyError, RingBytes, Terms,
};

use super::bulk::{self, Bulk};
use super::deadlines::Deadlines;
use super::endpoint::EndpointId;
use super::error::{CallFailed, ConnectError, Failure, NotCalled, NotReplied};
use super::operation::Finished;
use super::pool::Region;
use super::{BATCH_CLASSES, Counters, EndpointAddress, EndpointConfig};
use crate::device::{
    Access, ConnectConfig, Data, DeviceError, Mr, Pd, PostError, QpState, RcQp, RemoteAddr, SendOp, SendWr,
};

/// One write in so many asks for a completion, so that the send queue is known to have moved on.
pub(super) const SIGNAL_INTERVAL: u32 = 64;
/// Requests that a send queue holds. Half of it goes on while the completion of the other half is awaited.
pub(super) const SEND_DEPTH: u32 = 2 * SIGNAL_INTERVAL;
/// Batches on their way that the peer has not released: from here on a small batch waits for company.
const BATCHES_AHEAD: usize = 2;
/// From this share of what the peer has not released on, a batch is no small one: it does not wait. With less, a loop that is
/// faster than the way there and back would go on sending every message alone; with more, calls wait for others
/// that are answered no sooner.
const COMPANY: u64 = 8;
/// Polls that a small batch waits for company at most.
const HOLD_POLLS: u32 = 16;
/// Batches up to here are handed to the device with the request, rather than left for it to fetch.
const INLINE: usize = 220;
/// Payloads from here on go straight to the peer's ring, if the device takes as much with a request: a batch has little to
/// gain by them, and a copy is saved. A device that takes so much copies at once and fetches nothing: small batches
/// gain nothing by being handed over.
const DIRECT: usize = 8 << 10;
/// Messages of a batch that goes at once.
const LARGE_BATCH: u32 = 32;

/// Bytes that a queue pair of this device should take with a request.
pub(super) fn inline_limit(device: u32) -> u32 {
    if device as usize >= DIRECT { device } else { device.min(INLINE as u32) }
}

/// What a send completion is about; the low bits of `wr_id`, above it the connection's index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Batch,
    Position,
    /// Of the operation with this key.
    Operation(u32),
}

/// `wr_id` of a request of the connection with this key.
pub(super) fn wr_id(key: u32, sent: Sent) -> u64 {
    u64::from(key) << 2
        | match sent {
            Sent::Batch => 0,
            Sent::Position => 1,
            Sent::Operation(operation) => u64::from(operation) << 34 | 2,
        }
}

/// What [`wr_id`] was made of.
pub(super) fn from_wr_id(wr_id: u64) -> (u32, Sent) {
    let sent = match wr_id & 3 {
        0 => Sent::Batch,
        1 => Sent::Position,
        _ => Sent::Operation((wr_id >> 34) as u32),
    };
    ((wr_id >> 2) as u32, sent)
}

/// A connection as its handles share it.
pub(super) struct Connection<U> {
    /// Index and generation in the context's table.
    pub(super) key: u32,
    pub(super) qp_num: u32,
    /// Where the peer writes.
    pub(super) ring: Mr,
    /// Whether it is among those to be flushed.
    pub(super) dirty: Cell<bool>,
    pub(super) state: RefCell<State<U>>,
}

pub(super) struct State<U> {
    pub(super) qp: RcQp,
    /// The consumer position of this side, for the peer to READ.
    position: Mr,
    published: u64,
    /// Where the peer's is READ to.
    peer_position: Mr,
    pub(super) config: EndpointConfig,
    pub(super) link: Option<Link<U>>,
    pub(super) failure: Option<Failure>,
    /// Requests in the send queue that are not known to be done, those since the last one with a completion, and
    /// how many each completion that is due stands for.
    pub(super) outstanding: u32,
    unsignaled: u32,
    /// Bytes that the queue pair takes with a request.
    inline: usize,
    /// Polls that the present batch was held back.
    held: u32,
    /// Whether a READ of the peer's position is on its way, and whether a batch came since the last probe.
    reading: bool,
    heard: bool,
    deadlines: Deadlines,
    /// What goes beside the rings, and what it needs.
    pub(super) bulk: Option<Box<Bulk>>,
    pub(super) pd: Rc<Pd>,
    /// Operations that ended with the connection.
    pub(super) finished: VecDeque<Finished>,
    /// What was attached to a call whose answer ended the connection.
    pub(super) orphan: Option<U>,
}

/// What exists once the peer is known.
pub(super) struct Link<U> {
    pub(super) protocol: Protocol<U>,
    /// The longest bulk payload of this connection; zero: none.
    pub(super) bulk: u32,
    /// Where batches are built, at the offsets that they will have in the peer's ring.
    staging: Mr,
    peer_ring: RemoteAddr,
    peer_word: RemoteAddr,
    /// Where the last batches ended.
    ends: [u64; BATCHES_AHEAD],
}

/// The receive ring, as the protocol reads it.
struct Bytes<'r>(&'r Mr);

impl RingBytes for Bytes<'_> {
    #[inline]
    fn load<const N: usize>(&self, offset: usize) -> [u8; N] {
        // The protocol stays inside the ring, which its terms name; outside there is nothing.
        self.0.load(offset).unwrap_or([0; N])
    }
}

/// What a flush left to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// A small batch waits for company.
    Held,
    /// The send queue is full.
    Pressed,
}

/// When what was written should go out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Now,
    /// With the next poll.
    Later,
}

/// A message that came, as handed to the context.
pub(super) enum Arrived<U> {
    /// `None`: the caller gave up before.
    Response { user: Option<U>, offset: usize, len: usize, held: Held },
    /// A bulk response.
    Landed { user: Option<U>, region: Region, len: usize, held: Held },
    /// A request that waits, or that one before it holds up.
    Queued,
}

impl<U> Connection<U> {
    pub(super) fn new(
        key: u32,
        pd: &Rc<Pd>,
        qp: RcQp,
        inline: u32,
        config: EndpointConfig,
    ) -> Result<Connection<U>, DeviceError> {
        let ring = pd.allocate(config.ring, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let position = pd.allocate(8, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let peer_position = pd.allocate(8, Access::LOCAL_WRITE)?;
        let state = State {
            position,
            published: 0,
            peer_position,
            config,
            link: None,
            failure: None,
            outstanding: 0,
            unsignaled: 0,
            inline: inline as usize,
            held: 0,
            reading: false,
            heard: false,
            deadlines: Deadlines::default(),
            bulk: None,
            pd: pd.clone(),
            finished: VecDeque::new(),
            orphan: None,
            qp,
        };
        let qp_num = state.qp.qp_num();
        Ok(Connection { key, qp_num, ring, dirty: Cell::new(false), state: RefCell::new(state) })
    }

    pub(super) fn address(&self) -> EndpointAddress {
        let state = self.state.borrow();
        let (ring, position) = (self.ring.remote(), state.position.remote());
        let info = ConnectInfo {
            ring_addr: ring.addr,
            ring_size: self.ring.len() as u64,
            consumer_addr: position.addr,
            credit_limit: state.config.credit as u64,
            ring_rkey: ring.rkey,
            consumer_rkey: position.rkey,
            bulk_limit: u64::from(bulk::limit(&state.config)),
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
        if state.link.is_some() || state.failure.is_some() {
            return Err(ConnectError::Connected);
        }
        let info = peer.info().map_err(ConnectError::Address)?;
        let terms = Terms {
            ring: self.ring.len() as u64,
            peer_ring: info.ring_size,
            credit_limit: state.config.credit as u64,
            peer_credit_limit: info.credit_limit,
            pending_calls: state.config.pending_calls,
        };
        let protocol = Protocol::new(&terms)?;
        let staging = pd.allocate(info.ring_size as usize, Access::LOCAL_WRITE)?;
        let connect = ConnectConfig { access: Access::REMOTE_READ | Access::REMOTE_WRITE, ..*connect };
        state.qp.connect(&peer.qp(), &connect)?;
        let peer_ring = RemoteAddr { addr: info.ring_addr, rkey: info.ring_rkey };
        let peer_word = RemoteAddr { addr: info.consumer_addr, rkey: info.consumer_rkey };
        let bulk = bulk::agreed(&state.config, &info, &protocol);
        state.link = Some(Link { protocol, bulk, staging, peer_ring, peer_word, ends: [0; BATCHES_AHEAD] });
        Ok(())
    }

    #[inline(always)]
    pub(super) fn call(
        &self,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
        counters: &mut Counters,
    ) -> Result<Due, (NotCalled, U)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if let Some(failure) = state.failure {
            return Err((failure.into(), user));
        }
        let direct = state.can_go_direct(payload.len());
        let Some(link) = &mut state.link else { return Err((NotCalled::NotConnected, user)) };
        let (Ok(len), Ok(response)) = (u32::try_from(payload.len()), u32::try_from(allowance)) else {
            return Err((NotCalled::TooLong(payload.len().max(allowance)), user));
        };
        let (call, placed) = match link.protocol.call(len, response, user) {
            Ok(called) => called,
            // Taken apart, so that the result of a call that is made need not be in memory.
            Err((refusal, user)) => {
                return match state.refused(refusal, payload, allowance, user, deadline) {
                    Ok(()) => Ok(Due::Later),
                    Err((cause, user)) => Err((cause, user)),
                };
            }
        };
        if !(direct && state.write_direct(self.key, &placed, payload, counters)) {
            state.write(&placed, payload);
        }
        state.began(call, deadline);
        Ok(state.due())
    }

    /// Answers a request, and gives back what was held of it.
    #[inline]
    pub(super) fn reply(
        &self,
        owed: Owed,
        held: &mut Option<Held>,
        payload: &[u8],
        counters: &mut Counters,
    ) -> Result<Due, (NotReplied, Option<Owed>)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if let Some(failure) = state.failure {
            return Err((failure.into(), None));
        }
        let direct = state.can_go_direct(payload.len());
        let Some(link) = &mut state.link else { return Err((Failure::Closed.into(), None)) };
        let too_long =
            |owed: Owed| (NotReplied::TooLong { len: payload.len(), max: owed.max_len() }, Some(owed));
        let Ok(len) = u32::try_from(payload.len()) else { return Err(too_long(owed)) };
        match link.protocol.reply(owed, len) {
            Ok(placed) => {
                if !(direct && state.write_direct(self.key, &placed, payload, counters)) {
                    state.write(&placed, payload);
                }
                if let (Some(link), Some(held)) = (&mut state.link, held.take()) {
                    link.protocol.release(held);
                }
                Ok(state.due())
            }
            Err((ReplyError::TooLong { .. }, owed)) => Err(too_long(owed)),
            Err((_, _)) => Err((Failure::Closed.into(), None)),
        }
    }

    /// A batch came.
    #[inline]
    pub(super) fn arrive(&self, imm: u32) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        state.heard = true;
        let Some(link) = &mut state.link else { return Ok(()) };
        link.protocol.arrive(imm, &Bytes(&self.ring)).map_err(Failure::Violation)
    }

    /// Goes on with the batch: gives back what was held of it, hands small requests to `on_request`, and stops at
    /// anything else.
    #[inline]
    pub(super) fn next(
        &self,
        done: Option<Held>,
        mut on_request: impl FnMut(usize, usize, Held, Owed),
    ) -> Result<Option<Arrived<U>>, Failure> {
        use crosstie_protocol::copyrpc::Arrival::{Request, Response};
        use crosstie_protocol::copyrpc::{Request as Incoming, Response as Answer};
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(link) = &mut state.link else { return Ok(None) };
        if let Some(held) = done {
            link.protocol.release(held);
        }
        let (holds_up, has_lent) = match &state.bulk {
            Some(bulk) => (bulk.holds_up(), bulk.has_lent()),
            None => (false, false),
        };
        loop {
            match link.protocol.next(&Bytes(&self.ring)).map_err(Failure::Violation)? {
                None => return Ok(None),
                Some(Request(Incoming { offset, len, bulk, held, owed })) => {
                    if bulk || holds_up {
                        // Field by field: what a call takes by reference stays in memory on the way of small messages too.
                        state.queue(&self.ring, offset, len, bulk, held, owed)?;
                        return Ok(Some(Arrived::Queued));
                    }
                    on_request(offset, len, held, owed);
                }
                Some(Response(Answer { call, user, offset, len, bulk, held })) => {
                    if bulk || has_lent {
                        return state.landed(&self.ring, call, user, offset, len, bulk, held).map(Some);
                    }
                    return Ok(Some(Arrived::Response { user, offset, len, held }));
                }
            }
        }
    }

    #[inline]
    pub(super) fn release(&self, held: Held) {
        if let Some(link) = &mut self.state.borrow_mut().link {
            link.protocol.release(held);
        }
    }

    /// Posts what is due. `hold`: a small batch may wait for company.
    #[inline]
    pub(super) fn flush(&self, hold: bool, counters: &mut Counters) -> Result<Left, Failure> {
        let has_bulk = self.state.borrow().bulk.is_some();
        let busy = has_bulk && self.advance(counters)?;
        let left = self.flush_ring(hold, counters)?;
        Ok(if busy { Left::Pressed } else { left })
    }

    fn flush_ring(&self, hold: bool, counters: &mut Counters) -> Result<Left, Failure> {
        let mut state = self.state.borrow_mut();
        let State { qp, position, published, link, failure, outstanding, unsignaled, inline, held, .. } =
            &mut *state;
        let (Some(link), None) = (link, &failure) else { return Ok(Left::Nothing) };
        if hold && link.prefers_company() && *held < HOLD_POLLS {
            *held += 1;
            return Ok(Left::Held);
        }
        *held = 0;
        let mut left = Left::Nothing;
        while let Some(emit) = link.protocol.emit() {
            if *outstanding == SEND_DEPTH {
                left = Left::Pressed;
                break;
            }
            let refused = |_| Failure::Refused(PostError::Invalid("a batch outside of its ring"));
            link.staging.store(emit.offset, &emit.metadata.encode()).map_err(refused)?;
            let piece = [link.staging.sge(emit.offset..emit.offset + emit.len).map_err(refused)?];
            let mut small = [0; INLINE];
            let data = match small.get_mut(..emit.len) {
                Some(small) if emit.len <= *inline && *inline < DIRECT => {
                    link.staging.read(emit.offset, small).map_err(refused)?;
                    Data::Inline(small)
                }
                _ => Data::Regions(&piece),
            };
            let to = RemoteAddr { addr: link.peer_ring.addr + emit.offset as u64, ..link.peer_ring };
            let op = SendOp::WriteImm(to, emit.imm);
            let mut wr = SendWr::new(wr_id(self.key, Sent::Batch), op, data);
            wr.signaled = *unsignaled + 1 >= SIGNAL_INTERVAL;
            match qp.post(&wr) {
                Ok(()) => {}
                Err(PostError::Full) => {
                    left = Left::Pressed;
                    break;
                }
                Err(error) => return Err(Failure::Refused(error)),
            }
            link.protocol.posted();
            *outstanding += 1;
            *unsignaled = if wr.signaled { 0 } else { *unsignaled + 1 };
            counters.work_requests += 1;
            counters.signaled += u64::from(wr.signaled);
            counters.bytes += emit.len as u64;
            match emit.kind {
                EmitKind::Batch => {
                    counters.batches += 1;
                    counters.batched += u64::from(emit.metadata.message_count);
                    counters.batch_sizes[size_class(emit.metadata.message_count)] += 1;
                    link.ends.rotate_left(1);
                    link.ends[BATCHES_AHEAD - 1] = link.protocol.progress().posted;
                }
                EmitKind::Wrap => counters.wraps += 1,
                EmitKind::Credit => counters.credit_batches += 1,
            }
        }
        let consumer = link.protocol.consumer();
        if consumer != *published {
            *published = consumer;
            let written = position.store(0, &consumer.to_le_bytes());
            debug_assert!(written.is_ok());
        }
        if link.protocol.wants_read() && !state.read_position(self.key, counters)? {
            left = Left::Pressed;
        }
        Ok(left)
    }

    /// Asks a peer that owes answers, and was not heard of since the last time, whether it is there: a READ that
    /// succeeds brings its position, one that fails ends the connection.
    pub(super) fn probe(&self, counters: &mut Counters) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let waits = state.link.as_ref().is_some_and(|link| link.protocol.ledger().pending > 0);
        if waits && !std::mem::take(&mut state.heard) && !state.reading && state.failure.is_none() {
            state.read_position(self.key, counters)?;
        }
        Ok(())
    }

    pub(super) fn is_reading(&self) -> bool {
        let state = self.state.borrow();
        state.reading || state.bulk.as_ref().is_some_and(|bulk| bulk.is_operating())
    }

    /// A request of the send queue is done, and with it all before it.
    pub(super) fn sent(&self, sent: Sent) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        match sent {
            // A completion stands for itself and all that asked for none before it.
            Sent::Batch => state.outstanding = state.outstanding.saturating_sub(SIGNAL_INTERVAL),
            Sent::Position => {
                state.reading = false;
                state.outstanding = state.outstanding.saturating_sub(1);
                let word = u64::from_le_bytes(state.peer_position.load(0).unwrap_or_default());
                if let Some(link) = &mut state.link {
                    link.protocol.read_done(word).map_err(Failure::Violation)?;
                }
            }
            Sent::Operation(key) => state.operated(EndpointId(self.key), key),
        }
        Ok(())
    }

    /// Ends the connection; what was attached to pending calls goes to `each`.
    pub(super) fn fail(&self, cause: Failure) -> Vec<U> {
        let mut state = self.state.borrow_mut();
        if state.failure.is_some() {
            return Vec::new();
        }
        state.failure = Some(cause);
        // The peer should see it too. A queue pair that cannot be broken any more is broken.
        state.qp.fail().ok();
        state.deadlines = Deadlines::default();
        state.end_bulk(EndpointId(self.key), cause);
        let orphan = state.orphan.take();
        let pending = state.link.as_mut().map(|link| link.protocol.abandon_all());
        orphan.into_iter().chain(pending.into_iter().flatten()).collect()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.borrow().failure
    }

    /// Whether the device has given the connection up.
    pub(super) fn is_broken(&self) -> bool {
        let state = self.state.borrow();
        state.failure.is_none() && state.link.is_some() && state.qp.state() == QpState::Error
    }

    /// Calls that wait for their answers.
    pub(super) fn pending(&self) -> usize {
        let state = self.state.borrow();
        match &state.link {
            Some(link) if state.failure.is_none() => link.protocol.ledger().pending,
            _ => 0,
        }
    }

    /// Ends calls whose time is over. Says whether others have a deadline.
    pub(super) fn expire(&self, now: Instant, expired: &mut Vec<(U, CallFailed)>) -> bool {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(link) = &mut state.link else { return false };
        while let Some(call) = state.deadlines.pop(now) {
            let user = link.protocol.abandon(call);
            expired.extend(user.map(|user| (user, CallFailed::TimedOut)));
        }
        !state.deadlines.is_empty()
    }

    pub(super) fn longest(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let Link { protocol, bulk, .. } = state.link.as_ref()?;
        let (request, response) = (protocol.longest_request(), protocol.longest_response());
        Some((request.max(*bulk) as usize, response.max(*bulk) as usize))
    }

    pub(super) fn longest_in_ring(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let protocol = &state.link.as_ref()?.protocol;
        Some((protocol.longest_request() as usize, protocol.longest_response() as usize))
    }
}

impl<U> State<U> {
    #[inline(always)]
    pub(super) fn began(&mut self, call: CallId, deadline: Option<Instant>) {
        match deadline {
            None => self.deadlines.without(call),
            Some(deadline) => self.deadlines.push(call, deadline, self.config.pending_calls),
        }
    }

    #[inline]
    fn write(&mut self, placed: &Placed, payload: &[u8]) {
        if let Some(link) = &mut self.link {
            link.write(placed, payload);
        }
    }

    /// Whether the batch under construction should go now: the peer can work on it while more are written.
    #[inline]
    fn due(&self) -> Due {
        // Sealed: by a payload that went ahead, or by the ring's end.
        let now = self.link.as_ref().is_some_and(|link| {
            link.protocol.unsent_messages() >= LARGE_BATCH || !link.protocol.can_detach()
        });
        if now { Due::Now } else { Due::Later }
    }

    #[inline]
    fn can_go_direct(&self, len: usize) -> bool {
        len >= DIRECT
            && len <= self.inline
            && self.outstanding < SEND_DEPTH
            && self.link.as_ref().is_some_and(|link| link.protocol.can_detach())
    }

    /// Posts the payload of the message that was placed last, straight from where it is. `false`: the send queue is full, or
    /// the device refuses it, as it will refuse the batch.
    #[cold]
    fn write_direct(&mut self, key: u32, placed: &Placed, payload: &[u8], counters: &mut Counters) -> bool {
        let Some(link) = &mut self.link else { return false };
        let to = RemoteAddr { addr: link.peer_ring.addr + placed.payload_offset() as u64, ..link.peer_ring };
        let mut wr = SendWr::new(wr_id(key, Sent::Batch), SendOp::Write(to), Data::Inline(payload));
        wr.signaled = self.unsignaled + 1 >= SIGNAL_INTERVAL;
        if self.qp.post(&wr).is_err() {
            return false;
        }
        self.outstanding += 1;
        self.unsignaled = if wr.signaled { 0 } else { self.unsignaled + 1 };
        counters.work_requests += 1;
        counters.signaled += u64::from(wr.signaled);
        counters.bytes += payload.len() as u64;
        counters.direct += 1;
        let written = link.staging.store(placed.offset, &placed.header.encode());
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
        link.protocol.detach(placed);
        true
    }

    /// Posts a READ of the peer's position. `false`: the send queue is full.
    fn read_position(&mut self, key: u32, counters: &mut Counters) -> Result<bool, Failure> {
        let Some(link) = &mut self.link else { return Ok(true) };
        if self.outstanding == SEND_DEPTH {
            return Ok(false);
        }
        let refused = |_| Failure::Refused(PostError::Invalid("the word is too short"));
        let piece = [self.peer_position.sge(0..8).map_err(refused)?];
        let op = SendOp::Read(link.peer_word);
        let wr = SendWr::new(wr_id(key, Sent::Position), op, Data::Regions(&piece));
        match self.qp.post(&wr.signaled()) {
            Ok(()) => {}
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(Failure::Refused(error)),
        }
        link.protocol.read_posted();
        self.reading = true;
        self.outstanding += 1;
        counters.work_requests += 1;
        counters.signaled += 1;
        counters.reads += 1;
        Ok(true)
    }
}

impl<U> Link<U> {
    #[inline(always)]
    fn write(&mut self, placed: &Placed, payload: &[u8]) {
        let written = self
            .staging
            .store(placed.offset, &placed.header.encode())
            .and_then(|()| self.staging.write(placed.payload_offset(), payload));
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// A message in two parts.
    #[cold]
    #[inline(never)]
    pub(super) fn write_parts(&mut self, placed: &Placed, first: &[u8], second: &[u8]) {
        self.write(placed, first);
        let written = self.staging.write(placed.payload_offset() + first.len(), second);
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Whether a small batch would only add to several that are on their way.
    #[inline]
    fn prefers_company(&self) -> bool {
        let messages = self.protocol.unsent_messages();
        let Progress { placed, posted, released } = self.protocol.progress();
        messages > 0
            && messages < LARGE_BATCH
            && released < self.ends[0]
            && COMPANY * (placed - posted) < posted - released
    }
}

/// Where a batch of so many messages is counted, see [`Counters::batch_sizes`].
#[inline]
fn size_class(messages: u32) -> usize {
    let class = messages.saturating_sub(1).checked_ilog2().map_or(0, |log| log as usize + 1);
    class.min(BATCH_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn batches_are_counted_by_powers_of_two() {
        let classes = [1, 2, 3, 4, 5, 8, 9, 32_768, 32_769, u32::MAX].map(size_class);
        assert_eq!(classes, [0, 1, 2, 2, 3, 3, 4, 15, 15, 15]);
    }
}
