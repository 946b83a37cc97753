//! Both halves of one side of a connection, and the calls that it has pending.

use core::num::NonZeroU32;
use core::ops::Range;

use super::bulk::BULK_RESPONSE_SIZE;
use super::flow::{CompactWrite, FlowParams, FlowState, MIN_CREDIT, Progress, RingWrite, agreed_credit};
use super::message::{
    CompactMessage, Placement, ReceivedMessage, ReceivedRequest, ReceivedResponse, ReplyToken, RingBytes,
    UsualMessage,
};
use super::pending_calls::{CallId, PendingCalls};
use super::receiver::{BatchFront, HeldSpace, Receiver, UsualHeader};
use super::sender::Sender;
use super::violation::{FlowParamsError, Refusal, ReplyError, Violation};
use super::wire::{
    self, ALIGNMENT, CompactHead, FlowMetadata, HEADER_SIZE, Header, MAX_COMPACT_PAYLOAD, RESPONSE_FLAG,
    padded_size,
};

/// One side of a connection: calls and replies go out, requests and responses come in.
///
/// `U` is what the caller attaches to a call and gets back with the response. The [module](super) shows the order in
/// which the methods are used.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint<U> {
    sender: Sender,
    receiver: Receiver,
    pending: PendingCalls<U>,
    /// Credit that the peer has granted and no call has used.
    balance: u64,
    /// That, and the credit of calls whose response has not arrived.
    granted: u64,
    /// The most that the peer grants. `granted` is at most this after every batch.
    peer_limit: u64,
    /// A call was refused for lack of credit since the last grant.
    credit_starved: bool,
    /// The longest payloads, computed once.
    max_request_len: u32,
    max_response_len: u32,
    /// Shorter calls can be compact batches.
    alone_end: usize,
}

impl<U> Endpoint<U> {
    /// Creates an endpoint. The peer's endpoint is created with the same numbers, own and peer's exchanged.
    pub fn new(params: &FlowParams) -> Result<Self, FlowParamsError> {
        params.check()?;
        let sender = Sender::new(
            params.peer_ring,
            agreed_credit(params.credit_limit, params.peer_ring),
            params.compact,
        );
        let peer_limit = agreed_credit(params.peer_credit_limit, params.ring);
        let max_request_len = (sender.max_request_size() - HEADER_SIZE as u64) as u32;
        Ok(Endpoint {
            max_request_len,
            alone_end: MAX_COMPACT_PAYLOAD.min(max_request_len) as usize + 1,
            max_response_len: wire::max_response_len(peer_limit) as u32,
            sender,
            receiver: Receiver::new(params.ring),
            pending: PendingCalls::new(params.pending_calls),
            balance: peer_limit,
            granted: peer_limit,
            peer_limit,
            credit_starved: false,
        })
    }

    /// The longest request payload that this connection carries in its rings.
    pub fn max_request_len(&self) -> u32 {
        self.max_request_len
    }

    /// The longest response that a call can allow.
    pub fn max_response_len(&self) -> u32 {
        self.max_response_len
    }

    /// Places a request of `len` bytes whose response may have `response_len` bytes. A refused call changes nothing and
    /// returns `user`.
    #[inline]
    pub fn call(
        &mut self,
        len: u32,
        response_len: u32,
        user: U,
    ) -> Result<(CallId, Placement), (Refusal, U)> {
        self.call_with(0, len, response_len, user)
    }

    /// Like [`Endpoint::call`], for a request whose `len` bytes in the ring are a bulk descriptor.
    #[cold]
    pub fn call_bulk(
        &mut self,
        len: u32,
        response_len: u32,
        user: U,
    ) -> Result<(CallId, Placement), (Refusal, U)> {
        self.call_with(wire::BULK_FLAG, len, response_len, user)
    }

    #[inline(always)]
    fn call_with(
        &mut self,
        flag: u32,
        len: u32,
        response_len: u32,
        user: U,
    ) -> Result<(CallId, Placement), (Refusal, U)> {
        let fits_before_end = self.sender.fits_before_end(padded_size(len));
        if let Err(refusal) = self.check_call(len, response_len, fits_before_end) {
            return Err((refusal, user));
        }
        let allowance = wire::internal_allowance(response_len);
        let blocks = (allowance / ALIGNMENT) as u32;
        self.balance -= allowance;
        let call = self.pending.insert(blocks, user);
        let header = Header { call_id: call.bits(), piggyback: blocks, payload_len: len | flag };
        Ok((call, self.place(len, header, fits_before_end)))
    }

