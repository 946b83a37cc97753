//! `imm_recv`: the next immediate of the peer.

use super::buffer::Stored;
use super::cause::Refused;
use super::endpoint::{Endpoint, Submit};
use super::future::OperationFuture;
use super::operation::{Kind, Operation};
use crate::device::RemoteAddr;

impl Endpoint {
    /// Takes the next immediate that the peer's `write_imm`, or an announcement of a batch, has sent, in the order of their arrival. It
    /// does not matter whether the immediate or the call comes first. [`Completed::imm`](super::Completed::imm) is the number.
    ///
    /// It waits as long as the connection lives, unless it is started [`within`](Endpoint::within) a time. One that ends, or whose future is
    /// dropped, loses no immediate: the next call gets it.
    #[inline]
    pub fn imm_recv(&self) -> Result<OperationFuture<()>, Refused<()>> {
        self.submit_to_wait().imm_recv()
    }
}

impl Submit<'_> {
    /// See [`Endpoint::imm_recv`].
    pub fn imm_recv(&self) -> Result<OperationFuture<()>, Refused<()>> {
        self.start((), |()| {
            Ok(Operation {
                kind: Kind::ImmRecv,
                stored: Stored::None,
                range: 0..0,
                remote: RemoteAddr { addr: 0, rkey: 0 },
                timeout: None,
                bytes: 0,
                imm: None,
            })
        })
    }
}
