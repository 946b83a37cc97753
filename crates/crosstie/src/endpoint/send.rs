//! `send`: a message to the peer's next `recv`.

use core::ops::RangeBounds;

use super::buffer::{Lend, Stored, resolve};
use super::cause::{NotStarted, Refused};
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use super::transfer::OneBuffer;

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
    pub fn send<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        let max = self.max_message();
        self.start(buffer, |buffer| {
            let buffer = buffer.as_ref();
            let range = resolve(buffer, range).map_err(NotStarted::Local)?;
            if range.len() as u64 > max {
                return Err(NotStarted::TooLong(range.len() as u64));
            }
            let remote = buffer.region().remote().at(range.start as u64);
            Ok(Operation {
                kind: Kind::Send,
                stored: Stored::None,
                range,
                remote,
                deadline: None,
                bytes: 0,
                imm: None,
            })
        })
    }
}
