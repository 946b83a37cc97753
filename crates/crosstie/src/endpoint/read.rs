//! `read`: bytes of the peer into a buffer.

use core::ops::RangeBounds;

use super::buffer::Lend;
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::Kind;
use super::transfer::OneBuffer;
use crate::device::RemoteMemory;

impl Endpoint {
    /// Reads bytes of the peer's memory at `offset` of `remote` into a range of a buffer. The peer's program takes no part.
    ///
    /// Large reads are split over the queue pairs. One operation moves at most [`DeviceAttr::max_message`](crate::device::DeviceAttr)
    /// bytes; a [`Batch`](super::Batch) moves any number.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let remote = there.allocate(4096)?;
    /// remote.write(100, b"over there")?;
    /// let read = here.read(here.allocate(10)?, .., &remote.remote(), 100).map_err(|refused| refused.cause)?;
    /// let done = read.wait().map_err(|failed| failed.cause)?;
    /// assert_eq!(done.buffer.to_vec(), b"over there");
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn read<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().read(buffer, range, remote, offset)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::read`].
    #[inline]
    pub fn read<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::Read, buffer, range, remote, offset)
    }
}
