//! Payloads that no ring holds.
//!
//! ```text
//!   caller                                                  called
//!   request, copied into a region ──── READ in pieces ────> region, handed out as a request
//!   landing region <──── WRITE in pieces, then a message ── answer, copied into a region
//! ```
//!
//! The messages that say so travel in the rings, with everything that holds there: credit, order, deadlines. Promises:
//! - Four pools of an endpoint, each of the size that its configuration names: for requests that go, for answers that
//!   come, for requests that come, and for answers that go. They are four because none of them may wait for another: two
//!   sides that call each other with all they have still take in each other's requests and answers.
//! - Requests are handed out in the order in which they were made. One whose pieces are on their way, or that waits for
//!   memory, holds up those behind it, small ones too, on its own endpoint.
//! - What a peer or the device may still touch is not used again: the regions of a call stay lent until its answer is there,
//!   also if nobody waits for it any more.

use std::collections::VecDeque;
use std::time::Instant;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{
    BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkMemory, BulkRequest, Endpoint as Protocol, Held, MAX_BULK,
    Owed, Refusal, Violation, decode_bulk_response,
};
use crosstie_protocol::key::Key;

use super::connection::{Arrived, Connection, Link, State};
use super::endpoint::EndpointId;
use super::error::{Failure, NotCalled, NotPosted, NotReplied};
use super::operation::{Finished, Operation, Operations, Poster};
use super::pool::{NoRegion, Pool, Region};
use super::{Counters, EndpointConfig};
use crate::device::{Access, Mr, Pd, PostError, RemoteAddr, SendOp};

/// Bytes of one READ or WRITE.
const PIECE: usize = 1 << 18;
/// READs, and as many WRITEs, of pieces that one endpoint has under way at most.
const PIECES: u32 = 8;
/// What a call whose answer may be a bulk one reserves in the ring, as a part of the longest answer there: one that turns out to be so short
/// comes that way, in one WRITE with others. More would take credit that is mostly not used.
const SHORT_PART: usize = 32;

/// The longest bulk payload that a side with this configuration takes.
pub(super) fn limit(config: &EndpointConfig) -> u32 {
    config.bulk.min(MAX_BULK as usize) as u32
}

/// The longest bulk payload of a connection. The ring must hold a descriptor.
pub(super) fn agreed<U>(config: &EndpointConfig, peer: &ConnectInfo, protocol: &Protocol<U>) -> u32 {
    let fits = protocol.longest_request() as usize >= BULK_REQUEST_SIZE;
    if fits { u64::from(limit(config)).min(peer.bulk_limit) as u32 } else { 0 }
}

/// What a connection has under way beside its rings. Made when first used.
pub(super) struct Bulk {
    requests: Pool,
    landings: Pool,
    arrivals: Pool,
    replies: Pool,
    /// What calls have lent, by the index of the call.
    calls: Box<[Option<Lent>]>,
    lent: usize,
    /// Calls that have not been counted.
    called: u64,
    /// Requests in order; those behind a bulk request wait for it. The first has this number.
    arriving: VecDeque<Arriving>,
    first_arriving: u64,
    reads: u32,
    /// Answers in order. The first has this number.
    replying: VecDeque<Replying>,
    first_replying: u64,
    writes: u32,
    operations: Operations,
    /// Operations of users that have ended, for the context.
    finished: VecDeque<Finished>,
}

/// Regions that the peer may touch until it has answered.
struct Lent {
    request: Option<Region>,
    landing: Option<(Region, u32)>,
}

/// A request on its way to the application.
struct Arriving {
    owed: Owed,
    landing: Option<BulkMemory>,
    body: Body,
}

enum Body {
    /// All there.
    Ring {
        offset: usize,
        len: usize,
        held: Held,
    },
    Memory {
        from: BulkMemory,
        region: Option<Region>,
        posted: usize,
        read: usize,
    },
}

/// An answer on its way to the peer.
struct Replying {
    to: BulkMemory,
    region: Region,
    len: usize,
    posted: usize,
    written: usize,
    /// Until it is announced.
    owed: Option<Owed>,
}

/// A request that is all there.
pub(super) struct Incoming {
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) held: Option<Held>,
    pub(super) region: Option<Region>,
    pub(super) landing: Option<BulkMemory>,
    pub(super) owed: Owed,
}

