//! Positions of clients that are alive but do not move: stopped between reserving a position and filling it.
//!
//! Nobody can tell such a client from one that is only slow, and it may write its slot at any later time. So the server neither waits
//! for it for ever nor gives its slot away: it passes the position, and clients leave the slot out in all further rounds of the ring.
//!
//! ```text
//!  server                                        other clients                       the stopped client
//!  position p: reserved, claimed, not filled
//!  for STALL_TIME
//!  stalled_slots += slot of p
//!  tail = p + 1  (Release)  -------------------> tail (Acquire), reserve p + depth   ...
//!                                                its slot is stalled: clear the
//!                                                claim, reserve the next position
//!  p + depth: reserved, not filled, no claim:
//!  skipped, as a dead client's position
//!                                                                                    continues: fills p,
//!  stamp of p is there: hand the request out  <------------------------------------  clears its claim
//!  stalled_slots -= slot of p  (Release)  -----> stalled_slots (Acquire): the slot
//!                                                is used again
//! ```
//!
//! **Promise.** Only the client that reserved a stalled position writes to its slot, until the server has read the request or the
//! client is gone. A request is handed out exactly once, however late it is written.
//!
//! Why this is safe: a client reserves `p + depth` only after it has seen a `tail` beyond `p`, which the server published after it
//! had listed the slot. A client that sees the slot unlisted sees it after the server has read it. Whether a client used a position of
//! a slot or left it out shows in the ring itself: the position is filled, or nobody claims it any more.

use core::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::layout::{MAX_STALLED, RingHeader, SharedRing};

/// How long a position may stay reserved and not filled before the requests after it are served.
const STALL_TIME: Duration = Duration::from_millis(10);

/// The stalled positions, on the server. It is not in the segment, so no client can change it.
#[derive(Default)]
pub(super) struct StalledPositions {
    /// At most [`MAX_STALLED`].
    positions: Vec<u64>,
    /// A position at which the server has waited, and since when.
    waiting: Option<(u64, Instant)>,
}

impl StalledPositions {
    pub(super) fn new() -> StalledPositions {
        StalledPositions { positions: Vec::with_capacity(MAX_STALLED), waiting: None }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.positions.iter().copied()
    }

    /// Called when `position` is reserved by a live client and not filled. Whether it has been so for [`STALL_TIME`] and there is room
    /// for one more: then it is in the list, and the server may go on.
    pub(super) fn try_pass(&mut self, position: u64, ring: &SharedRing) -> bool {
        let now = Instant::now();
        match self.waiting {
            Some((waiting, since)) if waiting == position => {
                if now - since < STALL_TIME || self.positions.len() == MAX_STALLED {
                    return false;
                }
            }
            _ => {
                self.waiting = Some((position, now));
                return false;
            }
        }
        self.waiting = None;
        self.positions.push(position);
        self.publish(ring);
        true
    }

    /// The request at `position` was read, or its client is gone.
    pub(super) fn remove(&mut self, position: u64, ring: &SharedRing) {
        self.positions.retain(|stalled| *stalled != position);
        self.publish(ring);
    }

    /// Tells the clients which slots to leave out.
    fn publish(&self, ring: &SharedRing) {
        let (header, depth) = (&ring.header, u64::from(ring.layout.ring_depth));
        for (i, slot) in header.stalled_slots.iter().enumerate() {
            let listed = self.positions.get(i).map_or(0, |position| position % depth + 1);
            // Release, partner: the Acquire loads in `is_stalled`. What was read from a slot that is not listed any more was
            // read before.
            slot.store(listed, Release);
        }
        header.stalled_count.store(self.positions.len() as u64, Release);
    }
}

/// Whether clients must leave out the slot of `position`.
#[inline(always)]
pub(super) fn is_stalled(header: &RingHeader, position: u64, depth: u64) -> bool {
    // Acquire, partner: the Release stores in `StalledPositions::publish`.
    header.stalled_count.load(Acquire) != 0 && is_listed(header, position, depth)
}

#[cold]
fn is_listed(header: &RingHeader, position: u64, depth: u64) -> bool {
    let slot = position % depth + 1;
    // Acquire, partner: as above.
    header.stalled_slots.iter().any(|listed| listed.load(Acquire) == slot)
}
