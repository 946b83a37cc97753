//! What the parts of a connection use of the rest.

use super::super::cause::{Cause, Peer};
use super::super::counters::EndpointCounters;
use super::super::operation::{Op, Table};
use super::super::status::Status;

/// See the [module](self).
pub(in crate::endpoint) struct Shared<'e> {
    pub(super) table: &'e Table,
    pub(super) counters: &'e mut EndpointCounters,
    pub(super) status: &'e Status,
}

impl Shared<'_> {
    /// Gives an operation back to its future.
    #[inline]
    pub(super) fn give_back(&mut self, op: Op, code: u16) -> bool {
        self.counters.operations += 1;
        self.counters.held_operations -= 1;
        op.give_back(self.table, code)
    }

    /// Gives an operation back, unless it has ended before.
    #[inline]
    pub(super) fn give_back_if_live(&mut self, op: Op, code: u16) -> Result<(), Op> {
        op.give_back_if_live(self.table, code)?;
        self.counters.operations += 1;
        self.counters.held_operations -= 1;
        Ok(())
    }

    /// Gives an operation back of which nothing was posted. If it has ended before, it keeps its cause.
    #[cold]
    pub(super) fn give_back_unposted(&mut self, mut op: Op, peer: Option<Peer>, cause: Cause) {
        let known = Cause::decode(op.cause(self.table)).unwrap_or(cause);
        op.with_value(self.table, |operation| operation.fail_all_blocks(peer, known));
        self.give_back(op, cause.encode());
    }
}
