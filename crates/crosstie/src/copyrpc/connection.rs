//! One connection: its queue pair, its rings, and the protocol that says what goes where.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{
    CallId, EmitKind, Endpoint as Protocol, Held, Owed, Placed, ReplyError, RingBytes, Terms,
};

use super::error::{CallFailed, ConnectError, Failure, NotCalled, NotReplied};
use super::{Counters, EndpointAddress, EndpointConfig};
use crate::device::{
    Access, ConnectConfig, Data, DeviceError, Mr, Pd, PostError, QpState, RcQp, RemoteAddr, SendOp, SendWr,
};

/// One write in so many asks for a completion, so that the send queue is known to have moved on.
pub(super) const SIGNAL_INTERVAL: u32 = 64;
/// Requests that a send queue holds.
pub(super) const SEND_DEPTH: u32 = 256;
/// Batches on their way that the peer has not released: from here on a small batch waits for company.
const BATCHES_AHEAD: usize = 2;
/// Polls that a small batch waits for company at most.
const HOLD_POLLS: u32 = 16;
/// Messages of a batch that goes at once.
const LARGE_BATCH: u32 = 32;

/// What a send completion is about; the low bits of `wr_id`, above it the connection's index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Batch,
    Position,
}

/// `wr_id` of a request of the connection with this key.
pub(super) fn wr_id(key: u32, sent: Sent) -> u64 {
    u64::from(key) << 1 | u64::from(sent == Sent::Position)
}

/// What [`wr_id`] was made of.
pub(super) fn from_wr_id(wr_id: u64) -> (u32, Sent) {
    ((wr_id >> 1) as u32, if wr_id & 1 == 1 { Sent::Position } else { Sent::Batch })
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
    state: RefCell<State<U>>,
}

struct State<U> {
    qp: RcQp,
    /// The consumer position of this side, for the peer to READ.
    position: Mr,
    published: u64,
    /// Where the peer's is READ to.
    peer_position: Mr,
    config: EndpointConfig,
    link: Option<Link<U>>,
    failure: Option<Failure>,
    /// Requests in the send queue that are not known to be done, those since the last one with a completion, and
    /// how many each completion that is due stands for.
    outstanding: u32,
    unsignaled: u32,
    /// Polls that the present batch was held back.
    held: u32,
    deadlines: BinaryHeap<Reverse<(Instant, u32, CallIdOrd)>>,
}

/// A call in the heap of deadlines; which of two comes first does not matter.
#[derive(Clone, Copy, Debug)]
struct CallIdOrd(CallId);

impl PartialEq for CallIdOrd {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl Eq for CallIdOrd {}
impl PartialOrd for CallIdOrd {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for CallIdOrd {
    fn cmp(&self, _: &Self) -> core::cmp::Ordering {
        core::cmp::Ordering::Equal
    }
}

/// What exists once the peer is known.
struct Link<U> {
    protocol: Protocol<U>,
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

/// A message that came, as handed to the context.
pub(super) enum Arrived<U> {
    Request {
        offset: usize,
        len: usize,
        held: Held,
        owed: Owed,
    },
    /// `None`: the caller gave up before.
    Response {
        user: Option<U>,
        offset: usize,
        len: usize,
        held: Held,
    },
}

impl<U> Connection<U> {
    pub(super) fn new(
        key: u32,
        pd: &Pd,
        qp: RcQp,
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
            held: 0,
            deadlines: BinaryHeap::new(),
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
        state.link = Some(Link { protocol, staging, peer_ring, peer_word, ends: [0; BATCHES_AHEAD] });
        Ok(())
    }

    #[inline]
    pub(super) fn call(
        &self,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), (NotCalled, U)> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        if let Some(failure) = state.failure {
            return Err((failure.into(), user));
        }
        let Some(link) = &mut state.link else { return Err((NotCalled::NotConnected, user)) };
        let (Ok(len), Ok(response)) = (u32::try_from(payload.len()), u32::try_from(allowance)) else {
            return Err((NotCalled::TooLong(payload.len().max(allowance)), user));
        };
        let (call, placed) = match link.protocol.call(len, response, user) {
            Ok(called) => called,
            Err((refusal, user)) => return Err((refusal.into(), user)),
        };
        link.write(&placed, payload);
        if let Some(deadline) = deadline {
            state.deadlines.push(Reverse((deadline, 0, CallIdOrd(call))));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn reply(&self, owed: Owed, payload: &[u8]) -> Result<(), (NotReplied, Option<Owed>)> {
        let mut state = self.state.borrow_mut();
        if let Some(failure) = state.failure {
            return Err((failure.into(), None));
        }
        let Some(link) = &mut state.link else { return Err((Failure::Closed.into(), None)) };
        let too_long =
            |owed: Owed| (NotReplied::TooLong { len: payload.len(), max: owed.max_len() }, Some(owed));
        let Ok(len) = u32::try_from(payload.len()) else { return Err(too_long(owed)) };
        match link.protocol.reply(owed, len) {
            Ok(placed) => {
                link.write(&placed, payload);
                Ok(())
            }
            Err((ReplyError::TooLong { .. }, owed)) => Err(too_long(owed)),
            Err((_, _)) => Err((Failure::Closed.into(), None)),
        }
    }

    /// A batch came.
    #[inline]
    pub(super) fn arrive(&self, imm: u32) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let Some(link) = &mut state.link else { return Ok(()) };
        link.protocol.arrive(imm, &Bytes(&self.ring)).map_err(Failure::Violation)
    }

