//! The callee's half of bulk payloads: READs long requests from the caller, and WRITEs long responses to it.
//!
//! From a bulk request on, requests are queued until the payloads before them are complete, so that the application gets
//! them in order. A long response goes out in pieces; the message that announces it is placed after all its pieces are in the
//! send queue, so it arrives after them.

use crosstie_protocol::copyrpc::{
    BULK_NO_MEMORY, BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkMemory, BulkRequest, Content, ReplyToken,
    Violation,
};

use super::{ConnectedState, ConnectionCore, ConnectionState};
use crate::copyrpc::bulk_state::{
    BulkState, MAX_PIECES, OutgoingResponse, PIECE, QueuedPayload, QueuedRequest, ReadyRequest, bulk_limit,
};
use crate::copyrpc::error::{Failure, NoReply, NotReplied};
use crate::copyrpc::operation::{Operation, OperationPoster};
use crate::copyrpc::region_pool::{NoRegion, PooledRegion};
use crate::device::{Mr, OutOfRegion, PostError, RemoteAddr, SendOp};

fn outside_region(_: OutOfRegion) -> Failure {
    Failure::Refused(PostError::Invalid("a piece outside of its region"))
}

impl<U> ConnectionState<U> {
    /// Queues a request that is a bulk request, or that is behind one.
    #[inline(never)]
    pub(super) fn queue_request(
        &mut self,
        ring: &Mr,
        offset: usize,
        len: usize,
        is_bulk: bool,
        reply_token: ReplyToken,
    ) -> Result<(), Failure> {
        let mut retain = || {
            let space = self.connected.as_mut().and_then(|connected| connected.flow.retain());
            space.ok_or(Failure::Closed)
        };
        let limit = bulk_limit(&self.config);
        let request = if is_bulk {
            let mut bytes = [0; BULK_REQUEST_SIZE];
            if len < bytes.len() || ring.read(offset, &mut bytes).is_err() {
                return Err(Failure::Violation(Violation::BulkMalformed));
            }
            let descriptor = BulkRequest::decode(&bytes, len, limit).map_err(Failure::Violation)?;
            let payload = match descriptor.request {
                Some(from) => QueuedPayload::Bulk { from, region: None, posted: 0, read: 0 },
                None => QueuedPayload::Ring {
                    offset: offset + BULK_REQUEST_SIZE,
                    len: len - BULK_REQUEST_SIZE,
                    space: retain()?,
                },
            };
            QueuedRequest {
                reply_token: Some(reply_token),
                response_buffer: descriptor.response_buffer,
                payload,
            }
        } else {
            let payload = QueuedPayload::Ring { offset, len, space: retain()? };
            QueuedRequest { reply_token: Some(reply_token), response_buffer: None, payload }
        };
        self.bulk().queued_requests.push_back(request);
        Ok(())
    }
}

impl<U> ConnectedState<U> {
    /// Places the message that announces a bulk response of so many bytes, or refuses a bulk request.
    fn announce_response(&mut self, token: ReplyToken, len: u32) -> Result<(), Failure> {
        match self.flow.reply(Content::Bulk, token, BULK_RESPONSE_SIZE) {
            Ok(placement) => {
                self.write_in_two_parts(&placement, &len.to_le_bytes(), &[]);
                Ok(())
            }
            Err(_) => Err(Failure::Closed),
        }
    }
}

impl<U> ConnectionCore<U> {
    /// Starts a response that is too long for the ring.
    #[inline(never)]
    pub(in crate::copyrpc) fn reply_bulk(
        &self,
        token: ReplyToken,
        to: BulkMemory,
        payload: &[u8],
    ) -> Result<(), NoReply> {
        let mut state = self.state.borrow_mut();
        if let Some(failure) = state.failure {
            return Err(NoReply::ended(failure));
        }
        if payload.len() > to.len as usize {
            let max = u64::from(to.len).max(token.max_len());
            return Err(NoReply {
                cause: NotReplied::TooLong { len: payload.len(), max },
                token: Some(token),
            });
        }
        let pd = state.pd.clone();
        let bulk = state.bulk();
        let region = match bulk.outgoing_responses.take(&pd, payload.len()) {
            Ok(region) => region,
            Err(NoRegion::InUse) => {
                return Err(NoReply { cause: NotReplied::NoBulkMemory, token: Some(token) });
            }
            Err(NoRegion::NoMemory) => {
                return Err(NoReply { cause: NotReplied::NoMemory, token: Some(token) });
            }
        };
        let copied = region.mr().write(0, payload);
        debug_assert!(copied.is_ok(), "regions are long enough");
        bulk.responses.push_back(OutgoingResponse {
            to,
            region,
            len: payload.len(),
            posted: 0,
            written: 0,
            reply_token: Some(token),
        });
        Ok(())
    }

