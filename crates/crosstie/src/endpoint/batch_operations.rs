//! `write_batch` and `read_batch`: thousands of blocks in one operation.

use super::batch::Batch;
use super::buffer::Stored;
use super::cause::{NotStarted, Refused};
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use crate::device::RemoteAddr;

impl Endpoint {
    /// Writes the blocks of a batch. The result has the batch, with its buffers and, after a failure, the numbers of the blocks that
    /// [failed](Batch::failures).
    ///
    /// The blocks are checked against their buffers and regions first. The call posts as many work requests as the send queues have
    /// room for; the progress thread, or [`progress`](Endpoint::progress), posts the rest.
    pub fn write_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.submit().write_batch(batch)
    }

    /// Reads the blocks of a batch, see [`write_batch`](Endpoint::write_batch).
    pub fn read_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.submit().read_batch(batch)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::write_batch`].
    pub fn write_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.batch(Kind::WriteBatch, batch)
    }

    /// See [`Endpoint::read_batch`].
    pub fn read_batch(&self, batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        self.batch(Kind::ReadBatch, batch)
    }

    fn batch(&self, kind: Kind, mut batch: Batch) -> Result<OperationFuture<Batch>, Refused<Batch>> {
        batch.0.failures.clear();
        batch.0.work_requests = 0;
        self.start(batch, |batch| {
            batch.check()?;
            if kind == Kind::ReadBatch && batch.0.blocks.announcements() > 0 {
                return Err(NotStarted::AnnouncedRead);
            }
            Ok(Operation {
                kind,
                stored: Stored::None,
                range: 0..0,
                remote: RemoteAddr { addr: 0, rkey: 0 },
                timeout: None,
                bytes: 0,
                imm: None,
            })
        })
    }
}
