//! The receiving half of a flow: what has arrived, which messages the application has not released, and how far the ring is
//! free again.
//!
//! ```text
//!          consumer             finished  cursor        received
//!              |                    |        |              |
//!  ------------+--------------------+--------+--------------+------------> position (u64, never goes back)
//!   free for   | parsed; some of it | the    | announced,   |
//!   the peer   | is still retained  | current| not parsed   |
//!              |                    | message|              |
//! ```
//!
//! A message is *current* until the next one is asked for, and its space is then free. One that is needed longer is *retained* until it is
//! released.
//!
//! Promises:
//! - It reads only bytes that the peer announced, and only inside the ring, whatever the bytes say.
//! - The consumer position stops at the current message, and at the oldest one that is retained. Messages are released in any
//!   order. Each retained message is one bit in a bitmap of the ring, so a release is one store and allocates nothing.

use alloc::boxed::Box;
use alloc::vec;
use core::num::NonZeroU64;
use core::ops::Range;

use super::message::RingBytes;
use super::violation::{Report, Violation};
use super::wire::{
    self, ALIGNMENT, COMPACT_FLAG, COMPACT_HEAD_SIZE, FLOW_METADATA_SIZE, HEADER_SIZE, Header,
    MAX_COMPACT_PAYLOAD,
};

const METADATA: u64 = FLOW_METADATA_SIZE as u64;
const NO_HEADER: Header = Header { call_id: 0, credit_blocks: 0, payload_len: 0 };

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    capacity: u64,
    /// `capacity - 1`: the bits of a position that are its offset.
    offset_mask: u64,
    /// End of what the peer has announced.
    received: u64,
    /// End of what was parsed. Equal to `received` between batches.
    cursor: u64,
    /// The start of the current message. Equal to `cursor` if there is none.
    finished: u64,
    /// Messages of the current batch that have not been parsed.
    messages_left: u32,
    /// The message of a compact batch, until it is parsed.
    compact: Option<Header>,
    /// Everything before this was released. The method `consumer` brings it up to date.
    consumer: u64,
    /// One bit for each block of the ring, set if a retained message starts there. Only positions in `consumer..finished` have bits
    /// set; that range is at most one ring long.
    retained: Box<[u64]>,
    /// Bits that are set.
    retained_messages: u32,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::tests::BrokenRule>,
}

/// Where a batch is that an immediate has announced.
#[derive(Clone, Copy)]
pub(super) struct BatchPlace {
    pub(super) offset: u64,
    /// Bytes up to the next batch.
    pub(super) delta: u64,
    /// The length of the payload, if the batch is compact.
    pub(super) compact: Option<u32>,
}

/// The space that a received message occupies in the receive ring, until it is released.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the ring fills up with messages that are never released"]
pub struct RetainedSpace {
    /// The position of the message, which is a multiple of [`ALIGNMENT`], with bit 0 set. So it is never zero, and an
    /// `Option<RetainedSpace>` has 8 bytes.
    position: NonZeroU64,
}

impl RetainedSpace {
    #[inline]
    fn new(position: u64) -> RetainedSpace {
        RetainedSpace { position: NonZeroU64::MIN | position }
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
            finished: 0,
            messages_left: 0,
            compact: None,
            consumer: 0,
            retained: vec![0; words].into_boxed_slice(),
            retained_messages: 0,
            #[cfg(test)]
            broken_rule: None,
        }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Where the batch that `imm` announces should be. Nothing is checked, but it is inside the ring.
    #[inline]
    pub(super) fn announced_batch(&self, imm: u32) -> Range<usize> {
        let start = self.offset(self.received);
        let end = self.capacity.min(start + wire::decode_imm(imm & !COMPACT_FLAG));
        start as usize..end as usize
    }

    /// Checks that the batch which `imm` announces is inside the ring, in space that is free. The [consumer position](Receiver::consumer) is
    /// up to date.
    #[inline(always)]
    pub(super) fn check_place<R: Report<Violation>>(&self, imm: u32) -> Result<BatchPlace, R> {
        let compact = (imm & COMPACT_FLAG != 0).then_some(imm & !COMPACT_FLAG);
        let delta = match compact {
            Some(payload_len) => {
                ensure!(payload_len <= MAX_COMPACT_PAYLOAD, Violation::CompactTooLong { payload_len });
                wire::compact_size(payload_len)
            }
            None => wire::decode_imm(imm),
        };
        let (offset, free) = (self.offset(self.received), self.capacity - (self.received - self.consumer));
        let unused = self.received - self.cursor;
        ensure!(self.messages_left == 0, Violation::TrailingBytes { unused });
        ensure!(delta >= METADATA, Violation::ShortBatch { delta });
        ensure!(delta <= free, Violation::Overrun { delta, free });
        ensure!(offset + delta <= self.capacity, Violation::AcrossEnd { offset, delta });
        Ok(BatchPlace { offset, delta, compact })
    }

    /// Skips the rest of the ring, which a marker has announced.
    #[cold]
    pub(super) fn skip_to_end(&mut self, place: &BatchPlace) {
        // The announced delta is the skip. A skip that is computed from the offset behind the marker would be a whole ring
        // when the marker is in the last block.
        let skip = if rule_broken!(self, SkipFromOffset) {
            METADATA + self.capacity - self.offset(self.received + METADATA)
        } else {
            place.delta
        };
        self.begin_batch(&BatchPlace { delta: skip, ..*place }, skip, 0, None);
    }

