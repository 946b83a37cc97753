//! `imm_recv`: immediates go to the calls that wait for them. No slot and no work request belongs to a call.

use crosstie_protocol::endpoint::imm_matching::ImmEvent;
use crosstie_protocol::endpoint::message::{Control, Violation};

use super::super::cause::{Cause, SUCCESS};
use super::super::operation::Op;
use super::link::Link;
use super::shared::Shared;
use crate::device::PostError;

/// Hands an immediate to a call. Returns false if the call has ended.
fn give(shared: &mut Shared<'_>, op: Option<Op>, event: ImmEvent) -> bool {
    let Some(mut op) = op else { return false };
    op.with_value(shared.table, |operation| {
        (operation.imm, operation.bytes) = (Some(event.imm), event.bytes.into());
    });
    shared.give_back(op, SUCCESS)
}

impl Link {
    pub(super) fn start_imm_recv(&mut self, shared: &mut Shared<'_>, op: Op) {
        if let Some(event) = self.returned_events.front() {
            if give(shared, Some(op), *event) {
                self.returned_events.pop_front();
            }
            return;
        }
        if self.immediates.call(Some(op), |op, event| give(shared, op, event)) {
            self.imm_receiver.take();
            self.send_imm_credit(shared);
        }
    }

    /// A WRITE+IMM of the peer's program has arrived.
    #[inline]
    pub(super) fn accept_imm(
        &mut self,
        shared: &mut Shared<'_>,
        imm: u32,
        bytes: u32,
    ) -> Result<(), Violation> {
        self.imm_receiver.arrive()?;
        if self.immediates.arrive(ImmEvent { imm, bytes }, |op, event| give(shared, op, event)) {
            self.imm_receiver.take();
            self.send_imm_credit(shared);
        }
        Ok(())
    }

    /// An immediate that was given to a call whose future was dropped before anybody looked. Its credit was given already.
    pub(super) fn put_back_event(&mut self, shared: &mut Shared<'_>, event: ImmEvent) {
        while let Some(op) = self.immediates.take_call() {
            if give(shared, op, event) {
                return;
            }
        }
        self.returned_events.push_back(event);
    }

    /// Gives the peer credit for immediates, if it is due.
    #[inline]
    pub(super) fn send_imm_credit(&mut self, shared: &mut Shared<'_>) {
        let Some(granted) = self.imm_receiver.credit_due() else { return };
        if !self.is_connected() || !self.has_control_room() {
            return;
        }
        match self.post_control(&Control::ImmCredit(granted)) {
            Ok(()) => {
                shared.counters.work_requests += 1;
                self.imm_receiver.note_credit(granted);
            }
            // Tried again with the next poll.
            Err(PostError::Full) => shared.counters.refused_posts += 1,
            Err(_) => {
                shared.counters.refused_posts += 1;
                self.end(shared, Cause::NotAccepted(0));
            }
        }
    }
}
