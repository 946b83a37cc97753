//! The wire format: message header, flow metadata, immediate, connect information.
//!
//! Promise: decoding is total. Any bytes decode to a value or to a [`Violation`], never to a panic. What depends on the
//! state of a connection (does the length fit, is the call known) is checked by the receiver, not here.
//! `docs/wire-format.md` draws the bytes.

use super::violation::{Report, Violation};

/// The size of every message, the size of every batch and every position are multiples of this many bytes.
pub const ALIGNMENT: u64 = 32;
/// Bytes of a message header.
pub const HEADER_SIZE: usize = 12;
/// Bytes of the flow metadata in front of a batch.
pub const FLOW_METADATA_SIZE: usize = 32;
/// The bit of a call id that makes a message a response.
pub const RESPONSE_FLAG: u32 = 0x8000_0000;
/// The bit of a payload length that makes a message a bulk message: its payload is a descriptor. No payload in a ring is
/// long enough to need this bit.
pub const BULK_FLAG: u32 = 0x8000_0000;
/// The message count that makes a batch a wrap marker.
pub const WRAP_MESSAGE_COUNT: u32 = u32::MAX;
/// The bit of an immediate that makes a batch a compact one: a single short message, with a head instead of metadata and
/// header. The other bits are the length of its payload. No ring is long enough to need this bit.
pub const COMPACT_FLAG: u32 = 0x8000_0000;
/// Bytes of the head of a compact batch.
pub const COMPACT_HEAD_SIZE: usize = 16;
/// The longest payload of a compact batch. With its head it has 48 bytes, which a device can deliver with the completion.
pub const MAX_COMPACT_PAYLOAD: u32 = 32;
/// Bytes of the connect information.
pub const CONNECT_INFO_SIZE: usize = 56;

const METADATA: u64 = FLOW_METADATA_SIZE as u64;
const CONNECT_MAGIC: [u8; 4] = *b"xRPC";
const CONNECT_VERSION: u32 = 3;

/// Bytes that a message with this payload occupies in a ring: header, payload, and padding to [`ALIGNMENT`].
///
/// ```
/// use crosstie_protocol::copyrpc::wire::padded_size;
/// assert_eq!([0, 20, 21, 52, 53].map(padded_size), [32, 32, 64, 64, 96]);
/// ```
#[inline]
pub const fn padded_size(payload_len: u32) -> u64 {
    (payload_len as u64 + HEADER_SIZE as u64 + (ALIGNMENT - 1)) & !(ALIGNMENT - 1)
}

/// Bytes that a compact batch with this payload occupies in a ring.
///
/// ```
/// use crosstie_protocol::copyrpc::wire::compact_size;
/// assert_eq!([0, 16, 17, 32].map(compact_size), [32, 32, 64, 64]);
/// ```
#[inline]
pub const fn compact_size(payload_len: u32) -> u64 {
    (payload_len as u64 + COMPACT_HEAD_SIZE as u64 + (ALIGNMENT - 1)) & !(ALIGNMENT - 1)
}

/// Credit that a call consumes so that there is always room for a response of up to `response_len` bytes: the padded
/// response and the metadata of a batch of its own. Twice this much is kept free in the ring, because the response may have
/// to skip the end of the ring first, and it skips less than it needs itself.
#[inline]
pub const fn call_credit(response_len: u32) -> u64 {
    padded_size(response_len) + METADATA
}

/// Bytes of a response of `len` bytes and the metadata of a batch of its own, without padding.
#[inline]
pub(crate) const fn response_size(len: usize) -> u64 {
    len as u64 + METADATA + HEADER_SIZE as u64
}

/// The longest response payload of a call that uses so much credit.
#[inline]
pub(crate) const fn max_response_len(internal: u64) -> u64 {
    internal.saturating_sub(METADATA + HEADER_SIZE as u64)
}

/// The immediate that announces `delta` bytes.
#[inline]
pub const fn encode_imm(delta: u64) -> u32 {
    (delta / ALIGNMENT) as u32
}

