//! How operations end, and why they are not started.

use core::fmt;

use crosstie_protocol::endpoint::batch::BlockError;
use crosstie_protocol::endpoint::message::Violation;
use crosstie_protocol::region::Rights;

use super::config::PathPolicy;
use crate::device::{DeviceError, OutOfRegion, QpAddress, Status};

/// Why an operation ended without success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The program cancelled it, or dropped its future.
    #[error("cancelled")]
    Cancelled,
    /// Its deadline has passed. It may still take effect.
    #[error("the deadline has passed")]
    TimedOut,
    /// The peer refused the address: wrong key, bounds or access right. The connection has ended.
    #[error("the peer refused the memory: {0}")]
    RemoteAccess(Status),
    /// The peer does not respond: it has died, or the network to it has failed.
    #[error("the peer is gone: {0}")]
    RemoteGone(Status),
    /// Local memory could not be accessed.
    #[error("local memory: {0}")]
    LocalProtection(Status),
    /// Another operation failed first, and the connection ended with it. It may or may not have taken effect.
    #[error("the connection ended first")]
    Flushed,
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// This side closed the connection.
    #[error("this side closed the connection")]
    Closed,
    /// The peer violated the protocol.
    #[error("the peer violated the protocol")]
    Violation,
    /// Of a `send`: the message is longer than the buffer that the peer has announced for it. The buffer is still there for a shorter one.
    /// Of a `recv`: a message waits that is longer than the buffer. It is still there for a `recv` with a longer one.
    #[error("the message is longer than the receiver's buffer")]
    TooLong,
    /// The device refused or failed the operation.
    #[error("the device failed: {0}")]
    Device(Status),
    /// The device did not accept a work request; the value is an errno, or zero.
    #[error("the device did not accept the request: errno {0}")]
    NotAccepted(u8),
}

impl Cause {
    /// The status of the device, if the device said how the operation ended.
    pub fn status(self) -> Option<Status> {
        match self {
            Cause::RemoteAccess(status)
            | Cause::RemoteGone(status)
            | Cause::LocalProtection(status)
            | Cause::Device(status) => Some(status),
            Cause::Flushed => Some(Status::Flushed),
            _ => None,
        }
    }

    /// Whether the same operation may succeed later: perhaps on a new connection, perhaps after a while. `false`: something must be
    /// corrected first.
    pub fn is_retryable(self) -> bool {
        match self {
            Cause::TimedOut
            | Cause::RemoteGone(_)
            | Cause::Flushed
            | Cause::PeerClosed
            | Cause::Device(_)
            | Cause::NotAccepted(_) => true,
            Cause::Cancelled
            | Cause::RemoteAccess(_)
            | Cause::LocalProtection(_)
            | Cause::Closed
            | Cause::Violation
            | Cause::TooLong => false,
        }
    }

    /// The cause of a work request that ended with this status.
    pub(super) fn of_status(status: Status) -> Cause {
        match status {
            Status::RemoteAccess | Status::RemoteInvalidRequest => Cause::RemoteAccess(status),
            Status::RetryExceeded
            | Status::ResponseTimeout
            | Status::RnrRetryExceeded
            | Status::RemoteAborted => Cause::RemoteGone(status),
            Status::LocalProtection | Status::LocalAccess | Status::LocalLength => {
                Cause::LocalProtection(status)
            }
            Status::Flushed => Cause::Flushed,
            status => Cause::Device(status),
        }
    }

    /// As a number for the state word: kind and detail.
    pub(super) fn encode(self) -> u16 {
        let (kind, detail) = match self {
            Cause::Cancelled => (1, 0),
            Cause::TimedOut => (2, 0),
            Cause::RemoteAccess(status) => (3, status as u8),
            Cause::RemoteGone(status) => (4, status as u8),
            Cause::LocalProtection(status) => (5, status as u8),
            Cause::Flushed => (6, 0),
            Cause::PeerClosed => (7, 0),
            Cause::Closed => (8, 0),
            Cause::Violation => (9, 0),
            Cause::TooLong => (10, 0),
            Cause::Device(status) => (11, status as u8),
            Cause::NotAccepted(errno) => (12, errno),
        };
        kind << 8 | u16::from(detail)
    }

