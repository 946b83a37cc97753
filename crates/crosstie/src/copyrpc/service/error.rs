//! Errors of typed calls.

use crate::copyrpc::{CallFailed, NotCalled};

/// Why a call ended without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The connection has ended, or the deadline of the call has passed. It is not known whether the service handled the request.
    #[error(transparent)]
    Failed(#[from] CallFailed),
    /// The call cannot be made: it is too long for the connection, or that is not connected yet.
    #[error("the call cannot be made: {0}")]
    NotCalled(NotCalled),
    /// The limit of open calls of the driver is reached.
    #[error("the driver's limit of {0} open calls is reached: wait for some of them to end")]
    TooManyCalls(usize),
    /// The service has no such method.
    #[error("the service has no method {0}")]
    UnknownMethod(u32),
    /// The service could not decode the request: its method has other types.
    #[error("the service could not decode the request: build both sides with the same methods")]
    MalformedRequest,
    /// The handler refused the request.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The service dropped the request without a response.
    #[error("the service dropped the request without a response")]
    Unanswered,
    /// The response is not valid for this method.
    #[error("the response is not valid for this method: build both sides with the same methods")]
    MalformedResponse,
}

impl From<NotCalled> for Error {
    fn from(cause: NotCalled) -> Error {
        match cause {
            // One error for a connection that has ended, whether that was before the call or after.
            NotCalled::Failed(failure) => Error::Failed(failure.into()),
            cause => Error::NotCalled(cause),
        }
    }
}

/// A handler refused a request, with an application-defined code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service refused the request with code {0}")]
pub struct Refused(pub u32);