    /// As [`Endpoint::call`], if the call can join the open batch, and that has fewer than `most` messages then. Returns `user` otherwise, and why
    /// the call is refused. No reason: nothing has changed, and `call` places it, or says why not.
    // Every check has another result than the one before it: so the compiler does not combine them, and each is one branch.
    #[inline(always)]
    pub fn append_call(
        &mut self,
        len: usize,
        response_len: usize,
        most: u32,
        user: U,
    ) -> Result<(CallId, Placement), (Option<Refusal>, U)> {
        let allowance = wire::internal_allowance(response_len as u32);
        let size = padded_size(len as u32);
        if !self.sender.can_append(size) {
            return Err((None, user));
        }
        let Some(entry) = self.pending.free_entry() else { return Err((Some(Refusal::TooManyCalls), user)) };
        if len > self.max_request_len as usize || response_len > self.max_response_len as usize {
            return Err((None, user));
        }
        if allowance > self.balance {
            self.credit_starved = true;
            return Err((Some(Refusal::NoCredit), user));
        }
        if !self.sender.has_room_to_append(size) {
            return Err((Some(Refusal::RingFull), user));
        }
        let Some(position) = self.sender.append(size, most) else { return Err((None, user)) };
        let blocks = (allowance / ALIGNMENT) as u32;
        self.balance -= allowance;
        let call = entry.fill(blocks, user);
        let header = Header { call_id: call.bits(), piggyback: blocks, payload_len: len as u32 };
        Ok((call, Placement { offset: self.sender.offset(position) as usize, header }))
    }

    /// Places the reply to a request. The reply can be too long, but there is always room for it. A failure changes nothing and
    /// returns the token.
    #[inline]
    pub fn reply(&mut self, token: ReplyToken, len: u32) -> Result<Placement, (ReplyError, ReplyToken)> {
        self.reply_with(0, token, len)
    }

    /// Like [`Endpoint::reply`], for a response that was written to the buffer which its request named. There is always room.
    #[cold]
    pub fn reply_bulk(&mut self, token: ReplyToken) -> Result<Placement, (ReplyError, ReplyToken)> {
        self.reply_with(wire::BULK_FLAG, token, BULK_RESPONSE_SIZE as u32)
    }

    #[inline(always)]
    fn reply_with(
        &mut self,
        flag: u32,
        token: ReplyToken,
        len: u32,
    ) -> Result<Placement, (ReplyError, ReplyToken)> {
        if u64::from(len) > token.max_len() && !rule_broken!(self.sender, LongReplies) {
            return Err((ReplyError::TooLong { len, max: token.max_len() }, token));
        }
        let header = Header {
            call_id: token.call_id | RESPONSE_FLAG,
            piggyback: token.blocks.get(),
            payload_len: len | flag,
        };
        if !self.sender.expects_response(token.allowance()) {
            return Err((ReplyError::NotExpected, token));
        }
        // Place before unreserving: a batch that the end of the ring seals here precedes this reply. Its grant must count
        // the reservation of this reply, because the peer reads that batch first.
        let placement = self.place(len, header, self.sender.fits_before_end(padded_size(len)));
        self.sender.unreserve(token.allowance());
        Ok(placement)
    }

    /// As [`Endpoint::reply`], if the reply can join the open batch, and that has fewer than `most` messages then. Returns the token otherwise, and
    /// why the reply is refused. Nothing has changed then. No reason: `reply` places it, or says why not.
    #[inline(always)]
    pub fn append_reply(
        &mut self,
        token: ReplyToken,
        len: usize,
        most: u32,
    ) -> Result<Placement, (Option<ReplyError>, ReplyToken)> {
        let (allowance, size) = (token.allowance(), padded_size(len as u32));
        if !self.sender.can_append(size) {
            return Err((None, token));
        }
        if !self.sender.expects_response(allowance) {
            return Err((Some(ReplyError::NotExpected), token));
        }
        // Allowances that are expected are far below 4 GiB, so `len` is, too.
        if wire::response_size_of(len) > allowance {
            let max = token.max_len();
            return Err((Some(ReplyError::TooLong { len: len as u32, max }), token));
        }
        let Some(position) = self.sender.append(size, most) else { return Err((None, token)) };
        self.sender.unreserve(allowance);
        let (call_id, piggyback) = (token.call_id | RESPONSE_FLAG, token.blocks.get());
        let header = Header { call_id, piggyback, payload_len: len as u32 };
        Ok(Placement { offset: self.sender.offset(position) as usize, header })
    }

