//! Requests for byte strings, and about the node: rare and long, so they have lanes of their own.
//!
//! A client sends them to the daemon that has the key or, for another node, to the daemon that is connected with it. One of
//! another node that came to the wrong daemon is handed over, as a box, to the right one.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use crosstie::copyrpc::Payload;
use crosstie::ipc;
use zerocopy::IntoBytes;

use super::inside::Inside;
use super::network::Way;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{self, BytesOp, NodeInfo, Status};

/// Unanswered long requests of a client at one daemon, at most. Each has a slot of 2 MiB, and one more is always free: a lane is
/// 34 MiB of addresses, of which what was ever written is memory until the client leaves. A client that makes one request at
/// a time writes to two slots; one that always has several under way, to all: 68 KiB with small values, 17 MiB with values of 1 MiB.
pub const MAX_BYTES_DEPTH: usize = 16;
/// Bytes of clients' requests and answers after which 8-byte requests have their turn. One request may go beyond.
const TURN: usize = 64 << 10;
/// Looks in vain after which the next one is not soon: a client that makes one request at a time has asked again by then.
const SOON: u32 = 64;
/// Requests and answers on their way to one daemon.
const HANDED: usize = 64;

/// One daemon's side.
pub(super) struct Strings {
    server: ipc::Server<[u8], [u8]>,
    /// As the last client was told.
    info: NodeInfo,
    arrivals: Receiver<Handed>,
    daemon: u32,
    /// By daemon.
    departures: Vec<SyncSender<Handed>>,
    /// What found no room. Another node waits for each.
    backlog: VecDeque<(u32, Handed)>,
    /// As long as the longest answer that was made in it.
    scratch: Vec<u8>,
    undelivered: u64,
    /// Clients' requests may be left of the last look at their lanes.
    has_more: bool,
    /// Bytes that may be taken and answered in this turn.
    left: usize,
    /// Turns in vain since one that was not.
    idle: u32,
}

/// How many unanswered long requests a client of a node may have at one daemon.
pub(super) fn depth(queue_depth: usize) -> usize {
    queue_depth.min(MAX_BYTES_DEPTH)
}

/// A request for another daemon's shard, or the answer to one.
pub(super) struct Handed {
    pub(super) answer: bool,
    /// Who sent it.
    pub(super) daemon: u32,
    /// The number under which the asking daemon keeps who waits.
    pub(super) waiter: u32,
    pub(super) bytes: Vec<u8>,
}

/// What one daemon needs to hand requests over, for all daemons.
pub(super) fn corridors(daemons: u32) -> Vec<(Receiver<Handed>, Vec<SyncSender<Handed>>)> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..daemons).map(|_| sync_channel(HANDED)).unzip();
    receivers.into_iter().map(|receiver| (receiver, senders.clone())).collect()
}

impl Strings {
    pub(super) fn new(
        server: ipc::Server<[u8], [u8]>,
        mut info: NodeInfo,
        daemon: u32,
        (arrivals, departures): (Receiver<Handed>, Vec<SyncSender<Handed>>),
    ) -> Strings {
        info.attach_count = info.attach_count.wrapping_sub(1);
        let (backlog, scratch) = (VecDeque::new(), Vec::new());
        Strings {
            server,
            info,
            arrivals,
            daemon,
            departures,
            backlog,
            scratch,
            undelivered: 0,
            has_more: false,
            left: 0,
            idle: SOON,
        }
    }

    /// Begins a turn; says whether there is something to do.
    #[inline]
    pub(super) fn poll(&mut self) -> bool {
        self.has_more = self.has_more || self.server.poll() > 0;
        self.left = TURN;
        self.has_more
    }

