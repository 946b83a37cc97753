//! Quiescence: making sure that no peer is still working on an object before its memory is reused.
//!
//! A peer performs its operations itself, on our mapped segment. When a region, a queue pair or a receive goes away here, a
//! peer may be in the middle of an operation that found the object a moment ago. This module answers who may still touch
//! it. `peer_lines.rs` records which peer announces its operations where, `removal.rs` keeps the objects that cannot be
//! freed yet, and `ring/presence.rs` is the protocol itself, with loom tests.
//!
//! # The protocol
//!
//! ```text
//!  peer (executes an operation)                      owner (takes an object away)
//!  ----------------------------                      ----------------------------
//!  busy += 1, now odd        (OperationGuard::begin) key = 0, or connection = NOT_READY
//!  light fence                                       heavy fence (membarrier)
//!  load connection word, region key                  for each line that could reach the object:
//!     -> gone: the operation fails                       remember busy if it is odd     (Quiescence)
//!     -> there: copy, take a receive,                none is odd: free the object at once
//!        publish a completion                        else: look again later; free it when every remembered
//!                                                         line has moved on, or its peer is gone (removal.rs)
//!  busy += 1, now even       (OperationGuard drop)
//! ```
//!
//! The fences order "announce, then look" against "take away, then look": either the peer sees that the object is gone, or
//! the owner sees the peer's odd `busy` and keeps the object.
//!
//! # One line, one writer
//!
//! `busy` is in a `PeerLine`. A line belongs to one connection, or to one datagram sender, from its assignment until its
//! writer has closed it or the peer is gone. It lies in a segment that only this peer maps.
//!
//! ```text
//!  owner                                             peer
//!  -----                                             ----
//!  ready_to_receive: assign a fresh line,
//!     block.line = index, connection = word  ------> attach: read block, open the line (fails if it was withdrawn)
//!                                                    each operation: busy odd in OWN line, then check connection == word
//!  reset, drop: connection = NOT_READY       ------> unequal: leave, close the line, attach anew
//!     retire the line: withdrawn now, or
//!     kept in the record until it is closed  <------ close
//! ```
//!
//! A connection word is never used twice, so an old peer that continues late finds a word that is not its own and leaves.
//!
//! # Who writes which word
//!
//! | word | writer | meaning |
//! | --- | --- | --- |
//! | `PeerLine::busy` | the peer that opened the line | odd while inside an operation |
//! | `PeerLine::claim` | the same peer, if it is a datagram sender; after its death, the owner | the position it is reserving in a completion queue, or `IDLE` |
//! | `PeerLine::tenure` | owner and peer in turn, see `ring/presence.rs` | who may write the line |
//! | `PeerLine::taken`, `SrqWord` | the peer that takes a receive | which receives were taken, and by whom |
//! | `RegionEntry::key`, `QpBlock::connection`, `QpBlock::line` | the owner | zero: the object is gone |
//! | `Peers`, `Removals` | the owner | private memory |
//!
//! # Who waits for whom, and for how long
//!
//! | who | waits for | at most | if the time is over |
//! | --- | --- | --- | --- |
//! | `Mr::drop`, allocated memory | nobody | | the memory is kept until no peer of the same protection domain is inside |
//! | `Mr::drop`, memory in place | peers of the same protection domain, and datagram senders, that are inside an operation | no limit: the caller gets the memory back | |
//! | `Mr::deregister`, memory in place | the same | the caller's timeout | the region is handed back, closed to new operations |
//! | queue pair drop | its own peer, or datagram senders that are inside | [`DROP_TIMEOUT`] | block, number and receive memory are kept until the peer has left |
//! | `RcQp::reset` | its own peer | [`QUIESCE_TIMEOUT`]; `try_reset` not at all | the queue pair goes to ERR, `reset` fails and can be tried again |
//! | allocation that finds no memory | removals that are on the list | [`DROP_TIMEOUT`] | it fails: out of memory |
//! | service thread: flush of a queue pair in ERR, removals, peer line of a dead datagram sender | the peer; of a datagram queue pair, each receive waits for the sender that has taken it | no limit, but it does not block: it looks again after 1 ms, then less often, up to every [`MAX_RECHECK`] | |
//! | `Mr::drop` | our own service thread | the part of a proxied operation, at most 32 KiB, that it copies now | |
//! | `Mr::drop`, memory in place | our own progress threads | the operation that they execute now; one that waits for a peer uses memory of its own, and is not waited for | |
//! | `Mr::drop`, memory in place | our threads in `RcQp::post_detached` | that call | |
//!
//! Why `reset` fails instead of going on with a new line: it gives the posted receives back to the program, and the peer
//! may still write into one of them. A program that cannot wait drops the queue pair, creates a new one, and deregisters
//! the memory that the old peer could reach: **deregistering a region is what keeps a peer out of memory**. After the drop
//! of a queue pair whose peer is stopped inside an operation, that one operation may still land in regions that stay
//! registered.
//!
//! A peer is gone when its process has ended (pidfd), or when it has closed its socket, which it does after it has unmapped
//! our segment. A peer that we cut off because it sent a malformed message is not gone: its process lives and may be inside
//! an operation. What a dead datagram sender left half done is repaired: `abandoned.rs` fills the
//! position that it had reserved without publishing. A dead peer of a connection leaves nothing to repair (`lane.rs`). The receives that
//! either of them had taken are returned by the poller when it comes to a notice, which the service thread posts only after the peer can
//! complete no more receives (`ring/notices.rs`, `cq.rs`, `service.rs`).
//!
//! # What a peer that writes invalid values can achieve
//!
//! `busy`, `claim` and `tenure` of its own lines are words that a peer writes.
//!
//! - It can look as if it were inside an operation for ever. Then memory of its protection domain stays on the list, which
//!   the counters show, until its process ends. It can keep its lines open: then it uses up its own table
//!   (`LINES_PER_PEER`) and gets no more connections.
//! - It can look as if it were outside while it is inside. Then memory that it still writes may be used again: it corrupts
//!   that memory, as any process that has mapped the segment can do at any time.
//! - It cannot make us free what **another** peer may still touch: the lines of the other peer are in a segment that it
//!   has not mapped, and the record of who writes which line is private.

