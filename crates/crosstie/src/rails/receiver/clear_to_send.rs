//! Telling the sender about requests.

use crosstie_protocol::rails::{CTS_LEN, ClearToSend, leader};

use super::super::endpoint::{CLEAR_TO_SEND, Endpoint, POST_RETRIES};
use super::RecvCore;
use crate::device::{Data, PostError, Posted, SendOp, SendWr, Signal};

impl RecvCore {
    /// The rail for the clear-to-send of a slot: that of the slot, if messages arrive on it; so a rail that carries no bytes
    /// carries no clear-to-sends either.
    #[inline]
    fn clear_rail(&self, slot: usize) -> Option<usize> {
        // A division takes long, and most connections have one rail.
        let preferred = if self.agreed.rails == 1 { 0 } else { slot % self.agreed.rails };
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
            let (single, count) = (request.single(), usize::from(request.count));
            let wanted = if count == 1 && self.agreed.rails == 1 {
                core::slice::from_ref(&single)
            } else {
                &self.buffers[slot].wanted[..count]
            };
            let posted = post_clear(endpoint, number, wanted, slot, self.agreed.max_group);
            if let Ok((posted, retries)) = posted {
                if posted == Posted::Done {
                    // It has arrived, and so have all earlier ones.
                    state.confirm_clears();
                } else {
                    state.is_unconfirmed = true;
                }
                state.last_clear = number;
                self.requests[slot].clear_rail = rail as u8;
                let cells = &self.counters.rails[rail];
                cells.work_requests.add(1);
                if retries > 0 {
                    cells.retries.add(retries);
                }
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

/// Writes the clear-to-sends of a request into the sender's memory. Returns how often the queue was full.
///
/// Few of them are signaled. A completion shows how far the queue pair has come, and frees the places of those before it.
fn post_clear(
    endpoint: &mut Endpoint,
    number: u64,
    wanted: &[ClearToSend],
    slot: usize,
    max_group: usize,
) -> Result<(Posted, u64), PostError> {
    let at = slot * max_group * CTS_LEN;
    let op = SendOp::Write(endpoint.peer.at(at as u64));
    let mut first = [0; CTS_LEN];
    for (index, one) in wanted.iter().enumerate() {
        let bytes = one.encode(number);
        if wanted.len() == 1 {
            first = bytes;
        } else {
            endpoint
                .source
                .write(at + index * CTS_LEN, &bytes)
                .map_err(|_| PostError::Invalid("a slot is outside the table"))?;
        }
    }
    let len = wanted.len() * CTS_LEN;
    let mut retries = 0;
    let is_due = endpoint.signaling.is_due();
    let signal = if is_due { Signal::IfQueued } else { Signal::OnFailure };
    loop {
        let request_of = |data| SendWr { signal, ..SendWr::new(CLEAR_TO_SEND, op, data) };
        let posted = if wanted.len() == 1 {
            endpoint.qps[0].post(&request_of(Data::Inline(&first)))
        } else {
            let source = endpoint.source.sge(at..at + len);
            let source = source.map_err(|_| PostError::Invalid("a slot is outside the table"))?;
            endpoint.qps[0].post(&request_of(Data::Regions(&[source])))
        };
        match posted {
            Ok(posted) => {
                if posted == Posted::Queued {
                    endpoint.signaling.count_post(is_due);
                }
                return Ok((posted, retries));
            }
            Err(PostError::Full) if retries < POST_RETRIES => retries += 1,
            Err(error) => return Err(error),
        }
    }
}
