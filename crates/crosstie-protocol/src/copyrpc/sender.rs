//! The sending half of an endpoint: where the next bytes go in the peer's receive ring, and whether they may be written.
//!
//! ```text
//!        remote_consumer        posted      batch start      producer
//!              |                  |              |               |
//!  ------------+------------------+--------------+---------------+------------> position (u64, never goes back)
//!   released   | posted, not      | sealed, not  | open batch,   |
//!   by peer    | released by peer | posted yet   | still grows   |
//! ```
//!
//! A batch is *open* while messages are added to it. It is *sealed* when its metadata is fixed: when the caller asks for
//! the next WRITE, when the end of the ring is reached, or when the payload of its last message was posted directly.
//!
//! Promises:
//! - `in_flight + 2 * reserved <= capacity`, always. A response with allowance `a` adds at most `2a` to `in_flight`: it
//!   may have to skip the end of the ring, and it skips less than it needs itself. It takes `a` from `reserved`. So a
//!   response always fits.
//! - Requests leave `2 * limit` bytes free, not only `2 * reserved`. Otherwise this side's next request could take the space
//!   that a response has used before this side grants it to the peer again as credit, and a busy side could starve its peer
//!   for ever.
//! - A WRITE that could not be posted stays the next one to post; nothing is lost by trying again later.
//!
//! This side's own consumer position, which each batch carries to the peer, comes from the receiving half
//! ([`Receiver`](super::receiver::Receiver)).

use super::flow::{CompactWrite, Progress, RingWrite, RingWriteKind};
use super::violation::Violation;
use super::wire::{
    self, ALIGNMENT, COMPACT_FLAG, COMPACT_HEAD_SIZE, CompactHead, FLOW_METADATA_SIZE, FlowMetadata, Header,
    MAX_COMPACT_PAYLOAD, WRAP_MESSAGE_COUNT,
};

const METADATA: u64 = FLOW_METADATA_SIZE as u64;
/// The most writes that can be sealed and not posted: a batch, a batch that the end of the ring sealed, and the wrap marker
/// behind it.
const MAX_SEALED: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sender {
    capacity: u64,
    /// `capacity - 1`: the bits of a position that are its offset.
    offset_mask: u64,
    /// The most that `reserved` may be.
    limit: u64,
    /// The most bytes in flight with which a request may be placed: `capacity - 2 * limit`.
    request_room: u64,
    /// Whether a short message that is alone in its batch makes the batch compact.
    compact: bool,
    /// Credit granted to the peer, used by requests or not, for responses that have not been placed.
    reserved: u64,
    /// The part of `reserved` that was posted to the peer and that no request of the peer has used.
    spendable: u64,
    /// The part of `reserved` that requests of the peer have used: their responses have not been placed.
    owed: u64,
    /// The end of all bytes that were placed.
    producer: u64,
    /// The end of all bytes that were posted.
    posted: u64,
    /// The position up to which the peer has released its ring, as far as this side knows.
    remote_consumer: u64,
    /// The peer's consumer position in the metadata of the last batch.
    last_batch_position: u64,
    /// The peer's consumer position that the last RDMA READ returned.
    last_read: u64,
    open: OpenBatch,
    sealed: [SealedWrite; MAX_SEALED],
    sealed_len: usize,
    /// The consumer position of this side in the metadata that was sealed last.
    announced: u64,
    /// A request or a batch of metadata did not fit since `remote_consumer` last moved.
    ring_starved: bool,
    /// A READ of the peer's consumer position is under way.
    reading: bool,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::tests::BrokenRule>,
    /// A model has moved the positions back, so `last_batch_position` is not known.
    #[cfg(test)]
    is_rebased: bool,
}

/// The open batch. It has messages, unless no batch is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OpenBatch {
    start: u64,
    messages: u32,
    /// The header of its first message.
    first: Header,
    /// The end of the ring, as a position. Zero if there is no open batch: then nothing fits before it.
    ring_end: u64,
}

impl OpenBatch {
    const NONE: OpenBatch = OpenBatch {
        start: 0,
        messages: 0,
        first: Header { call_id: 0, piggyback: 0, payload_len: 0 },
        ring_end: 0,
    };

    #[inline(always)]
    fn exists(&self) -> bool {
        self.messages != 0
    }

    #[inline]
    fn take(&mut self) -> Option<OpenBatch> {
        self.exists().then(|| core::mem::replace(self, OpenBatch::NONE))
    }
}

