//! The short way of a receive with one buffer over the only rail: the code that such a receive needs, and nothing else. Everything
//! unusual is left to the long way.

use core::ops::Range;
use std::sync::Arc;

use super::super::memory::Memory;
use super::{RecvCore, RecvRequest};
use crate::device::{Completion, Opcode};

/// What became of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tested {
    /// It had one buffer and is done: so many bytes have arrived. The request is over.
    Done(usize),
    /// It is not done.
    Pending,
    /// Use [`RecvConnection::test`](crate::rails::RecvConnection::test).
    Other,
}

impl RecvCore {
    /// As [`irecv`](RecvCore::irecv) for one buffer, if it can be told to the sender at once. `None` if it is not the way of this receive:
    /// then nothing has happened.
    #[inline(always)]
    pub(in crate::rails) fn try_irecv_single(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        tag: u32,
    ) -> Option<RecvRequest> {
        // A connection that has ended has no rails.
        if self.mailbox.has_mail() || self.up == 0 || self.agreed.rails != 1 {
            return None;
        }
        let slot = self.protocol.next_message() as usize & (self.agreed.slots - 1);
        let request = self.requests.get_mut(slot)?;
        let endpoint = self.rails[0].endpoint.as_deref()?;
        let (sge, rkey) = memory.first_sge(range).ok()?;
        let room = u64::from(sge.len);
        // Enough receives are posted for one more message: the long way posts them.
        let low = self.low_water.max(self.protocol.outstanding() as u32 + 17);
        if !request.is_taken
            || memory.context != self.context_id
            || room > self.max_message
            || endpoint.posted < low
        {
            return None;
        }
        if !matches!(&self.held, Some(held) if Arc::ptr_eq(held, &memory.regions)) {
            if self.held_by > 0 {
                return None;
            }
            self.held = Some(memory.regions.clone());
        }
        let number = self.protocol.post(room)?;
        self.held_by += 1;
        request.message = number;
        (request.addr, request.rkey, request.room, request.tag) = (sge.addr, rkey, room, tag);
        (request.count, request.mask, request.clear_rail, request.size) = (1, 0, 0, 0);
        (request.is_taken, request.is_done, request.has_record) = (false, false, false);
        request.uses_held = true;
        if !self.write_clear(number, slot) {
            self.send_clear(number);
        }
        Some(RecvRequest(number))
    }

    /// Lets go of memory that is held for receives to come.
    pub(in crate::rails) fn release_memory(&mut self) {
        if self.held_by == 0 {
            self.held = None;
        }
    }

    /// As [`test`](RecvCore::test), for a receive with one buffer.
    #[inline(always)]
    pub(in crate::rails) fn try_test_single(&mut self, request: RecvRequest) -> Tested {
        let slot = request.0 as usize & (self.agreed.slots - 1);
        let Some(state) = self.requests.get(slot) else { return Tested::Other };
        if state.message != request.0 || state.is_taken || state.count != 1 {
            return Tested::Other;
        }
        if !state.is_done {
            if self.mailbox.has_mail()
                || self.agreed.rails != 1
                || !self.fences.is_empty()
                || self.peer_closed.is_some()
                || self.clock.is_due()
                || !self.poll_single()
            {
                return Tested::Other;
            }
            if !self.requests[slot].is_done {
                return Tested::Pending;
            }
        }
        let state = &mut self.requests[slot];
        state.is_taken = true;
        Tested::Done(state.size)
    }

    /// Polls one completion of the only rail. False if that is not the way to do it, or if the rail failed.
    #[inline(always)]
    fn poll_single(&mut self) -> bool {
        let RecvCore { protocol, requests, counters, rails, held_by, .. } = self;
        let rail = &mut rails[0];
        let Some(endpoint) = rail.endpoint.as_deref_mut() else { return false };
        let mut other = None;
        let polled = endpoint.cq.poll_only_receives(|completion: &Completion| {
            let arrived = completion.imm.filter(|_| completion.status.is_success());
            let arrived = arrived.filter(|_| completion.opcode == Opcode::RecvWriteImm);
            let slot = arrived.and_then(|imm| {
                // A group has more than its record.
                let slot = usize::from(imm as u8);
                requests.get(slot).filter(|request| request.count == 1)?;
                protocol.arrive_single(imm, completion.byte_len).map(|_| slot)
            });
            let Some(slot) = slot else {
                other = Some(*completion);
                return;
            };
            let request = &mut requests[slot];
            // The sender had the clear-to-send, and all earlier ones.
            if rail.is_unconfirmed && rail.last_clear == request.message {
                (rail.is_unconfirmed, rail.unconfirmed_since, rail.probed_at) = (false, None, None);
            }
            (request.mask, request.size, request.is_done) = (1, completion.byte_len as usize, true);
            if request.uses_held {
                request.uses_held = false;
                *held_by -= 1;
            } else {
                drop(request.memory.take());
            }
            let cells = &counters.rails[0];
            cells.bytes.add(completion.byte_len.into());
            cells.direct.add(1);
        });
        match (polled, other) {
            (None, _) => false,
            (_, Some(completion)) => self.handle_one(&completion),
            (Some(count), None) => {
                endpoint.posted = endpoint.posted.saturating_sub(count as u32);
                true
            }
        }
    }
}