    /// A call as a compact batch, if it can go out alone and at once: it is short, no other call is pending, there is credit and room for it,
    /// and nothing waits to be posted. Nothing changes before [`Endpoint::call_posted`].
    #[inline(always)]
    pub fn call_alone(&mut self, len: usize, response_len: usize) -> Option<CompactWrite> {
        if len >= self.alone_end || response_len > self.max_response_len as usize || !self.has_no_calls() {
            return None;
        }
        let allowance = wire::internal_allowance(response_len as u32);
        if allowance > self.balance {
            return None;
        }
        let (call_id, piggyback) = (self.pending.next_id().bits(), (allowance / ALIGNMENT) as u32);
        let header = Header { call_id, piggyback, payload_len: len as u32 };
        let Endpoint { sender, receiver, .. } = self;
        sender.request_alone(&header, || receiver.consumer())
    }

    /// Notes that the result of [`Endpoint::call_alone`] was posted.
    #[inline(always)]
    pub fn call_posted(&mut self, write: &CompactWrite, user: U) -> CallId {
        let allowance = u64::from(write.head.piggyback) * ALIGNMENT;
        self.balance -= allowance;
        self.sender.compact_posted(write);
        let call = self.pending.insert(write.head.piggyback, user);
        debug_assert_eq!(call.bits(), write.head.call_id);
        call
    }

    /// A reply as a compact batch, if the reply can go out alone and at once: it is short, and there is room before the end of the ring. Only
    /// if [`Endpoint::is_last_reply`]. Then the ring space of its request is released first, so that the batch can say so. The reply itself is
    /// neither placed nor counted before [`Endpoint::reply_posted`].
    #[inline(always)]
    pub fn reply_alone(
        &mut self,
        token: &ReplyToken,
        len: usize,
        space: &mut Option<HeldSpace>,
    ) -> Option<CompactWrite> {
        // As `len > token.max_len()`: the credit of a call covers at least an empty response.
        if len > MAX_COMPACT_PAYLOAD as usize || wire::response_size(len as u32) > token.allowance() {
            return None;
        }
        let (call_id, piggyback) = (token.call_id | RESPONSE_FLAG, token.blocks.get());
        let header = Header { call_id, piggyback, payload_len: len as u32 };
        let Endpoint { sender, receiver, .. } = self;
        sender.last_response_alone(&header, token.allowance(), || {
            if let Some(space) = space.take() {
                receiver.release(space);
            }
            receiver.consumer()
        })
    }

    /// Whether no other request waits for a reply, none of the batch that was accepted last is left, and nothing waits to be posted.
    #[inline(always)]
    pub fn is_last_reply(&self, token: &ReplyToken) -> bool {
        self.sender.is_last_response(token.allowance()) && self.receiver.batch_ended()
    }

    /// Notes that the result of [`Endpoint::reply_alone`] was posted.
    #[inline(always)]
    pub fn reply_posted(&mut self, token: ReplyToken, write: &CompactWrite) {
        self.sender.unreserve(token.allowance());
        self.sender.compact_posted(write);
    }

    /// The next WRITE to post, if it is a compact batch: the same as from [`Endpoint::next_write`], with less work. The batch stays open, and may
    /// grow, until [`Endpoint::compact_posted`]. After that there is nothing else to post.
    #[inline(always)]
    pub fn open_compact(&mut self) -> Option<CompactWrite> {
        let consumer = self.receiver.consumer();
        self.sender.open_compact(consumer)
    }

    /// Whether no call of this side is pending.
    #[inline(always)]
    pub fn has_no_calls(&self) -> bool {
        // Every call takes credit until its response arrives.
        self.balance == self.granted
    }

    /// Notes that the result of [`Endpoint::open_compact`] was posted.
    #[inline(always)]
    pub fn compact_posted(&mut self, write: &CompactWrite) {
        self.sender.compact_posted(write);
    }

    /// Whether [`Endpoint::next_write`] or [`Endpoint::needs_position_read`] may have something although nothing was placed. If not, a caller
    /// need not ask them after a compact batch with a request, which does not move the consumer position either.
    #[inline(always)]
    pub fn may_have_news(&self) -> bool {
        self.credit_starved || self.sender.may_have_news()
    }

