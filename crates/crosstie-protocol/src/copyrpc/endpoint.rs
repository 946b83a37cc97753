//! Both halves of one side of a connection.

use super::bulk::BULK_RESPONSE_SIZE;
use super::pending::{CallId, Pending};
use super::receiver::{Held, Receiver};
use super::sender::{METADATA, Sender};
use super::violation::{Refusal, ReplyError, TermsError, Violation};
use super::wire::{self, ALIGNMENT, HEADER_SIZE, Header, RESPONSE_FLAG, padded_size};
use super::{Emit, MAX_PENDING, MAX_RING, MIN_RING, RingBytes};

/// What two sides know of each other before the first batch, seen from one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of this side's receive ring.
    pub ring: u64,
    /// Bytes of the peer's receive ring.
    pub peer_ring: u64,
    /// The most response credit that this side grants.
    pub credit_limit: u64,
    /// The most response credit that the peer grants, as it says.
    pub peer_credit_limit: u64,
    /// Calls of this side that can be pending.
    pub pending_calls: usize,
}

/// The least credit limit: one empty response and the metadata before it.
const MIN_CREDIT: u64 = wire::internal_allowance(0);

impl Terms {
    fn check(&self) -> Result<(), TermsError> {
        for size in [self.ring, self.peer_ring] {
            if !size.is_power_of_two() || !(MIN_RING..=MAX_RING).contains(&size) {
                return Err(TermsError::RingSize { size });
            }
        }
        for limit in [self.credit_limit, self.peer_credit_limit] {
            if limit < MIN_CREDIT {
                return Err(TermsError::CreditLimit { limit });
            }
        }
        if !(1..=MAX_PENDING).contains(&self.pending_calls) {
            return Err(TermsError::PendingCalls { calls: self.pending_calls });
        }
        Ok(())
    }
}

/// Credit that the side with this limit grants to a side with a ring of this size: at most a quarter of the ring that its
/// responses go to, so that half of the ring is left for calls. Both sides compute it of the same two numbers.
fn agreed_credit(granter_limit: u64, ring: u64) -> u64 {
    granter_limit.min(ring / 4) & !(ALIGNMENT - 1)
}

/// One side of a connection: calls and replies go out, requests and responses come in.
///
/// `U` is whatever the caller attaches to a call and wants back with the response. See the [module](super) for the
/// order in which the methods are used.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint<U> {
    sender: Sender,
    receiver: Receiver,
    pending: Pending<U>,
    /// Credit that the peer has granted and no call has used.
    balance: u64,
    /// Credit that calls have used whose response has not come.
    spent: u64,
    /// The most that the peer grants: `balance + spent` after any batch.
    peer_limit: u64,
    /// A call was refused for lack of credit since the last grant.
    credit_starved: bool,
    /// Longest payloads, computed once.
    longest_request: u32,
    longest_response: u32,
}

/// Where a message goes. The caller writes the header to `offset` of its staging ring and the payload behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the batch is sent with whatever is at this place"]
pub struct Placed {
    /// Of the header. The payload follows.
    pub offset: usize,
    /// What to write there.
    pub header: Header,
}

impl Placed {
    /// Where the payload goes.
    pub fn payload_offset(&self) -> usize {
        self.offset + HEADER_SIZE
    }
}

/// A message that came.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the ring fills up with messages that are never released"]
pub enum Arrival<U> {
    /// The peer calls.
    Request(Request),
    /// The peer answers.
    Response(Response<U>),
}

/// A call of the peer. Its place in the ring and the answer to it are two obligations, in any order.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the peer waits for the reply, and the ring for its place"]
pub struct Request {
    /// Offset of the payload in the receive ring.
    pub offset: usize,
    /// Bytes of payload.
    pub len: usize,
    /// Whether the payload is a descriptor, see [`BulkRequest`](super::BulkRequest).
    pub bulk: bool,
    /// For [`Endpoint::release`].
    pub held: Held,
    /// For [`Endpoint::reply`].
    pub owed: Owed,
}

