//! `write_imm`: a buffer into memory of the peer, and a number for its program.

use core::ops::RangeBounds;

use super::buffer::Lend;
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::Kind;
use super::transfer::OneBuffer;
use crate::device::RemoteMemory;

impl Endpoint {
    /// Writes as [`write`](Endpoint::write) does, and then gives the peer's [`imm_recv`](Endpoint::imm_recv) an immediate: a number of the
    /// program. The bytes are in the peer's memory before the immediate is. It is never split.
    ///
    /// The peer has room for [`imm_window`](super::EndpointConfig::imm_window) immediates that its program has not taken. When it is
    /// full, the operation waits, and its deadline ends the wait. With one queue pair later transfers wait behind it.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let (buffer, remote) = (here.allocate(4096)?, there.allocate(4096)?);
    /// let write = here.write_imm(buffer, .., &remote.remote(), 0, 99).map_err(|refused| refused.cause)?;
    /// let event = there.imm_recv().map_err(|refused| refused.cause)?.wait().map_err(|failed| failed.cause)?;
    /// assert_eq!((event.imm, event.bytes), (Some(99), 4096));
    /// write.wait().map_err(|failed| failed.cause)?;
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn write_imm<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
        imm: u32,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().write_imm(buffer, range, remote, offset, imm)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::write_imm`].
    #[inline]
    pub fn write_imm<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
        remote: &RemoteMemory,
        offset: u64,
        imm: u32,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.transfer(Kind::WriteImm(imm), buffer, range, remote, offset)
    }
}