/// The number of bytes that an immediate announces.
#[inline]
pub const fn decode_imm(imm: u32) -> u64 {
    imm as u64 * ALIGNMENT
}

/// The 12 bytes in front of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// The caller's call id, with [`RESPONSE_FLAG`] in a response.
    pub call_id: u32,
    /// The [credit](call_credit) that the call uses, in blocks of [`ALIGNMENT`] bytes. The request takes it and the response
    /// returns it.
    pub credit_blocks: u32,
    /// Bytes of payload, with [`BULK_FLAG`] in a bulk message.
    pub payload_len: u32,
}

impl Header {
    /// Encodes the header.
    #[inline]
    pub const fn encode(&self) -> [u8; HEADER_SIZE] {
        let ([a, b, c, d], [e, f, g, h], [i, j, k, l]) =
            (self.call_id.to_le_bytes(), self.credit_blocks.to_le_bytes(), self.payload_len.to_le_bytes());
        [a, b, c, d, e, f, g, h, i, j, k, l]
    }

    /// Decodes a header. Its fields are not checked yet.
    #[inline]
    pub const fn decode(bytes: &[u8; HEADER_SIZE]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
        Header {
            call_id: u32::from_le_bytes([a, b, c, d]),
            credit_blocks: u32::from_le_bytes([e, f, g, h]),
            payload_len: u32::from_le_bytes([i, j, k, l]),
        }
    }

    /// Decodes a header from the first 16 bytes of a message, as two little-endian numbers. Its fields are not checked yet.
    #[inline]
    pub const fn from_words([first, second]: [u64; 2]) -> Self {
        Header { call_id: first as u32, credit_blocks: (first >> 32) as u32, payload_len: second as u32 }
    }

    /// Whether the message is a response.
    #[inline]
    pub const fn is_response(&self) -> bool {
        self.call_id & RESPONSE_FLAG != 0
    }

    /// Whether the message is a bulk message.
    #[inline]
    pub const fn is_bulk(&self) -> bool {
        self.payload_len & BULK_FLAG != 0
    }

    /// Bytes of payload in the ring.
    #[inline]
    pub const fn ring_len(&self) -> u32 {
        self.payload_len & !BULK_FLAG
    }
}

/// The 32 bytes in front of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowMetadata {
    /// Absolute position up to which the writer has consumed its own receive ring. Applying it twice changes nothing.
    pub consumer_pos: u64,
    /// Bytes of response credit that the reader gains.
    pub credit_grant: u64,
    /// Messages that follow, or [`WRAP_MESSAGE_COUNT`].
    pub message_count: u32,
}

impl FlowMetadata {
    /// Encodes the metadata. The padding is zero.
    #[inline]
    pub fn encode(&self) -> [u8; FLOW_METADATA_SIZE] {
        let mut bytes = [0; FLOW_METADATA_SIZE];
        bytes[..8].copy_from_slice(&self.consumer_pos.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.credit_grant.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.message_count.to_le_bytes());
        bytes
    }

    /// Decodes metadata. Its padding must be zero and its numbers multiples of [`ALIGNMENT`].
    #[inline]
    pub fn decode(bytes: &[u8; FLOW_METADATA_SIZE]) -> Result<Self, Violation> {
        let [first, second] = [0, 16].map(|at| u128::from_le_bytes(bytes_at(bytes, at)));
        FlowMetadata::from_words([first, second].map(|half| [half as u64, (half >> 64) as u64]))
    }

    /// As [`decode`](FlowMetadata::decode), from the bytes as little-endian numbers.
    #[inline]
    pub(super) fn from_words<R: Report<Violation>>(words: [[u64; 2]; 2]) -> Result<Self, R> {
        let [[consumer_pos, credit_grant], [third, fourth]] = words;
        ensure!(third >> 32 == 0 && fourth == 0, Violation::Padding);
        ensure!(
            consumer_pos.is_multiple_of(ALIGNMENT),
            Violation::ConsumerMisaligned { position: consumer_pos }
        );
        ensure!(credit_grant.is_multiple_of(ALIGNMENT), Violation::GrantMisaligned { grant: credit_grant });
        Ok(FlowMetadata { consumer_pos, credit_grant, message_count: third as u32 })
    }
}

