//! One connection: its queue pair, its rings, and the protocol that says what goes where. What goes out is in [`posting`].

mod posting;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{CallId, Endpoint as Protocol, Held, Owed, ReplyError, RingBytes, Terms};

use super::bulk::{self, Bulk};
use super::deadlines::Deadlines;
use super::endpoint::EndpointId;
use super::error::{CallFailed, ConnectError, Failure, NotCalled, NotReplied};
use super::operation::Finished;
use super::pool::Region;
use super::{Counters, EndpointAddress, EndpointConfig};
use crate::device::{Access, ConnectConfig, DeviceError, Mr, Pd, QpState, RcQp, RemoteAddr};

use posting::BATCHES_AHEAD;
pub(super) use posting::{Due, Left, SEND_DEPTH, Sent, from_wr_id, inline_limit, wr_id};

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

    pub(super) fn is_reading(&self) -> bool {
        let state = self.state.borrow();
        state.reading || state.bulk.as_ref().is_some_and(|bulk| bulk.is_operating())
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
}