/// The answer to a call of this side.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the ring fills up with messages that are never released"]
pub struct Response<U> {
    /// Which call it was. No longer pending.
    pub call: u32,
    /// What was attached to the call; `None` if the call was abandoned.
    pub user: Option<U>,
    /// Offset of the payload in the receive ring.
    pub offset: usize,
    /// Bytes of payload.
    pub len: usize,
    /// Whether the payload is a length, see [`decode_bulk_response`](super::decode_bulk_response).
    pub bulk: bool,
    /// For [`Endpoint::release`].
    pub held: Held,
}

/// A reply that is owed to the peer. Credit is reserved for it, so writing it cannot fail for lack of room.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the peer waits for the reply"]
pub struct Owed {
    call_id: u32,
    blocks: u32,
}

impl Owed {
    /// The longest payload that the caller allowed.
    pub fn max_len(&self) -> u64 {
        wire::longest_response(self.allowance())
    }

    /// The call as the peer names it.
    pub fn call_id(&self) -> u32 {
        self.call_id
    }

    fn allowance(&self) -> u64 {
        u64::from(self.blocks) * ALIGNMENT
    }
}

/// What a rollback undid.
#[derive(Debug, PartialEq, Eq)]
pub enum Undone<U> {
    /// A call that was never sent. `None`: it was abandoned before.
    Call(Option<U>),
    /// A reply that was never sent, and is owed again.
    Reply(Owed),
}

/// Positions in the peer's ring, counted from the connection's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What was placed.
    pub placed: u64,
    /// Written and posted.
    pub posted: u64,
    /// Released by the peer.
    pub released: u64,
}

/// Figures of the flow control, for counters and checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Bytes written to the peer's ring, or about to be, that the peer has not released as far as is known.
    pub in_flight: u64,
    /// R: credit granted to the peer whose response has not been written.
    pub reserved: u64,
    /// C: bytes of the peer's ring.
    pub capacity: u64,
    /// Bytes of a posted skip whose reply was rolled back; zero unless [`Endpoint::rollback`] is used.
    pub lent: u64,
    /// Credit left for calls.
    pub balance: u64,
    /// Calls that wait for their response.
    pub pending: usize,
}

impl Ledger {
    /// The invariant of the protocol: `in_flight + 2R <= C`.
    pub fn holds(&self) -> bool {
        self.in_flight + 2 * self.reserved <= self.capacity + self.lent && self.in_flight <= self.capacity
    }
}

impl<U> Endpoint<U> {
    /// An endpoint with these terms. The peer's endpoint is made with the same numbers, crosswise.
    pub fn new(terms: &Terms) -> Result<Self, TermsError> {
        terms.check()?;
        let sender = Sender::new(terms.peer_ring, agreed_credit(terms.credit_limit, terms.peer_ring));
        let peer_limit = agreed_credit(terms.peer_credit_limit, terms.ring);
        Ok(Endpoint {
            longest_request: (sender.longest_request() - HEADER_SIZE as u64) as u32,
            longest_response: wire::longest_response(peer_limit) as u32,
            sender,
            receiver: Receiver::new(terms.ring),
            pending: Pending::new(terms.pending_calls),
            balance: peer_limit,
            spent: 0,
            peer_limit,
            credit_starved: false,
        })
    }

    /// The longest request payload that this connection carries.
    pub fn longest_request(&self) -> u32 {
        self.longest_request
    }

    /// The longest response that a call can allow.
    pub fn longest_response(&self) -> u32 {
        self.longest_response
    }

    /// Places a request of `len` bytes whose response may have `response_len` bytes. A refusal hands `user` back and
    /// has changed nothing.
    #[inline]
    pub fn call(&mut self, len: u32, response_len: u32, user: U) -> Result<(CallId, Placed), (Refusal, U)> {
        self.call_with(0, len, response_len, user)
    }

    /// As [`Endpoint::call`], for a request whose `len` bytes in the ring are a descriptor.
    #[cold]
    pub fn call_bulk(
        &mut self,
        len: u32,
        response_len: u32,
        user: U,
    ) -> Result<(CallId, Placed), (Refusal, U)> {
        self.call_with(wire::BULK_FLAG, len, response_len, user)
    }

