//! The state of a connection's bulk payloads: payloads that do not fit into a ring.
//!
//! ```text
//!   caller                                                     callee
//!   request, copied into a region ─────── READ in pieces ────> region, handed out as a request
//!   response region <─── WRITE in pieces, then a message ───── response, copied into a region
//! ```
//!
//! The messages that announce bulk payloads travel in the rings, and follow all rules there: credit, order, deadlines.
//! `connection/bulk_caller.rs` and `connection/bulk_callee.rs` implement the two sides. Promises:
//! - A connection has four pools, each of the configured size: for outgoing requests, incoming responses, incoming requests
//!   and outgoing responses. They are separate so that none waits for another: two sides that call each other with as
//!   much as they can still accept each other's requests and responses.
//! - Requests are handed out in the order in which they were made. A request whose pieces are under way, or that waits for
//!   memory of its pool, delays all requests behind it on the same connection, short ones too. A request for which the device has no
//!   memory is refused at once ([`CallFailed::NoMemory`](super::CallFailed)) and delays nobody; the connection goes on.
//! - Memory that the peer or the device may still access is not used again. The regions of a call stay in use until its
//!   response has arrived, even if the call has timed out.

use std::collections::VecDeque;

use crosstie_protocol::copyrpc::wire::ConnectInfo;
use crosstie_protocol::copyrpc::{
    BULK_REQUEST_SIZE, BulkMemory, BulkRequest, Flow, MAX_BULK, ReplyToken, RetainedSpace,
};

use super::address::ConnectionId;
use super::config::ConnectionConfig;
use super::operation::{Operation, OperationTable, RawCompletion};
use super::region_pool::{NoRegion, PooledRegion, RegionPool};
use crate::device::{Access, Pd};

/// Bytes of one READ or WRITE.
pub(super) const PIECE: usize = 1 << 18;
/// The most READs of pieces that one connection has under way, and the most WRITEs.
pub(super) const MAX_PIECES: u32 = 8;

/// The longest bulk payload that a side with this configuration accepts.
pub(super) fn bulk_limit(config: &ConnectionConfig) -> u32 {
    config.bulk.min(MAX_BULK as usize) as u32
}

/// The longest bulk payload of a connection. Zero if a descriptor does not fit into the ring.
pub(super) fn agreed_bulk_limit<U>(config: &ConnectionConfig, peer: &ConnectInfo, flow: &Flow<U>) -> u32 {
    let fits = flow.max_request_len() >= BULK_REQUEST_SIZE;
    if fits { u64::from(bulk_limit(config)).min(peer.bulk_limit) as u32 } else { 0 }
}

/// The bulk payloads and other operations that a connection has under way. Created when first used.
pub(super) struct BulkState {
    pub(super) outgoing_requests: RegionPool,
    pub(super) incoming_responses: RegionPool,
    pub(super) incoming_requests: RegionPool,
    pub(super) outgoing_responses: RegionPool,
    /// The regions of pending bulk calls, by call index, and how many calls have some.
    pub(super) call_regions: Box<[Option<CallRegions>]>,
    pub(super) bulk_calls: usize,
    /// Requests in order, from a bulk request on. The first has number `first_queued`.
    pub(super) queued_requests: VecDeque<QueuedRequest>,
    pub(super) first_queued: u64,
    pub(super) reads: u32,
    /// Bulk responses in order. The first has number `first_response`.
    pub(super) responses: VecDeque<OutgoingResponse>,
    pub(super) first_response: u64,
    pub(super) writes: u32,
    pub(super) operations: OperationTable,
    /// Operations of the application that have completed, for the context.
    pub(super) raw_completions: VecDeque<RawCompletion>,
}

/// Regions that the peer may access until it has replied.
pub(super) struct CallRegions {
    pub(super) request: Option<PooledRegion>,
    /// The response buffer and its length in the descriptor.
    pub(super) response: Option<(PooledRegion, u32)>,
}

/// A request that the application does not have yet: a bulk request, or one behind a bulk request.
pub(super) struct QueuedRequest {
    /// Present until the request was refused.
    pub(super) reply_token: Option<ReplyToken>,
    pub(super) response_buffer: Option<BulkMemory>,
    pub(super) payload: QueuedPayload,
}

pub(super) enum QueuedPayload {
    /// Complete, in the receive ring.
    Ring { offset: usize, len: usize, space: RetainedSpace },
    /// In the caller's memory; `posted` bytes are being READ, `read` bytes are there.
    Bulk { from: BulkMemory, region: Option<PooledRegion>, posted: usize, read: usize },
}

/// A bulk response on its way to the peer.
pub(super) struct OutgoingResponse {
    pub(super) to: BulkMemory,
    pub(super) region: PooledRegion,
    pub(super) len: usize,
    pub(super) posted: usize,
    pub(super) written: usize,
    /// Present until the message that announces the response was placed.
    pub(super) reply_token: Option<ReplyToken>,
}

/// A queued request whose payload is complete.
pub(super) struct ReadyRequest {
    pub(super) offset: usize,
    pub(super) len: usize,
    pub(super) space: Option<RetainedSpace>,
    pub(super) region: Option<PooledRegion>,
    pub(super) response_buffer: Option<BulkMemory>,
    pub(super) reply_token: ReplyToken,
}