    /// Posts as many pieces of bulk payloads as the limits allow. Returns whether any operation is under way or waits for room
    /// in the send queue.
    #[inline(never)]
    pub(super) fn post_pieces(&self) -> Result<bool, Failure> {
        let mut state = self.state.borrow_mut();
        let ConnectionState { queue, bulk, connected, pd, failure, .. } = &mut *state;
        let (Some(bulk), Some(connected), None) = (bulk, connected, failure) else { return Ok(false) };
        let (first_response, first_queued) = (bulk.first_response, bulk.first_queued);
        let BulkState { operations, responses, queued_requests, incoming_requests, reads, writes, .. } =
            &mut **bulk;
        let mut poster = OperationPoster { queue, operations };
        let mut waits = false;
        'responses: for (number, response) in (first_response..).zip(responses.iter_mut()) {
            while response.posted < response.len {
                let len = PIECE.min(response.len - response.posted);
                let range = response.posted..response.posted + len;
                let piece = response.region.mr().sge(range).map_err(outside_region)?;
                let addr = response.to.addr + response.posted as u64;
                let op = SendOp::Write(RemoteAddr { addr, rkey: response.to.rkey });
                let posted = *writes < MAX_PIECES
                    && poster
                        .post_piece(Operation::WritePiece(number), op, piece)
                        .map_err(Failure::Refused)?;
                if !posted {
                    waits = true;
                    break 'responses;
                }
                *writes += 1;
                response.posted += len;
                poster.queue.account.counters.bulk_writes.add(1);
                poster.queue.account.counters.bulk_bytes.add(len);
            }
            // All pieces are in the send queue, so the message that announces them arrives after them.
            if let Some(token) = response.reply_token.take() {
                connected.announce_response(token, response.len as u32)?;
            }
        }
        'requests: for (number, request) in (first_queued..).zip(queued_requests.iter_mut()) {
            let QueuedPayload::Bulk { from, region, posted, .. } = &mut request.payload else { continue };
            if request.reply_token.is_none() {
                continue;
            }
            if region.is_none() {
                match incoming_requests.take(pd, from.len as usize) {
                    Ok(taken) => *region = Some(taken),
                    // A request that the application still has will return its region.
                    Err(NoRegion::InUse) => break,
                    // Nothing of this connection will make room: the caller tries again later, and nobody waits for it.
                    Err(NoRegion::NoMemory) => {
                        if let Some(token) = request.reply_token.take() {
                            connected.announce_response(token, BULK_NO_MEMORY)?;
                            poster.queue.account.counters.bulk_refused.add(1);
                            self.has_refused_request.set(true);
                        }
                        continue;
                    }
                }
            }
            let Some(region) = region else { break };
            while *posted < from.len as usize {
                let len = PIECE.min(from.len as usize - *posted);
                let piece = region.mr().sge(*posted..*posted + len).map_err(outside_region)?;
                let op = SendOp::Read(RemoteAddr { addr: from.addr + *posted as u64, rkey: from.rkey });
                let accepted = *reads < MAX_PIECES
                    && poster
                        .post_piece(Operation::ReadPiece(number), op, piece)
                        .map_err(Failure::Refused)?;
                if !accepted {
                    waits = true;
                    break 'requests;
                }
                *reads += 1;
                *posted += len;
                poster.queue.account.counters.bulk_reads.add(1);
                poster.queue.account.counters.bulk_bytes.add(len);
            }
        }
        Ok(waits || bulk.operations.len() > 0)
    }

    /// Takes the next queued request, if its payload is complete.
    pub(in crate::copyrpc) fn take_ready_request(&self) -> Option<ReadyRequest> {
        self.state.borrow_mut().bulk.as_mut()?.take_ready_request()
    }

    /// Takes back the region of a request that the application no longer needs.
    pub(in crate::copyrpc) fn put_back_request(&self, region: PooledRegion) {
        if let Some(bulk) = &mut self.state.borrow_mut().bulk {
            bulk.incoming_requests.put_back(region);
        }
    }
}
