//! Shared receive queues, as the program posts to them. The queue itself is in `shared_recv.rs`.

use std::sync::Arc;

use super::error::check_limit;
use super::setup::{DeviceHandle, Pd};
use super::shared_recv::{PostCursor, SharedRecvQueue};
use crate::device::{DeviceError, PostError, RecvWr, SrqConfig};

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pub(super) shared: Arc<SharedRecvQueue>,
    cursor: PostCursor,
    /// Keeps the device open.
    pub(super) handle: Arc<DeviceHandle>,
}

impl Srq {
    #[inline]
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.shared.post(&mut self.cursor, wr, 1).map(|_| ())
    }

    pub(crate) fn post_recvs(&mut self, wr: &RecvWr<'_>, count: u32) -> Result<u32, PostError> {
        self.shared.post(&mut self.cursor, wr, count)
    }
}

impl Pd {
    pub(crate) fn create_srq(&self, pd: u32, config: &SrqConfig) -> Result<Srq, DeviceError> {
        let device = &self.handle.device;
        check_limit("receives", config.max_wr, device.attr.max_srq_wr)?;
        check_limit("scatter/gather entries per receive", config.max_sge, device.attr.max_sge)?;
        let shared =
            Arc::new(SharedRecvQueue::new(|len| device.allocate(len), pd, config.max_wr, config.max_sge)?);
        Ok(Srq { shared, cursor: PostCursor::default(), handle: self.handle.clone() })
    }
}
