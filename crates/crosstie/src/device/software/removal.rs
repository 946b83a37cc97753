//! Removed objects whose memory a peer may still touch.
//!
//! Removing a region or a queue pair does not wait for a peer that is stopped inside an operation. The object is taken away
//! at once; its memory, its key or number, and a queue pair's place in its completion queues are freed when every operation
//! that may have found it has ended (`quiescence.rs`). Until then the object is on the list here. The service thread looks
//! at the list again and again, and so does an allocation that finds no memory.
//! [`Device::counters`](crate::device::Device::counters) says how much is on the list.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use super::device_memory::Allocation;
use super::layout::RegionKey;
use super::lock::locked;
use super::qp::QpShared;
use super::quiescence::{DROP_TIMEOUT, Pause, PeerDeparture, Quiescence};
use super::state::DeviceShared;
use crate::device::DeviceCounters;

/// The removals that wait for peers.
#[derive(Debug, Default)]
pub(super) struct Removals {
    regions: Mutex<Vec<RegionRemoval>>,
    qps: Mutex<Vec<QpRemoval>>,
    region_count: AtomicU64,
    bytes: AtomicU64,
    qp_count: AtomicU64,
}

/// A region of allocated memory that was deregistered.
#[derive(Debug)]
struct RegionRemoval {
    key: RegionKey,
    memory: Allocation,
    operations: Quiescence,
}

/// A queue pair that was dropped.
#[derive(Debug)]
pub(super) struct QpRemoval {
    qp: Arc<QpShared>,
    /// RC: the connected peer.
    peer: PeerDeparture,
    /// UD: datagram senders that were inside an operation.
    senders: Option<Quiescence>,
}

impl QpRemoval {
    /// The queue pair is closed: operations that begin now do not find it.
    pub(super) fn new(qp: &Arc<QpShared>) -> QpRemoval {
        let senders = qp
            .is_datagram()
            .then(|| Quiescence::observe_datagram_senders(&qp.device.peers, &qp.device.attempts));
        QpRemoval { qp: qp.clone(), peer: PeerDeparture::default(), senders }
    }

    /// Removes the queue pair if no peer is inside an operation on it. Returns whether that is done.
    pub(super) fn try_finish(&mut self) -> bool {
        let senders_left = match &mut self.senders {
            Some(senders) => senders.is_reached(&self.qp.device.peers),
            None => true,
        };
        if !senders_left || !self.qp.peer_has_left(&mut self.peer) {
            return false;
        }
        self.qp.finish_removal();
        true
    }
}

impl DeviceShared {
    pub(super) fn counters(&self) -> DeviceCounters {
        DeviceCounters {
            deferred_regions: self.removals.region_count.load(Relaxed),
            deferred_bytes: self.removals.bytes.load(Relaxed),
            deferred_queue_pairs: self.removals.qp_count.load(Relaxed),
        }
    }

    /// Frees the memory and the key of a deregistered region when `operations` have ended.
    pub(super) fn free_region_later(&self, key: RegionKey, memory: Allocation, mut operations: Quiescence) {
        if operations.is_reached(&self.peers) {
            return self.free_region(key, memory);
        }
        self.removals.region_count.fetch_add(1, Relaxed);
        self.removals.bytes.fetch_add(memory.len(), Relaxed);
        locked(&self.removals.regions).push(RegionRemoval { key, memory, operations });
        self.watch.wake();
    }

    fn free_region(&self, key: RegionKey, memory: Allocation) {
        drop(memory);
        self.regions.give_back_key(key);
    }

    pub(super) fn defer_qp_removal(&self, removal: QpRemoval) {
        self.removals.qp_count.fetch_add(1, Relaxed);
        locked(&self.removals.qps).push(removal);
        self.watch.wake();
    }

    /// Completes every removal that no peer holds up any more. Returns whether some are left.
    pub(super) fn finish_removals(&self) -> bool {
        let mut regions = locked(&self.removals.regions);
        for removal in regions.extract_if(.., |removal| removal.operations.is_reached(&self.peers)) {
            self.removals.region_count.fetch_sub(1, Relaxed);
            self.removals.bytes.fetch_sub(removal.memory.len(), Relaxed);
            self.free_region(removal.key, removal.memory);
        }
        let mut left = !regions.is_empty();
        drop(regions);
        let mut qps = locked(&self.removals.qps);
        qps.retain_mut(|removal| {
            let done = removal.try_finish();
            if done {
                self.removals.qp_count.fetch_sub(1, Relaxed);
            }
            !done
        });
        left |= !qps.is_empty();
        left
    }

    /// Tries `take` again while removed objects may free what it found to be used up: a running peer leaves its operation
    /// soon. Gives up after [`DROP_TIMEOUT`], or when no removal is left.
    pub(super) fn retry_after_removals<T>(&self, mut take: impl FnMut() -> Option<T>) -> Option<T> {
        let (deadline, mut pause) = (Instant::now() + DROP_TIMEOUT, Pause::default());
        loop {
            if let Some(taken) = take() {
                return Some(taken);
            }
            let left = self.finish_removals();
            if let Some(taken) = take() {
                return Some(taken);
            }
            if !left || Instant::now() >= deadline {
                return None;
            }
            pause.wait();
        }
    }

    /// Completes every removal, for a device that is closed: its objects are gone, and nothing is allocated any more. What
    /// a peer still writes goes to its own mapping of the segment.
    pub(super) fn abandon_removals(&self) {
        let regions = std::mem::take(&mut *locked(&self.removals.regions));
        regions.into_iter().for_each(|removal| removal.memory.abandon());
        let qps = std::mem::take(&mut *locked(&self.removals.qps));
        for removal in qps {
            removal.qp.finish_removal();
        }
    }
}
