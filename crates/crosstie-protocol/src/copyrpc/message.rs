//! Messages on their way in and out of a ring, and the token for the reply to a request.

use core::num::NonZeroU32;

use super::pending_calls::CallId;
use super::wire::{self, ALIGNMENT, HEADER_SIZE, Header};

/// Memory from which the flow loads headers and metadata. It loads each once, checks the copy, and never loads it again.
pub trait RingBytes {
    /// Loads the 16 bytes at `offset`, as two little-endian numbers. The flow stays inside the ring whose size its parameters name.
    fn load_words(&self, offset: usize) -> [u64; 2];
}

/// The head of a compact batch that came with its completion: all that the flow loads of such a batch.
impl RingBytes for [u64; 2] {
    #[inline]
    fn load_words(&self, _: usize) -> [u64; 2] {
        *self
    }
}

impl RingBytes for [u8] {
    #[inline]
    fn load_words(&self, offset: usize) -> [u64; 2] {
        let bytes = &self[offset..offset + 16];
        let number = u128::from_le_bytes(core::array::from_fn(|i| bytes[i]));
        [number as u64, (number >> 64) as u64]
    }
}

/// Where an outgoing message goes. The caller writes the header to `offset` of its staging ring and the payload behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the batch is sent with whatever bytes are at this offset"]
pub struct Placement {
    /// Offset of the header. The payload follows the header.
    pub offset: usize,
    /// The header to write there.
    pub header: Header,
}

impl Placement {
    /// Offset of the payload.
    #[inline]
    pub fn payload_offset(&self) -> usize {
        self.offset + HEADER_SIZE
    }
}

/// What the payload of an outgoing message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes for the peer's application.
    Bytes,
    /// A descriptor of bulk memory, see [`BulkRequest`](super::BulkRequest), or what became of it.
    Bulk,
}

impl Content {
    /// The flag in the length of the message.
    #[inline]
    pub(super) const fn flag(self) -> u32 {
        match self {
            Content::Bytes => 0,
            Content::Bulk => wire::BULK_FLAG,
        }
    }
}

/// A message from the peer. Its payload is at an offset of the receive ring, and stays there until the next message is asked for; longer if it is
/// [retained](super::Flow::retain).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "somebody waits for it"]
pub enum Message<U> {
    /// The peer calls this side, which must reply.
    Request {
        /// For [`Flow::reply`](super::Flow::reply).
        reply_token: ReplyToken,
        /// Offset of the payload.
        offset: usize,
        /// Bytes of payload.
        len: usize,
        /// Whether the payload is a descriptor, see [`BulkRequest`](super::BulkRequest).
        is_bulk: bool,
    },
    /// The peer replies to a call of this side, which is no longer pending.
    Response {
        /// The call.
        call: CallId,
        /// What the caller attached to the call; `None` if the call was abandoned.
        user: Option<U>,
        /// Offset of the payload.
        offset: usize,
        /// Bytes of payload.
        len: usize,
        /// Whether the payload is a length or a refusal, see [`decode_bulk_response`](super::decode_bulk_response).
        is_bulk: bool,
    },
}

/// The right to reply to one request. Credit is reserved for the reply, so there is always room for it.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the peer waits for the reply"]
pub struct ReplyToken {
    pub(super) call_id: u32,
    pub(super) credit_blocks: NonZeroU32,
}

impl ReplyToken {
    /// The longest payload that the caller allowed.
    #[inline]
    pub fn max_len(&self) -> u64 {
        wire::max_response_len(self.credit())
    }

    #[inline]
    pub(super) fn credit(&self) -> u64 {
        u64::from(self.credit_blocks.get()) * ALIGNMENT
    }

    /// The header of the reply.
    #[inline]
    pub(super) fn header(&self, content: Content, len: usize) -> Header {
        let (call_id, credit_blocks) = (self.call_id | wire::RESPONSE_FLAG, self.credit_blocks.get());
        Header { call_id, credit_blocks, payload_len: len as u32 | content.flag() }
    }
}

#[cfg(test)]
impl ReplyToken {
    pub(super) fn duplicate(&self) -> ReplyToken {
        ReplyToken { call_id: self.call_id, credit_blocks: self.credit_blocks }
    }
}
