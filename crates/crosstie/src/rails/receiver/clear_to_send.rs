//! Telling the sender about requests.

use crosstie_protocol::rails::{CTS_LEN, leader};

use super::super::counters::RailCells;
use super::super::endpoint::{CLEAR_TO_SEND, Endpoint, retry};
use super::{Buffer, RecvCore};
use crate::device::{Data, PostError, Posted, SendOp, SendWr, Signal};

impl RecvCore {
    /// The rail for the clear-to-send of a slot: that of the slot, if messages arrive on it; so a rail that carries no bytes
    /// carries no clear-to-sends either.
    #[inline]
    fn clear_rail(&self, slot: usize) -> Option<usize> {
        let preferred = slot % self.agreed.rails;
        let recent = self.protocol.recent_mask() & self.up;
        if recent & (1 << preferred) != 0 {
            return Some(preferred);
        }
        leader(recent).or(leader(self.up))
    }

    /// Tells the sender about a request.
    pub(super) fn send_clear(&mut self, number: u64) {
        let slot = number as usize & (self.agreed.slots - 1);
        while let Some(rail) = self.clear_rail(slot) {
            let request = &self.requests[slot];
            let state = &mut self.rails[rail];
            let Some(endpoint) = state.endpoint.as_deref_mut() else { break };
            let cells = &self.counters.rails[rail];
            let buffers = &request.buffers[..request.count.into()];
            if let Ok(posted) = post_clear(endpoint, number, buffers, slot, self.agreed.max_group, cells) {
                if posted == Posted::Done {
                    // It has arrived, and so have all earlier ones.
                    state.confirm_clears();
                } else {
                    state.is_unconfirmed = true;
                }
                state.last_clear = number;
                self.requests[slot].clear_rail = rail as u8;
                cells.work_requests.add(1);
                return;
            }
            self.report_rail(rail);
        }
        self.has_unsent = true;
    }

    /// Sends the clear-to-sends again of all requests that the sender may not know.
    pub(super) fn resend_clears(&mut self) {
        self.has_unsent = false;
        let numbers: Vec<u64> = self.protocol.open_messages().collect();
        for number in numbers {
            if self.protocol.is_untouched(number) {
                self.send_clear(number);
            }
        }
    }
}

/// Writes the clear-to-sends of a request into the sender's memory.
///
/// Few of them are signaled. A completion shows how far the queue pair has come, and frees the places of those before it.
fn post_clear(
    endpoint: &mut Endpoint,
    number: u64,
    buffers: &[Buffer],
    slot: usize,
    max_group: usize,
    cells: &RailCells,
) -> Result<Posted, PostError> {
    let at = slot * max_group * CTS_LEN;
    let (first, from);
    let data = if let [buffer] = buffers {
        first = buffer.wanted.encode(number);
        Data::Inline(&first)
    } else {
        let outside = |_| PostError::Invalid("a slot is outside the table");
        for (index, buffer) in buffers.iter().enumerate() {
            let bytes = buffer.wanted.encode(number);
            endpoint.source.write(at + index * CTS_LEN, &bytes).map_err(outside)?;
        }
        from = [endpoint.source.sge(at..at + buffers.len() * CTS_LEN).map_err(outside)?];
        Data::Regions(&from)
    };
    let is_due = endpoint.signaling.is_due();
    let signal = if is_due { Signal::IfQueued } else { Signal::OnFailure };
    let op = SendOp::Write(endpoint.peer.at(at as u64));
    let wr = SendWr { signal, ..SendWr::new(CLEAR_TO_SEND, op, data) };
    let posted = retry(cells, || endpoint.qps[0].post(&wr))?;
    if posted == Posted::Queued {
        endpoint.signaling.count_post(is_due);
    }
    Ok(posted)
}
