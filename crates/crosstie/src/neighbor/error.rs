//! What can go wrong between a server and its clients; the same for every kind of service.

use std::io;
use std::time::Duration;

/// Why a server could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A live server has the name.
    #[error("a live server has the name {name:?}: end it first, or take another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The name is none.
    #[error("{name:?} is no name: use 1 to 64 letters, digits, '.', '_', '-' and '/'")]
    BadName {
        /// The name.
        name: String,
    },
    /// A field of the configuration is outside its limits.
    #[error("{what} is {value}, and must be between 1 and {limit}")]
    Limit {
        /// Which one.
        what: &'static str,
        /// What it was.
        value: usize,
        /// What it may be at most.
        limit: usize,
    },
    /// The system refused something.
    #[error("creating the server: {0}")]
    Os(#[from] io::Error),
}

impl CreateError {
    /// Refuses what a field of a configuration cannot be.
    pub(crate) fn check(what: &'static str, value: usize, limit: usize) -> Result<(), CreateError> {
        if (1..=limit).contains(&value) { Ok(()) } else { Err(CreateError::Limit { what, value, limit }) }
    }
}

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody serves that name.
    #[error("no live server has the name {name:?}: start it first")]
    NoServer {
        /// The name.
        name: String,
    },
    /// The name is none.
    #[error("{name:?} is no name: use 1 to 64 letters, digits, '.', '_', '-' and '/'")]
    BadName {
        /// The name.
        name: String,
    },
    /// Another user's process has the name.
    #[error("{name:?} is served by user {uid}: a server serves its own user only")]
    OtherUser {
        /// The name.
        name: String,
        /// Whose it is.
        uid: u32,
    },
    /// The server's messages are others than ours.
    #[error(
        "{what} of the server has {theirs}, ours {ours} (bytes; none: any length): \
         build both from the same definitions"
    )]
    Mismatch {
        /// Which message, or what else.
        what: &'static str,
        /// What the server has; `None` for raw bytes.
        theirs: Size,
        /// What we have.
        ours: Size,
    },
    /// The server was built from another version of this library.
    #[error("the server of {name:?} speaks another version: build both sides from the same release")]
    OtherVersion {
        /// The name.
        name: String,
    },
    /// The server has as many clients as it may have.
    #[error("the server has {limit} clients already: end one, or raise its max_clients")]
    Full {
        /// Its limit.
        limit: usize,
    },
    /// The server did not answer in time.
    #[error(
        "the server of {name:?} did not answer within {after:?}: it is stopped (SIGSTOP, a debugger), or overloaded"
    )]
    TimedOut {
        /// The name.
        name: String,
        /// How long it had.
        after: Duration,
    },
    /// The server hung up, or has no room for us.
    #[error("the server of {name:?} {how}")]
    NoAnswer {
        /// The name.
        name: String,
        /// What it did instead.
        how: String,
    },
    /// What the server handed over makes no sense.
    #[error("the server of {name:?} handed over memory that makes no sense")]
    Nonsense {
        /// The name.
        name: String,
    },
    /// The system refused something.
    #[error("connecting: {0}")]
    Os(#[from] io::Error),
}

/// The size of a message type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub Option<usize>);

impl core::fmt::Display for Size {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0 {
            Some(size) => size.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Why a call was not made. The token comes back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError<Token> {
    /// As many calls as the server allows are unanswered: poll, then try again.
    #[error("as many calls as the server allows are unanswered: poll, then try again")]
    Full(Token),
    /// The ring that all clients share is full: let the server run, then try again.
    #[error("the ring that all clients share is full: let the server run, then try again")]
    RingFull(Token),
    /// The request is longer than the server allows.
    #[error("the request has {len} bytes, the server allows {limit}")]
    TooLong {
        /// The token.
        token: Token,
        /// Bytes of the request.
        len: usize,
        /// Bytes at most.
        limit: usize,
    },
    /// No answer came in time. The server may still do what was asked; its answer is nobody's.
    #[error(
        "no answer came within {after:?}: the server is stopped, or overloaded, and may still do what was asked"
    )]
    TimedOut {
        /// The token.
        token: Token,
        /// How long the server had.
        after: Duration,
    },
    /// The connection is over.
    #[error("{cause}")]
    Disconnected {
        /// The token.
        token: Token,
        /// Why.
        cause: Disconnected,
    },
}

impl<Token> CallError<Token> {
    /// The token.
    pub fn into_token(self) -> Token {
        match self {
            CallError::Full(token) | CallError::RingFull(token) => token,
            CallError::TooLong { token, .. }
            | CallError::TimedOut { token, .. }
            | CallError::Disconnected { token, .. } => token,
        }
    }

    /// Whether the same call can succeed later.
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, CallError::Full(_) | CallError::RingFull(_))
    }
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disconnected {
    /// The server ended, or cut us off.
    #[error("the server is gone, or has cut us off: reconnect when it is back")]
    ServerGone,
    /// The server wrote something that is no answer.
    #[error("the server wrote something that is no answer: it runs other code, or memory was overwritten")]
    Nonsense,
}

/// Why an answer was not given.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError<Ticket> {
    /// The client is gone; nobody waits.
    #[error("the client that asked is gone")]
    ClientGone,
    /// The answer is longer than clients expect. The ticket is still good.
    #[error("the answer has {len} bytes, clients take {limit}")]
    TooLong {
        /// To answer again with.
        ticket: Ticket,
        /// Bytes of the answer.
        len: usize,
        /// Bytes at most.
        limit: usize,
    },
    /// The ticket is another server's.
    #[error("the ticket was given out by another server")]
    Foreign(Ticket),
}