    /// Whether the next turn should come soon.
    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        self.idle < SOON
    }

    /// Does what a request for this daemon says; the encoded answer has at most `limit` bytes.
    pub(super) fn apply(&mut self, shard: &mut Shard, call: &BytesOp<'_>, limit: usize) -> &[u8] {
        let response = apply(shard, &mut self.info, call);
        let len = response.encoded_len();
        match response.encode_header() {
            Ok(header) if len <= limit => {
                let answer = room(&mut self.scratch, len);
                let (front, value) = answer.split_at_mut(header.len());
                front.copy_from_slice(&header);
                value.copy_from_slice(response.value);
                answer
            }
            _ => {
                let answer = status(Status::Malformed);
                let place = room(&mut self.scratch, answer.len());
                place.copy_from_slice(&answer);
                place
            }
        }
    }

    pub(super) fn answer_status(&mut self, ticket: ipc::Ticket, answer: Status) {
        self.undelivered += u64::from(self.server.reply(ticket, &status(answer)).is_err());
    }

    /// Answers a client with what another node said.
    pub(super) fn answer_payload(&mut self, ticket: ipc::Ticket, payload: Payload<'_>) {
        if payload.is_empty() {
            // A request that its receiver dropped is answered with nothing.
            return self.answer_status(ticket, Status::NodeGone);
        }
        let answer = room(&mut self.scratch, payload.len().min(wire::MAX_RESPONSE));
        payload.copy_to(answer);
        self.left = self.left.saturating_sub(answer.len());
        self.undelivered += u64::from(self.server.reply(ticket, answer).is_err());
    }

    /// Hands a request of another node to the daemon that has the key.
    pub(super) fn pass(&mut self, daemon: u32, waiter: u32, bytes: Vec<u8>) {
        self.hand(daemon, Handed { answer: false, daemon: self.daemon, waiter, bytes });
    }

    /// Hands the answer back.
    pub(super) fn hand_back(&mut self, daemon: u32, waiter: u32, bytes: Vec<u8>) {
        self.hand(daemon, Handed { answer: true, daemon: self.daemon, waiter, bytes });
    }

    /// What other daemons handed over.
    pub(super) fn take_handed(&mut self) -> Option<Handed> {
        while let Some((daemon, handed)) = self.backlog.pop_front() {
            if let Some(handed) = self.try_hand(daemon, handed) {
                self.backlog.push_front((daemon, handed));
                break;
            }
        }
        self.arrivals.try_recv().ok()
    }

    /// Answers that reached nobody.
    pub(super) fn undelivered(&self) -> u64 {
        self.undelivered
    }

    pub(super) fn counters(&self) -> ipc::Counters {
        self.server.counters()
    }

    fn hand(&mut self, daemon: u32, handed: Handed) {
        if !self.backlog.is_empty() {
            self.backlog.push_back((daemon, handed));
        } else if let Some(handed) = self.try_hand(daemon, handed) {
            self.backlog.push_back((daemon, handed));
        }
    }

    /// Comes back if there is no room.
    fn try_hand(&mut self, daemon: u32, handed: Handed) -> Option<Handed> {
        match self.departures[daemon as usize].try_send(handed) {
            Ok(()) => None,
            Err(TrySendError::Full(handed)) => Some(handed),
            Err(TrySendError::Disconnected(_)) => {
                // That daemon is gone, and the node is about to be.
                self.undelivered += 1;
                None
            }
        }
    }
}

impl Inside {
    /// Clients' requests in bytes, and other daemons'.
    pub(super) fn serve_long(&mut self, way: &mut impl Way) -> usize {
        let count = self.serve_long_clients(way) + self.serve_long_daemons(way);
        self.long.idle = if count > 0 { 0 } else { self.long.idle.saturating_add(1) };
        count
    }

