//! Quiescence: making sure that no peer is still working on an object before its memory is reused.
//!
//! A peer performs its operations itself, on our mapped segment. When a region, a queue pair or a receive goes away here, a
//! peer may be in the middle of an operation that found the object a moment ago. This module is the one place that answers:
//! who may still touch it, who waits for whom, and for how long.
//!
//! # The protocol
//!
//! ```text
//!  peer (executes an operation)                      owner (takes an object away)
//!  ----------------------------                      ----------------------------
//!  busy += 1, now odd        (OperationGuard::begin) key = 0, or connection = NOT_READY
//!  light fence                                       heavy fence (membarrier)
//!  load connection word, region key                  seen = busy of every peer
//!     -> gone: the operation fails                   for each odd one: wait until busy != seen
//!     -> there: copy, take a receive,                    or the peer is disconnected
//!        claim = p, publish a completion,            free the memory
//!        claim = IDLE
//!  busy += 1, now even       (OperationGuard drop)
//! ```
//!
//! The fences order "announce, then look" against "take away, then look": either the peer sees that the object is gone, or
//! the owner sees the peer's odd `busy` and waits for it.
//!
//! # Who writes which word
//!
//! | word | writer | meaning |
//! | --- | --- | --- |
//! | `PeerLine::busy` in a `QpBlock` | the connected peer | odd while inside an operation through this queue pair |
//! | `PeerLine::busy` in the table of peer lines | the datagram sender it is assigned to | the same, for datagrams |
//! | `PeerLine::claim` | the same peer; after its death, the owner | the position it is reserving in a completion queue, or `IDLE` |
//! | `PeerLine::taken`, `SrqWord` | the peer that takes a receive | which receives were taken, and by whom |
//! | `RegionEntry::key`, `QpBlock::connection` | the owner | zero: the object is gone |
//! | `DeviceShared::connected_peers` | the owner's service thread | peers that have mapped our segment; private memory |
//!
//! # Who waits for whom, and for how long
//!
//! | who | waits for | at most | if the time is over |
//! | --- | --- | --- | --- |
//! | `Mr::drop`, allocated memory | every peer inside an operation | [`QUIESCE_TIMEOUT`] | memory and key index are never reused |
//! | `Mr::drop`, memory in place | every peer inside an operation | no limit: the caller gets the memory back | |
//! | `RcQp::reset` | every peer inside an operation, then the reservation of a dead peer | twice [`QUIESCE_TIMEOUT`] | the queue pair goes to ERR, `reset` fails |
//! | queue pair drop | the same | the same | block, number and receive memory are never reused |
//! | service thread, flush of a queue pair in ERR | the queue pair's own peer | no limit, but it does not block: it looks again every millisecond | |
//! | service thread, peer line of a dead datagram sender | the reservation of that sender | the same | |
//! | `CqShared::add_qp`, second producer | every producer of the queue inside a reservation | no limit | |
//! | `Mr::drop`, `RcQp::reset`, queue pair drop | our own progress thread's current attempt (`Progress::wait_for_current_attempt`) | one operation | |
//!
//! A peer that dies is no longer waited for: the service thread learns of it from the pidfd or the closed socket and removes
//! it from `connected_peers`. What the peer left half done is repaired here: [`DeviceShared::void_abandoned_reservation`]
//! fills the position that it had reserved without publishing. Receives that it had taken are returned by the poller when
//! it comes to the `Flush` or `Reclaim` marker, which the service thread pushes only after the peer can complete no more
//! receives (`cq.rs`, `service.rs`).
//!
//! # What this does not guarantee
//!
//! - **A live peer that is stopped inside an operation** (SIGSTOP, a debugger) is waited for one second only, or without
//!   limit where the table says so. The wait is device-wide: a stopped peer also delays the removal of objects that it
//!   cannot reach.
//! - **A queue pair that was removed from the table is not looked at any more**, even if its removal timed out. If its peer
//!   is stopped inside an operation and a region is dropped later, that drop does not wait for this peer: when the peer
//!   continues, it may write into memory that has been freed and allocated again. For the same reason the peer's claim is
//!   not among the live claims when an abandoned reservation of another peer is looked for.
//! - **`busy` and `claim` can be written by the peer.** A peer that writes invalid values there can delay us for as long as a
//!   stopped peer can, or end its operation for us while it is still inside. Only processes of the same user can do this.
//! - **A peer that is cut off** because it sent a malformed message counts as disconnected, although its process lives and
//!   still has the segment mapped.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::time::Duration;
use std::time::Instant;

use super::cq_ring::CqRing;
use super::layout::{ConnectionWord, PeerLine, peer_line_at};
use super::qp::QpShared;
use super::state::{DeviceShared, locked};
use crate::memory::segment::SharedRef;
use crate::ring::{fence, reservation};

/// How long an object that is removed waits for a peer that is alive but does not leave its operation.
pub(super) const QUIESCE_TIMEOUT: Duration = Duration::from_secs(1);

/// Marks this process as inside an operation on a peer's segment until it is dropped. Nothing that was found there in the
/// meantime is freed before that.
pub(super) struct OperationGuard<'a> {
    busy: &'a AtomicU64,
}

impl<'a> OperationGuard<'a> {
    /// `line` is the cache line in the peer's segment that is ours to write.
    #[inline]
    pub(super) fn begin(line: &'a PeerLine) -> OperationGuard<'a> {
        let busy = &line.busy;
        busy.store(busy.load(Relaxed).wrapping_add(1) | 1, Relaxed);
        // The store of `busy` comes before the loads of the operation. Partner: `DeviceShared::quiesce`, whose caller
        // has stored that an object is gone, passes a heavy fence and then loads `busy`.
        fence::light();
        OperationGuard { busy }
    }
}

impl Drop for OperationGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release, partner: the Acquire loads of `busy` in this module. All accesses of the operation are over.
        self.busy.store(self.busy.load(Relaxed).wrapping_add(1), Release);
    }
}