use core::sync::atomic::AtomicU64;
use core::time::Duration;

use super::attempts::{Attempts, ObservedAttempt};
use super::layout::PeerLine;
use super::lock::locked;
use super::peer_lines::{AssignedLine, LineUse};
use super::peers::Peers;
use crate::ring::{fence, presence};

/// How long a call that can fail waits for a peer that is alive but does not leave its operation.
pub(super) const QUIESCE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a drop waits for a running peer to leave its operation, before the removal is left to the service thread.
pub(super) const DROP_TIMEOUT: Duration = Duration::from_millis(100);

/// Longest time between two looks of the service thread at a peer that does not leave.
pub(super) const MAX_RECHECK: Duration = Duration::from_millis(64);

/// How long a wait only yields, and its longest sleep after that. A running peer leaves its operation soon.
const YIELDS: u32 = 64;
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// Pauses between two looks at a peer. The wait for a peer that is stopped takes next to no processor time.
#[derive(Debug, Default)]
pub(super) struct Pause {
    pauses: u32,
}

impl Pause {
    pub(super) fn wait(&mut self) {
        self.pauses += 1;
        match self.pauses.checked_sub(YIELDS) {
            None => std::thread::yield_now(),
            Some(sleeps) => {
                std::thread::sleep(Duration::from_micros(50 << sleeps.min(8)).min(LONGEST_SLEEP));
            }
        }
    }
}

/// Marks this process as inside an operation on a peer's segment until it is dropped. Nothing that was found there in the
/// meantime is freed before that.
pub(super) struct OperationGuard<'a> {
    busy: &'a AtomicU64,
}

impl<'a> OperationGuard<'a> {
    /// `line` is the cache line in the peer's segment that is ours to write.
    #[inline]
    pub(super) fn begin(line: &'a PeerLine) -> OperationGuard<'a> {
        presence::enter(&line.busy);
        OperationGuard { busy: &line.busy }
    }
}

impl Drop for OperationGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        presence::leave(self.busy);
    }
}