    /// The next WRITE to post, if any. The caller writes `metadata` to `offset` of its staging ring, posts `len` bytes from
    /// there to the same offset of the peer's ring with `imm`, and calls [`Endpoint::write_posted`]. A compact batch is posted
    /// as its head and the payload behind it. Until then this method returns the same WRITE again.
    #[inline]
    pub fn next_write(&mut self) -> Option<RingWrite> {
        let consumer = self.receiver.consumer();
        let lacks_credit = self.credit_starved && self.granted < self.peer_limit;
        self.sender.next_write(consumer, lacks_credit)
    }

    /// Notes that the result of [`Endpoint::next_write`] was posted.
    #[inline]
    pub fn write_posted(&mut self) {
        self.sender.write_posted();
    }

    /// Where in the receive ring the batch that the immediate `imm` announces should be. Nothing is checked, but it is inside the ring: for
    /// hints to the processor.
    #[inline(always)]
    pub fn announced_batch(&self, imm: u32) -> Range<usize> {
        self.receiver.announced_batch(imm)
    }

    /// Accepts the batch that the immediate `imm` announced: checks and applies its metadata. Its messages then come from
    /// [`Endpoint::next_message`], until that returns `None`.
    #[inline(always)]
    pub fn accept_batch<B: RingBytes + ?Sized>(&mut self, imm: u32, ring: &B) -> Result<(), Violation> {
        let metadata = match self.receiver.accept_batch(imm, ring)? {
            BatchFront::Metadata(metadata) => metadata,
            BatchFront::Compact(head) => FlowMetadata {
                consumer_pos: self.sender.full_position(head.consumer_blocks)?,
                credit_grant: u64::from(head.grant_blocks) * ALIGNMENT,
                message_count: 1,
            },
        };
        let is_news = self.sender.learn_from_batch(metadata.consumer_pos)?;
        // Without this, a peer could send as many of them as there is room, again and again.
        if metadata.message_count == 0 && metadata.credit_grant == 0 && !is_news {
            return Err(Violation::EmptyBatch);
        }
        self.accept_grant(metadata.credit_grant)?;
        self.check_batch_end()
    }

    /// The next message of the batch that was accepted last. Its payload is lent until this is called again, or another batch is accepted;
    /// then the peer may write over it, unless it was [held](Endpoint::hold).
    pub fn next_message<B: RingBytes + ?Sized>(
        &mut self,
        ring: &B,
    ) -> Result<Option<ReceivedMessage<U>>, Violation> {
        let Some((header, offset)) = self.receiver.next_message(ring)? else { return Ok(None) };
        let (len, bulk) = (header.ring_len() as usize, header.is_bulk());
        Ok(Some(if header.is_response() {
            let (call, user) = self.take_response(&header)?;
            ReceivedMessage::Response(ReceivedResponse { call, user, offset, len, bulk })
        } else {
            let reply_token = self.take_request(&header)?;
            ReceivedMessage::Request(ReceivedRequest { offset, len, bulk, reply_token })
        }))
    }

    /// As [`Endpoint::next_message`], for a message that is not a bulk message, if everything is as it should be. `None`: nothing has changed, and
    /// `next_message` says why.
    #[inline(always)]
    pub fn next_usual_message<B: RingBytes + ?Sized>(&mut self, ring: &B) -> Option<UsualMessage<U>> {
        let UsualHeader { header, offset, size, left, is_last } = self.receiver.usual_header(ring)?;
        let (allowance, len) = (u64::from(header.piggyback) * ALIGNMENT, header.payload_len as usize);
        if header.is_response() {
            let entry = self.pending.find(header.call_id ^ RESPONSE_FLAG, header.piggyback)?;
            if wire::response_size(header.payload_len) > allowance {
                return None;
            }
            let granted = self.granted - allowance;
            if is_last && (size != left || granted > self.peer_limit) {
                return None;
            }
            self.granted = granted;
            let user = entry.remove();
            self.receiver.pass_usual(size);
            Some(UsualMessage::Response { user, offset, len })
        } else {
            if allowance < MIN_CREDIT || allowance > self.sender.spendable() {
                return None;
            }
            let blocks = NonZeroU32::new(header.piggyback)?;
            if is_last && (size != left || self.granted > self.peer_limit) {
                return None;
            }
            self.sender.take_credit(allowance);
            self.receiver.pass_usual(size);
            let reply_token = ReplyToken { call_id: header.call_id, blocks };
            Some(UsualMessage::Request { offset, len, reply_token })
        }
    }

