//! What the engine needs to know of an operation.

use core::ops::Range;
use std::time::Duration;

use super::buffer::Stored;
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
    /// The first bytes of the buffer of a `recv`.
    pub(super) fn message(&self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        if let Some(buffer) = self.stored.buffer() {
            // The message is inside the range, which is inside the region.
            buffer.region().read(self.range.start, &mut bytes).unwrap_or_default();
        }
        bytes
    }
}

pub(super) type Table = OperationTable<Operation>;
pub(super) type Op = EngineSide;
