//! Operations: READs and WRITEs with a completion of their own. These are the pieces of bulk payloads, and the operations that
//! the application posts.
//!
//! Each has a key in its `wr_id`: an index with a generation. So a completion that arrives late or twice finds no operation.

use std::ops::Range;

use crosstie_protocol::key::Key;
use crosstie_protocol::slab::Slab;

use super::address::ConnectionId;
use super::connection::SendQueue;
use super::error::{Failure, NotPosted, RawError};
use super::flush_policy::SEND_DEPTH;
use super::wr_id::SendKind;
use crate::device::{Mr, PostError, SendOp, Sge};

/// The most operations of the application that one connection has under way. The rest of the send queue is for calls.
pub const RAW_DEPTH: usize = SEND_DEPTH as usize / 2;

type OperationKey = Key<10, 30>;

/// What a completion belongs to.
pub(super) enum Operation {
    /// A piece of the queued request with this number.
    ReadPiece(u64),
    /// A piece of the outgoing response with this number.
    WritePiece(u64),
    /// An operation of the application. It owns the region until it has completed.
    Raw { token: u64, region: Mr },
}

/// Operations under way on one connection.
pub(super) struct OperationTable {
    operations: Slab<Operation, OperationKey>,
    /// How many of them are the application's.
    pub(super) raw: usize,
}

impl OperationTable {
    pub(super) fn new() -> OperationTable {
        OperationTable { operations: Slab::new(OperationKey::INDICES), raw: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.operations.len()
    }

    /// The key of the next operation.
    fn next_key(&mut self) -> u32 {
        // The send queue takes fewer than there are keys.
        self.operations.next_key().map_or(0, OperationKey::bits)
    }

    /// Adds the operation that was posted with the [next key](OperationTable::next_key).
    fn insert(&mut self, operation: Operation) {
        self.raw += usize::from(matches!(operation, Operation::Raw { .. }));
        let inserted = self.operations.insert(operation);
        debug_assert!(inserted.is_ok());
    }

    /// Removes an operation that has completed. `None`: no operation has this key.
    pub(super) fn remove(&mut self, key: u32) -> Option<Operation> {
        let operation = self.operations.remove(OperationKey::from_bits(key))?;
        self.raw -= usize::from(matches!(operation, Operation::Raw { .. }));
        Some(operation)
    }

    /// All operations that have not completed.
    pub(super) fn into_operations(self) -> impl Iterator<Item = Operation> {
        self.operations.into_values()
    }
}

/// Posts operations: borrows the parts of a connection that this needs.
pub(super) struct OperationPoster<'c> {
    pub(super) queue: &'c mut SendQueue,
    pub(super) operations: &'c mut OperationTable,
}

impl OperationPoster<'_> {
    /// Posts a piece of a bulk payload. `false`: the send queue is full.
    pub(super) fn post_piece(
        &mut self,
        operation: Operation,
        op: SendOp,
        piece: Sge<'_>,
    ) -> Result<bool, PostError> {
        match self.post(op, piece) {
            Ok(()) => self.operations.insert(operation),
            Err(PostError::Full) => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Posts an operation of the application. Returns the region if the operation is refused.
    #[allow(
        clippy::result_large_err,
        reason = "the region is returned, and it is large where there are several providers"
    )]
    pub(super) fn post_raw(
        &mut self,
        op: SendOp,
        range: Range<usize>,
        region: Mr,
        token: u64,
    ) -> Result<(), RawError> {
        if self.operations.raw >= RAW_DEPTH {
            return Err(RawError { cause: NotPosted::Full, region, token });
        }
        let posted = match region.sge(range) {
            Ok(piece) => self.post(op, piece).map_err(NotPosted::from),
            Err(error) => Err(NotPosted::Range(error)),
        };
        match posted {
            Ok(()) => self.operations.insert(Operation::Raw { token, region }),
            Err(cause) => return Err(RawError { cause, region, token }),
        }
        match op {
            SendOp::Read(_) => self.queue.account.counters.raw_reads.add(1),
            _ => self.queue.account.counters.raw_writes.add(1),
        }
        Ok(())
    }

    /// Posts a work request with the next key.
    fn post(&mut self, op: SendOp, piece: Sge<'_>) -> Result<(), PostError> {
        let key = self.operations.next_key();
        self.queue.post_signaled(SendKind::Operation(key), op, piece)
    }
}

/// A READ or WRITE of the application that has completed, see [`Connection::read`](super::Connection::read).
#[derive(Debug)]
#[non_exhaustive]
pub struct RawCompletion {
    /// The token that the application gave to the operation.
    pub token: u64,
    /// The connection that the operation was posted on.
    pub connection: ConnectionId,
    /// The region, which belongs to the application again.
    pub region: Mr,
    /// `Err`: the connection has ended. The operation may or may not have been carried out.
    pub result: Result<(), Failure>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_key_is_valid_once() {
        let mut operations = OperationTable::new();
        let keys: Vec<u32> = (0..3)
            .map(|number| {
                let key = operations.next_key();
                operations.insert(Operation::ReadPiece(number));
                key
            })
            .collect();
        assert_eq!(operations.len(), 3);
        assert!(matches!(operations.remove(keys[1]), Some(Operation::ReadPiece(1))));
        assert!(operations.remove(keys[1]).is_none(), "removed twice");
        let again = operations.next_key();
        operations.insert(Operation::WritePiece(4));
        assert!(operations.remove(keys[1]).is_none(), "of an earlier generation");
        assert!(operations.remove(0x3fff_ffff).is_none());
        assert!(matches!(operations.remove(again), Some(Operation::WritePiece(4))));
        assert_eq!(operations.into_operations().count(), 2);
    }
}