    /// Begins a batch, whose first message is `front` bytes behind its start. The first message of a compact batch comes from its head.
    #[inline]
    pub(super) fn begin_batch(
        &mut self,
        place: &BatchPlace,
        front: u64,
        messages: u32,
        compact: Option<Header>,
    ) {
        self.cursor = self.received + front;
        self.received += place.delta;
        self.messages_left = messages;
        self.compact = compact;
        self.finish_message();
    }

    /// The header of the next message of the batch, which [has not ended](Receiver::batch_ended), and the offset of its payload. `COMPACT`:
    /// whether the batch [is compact](Receiver::is_compact). Nothing changes before [`take`](Receiver::take).
    #[inline(always)]
    pub(super) fn next_header<const COMPACT: bool, B: RingBytes + ?Sized>(
        &self,
        ring: &B,
    ) -> (Header, usize) {
        let offset = self.offset(self.cursor) as usize;
        match self.compact {
            Some(header) if COMPACT => (header, offset + COMPACT_HEAD_SIZE),
            // `check_size` says that it is not there.
            _ if self.cursor == self.received => (NO_HEADER, offset),
            _ => (Header::from_words(ring.load_words(offset)), offset + HEADER_SIZE),
        }
    }

    /// Checks that the next message is inside its batch. Returns the bytes that it takes, and those behind it.
    #[inline]
    pub(super) fn check_size<const COMPACT: bool, R: Report<Violation>>(
        &self,
        header: &Header,
    ) -> Result<(u64, u64), R> {
        let left = self.received - self.cursor;
        let needs = if COMPACT { left } else { wire::padded_size(header.ring_len()) };
        ensure!(needs <= left, Violation::MessageTooLong { needs, left });
        Ok((needs, left - needs))
    }

    /// Whether the next message is the last one of its batch.
    #[inline]
    pub(super) fn is_at_last(&self) -> bool {
        self.messages_left == 1
    }

    /// Whether the batch is compact, and has not ended.
    #[inline]
    pub(super) fn is_compact(&self) -> bool {
        self.compact.is_some()
    }

    /// Takes the next message, which has so many bytes: it is the current one. The one before [is finished](Receiver::finish_message).
    #[inline]
    pub(super) fn take<const COMPACT: bool>(&mut self, size: u64) {
        self.cursor += size;
        self.messages_left -= 1;
        if COMPACT {
            self.compact = None;
        }
    }

    /// Frees the space of the current message, unless it is retained. No message is current afterwards.
    #[inline]
    pub(super) fn finish_message(&mut self) {
        self.finished = self.cursor;
    }

    /// Retains the space of the current message. `None` if there is none.
    #[inline]
    pub(super) fn retain(&mut self) -> Option<RetainedSpace> {
        let position = self.finished;
        if position == self.cursor {
            return None;
        }
        self.finish_message();
        let (word, bit) = self.bit(position);
        if !rule_broken!(self, ReleaseOnParse) {
            self.retained[word] |= bit;
            self.retained_messages += 1;
        }
        Some(RetainedSpace::new(position))
    }

    /// Whether the current batch has been parsed to its end.
    #[inline]
    pub(super) fn batch_ended(&self) -> bool {
        self.messages_left == 0
    }

    /// Releases the space of a message. Returns `false` if it is not retained.
    #[inline]
    pub(super) fn release(&mut self, space: RetainedSpace) -> bool {
        let (word, bit) = self.bit(space.position.get());
        let was_retained = self.retained[word] & bit != 0;
        self.retained[word] &= !bit;
        self.retained_messages -= u32::from(was_retained);
        was_retained
    }

    /// The consumer position: everything before it was released.
    #[inline]
    pub(super) fn consumer(&mut self) -> u64 {
        if self.retained_messages == 0 {
            self.consumer = self.finished;
        } else if self.consumer != self.finished {
            self.advance_consumer();
        }
        self.consumer
    }

    /// Moves the consumer position to the first message that is retained, or to the end of what was parsed.
    #[inline(never)]
    fn advance_consumer(&mut self) {
        let blocks = self.capacity / ALIGNMENT;
        let mut position = self.consumer;
        while position < self.finished {
            let block = self.offset(position) / ALIGNMENT;
            let ahead = self.retained[(block / 64) as usize] >> (block % 64);
            if ahead != 0 {
                position += u64::from(ahead.trailing_zeros()) * ALIGNMENT;
                break;
            }
            position += (64 - block % 64).min(blocks - block) * ALIGNMENT;
        }
        self.consumer = position.min(self.finished);
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

#[cfg(test)]
impl Receiver {
    pub(super) fn rebase(&mut self, back: u64) {
        for position in [&mut self.received, &mut self.cursor, &mut self.finished, &mut self.consumer] {
            *position -= back;
        }
    }
}

#[cfg(test)]
impl RetainedSpace {
    pub(super) fn rebase(&mut self, back: u64) {
        *self = RetainedSpace::new(self.position.get() - back);
    }

    pub(super) fn duplicate(&self) -> RetainedSpace {
        RetainedSpace { position: self.position }
    }
}
