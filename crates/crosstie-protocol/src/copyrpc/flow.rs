//! One side of a connection: its sending half, its receiving half, and the calls that it has pending.
//!
//! Credit is permission to call: ring space, in bytes, that is reserved for responses. The callee grants it, a call uses it, and the
//! response returns it. It has three words, which each side keeps for both directions:
//!
//! | word | what the peer grants to this side ([`Flow`]) | what this side grants to the peer ([`Sender`]) |
//! | --- | --- | --- |
//! | `credit_available` | no pending call of this side uses it | it was posted, and no request of the peer uses it |
//! | `credit_owed` | pending calls of this side use it: the peer owes their responses | requests of the peer use it: this side owes their responses |
//! | `credit_granted` | the sum of both | R: the sum of both, and what is granted by metadata that is not posted yet |
//!
//! `credit_limit` is the most that `credit_granted` may be. A call says in blocks of 32 bytes how much it uses (`credit_blocks`); a batch
//! says how much it grants (`credit_grant`).
//!
//! Each step checks everything, and then changes everything. Its checks are functions that change nothing: `check_call`, `check_reply`,
//! `check_batch`, `check_message`. They say what is wrong only when [`diagnose`] asks.

use core::num::NonZeroU32;
use core::ops::Range;

use super::message::{Content, Message, Placement, ReplyToken, RingBytes};
use super::params::{FlowParams, FlowState, MIN_CREDIT, Progress, agreed_credit};
use super::pending_calls::{CallId, PendingCalls};
use super::receiver::{BatchPlace, Receiver, RetainedSpace};
use super::sender::Sender;
use super::violation::{
    CallRefused, FlowParamsError, Refusal, ReplyError, ReplyRefused, Report, Silent, Violation, diagnose,
};
use super::wire::{
    self, ALIGNMENT, CompactHead, FLOW_METADATA_SIZE, FlowMetadata, HEADER_SIZE, Header, RESPONSE_FLAG,
    WRAP_MESSAGE_COUNT, padded_size,
};
use super::write::Write;

/// One side of a connection: calls and replies go out, requests and responses come in.
///
/// `U` is what the caller attaches to a call and gets back with the response. The [module](super) shows the order in
/// which the methods are used.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Flow<U> {
    sender: Sender,
    receiver: Receiver,
    pending: PendingCalls<U>,
    /// What the peer grants to this side, see the [module](self).
    credit_available: u64,
    credit_owed: u64,
    /// Both together are at most this after every batch.
    credit_limit: u64,
    /// A call was refused for lack of credit since the last grant.
    lacks_credit: bool,
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

