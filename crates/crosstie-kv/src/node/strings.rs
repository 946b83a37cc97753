//! Requests for byte strings, and about the node: rare and long, so they have lanes of their own.
//!
//! A client sends them to the daemon that has the key or, for another node, to the daemon that is connected with it. One of
//! another node that came to the wrong daemon is handed over, as a box, to the right one.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use crosstie::copyrpc::Payload;
use crosstie::ipc;

use crate::long::{self, Info};
use crate::message::Status;

/// Unanswered long requests of a client at one daemon, at most. Each has a slot of 2 MiB, and one more is always free: a lane is
/// 34 MiB of addresses, of which what was ever written is memory until the client leaves. A client that makes one request at
/// a time writes to two slots; one that always has several under way, to all: 68 KiB with small values, 17 MiB with values of 1 MiB.
const MAX_DEPTH: usize = 16;
/// Bytes of clients' requests and answers after which 8-byte requests have their turn. One request may go beyond.
const TURN: usize = 64 << 10;
/// Requests and answers on their way to one daemon.
const HANDED: usize = 64;

/// One daemon's side.
pub(super) struct Strings {
    server: ipc::Server<[u8], [u8]>,
    info: Info,
    arrivals: Receiver<Handed>,
    daemon: u32,
    /// By daemon.
    departures: Vec<SyncSender<Handed>>,
    /// What found no room. Another node waits for each.
    backlog: VecDeque<(u32, Handed)>,
    /// The last answer.
    scratch: Vec<u8>,
    /// The last request.
    request: Vec<u8>,
    undelivered: u64,
    /// Clients' requests may be left of the last look at their lanes.
    has_more: bool,
    /// Bytes that may be taken and answered in this turn.
    left: usize,
    /// The last turn was not in vain: the next one should come soon.
    pub(super) is_busy: bool,
}

/// How many unanswered long requests a client of a node may have at one daemon.
pub(super) fn depth(queue_depth: usize) -> usize {
    queue_depth.min(MAX_DEPTH)
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
        info: Info,
        daemon: u32,
        (arrivals, departures): (Receiver<Handed>, Vec<SyncSender<Handed>>),
    ) -> Strings {
        let (backlog, scratch, request) = (VecDeque::new(), Vec::new(), Vec::new());
        Strings {
            server,
            info,
            arrivals,
            daemon,
            departures,
            backlog,
            scratch,
            request,
            undelivered: 0,
            has_more: false,
            left: 0,
            is_busy: false,
        }
    }

    /// Begins a turn; says whether there is something to do.
    #[inline]
    pub(super) fn poll(&mut self) -> bool {
        self.has_more = self.has_more || self.server.poll() > 0;
        self.left = TURN;
        self.has_more
    }

    /// The next request of a client, if there is one and the turn is not over. Its bytes are to be
    /// [given back](Strings::give_back).
    pub(super) fn next(&mut self) -> Option<(Vec<u8>, ipc::Ticket)> {
        if self.left == 0 {
            return None;
        }
        let Some(asked) = self.server.recv() else {
            self.has_more = false;
            return None;
        };
        self.left = self.left.saturating_sub(asked.message().len());
        let mut bytes = std::mem::take(&mut self.request);
        bytes.clear();
        bytes.extend_from_slice(asked.message());
        Some((bytes, asked.defer()))
    }

    pub(super) fn give_back(&mut self, bytes: Vec<u8>) {
        self.request = bytes;
    }

    /// What this node is, for one more client.
    pub(super) fn next_info(&mut self) -> Info {
        let info = self.info;
        self.info.turn = info.turn.wrapping_add(1);
        info
    }

    /// Encodes an answer of at most `limit` bytes.
    pub(super) fn encode(&mut self, response: &long::Response<'_>, limit: usize) -> &[u8] {
        if response.encoded_len() > limit || response.encode(&mut self.scratch).is_err() {
            return self.status(Status::Malformed);
        }
        &self.scratch
    }

    /// The answer that is a status alone.
    pub(super) fn status(&mut self, status: Status) -> &[u8] {
        let encoded = long::Response::new(status).encode(&mut self.scratch);
        debug_assert!(encoded.is_ok(), "an empty value is within every limit");
        &self.scratch
    }

    /// Answers a client with what was encoded last.
    pub(super) fn answer_encoded(&mut self, ticket: ipc::Ticket) {
        self.left = self.left.saturating_sub(self.scratch.len());
        self.undelivered += u64::from(self.server.reply(ticket, &self.scratch).is_err());
    }

    pub(super) fn answer_status(&mut self, ticket: ipc::Ticket, status: Status) {
        self.status(status);
        self.answer_encoded(ticket);
    }

    /// Answers a client with what another node said.
    pub(super) fn answer_payload(&mut self, ticket: ipc::Ticket, payload: Payload<'_>) {
        self.scratch.clear();
        self.scratch.resize(payload.len().min(long::MAX_RESPONSE), 0);
        payload.copy_to(&mut self.scratch);
        if payload.is_empty() {
            // A request that its receiver dropped is answered with nothing.
            self.status(Status::NodeGone);
        }
        self.answer_encoded(ticket);
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
