//! The receiving half of an endpoint: what has arrived, which messages the application still holds, and how far the ring is
//! free again.
//!
//! ```text
//!          consumer              passed   cursor        received
//!              |                    |        |              |
//!  ------------+--------------------+--------+--------------+------------> position (u64, never goes back)
//!   free for   | parsed; some of it | lent   | announced,   |
//!   the peer   | is still held      |        | not parsed   |
//! ```
//!
//! A message is *lent* until the next one is asked for, and its space is then free. One that is needed longer is *held* until it is released.
//!
//! Promises:
//! - It reads only bytes that the peer announced, and only inside the ring, whatever the bytes say.
//! - The consumer position stops at the message that is lent, and at the oldest one that is held. Messages are released in any
//!   order. Each held message is one bit in a bitmap of the ring, so a release is one store and allocates nothing.

use alloc::boxed::Box;
use alloc::vec;
use core::num::NonZeroU64;
use core::ops::Range;

use super::message::RingBytes;
use super::violation::Violation;
use super::wire::{
    self, ALIGNMENT, COMPACT_FLAG, COMPACT_HEAD_SIZE, CompactHead, FLOW_METADATA_SIZE, FlowMetadata,
    HEADER_SIZE, Header, MAX_COMPACT_PAYLOAD, WRAP_MESSAGE_COUNT,
};

const METADATA: u64 = FLOW_METADATA_SIZE as u64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    capacity: u64,
    /// `capacity - 1`: the bits of a position that are its offset.
    offset_mask: u64,
    /// End of what the peer has announced.
    received: u64,
    /// End of what was parsed. Equal to `received` between batches.
    cursor: u64,
    /// End of what was parsed and is not lent. Equal to `cursor` while no message is lent.
    passed: u64,
    /// Messages of the current batch that have not been parsed. That of a compact batch does not count.
    messages_left: u32,
    /// The message of a compact batch, until `next_message` returns it.
    compact: Option<Header>,
    /// Everything before this was released. The method `consumer` brings it up to date.
    consumer: u64,
    /// One bit for each block of the ring, set if a held message starts there. Only positions in `consumer..passed` have bits
    /// set; that range is at most one ring long.
    held: Box<[u64]>,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::tests::BrokenRule>,
}

/// What is in front of the messages of a batch.
pub(super) enum BatchFront {
    Metadata(FlowMetadata),
    Compact(CompactHead),
}

/// The header of a message that is not a bulk message, and whose length was checked.
pub(super) struct UsualHeader {
    pub(super) header: Header,
    /// The offset of the payload.
    pub(super) offset: usize,
    /// Bytes of the message in the ring, and bytes up to the end of the batch.
    pub(super) size: u64,
    pub(super) left: u64,
    /// Whether it is the last message of the batch.
    pub(super) is_last: bool,
}

/// The space that a received message occupies in the receive ring, until it is released.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the ring fills up with messages that are never released"]
pub struct HeldSpace {
    /// The position of the message, which is a multiple of [`ALIGNMENT`], with bit 0 set. So it is never zero, and an
    /// `Option<HeldSpace>` has 8 bytes.
    position: NonZeroU64,
}

impl HeldSpace {
    #[inline(always)]
    fn new(position: u64) -> HeldSpace {
        HeldSpace { position: NonZeroU64::MIN | position }
    }
}

