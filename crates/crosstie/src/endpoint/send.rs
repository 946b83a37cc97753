//! `send`: a message to the peer's next `recv`.

use core::ops::RangeBounds;

use super::buffer::Lend;
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::Kind;
use super::transfer::OneBuffer;
use crate::device::RemoteAddr;

impl Endpoint {
    /// Sends a range of a buffer to the peer's next [`recv`](Endpoint::recv): the k-th `send` belongs to the k-th `recv`. The bytes go straight
    /// into the buffer of that `recv`; the operation waits until the peer has announced it. Large messages are split over the queue pairs.
    ///
    /// A message that is longer than the buffer ends with [`Cause::TooLong`](super::Cause::TooLong), and the buffer stays for the next
    /// `send`. A `send` that ends before it has a buffer counts as if it had never been called.
    ///
    /// ```
    /// use crosstie::endpoint::{Endpoint, EndpointConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let here = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// let there = Endpoint::open(&"software".parse()?, &EndpointConfig::default())?;
    /// here.connect(&there.address())?;
    /// there.connect(&here.address())?;
    /// let buffer = here.allocate(4096)?;
    /// buffer.write(0, b"a message")?;
    /// let send = here.send(buffer, ..9).map_err(|refused| refused.cause)?;
    /// let recv = there.recv(there.allocate(1 << 20)?, ..).map_err(|refused| refused.cause)?;
    /// let message = recv.wait().map_err(|failed| failed.cause)?;
    /// assert_eq!(&message.buffer.to_vec()[..message.bytes as usize], b"a message");
    /// send.wait().map_err(|failed| failed.cause)?;
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn send<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().send(buffer, range)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::send`].
    #[inline]
    pub fn send<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        match self.check_range(buffer.as_ref(), range) {
            // Where it goes is known when the peer has announced a buffer.
            Ok(range) => self.start_at_once(Kind::Send, buffer, range, RemoteAddr { addr: 0, rkey: 0 }),
            Err(cause) => Err(Refused { cause, buffer }),
        }
    }
}