/// The operations that were under way when an object was taken away, and that may have found it before.
#[derive(Debug)]
pub(super) struct Quiescence {
    /// Lines of peers that were inside an operation, with the value of `busy`.
    lines: Vec<(AssignedLine, u64)>,
    /// The attempts of our own threads that were under way.
    attempts: Vec<ObservedAttempt>,
    /// Whether a peer that is gone counts as outside. Otherwise it does only after its half-written entries are repaired.
    ends_with_peer: bool,
}

impl Quiescence {
    /// Collects the operations that may have found a region of protection domain `pd`, which the caller has just taken
    /// away.
    pub(super) fn observe_domain(peers: &Peers, attempts: &Attempts, pd: u32) -> Quiescence {
        let reaches = |usage: &LineUse| match usage {
            LineUse::Connection { pd: other } => *other == pd,
            LineUse::Datagrams { .. } => true,
        };
        Quiescence { ends_with_peer: true, ..Quiescence::observe(peers, attempts, reaches) }
    }

    /// Collects the operations that may have found a datagram queue pair, which the caller has just closed.
    pub(super) fn observe_datagram_senders(peers: &Peers, attempts: &Attempts) -> Quiescence {
        Quiescence::observe(peers, attempts, |usage| matches!(usage, LineUse::Datagrams { .. }))
    }

    fn observe(peers: &Peers, attempts: &Attempts, reaches: impl Fn(&LineUse) -> bool) -> Quiescence {
        // After this fence, a peer that did not see the caller's stores has made its odd `busy` visible.
        fence::heavy();
        let lines = locked(&peers.lines)
            .all()
            .filter(|line| reaches(&line.usage))
            .filter_map(|line| presence::observe(&line.line.busy).map(|seen| (line, seen)))
            .collect();
        Quiescence { lines, attempts: attempts.current(), ends_with_peer: false }
    }

    /// Whether all these operations have ended.
    pub(super) fn is_reached(&mut self, peers: &Peers) -> bool {
        let ends_with_peer = self.ends_with_peer;
        self.lines.retain(|(line, seen)| {
            !presence::has_left(&line.line.busy, *seen)
                && if ends_with_peer {
                    peers.is_connected(&line.gid)
                } else {
                    locked(&peers.lines).is_assigned(line)
                }
        });
        self.attempts.retain(|attempt| !attempt.has_ended());
        self.lines.is_empty() && self.attempts.is_empty()
    }

    /// The numbers of the datagram senders that are still inside.
    pub(super) fn datagram_senders(&self) -> impl Iterator<Item = u32> {
        self.lines.iter().filter_map(|(line, _)| match line.usage {
            LineUse::Datagrams { sender } => Some(sender),
            LineUse::Connection { .. } => None,
        })
    }

    /// A peer that is still inside.
    pub(super) fn blocking_peer(&self) -> Option<&[u8; 16]> {
        self.lines.first().map(|(line, _)| &line.gid)
    }
}

/// The departure of the peer of one queue pair.
#[derive(Debug, Default)]
pub(super) struct PeerDeparture {
    /// `busy` at the first look; `None` before it.
    seen: Option<Option<u64>>,
}

impl PeerDeparture {
    /// Whether the peer that writes this line is outside of the queue pair, which is closed, for good: it can complete no more
    /// receives, and what it left behind if it is dead is repaired. Never blocks.
    ///
    /// It keeps the value of `busy` from the first call, so that an operation that began later, and therefore
    /// sees the closed connection, is not waited for.
    pub(super) fn is_over(&mut self, peer: &AssignedLine, peers: &Peers) -> bool {
        if !peers.is_connected(&peer.gid) {
            return true;
        }
        let seen = *self.seen.get_or_insert_with(|| {
            // After this fence either the peer sees that the connection is closed, or we see its odd `busy`.
            fence::heavy();
            presence::observe(&peer.line.busy)
        });
        seen.is_none_or(|seen| presence::has_left(&peer.line.busy, seen))
    }
}
