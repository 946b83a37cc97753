//! `recv`: the next message of the peer.

use core::ops::RangeBounds;

use super::buffer::{Lend, Stored};
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use super::transfer::OneBuffer;

impl Endpoint {
    /// Receives the next message of the peer into a range of a buffer, see [`send`](Endpoint::send).
    /// [`Completed::bytes`](super::Completed::bytes) is the length of the message.
    ///
    /// It waits as long as the connection lives, unless it is started [`within`](Endpoint::within) a time. One that ends before its message
    /// came loses no message: the next `recv` gets it, also if the peer had sent it by then. A `recv` whose buffer is too short for a message
    /// that waits so ends with [`Cause::TooLong`](super::Cause::TooLong), and the message stays for the next one.
    ///
    /// The peer knows the buffer and may write into it, so a `recv` that ends early keeps it until the peer has answered that it does not, or
    /// until the connection has ended and is drained.
    #[inline]
    pub fn recv<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit_to_wait().recv(buffer, range)
    }
}

impl Submit<'_> {
    /// See [`Endpoint::recv`].
    pub fn recv<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.start(buffer, |buffer| {
            let buffer = buffer.as_ref();
            let range = self.check_range(buffer, range)?;
            let remote = buffer.region().remote().at(range.start as u64);
            Ok(Operation {
                kind: Kind::Recv(0),
                stored: Stored::None,
                range,
                remote,
                timeout: None,
                bytes: 0,
                imm: None,
            })
        })
    }
}
