//! What can go wrong.

use crosstie_protocol::copyrpc::{TermsError, Violation};

use crate::device::{CqError, DeviceError, Mr, OutOfRegion, PostError, Status};

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The peer's address is none, or of another protocol or version.
    #[error("the peer's address: {0}")]
    Address(Violation),
    /// The sizes of the two sides do not go together.
    #[error(transparent)]
    Terms(#[from] TermsError),
    /// It is connected already, or was.
    #[error("the endpoint is connected already: create another one")]
    Connected,
}

/// Why a connection is over. Everything that was pending on it ends with this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A request of ours failed: the peer died, or the way to it.
    #[error("the connection broke: {0}")]
    Broken(Status),
    /// The device refused a request for good.
    #[error("the device refused a request: {0}")]
    Refused(PostError),
    /// The peer broke the rules.
    #[error("the peer broke the protocol: {0}")]
    Violation(Violation),
    /// A completion queue failed, and with it everything that uses it.
    #[error("the completion queue failed: {0}")]
    Queue(CqError),
    /// Closed by this side.
    #[error("the endpoint was closed here")]
    Closed,
    /// The device has no memory for a bulk request of the peer, and none will come back.
    #[error("the device has no memory for a bulk request: give it more, or configure less bulk memory")]
    NoMemory,
}

/// How a call ended without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallFailed {
    /// The connection is over.
    #[error(transparent)]
    Connection(#[from] Failure),
    /// The time that the caller gave it is over. An answer that comes later is dropped.
    #[error("no answer in the time that the call was given")]
    TimedOut,
}

/// Why a call was not made. What was attached to it comes back; nothing has changed.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct CallError<U> {
    /// Why.
    pub cause: NotCalled,
    /// What was attached.
    pub user: U,
}

/// Why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotCalled {
    /// The peer's ring, its credit or the table of calls is used up for now: poll, then try again.
    #[error(transparent)]
    Refused(#[from] crosstie_protocol::copyrpc::Refusal),
    /// The request or the response is longer than any message can be.
    #[error("{0} bytes are longer than any message")]
    TooLong(usize),
    /// The device has no memory for the payload, and none will come back.
    #[error("the device has no memory for the payload: give it more, or configure less bulk memory")]
    NoMemory,
    /// Not connected yet.
    #[error("the endpoint is not connected yet")]
    NotConnected,
    /// The connection is over.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl NotCalled {
    /// Whether polling may help.
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

/// Why an answer was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReplied {
    /// Longer than the caller allowed; the request can still be answered.
    #[error("the answer has {len} bytes, the caller allowed {max}")]
    TooLong {
        /// Bytes of the answer.
        len: usize,
        /// Bytes at most.
        max: u64,
    },
    /// The memory for long answers is in use for now; poll, and answer again.
    #[error("the bulk memory for answers is in use: poll and answer again")]
    NoBulkMemory,
    /// The device has no memory for a long answer; the request can still be answered with less.
    #[error("the device has no memory for the answer: give it more, or configure less bulk memory")]
    NoMemory,
    /// The connection is over; nobody waits.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl NotReplied {
    /// Whether polling may help.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotReplied::NoBulkMemory)
    }
}

/// Why a READ or WRITE was not begun. The region comes back; nothing has happened.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct RawError {
    /// Why.
    pub cause: NotPosted,
    /// As given.
    pub region: Mr,
    /// As given.
    pub token: u64,
}

/// Why a READ or WRITE was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotPosted {
    /// As many are under way as there can be: poll, then try again.
    #[error("as many operations are under way as there can be: poll and try again")]
    Full,
    /// The range is not inside the region.
    #[error(transparent)]
    Range(OutOfRegion),
    /// The device refused it.
    #[error("the device refused the operation: {0}")]
    Refused(PostError),
    /// Not connected yet.
    #[error("the endpoint is not connected yet")]
    NotConnected,
    /// The connection is over.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl NotPosted {
    /// Whether polling may help.
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
