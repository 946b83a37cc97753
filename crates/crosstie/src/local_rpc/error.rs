//! Errors of servers and clients, the same for [`ipc`](crate::ipc) and [`delegation`](crate::delegation).

use core::fmt;
use std::io;
use std::time::Duration;

/// Why a server could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A live server has the name.
    #[error("a live server has the name {name:?}: stop it first, or choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The name is invalid.
    #[error("{name:?} is not a valid name: use 1 to 64 letters, digits, '.', '_', '-' and '/'")]
    BadName {
        /// The name.
        name: String,
    },
    /// A field of the configuration is outside its limits.
    #[error("{what} is {value}, but must be between 1 and {limit}")]
    Limit {
        /// The name of the field.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Its largest allowed value.
        limit: usize,
    },
    /// A system call failed.
    #[error("creating the server: {0}")]
    Os(#[from] io::Error),
}

impl CreateError {
    /// Checks that a field of a configuration is between 1 and its limit.
    pub(crate) fn check(what: &'static str, value: usize, limit: usize) -> Result<(), CreateError> {
        if (1..=limit).contains(&value) { Ok(()) } else { Err(CreateError::Limit { what, value, limit }) }
    }
}

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No live server has that name.
    #[error("no live server has the name {name:?}: start the server first")]
    NoServer {
        /// The name.
        name: String,
    },
    /// The name is invalid.
    #[error("{name:?} is not a valid name: use 1 to 64 letters, digits, '.', '_', '-' and '/'")]
    BadName {
        /// The name.
        name: String,
    },
    /// A process of another user has the name.
    #[error("{name:?} is served by user {uid}: a server accepts clients of its own user only")]
    OtherUser {
        /// The name.
        name: String,
        /// The user that the server runs as.
        uid: u32,
    },
    /// The server was built with other message types.
    #[error(
        "the size of {what} is {theirs} at the server, and {ours} here: \
         build server and client with the same message types"
    )]
    Mismatch {
        /// Which message: "the request" or "the response".
        what: &'static str,
        /// The size at the server.
        theirs: MessageSize,
        /// The size here.
        ours: MessageSize,
    },
    /// The server was built from another version of this library.
    #[error(
        "the server {name:?} uses another version of the protocol: build server and client from the same release"
    )]
    OtherVersion {
        /// The name.
        name: String,
    },
    /// The server has as many clients as it may have.
    #[error("the server has {limit} clients already: disconnect one, or raise its max_clients")]
    Full {
        /// Its limit.
        limit: usize,
    },
    /// The server did not reply in time.
    #[error(
        "the server {name:?} did not reply within {after:?}: it is stopped (SIGSTOP, a debugger), or overloaded"
    )]
    TimedOut {
        /// The name.
        name: String,
        /// The timeout.
        after: Duration,
    },
    /// The server closed the connection, or could not allocate memory for this client.
    #[error("the server {name:?} did not accept the connection: {cause}")]
    NoResponse {
        /// The name.
        name: String,
        /// What happened instead.
        cause: String,
    },
    /// The server's reply, or the memory segment that it handed over, is invalid.
    #[error(
        "the server {name:?} handed over an invalid memory segment: build server and client from the same release"
    )]
    InvalidSegment {
        /// The name.
        name: String,
    },
    /// A system call failed.
    #[error("connecting: {0}")]
    Os(#[from] io::Error),
}

/// The size of a message type in bytes; `None` for byte strings, which have any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageSize(pub Option<usize>);

impl fmt::Display for MessageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(size) => write!(f, "{size} bytes"),
            None => f.write_str("any length"),
        }
    }
}

/// A call was not made. Nothing has changed, and the token is returned.
#[derive(thiserror::Error)]
#[error("{cause}")]
pub struct CallError<Token> {
    /// Why the call was not made.
    pub cause: NotCalled,
    /// The token.
    pub token: Token,
}

/// Prints no token: it need not be `Debug`.
impl<Token> fmt::Debug for CallError<Token> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallError").field("cause", &self.cause).finish_non_exhaustive()
    }
}

/// Why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotCalled {
    /// As many calls of this client are in flight as the server allows: poll, then try again.
    #[error("as many calls are in flight as the server allows: poll for responses, then try again")]
    Full,
    /// The ring that all clients share is full: let the server run, then try again.
    #[error("the request ring that all clients share is full: let the server run, then try again")]
    RingFull,
    /// The request is longer than the server allows.
    #[error("the request has {len} bytes, but the server allows at most {limit}")]
    TooLong {
        /// Bytes of the request.
        len: usize,
        /// Largest allowed length, in bytes.
        limit: usize,
    },
    /// The connection has ended.
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
}

impl NotCalled {
    /// Whether the same call can succeed later: the cause is [`Full`](NotCalled::Full) or [`RingFull`](NotCalled::RingFull).
    pub fn is_back_pressure(&self) -> bool {
        matches!(self, NotCalled::Full | NotCalled::RingFull)
    }
}

/// Why an exchange returned no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// As many calls of this client are in flight as the server allows, so no request was sent: poll, then try again.
    #[error("as many calls are in flight as the server allows: poll for responses, then try again")]
    Full,
    /// The request is longer than the server allows. It was not sent.
    #[error("the request has {len} bytes, but the server allows at most {limit}")]
    TooLong {
        /// Bytes of the request.
        len: usize,
        /// Largest allowed length, in bytes.
        limit: usize,
    },
    /// No response arrived in time. The server may still execute the request; its response is then discarded.
    #[error(
        "no response within {after:?}: the server is stopped or overloaded, and may still execute the request"
    )]
    TimedOut {
        /// The timeout.
        after: Duration,
    },
    /// The connection has ended, before or after the request was sent.
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
}

/// Why a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disconnected {
    /// The server ended, or disconnected this client.
    #[error("the server has ended or has disconnected this client: reconnect when it runs again")]
    ServerGone,
    /// The server wrote an invalid response.
    #[error("the server wrote an invalid response: it runs other code, or the shared memory was overwritten")]
    InvalidResponse,
}

/// A reply was not sent.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct ReplyError<Ticket> {
    /// Why the reply was not sent.
    pub cause: NotReplied,
    /// The ticket, if it can be used again.
    pub ticket: Option<Ticket>,
}

/// Why a reply was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReplied {
    /// The client has ended or was disconnected; nobody waits for the response.
    #[error("the client that sent the request is gone")]
    ClientGone,
    /// The response is longer than the server's `response_limit`. A shorter one can still be sent.
    #[error("the response has {len} bytes, but the server's response_limit is {limit}")]
    TooLong {
        /// Bytes of the response.
        len: usize,
        /// Largest allowed length, in bytes.
        limit: usize,
    },
    /// The ticket is from another server. It is valid there.
    #[error("the ticket is from another server: reply there")]
    WrongServer,
}

impl<Ticket> ReplyError<Ticket> {
    pub(crate) const CLIENT_GONE: ReplyError<Ticket> =
        ReplyError { cause: NotReplied::ClientGone, ticket: None };

    pub(crate) fn too_long(ticket: Ticket, len: usize, limit: usize) -> ReplyError<Ticket> {
        ReplyError { cause: NotReplied::TooLong { len, limit }, ticket: Some(ticket) }
    }
}
