//! Positions of completion rings that a producer reserved and will never publish, because it is dead.

use core::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed};

use super::cq_ring::CqRing;
use super::lock::locked;
use super::peer_lines::{AssignedLine, LineUse};
use super::state::DeviceShared;
use crate::ring::reservation;

/// Publishes a void entry at the position that a dead datagram sender reserved in `ring` and did not publish, if there is one, and
/// clears the sender's claim. Returns false if that cannot be decided yet.
pub(super) fn void_reservation(device: &DeviceShared, dead: &AssignedLine, ring: &CqRing) -> bool {
    let _one_at_a_time = locked(&device.cleanup);
    let position = dead.line.claim.load(Acquire);
    let header = &*ring.header;
    let head = header.head.word.load(Acquire);
    let is_complete = position == reservation::IDLE
        || position >= head
        // Acquire, partner: the Release store in `Cq::poll`. It was published and read, or the poller has passed it and
        // looks after it.
        || header.consumed.word.load(Acquire) > position
        || ring.is_published(position);
    if !is_complete {
        if !is_abandoned(device, ring, position) {
            return false;
        }
        ring.publish_void(position);
    }
    dead.line.claim.store(reservation::IDLE, Relaxed);
    true
}

/// Whether no live producer can still publish `position` of `ring`. The caller holds the lock `cleanup`.
pub(super) fn is_abandoned(device: &DeviceShared, ring: &CqRing, position: u64) -> bool {
    let qps = device.qps.all();
    let mut live: Vec<&AtomicU64> = qps.iter().map(|qp| &qp.send_claim).collect();
    let lines: Vec<AssignedLine> = locked(&device.peers.lines)
        .all()
        .filter(|line| matches!(line.usage, LineUse::Datagrams { .. }))
        .filter(|line| device.peers.is_connected(&line.gid))
        .collect();
    live.extend(lines.iter().map(|line| &line.line.claim));
    // This includes claims of datagram senders and of our own posters in other rings. An equal position there only means one more attempt.
    let published = || ring.is_published(position);
    reservation::is_abandoned(&ring.header.head.word, position, live.into_iter(), published)
}
