//! The WRITEs that carry batches and credit, as [`Flow::next_write`](super::Flow::next_write) returns them.

use alloc::vec::Vec;

use super::wire;

/// One WRITE with immediate to post, to `offset` of the peer's ring. Nothing has changed until it is
/// [posted](super::Flow::write_posted): a batch that cannot be posted stays open, and may grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a WRITE that was posted must be noted"]
pub struct Write {
    /// The same in the staging ring and in the peer's ring.
    pub offset: usize,
    /// Bytes to write. A wrap marker has 32, however many bytes it skips.
    pub len: usize,
    /// The immediate.
    pub imm: u32,
    /// What is in front of the messages. The caller encodes it to `offset` of the staging ring before it posts the WRITE, unless the batch
    /// is compact.
    pub metadata: wire::FlowMetadata,
    /// The head of a compact batch, in place of metadata and header. The WRITE carries this head and, behind it, the payload from
    /// [`payload_offset`](Write::payload_offset) of the staging ring.
    pub compact: Option<wire::CompactHead>,
    /// The position behind it.
    pub(super) end: u64,
}

impl Write {
    /// Where the payload of the first message is in the staging ring.
    #[inline]
    pub const fn payload_offset(&self) -> usize {
        self.offset + wire::FLOW_METADATA_SIZE + wire::HEADER_SIZE
    }

    /// What it carries, for counters.
    #[inline]
    pub const fn kind(&self) -> WriteKind {
        match self.metadata.message_count {
            wire::WRAP_MESSAGE_COUNT => WriteKind::Wrap,
            0 => WriteKind::Credit,
            _ => WriteKind::Batch,
        }
    }

    /// The bytes of the WRITE, if the staging ring is a slice. For simulations and tests, which have no device.
    pub fn bytes(&self, staging: &mut [u8]) -> Vec<u8> {
        match self.compact {
            Some(head) => {
                let payload = &staging[self.payload_offset()..][..self.len - wire::COMPACT_HEAD_SIZE];
                [&head.encode(), payload].concat()
            }
            None => {
                staging[self.offset..][..wire::FLOW_METADATA_SIZE].copy_from_slice(&self.metadata.encode());
                staging[self.offset..][..self.len].to_vec()
            }
        }
    }
}

/// What a [`Write`] carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WriteKind {
    /// Messages.
    Batch,
    /// A wrap marker, which skips the rest of the ring.
    Wrap,
    /// Metadata alone, to return credit.
    Credit,
}