impl Bulk {
    fn new(config: &EndpointConfig) -> Bulk {
        let bytes = limit(config) as usize;
        Bulk {
            requests: Pool::new(Access::REMOTE_READ, bytes),
            landings: Pool::new(Access::LOCAL_WRITE | Access::REMOTE_WRITE, bytes),
            arrivals: Pool::new(Access::LOCAL_WRITE, bytes),
            replies: Pool::new(Access::empty(), bytes),
            calls: (0..config.pending_calls).map(|_| None).collect(),
            lent: 0,
            called: 0,
            arriving: VecDeque::new(),
            first_arriving: 0,
            reads: 0,
            replying: VecDeque::new(),
            first_replying: 0,
            writes: 0,
            operations: Operations::default(),
            finished: VecDeque::new(),
        }
    }

    /// Whether a small request has to wait for one before it.
    #[inline]
    pub(super) fn holds_up(&self) -> bool {
        !self.arriving.is_empty()
    }

    /// Whether an answer may be one of a bulk call.
    #[inline]
    pub(super) fn has_lent(&self) -> bool {
        self.lent > 0
    }

    pub(super) fn is_operating(&self) -> bool {
        self.operations.len() > 0
    }

    /// The regions for a call: all of them, or none.
    fn lend(&mut self, pd: &Pd, request: Option<usize>, landing: Option<usize>) -> Result<Lent, NoRegion> {
        let request = request.map(|len| self.requests.take(pd, len)).transpose()?;
        let landing = match landing.map(|len| Ok((self.landings.take(pd, len)?, len as u32))).transpose() {
            Ok(landing) => landing,
            Err(cause) => {
                request.into_iter().for_each(|region| self.requests.give(region));
                return Err(cause);
            }
        };
        Ok(Lent { request, landing })
    }

    fn take_back(&mut self, lent: Lent) {
        lent.request.into_iter().for_each(|region| self.requests.give(region));
        lent.landing.into_iter().for_each(|(region, _)| self.landings.give(region));
    }
}

impl Lent {
    fn describe(&self, request_len: usize) -> BulkRequest {
        let memory = |region: &Region, len: u32| {
            let remote = region.mr().remote();
            BulkMemory { addr: remote.addr, len, rkey: remote.rkey }
        };
        BulkRequest {
            request: self.request.as_ref().map(|region| memory(region, request_len as u32)),
            landing: self.landing.as_ref().map(|(region, len)| memory(region, *len)),
        }
    }
}

fn call_index(call: u32) -> usize {
    Key::<16, 31>::from_bits(call).index() as usize
}

fn outside(_: crate::device::OutOfRegion) -> Failure {
    Failure::Refused(PostError::Invalid("a piece outside of its region"))
}

impl<U> State<U> {
    #[inline]
    pub(super) fn bulk(&mut self) -> &mut Bulk {
        self.bulk.get_or_insert_with(|| Box::new(Bulk::new(&self.config)))
    }

    /// A call that the ring refused: for now, or because no ring holds it.
    #[cold]
    #[inline(never)]
    pub(super) fn refused(
        &mut self,
        refusal: Refusal,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), (NotCalled, U)> {
        match refusal {
            Refusal::TooLong { .. } | Refusal::AllowanceTooLong { .. } => {
                self.call_bulk(payload, allowance, user, deadline)
            }
            refusal => Err((refusal.into(), user)),
        }
    }

    fn call_bulk(
        &mut self,
        payload: &[u8],
        allowance: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), (NotCalled, U)> {
        let Some(link) = &self.link else { return Err((NotCalled::NotConnected, user)) };
        let (by_ring, answer_by_ring) =
            (link.protocol.longest_request() as usize, link.protocol.longest_response() as usize);
        let limit = link.bulk as usize;
        let lands = allowance > answer_by_ring;
        // A short request goes behind the descriptor.
        let room = if lands { by_ring.saturating_sub(BULK_REQUEST_SIZE) } else { by_ring };
        let travels = payload.len() > room;
        if travels && payload.len() > limit {
            let max = room.max(limit) as u32;
            return Err((Refusal::TooLong { len: payload.len() as u32, max }.into(), user));
        }
        if lands && allowance > limit {
            let max = answer_by_ring.max(limit) as u32;
            return Err((Refusal::AllowanceTooLong { len: allowance as u32, max }.into(), user));
        }
        let pd = self.pd.clone();
        let lent = self.bulk().lend(&pd, travels.then_some(payload.len()), lands.then_some(allowance));
        let lent = match lent {
            Ok(lent) => lent,
            Err(NoRegion::InUse) => return Err((Refusal::NoBulkMemory.into(), user)),
            Err(NoRegion::NoMemory) => return Err((NotCalled::NoMemory, user)),
        };
        let Some(link) = &mut self.link else { return Err((NotCalled::NotConnected, user)) };
        let inline: &[u8] = if travels { &[] } else { payload };
        let in_ring = if lands { answer_by_ring / SHORT_PART } else { allowance };
        let len = BULK_REQUEST_SIZE + inline.len();
        let (call, placed) = match link.protocol.call_bulk(len as u32, in_ring as u32, user) {
            Ok(called) => called,
            Err((refusal, user)) => {
                self.bulk().take_back(lent);
                return Err((refusal.into(), user));
            }
        };
        if let Some(region) = &lent.request {
            let copied = region.mr().write(0, payload);
            debug_assert!(copied.is_ok(), "regions are long enough");
        }
        link.write_parts(&placed, &lent.describe(payload.len()).encode(), inline);
        self.began(call, deadline);
        let bulk = self.bulk();
        bulk.lent += 1;
        bulk.called += 1;
        bulk.calls[call_index(call.bits())] = Some(lent);
        Ok(())
    }

