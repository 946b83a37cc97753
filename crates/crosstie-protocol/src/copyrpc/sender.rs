//! The producing half: where the next bytes go in the peer's receive ring, and what may be written at all.
//!
//! ```text
//!        remote_consumer        posted      batch start      producer
//!              |                  |              |               |
//!  ------------+------------------+--------------+---------------+------------> position (u64, never goes back)
//!   released   | posted, unread   | sealed, not  | batch under   |
//!   by peer    | or held by peer  | posted yet   | construction  |
//! ```
//!
//! Promises:
//! - `in_flight + 2 * reserved <= capacity`, always. A reply of allowance `a` adds at most `2a` to `in_flight` (it
//!   may skip the ring's end, and skips less than it needs itself) and takes `a` from `reserved`: it always fits.
//! - Calls leave `2 * limit` free, not only `2 * reserved`. Otherwise the room that a reply has used would go to this
//!   side's next call rather than back to the peer as credit, and a busy side could starve its peer for ever.
//! - What was not posted can be posted later or be rolled back. (A rollback may leave the invariant short of a skip
//!   that was posted before; see `reserve_again`.)

use super::endpoint::Progress;
use super::violation::Violation;
use super::wire::{self, ALIGNMENT, FLOW_METADATA_SIZE, FlowMetadata, WRAP_MESSAGE_COUNT};
use super::{Emit, EmitKind};

pub(super) const METADATA: u64 = FLOW_METADATA_SIZE as u64;
/// A batch that was sealed and not posted, one that the ring's end sealed, and the marker behind it.
const MAX_SEALED: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sender {
    capacity: u64,
    /// The most that `reserved` may be.
    limit: u64,
    /// Credit granted to the peer, spent or not, whose response has not been written.
    reserved: u64,
    /// The part of `reserved` that has been posted to the peer and that no request of it has used.
    spendable: u64,
    producer: u64,
    posted: u64,
    /// The part of a posted skip whose reply was rolled back, until that is made up for. See `rollback`.
    lent: u64,
    remote_consumer: u64,
    last_piggyback: u64,
    last_read: u64,
    /// Messages of the batch under construction; none is under construction when it is `None`.
    open: Option<Open>,
    sealed: [Piece; MAX_SEALED],
    sealed_len: usize,
    /// The consumer position of this side that the peer has been told last.
    announced: u64,
    /// Something did not fit since `remote_consumer` moved last.
    ring_starved: bool,
    reading: bool,
    #[cfg(test)]
    pub(super) trap: Option<super::tests::Trap>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Open {
    start: u64,
    count: u32,
}

/// A sealed batch or marker: `len` bytes to write at `start`, `delta` bytes to announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Piece {
    pub(super) start: u64,
    len: u64,
    delta: u64,
    pub(super) metadata: FlowMetadata,
    announced_before: u64,
}

impl Piece {
    const NONE: Piece = Piece {
        start: 0,
        len: 0,
        delta: 0,
        metadata: FlowMetadata { consumer_pos: 0, credit_grant: 0, message_count: 0 },
        announced_before: 0,
    };

    /// Messages in it.
    pub(super) fn messages(&self) -> u32 {
        if self.metadata.message_count == WRAP_MESSAGE_COUNT { 0 } else { self.metadata.message_count }
    }
}

