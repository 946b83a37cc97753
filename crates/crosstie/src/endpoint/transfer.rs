//! What `read`, `write` and `write_imm` have in common: a range of a buffer here, and as many bytes of a region there.

use core::ops::RangeBounds;

use super::buffer::{Buffer, Lend, PoolBuffer, Stored, resolve, sealed};
use super::cause::{NotStarted, Refused};
use super::endpoint::{Submit, check_remote};
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
        let max = self.max_message();
        self.start(buffer, |buffer| {
            let range = resolve(buffer.as_ref(), range).map_err(NotStarted::Local)?;
            check_remote(remote, offset, range.len())?;
            if range.len() as u64 > max {
                return Err(NotStarted::TooLong(range.len() as u64));
            }
            Ok(Operation {
                kind,
                stored: Stored::None,
                range,
                remote: remote.at(offset),
                deadline: None,
                bytes: 0,
                imm: None,
            })
        })
    }
}
