//! One daemon's service for byte strings and for requests about the node.
//!
//! These requests are rarer and longer than those for 8-byte keys, so they have lanes of their own. A client sends a request
//! to the daemon that owns the key, or, for a key of another node, to the daemon that is connected with it.
//!
//! This file holds the lanes; `serve_bytes` decides what happens with each request.

use crosstie::copyrpc::Payload;
use crosstie::ipc;
use zerocopy::IntoBytes;

use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{BytesOp, BytesRequest, BytesResponse, MAX_RESPONSE, NodeInfo, RESPONSE_HEADER, Status};

/// The most byte-string requests that a client may have in flight at one daemon. Each has a slot of 2 MiB, and one more slot is
/// always free: a lane is 34 MiB of address space. Pages become memory when they are first written, and stay until the client
/// leaves. A client that makes one request at a time writes to two slots. One that has several in flight writes to all: 68 KiB
/// with small values, 17 MiB with values of 1 MiB.
pub const MAX_BYTES_DEPTH: usize = 16;
/// Bytes of clients' requests and responses after which a daemon serves 8-byte requests again. One message may exceed it.
const BYTES_PER_TURN: usize = 64 << 10;
/// Turns without a request after which the daemon checks less often. A client that makes one request at a time has sent the
/// next one by then.
const BUSY_TURNS: u32 = 64;

/// One daemon's service for byte strings.
pub(super) struct BytesServer {
    pub(super) server: ipc::Server<[u8], [u8]>,
    /// The description of the node, as the last client received it.
    pub(super) info: NodeInfo,
    /// A buffer for responses. It only grows.
    scratch: Vec<u8>,
    pub(super) undelivered: u64,
    /// The last turn may have left clients' requests in the lanes.
    pub(super) has_more: bool,
    /// Bytes that may still be received and sent in this turn.
    pub(super) turn_bytes_left: usize,
    /// Turns without a request since the last one with a request.
    pub(super) idle_turns: u32,
}

/// The most byte-string requests in flight, of a client with this queue depth, at one daemon.
pub(super) fn depth(queue_depth: usize) -> usize {
    queue_depth.min(MAX_BYTES_DEPTH)
}

impl BytesServer {
    pub(super) fn new(server: ipc::Server<[u8], [u8]>, mut info: NodeInfo) -> BytesServer {
        info.attach_count = info.attach_count.wrapping_sub(1);
        BytesServer {
            server,
            info,
            scratch: Vec::new(),
            undelivered: 0,
            has_more: false,
            turn_bytes_left: 0,
            idle_turns: BUSY_TURNS,
        }
    }

    /// Begins a turn. Returns whether clients have sent requests.
    #[inline]
    pub(super) fn begin_turn(&mut self) -> bool {
        self.has_more = self.has_more || self.server.poll() > 0;
        self.turn_bytes_left = BYTES_PER_TURN;
        self.has_more
    }

    /// Whether there were requests recently, so that the next turn should come soon.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.idle_turns < BUSY_TURNS
    }

    /// Executes an operation on this daemon's shard. Returns the encoded response, which has at most `limit` bytes.
    pub(super) fn execute(&mut self, shard: &mut Shard, op: &BytesOp<'_>, limit: usize) -> &[u8] {
        let response = execute(shard, &mut self.info, op);
        let len = response.encoded_len();
        match response.encode_header() {
            Ok(header) if len <= limit => {
                let encoded = grow(&mut self.scratch, len);
                let (front, value) = encoded.split_at_mut(header.len());
                front.copy_from_slice(&header);
                value.copy_from_slice(response.value);
                encoded
            }
            _ => {
                let response = status_response(Status::Malformed);
                let encoded = grow(&mut self.scratch, response.len());
                encoded.copy_from_slice(&response);
                encoded
            }
        }
    }

    /// Sends a client a response without a value.
    pub(super) fn reply_status(&mut self, ticket: ipc::Ticket, status: Status) {
        self.undelivered += u64::from(self.server.reply(ticket, &status_response(status)).is_err());
    }

    /// Sends a client the response of another node.
    pub(super) fn reply_payload(&mut self, ticket: ipc::Ticket, payload: Payload<'_>) {
        if payload.is_empty() {
            // An empty response means that the other node dropped the request.
            return self.reply_status(ticket, Status::NodeGone);
        }
        let response = grow(&mut self.scratch, payload.len().min(MAX_RESPONSE));
        payload.copy_to(response);
        self.turn_bytes_left = self.turn_bytes_left.saturating_sub(response.len());
        self.undelivered += u64::from(self.server.reply(ticket, response).is_err());
    }

    /// Responses that reached nobody.
    pub(super) fn undelivered(&self) -> u64 {
        self.undelivered
    }

    pub(super) fn counters(&self) -> ipc::Counters {
        self.server.counters()
    }
}

/// Returns the first `len` bytes of a buffer that only grows. Old contents are not cleared: the caller overwrites them.
fn grow(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// The encoded response that has a status and no value.
pub(super) fn status_response(status: Status) -> [u8; RESPONSE_HEADER] {
    BytesResponse::new(status).encode_header().unwrap_or_default()
}

/// Executes an operation on this daemon's shard.
pub(super) fn execute<'s>(
    shard: &'s mut Shard,
    info: &'s mut NodeInfo,
    op: &BytesOp<'_>,
) -> BytesResponse<'s> {
    match op {
        BytesOp::Info => {
            info.attach_count = info.attach_count.wrapping_add(1);
            BytesResponse { status: Status::Done, value: info.as_bytes() }
        }
        op => shard.apply_bytes(op),
    }
}

/// Decodes a request that arrived at shard `here`. Returns which shard shall execute it, or the status of a request that is
/// invalid.
pub(super) fn route<'b>(
    here: ShardId,
    shard_map: &ShardMap,
    bytes: &'b [u8],
) -> Result<(ShardId, BytesOp<'b>), Status> {
    let request = BytesRequest::decode(bytes).map_err(|_| Status::Malformed)?;
    if let BytesOp::Info = request.op {
        // A client asks for it before it knows the node's rank.
        return Ok((here, BytesOp::Info));
    }
    let shard = ShardId { rank: request.rank, daemon: request.daemon };
    let exists = shard.rank < shard_map.nodes() && shard.daemon < shard_map.daemons();
    let owns_key = request.op.key().is_none_or(|key| shard_map.shard_of_bytes(key) == shard);
    if exists && owns_key { Ok((shard, request.op)) } else { Err(Status::Misrouted) }
}

/// The longest response to an operation, in bytes.
pub(super) fn response_limit(op: &BytesOp<'_>) -> usize {
    match op {
        BytesOp::Put { .. } | BytesOp::Delete { .. } => RESPONSE_HEADER,
        _ => MAX_RESPONSE,
    }
}
