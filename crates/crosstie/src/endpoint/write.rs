//! `write`: a buffer into memory of the peer.

use core::ops::RangeBounds;

use super::buffer::Lend;
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::Kind;
use super::transfer::OneBuffer;
use crate::device::RemoteMemory;

impl Endpoint {
    /// Writes a range of a buffer into the peer's memory, at `offset` of `remote`. The peer's program takes no part and is not told; see
    /// [`write_imm`](Endpoint::write_imm).
    ///
    /// Large writes are split over the queue pairs. Operations have no order among each other, unless there is one
    /// [queue pair](super::EndpointConfig::qps), as by default: then `write`s, `write_imm`s and batches take effect in the order of the calls, so
    /// they also wait for a `write_imm` that waits for the peer.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let (buffer, remote) = (here.allocate(4096)?, there.allocate(4096)?);
    /// buffer.write(0, b"hello")?;
    /// let write = here.write(buffer, ..5, &remote.remote(), 8).map_err(|refused| refused.cause)?;
    /// let done = write.wait().map_err(|failed| failed.cause)?;
    /// assert_eq!((done.bytes, done.buffer.len()), (5, 4096));
    /// assert_eq!(&remote.to_vec()[8..13], b"hello");
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn write<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().write(buffer, range, remote, offset)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::write`].
    #[inline]
    pub fn write<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::Write, buffer, range, remote, offset)
    }
}
