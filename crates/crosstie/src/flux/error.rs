//! Errors of flux. They hand back what was not sent.

use core::fmt;

use super::Ticket;

/// Why a network could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The number of nodes, or a field of the configuration, is outside its limits.
    #[error("{what} is {value}, but must be between 1 and {limit}")]
    Limit {
        /// The name of the field; "nodes" for the number of nodes.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Its largest allowed value.
        limit: usize,
    },
    /// All slots together would take more than [`MAX_BYTES`](super::MAX_BYTES).
    #[error("{nodes} nodes with a queue_depth of {queue_depth} need more than {} MiB: lower one of them, or box large messages",
        super::MAX_BYTES >> 20)]
    TooLarge {
        /// The number of nodes.
        nodes: usize,
        /// The queue depth.
        queue_depth: usize,
    },
    /// The system refuses what parking needs. [`WaitStrategy::Spin`](crate::WaitStrategy::Spin) works without.
    #[error(
        "threads cannot park: membarrier is refused ({0}); use WaitStrategy::Spin, or allow that system call"
    )]
    Parking(#[source] std::io::Error),
}

impl CreateError {
    /// Checks that a number is between 1 and its limit.
    pub(super) fn check(what: &'static str, value: usize, limit: usize) -> Result<(), CreateError> {
        if (1..=limit).contains(&value) { Ok(()) } else { Err(CreateError::Limit { what, value, limit }) }
    }
}

/// A call was not made. Nothing has changed, and the request and the token are returned.
#[derive(thiserror::Error)]
#[error("{cause}")]
pub struct CallError<Req, Token> {
    /// Why the call was not made.
    pub cause: NotCalled,
    /// The request.
    pub request: Req,
    /// The token.
    pub token: Token,
}

/// Prints no request and no token: they need not be `Debug`.
impl<Req, Token> fmt::Debug for CallError<Req, Token> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallError").field("cause", &self.cause).finish_non_exhaustive()
    }
}

/// Why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotCalled {
    /// `queue_depth` calls of this node to the target are in flight, or have responses that were not polled. Poll, or call other
    /// nodes.
    #[error("as many calls to node {target} are in flight as queue_depth allows: poll, or call another node")]
    Full {
        /// The target of the call.
        target: usize,
    },
    /// `max_in_flight` calls of this node are in flight, to all targets together. Poll.
    #[error("max_in_flight calls of this node are in flight: poll, then try again")]
    TooManyInFlight,
    /// The target was dropped, and will never reply.
    #[error("node {target} is gone: it was dropped, or its thread panicked")]
    NodeGone {
        /// The target of the call.
        target: usize,
    },
    /// There is no such node.
    #[error("there is no node {target} in this network of {nodes}")]
    NoSuchNode {
        /// The target of the call.
        target: usize,
        /// The number of nodes in the network.
        nodes: usize,
    },
}

impl NotCalled {
    /// Whether the same call can succeed after a poll.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotCalled::Full { .. } | NotCalled::TooManyInFlight)
    }
}

/// A reply was not sent. The response is returned.
#[derive(thiserror::Error)]
#[error("{cause}")]
pub struct ReplyError<Resp> {
    /// Why the reply was not sent.
    pub cause: NotReplied,
    /// The response.
    pub response: Resp,
    /// The ticket, if it can be used again.
    pub ticket: Option<Ticket>,
}

/// Prints no response: it need not be `Debug`.
impl<Resp> fmt::Debug for ReplyError<Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReplyError { cause, ticket, .. } = self;
        f.debug_struct("ReplyError").field("cause", cause).field("ticket", ticket).finish_non_exhaustive()
    }
}

/// Why a reply was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReplied {
    /// The node that sent the request was dropped; nobody waits for the response.
    #[error("the node that sent the request is gone: it was dropped, or its thread panicked")]
    ClientGone,
    /// Another node received the request of this ticket, perhaps in another network. The ticket is valid there.
    #[error("the ticket is of a request that another node received: reply there")]
    WrongNode,
}

/// A call that will never get a response, because its target is gone.
#[derive(Debug, PartialEq, Eq)]
pub struct Lost<Req, Token> {
    /// The target of the call.
    pub target: usize,
    /// The token of the call.
    pub token: Token,
    /// The request, if the target never received it; then it had no effect. None if the target received it: it may or may not
    /// have been executed.
    pub request: Option<Req>,
}
