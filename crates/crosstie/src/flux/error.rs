//! What can go wrong, and what comes back then.

use core::fmt;

use super::{MAX_CAPACITY, MAX_NODES, Ticket};

/// A network that cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No node, or too many.
    #[error("a network of {0} nodes: there can be 1 to {MAX_NODES}")]
    Nodes(usize),
    /// No call at a time, or too many.
    #[error("a capacity of {0} calls for each pair of nodes: it can be 1 to {MAX_CAPACITY}")]
    Capacity(usize),
    /// No call at a time.
    #[error("with max_in_flight = 0 no node could call: it must be at least 1")]
    MaxInFlight,
    /// All slots together would take more than [`MAX_BYTES`](super::MAX_BYTES).
    #[error("{nodes} nodes with a capacity of {capacity} take more than {} MiB: lower one of them, or box large messages",
        super::MAX_BYTES >> 20)]
    TooLarge {
        /// Nodes asked for.
        nodes: usize,
        /// Capacity asked for.
        capacity: usize,
    },
    /// The system refuses what parking needs. [`WaitStrategy::Spin`](crate::WaitStrategy::Spin) works without.
    #[error(
        "threads cannot park: membarrier is refused ({0}); use WaitStrategy::Spin, or allow that system call"
    )]
    Parking(#[source] std::io::Error),
}

/// A call that was not made. Request and token come back.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CallError<Req, Token> {
    /// The target has `capacity` calls of this node, unanswered or answered and not polled. Poll, or call others.
    #[error("node {target} has as many calls of this node as it has room for: poll, or call another node")]
    Full {
        /// Whom the call was for.
        target: usize,
        /// As given.
        request: Req,
        /// As given.
        token: Token,
    },
    /// This node has `max_in_flight` calls under way, to all targets together. Poll.
    #[error("as many calls are under way as this node may have: poll before calling node {target}")]
    TooManyInFlight {
        /// Whom the call was for.
        target: usize,
        /// As given.
        request: Req,
        /// As given.
        token: Token,
    },
    /// The target was dropped, and will never answer.
    #[error("node {target} is gone: it was dropped, or its thread panicked")]
    Gone {
        /// Whom the call was for.
        target: usize,
        /// As given.
        request: Req,
        /// As given.
        token: Token,
    },
    /// There never was such a node.
    #[error("there is no node {target} in this network of {nodes}")]
    NoSuchNode {
        /// Whom the call was for.
        target: usize,
        /// How many nodes there are.
        nodes: usize,
        /// As given.
        request: Req,
        /// As given.
        token: Token,
    },
}

impl<Req, Token> CallError<Req, Token> {
    /// What was to be sent, and the token.
    pub fn into_parts(self) -> (Req, Token) {
        match self {
            CallError::Full { request, token, .. }
            | CallError::TooManyInFlight { request, token, .. }
            | CallError::Gone { request, token, .. }
            | CallError::NoSuchNode { request, token, .. } => (request, token),
        }
    }

    /// Whether the same call can succeed later: after a poll.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, CallError::Full { .. } | CallError::TooManyInFlight { .. })
    }
}

/// Requests and tokens need not be printable.
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

/// A reply that reached nobody. The response comes back.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError<Resp> {
    /// The caller was dropped. Nobody waits for this reply.
    #[error("node {target}, which called, is gone: it was dropped, or its thread panicked")]
    Gone {
        /// Who called.
        target: usize,
        /// As given.
        response: Resp,
    },
    /// The request was received by another node, or in another network. The ticket is good there.
    #[error("this ticket is of a request that another node received: reply there")]
    WrongNode {
        /// As given.
        ticket: Ticket,
        /// As given.
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

/// A call that will never be answered, because its target is gone.
#[derive(Debug, PartialEq, Eq)]
pub struct Lost<Req, Token> {
    /// Whom the call was for.
    pub target: usize,
    /// The call's token.
    pub token: Token,
    /// The request, if the target never received it; then it had no effect. None if it did: what became of it, nobody
    /// knows.
    pub request: Option<Req>,
}