    /// A request that is a bulk one, or behind one.
    #[cold]
    #[inline(never)]
    pub(super) fn queue(
        &mut self,
        ring: &Mr,
        offset: usize,
        len: usize,
        bulk: bool,
        held: Held,
        owed: Owed,
    ) -> Result<(), Failure> {
        let limit = limit(&self.config);
        let arriving = if bulk {
            let mut bytes = [0; BULK_REQUEST_SIZE];
            if len < bytes.len() || ring.read(offset, &mut bytes).is_err() {
                return Err(Failure::Violation(Violation::BulkMalformed));
            }
            let said = BulkRequest::decode(&bytes, len, limit).map_err(Failure::Violation)?;
            let body = match said.request {
                Some(from) => {
                    if let Some(link) = &mut self.link {
                        link.protocol.release(held);
                    }
                    Body::Memory { from, region: None, posted: 0, read: 0 }
                }
                None => Body::Ring { offset: offset + BULK_REQUEST_SIZE, len: len - BULK_REQUEST_SIZE, held },
            };
            Arriving { owed, landing: said.landing, body }
        } else {
            Arriving { owed, landing: None, body: Body::Ring { offset, len, held } }
        };
        self.bulk().arriving.push_back(arriving);
        Ok(())
    }

    /// An answer that is a bulk one, or may be that of a bulk call.
    #[cold]
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "a response, field by field")]
    pub(super) fn landed(
        &mut self,
        ring: &Mr,
        call: u32,
        user: Option<U>,
        offset: usize,
        len: usize,
        is_bulk: bool,
        held: Held,
    ) -> Result<Arrived<U>, Failure> {
        let bulk = self.bulk();
        let mut lent = bulk.calls.get_mut(call_index(call)).and_then(Option::take);
        bulk.lent -= usize::from(lent.is_some());
        if !is_bulk {
            lent.into_iter().for_each(|lent| bulk.take_back(lent));
            return Ok(Arrived::Response { user, offset, len, held });
        }
        let landing = lent.as_mut().and_then(|lent| lent.landing.take());
        lent.into_iter().for_each(|lent| bulk.take_back(lent));
        let mut bytes = [0; BULK_RESPONSE_SIZE];
        let copied = ring.read(offset, &mut bytes[..len.min(BULK_RESPONSE_SIZE)]);
        debug_assert!(copied.is_ok(), "messages are inside the ring");
        let capacity = landing.as_ref().map(|(_, capacity)| *capacity);
        match (decode_bulk_response(&bytes, len, capacity), landing) {
            (Ok(len), Some((region, _))) => Ok(Arrived::Landed { user, region, len: len as usize, held }),
            (said, _) => {
                // The call is no longer pending, but it ends with the others.
                self.orphan = user;
                Err(Failure::Violation(said.err().unwrap_or(Violation::BulkUnasked)))
            }
        }
    }

    /// Ends everything: what users had lent comes back.
    pub(super) fn end_bulk(&mut self, endpoint: EndpointId, cause: Failure) {
        let Some(mut bulk) = self.bulk.take() else { return };
        if bulk.operations.raw > 0 {
            // In ERR what was posted may still be carried out, after a reset nothing is. A queue pair that cannot be
            // reset belongs to a device that is gone.
            self.qp.reset().ok();
        }
        let mut finished = std::mem::take(&mut bulk.finished);
        for operation in bulk.operations.drain() {
            if let Operation::Raw { token, region } = operation {
                finished.push_back(Finished { token, endpoint, region, result: Err(cause) });
            }
        }
        // The regions of the pools go with it: that takes their registration back.
        self.finished = finished;
    }
}