    #[inline(always)]
    fn call_with(
        &mut self,
        flag: u32,
        len: u32,
        response_len: u32,
        user: U,
    ) -> Result<(CallId, Placed), (Refusal, U)> {
        if let Err(refusal) = self.admit(len, response_len) {
            return Err((refusal, user));
        }
        let allowance = wire::internal_allowance(response_len);
        let blocks = (allowance / ALIGNMENT) as u32;
        self.balance -= allowance;
        self.spent += allowance;
        let call = self.pending.insert(blocks, user);
        let header = Header { call_id: call.bits(), piggyback: blocks, payload_len: len | flag };
        Ok((call, self.place(len, header)))
    }

    /// Places the reply to a request. It can be too long, but never lack room. A failure hands `owed` back and has changed
    /// nothing.
    #[inline]
    pub fn reply(&mut self, owed: Owed, len: u32) -> Result<Placed, (ReplyError, Owed)> {
        self.reply_with(0, owed, len)
    }

    /// As [`Endpoint::reply`], for a response that was written to where its request said. It always has room.
    #[cold]
    pub fn reply_bulk(&mut self, owed: Owed) -> Result<Placed, (ReplyError, Owed)> {
        self.reply_with(wire::BULK_FLAG, owed, BULK_RESPONSE_SIZE as u32)
    }

    #[inline(always)]
    fn reply_with(&mut self, flag: u32, owed: Owed, len: u32) -> Result<Placed, (ReplyError, Owed)> {
        if u64::from(len) > owed.max_len() && !reopened!(self.sender, LongReplies) {
            return Err((ReplyError::TooLong { len, max: owed.max_len() }, owed));
        }
        let header =
            Header { call_id: owed.call_id | RESPONSE_FLAG, piggyback: owed.blocks, payload_len: len | flag };
        if !self.sender.owes(owed.allowance()) {
            return Err((ReplyError::NotOwed, owed));
        }
        // Placed first: what the ring's end seals is granted by the books before this reply, as the peer will read it.
        let placed = self.place(len, header);
        self.sender.unreserve(owed.allowance());
        Ok(placed)
    }

    /// The next thing to post, if any: the caller writes `metadata` to `offset` of its staging ring, posts `len` bytes from
    /// there to the same offset of the peer's ring with `imm`, and says so by [`Endpoint::posted`]. Until then it gets
    /// the same thing again.
    #[inline]
    pub fn emit(&mut self) -> Option<Emit> {
        let consumer = self.receiver.consumer();
        let wanting = self.credit_starved && self.balance + self.spent < self.peer_limit;
        self.sender.emit(consumer, wanting)
    }

    /// What [`Endpoint::emit`] gave has been posted.
    #[inline]
    pub fn posted(&mut self) {
        self.sender.posted();
    }

    /// Undoes whatever has not been posted, as if it had never been called: positions and credits are given back.
    /// `staging` is where the messages were written. Where a failed post can be tried again, calling
    /// [`Endpoint::emit`] again later is simpler and loses nothing.
    pub fn rollback<B: RingBytes + ?Sized>(&mut self, staging: &B, mut undone: impl FnMut(Undone<U>)) {
        let Endpoint { sender, pending, balance, spent, .. } = self;
        let (mask, mut owed_again) = (sender.capacity() - 1, 0);
        let keeps_credit = reopened!(sender, RollbackKeepsCredit);
        sender.rollback(|start, messages| {
            let mut position = start + METADATA;
            for _ in 0..messages {
                let header = Header::decode(&staging.load((position & mask) as usize));
                position += padded_size(header.ring_len());
                let allowance = u64::from(header.piggyback) * ALIGNMENT;
                if header.is_response() {
                    owed_again += allowance;
                    let call_id = header.call_id & !RESPONSE_FLAG;
                    undone(Undone::Reply(Owed { call_id, blocks: header.piggyback }));
                } else if pending.blocks(header.call_id) == Some(header.piggyback) {
                    *balance += if keeps_credit { 0 } else { allowance };
                    *spent -= allowance;
                    undone(Undone::Call(pending.remove(header.call_id)));
                }
            }
        });
        sender.reserve_again(owed_again);
    }

