//! Errors of flux. They hand back what was not sent.

use core::fmt;

use super::{MAX_CAPACITY, MAX_NODES, Ticket};

/// Why a network could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The number of nodes is outside of its limits.
    #[error("{0} nodes: a network has 1 to {MAX_NODES} nodes")]
    Nodes(usize),
    /// The capacity is outside of its limits.
    #[error("capacity = {0}: it must be between 1 and {MAX_CAPACITY}")]
    Capacity(usize),
    /// `max_in_flight` is zero.
    #[error("max_in_flight = 0: it must be at least 1")]
    MaxInFlight,
    /// All slots together would take more than [`MAX_BYTES`](super::MAX_BYTES).
    #[error("{nodes} nodes with a capacity of {capacity} need more than {} MiB: lower one of them, or box large messages",
        super::MAX_BYTES >> 20)]
    TooLarge {
        /// The number of nodes.
        nodes: usize,
        /// The capacity.
        capacity: usize,
    },
    /// The system refuses what parking needs. [`WaitStrategy::Spin`](crate::WaitStrategy::Spin) works without.
    #[error(
        "threads cannot park: membarrier is refused ({0}); use WaitStrategy::Spin, or allow that system call"
    )]
    Parking(#[source] std::io::Error),
}

/// Why a call was not made. The request and the token are handed back.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CallError<Req, Token> {
    /// `capacity` calls of this node to the target are in flight, or have responses that were not polled. Poll, or call other
    /// nodes.
    #[error(
        "as many calls to node {target} are in flight as its capacity allows: poll, or call another node"
    )]
    Full {
        /// The target of the call.
        target: usize,
        /// The request.
        request: Req,
        /// The token.
        token: Token,
    },
    /// `max_in_flight` calls of this node are in flight, to all targets together. Poll.
    #[error("max_in_flight calls of this node are in flight: poll before calling node {target}")]
    TooManyInFlight {
        /// The target of the call.
        target: usize,
        /// The request.
        request: Req,
        /// The token.
        token: Token,
    },
    /// The target was dropped, and will never reply.
    #[error("node {target} is gone: it was dropped, or its thread panicked")]
    Gone {
        /// The target of the call.
        target: usize,
        /// The request.
        request: Req,
        /// The token.
        token: Token,
    },
    /// There is no such node.
    #[error("there is no node {target} in this network of {nodes}")]
    NoSuchNode {
        /// The target of the call.
        target: usize,
        /// The number of nodes in the network.
        nodes: usize,
        /// The request.
        request: Req,
        /// The token.
        token: Token,
    },
}

impl<Req, Token> CallError<Req, Token> {
    /// Returns the request and the token.
    pub fn into_parts(self) -> (Req, Token) {
        match self {
            CallError::Full { request, token, .. }
            | CallError::TooManyInFlight { request, token, .. }
            | CallError::Gone { request, token, .. }
            | CallError::NoSuchNode { request, token, .. } => (request, token),
        }
    }

    /// Whether the same call can succeed after a poll.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, CallError::Full { .. } | CallError::TooManyInFlight { .. })
    }
}

/// Prints no request and no token: they need not be `Debug`.
impl<Req, Token> fmt::Debug for CallError<Req, Token> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, target) = match self {
            CallError::Full { target, .. } => ("Full", target),
            CallError::TooManyInFlight { target, .. } => ("TooManyInFlight", target),
            CallError::Gone { target, .. } => ("Gone", target),
            CallError::NoSuchNode { target, .. } => ("NoSuchNode", target),
        };
        f.debug_struct(name).field("target", target).finish_non_exhaustive()
    }
}

/// Why a reply was not sent. The response is handed back.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError<Resp> {
    /// The caller was dropped; nobody waits for the response.
    #[error("node {target}, which made the call, is gone: it was dropped, or its thread panicked")]
    Gone {
        /// The node that called.
        target: usize,
        /// The response.
        response: Resp,
    },
    /// Another node received the request of this ticket, perhaps in another network. The ticket is valid there.
    #[error("the ticket is of a request that another node received: reply at that node")]
    WrongNode {
        /// The ticket.
        ticket: Ticket,
        /// The response.
        response: Resp,
    },
}

impl<Resp> fmt::Debug for ReplyError<Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplyError::Gone { target, .. } => {
                f.debug_struct("Gone").field("target", target).finish_non_exhaustive()
            }
            ReplyError::WrongNode { ticket, .. } => {
                f.debug_struct("WrongNode").field("ticket", ticket).finish_non_exhaustive()
            }
        }
    }
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
