//! What the engine needs to know of an operation.

use core::ops::Range;
use std::time::Duration;

use crosstie_protocol::endpoint::batch::Cursor;

use super::cause::{Cause, Peer};
use super::lend::Stored;
use crate::device::RemoteAddr;
use crate::ring::operation_table::{EngineSide, OperationTable};

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    WriteImm(u32),
    ReadBatch,
    WriteBatch,
    Send,
    /// With the number of its message on this connection, from the announcement of its buffer on.
    Recv(u32),
    ImmRecv,
}

/// What an operation is to do: checked arguments.
#[derive(Debug)]
pub(super) struct What {
    pub(super) kind: Kind,
    /// The bytes of the buffer's region.
    pub(super) range: Range<usize>,
    pub(super) remote: RemoteAddr,
}

/// An operation: what its future and the engine pass to each other.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) kind: Kind,
    /// What was lent.
    pub(super) stored: Stored,
    /// The bytes of the buffer's region.
    pub(super) range: Range<usize>,
    pub(super) remote: RemoteAddr,
    /// How much time it has, if it was submitted.
    pub(super) timeout: Option<Duration>,
    /// The result: bytes that were moved.
    pub(super) bytes: u64,
    /// The result of `imm_recv`.
    pub(super) imm: Option<u32>,
}

impl Operation {
    #[inline]
    pub(super) fn new(what: What, stored: Stored) -> Operation {
        let What { kind, range, remote } = what;
        Operation { kind, stored, range, remote, timeout: None, bytes: 0, imm: None }
    }

    /// Takes the operation, with what was lent.
    pub(super) fn take(&mut self) -> Operation {
        Operation { stored: core::mem::take(&mut self.stored), range: self.range.clone(), ..*self }
    }

    /// The first bytes of the buffer of a `recv`.
    pub(super) fn message(&self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        if let Some(buffer) = self.stored.buffer() {
            // The message is inside the range, which is inside the region.
            buffer.region().read(self.range.start, &mut bytes).unwrap_or_default();
        }
        bytes
    }

    /// Notes that blocks of a batch have failed.
    pub(super) fn fail_blocks(&mut self, blocks: Range<u32>, peer: Option<Peer>, cause: Cause) {
        if let Stored::Batch(batch) = &mut self.stored {
            batch.0.fail(blocks, peer, cause);
        }
    }

    /// Notes that nothing of a batch was posted.
    #[cold]
    pub(super) fn fail_all_blocks(&mut self, peer: Option<Peer>, cause: Cause) {
        if let Stored::Batch(batch) = &self.stored {
            self.fail_blocks(0..batch.0.blocks.blocks(), peer, cause);
        }
    }

    /// Fills in the result. `left`: where the posting of a batch has stopped before its end.
    #[inline]
    pub(super) fn finish(&mut self, left: Option<BlocksLeft>) {
        match &mut self.stored {
            Stored::Batch(batch) => {
                self.bytes = batch.0.blocks.bytes();
                if let Some(BlocksLeft { mut cursor, max_len, peer, cause }) = left
                    && let Some(work) = batch.0.blocks.next_work(&mut cursor, 1, max_len)
                {
                    let all = batch.0.blocks.blocks();
                    batch.0.fail(work.first_block..all, peer, cause);
                }
            }
            _ => self.bytes = self.range.len() as u64,
        }
    }
}

/// Blocks of a batch that were not posted, and why.
pub(super) struct BlocksLeft {
    pub(super) cursor: Cursor,
    pub(super) max_len: u64,
    pub(super) peer: Option<Peer>,
    pub(super) cause: Cause,
}

pub(super) type Table = OperationTable<Operation>;
pub(super) type Op = EngineSide;