impl<U> Flow<U> {
    /// Creates a flow. The peer's flow is created with the same numbers, own and peer's exchanged.
    pub fn new(params: &FlowParams) -> Result<Self, FlowParamsError> {
        params.check()?;
        let sender = Sender::new(
            params.peer_ring,
            agreed_credit(params.credit_limit, params.peer_ring),
            params.compact,
        );
        let credit_limit = agreed_credit(params.peer_credit_limit, params.ring);
        Ok(Flow {
            max_request_len: sender.max_request_size() as usize - HEADER_SIZE,
            max_response_len: wire::max_response_len(credit_limit) as usize,
            sender,
            receiver: Receiver::new(params.ring),
            pending: PendingCalls::new(params.pending_calls),
            credit_available: credit_limit,
            credit_owed: 0,
            credit_limit,
            lacks_credit: false,
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
    ) -> Result<(CallId, Placement), CallRefused<U>> {
        let Ok(credit) = self.check_call::<Silent>(len, response_len) else {
            return Err(CallRefused { cause: self.refuse_call(len, response_len), user });
        };
        let credit_blocks = (credit / ALIGNMENT) as u32;
        self.credit_available -= credit;
        self.credit_owed += credit;
        let call = self.pending.insert(credit_blocks, user);
        let payload_len = len as u32 | content.flag();
        Ok((call, self.place(Header { call_id: call.bits(), credit_blocks, payload_len })))
    }

    /// Checks that a call can be made now. Returns the credit that it uses.
    #[inline]
    fn check_call<R: Report<Refusal>>(&self, len: usize, response_len: usize) -> Result<u64, R> {
        let (max_len, max_response) = (self.max_request_len, self.max_response_len);
        ensure!(len <= max_len, Refusal::TooLong { len, max: max_len });
        ensure!(
            response_len <= max_response,
            Refusal::ResponseTooLong { len: response_len, max: max_response }
        );
        ensure!(!self.pending.is_full(), Refusal::TooManyCalls);
        let credit = wire::call_credit(response_len as u32);
        ensure!(credit <= self.credit_available, Refusal::NoCredit);
        ensure!(self.sender.has_room(padded_size(len as u32)), Refusal::RingFull);
        Ok(credit)
    }

    /// Says why a call is refused, and notes what it lacks.
    #[cold]
    #[inline(never)]
    fn refuse_call(&mut self, len: usize, response_len: usize) -> Refusal {
        let refusal = diagnose(|| self.check_call(len, response_len));
        match refusal {
            Refusal::NoCredit => self.lacks_credit = true,
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
    ) -> Result<Placement, ReplyRefused> {
        if self.check_reply::<Silent>(&token, len).is_err() {
            return Err(ReplyRefused { cause: diagnose(|| self.check_reply(&token, len)), token });
        }
        // Place before the credit is returned: a batch that the end of the ring seals here precedes this reply. Its grant must count
        // the credit of this reply as granted, because the peer reads that batch first.
        let placement = self.place(token.header(content, len));
        self.sender.return_credit(token.credit());
        Ok(placement)
    }

    #[inline]
    fn check_reply<R: Report<ReplyError>>(&self, token: &ReplyToken, len: usize) -> Result<(), R> {
        let fits = wire::response_size(len) <= token.credit() || rule_broken!(self.sender, LongReplies);
        ensure!(fits, ReplyError::TooLong { len, max: token.max_len() });
        ensure!(self.sender.owes(token.credit()), ReplyError::NotExpected);
        Ok(())
    }

    /// What the peer has granted to this side and not got back.
    #[inline]
    fn credit_granted(&self) -> u64 {
        self.credit_available + self.credit_owed
    }

    #[inline]
    fn place(&mut self, header: Header) -> Placement {
        let Flow { sender, receiver, .. } = self;
        let offset = sender.place(&header, padded_size(header.ring_len()), || receiver.consumer()) as usize;
        Placement { offset, header }
    }

    /// Whether a call would be the only one: no other is pending, and nothing waits to be posted.
    #[inline]
    pub fn is_only_call(&self) -> bool {
        // Every call uses credit until its response arrives.
        self.credit_owed == 0 && self.sender.is_idle()
    }

    /// Whether a reply would be the last: no other request waits for one, none of the batch that was accepted last is left, and nothing waits
    /// to be posted.
    #[inline]
    pub fn is_last_reply(&self, token: &ReplyToken) -> bool {
        self.sender.owes_only(token.credit()) && self.sender.is_idle() && self.receiver.batch_ended()
    }

    /// Whether [`Flow::next_write`] or [`Flow::needs_position_read`] may have something although nothing was placed. If not, a caller
    /// need not ask them after a compact batch with a request, which does not move the consumer position either.
    #[inline]
    pub fn may_have_news(&self) -> bool {
        self.lacks_credit || self.sender.may_have_news()
    }

    /// The next WRITE to post, if any. The caller writes `metadata` to `offset` of its staging ring, posts `len` bytes from
    /// there to the same offset of the peer's ring with `imm`, and calls [`Flow::write_posted`]. A compact batch is posted
    /// as its head and the payload behind it. Until then this method returns the same WRITE again, unless a message joins it.
    #[inline(always)]
    pub fn next_write(&mut self) -> Option<Write> {
        let consumer = self.receiver.consumer();
        let lacks_credit = self.lacks_credit && self.credit_granted() < self.credit_limit;
        self.sender.next_write(consumer, lacks_credit)
    }

    /// Notes that the last result of [`Flow::next_write`] was posted.
    #[inline]
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
    /// [`Flow::next_message`], until that returns `None`. `front` is the receive ring, or the head of a compact batch that came with its
    /// completion.
    #[inline(always)]
    pub fn accept<B: RingBytes + ?Sized>(&mut self, imm: u32, front: &B) -> Result<(), Violation> {
        self.receiver.finish_message();
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
            (Front::Compact(CompactHead { call_id, credit_blocks, .. }), Some(payload_len)) => {
                let header = Header { call_id, credit_blocks, payload_len };
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
            self.lacks_credit = false;
        }
        self.credit_available += metadata.credit_grant;
        Ok(())
    }

    /// Checks what is in front of the messages of a batch, and returns it as metadata.
    #[inline]
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
        let before = if has_messages { 0 } else { self.credit_granted() };
        let granted = self.credit_granted().saturating_add(metadata.credit_grant);
        let fits = before.saturating_add(metadata.credit_grant) <= self.credit_limit;
        ensure!(fits, Violation::GrantOverLimit { granted, limit: self.credit_limit });
        Ok(metadata)
    }

    /// The next message of the batch that was accepted last. Its payload stays until this is called again, or another batch is accepted;
    /// then the peer may write over it, unless it was [retained](Flow::retain).
    #[inline(always)]
    pub fn next_message<B: RingBytes + ?Sized>(&mut self, ring: &B) -> Result<Option<Message<U>>, Violation> {
        self.receiver.finish_message();
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
        self.receiver.take::<COMPACT>(size);
        let (len, is_bulk) = (header.ring_len() as usize, header.is_bulk());
        let credit = u64::from(header.credit_blocks) * ALIGNMENT;
        if header.is_response() {
            let call = CallId::from_bits(header.call_id ^ RESPONSE_FLAG);
            self.credit_owed -= credit;
            let user = self.pending.remove(call);
            return Ok(Message::Response { call, user, offset, len, is_bulk });
        }
        self.sender.use_credit(credit);
        // It is not zero: that was checked.
        let credit_blocks = NonZeroU32::new(header.credit_blocks).unwrap_or(NonZeroU32::MIN);
        let reply_token = ReplyToken { call_id: header.call_id, credit_blocks };
        Ok(Message::Request { reply_token, offset, len, is_bulk })
    }

    /// Checks the next message. Returns the bytes that it takes in the ring.
    #[inline]
    fn check_message<const COMPACT: bool, R: Report<Violation>>(&self, header: Header) -> Result<u64, R> {
        let (size, unused) = self.receiver.check_size::<COMPACT, R>(&header)?;
        let blocks = header.credit_blocks;
        let credit = u64::from(blocks) * ALIGNMENT;
        let mut returned = 0;
        if header.is_response() {
            let (call_id, payload_len) = (header.call_id ^ RESPONSE_FLAG, header.ring_len());
            // A call that is not pending uses none.
            let used = self.pending.credit_blocks(CallId::from_bits(call_id)).unwrap_or(0);
            ensure!(used != 0, Violation::UnknownCall { call_id });
            ensure!(blocks == used, Violation::CreditMismatch { blocks, used });
            let allowed = wire::max_response_len(credit);
            let fits = wire::response_size(payload_len as usize) <= credit;
            ensure!(fits, Violation::ResponseTooLong { payload_len, allowed });
            returned = credit;
        } else {
            let available = self.sender.credit_available();
            ensure!(credit >= MIN_CREDIT, Violation::CreditTooSmall { blocks });
            ensure!(credit <= available, Violation::CreditOverrun { credit, available });
        }
        if self.receiver.is_at_last() {
            ensure!(unused == 0, Violation::TrailingBytes { unused });
            // After a batch, what the peer has granted and not got back must be within the peer's own limit.
            let (granted, limit) = (self.credit_granted() - returned, self.credit_limit);
            ensure!(granted <= limit, Violation::GrantOverLimit { granted, limit });
        }
        Ok(size)
    }

    /// Whether the batch that was accepted last has no further message.
    #[inline]
    pub fn batch_ended(&self) -> bool {
        self.receiver.batch_ended()
    }

    /// Retains the ring space of the message that [`Flow::next_message`] returned last, until it is [released](Flow::release). `None` if that
    /// space is free already.
    #[inline]
    pub fn retain(&mut self) -> Option<RetainedSpace> {
        self.receiver.retain()
    }

    /// Frees the ring space of the message that [`Flow::next_message`] returned last, before the next one is asked for. Not if it is retained.
    #[inline]
    pub fn finish_message(&mut self) {
        self.receiver.finish_message();
    }

    /// Releases the ring space of a message that the application no longer needs. Returns `false` if this flow did not
    /// retain that space.
    #[inline]
    pub fn release(&mut self, space: RetainedSpace) -> bool {
        self.receiver.release(space)
    }

    /// The consumer position, for the word that the peer can READ. The caller publishes it whenever it moves.
    #[inline]
    pub fn consumer_position(&mut self) -> u64 {
        self.receiver.consumer()
    }

    /// Whether the payload of the next message may be posted as a WRITE of its own, see [`Flow::payload_sent_directly`]. It
    /// may not while a sealed batch waits to be posted.
    #[inline]
    pub fn can_send_payload_directly(&self) -> bool {
        self.sender.has_no_sealed_write()
    }

    /// Notes that the payload of the message that was placed last is not in the staging ring: it was posted as a WRITE of its
    /// own, to the same offset of the peer's ring. The batch ends with the header of that message.
    ///
    /// Only if [`Flow::can_send_payload_directly`] was true before the message was placed.
    pub fn payload_sent_directly(&mut self, placement: &Placement) {
        let Flow { sender, receiver, .. } = self;
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

    /// Abandons a call: returns what the caller attached to it, now. The flow still expects the response, because the
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
    pub fn state(&self) -> FlowState {
        FlowState {
            in_flight: self.sender.in_flight(),
            credit_granted: self.sender.credit_granted(),
            capacity: self.sender.capacity(),
            credit_available: self.credit_available,
            pending: self.pending.len(),
        }
    }
}

#[cfg(test)]
impl<U> Flow<U> {
    /// Turns one rule off.
    pub(super) fn break_rule(&mut self, rule: Option<super::tests::BrokenRule>, params: &FlowParams) {
        self.sender.broken_rule = rule;
        self.receiver.broken_rule = rule;
        if rule_broken!(self.sender, CreditOfPeerRing) {
            let limit = agreed_credit(params.peer_credit_limit, params.peer_ring);
            (self.credit_available, self.credit_limit) = (limit, limit);
            self.max_response_len = wire::max_response_len(limit) as usize;
        }
    }

    /// Lets call ids repeat at once, so that the states of a model repeat.
    pub(super) fn use_one_generation(&mut self) {
        self.pending.use_one_generation();
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
        self.sender.credit_limit()
    }
}
