//! The sending half of a flow: where the next bytes go in the peer's receive ring, and whether they may be written.
//!
//! ```text
//!        remote_consumer        posted      batch start      producer
//!              |                  |              |               |
//!  ------------+------------------+--------------+---------------+------------> position (u64, never goes back)
//!   released   | posted, not      | sealed, not  | open batch,   |
//!   by peer    | released by peer | posted yet   | still grows   |
//! ```
//!
//! A batch is *open* while messages are added to it: until it is posted. It is *sealed* before that, so that its metadata is fixed, when a message
//! does not fit behind it before the end of the ring, or when the payload of its last message was posted directly.
//!
//! Promises:
//! - `in_flight + 2 * credit_granted <= capacity`, always. A response that returns credit `a` adds at most `2a` to `in_flight`: it
//!   may have to skip the end of the ring, and it skips less than it needs itself. It takes `a` from `credit_granted`. So a
//!   response always fits.
//! - Requests leave `2 * credit_limit` bytes free, not only `2 * credit_granted`. Otherwise this side's next request could take the space
//!   that a response has used before this side grants it to the peer again as credit, and a busy side could starve its peer
//!   for ever.
//! - A WRITE that could not be posted is the next one to post; nothing is lost by trying again later.
//!
//! This side's own consumer position, which each batch carries to the peer, comes from the receiving half
//! ([`Receiver`](super::receiver::Receiver)).

use super::params::Progress;
use super::violation::{Report, Violation};
use super::wire::{
    self, ALIGNMENT, COMPACT_FLAG, COMPACT_HEAD_SIZE, CompactHead, FLOW_METADATA_SIZE, FlowMetadata, Header,
    MAX_COMPACT_PAYLOAD, WRAP_MESSAGE_COUNT,
};
use super::write::Write;

const METADATA: u64 = FLOW_METADATA_SIZE as u64;
/// The most writes that can be sealed and not posted: a batch that a direct payload sealed, one that the end of the ring sealed, and the wrap
/// marker behind it.
const MAX_SEALED: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sender {
    capacity: u64,
    /// `capacity - 1`: the bits of a position that are its offset.
    offset_mask: u64,
    /// The most that `credit_granted` may be.
    credit_limit: u64,
    /// Whether a short message that is alone in its batch makes the batch compact.
    compact: bool,
    /// What this side grants to the peer, see [`flow`](super::flow).
    credit_granted: u64,
    credit_available: u64,
    credit_owed: u64,
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
    /// They come before the open batch.
    sealed: [Write; MAX_SEALED],
    sealed_len: usize,
    /// The consumer position of this side in the metadata that was fixed last.
    announced: u64,
    /// A request or a batch of metadata did not fit since `remote_consumer` last moved.
    lacks_room: bool,
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
        first: Header { call_id: 0, credit_blocks: 0, payload_len: 0 },
        ring_end: 0,
    };
}

const NO_WRITE: Write = Write {
    offset: 0,
    len: 0,
    imm: 0,
    metadata: FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 0 },
    compact: None,
    end: 0,
};