    /// The next message of the batch.
    #[inline]
    pub(super) fn next(&self) -> Result<Option<Arrived<U>>, Failure> {
        use crosstie_protocol::copyrpc::Arrival::{Request, Response};
        let mut state = self.state.borrow_mut();
        let Some(link) = state.link.as_mut() else { return Ok(None) };
        Ok(match link.protocol.next(&Bytes(&self.ring)).map_err(Failure::Violation)? {
            None => None,
            Some(Request(request)) => Some(Arrived::Request {
                offset: request.offset,
                len: request.len,
                held: request.held,
                owed: request.owed,
            }),
            Some(Response(response)) => Some(Arrived::Response {
                user: response.user,
                offset: response.offset,
                len: response.len,
                held: response.held,
            }),
        })
    }

    #[inline]
    pub(super) fn release(&self, held: Held) {
        if let Some(link) = &mut self.state.borrow_mut().link {
            link.protocol.release(held);
        }
    }

    /// Posts what is due. `hold`: a small batch may wait for company.
    pub(super) fn flush(&self, hold: bool, counters: &mut Counters) -> Result<Left, Failure> {
        let mut state = self.state.borrow_mut();
        let State {
            qp,
            position,
            published,
            peer_position,
            link,
            failure,
            outstanding,
            unsignaled,
            held,
            ..
        } = &mut *state;
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
            let to = RemoteAddr { addr: link.peer_ring.addr + emit.offset as u64, ..link.peer_ring };
            let op = SendOp::WriteImm(to, emit.imm);
            let mut wr = SendWr::new(wr_id(self.key, Sent::Batch), op, Data::Regions(&piece));
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
        if link.protocol.wants_read() && *outstanding < SEND_DEPTH {
            let refused = |_| Failure::Refused(PostError::Invalid("the word is too short"));
            let piece = [peer_position.sge(0..8).map_err(refused)?];
            let wr = SendWr::new(
                wr_id(self.key, Sent::Position),
                SendOp::Read(link.peer_word),
                Data::Regions(&piece),
            );
            match qp.post(&wr.signaled()) {
                Ok(()) => {
                    link.protocol.read_posted();
                    *outstanding += 1;
                    counters.work_requests += 1;
                    counters.signaled += 1;
                    counters.reads += 1;
                }
                Err(PostError::Full) => left = Left::Pressed,
                Err(error) => return Err(Failure::Refused(error)),
            }
        }
        Ok(left)
    }

    /// A request of the send queue is done, and with it all before it.
    pub(super) fn sent(&self, sent: Sent) -> Result<(), Failure> {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        match sent {
            // A completion stands for itself and all that asked for none before it.
            Sent::Batch => state.outstanding = state.outstanding.saturating_sub(SIGNAL_INTERVAL),
            Sent::Position => {
                state.outstanding = state.outstanding.saturating_sub(1);
                let word = u64::from_le_bytes(state.peer_position.load(0).unwrap_or_default());
                if let Some(link) = &mut state.link {
                    link.protocol.read_done(word).map_err(Failure::Violation)?;
                }
            }
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
        state.deadlines.clear();
        state.link.as_mut().map(|link| link.protocol.abandon_all().collect()).unwrap_or_default()
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.state.borrow().failure
    }

    /// Whether the device has given the connection up.
    pub(super) fn is_broken(&self) -> bool {
        let state = self.state.borrow();
        state.failure.is_none() && state.link.is_some() && state.qp.state() == QpState::Error
    }

    /// Whether the batch under construction should go now: the peer can work on it while more are written.
    #[inline]
    pub(super) fn has_large_batch(&self) -> bool {
        self.state.borrow().link.as_ref().is_some_and(|link| link.protocol.unsent_messages() >= LARGE_BATCH)
    }

    /// Calls that wait for their answers.
    pub(super) fn pending(&self) -> usize {
        self.state.borrow().link.as_ref().map_or(0, |link| link.protocol.ledger().pending)
    }

    /// Ends calls whose time is over.
    pub(super) fn expire(&self, now: Instant, expired: &mut Vec<(U, CallFailed)>) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let Some(link) = &mut state.link else { return };
        while let Some(Reverse((deadline, _, CallIdOrd(call)))) = state.deadlines.peek() {
            if *deadline > now {
                break;
            }
            let user = link.protocol.abandon(*call);
            state.deadlines.pop();
            expired.extend(user.map(|user| (user, CallFailed::TimedOut)));
        }
    }

    pub(super) fn longest(&self) -> Option<(usize, usize)> {
        let state = self.state.borrow();
        let protocol = &state.link.as_ref()?.protocol;
        Some((protocol.longest_request() as usize, protocol.longest_response() as usize))
    }
}

impl<U> Link<U> {
    #[inline]
    fn write(&mut self, placed: &Placed, payload: &[u8]) {
        let written = self
            .staging
            .store(placed.offset, &placed.header.encode())
            .and_then(|()| self.staging.write(placed.payload_offset(), payload));
        debug_assert!(written.is_ok(), "the protocol places messages inside the ring");
    }

    /// Whether a small batch would only add to several that are on their way.
    #[inline]
    fn prefers_company(&self) -> bool {
        let messages = self.protocol.unsent_messages();
        messages > 0 && messages < LARGE_BATCH && self.protocol.progress().released < self.ends[0]
    }
}