impl Sender {
    /// For a peer's ring of `capacity` bytes, with `limit` bytes of credit granted at once.
    pub(super) fn new(capacity: u64, limit: u64) -> Self {
        Sender {
            capacity,
            limit,
            reserved: limit,
            spendable: limit,
            producer: 0,
            posted: 0,
            lent: 0,
            remote_consumer: 0,
            last_piggyback: 0,
            last_read: 0,
            open: None,
            sealed: [Piece::NONE; MAX_SEALED],
            sealed_len: 0,
            announced: 0,
            ring_starved: false,
            reading: false,
            #[cfg(test)]
            trap: None,
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.producer - self.remote_consumer
    }

    #[inline]
    pub(super) fn open_messages(&self) -> u32 {
        self.open.map_or(0, |open| open.count)
    }

    #[inline]
    pub(super) fn progress(&self) -> Progress {
        Progress { placed: self.producer, posted: self.posted, released: self.remote_consumer }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    pub(super) fn lent(&self) -> u64 {
        self.lent
    }

    /// The most bytes, header and padding included, that a request may take: it fits into an empty ring even if it has
    /// to skip as much of the ring's end as can be.
    pub(super) fn longest_request(&self) -> u64 {
        let half = (self.capacity - 2 * self.limit + ALIGNMENT) / 2;
        (half & !(ALIGNMENT - 1)) - METADATA
    }

    /// Whether a request of `size` bytes fits now. If not, the ring counts as starved.
    #[inline]
    pub(super) fn admits(&mut self, size: u64) -> bool {
        let total = if reopened!(self, RoomWithoutWrap) { METADATA + size } else { self.total(size) };
        let reserve = if reopened!(self, CallsEatCredit) { self.reserved } else { self.limit };
        let fits = self.in_flight() + total + 2 * reserve <= self.capacity;
        self.ring_starved |= !fits;
        fits
    }

    /// Gives `size` bytes a place: behind the batch under construction, or in a new one, at the ring's start if need be.
    /// The caller has made sure of the room. `consumer` is asked only if the ring's end seals something.
    #[inline]
    pub(super) fn place(&mut self, size: u64, consumer: impl FnOnce() -> u64) -> u64 {
        if !self.fits_before_end(size) {
            self.wrap(consumer());
        }
        let open = self.open.get_or_insert_with(|| {
            let start = self.producer;
            self.producer += METADATA;
            Open { start, count: 0 }
        });
        open.count += 1;
        let position = self.producer;
        self.producer += size;
        position
    }

    /// Whether a response with this allowance is owed: requests of the peer have used so much credit.
    #[inline]
    pub(super) fn owes(&self, allowance: u64) -> bool {
        allowance <= self.reserved - self.spendable - self.unposted_grants()
    }

    /// A response that was owed has been placed.
    #[inline]
    pub(super) fn unreserve(&mut self, allowance: u64) {
        self.reserved -= allowance;
        self.repay();
    }

    /// A request of the peer uses credit.
    #[inline]
    pub(super) fn spend(&mut self, allowance: u64) -> Result<(), Violation> {
        if allowance > self.spendable {
            return Err(Violation::CreditOverrun { allowance, credit: self.spendable });
        }
        self.spendable -= allowance;
        Ok(())
    }

    /// What to post next: the oldest sealed piece, else the batch under construction, else a batch of credit alone if
    /// one is due. `wanting`: this side lacks credit that its peer has not granted.
    #[inline]
    pub(super) fn emit(&mut self, consumer: u64, wanting: bool) -> Option<Emit> {
        if self.sealed_len == 0 {
            if let Some(open) = self.open.take() {
                self.seal(open, consumer);
            } else if self.credit_only_due(consumer, wanting) {
                let start = self.producer;
                self.producer += METADATA;
                self.seal(Open { start, count: 0 }, consumer);
            } else {
                return None;
            }
        }
        let piece = &self.sealed[0];
        Some(Emit {
            offset: self.offset(piece.start) as usize,
            len: piece.len as usize,
            imm: wire::encode_imm(piece.delta),
            metadata: piece.metadata,
            kind: match piece.metadata.message_count {
                WRAP_MESSAGE_COUNT => EmitKind::Wrap,
                0 => EmitKind::Credit,
                _ => EmitKind::Batch,
            },
        })
    }

    /// What `emit` gave last has been posted.
    #[inline]
    pub(super) fn posted(&mut self) {
        if self.sealed_len == 0 {
            return;
        }
        let piece = self.sealed[0];
        self.posted += piece.delta;
        self.spendable += piece.metadata.credit_grant;
        self.sealed_len -= 1;
        if self.sealed_len > 0 {
            self.sealed.copy_within(1.., 0);
        }
    }

    /// Whether nothing is sealed that was not posted.
    #[inline]
    pub(super) fn is_clear(&self) -> bool {
        self.sealed_len == 0
    }

    /// Ends the batch; its last `tail` bytes are no part of the WRITE.
    pub(super) fn seal_without(&mut self, tail: u64, consumer: u64) {
        if let Some(open) = self.open.take() {
            self.push(open.start, self.producer - open.start - tail, open.count, consumer);
        }
    }

    /// Forgets what was not posted. `each` is told where every forgotten batch starts and how many messages it has.
    pub(super) fn rollback(&mut self, mut each: impl FnMut(u64, u32)) {
        for piece in &self.sealed[..self.sealed_len] {
            each(piece.start, piece.messages());
        }
        if let Some(open) = self.open {
            each(open.start, open.count);
        }
        if let Some(first) = self.sealed[..self.sealed_len].first() {
            self.announced = first.announced_before;
        }
        self.reserved -= self.unposted_grants();
        self.producer = self.posted;
        self.open = None;
        self.sealed_len = 0;
    }

    /// Forgotten responses are owed again.
    ///
    /// The first of them may have had a skip of the ring's end posted before it, which was to come out of its
    /// reservation. That much is lent: the invariant is short of it. No reply lacks room all the same, since `producer`
    /// is at the ring's start, where all that is reserved fits without another skip; and nothing but replies, each
    /// of which makes up for as much as its allowance, goes out before it is made up for.
    pub(super) fn reserve_again(&mut self, allowance: u64) {
        self.reserved += allowance;
        self.lent = self.excess();
    }

    /// The peer's consumer position, as a batch brought it.
    #[inline]
    pub(super) fn learn_piggyback(&mut self, position: u64) -> Result<(), Violation> {
        if reopened!(self, DeltaPosition) {
            self.remote_consumer = self.producer.min(self.remote_consumer + position);
            return Ok(());
        }
        self.learn(position, self.last_piggyback)?;
        self.last_piggyback = position;
        Ok(())
    }

    /// The peer's consumer position, as a READ brought it: newer or older than what batches said.
    pub(super) fn learn_read(&mut self, position: u64) -> Result<(), Violation> {
        self.reading = false;
        if !position.is_multiple_of(ALIGNMENT) {
            return Err(Violation::ConsumerMisaligned { position });
        }
        self.learn(position, self.last_read)?;
        self.last_read = position;
        Ok(())
    }

    /// Whether a READ of the peer's consumer position would help: something did not fit, and the peer may have released
    /// more than it said.
    pub(super) fn wants_read(&self) -> bool {
        self.ring_starved
            && !self.reading
            && self.posted > self.remote_consumer
            && !reopened!(self, NeverRead)
    }

    pub(super) fn read_posted(&mut self) {
        self.reading = true;
    }

    pub(super) fn read_failed(&mut self) {
        self.reading = false;
    }

    pub(super) fn offset(&self, position: u64) -> u64 {
        position & (self.capacity - 1)
    }

    #[inline]
    fn learn(&mut self, position: u64, before: u64) -> Result<(), Violation> {
        if position < before {
            return Err(Violation::ConsumerWentBack { position, before });
        }
        if position > self.posted {
            return Err(Violation::ConsumerBeyondSent { position, sent: self.posted });
        }
        if position > self.remote_consumer {
            self.remote_consumer = position;
            self.ring_starved = false;
            self.repay();
        }
        Ok(())
    }

    #[inline]
    fn repay(&mut self) {
        if self.lent > 0 {
            self.lent = self.lent.min(self.excess());
        }
    }

    fn excess(&self) -> u64 {
        (self.in_flight() + 2 * self.reserved).saturating_sub(self.capacity)
    }

    /// Whether `size` bytes can follow without crossing the ring's end. A batch that ends exactly there is complete.
    #[inline]
    fn fits_before_end(&self, size: u64) -> bool {
        let offset = self.offset(self.producer);
        match self.open {
            Some(_) => offset != 0 && offset + size <= self.capacity,
            None => offset + METADATA + size <= self.capacity,
        }
    }

    /// What `place` will add to `producer`.
    #[inline]
    fn total(&self, size: u64) -> u64 {
        if self.fits_before_end(size) {
            return if self.open.is_some() { size } else { METADATA + size };
        }
        self.to_end() + METADATA + size
    }

    /// Bytes up to the ring's end; none when `producer` is there already.
    #[inline]
    fn to_end(&self) -> u64 {
        self.producer.wrapping_neg() & (self.capacity - 1)
    }

    #[cold]
    fn wrap(&mut self, consumer: u64) {
        if let Some(open) = self.open.take() {
            self.seal(open, consumer);
        }
        let skip = self.to_end();
        if skip > 0 {
            let start = self.producer;
            self.producer += skip;
            self.push(start, METADATA, WRAP_MESSAGE_COUNT, consumer);
        }
    }

    #[inline]
    fn seal(&mut self, open: Open, consumer: u64) {
        self.push(open.start, self.producer - open.start, open.count, consumer);
    }

    fn push(&mut self, start: u64, len: u64, message_count: u32, consumer: u64) {
        let credit_grant = self.grantable(self.in_flight());
        self.reserved += credit_grant;
        let consumer_pos = if reopened!(self, DeltaPosition) { consumer - self.announced } else { consumer };
        self.sealed[self.sealed_len] = Piece {
            start,
            len,
            delta: self.producer - start,
            metadata: FlowMetadata { consumer_pos, credit_grant, message_count },
            announced_before: self.announced,
        };
        self.sealed_len += 1;
        self.announced = consumer;
    }

    /// Credit that may be granted with so many bytes in flight: by the invariant, and by policy.
    #[inline]
    fn grantable(&self, in_flight: u64) -> u64 {
        let by_invariant = (self.capacity.saturating_sub(in_flight) / 2).saturating_sub(self.reserved);
        let by_policy = self.limit - self.reserved;
        by_invariant.min(by_policy) & !(ALIGNMENT - 1)
    }

    /// A batch of metadata alone goes out in two cases, and each ends by itself:
    /// - this side can grant credit again that it could not grant with its last batch. Every such batch uses up
    ///   part of what replies have freed, and nothing but a reply frees more.
    /// - this side lacks credit (`wanting`) and has released messages that the peer does not know about. The
    ///   peer's answer is a grant, after which this side lacks nothing.
    fn credit_only_due(&mut self, consumer: u64, wanting: bool) -> bool {
        if reopened!(self, SilentWhenIdle) {
            return false;
        }
        let telling = wanting && consumer > self.announced && !reopened!(self, NeverTells);
        let missing = self.limit - self.reserved;
        if !telling && missing == 0 {
            return false;
        }
        let in_flight = self.in_flight() + METADATA;
        if in_flight + 2 * self.reserved > self.capacity {
            // Nothing goes without room; only a side that lacks something asks for it. The other hears of it.
            self.ring_starved |= telling;
            return false;
        }
        let worthwhile = missing.min((self.limit / 4).max(ALIGNMENT));
        telling || self.grantable(in_flight) >= worthwhile
    }

    #[inline]
    fn unposted_grants(&self) -> u64 {
        self.sealed[..self.sealed_len].iter().map(|piece| piece.metadata.credit_grant).sum()
    }
}

#[cfg(test)]
impl Sender {
    /// The same state with the positions of this stream and those of the other one so many bytes earlier: what a model
    /// compares.
    pub(super) fn rebase(&mut self, back: u64, other_back: u64) {
        for position in [&mut self.producer, &mut self.posted, &mut self.remote_consumer] {
            *position -= back;
        }
        // These serve to catch a peer that lies and a rollback: no part of a model.
        (self.last_piggyback, self.last_read) = (0, 0);
        self.announced -= other_back;
        if let Some(open) = &mut self.open {
            open.start -= back;
        }
        for piece in &mut self.sealed[..self.sealed_len] {
            piece.start -= back;
            piece.metadata.consumer_pos -= other_back;
            piece.announced_before = 0;
        }
        for piece in &mut self.sealed[self.sealed_len..] {
            *piece = Piece::NONE;
        }
    }

    /// The oldest position of the other stream that this half knows.
    pub(super) fn oldest_announced(&self) -> u64 {
        self.sealed[..self.sealed_len].first().map_or(self.announced, |piece| piece.metadata.consumer_pos)
    }

    pub(super) fn remote_consumer(&self) -> u64 {
        self.remote_consumer
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }
}