/// The 16 bytes in front of the payload of a compact batch: what its metadata and its header would say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompactHead {
    /// See [`Header::call_id`].
    pub call_id: u32,
    /// See [`Header::credit_blocks`].
    pub credit_blocks: u32,
    /// [`FlowMetadata::credit_grant`], in blocks of [`ALIGNMENT`] bytes.
    pub grant_blocks: u32,
    /// The low bits of [`FlowMetadata::consumer_pos`], in blocks. The position is at most a ring behind what the reader has
    /// sent, so the low bits are enough.
    pub consumer_blocks: u32,
}

impl CompactHead {
    /// The head of a batch with this metadata and this message.
    #[inline]
    pub const fn new(metadata: &FlowMetadata, header: &Header) -> CompactHead {
        CompactHead {
            call_id: header.call_id,
            credit_blocks: header.credit_blocks,
            grant_blocks: (metadata.credit_grant / ALIGNMENT) as u32,
            consumer_blocks: (metadata.consumer_pos / ALIGNMENT) as u32,
        }
    }

    /// Its 16 bytes, as two little-endian numbers.
    #[inline]
    pub const fn to_words(&self) -> [u64; 2] {
        let first = (self.credit_blocks as u64) << 32 | self.call_id as u64;
        let second = (self.consumer_blocks as u64) << 32 | self.grant_blocks as u64;
        [first, second]
    }

    /// Encodes the head.
    #[inline]
    pub const fn encode(&self) -> [u8; COMPACT_HEAD_SIZE] {
        // One store: a load of the whole head need not wait for the bytes of several.
        let [low, high] = self.to_words();
        ((high as u128) << 64 | low as u128).to_le_bytes()
    }

    /// Decodes a head from its 16 bytes, as two little-endian numbers. Its fields are not checked yet.
    #[inline]
    pub const fn from_words([first, second]: [u64; 2]) -> Self {
        CompactHead {
            call_id: first as u32,
            credit_blocks: (first >> 32) as u32,
            grant_blocks: second as u32,
            consumer_blocks: (second >> 32) as u32,
        }
    }
}

/// What each side sends to the other before the first batch, in addition to the address of its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectInfo {
    /// Remote address of the receive ring.
    pub ring_addr: u64,
    /// Bytes of the receive ring.
    pub ring_size: u64,
    /// Remote address of the consumer position: eight bytes, little-endian, for an RDMA READ.
    pub consumer_addr: u64,
    /// The most response credit that this side will ever have granted and not got back. At the start it grants this much, or a
    /// quarter of the *other* side's ring if that is less.
    pub credit_limit: u64,
    /// Remote key for writes to the ring.
    pub ring_rkey: u32,
    /// Remote key for reads of the consumer position.
    pub consumer_rkey: u32,
    /// The longest bulk payload that this side accepts and sends; zero if it supports none.
    pub bulk_limit: u64,
}

impl ConnectInfo {
    /// Encodes the information.
    pub fn encode(&self) -> [u8; CONNECT_INFO_SIZE] {
        let mut bytes = [0; CONNECT_INFO_SIZE];
        bytes[..4].copy_from_slice(&CONNECT_MAGIC);
        bytes[4..8].copy_from_slice(&CONNECT_VERSION.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.ring_addr.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.ring_size.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.consumer_addr.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.credit_limit.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.ring_rkey.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.consumer_rkey.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.bulk_limit.to_le_bytes());
        bytes
    }