    /// The cause with this number; `None` for success.
    pub(super) fn decode(code: u16) -> Option<Cause> {
        let status = Status::from_code(code as u8);
        Some(match code >> 8 {
            0 => return None,
            1 => Cause::Cancelled,
            2 => Cause::TimedOut,
            3 => Cause::RemoteAccess(status),
            4 => Cause::RemoteGone(status),
            5 => Cause::LocalProtection(status),
            6 => Cause::Flushed,
            7 => Cause::PeerClosed,
            8 => Cause::Closed,
            9 => Cause::Violation,
            10 => Cause::TooLong,
            11 => Cause::Device(status),
            _ => Cause::NotAccepted(code as u8),
        })
    }
}

/// The number of success in the state word.
pub(super) const SUCCESS: u16 = 0;

/// The other side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer(pub(super) QpAddress);

impl Peer {
    /// The address of its first queue pair.
    pub fn address(&self) -> QpAddress {
        self.0
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("peer ")?;
        self.0.device.gid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, ", queue pair {:#x}", self.0.qp_num)
    }
}

/// An operation was not started. Nothing has changed, and the buffer is returned.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct Refused<B> {
    /// Why.
    pub cause: NotStarted,
    /// The buffer of the operation.
    pub buffer: B,
}

/// Why an operation was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotStarted {
    /// The limit of operations in flight is reached: wait for one of them.
    #[error("{0} operations are in flight: wait for one of them, or raise EndpointConfig::operations")]
    TooManyOperations(u32),
    /// The endpoint is not connected.
    #[error("the endpoint is not connected: call connect first")]
    NotConnected,
    /// The connection has ended.
    #[error("the connection has ended: {0}; call reopen, exchange addresses and connect again")]
    Ended(Cause),
    /// The range is not inside the buffer.
    #[error("local buffer: {0}")]
    Local(OutOfRegion),
    /// The range is not inside the peer's region.
    #[error("remote region: {len} bytes at offset {offset} are not inside its {region} bytes")]
    Remote {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Size of the region.
        region: u64,
    },
    /// The description of a remote region does not come from the connected peer, or comes from before it was restarted.
    #[error(
        "the remote region belongs to another device than the connected peer's, or to the peer before it was restarted: get a new one"
    )]
    ForeignRegion,
    /// The peer has not given these rights on its region.
    #[error("the peer does not allow this on its region: {0:?}")]
    MissingRights(Rights),
    /// The device cannot move so many bytes at once.
    #[error("{0} bytes are more than one operation of this kind can move")]
    TooLong(u64),
    /// A batch has no blocks.
    #[error("the batch has no blocks")]
    Empty,
    /// A block of the batch is not inside its buffer or region.
    #[error("block {index} is not inside its {}", if *.is_local { "local buffer" } else { "remote region" })]
    Block {
        /// Number of the block.
        index: u32,
        /// Which of both.
        is_local: bool,
    },
    /// Announcements are for batches that write.
    #[error("a batch that reads announces nothing")]
    AnnouncedRead,
}

impl NotStarted {
    /// Whether the operation can be started when another has ended.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotStarted::TooManyOperations(_))
    }
}

/// Why an endpoint could not be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The peer's address is invalid.
    #[error("invalid address of the peer: {0}")]
    Address(Violation),
    /// The connection would use another kind of device than the program allows.
    #[error(
        "the connection would use {found}, but the program allows {allowed:?} only: see EndpointConfig::path"
    )]
    Path {
        /// The device that it would use.
        found: &'static str,
        /// What is allowed.
        allowed: PathPolicy,
    },
    /// The endpoint is connected, or was connected before.
    #[error("the endpoint was connected before: call reopen")]
    Connected,
    /// Too many former connections are not drained, because a peer is stopped inside an operation.
    #[error(
        "{0} former connections are not drained: a peer is stopped inside an operation; let it continue, or end it"
    )]
    NotDrained(usize),
}

/// A block or an announcement was not added to a batch.
pub type BatchError = BlockError;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_survive_the_state_word() {
        for code in 0..=21 {
            let cause = Cause::of_status(Status::from_code(code));
            assert_eq!(Cause::decode(cause.encode()), Some(cause));
        }
        for cause in [
            Cause::Cancelled,
            Cause::TimedOut,
            Cause::PeerClosed,
            Cause::Closed,
            Cause::Violation,
            Cause::TooLong,
            Cause::NotAccepted(12),
        ] {
            assert_eq!(Cause::decode(cause.encode()), Some(cause));
        }
        assert_eq!(Cause::decode(SUCCESS), None);
    }
}
