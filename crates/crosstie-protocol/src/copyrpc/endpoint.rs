//! Both halves of one side of a connection, and the calls that it has pending.
//!
//! Each step checks everything, and then changes everything. Its checks are functions that change nothing: `check_call`, `check_reply`,
//! `check_batch`, `check_message`. They say what is wrong only when [`diagnose`] asks.

use core::num::NonZeroU32;
use core::ops::Range;

use super::flow::{FlowParams, FlowState, MIN_CREDIT, Progress, Write, agreed_credit};
use super::message::{Content, Message, Placement, ReplyToken, RingBytes};
use super::pending_calls::{CallId, PendingCalls};
use super::receiver::{BatchPlace, HeldSpace, Receiver};
use super::sender::Sender;
use super::violation::{FlowParamsError, Refusal, ReplyError, Report, Silent, Violation, diagnose};
use super::wire::{
    self, ALIGNMENT, CompactHead, FLOW_METADATA_SIZE, FlowMetadata, HEADER_SIZE, Header, RESPONSE_FLAG,
    WRAP_MESSAGE_COUNT, padded_size,
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
    /// See [`flow`](super::flow).
    credit_available: u64,
    credit_granted: u64,
    /// The most that the peer grants. `credit_granted` is at most this after every batch.
    peer_limit: u64,
    /// A call was refused for lack of credit since the last grant.
    credit_starved: bool,
    /// The longest payloads, computed once.
    max_request_len: usize,
    max_response_len: usize,
}

