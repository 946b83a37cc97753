//! Messages on their way in and out of a ring, and the token for the reply to a request.

use core::num::NonZeroU32;

use super::wire::{self, ALIGNMENT, HEADER_SIZE, Header};

/// Memory from which the endpoint loads headers and metadata. It loads each once, checks the copy, and never loads it again.
pub trait RingBytes {
    /// Loads the 16 bytes at `offset`, as two little-endian numbers. The endpoint stays inside the ring whose size its parameters name.
    fn load_words(&self, offset: usize) -> [u64; 2];
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

/// A message from the peer. Its payload stays where it is until the next message is asked for; longer if it is
/// [held](super::Endpoint::hold).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "somebody waits for it"]
pub enum ReceivedMessage<U> {
    /// The peer calls this side.
    Request(ReceivedRequest),
    /// The peer replies to a call of this side.
    Response(ReceivedResponse<U>),
}

/// A message from the peer that is not a bulk message. As for a [`ReceivedMessage`], its payload stays where it is until the next message is
/// asked for, unless it is [held](super::Endpoint::hold).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "somebody waits for it"]
pub enum UsualMessage<U> {
    /// The peer calls this side.
    Request {
        /// Offset of the payload in the receive ring.
        offset: usize,
        /// Bytes of payload.
        len: usize,
        /// For [`Endpoint::reply`](super::Endpoint::reply).
        reply_token: ReplyToken,
    },
    /// The peer replies to a call of this side, which is no longer pending.
    Response {
        /// What the caller attached to the call; `None` if the call was abandoned.
        user: Option<U>,
        /// Offset of the payload in the receive ring.
        offset: usize,
        /// Bytes of payload.
        len: usize,
    },
}

/// The message of a compact batch, whose payload the caller has copied: its ring space is released already.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the peer may wait for the reply"]
pub enum CompactMessage<U> {
    /// The peer calls this side.
    Request {
        /// For [`Endpoint::reply`](super::Endpoint::reply).
        reply_token: ReplyToken,
    },
    /// The peer replies to a call of this side, which is no longer pending.
    Response {
        /// What the caller attached to the call; `None` if the call was abandoned.
        user: Option<U>,
    },
}

/// A call of the peer. The application must reply to it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the peer waits for the reply"]
pub struct ReceivedRequest {
    /// Offset of the payload in the receive ring.
    pub offset: usize,
    /// Bytes of payload.
    pub len: usize,
    /// Whether the payload is a descriptor, see [`BulkRequest`](super::BulkRequest).
    pub bulk: bool,
    /// For [`Endpoint::reply`](super::Endpoint::reply).
    pub reply_token: ReplyToken,
}

/// The response to a call of this side.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the caller waits for it"]
pub struct ReceivedResponse<U> {
    /// Bits of the [`CallId`](super::CallId) of the call, which is no longer pending.
    pub call: u32,
    /// What the caller attached to the call; `None` if the call was abandoned.
    pub user: Option<U>,
    /// Offset of the payload in the receive ring.
    pub offset: usize,
    /// Bytes of payload.
    pub len: usize,
    /// Whether the payload is a length or a refusal, see [`decode_bulk_response`](super::decode_bulk_response).
    pub bulk: bool,
}

/// The right to reply to one request. Credit is reserved for the reply, so there is always room for it.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "the peer waits for the reply"]
pub struct ReplyToken {
    pub(super) call_id: u32,
    pub(super) blocks: NonZeroU32,
}

impl ReplyToken {
    /// The longest payload that the caller allowed.
    #[inline]
    pub fn max_len(&self) -> u64 {
        wire::max_response_len(self.allowance())
    }

    #[inline]
    pub(super) fn allowance(&self) -> u64 {
        u64::from(self.blocks.get()) * ALIGNMENT
    }
}

#[cfg(test)]
impl ReplyToken {
    pub(super) fn duplicate(&self) -> ReplyToken {
        ReplyToken { call_id: self.call_id, blocks: self.blocks }
    }
}
