//! The outstanding send requests of a queue pair, shared by its poster and its completion queue.

use core::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64,
    Ordering::{Relaxed, Release},
};

use rdma_mummy_sys as ffi;

use super::connect::{has_failed, modify_to_error};
use super::random_u64;
use crate::device::{DeviceError, QpState};

/// The send requests of a queue pair that have not completed.
///
/// Requests are numbered from 0. The device gets the tag `tag_base + number` as `wr_id`; the caller's `wr_id` is stored here.
/// The requests of one queue complete in order, so a completion frees every entry up to its own. `tag_base` is random: some
/// devices do not say whether an error completion belongs to a send request or to a receive, and a receive whose `wr_id`
/// happens to equal an outstanding tag would be taken for a send request. That has a probability of `max_send_wr` in 2^64.
#[derive(Debug)]
pub(super) struct SendRing {
    qp: *mut ffi::ibv_qp,
    qp_num: u32,
    state: AtomicU8,
    /// Whether the device was told to flush after the failure.
    flushed: AtomicBool,
    pub(super) tag_base: AtomicU64,
    /// Requests that have completed. Writer: the holder of the send completion queue's lock.
    pub(super) ended: AtomicU64,
    pub(super) capacity: u64,
    /// The poster writes an entry before the doorbell, the poller reads it after the completion; the device orders the two.
    /// An entry is written again only after `ended` has passed it.
    pub(super) wr_ids: Box<[AtomicU64]>,
}

// SAFETY: everything but `qp` is atomic or constant. `qp` is used to move the queue pair to ERR, which any thread may do;
// it is valid because a ring is reached only through the queue pair itself, or through a completion queue from which the
// queue pair has not been removed yet, see `QpInner::drop`.
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
            tag_base: AtomicU64::new(random_u64()?),
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
        // Relaxed: the value orders nothing, because the device itself decides what it accepts.
        match self.state.load(Relaxed) {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::ReadyToReceive,
            3 => QpState::ReadyToSend,
            _ => QpState::Error,
        }
    }

    /// Records a state transition that the device has made, unless the queue pair failed in the meantime.
    pub(super) fn try_transition(&self, from: QpState, to: QpState) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Relaxed, Relaxed).is_ok()
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Relaxed);
    }

    /// Records that the queue pair has failed, and makes the device flush it.
    #[cold]
    pub(super) fn record_failure(&self) {
        self.set_state(QpState::Error);
        if !self.flushed.load(Relaxed) {
            self.flush();
        }
    }

    /// Makes the device flush a failed queue pair again. Soft-RoCE does not flush receives that are posted after the failure
    /// until it is told to, and no device flushes the receives of a datagram queue pair when a send fails.
    ///
    /// It does nothing before the device itself has moved the queue pair to ERR: an error completion may be visible before
    /// the device has sent the NAK that the peer waits for, and Soft-RoCE would then never send it. Requests that are posted
    /// until then are flushed by the device.
    #[cold]
    pub(super) fn flush(&self) {
        // SAFETY: `qp` is valid, see above. If the call fails, the device is going away, and a flush is not needed.
        unsafe {
            if has_failed(self.qp) {
                modify_to_error(self.qp).unwrap_or(());
                self.flushed.store(true, Relaxed);
            }
        }
    }

    /// Frees the entries up to the request with `tag` and returns the caller's `wr_id`. `None` if no such request is
    /// outstanding.
    #[inline]
    pub(super) fn retire(&self, tag: u64) -> Option<u64> {
        let number = tag.wrapping_sub(self.tag_base.load(Relaxed));
        if number.wrapping_sub(self.ended.load(Relaxed)) >= self.capacity {
            return None;
        }
        let wr_id = self.wr_ids[number as usize & (self.wr_ids.len() - 1)].load(Relaxed);
        // Release, partner: the Acquire load in `Sender::check`, whose caller then writes the entries again.
        self.ended.store(number + 1, Release);
        Some(wr_id)
    }

    /// Forgets every request. The caller is the poster and holds the locks of the completion queues.
    pub(super) fn clear(&self, tag_base: u64) {
        self.flushed.store(false, Relaxed);
        self.tag_base.store(tag_base, Relaxed);
        self.ended.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use core::ptr;

    use super::*;

    #[test]
    fn a_completion_frees_the_entries_before_it() {
        let ring = SendRing::new(ptr::null_mut(), 7, 5).unwrap();
        let tag_base = ring.tag_base.load(Relaxed);
        for (number, entry) in ring.wr_ids.iter().enumerate() {
            entry.store(100 + number as u64, Relaxed);
        }
        assert_eq!(ring.retire(tag_base.wrapping_add(2)), Some(102));
        assert_eq!(ring.ended.load(Relaxed), 3);
        assert_eq!(ring.retire(tag_base.wrapping_add(2)), None, "completed already");
        assert_eq!(ring.retire(tag_base.wrapping_add(8)), None, "beyond the queue");
        assert_eq!(ring.retire(12345), None, "the wr_id of a receive");
        assert_eq!(ring.retire(tag_base.wrapping_add(7)), Some(107));
        ring.clear(9);
        assert_eq!(ring.retire(9), Some(100));
    }
}
