//! Errors of contexts and connections.

use std::fmt;

use crosstie_protocol::copyrpc::{FlowParamsError, ReplyToken, Violation};

use super::RecvHandle;
use crate::device::{CqError, DeviceError, Mr, OutOfRegion, PostError, Status};

/// Why a connection could not be established.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device returned an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The peer's address is invalid, or of another protocol or version.
    #[error("invalid address of the peer: {0}")]
    Address(Violation),
    /// The sizes of the two sides are invalid.
    #[error(transparent)]
    Params(#[from] FlowParamsError),
    /// The peer's receive ring is larger than this side allows.
    #[error(
        "the peer has a receive ring of {size} bytes, but this side allows {limit}: raise max_peer_ring, or use a smaller ring there"
    )]
    PeerRing {
        /// Bytes of the peer's ring, as the peer announced it.
        size: u64,
        /// The limit of this side.
        limit: u64,
    },
    /// It is connected, or was connected before.
    #[error("a connection can be connected only once: create a new one")]
    Connected,
}

/// Why a connection has ended. Everything that was pending on it ends with this cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A work request failed: the peer died, or the network to it failed.
    #[error("the connection broke: {0}")]
    Broken(Status),
    /// The device refused a work request permanently.
    #[error("the device refused a work request: {0}")]
    Refused(PostError),
    /// The peer violated the protocol.
    #[error("the peer violated the protocol: {0}")]
    Violation(Violation),
    /// A completion queue failed, and with it every connection that uses it.
    #[error("the completion queue failed: {0}")]
    Queue(CqError),
    /// This side closed the connection.
    #[error("this side closed the connection")]
    Closed,
}

/// Why a call ended without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallFailed {
    /// The connection has ended.
    #[error(transparent)]
    Connection(#[from] Failure),
    /// The deadline of the call has passed. A response that arrives later is dropped.
    #[error("no response before the deadline of the call")]
    TimedOut,
    /// The peer's device has no memory for the long request now. The peer did not see the request, the connection goes on, and the
    /// call may succeed later.
    #[error(
        "the peer has no memory for a request of this length now: try again later, or give its device more memory"
    )]
    NoMemory,
}

/// A call was not made. Nothing has changed, and what was attached to the call is returned.
#[derive(thiserror::Error)]
#[error("{cause}")]
pub struct CallError<U> {
    /// Why the call was not made.
    pub cause: NotCalled,
    /// What was attached to the call.
    pub user: U,
}

impl<U> fmt::Debug for CallError<U> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CallError").field("cause", &self.cause).finish_non_exhaustive()
    }
}

/// Why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotCalled {
    /// There is no room for now (poll, then try again), or the call can never fit.
    #[error(transparent)]
    Refused(#[from] crosstie_protocol::copyrpc::Refusal),
    /// The device has no memory for the payload, and none is in use that could become free.
    #[error("the device has no memory for the payload: give it more memory, or configure less bulk memory")]
    NoMemory,
    /// [`connect`](super::Connection::connect) was not called yet.
    #[error("not connected to a peer: call connect first")]
    NotConnected,
    /// The connection has ended.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl NotCalled {
    /// Whether the call may succeed after a poll.
    pub fn is_back_pressure(&self) -> bool {
        use crosstie_protocol::copyrpc::Refusal;
        matches!(
            self,
            NotCalled::Refused(
                Refusal::RingFull | Refusal::NoCredit | Refusal::TooManyCalls | Refusal::NoBulkMemory
            )
        )
    }
}

/// A reply was not sent.
#[derive(thiserror::Error)]
#[error("{cause}")]
pub struct ReplyError<U> {
    /// Why the reply was not sent.
    pub cause: NotReplied,
    /// The request, if it can still be answered.
    pub request: Option<RecvHandle<U>>,
}

impl<U> fmt::Debug for ReplyError<U> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplyError { cause, request } = self;
        formatter.debug_struct("ReplyError").field("cause", cause).field("request", request).finish()
    }
}

/// Why a reply was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReplied {
    /// The response is longer than the caller allowed. A shorter one can still be sent.
    #[error("the response has {len} bytes, but the caller allowed {max}")]
    TooLong {
        /// Bytes of the response.
        len: usize,
        /// The most that the caller allowed.
        max: u64,
    },
    /// The bulk memory for responses is in use for now: poll and reply again.
    #[error("the bulk memory for responses is in use: poll and reply again")]
    NoBulkMemory,
    /// The device has no memory for a long response. A shorter one can still be sent.
    #[error("the device has no memory for the response: give it more memory, or configure less bulk memory")]
    NoMemory,
    /// The connection has ended, so nobody waits for the response.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// A reply was not sent. If it is still possible, the token is returned.
pub(super) struct NoReply {
    pub(super) cause: NotReplied,
    pub(super) token: Option<ReplyToken>,
}

impl NoReply {
    /// The connection has ended.
    pub(super) fn ended(failure: Failure) -> NoReply {
        NoReply { cause: failure.into(), token: None }
    }
}

impl NotReplied {
    /// Whether the reply may succeed after a poll.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotReplied::NoBulkMemory)
    }
}

/// A READ or WRITE was not posted. Nothing has changed, and the region is returned.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct RawError {
    /// Why the operation was not posted.
    pub cause: NotPosted,
    /// The region of the operation.
    pub region: Mr,
    /// The token of the operation.
    pub token: u64,
}

/// Why a READ or WRITE was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotPosted {
    /// The most operations are under way already: poll, then try again.
    #[error("the limit of operations under way is reached: poll and try again")]
    Full,
    /// The range is not inside the region.
    #[error(transparent)]
    Range(OutOfRegion),
    /// The device refused the operation.
    #[error("the device refused the operation: {0}")]
    Refused(PostError),
    /// [`connect`](super::Connection::connect) was not called yet.
    #[error("not connected to a peer: call connect first")]
    NotConnected,
    /// The connection has ended.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl NotPosted {
    /// Whether the operation may succeed after a poll.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotPosted::Full)
    }
}

impl From<PostError> for NotPosted {
    fn from(error: PostError) -> NotPosted {
        match error {
            PostError::Full => NotPosted::Full,
            error => NotPosted::Refused(error),
        }
    }
}
