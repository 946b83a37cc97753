//! The short way of a receive with one buffer over the only rail: the code that such a receive needs, and nothing else. Everything
//! unusual is left to the long way.

use core::ops::Range;
use std::sync::Arc;

use super::super::memory::Memory;
use super::{RecvCore, RecvRequest};

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
        self.send_clear(number);
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
            return Tested::Other;
        }
        let state = &mut self.requests[slot];
        state.is_taken = true;
        Tested::Done(state.size)
    }
}