/// The bytes in front of the messages of a batch, as they were loaded.
#[derive(Clone, Copy)]
enum Front {
    Metadata([[u64; 2]; 2]),
    Compact(CompactHead),
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
        Ok(Endpoint {
            max_request_len: sender.max_request_size() as usize - HEADER_SIZE,
            max_response_len: wire::max_response_len(peer_limit) as usize,
            sender,
            receiver: Receiver::new(params.ring),
            pending: PendingCalls::new(params.pending_calls),
            credit_available: peer_limit,
            credit_granted: peer_limit,
            peer_limit,
            credit_starved: false,
        })
    }

    /// The longest request payload that this connection carries in its rings.
    pub fn max_request_len(&self) -> usize {
        self.max_request_len
    }

    /// The longest response that a call can allow.
    pub fn max_response_len(&self) -> usize {
        self.max_response_len
    }

    /// Places a request of `len` bytes whose response may have `response_len` bytes. A refused call changes nothing and
    /// returns `user`.
    #[inline(always)]
    pub fn call(
        &mut self,
        content: Content,
        len: usize,
        response_len: usize,
        user: U,
    ) -> Result<(CallId, Placement), (Refusal, U)> {
        let Ok(allowance) = self.check_call::<Silent>(len, response_len) else {
            return Err((self.refuse_call(len, response_len), user));
        };
        let blocks = (allowance / ALIGNMENT) as u32;
        self.credit_available -= allowance;
        let call = self.pending.insert(blocks, user);
        let payload_len = len as u32 | content.flag();
        Ok((call, self.place(Header { call_id: call.bits(), piggyback: blocks, payload_len })))
    }

    /// Checks that a call can be made now. Returns the credit that it uses.
    #[inline(always)]
    fn check_call<R: Report<Refusal>>(&self, len: usize, response_len: usize) -> Result<u64, R> {
        let (max_len, max_response) = (self.max_request_len, self.max_response_len);
        ensure!(len <= max_len, Refusal::TooLong { len, max: max_len });
        ensure!(
            response_len <= max_response,
            Refusal::AllowanceTooLong { len: response_len, max: max_response }
        );
        ensure!(!self.pending.is_full(), Refusal::TooManyCalls);
        let allowance = wire::internal_allowance(response_len as u32);
        ensure!(allowance <= self.credit_available, Refusal::NoCredit);
        ensure!(self.sender.has_room(padded_size(len as u32)), Refusal::RingFull);
        Ok(allowance)
    }

    /// Says why a call is refused, and notes what it lacks.
    #[cold]
    #[inline(never)]
    fn refuse_call(&mut self, len: usize, response_len: usize) -> Refusal {
        let refusal = diagnose(|| self.check_call(len, response_len));
        match refusal {
            Refusal::NoCredit => self.credit_starved = true,
            Refusal::RingFull => self.sender.note_lack_of_room(),
            _ => {}
        }
        refusal
    }

    /// Places the reply to a request. The reply can be too long, but there is always room for it. A failure changes nothing and
    /// returns the token.
    #[inline(always)]
    pub fn reply(
        &mut self,
        content: Content,
        token: ReplyToken,
        len: usize,
    ) -> Result<Placement, (ReplyError, ReplyToken)> {
        if self.check_reply::<Silent>(&token, len).is_err() {
            return Err((diagnose(|| self.check_reply(&token, len)), token));
        }
        // Place before unreserving: a batch that the end of the ring seals here precedes this reply. Its grant must count
        // the reservation of this reply, because the peer reads that batch first.
        let placement = self.place(token.header(content, len));
        self.sender.unreserve(token.allowance());
        Ok(placement)
    }

    #[inline(always)]
    fn check_reply<R: Report<ReplyError>>(&self, token: &ReplyToken, len: usize) -> Result<(), R> {
        let fits = wire::response_size(len) <= token.allowance() || rule_broken!(self.sender, LongReplies);
        ensure!(fits, ReplyError::TooLong { len, max: token.max_len() });
        ensure!(self.sender.owes(token.allowance()), ReplyError::NotExpected);
        Ok(())
    }

    #[inline(always)]
    fn place(&mut self, header: Header) -> Placement {
        let Endpoint { sender, receiver, .. } = self;
        let offset = sender.place(&header, padded_size(header.ring_len()), || receiver.consumer()) as usize;
        Placement { offset, header }
    }

    /// Whether a call would be the only one: no other is pending, and nothing waits to be posted.
    #[inline(always)]
    pub fn is_only_call(&self) -> bool {
        // Every call takes credit until its response arrives.
        self.credit_available == self.credit_granted && self.sender.is_idle()
    }

    /// Whether a reply would be the last: no other request waits for one, none of the batch that was accepted last is left, and nothing waits
    /// to be posted.
    #[inline(always)]
    pub fn is_last_reply(&self, token: &ReplyToken) -> bool {
        self.sender.owes_only(token.allowance()) && self.sender.is_idle() && self.receiver.batch_ended()
    }

    /// Whether [`Endpoint::next_write`] or [`Endpoint::needs_position_read`] may have something although nothing was placed. If not, a caller
    /// need not ask them after a compact batch with a request, which does not move the consumer position either.
    #[inline(always)]
    pub fn may_have_news(&self) -> bool {
        self.credit_starved || self.sender.may_have_news()
    }

    /// The next WRITE to post, if any. The caller writes `metadata` to `offset` of its staging ring, posts `len` bytes from
    /// there to the same offset of the peer's ring with `imm`, and calls [`Endpoint::write_posted`]. A compact batch is posted
    /// as its head and the payload behind it. Until then this method returns the same WRITE again, unless a message joins it.
    #[inline(always)]
    pub fn next_write(&mut self) -> Option<Write> {
        let consumer = self.receiver.consumer();
        let lacks_credit = self.credit_starved && self.credit_granted < self.peer_limit;
        self.sender.next_write(consumer, lacks_credit)
    }

    /// Notes that the last result of [`Endpoint::next_write`] was posted.
    #[inline(always)]
    pub fn write_posted(&mut self, write: &Write) {
        self.sender.write_posted(write);
    }

    /// Where in the receive ring the batch that the immediate `imm` announces should be. Nothing is checked, but it is inside the ring: for
    /// hints to the processor.
    #[inline]
    pub fn announced_batch(&self, imm: u32) -> Range<usize> {
        self.receiver.announced_batch(imm)
    }

    /// Accepts the batch that the immediate `imm` announced: checks and applies what is in front of its messages. They then come from
    /// [`Endpoint::next_message`], until that returns `None`. `front` is the receive ring, or the head of a compact batch that came with its
    /// completion.
    #[inline(always)]
    pub fn accept<B: RingBytes + ?Sized>(&mut self, imm: u32, front: &B) -> Result<(), Violation> {
        self.receiver.pass();
        self.receiver.consumer();
        let Ok(place) = self.receiver.check_place::<Silent>(imm) else {
            return Err(diagnose(|| self.receiver.check_place(imm)));
        };
        let offset = place.offset as usize;
        let front = match place.compact {
            Some(_) => Front::Compact(CompactHead::from_words(front.load_words(offset))),
            None => Front::Metadata([0, 16].map(|at| front.load_words(offset + at))),
        };
        let Ok(metadata) = self.check_batch::<Silent>(&place, front) else {
            return Err(diagnose(move || self.check_batch(&place, front)));
        };
        match (front, place.compact) {
            (Front::Compact(CompactHead { call_id, piggyback, .. }), Some(payload_len)) => {
                let header = Header { call_id, piggyback, payload_len };
                self.receiver.begin_batch(&place, 0, 1, Some(header));
            }
            _ if metadata.message_count == WRAP_MESSAGE_COUNT => self.receiver.skip_to_end(&place),
            _ => {
                let front = FLOW_METADATA_SIZE as u64;
                self.receiver.begin_batch(&place, front, metadata.message_count, None);
            }
        }
        self.sender.learn_from_batch(metadata.consumer_pos);
        if metadata.credit_grant > 0 {
            self.credit_starved = false;
        }
        self.credit_available += metadata.credit_grant;
        self.credit_granted += metadata.credit_grant;
        Ok(())
    }

    /// Checks what is in front of the messages of a batch, and returns it as metadata.
    #[inline(always)]
    fn check_batch<R: Report<Violation>>(&self, place: &BatchPlace, front: Front) -> Result<FlowMetadata, R> {
        let metadata = match front {
            Front::Metadata(words) => FlowMetadata::from_words(words)?,
            Front::Compact(head) => FlowMetadata {
                consumer_pos: self.sender.full_position(head.consumer_blocks)?,
                credit_grant: u64::from(head.grant_blocks) * ALIGNMENT,
                message_count: 1,
            },
        };
        let (offset, delta) = (place.offset, place.delta);
        let has_messages = match metadata.message_count {
            0 => {
                let unused = delta - FLOW_METADATA_SIZE as u64;
                ensure!(unused == 0, Violation::TrailingBytes { unused });
                false
            }
            WRAP_MESSAGE_COUNT => {
                // A marker at the start would skip a whole ring, for nothing.
                let is_rest = offset != 0 && offset + delta == self.receiver.capacity();
                ensure!(is_rest, Violation::BadWrap { offset, delta });
                false
            }
            _ => true,
        };
        let is_news = self.sender.check_batch_position(metadata.consumer_pos)?;
        // Without this, a peer could send as many of them as there is room, again and again.
        let says_something = metadata.message_count != 0 || metadata.credit_grant != 0 || is_news;
        ensure!(says_something, Violation::EmptyBatch);
        // Responses in this batch return part of what was granted. So the exact check has to wait for its last message.
        let before = if has_messages { 0 } else { self.credit_granted };
        let granted = self.credit_granted.saturating_add(metadata.credit_grant);
        let fits = before.saturating_add(metadata.credit_grant) <= self.peer_limit;
        ensure!(fits, Violation::GrantOverLimit { granted, limit: self.peer_limit });
        Ok(metadata)
    }

    /// The next message of the batch that was accepted last. Its payload is lent until this is called again, or another batch is accepted;
    /// then the peer may write over it, unless it was [held](Endpoint::hold).
    #[inline(always)]
    pub fn next_message<B: RingBytes + ?Sized>(&mut self, ring: &B) -> Result<Option<Message<U>>, Violation> {
        self.receiver.pass();
        if self.receiver.batch_ended() {
            return Ok(None);
        }
        match self.receiver.is_compact() {
            true => self.take_message::<true, B>(ring).map(Some),
            false => self.take_message::<false, B>(ring).map(Some),
        }
    }

    /// Takes the next message of a batch, which is compact or not.
    #[inline(always)]
    fn take_message<const COMPACT: bool, B: RingBytes + ?Sized>(
        &mut self,
        ring: &B,
    ) -> Result<Message<U>, Violation> {
        let (header, offset) = self.receiver.next_header::<COMPACT, B>(ring);
        let Ok(size) = self.check_message::<COMPACT, Silent>(header) else {
            return Err(diagnose(move || self.check_message::<COMPACT, _>(header)));
        };
        self.receiver.take(size);
        let (len, is_bulk) = (header.ring_len() as usize, header.is_bulk());
        let allowance = u64::from(header.piggyback) * ALIGNMENT;
        if header.is_response() {
            let call = header.call_id ^ RESPONSE_FLAG;
            self.credit_granted -= allowance;
            let user = self.pending.remove(call);
            return Ok(Message::Response { call, user, offset, len, is_bulk });
        }
        self.sender.take_credit(allowance);
        // It is not zero: that was checked.
        let blocks = NonZeroU32::new(header.piggyback).unwrap_or(NonZeroU32::MIN);
        let reply_token = ReplyToken { call_id: header.call_id, blocks };
        Ok(Message::Request { reply_token, offset, len, is_bulk })
    }

    /// Checks the next message. Returns the bytes that it takes in the ring.
    #[inline(always)]
    fn check_message<const COMPACT: bool, R: Report<Violation>>(&self, header: Header) -> Result<u64, R> {
        let (size, unused) = self.receiver.check_size::<COMPACT, R>(&header)?;
        let blocks = header.piggyback;
        let allowance = u64::from(blocks) * ALIGNMENT;
        let mut granted = self.credit_granted;
        if header.is_response() {
            let (call_id, payload_len) = (header.call_id ^ RESPONSE_FLAG, header.ring_len());
            // A call that is not pending uses no blocks.
            let taken = self.pending.blocks(call_id).unwrap_or(0);
            ensure!(taken != 0, Violation::UnknownCall { call_id });
            ensure!(blocks == taken, Violation::AllowanceMismatch { blocks, taken });
            let allowed = wire::max_response_len(allowance);
            let fits = wire::response_size(payload_len as usize) <= allowance;
            ensure!(fits, Violation::ResponseTooLong { payload_len, allowed });
            granted -= allowance;
        } else {
            let credit = self.sender.unused_credit();
            ensure!(allowance >= MIN_CREDIT, Violation::AllowanceTooSmall { blocks });
            ensure!(allowance <= credit, Violation::CreditOverrun { allowance, credit });
        }
        if self.receiver.is_at_last() {
            ensure!(unused == 0, Violation::TrailingBytes { unused });
            // After a batch, what the peer has granted and not got back must be within the peer's own limit.
            let limit = self.peer_limit;
            ensure!(granted <= limit, Violation::GrantOverLimit { granted, limit });
        }
        Ok(size)
    }

    /// Whether the batch that was accepted last has no further message.
    #[inline]
    pub fn batch_ended(&self) -> bool {
        self.receiver.batch_ended()
    }

    /// Holds the ring space of the message that [`Endpoint::next_message`] returned last, until it is [released](Endpoint::release). `None` if it is
    /// no longer lent.
    #[inline]
    pub fn hold(&mut self) -> Option<HeldSpace> {
        self.receiver.hold()
    }

    /// Ends the loan of the message that [`Endpoint::next_message`] returned last, before the next one is asked for.
    #[inline]
    pub fn pass(&mut self) {
        self.receiver.pass();
    }

    /// Releases the ring space of a message that the application no longer needs. Returns `false` if this endpoint does not hold
    /// that space.
    #[inline]
    pub fn release(&mut self, space: HeldSpace) -> bool {
        self.receiver.release(space)
    }

    /// The consumer position, for the word that the peer can READ. The caller publishes it whenever it moves.
    #[inline(always)]
    pub fn consumer_position(&mut self) -> u64 {
        self.receiver.consumer()
    }

    /// Whether the payload of the next message may be posted as a WRITE of its own, see [`Endpoint::payload_sent_directly`]. It
    /// may not while a sealed batch waits to be posted.
    #[inline(always)]
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

    /// Abandons all pending calls, because the connection is lost: returns what was attached to them. Nothing more is to be placed.
    pub fn abandon_all(&mut self) -> impl Iterator<Item = U> + '_ {
        self.sender.forget_open_batch();
        self.pending.abandon_all()
    }

    /// Messages in the open batch: placed, and not posted or sealed yet.
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
            credit_reserved: self.sender.credit_reserved(),
            capacity: self.sender.capacity(),
            credit_available: self.credit_available,
            pending: self.pending.len(),
        }
    }
}

#[cfg(test)]
impl<U> Endpoint<U> {
    /// Turns one rule off.
    pub(super) fn break_rule(&mut self, rule: Option<super::tests::BrokenRule>, params: &FlowParams) {
        self.sender.broken_rule = rule;
        self.receiver.broken_rule = rule;
        if rule_broken!(self.sender, CreditOfPeerRing) {
            let limit = agreed_credit(params.peer_credit_limit, params.peer_ring);
            (self.credit_available, self.credit_granted, self.peer_limit) = (limit, limit, limit);
            self.max_response_len = wire::max_response_len(limit) as usize;
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

    pub(super) fn credit_limit(&self) -> u64 {
        self.sender.limit()
    }
}
