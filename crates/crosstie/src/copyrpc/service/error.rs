//! How calls end, other than with an answer.

use crate::copyrpc::{CallFailed, NotCalled};

/// How a call ended without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection is over, or the call's time. Whether the request was acted upon is not known.
    #[error(transparent)]
    Failed(#[from] CallFailed),
    /// It cannot be made: it is longer than the rings allow, or the endpoint is not connected.
    #[error("the call cannot be made: {0}")]
    NotCalled(NotCalled),
    /// More calls are open than the driver was made for.
    #[error("{0} calls are open, and the driver takes no more: wait for some of them")]
    TooManyCalls(usize),
    /// The service has no such method.
    #[error("the service has no method {0}")]
    UnknownMethod(u32),
    /// The service could make nothing of the request: it has another idea of the method.
    #[error("the service could not read the request: are both sides built from the same methods?")]
    MalformedRequest,
    /// The handler refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The service dropped the request without an answer.
    #[error("the service dropped the request without an answer")]
    Unanswered,
    /// The answer is none of this method.
    #[error("the answer is none of this method: are both sides built from the same methods?")]
    MalformedResponse,
}

impl From<NotCalled> for Error {
    fn from(cause: NotCalled) -> Error {
        match cause {
            // A connection that is over is the same whether it ended before the call or after.
            NotCalled::Failed(failure) => Error::Failed(failure.into()),
            cause => Error::NotCalled(cause),
        }
    }
}

/// A handler's no, with a number that means something to both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service refused, code {0}")]
pub struct Refused(pub u32);