    /// Whether the batch that was accepted last has no further message.
    pub fn has_received_batch(&self) -> bool {
        self.receiver.batch_ended()
    }

    /// Accepts a compact batch whose bytes the caller has copied: the same as [`Endpoint::accept_batch`], [`Endpoint::next_message`]
    /// and [`Endpoint::pass`], in one step. `payload_len` comes from the immediate.
    #[inline]
    pub fn accept_compact(
        &mut self,
        payload_len: u32,
        head: &CompactHead,
    ) -> Result<CompactMessage<U>, Violation> {
        self.receiver.pass_compact(payload_len)?;
        self.sender.learn_from_batch(self.sender.full_position(head.consumer_blocks)?)?;
        self.accept_grant(u64::from(head.grant_blocks) * ALIGNMENT)?;
        let header = Header { call_id: head.call_id, piggyback: head.piggyback, payload_len };
        Ok(if header.is_response() {
            CompactMessage::Response { user: self.take_response(&header)?.1 }
        } else {
            CompactMessage::Request { reply_token: self.take_request(&header)? }
        })
    }

    /// As [`Endpoint::accept_compact`] for a request, if the receive ring is free and everything is as it should be. `None`: nothing has
    /// changed, and `accept_compact` says why.
    #[inline(always)]
    pub fn try_accept_request(&mut self, payload_len: u32, head: &CompactHead) -> Option<ReplyToken> {
        let allowance = u64::from(head.piggyback) * ALIGNMENT;
        let end = self.receiver.compact_end(payload_len)?;
        let position = self.sender.compact_position(head.consumer_blocks)?;
        let grant = u64::from(head.grant_blocks) * ALIGNMENT;
        let blocks = NonZeroU32::new(head.piggyback)?;
        if head.call_id & RESPONSE_FLAG != 0
            || allowance < MIN_CREDIT
            || allowance > self.sender.spendable()
            || self.granted + grant > self.peer_limit
        {
            return None;
        }
        self.receiver.pass_to(end);
        self.sender.learn_compact(position);
        self.add_grant(grant);
        self.sender.take_credit(allowance);
        Some(ReplyToken { call_id: head.call_id, blocks })
    }

    /// As [`Endpoint::accept_compact`] for a response, if the receive ring is free and everything is as it should be. Returns what the caller
    /// attached. `None`: nothing has changed, and `accept_compact` says why.
    #[inline(always)]
    pub fn try_accept_response(&mut self, payload_len: u32, head: &CompactHead) -> Option<Option<U>> {
        let allowance = u64::from(head.piggyback) * ALIGNMENT;
        let end = self.receiver.compact_end(payload_len)?;
        let position = self.sender.compact_position(head.consumer_blocks)?;
        let grant = u64::from(head.grant_blocks) * ALIGNMENT;
        // A call id has 31 bits, so a request finds no call.
        let entry = self.pending.find(head.call_id ^ RESPONSE_FLAG, head.piggyback)?;
        // The grant is small, and all credit of calls is part of what was granted.
        if wire::response_size(payload_len) > allowance || self.granted + grant - allowance > self.peer_limit
        {
            return None;
        }
        let user = entry.remove();
        self.receiver.pass_to(end);
        self.sender.learn_compact(position);
        self.add_grant(grant);
        self.granted -= allowance;
        Some(user)
    }

    /// Adds a grant that was checked.
    #[inline(always)]
    fn add_grant(&mut self, grant: u64) {
        if self.credit_starved {
            self.credit_starved = grant == 0;
        }
        self.balance += grant;
        self.granted += grant;
    }

    /// Ends the call that a response belongs to. Returns its id and what the caller attached.
    #[inline(always)]
    fn take_response(&mut self, header: &Header) -> Result<(u32, Option<U>), Violation> {
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        let call = header.call_id ^ RESPONSE_FLAG;
        let Some(entry) = self.pending.find(call, header.piggyback) else {
            return Err(self.invalid_response(header));
        };
        // As `len > max_response_len(allowance)`: the credit of a call covers at least an empty response.
        if wire::response_size(header.ring_len()) > allowance {
            return Err(self.invalid_response(header));
        }
        self.granted -= allowance;
        if self.receiver.batch_ended() {
            check_granted(self.granted, self.peer_limit)?;
        }
        // Remove the call only after all checks. A call that was removed before a violation was found would never be
        // reported to its caller.
        Ok((call, entry.remove()))
    }

