//! What a leased slot is for.

use crosstie_protocol::endpoint::send_queue::WorkRequest;

use super::super::cause::{Cause, Peer};
use super::super::operation::Op;
use super::posting::Plan;
use super::shared::Shared;

/// See the [module](self).
pub(super) struct SlotWork {
    pub(super) op: Op,
    pub(super) plan: Plan,
    /// Whether all work requests are posted, or the rest will not be.
    pub(super) is_posted: bool,
    /// The first failure.
    pub(super) cause: Option<Cause>,
    /// Why not all was posted.
    pub(super) rest: Option<Cause>,
}

impl SlotWork {
    pub(super) fn new(op: Op, plan: Plan) -> SlotWork {
        SlotWork { op, plan, is_posted: false, cause: None, rest: None }
    }

    /// Posts no more, and fails with this cause if not all was posted.
    pub(super) fn stop(&mut self, cause: Cause) {
        if !self.is_posted {
            self.is_posted = true;
            self.cause.get_or_insert(cause);
            self.rest = Some(cause);
        }
    }

    /// Notes that one of its requests has failed.
    #[cold]
    pub(super) fn fail(
        &mut self,
        shared: &mut Shared<'_>,
        posted: &WorkRequest,
        peer: Option<Peer>,
        cause: Cause,
    ) {
        // The first cause that says more than that something else failed first.
        if self.cause.is_none_or(|known| known == Cause::Flushed) {
            self.cause = Some(cause);
        }
        self.op
            .with_value(shared.table, |operation| operation.fail_blocks(posted.block_range(), peer, cause));
    }
}