    /// Requests are looked at where they arrived, and answers written where clients look for them: whatever is copied in between is copied
    /// for nothing.
    fn serve_long_clients(&mut self, way: &mut impl Way) -> usize {
        if !self.long.poll() {
            return 0;
        }
        let mut count = 0;
        while self.long.left > 0 {
            let Inside { place: home, placement, backend, shard, long, counts, .. } = self;
            let Some(asked) = long.server.recv() else {
                long.has_more = false;
                break;
            };
            count += 1;
            let bytes = asked.message();
            long.left = long.left.saturating_sub(bytes.len());
            let in_vain = match route(*home, placement, bytes) {
                Ok((place, call)) if place == *home => {
                    counts.served += 1;
                    let response = apply(shard, &mut long.info, &call);
                    long.left = long.left.saturating_sub(response.value.len());
                    let replied = match response.encode_header() {
                        Ok(header) => asked.reply_parts(&[&header, response.value]),
                        Err(_) => asked.reply(&status(Status::Malformed)),
                    };
                    long.undelivered += u64::from(replied.is_err());
                    continue;
                }
                Ok((place, call))
                    if place.rank != home.rank
                        && backend.connection_owner(place.rank, placement.daemons()) == home.daemon =>
                {
                    way.call_long(place.rank, bytes, allowance(&call), asked.defer(), counts)
                }
                other => Err((asked.defer(), other.err().unwrap_or(Status::Misrouted))),
            };
            if let Err((ticket, status)) = in_vain {
                long.answer_status(ticket, status);
            }
        }
        count
    }

    fn serve_long_daemons(&mut self, way: &mut impl Way) -> usize {
        let mut count = 0;
        while let Some(mut handed) = self.long.take_handed() {
            count += 1;
            if handed.answer {
                way.reply_handed(handed.waiter, handed.bytes);
                continue;
            }
            self.counts.served += 1;
            let answer = match wire::BytesRequest::decode(&handed.bytes) {
                Ok(request) => apply(&mut self.shard, &mut self.long.info, &request.op),
                Err(_) => wire::BytesResponse::new(Status::Malformed),
            };
            if answer.encode(&mut handed.bytes).is_err() {
                handed.bytes.extend_from_slice(&status(Status::Malformed));
            }
            self.long.hand_back(handed.daemon, handed.waiter, handed.bytes);
        }
        count
    }
}

/// The first `len` bytes of a buffer that only ever grows: what was there before is written over, not cleared.
fn room(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// The answer that is a status alone.
pub(super) fn status(status: Status) -> [u8; wire::RESPONSE_HEADER] {
    wire::BytesResponse::new(status).encode_header().unwrap_or_default()
}

/// Does what a request for this daemon says.
fn apply<'s>(shard: &'s mut Shard, info: &'s mut NodeInfo, call: &BytesOp<'_>) -> wire::BytesResponse<'s> {
    match call {
        BytesOp::Info => {
            info.attach_count = info.attach_count.wrapping_add(1);
            wire::BytesResponse { status: Status::Done, value: info.as_bytes() }
        }
        call => shard.apply_bytes(call),
    }
}

/// Which daemon of which node a request is for, and what it says; or how it ends at once.
pub(super) fn route<'b>(
    home: ShardId,
    placement: &ShardMap,
    bytes: &'b [u8],
) -> Result<(ShardId, BytesOp<'b>), Status> {
    let request = wire::BytesRequest::decode(bytes).map_err(|_| Status::Malformed)?;
    if let BytesOp::Info = request.op {
        // Who asks does not know where it is.
        return Ok((home, BytesOp::Info));
    }
    let place = ShardId { rank: request.rank, daemon: request.daemon };
    let exists = place.rank < placement.nodes() && place.daemon < placement.daemons();
    let has_key = request.op.key().is_none_or(|key| placement.shard_of_bytes(key) == place);
    if exists && has_key { Ok((place, request.op)) } else { Err(Status::Misrouted) }
}

/// How long the answer to a request may be.
fn allowance(call: &BytesOp<'_>) -> usize {
    match call {
        BytesOp::Put { .. } | BytesOp::Delete { .. } => wire::RESPONSE_HEADER,
        _ => wire::MAX_RESPONSE,
    }
}