    /// A batch was announced by `imm`: takes its metadata. The messages follow from [`Endpoint::next`], until it
    /// gives `None`.
    #[inline]
    pub fn arrive<B: RingBytes + ?Sized>(&mut self, imm: u32, ring: &B) -> Result<(), Violation> {
        let metadata = self.receiver.arrive(imm, ring)?;
        self.sender.learn_piggyback(metadata.consumer_pos)?;
        let granted = self.balance + self.spent;
        // Responses of this batch give back part of what is spent; only its end tells.
        if metadata.credit_grant > self.peer_limit {
            return Err(Violation::GrantOverLimit {
                granted: granted.saturating_add(metadata.credit_grant),
                limit: self.peer_limit,
            });
        }
        self.balance += metadata.credit_grant;
        self.credit_starved &= metadata.credit_grant == 0;
        self.check_end()
    }

    /// The next message of the batch that arrived.
    // Always: a result of this size would go through memory, twice per call.
    #[inline(always)]
    pub fn next<B: RingBytes + ?Sized>(&mut self, ring: &B) -> Result<Option<Arrival<U>>, Violation> {
        let Some((header, held)) = self.receiver.next(ring)? else { return Ok(None) };
        let (offset, len) = (self.receiver.payload_offset(&held), header.ring_len() as usize);
        let bulk = header.is_bulk();
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        let arrival = if header.is_response() {
            let call = header.call_id & !RESPONSE_FLAG;
            let taken = self.pending.blocks(call).ok_or(Violation::UnknownCall { call_id: call })?;
            if header.piggyback != taken {
                return Err(Violation::AllowanceMismatch { blocks: header.piggyback, taken });
            }
            let allowed = wire::longest_response(allowance);
            if len as u64 > allowed {
                return Err(Violation::ResponseTooLong { payload_len: header.ring_len(), allowed });
            }
            self.spent -= allowance;
            self.check_end()?;
            // Only now: a caller that was taken out of the table before a violation is found would never hear of it.
            let user = self.pending.remove(call);
            Arrival::Response(Response { call, user, offset, len, bulk, held })
        } else {
            if allowance < MIN_CREDIT {
                return Err(Violation::AllowanceTooSmall { blocks: header.piggyback });
            }
            self.sender.spend(allowance)?;
            let owed = Owed { call_id: header.call_id, blocks: header.piggyback };
            self.check_end()?;
            Arrival::Request(Request { offset, len, bulk, held, owed })
        };
        Ok(Some(arrival))
    }

    /// The application is done with a message. `false`: the message is not of this endpoint.
    #[inline]
    pub fn release(&mut self, held: Held) -> bool {
        self.receiver.release(held)
    }

    /// The consumer position, for the word that the peer can READ. To be published whenever it moves.
    #[inline]
    pub fn consumer(&mut self) -> u64 {
        self.receiver.consumer()
    }

    /// Whether the payload of the next message that is placed may travel by itself, see [`Endpoint::detach`]. Not while
    /// anything waits to be posted but the batch under construction.
    #[inline]
    pub fn can_detach(&self) -> bool {
        self.sender.is_clear()
    }

    /// The payload of the message that was placed last does not go to the staging ring: it was posted as a WRITE of its
    /// own, to the same offset of the peer's ring. The batch ends with the message's header.
    ///
    /// Only if [`Endpoint::can_detach`] said so before the message was placed.
    pub fn detach(&mut self, placed: &Placed) {
        let Endpoint { sender, receiver, .. } = self;
        sender.seal_without(padded_size(placed.header.ring_len()) - HEADER_SIZE as u64, receiver.consumer());
    }

    /// Whether to post a READ of the peer's consumer position. Asked at every poll.
    #[inline]
    pub fn wants_read(&self) -> bool {
        self.sender.wants_read()
    }

    /// The READ was posted. No other is wanted until it ends.
    pub fn read_posted(&mut self) {
        self.sender.read_posted();
    }

    /// The READ brought this word. An old one moves nothing back.
    pub fn read_done(&mut self, word: u64) -> Result<(), Violation> {
        self.sender.learn_read(word)
    }

    /// The READ could not be posted, or failed without breaking the connection.
    pub fn read_failed(&mut self) {
        self.sender.read_failed();
    }