    /// What is wrong with a response.
    #[cold]
    #[inline(never)]
    fn invalid_response(&self, header: &Header) -> Violation {
        let call_id = header.call_id ^ RESPONSE_FLAG;
        match self.pending.blocks(call_id) {
            None => Violation::UnknownCall { call_id },
            Some(taken) if taken != header.piggyback => {
                Violation::AllowanceMismatch { blocks: header.piggyback, taken }
            }
            Some(taken) => Violation::ResponseTooLong {
                payload_len: header.ring_len(),
                allowed: wire::max_response_len(u64::from(taken) * ALIGNMENT),
            },
        }
    }

    /// Takes the credit of a request.
    #[inline(always)]
    fn take_request(&mut self, header: &Header) -> Result<ReplyToken, Violation> {
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        let Some(blocks) = NonZeroU32::new(header.piggyback).filter(|_| allowance >= MIN_CREDIT) else {
            return Err(Violation::AllowanceTooSmall { blocks: header.piggyback });
        };
        self.sender.spend(allowance)?;
        self.check_batch_end()?;
        Ok(ReplyToken { call_id: header.call_id, blocks })
    }

    /// Holds the ring space of the message that [`Endpoint::next_message`] returned last, until it is [released](Endpoint::release). `None` if it is
    /// no longer lent.
    #[inline(always)]
    pub fn hold(&mut self) -> Option<HeldSpace> {
        self.receiver.hold_lent()
    }

    /// Ends the loan of the message that [`Endpoint::next_message`] returned last, before the next one is asked for.
    #[inline(always)]
    pub fn pass(&mut self) {
        self.receiver.pass_lent();
    }

    /// Releases the ring space of a message that the application no longer needs. Returns `false` if this endpoint does not hold
    /// that space.
    #[inline(always)]
    pub fn release(&mut self, space: HeldSpace) -> bool {
        self.receiver.release(space)
    }

    /// The consumer position, for the word that the peer can READ. The caller publishes it whenever it moves.
    #[inline]
    pub fn consumer_position(&mut self) -> u64 {
        self.receiver.consumer()
    }

    /// Whether the payload of the next message may be posted as a WRITE of its own, see [`Endpoint::payload_sent_directly`]. It
    /// may not while a sealed batch waits to be posted.
    #[inline]
    pub fn can_send_payload_directly(&self) -> bool {
        self.sender.has_no_sealed_write()
    }

    /// Notes that the payload of the message that was placed last is not in the staging ring: it was posted as a WRITE of its
    /// own, to the same offset of the peer's ring. The batch ends with the header of that message.
    ///
    /// Only if [`Endpoint::can_send_payload_directly`] was true before the message was placed.
    pub fn payload_sent_directly(&mut self, placement: &Placement) {
        let Endpoint { sender, receiver, .. } = self;
        let tail = padded_size(placement.header.ring_len()) - HEADER_SIZE as u64;
        sender.seal_without_tail(tail, receiver.consumer());
    }

    /// Whether to post a READ of the peer's consumer position. The caller asks at every poll.
    #[inline]
    pub fn needs_position_read(&self) -> bool {
        self.sender.needs_position_read()
    }

    /// Notes that the READ was posted. No other is needed until it is done.
    pub fn position_read_posted(&mut self) {
        self.sender.position_read_posted();
    }

    /// Applies the word that the READ returned. An old word changes nothing.
    pub fn position_read_done(&mut self, word: u64) -> Result<(), Violation> {
        self.sender.learn_from_read(word)
    }

    /// Whether a call waits for its response and was not abandoned.
    pub fn is_pending(&self, call: CallId) -> bool {
        self.pending.has_user(call)
    }

    /// Abandons a call: returns what the caller attached to it, now. The endpoint still expects the response, because the
    /// response returns the credit. `None`: the call is not pending, or was abandoned before.
    pub fn abandon(&mut self, call: CallId) -> Option<U> {
        self.pending.abandon(call)
    }