/// A sealed batch or wrap marker: `len` bytes to write at `start`, `delta` bytes to announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SealedWrite {
    start: u64,
    len: u64,
    delta: u64,
    metadata: FlowMetadata,
    /// The header of the message of a compact batch.
    compact: Option<Header>,
}

impl SealedWrite {
    const EMPTY: SealedWrite = SealedWrite {
        start: 0,
        len: 0,
        delta: 0,
        metadata: FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 0 },
        compact: None,
    };
}

impl Sender {
    /// For a peer's ring of `capacity` bytes. The peer has `limit` bytes of credit from the start.
    pub(super) fn new(capacity: u64, limit: u64, compact: bool) -> Self {
        Sender {
            capacity,
            offset_mask: capacity - 1,
            limit,
            request_room: capacity - 2 * limit,
            compact,
            reserved: limit,
            spendable: limit,
            owed: 0,
            producer: 0,
            posted: 0,
            remote_consumer: 0,
            last_batch_position: 0,
            last_read: 0,
            open: OpenBatch::NONE,
            sealed: [SealedWrite::EMPTY; MAX_SEALED],
            sealed_len: 0,
            announced: 0,
            ring_starved: false,
            reading: false,
            #[cfg(test)]
            broken_rule: None,
            #[cfg(test)]
            is_rebased: false,
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.producer - self.remote_consumer
    }

    #[inline]
    pub(super) fn open_batch_messages(&self) -> u32 {
        self.open.messages
    }

    #[inline]
    pub(super) fn progress(&self) -> Progress {
        Progress { placed: self.producer, posted: self.posted, released: self.remote_consumer }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The most bytes that a request may take, header and padding included. Such a request fits into an empty ring even
    /// if it has to skip the longest possible end of the ring.
    pub(super) fn max_request_size(&self) -> u64 {
        let half = (self.capacity - 2 * self.limit + ALIGNMENT) / 2;
        (half & !(ALIGNMENT - 1)) - METADATA
    }

    /// Whether a request of `size` bytes fits now. If it does not, the ring counts as starved.
    #[inline(always)]
    pub(super) fn has_room(&mut self, size: u64, fits_before_end: bool) -> bool {
        let total = if rule_broken!(self, RoomWithoutWrap) {
            METADATA + size
        } else {
            self.total_size(size, fits_before_end)
        };
        let reserve = if rule_broken!(self, CallsUseCreditRoom) { self.reserved } else { self.limit };
        let fits = self.in_flight() + total + 2 * reserve <= self.capacity;
        if !fits {
            self.ring_starved = true;
        }
        fits
    }

    /// Adds a message with this header and of `size` bytes: to the open batch, or to a new one, at the start of the ring if need be. Returns its
    /// position. The caller has checked that there is room. `consumer` is called only if the end of the ring seals a
    /// write.
    #[inline(always)]
    pub(super) fn place(
        &mut self,
        header: Header,
        size: u64,
        fits_before_end: bool,
        consumer: impl FnOnce() -> u64,
    ) -> u64 {
        if !fits_before_end {
            self.wrap(consumer());
        }
        if !self.open.exists() {
            let start = self.producer;
            self.producer += METADATA;
            let ring_end = (start | self.offset_mask) + 1;
            self.open = OpenBatch { start, messages: 0, first: header, ring_end };
        }
        self.open.messages += 1;
        let position = self.producer;
        self.producer += size;
        position
    }

    /// Whether a message of `size` bytes can be [appended](Sender::append): there is an open batch, and the message fits before the end of the ring.
    #[inline(always)]
    pub(super) fn can_append(&self, size: u64) -> bool {
        self.producer + size <= self.open.ring_end
    }

    /// Whether there is room to append a request of `size` bytes. If not, the ring counts as starved. There is always room for a response that
    /// was expected.
    #[inline(always)]
    pub(super) fn has_room_to_append(&mut self, size: u64) -> bool {
        let has_room = self.producer + size - self.remote_consumer <= self.request_room;
        if !has_room {
            self.ring_starved = true;
        }
        has_room
    }

    /// Adds a message of `size` bytes to the open batch, if that has fewer than `most` messages then. Returns its position.
    #[inline(always)]
    pub(super) fn append(&mut self, size: u64, most: u32) -> Option<u64> {
        let (position, messages) = (self.producer, self.open.messages + 1);
        if messages >= most {
            return None;
        }
        self.open.messages = messages;
        self.producer = position + size;
        Some(position)
    }

    /// Lets nothing be appended to the open batch, because the connection is lost.
    pub(super) fn forget_open_batch(&mut self) {
        self.open = OpenBatch::NONE;
    }

    /// Whether a response with this allowance is possible: requests of the peer that have no response yet have used at
    /// least this much credit.
    #[inline]
    pub(super) fn expects_response(&self, allowance: u64) -> bool {
        allowance <= self.owed
    }

    /// Ends the reservation of a response that has been placed.
    #[inline]
    pub(super) fn unreserve(&mut self, allowance: u64) {
        self.reserved -= allowance;
        self.owed -= allowance;
    }

    /// Takes the credit that a request of the peer uses.
    #[inline]
    pub(super) fn spend(&mut self, allowance: u64) -> Result<(), Violation> {
        if allowance > self.spendable {
            return Err(Violation::CreditOverrun { allowance, credit: self.spendable });
        }
        self.take_credit(allowance);
        Ok(())
    }

    /// The credit that requests of the peer can use.
    #[inline(always)]
    pub(super) fn spendable(&self) -> u64 {
        self.spendable
    }

    /// Takes credit. There is as much.
    #[inline(always)]
    pub(super) fn take_credit(&mut self, allowance: u64) {
        self.spendable -= allowance;
        self.owed += allowance;
    }

    /// The next WRITE to post: the oldest sealed one, else the open batch, else a batch of metadata alone if one is due.
    /// `lacks_credit`: a call of this side was refused for lack of credit, and the peer has granted less than its limit.
    #[inline]
    pub(super) fn next_write(&mut self, consumer: u64, lacks_credit: bool) -> Option<RingWrite> {
        // A write that was just sealed is not read back from where it was stored: the processor would wait for the stores.
        let write = if self.sealed_len > 0 {
            self.sealed[0]
        } else if let Some(open) = self.open.take() {
            if self.compact && open.messages == 1 && open.first.payload_len <= MAX_COMPACT_PAYLOAD {
                self.seal_compact(open, consumer)
            } else {
                self.seal(open, consumer)
            }
        } else if self.credit_batch_due(consumer, lacks_credit) {
            let start = self.producer;
            self.producer += METADATA;
            self.push_sealed(start, METADATA, 0, consumer, None)
        } else {
            return None;
        };
        let (imm, compact) = match &write.compact {
            Some(header) => {
                (COMPACT_FLAG | header.payload_len, Some(CompactHead::new(&write.metadata, header)))
            }
            None => (wire::encode_imm(write.delta), None),
        };
        Some(RingWrite {
            offset: self.offset(write.start) as usize,
            len: write.len as usize,
            imm,
            compact,
            metadata: write.metadata,
            kind: match write.metadata.message_count {
                WRAP_MESSAGE_COUNT => RingWriteKind::Wrap,
                0 => RingWriteKind::Credit,
                _ => RingWriteKind::Batch,
            },
        })
    }

    /// Notes that the last result of `next_write` was posted.
    #[inline]
    pub(super) fn write_posted(&mut self) {
        if self.sealed_len == 0 {
            return;
        }
        let write = self.sealed[0];
        self.posted += write.delta;
        self.spendable += write.metadata.credit_grant;
        self.sealed_len -= 1;
        if self.sealed_len > 0 {
            self.sealed.copy_within(1.., 0);
        }
    }

    /// The open batch as a compact batch, if it is one and no sealed write comes before it. It stays open until
    /// [`compact_posted`](Sender::compact_posted).
    #[inline(always)]
    pub(super) fn open_compact(&self, consumer: u64) -> Option<CompactWrite> {
        let OpenBatch { start, messages, first, .. } = self.open;
        let is_compact =
            self.compact && self.sealed_len == 0 && messages == 1 && first.payload_len <= MAX_COMPACT_PAYLOAD;
        is_compact.then(|| self.compact_at(start, &first, self.reserved, consumer))
    }

    /// Whether no request but that of this response waits for its response, and nothing waits to be posted.
    #[inline(always)]
    pub(super) fn is_last_response(&self, allowance: u64) -> bool {
        self.owed == allowance && !self.open.exists() && self.sealed_len == 0
    }

    /// A request that is not placed yet, as a compact batch, if there is room for it, and nothing is open or sealed. Nothing changes before
    /// [`compact_posted`](Sender::compact_posted). `consumer` is called only then. The payload is short.
    #[inline(always)]
    pub(super) fn request_alone(
        &self,
        header: &Header,
        consumer: impl FnOnce() -> u64,
    ) -> Option<CompactWrite> {
        let size = METADATA + wire::padded_size(header.payload_len);
        let is_alone = !self.open.exists()
            && self.sealed_len == 0
            && self.compact
            && self.offset(self.producer) + size <= self.capacity
            && self.in_flight() + size + 2 * self.limit <= self.capacity;
        is_alone.then(|| self.compact_at(self.producer, header, self.reserved, consumer()))
    }

    /// A response that is not placed yet, as a compact batch. Only if [`is_last_response`](Sender::is_last_response). Nothing changes before
    /// [`unreserve`](Sender::unreserve) and [`compact_posted`](Sender::compact_posted). `consumer` is called only then. The payload is short.
    #[inline(always)]
    pub(super) fn last_response_alone(
        &self,
        header: &Header,
        allowance: u64,
        consumer: impl FnOnce() -> u64,
    ) -> Option<CompactWrite> {
        debug_assert!(self.is_last_response(allowance), "another request waits for its response");
        let is_alone = self.compact && self.fits_before_end(wire::padded_size(header.payload_len));
        is_alone.then(|| self.compact_at(self.producer, header, self.reserved - allowance, consumer()))
    }

    /// A compact batch that begins at `start`. `reserved`: the reservations once its message was placed.
    #[inline(always)]
    fn compact_at(&self, start: u64, header: &Header, reserved: u64, consumer: u64) -> CompactWrite {
        let end = start + wire::compact_size(header.payload_len);
        let credit_grant = self.grantable(end - self.remote_consumer, reserved);
        let metadata = FlowMetadata { consumer_pos: consumer, credit_grant, message_count: 1 };
        CompactWrite {
            offset: self.offset(start) as usize,
            payload_len: header.payload_len as usize,
            imm: COMPACT_FLAG | header.payload_len,
            head: CompactHead::new(&metadata, header),
            end,
            credit_grant,
            consumer,
        }
    }

    /// Notes that a compact batch was posted.
    #[inline(always)]
    pub(super) fn compact_posted(&mut self, write: &CompactWrite) {
        self.open.take();
        self.producer = write.end;
        self.posted = write.end;
        self.reserved += write.credit_grant;
        self.spendable += write.credit_grant;
        self.announced = write.consumer;
    }

    /// Whether a flush may have something to post, or a READ to make, though no message was placed: credit that was not granted, or a lack
    /// of room.
    #[inline(always)]
    pub(super) fn may_have_news(&self) -> bool {
        self.reserved < self.limit || self.ring_starved
    }

    /// Whether every sealed write was posted.
    #[inline]
    pub(super) fn has_no_sealed_write(&self) -> bool {
        self.sealed_len == 0
    }

    /// Seals the open batch. Its last `tail` bytes are announced, but they are not part of its WRITE: a WRITE of their own
    /// has carried them.
    pub(super) fn seal_without_tail(&mut self, tail: u64, consumer: u64) {
        if let Some(open) = self.open.take() {
            self.push_sealed(open.start, self.producer - open.start - tail, open.messages, consumer, None);
        }
    }

    /// Takes the peer's consumer position from the metadata of a batch. Returns whether it is beyond that of the batch before.
    #[inline]
    pub(super) fn learn_from_batch(&mut self, position: u64) -> Result<bool, Violation> {
        if rule_broken!(self, DeltaPosition) {
            self.remote_consumer = self.producer.min(self.remote_consumer + position);
            return Ok(true);
        }
        self.learn(position, self.last_batch_position)?;
        let is_news = position > self.last_batch_position;
        #[cfg(test)]
        let is_news = is_news || self.is_rebased;
        self.last_batch_position = position;
        Ok(is_news)
    }

    /// The peer's consumer position with these low bits, in blocks, if it is neither beyond what was sent nor behind that of the batch before.
    #[inline(always)]
    pub(super) fn compact_position(&self, blocks: u32) -> Option<u64> {
        let behind = u64::from(((self.posted / ALIGNMENT) as u32).wrapping_sub(blocks)) * ALIGNMENT;
        let is_valid = behind <= self.posted - self.last_batch_position && !rule_broken!(self, DeltaPosition);
        is_valid.then(|| self.posted - behind)
    }

    /// Takes the peer's consumer position that [`compact_position`](Sender::compact_position) has returned.
    #[inline(always)]
    pub(super) fn learn_compact(&mut self, position: u64) {
        self.last_batch_position = position;
        self.learn_release(position);
    }

    /// The peer's consumer position with these low bits, in blocks: the highest one that is not beyond what was sent.
    #[inline]
    pub(super) fn full_position(&self, blocks: u32) -> Result<u64, Violation> {
        let behind = ((self.posted / ALIGNMENT) as u32).wrapping_sub(blocks);
        self.posted.checked_sub(u64::from(behind) * ALIGNMENT).ok_or(Violation::ConsumerBeyondSent {
            position: u64::from(blocks) * ALIGNMENT,
            sent: self.posted,
        })
    }

    /// Takes the peer's consumer position from an RDMA READ. It may be newer or older than what batches said.
    pub(super) fn learn_from_read(&mut self, position: u64) -> Result<(), Violation> {
        self.reading = false;
        if !position.is_multiple_of(ALIGNMENT) {
            return Err(Violation::ConsumerMisaligned { position });
        }
        self.learn(position, self.last_read)?;
        self.last_read = position;
        Ok(())
    }

    /// Whether a READ of the peer's consumer position would help: something did not fit, and the peer may have released
    /// more than this side knows.
    #[inline]
    pub(super) fn needs_position_read(&self) -> bool {
        self.ring_starved
            && !self.reading
            && self.posted > self.remote_consumer
            && !rule_broken!(self, NeverReads)
    }

    pub(super) fn position_read_posted(&mut self) {
        self.reading = true;
    }

    #[inline(always)]
    pub(super) fn offset(&self, position: u64) -> u64 {
        position & self.offset_mask
    }

    #[inline]
    fn learn(&mut self, position: u64, before: u64) -> Result<(), Violation> {
        if position < before {
            return Err(Violation::ConsumerWentBack { position, before });
        }
        if position > self.posted {
            return Err(Violation::ConsumerBeyondSent { position, sent: self.posted });
        }
        self.learn_release(position);
        Ok(())
    }

    #[inline(always)]
    fn learn_release(&mut self, position: u64) {
        if position > self.remote_consumer {
            self.remote_consumer = position;
            self.ring_starved = false;
        }
    }

    /// Whether `size` bytes can follow without crossing the end of the ring. A batch that ends exactly there is complete.
    #[inline(always)]
    pub(super) fn fits_before_end(&self, size: u64) -> bool {
        if self.open.exists() {
            self.producer + size <= self.open.ring_end
        } else {
            self.offset(self.producer) + METADATA + size <= self.capacity
        }
    }

    /// The bytes that `place` will add to `producer`, with metadata and skip.
    #[inline(always)]
    fn total_size(&self, size: u64, fits_before_end: bool) -> u64 {
        if fits_before_end {
            return if self.open.exists() { size } else { METADATA + size };
        }
        self.bytes_to_end() + METADATA + size
    }

    /// Bytes up to the end of the ring; zero if `producer` is there already.
    #[inline]
    fn bytes_to_end(&self) -> u64 {
        self.producer.wrapping_neg() & self.offset_mask
    }

    #[cold]
    fn wrap(&mut self, consumer: u64) {
        if let Some(open) = self.open.take() {
            self.seal(open, consumer);
        }
        let skip = self.bytes_to_end();
        if skip > 0 {
            let start = self.producer;
            self.producer += skip;
            self.push_sealed(start, METADATA, WRAP_MESSAGE_COUNT, consumer, None);
        }
    }

    #[inline]
    fn seal(&mut self, open: OpenBatch, consumer: u64) -> SealedWrite {
        self.push_sealed(open.start, self.producer - open.start, open.messages, consumer, None)
    }

    /// Seals a batch with one short message as a compact batch: the rest of the room that the message had is free again. What
    /// is placed from now on does not touch the payload, which stays where it was placed until the batch was posted.
    #[inline]
    fn seal_compact(&mut self, open: OpenBatch, consumer: u64) -> SealedWrite {
        let header = open.first;
        self.producer = open.start + wire::compact_size(header.payload_len);
        let len = COMPACT_HEAD_SIZE as u64 + u64::from(header.payload_len);
        self.push_sealed(open.start, len, 1, consumer, Some(header))
    }

    #[inline(always)]
    fn push_sealed(
        &mut self,
        start: u64,
        len: u64,
        message_count: u32,
        consumer: u64,
        compact: Option<Header>,
    ) -> SealedWrite {
        let credit_grant = self.grantable(self.in_flight(), self.reserved);
        debug_assert!(
            message_count > 0 || credit_grant > 0 || consumer > self.announced,
            "the peer would not accept a batch without messages or news"
        );
        self.reserved += credit_grant;
        let consumer_pos =
            if rule_broken!(self, DeltaPosition) { consumer - self.announced } else { consumer };
        let write = SealedWrite {
            start,
            len,
            delta: self.producer - start,
            metadata: FlowMetadata { consumer_pos, credit_grant, message_count },
            compact,
        };
        self.sealed[self.sealed_len] = write;
        self.sealed_len += 1;
        self.announced = consumer;
        write
    }

    /// The credit that may be granted with so many bytes in flight and reserved: limited by the invariant and by `limit`.
    #[inline(always)]
    fn grantable(&self, in_flight: u64, reserved: u64) -> u64 {
        // The usual case: the invariant holds with as much as the policy allows.
        if in_flight + 2 * self.limit <= self.capacity {
            return self.limit - reserved;
        }
        self.grantable_by_invariant(in_flight, reserved)
    }

    fn grantable_by_invariant(&self, in_flight: u64, reserved: u64) -> u64 {
        let by_invariant = (self.capacity.saturating_sub(in_flight) / 2).saturating_sub(reserved);
        let by_policy = self.limit - reserved;
        by_invariant.min(by_policy) & !(ALIGNMENT - 1)
    }

    /// Whether to send a batch of metadata alone. There are two reasons, and neither repeats without end:
    /// - This side can grant credit again that it could not grant with its last batch. Every such batch uses up
    ///   part of what responses have freed, and nothing but a response frees more.
    /// - This side lacks credit and has released messages that the peer does not know about. The peer then grants
    ///   credit, after which this side lacks nothing.
    fn credit_batch_due(&mut self, consumer: u64, lacks_credit: bool) -> bool {
        if rule_broken!(self, SilentWhenIdle) {
            return false;
        }
        let has_news = lacks_credit && consumer > self.announced && !rule_broken!(self, NeverTellsReleases);
        let missing = self.limit - self.reserved;
        if !has_news && missing == 0 {
            return false;
        }
        let in_flight = self.in_flight() + METADATA;
        if in_flight + 2 * self.reserved > self.capacity {
            // There is no room for the batch. A side that needs it asks for room by a READ of the peer's position.
            self.ring_starved |= has_news;
            return false;
        }
        let worthwhile = missing.min((self.limit / 4).max(ALIGNMENT));
        has_news || self.grantable(in_flight, self.reserved) >= worthwhile
    }
}

#[cfg(test)]
impl Sender {
    /// Moves the positions of the peer's ring `back` bytes back, and those of this side's ring `other_back` bytes. A model does
    /// so in order that its states repeat.
    pub(super) fn rebase(&mut self, back: u64, other_back: u64) {
        for position in [&mut self.producer, &mut self.posted, &mut self.remote_consumer] {
            *position -= back;
        }
        // These only serve to detect a peer whose position goes back or does not move. They are not part of a model's state; that
        // every batch without messages brings news is asserted where it is sealed.
        (self.last_batch_position, self.last_read) = (0, 0);
        self.is_rebased = true;
        self.announced -= other_back;
        if self.open.exists() {
            self.open.start -= back;
            self.open.ring_end -= back;
        }
        for write in &mut self.sealed[..self.sealed_len] {
            write.start -= back;
            write.metadata.consumer_pos -= other_back;
        }
        for write in &mut self.sealed[self.sealed_len..] {
            *write = SealedWrite::EMPTY;
        }
    }

    /// The oldest position of this side's own ring that this half still refers to.
    pub(super) fn oldest_announced(&self) -> u64 {
        self.sealed[..self.sealed_len].first().map_or(self.announced, |write| write.metadata.consumer_pos)
    }

    pub(super) fn remote_consumer(&self) -> u64 {
        self.remote_consumer
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_is_found_when_its_low_bits_have_started_again() {
        let mut sender = Sender::new(1 << 31, 1 << 20, true);
        // 2^32 blocks and two more.
        sender.posted = (1 << 37) + 64;
        assert_eq!(sender.full_position(2), Ok((1 << 37) + 64));
        assert_eq!(sender.full_position(0), Ok(1 << 37));
        assert_eq!(sender.full_position(u32::MAX), Ok((1 << 37) - 32));
        // A position beyond what was sent is taken for a very old one, which is a violation as well.
        let forged = sender.full_position(3).unwrap();
        sender.last_batch_position = 1 << 37;
        assert!(matches!(sender.learn_from_batch(forged), Err(Violation::ConsumerWentBack { .. })));
    }
}
