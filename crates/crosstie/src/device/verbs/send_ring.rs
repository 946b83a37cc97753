//! The outstanding send requests of a queue pair: what its poster and its completion queue share.

use core::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64,
    Ordering::{Relaxed, Release},
};

use rdma_mummy_sys as ffi;

use super::connect::{has_failed, modify_to_error};
use super::random;
use crate::device::{DeviceError, QpState};

/// The send requests of a queue pair that have not ended, as its poster and its completion queue see them.
///
/// Requests are numbered from 0. The device carries `salt + number` as `wr_id`; the caller's `wr_id` waits here. One
/// queue's requests end in order, so a completion frees every place up to its own. `salt` is random: where a device does
/// not say whether an error completion is of a send request or of a receive, a receive whose `wr_id` happens to fall among
/// the outstanding numbers would be taken for a send request, once in 2^64 / `max_send_wr`.
#[derive(Debug)]
pub(super) struct SendRing {
    qp: *mut ffi::ibv_qp,
    qp_num: u32,
    state: AtomicU8,
    /// Whether the device was told to flush after the failure.
    flushed: AtomicBool,
    pub(super) salt: AtomicU64,
    /// Requests that have ended. Written by who holds the send completion queue's gate.
    pub(super) ended: AtomicU64,
    pub(super) capacity: u64,
    /// Written by the poster before the device is told, read after the device has told: its doorbell and its completion
    /// order the two. A place is written again only after `ended` has passed it.
    pub(super) wr_ids: Box<[AtomicU64]>,
}

// SAFETY: everything but `qp` is atomic or constant. `qp` is used to move the queue pair to ERR, which any thread may do;
// it is valid because a ring is reached through the queue pair itself or through a completion queue that the queue pair
// has not left yet, see `QpInner::drop`.
unsafe impl Send for SendRing {}
// SAFETY: as above.
unsafe impl Sync for SendRing {}

impl SendRing {
    pub(super) fn new(qp: *mut ffi::ibv_qp, qp_num: u32, capacity: u32) -> Result<SendRing, DeviceError> {
        Ok(SendRing {
            qp,
            qp_num,
            state: AtomicU8::new(QpState::Reset as u8),
            flushed: AtomicBool::new(false),
            salt: AtomicU64::new(random()?),
            ended: AtomicU64::new(0),
            capacity: capacity.into(),
            wr_ids: (0..capacity.next_power_of_two()).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    pub(super) fn qp_num(&self) -> u32 {
        self.qp_num
    }

    #[inline]
    pub(super) fn state(&self) -> QpState {
        // The state orders nothing: the device has the last word.
        match self.state.load(Relaxed) {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::ReadyToReceive,
            3 => QpState::ReadyToSend,
            _ => QpState::Error,
        }
    }

    /// Notes a step that was made, unless the queue pair failed meanwhile.
    pub(super) fn step(&self, from: QpState, to: QpState) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Relaxed, Relaxed).is_ok()
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Relaxed);
    }

    /// Notes that the queue pair has failed, and sees to it that all of it is flushed.
    #[cold]
    pub(super) fn failed(&self) {
        self.set_state(QpState::Error);
        if !self.flushed.load(Relaxed) {
            self.flush();
        }
    }

    /// Makes the device flush a failed queue pair once more. Soft-RoCE does not look at receives that are posted after the
    /// failure until it is told, and every device leaves a datagram queue pair's receives alone when a send fails.
    ///
    /// Not before the device itself has got there: an error completion may come ahead of the refusal that the peer is
    /// waiting for, and Soft-RoCE would swallow that. What is posted until then is flushed without our help.
    #[cold]
    pub(super) fn flush(&self) {
        // SAFETY: `qp` is valid, see above. A refusal means that the device is going away, and the flush with it.
        unsafe {
            if has_failed(self.qp) {
                modify_to_error(self.qp).unwrap_or(());
                self.flushed.store(true, Relaxed);
            }
        }
    }

    /// Frees the places up to request `tag`, and gives its `wr_id`. None if no such request is outstanding.
    #[inline]
    pub(super) fn retire(&self, tag: u64) -> Option<u64> {
        let number = tag.wrapping_sub(self.salt.load(Relaxed));
        if number.wrapping_sub(self.ended.load(Relaxed)) >= self.capacity {
            return None;
        }
        let wr_id = self.wr_ids[number as usize & (self.wr_ids.len() - 1)].load(Relaxed);
        // Release: partner is the Acquire in `Sender::admit`, which then writes the places anew.
        self.ended.store(number + 1, Release);
        Some(wr_id)
    }

    /// Forgets every request. The caller holds the gate and is the poster.
    pub(super) fn clear(&self, salt: u64) {
        self.flushed.store(false, Relaxed);
        self.salt.store(salt, Relaxed);
        self.ended.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use core::ptr;

    use super::*;

    #[test]
    fn a_completion_frees_the_places_before_it() {
        let ring = SendRing::new(ptr::null_mut(), 7, 5).unwrap();
        let salt = ring.salt.load(Relaxed);
        for (number, place) in ring.wr_ids.iter().enumerate() {
            place.store(100 + number as u64, Relaxed);
        }
        assert_eq!(ring.retire(salt.wrapping_add(2)), Some(102));
        assert_eq!(ring.ended.load(Relaxed), 3);
        assert_eq!(ring.retire(salt.wrapping_add(2)), None, "ended already");
        assert_eq!(ring.retire(salt.wrapping_add(8)), None, "beyond the queue");
        assert_eq!(ring.retire(12345), None, "of a receive");
        assert_eq!(ring.retire(salt.wrapping_add(7)), Some(107));
        ring.clear(9);
        assert_eq!(ring.retire(9), Some(100));
    }
}
