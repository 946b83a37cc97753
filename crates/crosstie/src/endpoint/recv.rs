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
    /// The peer is told of the buffer, and writes into it. So a `recv` that is cancelled or times out keeps its buffer until its
    /// message has arrived, or until the connection has ended and is drained.
    #[inline]
    pub fn recv<B: OneBuffer + Lend>(
        &self,
        buffer: B,
        range: impl RangeBounds<usize>,
    ) -> Result<OperationFuture<B>, Refused<B>> {
        self.submit().recv(buffer, range)
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
                kind: Kind::Recv,
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