    /// The caller no longer waits: what it attached comes back, now. The response is still expected, because its credit
    /// is. `None`: not pending, or abandoned before.
    pub fn abandon(&mut self, call: CallId) -> Option<U> {
        self.pending.abandon(call)
    }

    /// The connection is lost: what was attached to all pending calls comes back.
    pub fn abandon_all(&mut self) -> impl Iterator<Item = U> + '_ {
        self.pending.abandon_all()
    }

    /// Messages that were placed and not sealed into a batch yet.
    #[inline]
    pub fn unsent_messages(&self) -> u32 {
        self.sender.open_messages()
    }

    /// How far the peer's ring was written, and how far the peer has released it, as far as is known.
    #[inline]
    pub fn progress(&self) -> Progress {
        self.sender.progress()
    }

    /// The books.
    pub fn ledger(&self) -> Ledger {
        Ledger {
            in_flight: self.sender.in_flight(),
            reserved: self.sender.reserved(),
            capacity: self.sender.capacity(),
            lent: self.sender.lent(),
            balance: self.balance,
            pending: self.pending.len(),
        }
    }

    #[inline(always)]
    fn admit(&mut self, len: u32, response_len: u32) -> Result<(), Refusal> {
        if len > self.longest_request {
            return Err(Refusal::TooLong { len, max: self.longest_request });
        }
        if response_len > self.longest_response {
            return Err(Refusal::AllowanceTooLong { len: response_len, max: self.longest_response });
        }
        if self.pending.is_full() {
            return Err(Refusal::TooManyCalls);
        }
        if self.balance < wire::internal_allowance(response_len) {
            self.credit_starved = true;
            return Err(Refusal::NoCredit);
        }
        if !self.sender.admits(padded_size(len)) {
            return Err(Refusal::RingFull);
        }
        Ok(())
    }

    #[inline(always)]
    fn place(&mut self, len: u32, header: Header) -> Placed {
        let Endpoint { sender, receiver, .. } = self;
        let position = sender.place(padded_size(len), || receiver.consumer());
        Placed { offset: sender.offset(position) as usize, header }
    }

    /// Checks the batch if it has been parsed to its end.
    #[inline]
    fn check_end(&self) -> Result<(), Violation> {
        if self.receiver.batch_ended() { self.check_grants() } else { Ok(()) }
    }

    /// The peer's reservation after its batch, as this side sees it, is exactly what it has granted.
    #[inline]
    fn check_grants(&self) -> Result<(), Violation> {
        let granted = self.balance + self.spent;
        if granted > self.peer_limit {
            return Err(Violation::GrantOverLimit { granted, limit: self.peer_limit });
        }
        Ok(())
    }
}

#[cfg(test)]
impl Owed {
    pub(super) fn duplicate(&self) -> Owed {
        Owed { call_id: self.call_id, blocks: self.blocks }
    }
}

#[cfg(test)]
impl<U> Endpoint<U> {
    pub(super) fn reopen(&mut self, trap: Option<super::tests::Trap>, terms: &Terms) {
        self.sender.trap = trap;
        self.receiver.trap = trap;
        if reopened!(self.sender, CreditOfOwnRing) {
            let limit = agreed_credit(terms.peer_credit_limit, terms.peer_ring);
            (self.balance, self.peer_limit) = (limit, limit);
            self.longest_response = wire::longest_response(limit) as u32;
        }
    }

    pub(super) fn attached(&self, call: u32) -> Option<U>
    where
        U: Clone,
    {
        self.pending.attached(call)
    }

    pub(super) fn one_generation(&mut self) {
        self.pending.one_generation = true;
    }

    /// For models: positions of what this side sends `sent` bytes earlier, of what it receives `received` bytes.
    pub(super) fn rebase(&mut self, sent: u64, received: u64) {
        self.sender.rebase(sent, received);
        self.receiver.rebase(received);
    }

    pub(super) fn oldest_announced(&self) -> u64 {
        self.sender.oldest_announced()
    }

    pub(super) fn remote_consumer(&self) -> u64 {
        self.sender.remote_consumer()
    }

    pub(super) fn credit_limit(&self) -> u64 {
        self.sender.limit()
    }
}