impl Receiver {
    pub(super) fn new(capacity: u64) -> Self {
        let words = (capacity / ALIGNMENT).div_ceil(64) as usize;
        Receiver {
            capacity,
            offset_mask: capacity - 1,
            received: 0,
            cursor: 0,
            passed: 0,
            messages_left: 0,
            compact: None,
            consumer: 0,
            held: vec![0; words].into_boxed_slice(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    /// Where the batch that `imm` announces should be. Nothing is checked, but it is inside the ring.
    #[inline(always)]
    pub(super) fn announced_batch(&self, imm: u32) -> Range<usize> {
        let start = self.offset(self.received);
        let end = self.capacity.min(start + wire::decode_imm(imm & !COMPACT_FLAG));
        start as usize..end as usize
    }

    /// Accepts the batch that `imm` announced, and returns what is in front of its messages. They
    /// come from `next_message`.
    #[inline(always)]
    pub(super) fn accept_batch<B: RingBytes + ?Sized>(
        &mut self,
        imm: u32,
        ring: &B,
    ) -> Result<BatchFront, Violation> {
        self.pass_lent();
        if self.cursor != self.received {
            return Err(Violation::TrailingBytes { unused: self.received - self.cursor });
        }
        let is_compact = imm & COMPACT_FLAG != 0;
        let delta = if is_compact {
            let payload_len = imm & !COMPACT_FLAG;
            if payload_len > MAX_COMPACT_PAYLOAD {
                return Err(Violation::CompactTooLong { payload_len });
            }
            wire::compact_size(payload_len)
        } else {
            wire::decode_imm(imm)
        };
        if delta < METADATA {
            return Err(Violation::ShortBatch { delta });
        }
        let offset = self.check_place(delta)?;
        if is_compact {
            let head = CompactHead::from_numbers(ring.load_words(offset as usize));
            let CompactHead { call_id, piggyback, .. } = head;
            self.compact = Some(Header { call_id, piggyback, payload_len: imm & !COMPACT_FLAG });
            self.received += delta;
            return Ok(BatchFront::Compact(head));
        }
        let metadata = FlowMetadata::from_words([0, 16].map(|at| ring.load_words(offset as usize + at)))?;
        if metadata.message_count != WRAP_MESSAGE_COUNT {
            self.received += delta;
            self.cursor += METADATA;
            self.pass_lent();
            self.messages_left = metadata.message_count;
            return Ok(BatchFront::Metadata(metadata));
        }
        // A marker at the start would skip a whole ring, for nothing.
        if offset + delta != self.capacity || offset == 0 {
            return Err(Violation::BadWrap { offset, delta });
        }
        // The announced delta is the skip. A skip that is computed from the offset behind the marker would be a whole ring
        // when the marker is in the last block.
        let skip = if rule_broken!(self, SkipFromOffset) {
            METADATA + self.capacity - self.offset(self.received + METADATA)
        } else {
            delta
        };
        self.received += skip;
        self.cursor = self.received;
        self.pass_lent();
        Ok(BatchFront::Metadata(metadata))
    }

    /// Accepts a compact batch whose bytes the caller has copied, and releases its space.
    #[inline(always)]
    pub(super) fn pass_compact(&mut self, payload_len: u32) -> Result<(), Violation> {
        self.pass_lent();
        if self.cursor != self.received {
            return Err(Violation::TrailingBytes { unused: self.received - self.cursor });
        }
        if payload_len > MAX_COMPACT_PAYLOAD {
            return Err(Violation::CompactTooLong { payload_len });
        }
        let delta = wire::compact_size(payload_len);
        let (start, end) = (self.received, self.received + delta);
        if self.consumer != start {
            self.check_free(delta)?;
        }
        self.check_end(delta)?;
        if self.consumer == start {
            // The ring was free, and is free again.
            self.consumer = end;
        }
        self.received = end;
        self.cursor = end;
        self.passed = end;
        self.messages_left = 0;
        Ok(())
    }

    /// Where a compact batch ends that comes next, if the ring is free and there is room before its end.
    #[inline(always)]
    pub(super) fn compact_end(&self, payload_len: u32) -> Option<u64> {
        let (start, delta) = (self.received, wire::compact_size(payload_len));
        // Nothing is held, lent, or left to parse: the consumer position is never ahead of any of that.
        let is_free = self.consumer == start && payload_len <= MAX_COMPACT_PAYLOAD;
        (is_free && self.offset(start) + delta <= self.capacity).then_some(start + delta)
    }

    /// Passes a compact batch and releases its space, see [`compact_end`](Receiver::compact_end).
    #[inline(always)]
    pub(super) fn pass_to(&mut self, end: u64) {
        self.consumer = end;
        self.received = end;
        self.cursor = end;
        self.passed = end;
        self.messages_left = 0;
    }

    /// Checks that the next `delta` bytes are free and do not cross the end of the ring. Returns their offset.
    #[inline(always)]
    fn check_place(&mut self, delta: u64) -> Result<u64, Violation> {
        self.check_free(delta)?;
        self.check_end(delta)
    }

    /// Checks that the next `delta` bytes are free.
    #[inline(always)]
    fn check_free(&mut self, delta: u64) -> Result<(), Violation> {
        // The consumer position is brought up to date only if the last one leaves no room.
        if delta > self.capacity - (self.received - self.consumer) {
            let free = self.capacity - (self.received - self.consumer());
            if delta > free {
                return Err(Violation::Overrun { delta, free });
            }
        }
        Ok(())
    }

    /// Checks that the next `delta` bytes do not cross the end of the ring. Returns their offset.
    #[inline(always)]
    fn check_end(&self, delta: u64) -> Result<u64, Violation> {
        let offset = self.offset(self.received);
        if offset + delta > self.capacity {
            return Err(Violation::AcrossEnd { offset, delta });
        }
        Ok(offset)
    }

    /// The header of the next message of the batch, if it is not a bulk message and fits into the batch. The caller checks that the last one ends
    /// with the batch. Nothing changes before [`pass_usual`](Receiver::pass_usual).
    #[inline(always)]
    pub(super) fn usual_header<B: RingBytes + ?Sized>(&self, ring: &B) -> Option<UsualHeader> {
        let left = self.received - self.cursor;
        if self.messages_left == 0 || left == 0 {
            return None;
        }
        let offset = self.offset(self.cursor) as usize;
        let header = Header::from_words(ring.load_words(offset));
        let (size, is_last) = (wire::padded_size(header.payload_len), self.messages_left == 1);
        // The bulk flag makes `payload_len` longer than any ring.
        if size > left {
            return None;
        }
        Some(UsualHeader { header, offset: offset + HEADER_SIZE, size, left, is_last })
    }

    /// Passes the message whose [header](Receiver::usual_header) was found, and lends it.
    #[inline(always)]
    pub(super) fn pass_usual(&mut self, size: u64) {
        self.passed = self.cursor;
        self.cursor += size;
        self.messages_left -= 1;
    }

    /// The next message of the batch: its header, and the offset of its payload. It is lent.
    pub(super) fn next_message<B: RingBytes + ?Sized>(
        &mut self,
        ring: &B,
    ) -> Result<Option<(Header, usize)>, Violation> {
        self.pass_lent();
        let left = self.received - self.cursor;
        let offset = self.offset(self.cursor) as usize;
        if let Some(header) = self.compact.take() {
            self.cursor = self.received;
            return Ok(Some((header, offset + COMPACT_HEAD_SIZE)));
        }
        if self.messages_left == 0 {
            return if left == 0 { Ok(None) } else { Err(Violation::TrailingBytes { unused: left }) };
        }
        if left == 0 {
            return Err(Violation::MessageTooLong { needs: ALIGNMENT, left });
        }
        let header = Header::from_words(ring.load_words(offset));
        let mut needs = wire::padded_size(header.payload_len);
        if needs > left {
            // The bulk flag makes `payload_len` longer than any ring. So messages without the flag never get here.
            needs = bulk_size(header, left)?;
        }
        self.cursor += needs;
        self.messages_left -= 1;
        Ok(Some((header, offset + HEADER_SIZE)))
    }

    /// Ends the loan of the message that was returned last: its space is free, unless it is held. Nothing is lent afterwards.
    #[inline(always)]
    pub(super) fn pass_lent(&mut self) {
        self.passed = self.cursor;
    }

    /// Holds the space of the message that is lent. `None` if none is.
    #[inline(always)]
    pub(super) fn hold_lent(&mut self) -> Option<HeldSpace> {
        let position = self.passed;
        if position == self.cursor {
            return None;
        }
        self.pass_lent();
        self.hold(position);
        Some(HeldSpace::new(position))
    }

    #[inline(always)]
    fn hold(&mut self, position: u64) {
        let (word, bit) = self.bit(position);
        if !rule_broken!(self, ReleaseOnParse) {
            self.held[word] |= bit;
        }
    }

    /// Whether the current batch has been parsed to its end.
    #[inline]
    pub(super) fn batch_ended(&self) -> bool {
        self.messages_left == 0 && self.cursor == self.received
    }

    /// Releases the space of a message. Returns `false` if it is not held.
    #[inline(always)]
    pub(super) fn release(&mut self, space: HeldSpace) -> bool {
        let (word, bit) = self.bit(space.position.get());
        let was = self.held[word] & bit != 0;
        self.held[word] &= !bit;
        was
    }

    /// The consumer position: everything before it was released.
    #[inline(always)]
    pub(super) fn consumer(&mut self) -> u64 {
        if self.consumer != self.passed {
            self.advance_consumer();
        }
        self.consumer
    }

    /// Moves the consumer position to the first message that is held, or to the end of what was parsed.
    #[inline(never)]
    fn advance_consumer(&mut self) {
        let blocks = self.capacity / ALIGNMENT;
        let mut position = self.consumer;
        while position < self.passed {
            let block = self.offset(position) / ALIGNMENT;
            let ahead = self.held[(block / 64) as usize] >> (block % 64);
            if ahead != 0 {
                position += u64::from(ahead.trailing_zeros()) * ALIGNMENT;
                break;
            }
            position += (64 - block % 64).min(blocks - block) * ALIGNMENT;
        }
        self.consumer = position.min(self.passed);
    }

    #[inline]
    fn offset(&self, position: u64) -> u64 {
        position & self.offset_mask
    }

    #[inline]
    fn bit(&self, position: u64) -> (usize, u64) {
        let block = self.offset(position) / ALIGNMENT;
        ((block / 64) as usize, 1 << (block % 64))
    }
}

/// The size of a message whose `payload_len` exceeds the batch: either the message has the bulk flag, or it is too long.
#[cold]
#[inline(never)]
fn bulk_size(header: Header, left: u64) -> Result<u64, Violation> {
    let needs = wire::padded_size(header.ring_len());
    if header.is_bulk() && needs <= left { Ok(needs) } else { Err(Violation::MessageTooLong { needs, left }) }
}

#[cfg(test)]
impl Receiver {
    pub(super) fn received_position(&self) -> u64 {
        self.received
    }

    pub(super) fn is_consumer_known(&self) -> bool {
        self.consumer == self.received
    }

    pub(super) fn next_offset(&self) -> usize {
        self.offset(self.received) as usize
    }

    pub(super) fn rebase(&mut self, back: u64) {
        for position in [&mut self.received, &mut self.cursor, &mut self.passed, &mut self.consumer] {
            *position -= back;
        }
    }
}

#[cfg(test)]
impl HeldSpace {
    pub(super) fn rebase(&mut self, back: u64) {
        *self = HeldSpace::new(self.position.get() - back);
    }

    pub(super) fn duplicate(&self) -> HeldSpace {
        HeldSpace { position: self.position }
    }
}