impl<U> Link<U> {
    fn announce(&mut self, owed: Owed, len: usize) -> Result<(), Failure> {
        match self.protocol.reply_bulk(owed) {
            Ok(placed) => {
                self.write_parts(&placed, &(len as u32).to_le_bytes(), &[]);
                Ok(())
            }
            Err(_) => Err(Failure::Closed),
        }
    }
}

impl<U> Connection<U> {
    /// A long answer.
    #[cold]
    #[inline(never)]
    pub(super) fn reply_bulk(
        &self,
        owed: Owed,
        to: BulkMemory,
        payload: &[u8],
    ) -> Result<(), (NotReplied, Option<Owed>)> {
        let mut state = self.state.borrow_mut();
        if let Some(failure) = state.failure {
            return Err((failure.into(), None));
        }
        if payload.len() > to.len as usize {
            let max = u64::from(to.len).max(owed.max_len());
            return Err((NotReplied::TooLong { len: payload.len(), max }, Some(owed)));
        }
        let pd = state.pd.clone();
        let bulk = state.bulk();
        let region = match bulk.replies.take(&pd, payload.len()) {
            Ok(region) => region,
            Err(NoRegion::InUse) => return Err((NotReplied::NoBulkMemory, Some(owed))),
            Err(NoRegion::NoMemory) => return Err((NotReplied::NoMemory, Some(owed))),
        };
        let copied = region.mr().write(0, payload);
        debug_assert!(copied.is_ok(), "regions are long enough");
        let len = payload.len();
        bulk.replying.push_back(Replying { to, region, len, posted: 0, written: 0, owed: Some(owed) });
        Ok(())
    }

