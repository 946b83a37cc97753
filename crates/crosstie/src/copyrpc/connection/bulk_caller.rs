//! The caller's half of bulk payloads: calls whose request or response does not fit into a ring.
//!
//! The request is copied into a region that the callee READs. For a long response the call names a region that the callee
//! WRITEs to. Both regions stay in use until the response has arrived, even if the call has timed out, because the
//! callee may access them until then.

use std::time::Instant;

use crosstie_protocol::copyrpc::{
    BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkResponse, CallId, CallRefused, Content, Refusal, Violation,
    decode_bulk_response,
};

use super::{Arrival, BulkArrival, ConnectionCore, ConnectionState};
use crate::copyrpc::error::{CallError, Failure, NotCalled};
use crate::copyrpc::flush_policy::SendTiming;
use crate::copyrpc::region_pool::{NoRegion, PooledRegion};
use crate::device::Mr;

/// A call with a response buffer also reserves room for a response in the ring: one part in so many of the longest response
/// there. A response that turns out to be that short travels in the ring, in one WRITE with other messages. A larger
/// reservation would take credit that is rarely used.
const RING_RESPONSE_DIVISOR: usize = 32;

impl<U> ConnectionState<U> {
    /// Handles a call that the protocol refused: as a bulk call if it is too long for the ring, else as a refusal.
    #[inline(never)]
    pub(super) fn call_after_refusal(
        &mut self,
        refusal: Refusal,
        payload: &[u8],
        response_len: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<SendTiming, CallError<U>> {
        let called = match refusal {
            Refusal::TooLong { .. } | Refusal::ResponseTooLong { .. } => {
                self.call_bulk(payload, response_len, user, deadline)
            }
            refusal => Err(CallError { cause: refusal.into(), user }),
        };
        if called.is_err() {
            self.position_reads.note_refusal();
        }
        called.map(|()| SendTiming::WithNextPoll)
    }

    fn call_bulk(
        &mut self,
        payload: &[u8],
        response_len: usize,
        user: U,
        deadline: Option<Instant>,
    ) -> Result<(), CallError<U>> {
        let refused = |cause, user| Err(CallError { cause, user });
        let Some(connected) = &self.connected else { return refused(NotCalled::NotConnected, user) };
        let (max_request, max_response) =
            (connected.flow.max_request_len(), connected.flow.max_response_len());
        let limit = connected.max_bulk as usize;
        let needs_buffer = response_len > max_response;
        // A short request follows the descriptor in the ring.
        let room = if needs_buffer { max_request.saturating_sub(BULK_REQUEST_SIZE) } else { max_request };
        let needs_region = payload.len() > room;
        if needs_region && payload.len() > limit {
            return refused(Refusal::TooLong { len: payload.len(), max: room.max(limit) }.into(), user);
        }
        if needs_buffer && response_len > limit {
            let max = max_response.max(limit);
            return refused(Refusal::ResponseTooLong { len: response_len, max }.into(), user);
        }
        let pd = self.pd.clone();
        let (request, response) =
            (needs_region.then_some(payload.len()), needs_buffer.then_some(response_len));
        let regions = match self.bulk().take_call_regions(&pd, request, response) {
            Ok(regions) => regions,
            Err(NoRegion::InUse) => return refused(Refusal::NoBulkMemory.into(), user),
            Err(NoRegion::NoMemory) => return refused(NotCalled::NoMemory, user),
        };
        let Some(connected) = &mut self.connected else { return refused(NotCalled::NotConnected, user) };
        let in_ring: &[u8] = if needs_region { &[] } else { payload };
        let ring_response_len =
            if needs_buffer { max_response / RING_RESPONSE_DIVISOR } else { response_len };
        let len = BULK_REQUEST_SIZE + in_ring.len();
        let (call, placement) = match connected.flow.call(Content::Bulk, len, ring_response_len, user) {
            Ok(called) => called,
            Err(CallRefused { cause, user }) => {
                self.bulk().put_back_call_regions(regions);
                return refused(cause.into(), user);
            }
        };
        if let Some(region) = &regions.request {
            let copied = region.mr().write(0, payload);
            debug_assert!(copied.is_ok(), "regions are long enough");
        }
        connected.write_in_two_parts(&placement, &regions.descriptor(payload.len()).encode(), in_ring);
        self.deadlines.set(call.index(), call, deadline);
        self.queue.account.counters.bulk_calls.add(1);
        let bulk = self.bulk();
        bulk.bulk_calls += 1;
        bulk.call_regions[call.index()] = Some(regions);
        Ok(())
    }

    /// Accepts a response that is a bulk response, or that may belong to a bulk call.
    #[inline(never)]
    pub(super) fn accept_bulk_response(
        &mut self,
        ring: &Mr,
        call: CallId,
        user: Option<U>,
        offset: usize,
        len: usize,
        is_bulk: bool,
    ) -> Result<Arrival<U>, Failure> {
        let bulk = self.bulk();
        let mut regions = bulk.call_regions.get_mut(call.index()).and_then(Option::take);
        bulk.bulk_calls -= usize::from(regions.is_some());
        if !is_bulk {
            regions.into_iter().for_each(|regions| bulk.put_back_call_regions(regions));
            return Ok(Arrival::Response { user, offset, len });
        }
        let buffer = regions.as_mut().and_then(|regions| regions.response.take());
        let is_request_bulk = regions.as_ref().is_some_and(|regions| regions.request.is_some());
        regions.into_iter().for_each(|regions| bulk.put_back_call_regions(regions));
        let mut bytes = [0; BULK_RESPONSE_SIZE];
        let copied = ring.read(offset, &mut bytes[..len.min(BULK_RESPONSE_SIZE)]);
        debug_assert!(copied.is_ok(), "messages are inside the ring");
        let capacity = buffer.as_ref().map(|(_, capacity)| *capacity);
        match (decode_bulk_response(&bytes, len, capacity, is_request_bulk), buffer) {
            (Ok(BulkResponse::Written(len)), Some((region, _))) => {
                Ok(Arrival::Bulk(BulkArrival::Response { user, region, len: len as usize }))
            }
            (Ok(BulkResponse::NoMemory), buffer) => {
                let bulk = self.bulk();
                buffer.into_iter().for_each(|(region, _)| bulk.incoming_responses.put_back(region));
                Ok(Arrival::Bulk(BulkArrival::Refused { user }))
            }
            (decoded, _) => {
                // The protocol has removed the call from its table. `fail` reports it with those that are pending.
                debug_assert!(self.unreported_user.is_none(), "nothing is parsed after an invalid response");
                self.unreported_user = user;
                Err(Failure::Violation(decoded.err().unwrap_or(Violation::BulkNotRequested)))
            }
        }
    }
}

impl<U> ConnectionCore<U> {
    /// Takes back the region of a bulk response that the application has seen.
    pub(in crate::copyrpc) fn put_back_response(&self, region: PooledRegion) {
        if let Some(bulk) = &mut self.state.borrow_mut().bulk {
            bulk.incoming_responses.put_back(region);
        }
    }
}
