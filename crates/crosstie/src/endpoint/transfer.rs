//! What `read`, `write` and `write_imm` have in common: a range of a buffer here, and as many bytes of a region there.

use core::ops::{Range, RangeBounds};

use super::buffer::{Buffer, Lend, PoolBuffer, resolve, sealed};
use super::cause::{Completed, NotStarted, Refused};
use super::endpoint::{Submit, check_remote};
use super::engine::AtOnce;
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use crate::device::RemoteMemory;

/// A [`Buffer`] or a [`PoolBuffer`]: what single operations take. [`Batch`](super::Batch) is for many of them.
pub trait OneBuffer: sealed::Lend + AsRef<Buffer> {}

impl AsRef<Buffer> for Buffer {
    fn as_ref(&self) -> &Buffer {
        self
    }
}

impl AsRef<Buffer> for PoolBuffer {
    fn as_ref(&self) -> &Buffer {
        self
    }
}

impl OneBuffer for Buffer {}
impl OneBuffer for PoolBuffer {}

impl Submit<'_> {
    #[inline]
    pub(super) fn transfer<B: OneBuffer + Lend>(
        &self,
        kind: Kind,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let shared = self.shared();
        let range = match self.check_transfer(buffer.as_ref(), range, remote, offset) {
            Ok(range) => range,
            Err(cause) => return Err(Refused { cause, buffer }),
        };
        let (len, remote) = (range.len() as u64, remote.at(offset));
        let at_once = shared.try_engine().map(|mut engine| {
            let at_once = engine.transfer_at_once(&shared.table, kind, buffer.as_ref(), &range, remote);
            (engine, at_once)
        });
        if let Some((engine, AtOnce::Completed)) = at_once {
            shared.unlock(engine);
            return Ok(OperationFuture::completed(Completed { buffer, bytes: len, imm: None }));
        }
        let stored = buffer.store();
        let operation = Operation { kind, stored, range, remote, deadline: None, bytes: 0, imm: None };
        self.future(match at_once {
            Some((engine, AtOnce::Posted)) => shared.adopt(engine, operation, self.timeout),
            Some((engine, _)) => shared.start_with(engine, operation, self.timeout),
            None => shared.submit(operation, self.timeout),
        })
    }

    /// The range of the buffer's region.
    #[inline]
    fn check_transfer(
        &self,
        buffer: &Buffer,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<Range<usize>, NotStarted> {
        self.shared().check()?;
        let range = resolve(buffer, range).map_err(NotStarted::Local)?;
        check_remote(remote, offset, range.len())?;
        if range.len() as u64 > self.max_message() {
            return Err(NotStarted::TooLong(range.len() as u64));
        }
        Ok(range)
    }
}