    /// Posts what can be posted of bulk payloads. Says whether any operation is under way or waits for the send queue.
    #[cold]
    #[inline(never)]
    pub(super) fn advance(&self, counters: &mut Counters) -> Result<bool, Failure> {
        let mut state = self.state.borrow_mut();
        let State { qp, outstanding, bulk, link, pd, failure, .. } = &mut *state;
        let (Some(bulk), Some(link), None) = (bulk, link, failure) else { return Ok(false) };
        let (first_replying, first_arriving) = (bulk.first_replying, bulk.first_arriving);
        counters.bulk_calls += std::mem::take(&mut bulk.called);
        let Bulk { operations, replying, arriving, arrivals, reads, writes, .. } = &mut **bulk;
        let mut poster = Poster { qp, outstanding, operations, counters, key: self.key };
        let mut pressed = false;
        'replies: for (number, reply) in (first_replying..).zip(replying.iter_mut()) {
            while reply.posted < reply.len {
                let len = PIECE.min(reply.len - reply.posted);
                let piece = reply.region.mr().sge(reply.posted..reply.posted + len).map_err(outside)?;
                let to = RemoteAddr { addr: reply.to.addr + reply.posted as u64, rkey: reply.to.rkey };
                let posted = *writes < PIECES
                    && poster
                        .post(Operation::Write(number), SendOp::Write(to), piece)
                        .map_err(Failure::Refused)?;
                if !posted {
                    pressed = true;
                    break 'replies;
                }
                *writes += 1;
                reply.posted += len;
                poster.counters.bulk_writes += 1;
                poster.counters.bulk_bytes += len as u64;
            }
            // All of it is in the send queue, so the message that says so comes after it.
            if let Some(owed) = reply.owed.take() {
                link.announce(owed, reply.len)?;
            }
        }
        'requests: for (number, request) in (first_arriving..).zip(arriving.iter_mut()) {
            let Body::Memory { from, region, posted, .. } = &mut request.body else { continue };
            if region.is_none() {
                match arrivals.take(pd, from.len as usize) {
                    Ok(taken) => *region = Some(taken),
                    // It comes back with a request that the application has.
                    Err(NoRegion::InUse) => break,
                    Err(NoRegion::NoMemory) => return Err(Failure::NoMemory),
                }
            }
            let Some(region) = region else { break };
            while *posted < from.len as usize {
                let len = PIECE.min(from.len as usize - *posted);
                let piece = region.mr().sge(*posted..*posted + len).map_err(outside)?;
                let at = RemoteAddr { addr: from.addr + *posted as u64, rkey: from.rkey };
                let accepted = *reads < PIECES
                    && poster
                        .post(Operation::Read(number), SendOp::Read(at), piece)
                        .map_err(Failure::Refused)?;
                if !accepted {
                    pressed = true;
                    break 'requests;
                }
                *reads += 1;
                *posted += len;
                poster.counters.bulk_reads += 1;
                poster.counters.bulk_bytes += len as u64;
            }
        }
        Ok(pressed || bulk.operations.len() > 0)
    }

    /// A READ or WRITE that a user asks for.
    #[allow(
        clippy::result_large_err,
        reason = "the region comes back, and is large where there are several providers"
    )]
    pub(super) fn operate(
        &self,
        op: SendOp,
        range: std::ops::Range<usize>,
        region: Mr,
        token: u64,
        counters: &mut Counters,
    ) -> Result<(), (NotPosted, Mr)> {
        let mut state = self.state.borrow_mut();
        if let Some(failure) = state.failure {
            return Err((failure.into(), region));
        }
        if state.link.is_none() {
            return Err((NotPosted::NotConnected, region));
        }
        state.bulk();
        let State { qp, outstanding, bulk: Some(bulk), .. } = &mut *state else {
            return Err((NotPosted::NotConnected, region));
        };
        let operations = &mut bulk.operations;
        let mut poster = Poster { qp, outstanding, operations, counters, key: self.key };
        poster.post_raw(op, range, region, token)
    }

    /// The next request that is all there, of those that had to wait.
    pub(super) fn take_arrived(&self) -> Option<Incoming> {
        let mut state = self.state.borrow_mut();
        let bulk = state.bulk.as_mut()?;
        let is_there = |arriving: &Arriving| match &arriving.body {
            Body::Ring { .. } => true,
            Body::Memory { from, read, .. } => *read == from.len as usize,
        };
        if !bulk.arriving.front().is_some_and(is_there) {
            return None;
        }
        let Arriving { owed, landing, body } = bulk.arriving.pop_front()?;
        bulk.first_arriving += 1;
        Some(match body {
            Body::Ring { offset, len, held } => {
                Incoming { offset, len, held: Some(held), region: None, landing, owed }
            }
            Body::Memory { from, region, .. } => {
                Incoming { offset: 0, len: from.len as usize, held: None, region, landing, owed }
            }
        })
    }

    /// The next operation of a user that has ended.
    pub(super) fn take_finished(&self) -> Option<Finished> {
        let mut state = self.state.borrow_mut();
        match &mut state.bulk {
            Some(bulk) => bulk.finished.pop_front(),
            None => state.finished.pop_front(),
        }
    }

    /// The application is done with a request.
    pub(super) fn give_arrival(&self, region: Region) {
        if let Some(bulk) = &mut self.state.borrow_mut().bulk {
            bulk.arrivals.give(region);
        }
    }

    /// The application is done with an answer.
    pub(super) fn give_landing(&self, region: Region) {
        if let Some(bulk) = &mut self.state.borrow_mut().bulk {
            bulk.landings.give(region);
        }
    }
}

impl<U> State<U> {
    /// An operation is done. A key that opens nothing is one that came twice.
    pub(super) fn operated(&mut self, endpoint: EndpointId, key: u32) {
        let State { bulk: Some(bulk), outstanding, .. } = self else { return };
        let Some(operation) = bulk.operations.remove(key) else { return };
        *outstanding = outstanding.saturating_sub(1);
        match operation {
            Operation::Read(number) => {
                bulk.reads -= 1;
                let request = bulk.arriving.get_mut((number - bulk.first_arriving) as usize);
                if let Some(Arriving { body: Body::Memory { from, read, .. }, .. }) = request {
                    *read += PIECE.min(from.len as usize - *read);
                }
            }
            Operation::Write(number) => {
                bulk.writes -= 1;
                if let Some(reply) = bulk.replying.get_mut((number - bulk.first_replying) as usize) {
                    reply.written += PIECE.min(reply.len - reply.written);
                }
                while bulk.replying.front().is_some_and(|reply| reply.written == reply.len) {
                    bulk.first_replying += 1;
                    bulk.replying.pop_front().into_iter().for_each(|reply| bulk.replies.give(reply.region));
                }
            }
            Operation::Raw { token, region } => {
                bulk.finished.push_back(Finished { token, endpoint, region, result: Ok(()) });
            }
        }
    }
}