impl Sender {
    /// For a peer's ring of `capacity` bytes. The peer has `credit_limit` bytes of credit from the start.
    pub(super) fn new(capacity: u64, credit_limit: u64, compact: bool) -> Self {
        Sender {
            capacity,
            offset_mask: capacity - 1,
            credit_limit,
            compact,
            credit_granted: credit_limit,
            credit_available: credit_limit,
            credit_owed: 0,
            producer: 0,
            posted: 0,
            remote_consumer: 0,
            last_batch_position: 0,
            last_read: 0,
            open: OpenBatch::NONE,
            sealed: [NO_WRITE; MAX_SEALED],
            sealed_len: 0,
            announced: 0,
            lacks_room: false,
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

    pub(super) fn credit_granted(&self) -> u64 {
        self.credit_granted
    }

    #[inline]
    pub(super) fn open_batch_messages(&self) -> u32 {
        self.open.messages
    }

    #[inline]
    pub(super) fn progress(&self) -> Progress {
        Progress { placed: self.producer, posted: self.posted, released: self.remote_consumer }
    }

    /// The most bytes that a request may take, header and padding included. Such a request fits into an empty ring even
    /// if it has to skip the longest possible end of the ring.
    pub(super) fn max_request_size(&self) -> u64 {
        let half = (self.capacity - 2 * self.credit_limit + ALIGNMENT) / 2;
        (half & !(ALIGNMENT - 1)) - METADATA
    }

    /// Whether there is room for a request of `size` bytes. (There always is for a response that is [owed](Sender::owes).)
    #[inline]
    pub(super) fn has_room(&self, size: u64) -> bool {
        // The bytes that `place` adds: for the metadata of a new batch, and behind the end of the ring.
        let total = if self.fits_open_batch(size) {
            size
        } else if self.fits_new_batch(size) || rule_broken!(self, RoomWithoutWrap) {
            METADATA + size
        } else {
            self.bytes_to_end() + METADATA + size
        };
        let reserve =
            if rule_broken!(self, CallsUseCreditRoom) { self.credit_granted } else { self.credit_limit };
        self.in_flight() + total + 2 * reserve <= self.capacity
    }

    /// Notes that something did not fit.
    pub(super) fn note_lack_of_room(&mut self) {
        self.lacks_room = true;
    }

    /// Adds a message of `size` bytes: to the open batch, or to a new one, at the start of the ring if need be. Returns its offset. The
    /// caller has checked that there is room. `consumer` is called only if the end of the ring seals a write.
    #[inline]
    pub(super) fn place(&mut self, header: &Header, size: u64, consumer: impl FnOnce() -> u64) -> u64 {
        if !self.fits_open_batch(size) {
            self.begin_batch(header, size, consumer);
        }
        let position = self.producer;
        self.open.messages += 1;
        self.producer += size;
        position & self.offset_mask
    }

    /// Opens a batch, behind the one that is open, or at the start of the ring.
    #[inline(never)]
    fn begin_batch(&mut self, header: &Header, size: u64, consumer: impl FnOnce() -> u64) {
        if !self.fits_new_batch(size) {
            self.wrap(consumer());
        }
        let ring_end = (self.producer | self.offset_mask) + 1;
        self.open = OpenBatch { start: self.producer, messages: 0, first: *header, ring_end };
        self.producer += METADATA;
    }

    /// Whether a message of `size` bytes can follow in the open batch. A batch that ends exactly at the end of the ring is complete.
    #[inline]
    fn fits_open_batch(&self, size: u64) -> bool {
        self.producer + size <= self.open.ring_end
    }

    /// Whether a new batch with a message of `size` bytes can begin without an end of the ring in front of the message.
    #[inline]
    fn fits_new_batch(&self, size: u64) -> bool {
        self.open.messages == 0 && self.offset(self.producer) + METADATA + size <= self.capacity
    }

    /// Bytes up to the end of the ring; zero if `producer` is there already.
    #[inline]
    fn bytes_to_end(&self) -> u64 {
        self.producer.wrapping_neg() & self.offset_mask
    }

    /// Seals the open batch, and skips the rest of the ring.
    fn wrap(&mut self, consumer: u64) {
        self.seal_without_tail(0, consumer);
        let (start, skip) = (self.producer, self.bytes_to_end());
        if skip > 0 {
            self.seal(self.batch(start, start + skip, METADATA, WRAP_MESSAGE_COUNT, consumer));
        }
    }

    /// Lets nothing be added to the open batch, because the connection is lost.
    pub(super) fn forget_open_batch(&mut self) {
        self.open = OpenBatch::NONE;
    }

    /// Whether a response that returns so much credit can be expected by the peer.
    #[inline]
    pub(super) fn owes(&self, credit: u64) -> bool {
        credit <= self.credit_owed
    }

    /// Whether no request but that of this response waits for its response.
    #[inline]
    pub(super) fn owes_only(&self, credit: u64) -> bool {
        self.credit_owed == credit
    }

    /// Takes back the credit of a response that has been placed.
    #[inline]
    pub(super) fn return_credit(&mut self, credit: u64) {
        self.credit_granted -= credit;
        self.credit_owed -= credit;
    }

    /// The credit that requests of the peer can use.
    #[inline]
    pub(super) fn credit_available(&self) -> u64 {
        self.credit_available
    }

    /// Notes that a request of the peer uses credit. There is as much.
    #[inline]
    pub(super) fn use_credit(&mut self, credit: u64) {
        self.credit_available -= credit;
        self.credit_owed += credit;
    }

    /// The next WRITE to post: the oldest sealed one, else the open batch, else a batch of metadata alone if one is due.
    /// `lacks_credit`: a call of this side was refused for lack of credit, and the peer has granted less than its limit.
    #[inline(always)]
    pub(super) fn next_write(&mut self, consumer: u64, lacks_credit: bool) -> Option<Write> {
        if self.sealed_len > 0 {
            return Some(self.sealed[0]);
        }
        let OpenBatch { start, messages, first, .. } = self.open;
        if messages == 1 && self.compact && first.payload_len <= MAX_COMPACT_PAYLOAD {
            // The rest of the room that the message has in the staging ring is free again. What is placed behind it does not touch the
            // payload, which stays where it is until the batch was posted.
            let end = start + wire::compact_size(first.payload_len);
            let metadata = self.metadata(end, 1, consumer);
            return Some(Write {
                offset: self.offset(start) as usize,
                len: COMPACT_HEAD_SIZE + first.payload_len as usize,
                imm: COMPACT_FLAG | first.payload_len,
                metadata,
                compact: Some(CompactHead::new(&metadata, &first)),
                end,
            });
        }
        if messages > 0 {
            return Some(self.batch(start, self.producer, self.producer - start, messages, consumer));
        }
        let (start, end) = (self.producer, self.producer + METADATA);
        let is_due = self.is_credit_batch_due(consumer, lacks_credit);
        is_due.then(|| self.batch(start, end, METADATA, 0, consumer))
    }

    /// Notes that the last result of `next_write` was posted.
    #[inline]
    pub(super) fn write_posted(&mut self, write: &Write) {
        if self.sealed_len > 0 {
            self.sealed_len -= 1;
            self.sealed.copy_within(1.., 0);
        } else {
            self.fix(write);
        }
        self.posted = write.end;
        self.credit_available += write.metadata.credit_grant;
    }

    /// Whether nothing waits to be posted.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.open.messages == 0 && self.sealed_len == 0
    }

    /// Whether a flush may have something to post, or a READ to make, though no message was placed: credit that was not granted, or a lack
    /// of room.
    #[inline]
    pub(super) fn may_have_news(&self) -> bool {
        self.credit_granted < self.credit_limit || self.lacks_room
    }

    /// Whether every sealed write was posted.
    #[inline]
    pub(super) fn has_no_sealed_write(&self) -> bool {
        self.sealed_len == 0
    }

    /// Seals the open batch, if there is one. Its last `tail` bytes are announced, but they are not part of its WRITE: a WRITE of their own
    /// has carried them.
    pub(super) fn seal_without_tail(&mut self, tail: u64, consumer: u64) {
        let OpenBatch { start, messages, .. } = self.open;
        if messages > 0 {
            let end = self.producer;
            self.seal(self.batch(start, end, end - start - tail, messages, consumer));
        }
    }

    /// Fixes the metadata of a write that is posted later.
    fn seal(&mut self, write: Write) {
        self.fix(&write);
        self.sealed[self.sealed_len] = write;
        self.sealed_len += 1;
    }

    /// Applies what a write says: from now on, neither its length nor its metadata change.
    #[inline]
    fn fix(&mut self, write: &Write) {
        self.open = OpenBatch::NONE;
        self.producer = write.end;
        self.credit_granted += write.metadata.credit_grant;
        let before = if rule_broken!(self, DeltaPosition) { self.announced } else { 0 };
        self.announced = before + write.metadata.consumer_pos;
    }

    /// A batch with metadata, of which `len` bytes are to be written.
    #[inline]
    fn batch(&self, start: u64, end: u64, len: u64, message_count: u32, consumer: u64) -> Write {
        Write {
            offset: self.offset(start) as usize,
            len: len as usize,
            imm: wire::encode_imm(end - start),
            metadata: self.metadata(end, message_count, consumer),
            compact: None,
            end,
        }
    }

    /// The metadata of a batch that ends at `end`.
    #[inline]
    fn metadata(&self, end: u64, message_count: u32, consumer: u64) -> FlowMetadata {
        let credit_grant = self.grantable(end);
        debug_assert!(
            message_count > 0 || credit_grant > 0 || consumer > self.announced,
            "the peer would not accept a batch without messages or news"
        );
        let before = if rule_broken!(self, DeltaPosition) { self.announced } else { 0 };
        FlowMetadata { consumer_pos: consumer - before, credit_grant, message_count }
    }

    /// The credit that a batch which ends at `end` may grant: limited by the invariant and by `credit_limit`.
    #[inline]
    fn grantable(&self, end: u64) -> u64 {
        let (in_flight, by_policy) = (end - self.remote_consumer, self.credit_limit - self.credit_granted);
        // If the invariant allows as much as the policy, there is nothing to compute.
        if in_flight + 2 * self.credit_limit <= self.capacity {
            return by_policy;
        }
        let by_invariant = (self.capacity.saturating_sub(in_flight) / 2).saturating_sub(self.credit_granted);
        by_invariant.min(by_policy) & !(ALIGNMENT - 1)
    }

    /// Whether to send a batch of metadata alone. There are two reasons, and neither repeats without end:
    /// - This side can grant credit again that it could not grant with its last batch. Every such batch uses up
    ///   part of what responses have freed, and nothing but a response frees more.
    /// - This side lacks credit and has released messages that the peer does not know about. The peer then grants
    ///   credit, after which this side lacks nothing.
    #[inline]
    fn is_credit_batch_due(&mut self, consumer: u64, lacks_credit: bool) -> bool {
        let has_news = lacks_credit && consumer > self.announced && !rule_broken!(self, NeverTellsReleases);
        let missing = self.credit_limit - self.credit_granted;
        if !has_news && missing == 0 || rule_broken!(self, SilentWhenIdle) {
            return false;
        }
        let end = self.producer + METADATA;
        if end - self.remote_consumer + 2 * self.credit_granted > self.capacity {
            // There is no room for the batch. A side that needs it asks for room by a READ of the peer's position.
            self.lacks_room |= has_news;
            return false;
        }
        let worthwhile = missing.min((self.credit_limit / 4).max(ALIGNMENT));
        has_news || self.grantable(end) >= worthwhile
    }

    /// Checks the peer's consumer position in a batch. Returns whether it is beyond that of the batch before.
    #[inline]
    pub(super) fn check_batch_position<R: Report<Violation>>(&self, position: u64) -> Result<bool, R> {
        if rule_broken!(self, DeltaPosition) {
            return Ok(true);
        }
        self.check_position(position, self.last_batch_position)?;
        let is_news = position > self.last_batch_position;
        #[cfg(test)]
        let is_news = is_news || self.is_rebased;
        Ok(is_news)
    }

    /// Takes the peer's consumer position from a batch.
    #[inline]
    pub(super) fn learn_from_batch(&mut self, position: u64) {
        if rule_broken!(self, DeltaPosition) {
            self.remote_consumer = self.producer.min(self.remote_consumer + position);
            return;
        }
        self.last_batch_position = position;
        self.learn(position);
    }

    /// The peer's consumer position with these low bits, in blocks: the highest one that is not beyond what was sent.
    #[inline]
    pub(super) fn full_position<R: Report<Violation>>(&self, blocks: u32) -> Result<u64, R> {
        let behind = u64::from(((self.posted / ALIGNMENT) as u32).wrapping_sub(blocks)) * ALIGNMENT;
        let position = u64::from(blocks) * ALIGNMENT;
        ensure!(behind <= self.posted, Violation::ConsumerBeyondSent { position, sent: self.posted });
        Ok(self.posted - behind)
    }

    /// Takes the peer's consumer position from an RDMA READ. It may be newer or older than what batches said.
    pub(super) fn learn_from_read(&mut self, position: u64) -> Result<(), Violation> {
        self.reading = false;
        if !position.is_multiple_of(ALIGNMENT) {
            return Err(Violation::ConsumerMisaligned { position });
        }
        self.check_position(position, self.last_read)?;
        self.last_read = position;
        self.learn(position);
        Ok(())
    }

    /// Whether a READ of the peer's consumer position would help: something did not fit, and the peer may have released
    /// more than this side knows.
    #[inline]
    pub(super) fn needs_position_read(&self) -> bool {
        self.lacks_room
            && !self.reading
            && self.posted > self.remote_consumer
            && !rule_broken!(self, NeverReads)
    }

    pub(super) fn position_read_posted(&mut self) {
        self.reading = true;
    }

    #[inline]
    fn check_position<R: Report<Violation>>(&self, position: u64, before: u64) -> Result<(), R> {
        ensure!(position >= before, Violation::ConsumerWentBack { position, before });
        ensure!(position <= self.posted, Violation::ConsumerBeyondSent { position, sent: self.posted });
        Ok(())
    }

    #[inline]
    fn learn(&mut self, position: u64) {
        if position > self.remote_consumer {
            self.remote_consumer = position;
            self.lacks_room = false;
        }
    }

    #[inline]
    fn offset(&self, position: u64) -> u64 {
        position & self.offset_mask
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
        if self.open.messages > 0 {
            self.open.start -= back;
            self.open.ring_end -= back;
        }
        for write in &mut self.sealed[..self.sealed_len] {
            write.end -= back;
            write.metadata.consumer_pos -= other_back;
        }
        for write in &mut self.sealed[self.sealed_len..] {
            *write = NO_WRITE;
        }
    }

    /// The oldest position of this side's own ring that this half still refers to.
    pub(super) fn oldest_announced(&self) -> u64 {
        self.sealed[..self.sealed_len].first().map_or(self.announced, |write| write.metadata.consumer_pos)
    }

    pub(super) fn remote_consumer(&self) -> u64 {
        self.remote_consumer
    }

    pub(super) fn credit_limit(&self) -> u64 {
        self.credit_limit
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
        let full_position = |blocks| sender.full_position::<Violation>(blocks);
        assert_eq!(full_position(2), Ok((1 << 37) + 64));
        assert_eq!(full_position(0), Ok(1 << 37));
        assert_eq!(full_position(u32::MAX), Ok((1 << 37) - 32));
        // A position beyond what was sent is taken for a very old one, which is a violation as well.
        let forged = full_position(3).unwrap();
        sender.last_batch_position = 1 << 37;
        assert!(matches!(sender.check_batch_position(forged), Err(Violation::ConsumerWentBack { .. })));
    }
}