    /// Abandons all pending calls, because the connection is lost: returns what was attached to them. Nothing can be
    /// [appended](Endpoint::append_call) any more.
    pub fn abandon_all(&mut self) -> impl Iterator<Item = U> + '_ {
        self.sender.forget_open_batch();
        self.pending.abandon_all()
    }

    /// Messages in the open batch: placed, and not sealed yet.
    #[inline]
    pub fn open_batch_messages(&self) -> u32 {
        self.sender.open_batch_messages()
    }

    /// How far the peer's ring was written, and how far the peer has released it, as far as this side knows.
    #[inline]
    pub fn progress(&self) -> Progress {
        self.sender.progress()
    }

    /// The figures of the flow control.
    pub fn flow_state(&self) -> FlowState {
        FlowState {
            in_flight: self.sender.in_flight(),
            reserved: self.sender.reserved(),
            capacity: self.sender.capacity(),
            balance: self.balance,
            pending: self.pending.len(),
        }
    }

    /// Takes the credit that a batch grants.
    #[inline(always)]
    fn accept_grant(&mut self, grant: u64) -> Result<(), Violation> {
        // Responses in this batch return part of what was granted. So the exact check has to wait for the end of the batch.
        if grant > self.peer_limit {
            let granted = self.granted.saturating_add(grant);
            return Err(Violation::GrantOverLimit { granted, limit: self.peer_limit });
        }
        self.add_grant(grant);
        Ok(())
    }

    #[inline(always)]
    fn check_call(&mut self, len: u32, response_len: u32, fits_before_end: bool) -> Result<(), Refusal> {
        if len > self.max_request_len {
            return Err(Refusal::TooLong { len, max: self.max_request_len });
        }
        if response_len > self.max_response_len {
            return Err(Refusal::AllowanceTooLong { len: response_len, max: self.max_response_len });
        }
        if self.pending.is_full() {
            return Err(Refusal::TooManyCalls);
        }
        if self.balance < wire::internal_allowance(response_len) {
            self.credit_starved = true;
            return Err(Refusal::NoCredit);
        }
        if !self.sender.has_room(padded_size(len), fits_before_end) {
            return Err(Refusal::RingFull);
        }
        Ok(())
    }

    #[inline(always)]
    fn place(&mut self, len: u32, header: Header, fits_before_end: bool) -> Placement {
        let Endpoint { sender, receiver, .. } = self;
        let position = sender.place(header, padded_size(len), fits_before_end, || receiver.consumer());
        Placement { offset: sender.offset(position) as usize, header }
    }

    /// Checks the grants if the current batch has been parsed to its end.
    #[inline]
    fn check_batch_end(&self) -> Result<(), Violation> {
        if self.receiver.batch_ended() { check_granted(self.granted, self.peer_limit) } else { Ok(()) }
    }
}

/// After a batch, what the peer has granted and not got back must be within the peer's own limit.
#[inline]
fn check_granted(granted: u64, limit: u64) -> Result<(), Violation> {
    if granted > limit { Err(Violation::GrantOverLimit { granted, limit }) } else { Ok(()) }
}

#[cfg(test)]
impl<U> Endpoint<U> {
    /// Turns one rule off.
    pub(super) fn break_rule(&mut self, rule: Option<super::tests::BrokenRule>, params: &FlowParams) {
        self.sender.broken_rule = rule;
        self.receiver.broken_rule = rule;
        if rule_broken!(self.sender, CreditOfPeerRing) {
            let limit = agreed_credit(params.peer_credit_limit, params.peer_ring);
            (self.balance, self.granted, self.peer_limit) = (limit, limit, limit);
            self.max_response_len = wire::max_response_len(limit) as u32;
        }
    }

    /// Lets call ids repeat at once, so that the states of a model repeat.
    pub(super) fn use_one_generation(&mut self) {
        self.pending.one_generation = true;
    }

    /// For models: moves the positions of what this side sends `sent` bytes back, and of what it receives `received` bytes.
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

    /// The end of what has arrived, and whether the consumer position that was computed last is there.
    pub(super) fn received_position(&self) -> u64 {
        self.receiver.received_position()
    }

    pub(super) fn is_consumer_known(&self) -> bool {
        self.receiver.is_consumer_known()
    }

    /// The offset of the next batch in the receive ring.
    pub(super) fn next_offset(&self) -> usize {
        self.receiver.next_offset()
    }

    pub(super) fn credit_limit(&self) -> u64 {
        self.sender.limit()
    }
}