    /// Decodes the information, if the bytes are of this protocol and version. Sizes are checked when a flow is created
    /// from them.
    pub fn decode(bytes: &[u8; CONNECT_INFO_SIZE]) -> Result<Self, Violation> {
        if bytes_at(bytes, 0) != CONNECT_MAGIC {
            return Err(Violation::NotCopyrpc);
        }
        let version = u32::from_le_bytes(bytes_at(bytes, 4));
        if version != CONNECT_VERSION {
            return Err(Violation::Version { theirs: version, ours: CONNECT_VERSION });
        }
        Ok(ConnectInfo {
            ring_addr: u64::from_le_bytes(bytes_at(bytes, 8)),
            ring_size: u64::from_le_bytes(bytes_at(bytes, 16)),
            consumer_addr: u64::from_le_bytes(bytes_at(bytes, 24)),
            credit_limit: u64::from_le_bytes(bytes_at(bytes, 32)),
            ring_rkey: u32::from_le_bytes(bytes_at(bytes, 40)),
            consumer_rkey: u32::from_le_bytes(bytes_at(bytes, 44)),
            bulk_limit: u64::from_le_bytes(bytes_at(bytes, 48)),
        })
    }
}

/// `N` bytes from `at`, which are there.
#[inline]
fn bytes_at<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    core::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_match_the_wire_format() {
        assert_eq!([0, 20, 21, 52].map(padded_size), [32, 32, 64, 64]);
        assert_eq!(padded_size(u32::MAX), (1 << 32) + 32);
        assert_eq!([0, 20, 21].map(call_credit), [64, 64, 96]);
        assert_eq!(max_response_len(64), 20);
        assert_eq!(max_response_len(96), 52);
        assert_eq!(decode_imm(encode_imm(4096)), 4096);
        assert_eq!(decode_imm(u32::MAX), 32 * u64::from(u32::MAX));
    }

    #[test]
    fn layouts_do_not_change() {
        let header = Header { call_id: 0x8001_0002, credit_blocks: 3, payload_len: 0x0405 };
        assert_eq!(header.encode(), [2, 0, 1, 0x80, 3, 0, 0, 0, 5, 4, 0, 0]);
        assert_eq!(Header::decode(&header.encode()), header);
        let mut front = [0xaa; 16];
        front[..HEADER_SIZE].copy_from_slice(&header.encode());
        let words = [0, 8].map(|at| u64::from_le_bytes(bytes_at(&front, at)));
        assert_eq!(Header::from_words(words), header);
        assert!(header.is_response());

        let metadata = FlowMetadata { consumer_pos: 0x20, credit_grant: 0x40, message_count: 7 };
        let bytes = metadata.encode();
        assert_eq!((bytes[0], bytes[8], bytes[16]), (0x20, 0x40, 7));
        assert_eq!(bytes.iter().filter(|b| **b != 0).count(), 3);
        assert_eq!(FlowMetadata::decode(&bytes), Ok(metadata));

        let head = CompactHead::new(&metadata, &header);
        assert_eq!(head.encode(), [2, 0, 1, 0x80, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(head.to_words(), [0, 8].map(|at| u64::from_le_bytes(bytes_at(&head.encode(), at))));
        assert_eq!(CompactHead::from_words(head.to_words()), head);

        let info = ConnectInfo {
            ring_addr: 1,
            ring_size: 2,
            consumer_addr: 3,
            credit_limit: 4,
            ring_rkey: 5,
            consumer_rkey: 6,
            bulk_limit: 7,
        };
        assert_eq!(ConnectInfo::decode(&info.encode()), Ok(info));
        let mut other = info.encode();
        other[4] = 1;
        assert_eq!(ConnectInfo::decode(&other), Err(Violation::Version { theirs: 1, ours: 3 }));
        other[0] = 0;
        assert_eq!(ConnectInfo::decode(&other), Err(Violation::NotCopyrpc));
    }

    #[test]
    fn invalid_metadata_is_a_violation() {
        let good = FlowMetadata { consumer_pos: 64, credit_grant: 64, message_count: 0 }.encode();
        let with = |at: usize| {
            let mut bytes = good;
            bytes[at] ^= 1;
            FlowMetadata::decode(&bytes)
        };
        assert_eq!(with(0), Err(Violation::ConsumerMisaligned { position: 65 }));
        assert_eq!(with(8), Err(Violation::GrantMisaligned { grant: 65 }));
        assert_eq!(with(31), Err(Violation::Padding));
        assert!(with(16).is_ok());
    }
}
