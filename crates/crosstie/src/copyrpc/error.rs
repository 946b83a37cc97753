//! What can go wrong.

use crosstie_protocol::copyrpc::{TermsError, Violation};

use crate::device::{CqError, DeviceError, PostError, Status};

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
        matches!(self, NotCalled::Refused(Refusal::RingFull | Refusal::NoCredit | Refusal::TooManyCalls))
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
    /// The connection is over; nobody waits.
    #[error(transparent)]
    Failed(#[from] Failure),
}
