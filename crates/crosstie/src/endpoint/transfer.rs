//! What single operations have in common: `read`, `write` and `write_imm`, with a range of a buffer here and as many bytes of a region
//! there, and `send` and `recv`, with a range of a buffer.

use core::ops::{Range, RangeBounds};

use super::buffer::{Buffer, Lend, PoolBuffer, resolve, sealed};
use super::cause::{Completed, NotStarted, Refused};
use super::endpoint::{Submit, check_remote};
use super::engine::AtOnce;
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use crate::device::{RemoteAddr, RemoteMemory};

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
        match self.check_transfer(buffer.as_ref(), range, remote, offset) {
            Ok(range) => self.start_at_once(kind, buffer, range, remote.at(offset)),
            Err(cause) => Err(Refused { cause, buffer }),
        }
    }

    /// Starts an operation that may be over at once.
    #[inline]
    pub(super) fn start_at_once<B: OneBuffer + Lend>(
        &self,
        kind: Kind,
        buffer: B,
        range: Range<usize>,
        remote: RemoteAddr,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let (shared, len) = (self.shared(), range.len() as u64);
        let at_once = shared.try_engine().map(|mut engine| {
            let at_once = engine.start_at_once(&shared.table, kind, buffer.as_ref(), &range, remote);
            (engine, at_once)
        });
        if let Some((engine, AtOnce::Completed)) = at_once {
            shared.unlock(engine);
            return Ok(OperationFuture::completed(Completed { buffer, bytes: len, imm: None }));
        }
        let stored = buffer.store();
        let operation = Operation { kind, stored, range, remote, timeout: None, bytes: 0, imm: None };
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
        let range = self.check_range(buffer, range)?;
        check_remote(remote, offset, range.len())?;
        Ok(range)
    }

    /// The range of the buffer's region, of an operation that can be started.
    #[inline]
    pub(super) fn check_range(
        &self,
        buffer: &Buffer,
        range: impl RangeBounds<usize>,
    ) -> Result<Range<usize>, NotStarted> {
        self.shared().check()?;
        let range = resolve(buffer, range).map_err(NotStarted::Local)?;
        if range.len() as u64 > self.max_message() {
            return Err(NotStarted::TooLong(range.len() as u64));
        }
        Ok(range)
    }
}