impl DeviceShared {
    /// Waits until every operation that began before this call, and so may have seen what the caller has just taken away,
    /// has ended.
    ///
    /// `timeout` limits the wait for peers that are alive but do not move. Returns false if it passed.
    pub(super) fn quiesce(&self, timeout: Option<Duration>) -> bool {
        // After this fence, a peer that did not see the caller's stores has made its odd `busy` visible.
        fence::heavy();
        let mut waiting: Vec<(SharedRef<PeerLine>, u64, [u8; 16])> = Vec::new();
        for qp in self.all_qps() {
            if let Some((line, gid)) = qp.peer_line() {
                waiting.push((line, 0, gid));
            }
        }
        for (index, owner) in locked(&self.peer_line_owners).iter().enumerate() {
            let line = SharedRef::new(&self.segment, peer_line_at(index as u32));
            if let (Some(gid), Some(line)) = (owner, line) {
                waiting.push((line, 0, *gid));
            }
        }
        for (line, seen, _) in &mut waiting {
            // Acquire, partner: the Release store in `OperationGuard::drop`.
            *seen = line.busy.load(Acquire);
        }
        let begun = Instant::now();
        waiting.retain(|(_, seen, _)| seen & 1 == 1);
        while !waiting.is_empty() {
            waiting
                .retain(|(line, seen, gid)| line.busy.load(Acquire) == *seen && self.is_peer_connected(gid));
            if waiting.is_empty() {
                break;
            }
            if timeout.is_some_and(|timeout| begun.elapsed() > timeout) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Publishes a void entry at the position that a dead peer reserved in `ring` and did not publish, if there is one, and
    /// clears the peer's claim. Returns false if that cannot be decided yet.
    pub(super) fn void_abandoned_reservation(&self, dead: &PeerLine, ring: &CqRing) -> bool {
        let _one_at_a_time = locked(&self.service.cleanup);
        let position = dead.claim.load(Acquire);
        let header = &*ring.header;
        let head = header.head.word.load(Acquire);
        let is_complete = position == reservation::IDLE
            || position >= head
            // Acquire, partner: the Release store in `Cq::poll`. It was read, so it had been published.
            || header.consumed.word.load(Acquire) > position
            || ring.is_published(position);
        if !is_complete {
            let qps = self.all_qps();
            let mut live: Vec<&AtomicU64> = vec![&self.service.claim];
            let peer_lines: Vec<_> = qps.iter().filter_map(|qp| qp.peer_line()).collect();
            for (line, gid) in &peer_lines {
                if self.is_peer_connected(gid) {
                    live.push(&line.claim);
                }
            }
            live.extend(qps.iter().map(|qp| &qp.send_claim));
            let datagram_lines: Vec<SharedRef<PeerLine>> = locked(&self.peer_line_owners)
                .iter()
                .enumerate()
                .filter(|(_, owner)| owner.is_some_and(|gid| self.is_peer_connected(&gid)))
                .filter_map(|(index, _)| SharedRef::new(&self.segment, peer_line_at(index as u32)))
                .collect();
            live.extend(datagram_lines.iter().map(|line| &line.claim));
            // This includes claims in other rings of the device. An equal position there only means one more attempt.
            if !reservation::is_abandoned(&header.head.word, position, live.into_iter(), || {
                ring.is_published(position)
            }) {
                return false;
            }
            ring.publish_void(position);
        }
        dead.claim.store(reservation::IDLE, Relaxed);
        true
    }
}

impl QpShared {
    /// Closes the queue pair to its peer, drops its deferred sends and waits for quiescence; then repairs what the peer
    /// left behind if it is dead. Returns false if either took longer than [`QUIESCE_TIMEOUT`].
    pub(super) fn close_and_quiesce(&self) -> bool {
        self.block.connection.store(ConnectionWord::NOT_READY.0, Relaxed);
        {
            let mut deferred = locked(&self.deferred);
            deferred.queue.clear();
            deferred.peer = None;
        }
        self.device.progress.wait_for_current_attempt();
        self.device.quiesce(Some(QUIESCE_TIMEOUT)) && self.void_dead_peers_reservation(QUIESCE_TIMEOUT)
    }

    /// Waits until the reservation of this queue pair's peer, if that is dead, is void. Returns false on timeout.
    fn void_dead_peers_reservation(&self, timeout: Duration) -> bool {
        let begun = Instant::now();
        loop {
            match self.peer_line() {
                Some((line, gid)) if !self.device.is_peer_connected(&gid) => {
                    if self.device.void_abandoned_reservation(&line, &self.recv_cq.ring) {
                        return true;
                    }
                }
                _ => return true,
            }
            if begun.elapsed() > timeout {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// Whether the peer of this queue pair, which is in ERR, can complete no more receives. Never blocks.
    ///
    /// `seen_busy` keeps the value of `busy` from the first call, so that an operation that began later, and therefore
    /// sees the closed connection, is not waited for.
    pub(super) fn peer_has_left(&self, seen_busy: &mut Option<u64>) -> bool {
        let Some((line, gid)) = self.peer_line() else { return true };
        if !self.device.is_peer_connected(&gid) {
            return self.device.void_abandoned_reservation(&line, &self.recv_cq.ring);
        }
        let seen = *seen_busy.get_or_insert_with(|| {
            // After this fence either the peer sees that the connection is closed, or we see its odd `busy`.
            fence::heavy();
            line.busy.load(Acquire)
        });
        // Acquire, partner: the Release store in `OperationGuard::drop`.
        seen & 1 == 0 || line.busy.load(Acquire) != seen
    }
}