impl BulkState {
    pub(super) fn new(config: &ConnectionConfig) -> BulkState {
        let bytes = bulk_limit(config) as usize;
        BulkState {
            outgoing_requests: RegionPool::new(Access::REMOTE_READ, bytes),
            incoming_responses: RegionPool::new(Access::LOCAL_WRITE | Access::REMOTE_WRITE, bytes),
            incoming_requests: RegionPool::new(Access::LOCAL_WRITE, bytes),
            outgoing_responses: RegionPool::new(Access::empty(), bytes),
            call_regions: (0..config.pending_calls).map(|_| None).collect(),
            bulk_calls: 0,
            queued_requests: VecDeque::new(),
            first_queued: 0,
            reads: 0,
            responses: VecDeque::new(),
            first_response: 0,
            writes: 0,
            operations: OperationTable::new(),
            raw_completions: VecDeque::new(),
        }
    }

    /// Whether a short request has to wait behind an earlier one.
    #[inline]
    pub(super) fn has_queued_requests(&self) -> bool {
        !self.queued_requests.is_empty()
    }

    /// Whether a response may belong to a bulk call.
    #[inline]
    pub(super) fn has_bulk_calls(&self) -> bool {
        self.bulk_calls > 0
    }

    pub(super) fn has_operations(&self) -> bool {
        self.operations.len() > 0
    }

    /// Takes the regions for a call: all of them, or none.
    pub(super) fn take_call_regions(
        &mut self,
        pd: &Pd,
        request: Option<usize>,
        response: Option<usize>,
    ) -> Result<CallRegions, NoRegion> {
        let request = request.map(|len| self.outgoing_requests.take(pd, len)).transpose()?;
        let taken = response.map(|len| Ok((self.incoming_responses.take(pd, len)?, len as u32))).transpose();
        match taken {
            Ok(response) => Ok(CallRegions { request, response }),
            Err(cause) => {
                request.into_iter().for_each(|region| self.outgoing_requests.put_back(region));
                Err(cause)
            }
        }
    }

    pub(super) fn put_back_call_regions(&mut self, regions: CallRegions) {
        regions.request.into_iter().for_each(|region| self.outgoing_requests.put_back(region));
        regions.response.into_iter().for_each(|(region, _)| self.incoming_responses.put_back(region));
    }

    /// Takes the next queued request, if its payload is complete.
    pub(super) fn take_ready_request(&mut self) -> Option<ReadyRequest> {
        while self.queued_requests.front().is_some_and(|request| request.reply_token.is_none()) {
            self.queued_requests.pop_front();
            self.first_queued += 1;
        }
        let is_complete = |request: &QueuedRequest| match &request.payload {
            QueuedPayload::Ring { .. } => true,
            QueuedPayload::Bulk { from, read, .. } => *read == from.len as usize,
        };
        if !self.queued_requests.front().is_some_and(is_complete) {
            return None;
        }
        let QueuedRequest { reply_token, response_buffer, payload } = self.queued_requests.pop_front()?;
        self.first_queued += 1;
        let reply_token = reply_token?;
        Some(match payload {
            QueuedPayload::Ring { offset, len, space } => {
                ReadyRequest { offset, len, space: Some(space), region: None, response_buffer, reply_token }
            }
            QueuedPayload::Bulk { from, region, .. } => ReadyRequest {
                offset: 0,
                len: from.len as usize,
                space: None,
                region,
                response_buffer,
                reply_token,
            },
        })
    }

    /// Completes an operation of the connection. Returns `false` for an unknown key: that completion arrived twice.
    pub(super) fn complete_operation(&mut self, connection: ConnectionId, key: u32) -> bool {
        let Some(operation) = self.operations.remove(key) else { return false };
        match operation {
            Operation::ReadPiece(number) => {
                self.reads -= 1;
                let request = self.queued_requests.get_mut((number - self.first_queued) as usize);
                if let Some(QueuedRequest { payload: QueuedPayload::Bulk { from, read, .. }, .. }) = request {
                    *read += PIECE.min(from.len as usize - *read);
                }
            }
            Operation::WritePiece(number) => {
                self.writes -= 1;
                let response = self.responses.get_mut((number - self.first_response) as usize);
                if let Some(response) = response {
                    response.written += PIECE.min(response.len - response.written);
                }
                while self.responses.front().is_some_and(|response| response.written == response.len) {
                    self.first_response += 1;
                    let done = self.responses.pop_front();
                    done.into_iter().for_each(|done| self.outgoing_responses.put_back(done.region));
                }
            }
            Operation::Raw { token, region } => {
                self.raw_completions.push_back(RawCompletion { token, connection, region, result: Ok(()) });
            }
        }
        true
    }
}

impl CallRegions {
    /// The descriptor of these regions, for a request of `request_len` bytes.
    pub(super) fn descriptor(&self, request_len: usize) -> BulkRequest {
        let memory = |region: &PooledRegion, len: u32| {
            let remote = region.mr().remote();
            BulkMemory { addr: remote.addr, len, rkey: remote.rkey }
        };
        BulkRequest {
            request: self.request.as_ref().map(|region| memory(region, request_len as u32)),
            response_buffer: self.response.as_ref().map(|(region, len)| memory(region, *len)),
        }
    }
}
