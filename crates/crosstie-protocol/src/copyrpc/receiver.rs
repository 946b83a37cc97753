//! The consuming half: what has arrived, what of it the application still holds, and how far the ring is free again.
//!
//! Promises:
//! - Nothing is read that was not announced, and nothing outside the ring, whatever the bytes say.
//! - The consumer position stops at the oldest message that has not been released. Messages are released in any
//!   order; each that is held is one bit in a map of the ring, so releasing is one store and nothing is allocated.

use alloc::boxed::Box;
use alloc::vec;

use super::RingBytes;
use super::violation::Violation;
use super::wire::{
    self, ALIGNMENT, FLOW_METADATA_SIZE, FlowMetadata, HEADER_SIZE, Header, WRAP_MESSAGE_COUNT,
};

const METADATA: u64 = FLOW_METADATA_SIZE as u64;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    capacity: u64,
    /// Everything announced so far.
    received: u64,
    /// Everything parsed so far. Equal to `received` between batches.
    cursor: u64,
    /// Messages of the current batch that have not been parsed.
    messages_left: u32,
    /// Everything released so far, up to the oldest held message; brought up to date by `consumer`.
    consumer: u64,
    /// One bit for each block of the ring: a held message starts there. Bits stand only for positions in
    /// `consumer..cursor`, which is at most one ring.
    held: Box<[u64]>,
    #[cfg(test)]
    pub(super) trap: Option<super::tests::Trap>,
}

/// A message's place in the receive ring. The ring has the place again when it is released.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the ring fills up with messages that are never released"]
pub struct Held {
    position: u64,
}

impl Receiver {
    pub(super) fn new(capacity: u64) -> Self {
        let words = (capacity / ALIGNMENT).div_ceil(64) as usize;
        Receiver {
            capacity,
            received: 0,
            cursor: 0,
            messages_left: 0,
            consumer: 0,
            held: vec![0; words].into_boxed_slice(),
            #[cfg(test)]
            trap: None,
        }
    }

    /// A batch was announced. Gives its metadata; its messages come from `next`.
    #[inline]
    pub(super) fn arrive<B: RingBytes + ?Sized>(
        &mut self,
        imm: u32,
        ring: &B,
    ) -> Result<FlowMetadata, Violation> {
        if self.cursor != self.received {
            return Err(Violation::TrailingBytes { unused: self.received - self.cursor });
        }
        let delta = wire::decode_imm(imm);
        if delta < METADATA {
            return Err(Violation::ShortBatch { delta });
        }
        let free = self.capacity - (self.received - self.consumer());
        if delta > free {
            return Err(Violation::Overrun { delta, free });
        }
        let offset = self.offset(self.received);
        if offset + delta > self.capacity {
            return Err(Violation::AcrossEnd { offset, delta });
        }
        let metadata = FlowMetadata::decode(&ring.load(offset as usize))?;
        if metadata.message_count != WRAP_MESSAGE_COUNT {
            self.received += delta;
            self.cursor += METADATA;
            self.messages_left = metadata.message_count;
            return Ok(metadata);
        }
        if offset + delta != self.capacity {
            return Err(Violation::BadWrap { offset, delta });
        }
        // The announced delta is the skip. To take it from the offset behind the marker skips a whole ring when the
        // marker is in the last block.
        let skip = if reopened!(self, SkipFromOffset) {
            METADATA + self.capacity - self.offset(self.received + METADATA)
        } else {
            delta
        };
        self.received += skip;
        self.cursor = self.received;
        Ok(metadata)
    }

    /// The next message of the batch: where its header is, and the header. It is held until it is released.
    #[inline(always)]
    pub(super) fn next<B: RingBytes + ?Sized>(
        &mut self,
        ring: &B,
    ) -> Result<Option<(Header, Held)>, Violation> {
        let left = self.received - self.cursor;
        if self.messages_left == 0 {
            return if left == 0 { Ok(None) } else { Err(Violation::TrailingBytes { unused: left }) };
        }
        if left == 0 {
            return Err(Violation::MessageTooLong { needs: ALIGNMENT, left });
        }
        let position = self.cursor;
        let header = Header::decode(&ring.load(self.offset(position) as usize));
        let mut needs = wire::padded_size(header.payload_len);
        if needs > left {
            // The bit of a bulk message makes it too long for any ring, so nobody else is asked for it.
            needs = bulk_size(header, left)?;
        }
        self.cursor += needs;
        self.messages_left -= 1;
        let (word, bit) = self.bit(position);
        if !reopened!(self, CreditOnParse) {
            self.held[word] |= bit;
        }
        Ok(Some((header, Held { position })))
    }

    /// Whether the current batch has been parsed to its end.
    #[inline]
    pub(super) fn batch_ended(&self) -> bool {
        self.messages_left == 0 && self.cursor == self.received
    }

    /// Where in the ring the payload of a held message starts.
    #[inline]
    pub(super) fn payload_offset(&self, held: &Held) -> usize {
        self.offset(held.position) as usize + HEADER_SIZE
    }

    /// Gives a message's place back. `false`: it is not held here.
    #[inline]
    pub(super) fn release(&mut self, held: Held) -> bool {
        let (word, bit) = self.bit(held.position);
        let was = self.held[word] & bit != 0;
        self.held[word] &= !bit;
        was
    }

    /// Everything before this position has been released.
    #[inline]
    pub(super) fn consumer(&mut self) -> u64 {
        let blocks = self.capacity / ALIGNMENT;
        let mut position = self.consumer;
        while position < self.cursor {
            let block = self.offset(position) / ALIGNMENT;
            let ahead = self.held[(block / 64) as usize] >> (block % 64);
            if ahead != 0 {
                position += u64::from(ahead.trailing_zeros()) * ALIGNMENT;
                break;
            }
            position += (64 - block % 64).min(blocks - block) * ALIGNMENT;
        }
        self.consumer = position.min(self.cursor);
        self.consumer
    }

    #[inline]
    fn offset(&self, position: u64) -> u64 {
        position & (self.capacity - 1)
    }

    #[inline]
    fn bit(&self, position: u64) -> (usize, u64) {
        let block = self.offset(position) / ALIGNMENT;
        ((block / 64) as usize, 1 << (block % 64))
    }
}

/// Bytes that a message takes which is a bulk message, or too long.
#[cold]
#[inline(never)]
fn bulk_size(header: Header, left: u64) -> Result<u64, Violation> {
    let needs = wire::padded_size(header.ring_len());
    if header.is_bulk() && needs <= left { Ok(needs) } else { Err(Violation::MessageTooLong { needs, left }) }
}

#[cfg(test)]
impl Receiver {
    pub(super) fn rebase(&mut self, back: u64) {
        for position in [&mut self.received, &mut self.cursor, &mut self.consumer] {
            *position -= back;
        }
    }
}

#[cfg(test)]
impl Held {
    pub(super) fn rebase(&mut self, back: u64) {
        self.position -= back;
    }

    pub(super) fn duplicate(&self) -> Held {
        Held { position: self.position }
    }
}
