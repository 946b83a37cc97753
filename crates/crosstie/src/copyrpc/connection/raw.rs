//! READ and WRITE operations of the application on a connection, and the end of all operations with the connection.

use std::ops::Range;

use super::{ConnectionCore, ConnectionState};
use crate::copyrpc::address::ConnectionId;
use crate::copyrpc::error::{Failure, NotPosted, RawError};
use crate::copyrpc::operation::{Operation, OperationPoster, RawCompletion};
use crate::copyrpc::wr_id::SendKind;
use crate::device::{Mr, SendOp};

impl<U> ConnectionCore<U> {
    /// Posts a READ or WRITE of the application.
    #[allow(
        clippy::result_large_err,
        reason = "the region is returned, and it is large where there are several providers"
    )]
    pub(in crate::copyrpc) fn post_raw(
        &self,
        op: SendOp,
        range: Range<usize>,
        region: Mr,
        token: u64,
    ) -> Result<(), RawError> {
        let mut state = self.state.borrow_mut();
        if let Some(failure) = state.failure {
            return Err(RawError { cause: failure.into(), region, token });
        }
        if state.connected.is_none() {
            return Err(RawError { cause: NotPosted::NotConnected, region, token });
        }
        state.bulk();
        let ConnectionState { queue, bulk: Some(bulk), .. } = &mut *state else {
            return Err(RawError { cause: NotPosted::NotConnected, region, token });
        };
        OperationPoster { queue, operations: &mut bulk.operations }.post_raw(op, range, region, token)
    }

    /// Takes the next operation of the application that has completed.
    pub(in crate::copyrpc) fn take_raw_completion(&self) -> Option<RawCompletion> {
        let mut state = self.state.borrow_mut();
        match &mut state.bulk {
            Some(bulk) => bulk.raw_completions.pop_front(),
            None => state.raw_completions.pop_front(),
        }
    }
}

impl<U> ConnectionState<U> {
    /// Applies the completion of an operation.
    pub(super) fn complete_operation(&mut self, connection: ConnectionId, key: u32) {
        let ConnectionState { bulk: Some(bulk), queue, .. } = self else { return };
        if bulk.complete_operation(connection, key) {
            queue.account.note_completed(SendKind::Operation(key));
        }
    }

    /// Ends all operations with the connection. The regions of the application's operations are returned.
    pub(super) fn end_operations(&mut self, connection: ConnectionId, cause: Failure) {
        let Some(mut bulk) = self.bulk.take() else { return };
        if bulk.operations.raw > 0 {
            // In the ERR state the device may still carry out what was posted; after a reset it does not. A queue pair that
            // cannot be reset belongs to a device that is gone.
            self.queue.qp.reset().ok();
        }
        let mut completions = std::mem::take(&mut bulk.raw_completions);
        for operation in bulk.operations.into_operations() {
            if let Operation::Raw { token, region } = operation {
                completions.push_back(RawCompletion { token, connection, region, result: Err(cause) });
            }
        }
        // The regions of the pools are dropped with `bulk`, which ends their registration.
        self.raw_completions = completions;
    }
}
