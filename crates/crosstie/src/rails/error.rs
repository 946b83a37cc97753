//! Errors of rails.

use crosstie_protocol::rails::Violation;

use crate::bootstrap::channel::ChannelError;
use crate::device::{DeviceError, OutOfRegion};

/// A context, a listener or a connection could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// An option is invalid.
    #[error("invalid options of rails: {0}")]
    Config(&'static str),
    /// A device returned an error.
    #[error("rail {rail}: {source}")]
    Device {
        /// The rail.
        rail: usize,
        /// The error.
        source: DeviceError,
    },
    /// The operating system returned an error.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The error.
        source: std::io::Error,
    },
    /// The handle is not that of a listener.
    #[error("the handle is not one that a listener of this version returned")]
    BadHandle,
    /// The peer refused the connection, or sent something else than a handshake.
    #[error("the peer refused the connection: {0}")]
    Refused(String),
    /// The peer did not complete the handshake in time, closed the connection, or cannot be reached.
    #[error("the peer did not complete the handshake: {0}")]
    Handshake(std::io::Error),
}

impl From<ChannelError> for SetupError {
    fn from(error: ChannelError) -> SetupError {
        match error {
            ChannelError::Io(source) => SetupError::Handshake(source),
            ChannelError::Rejected(_) => SetupError::Refused(
                "one end does not know the secret of the handle: use the handle of a listener that still listens".into(),
            ),
            ChannelError::Closed | ChannelError::ClosedBeforeHandshake => {
                SetupError::Handshake(std::io::Error::new(std::io::ErrorKind::ConnectionReset, error))
            }
            error => SetupError::Handshake(std::io::Error::other(error)),
        }
    }
}

/// Why a connection ended. All its requests end with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The program closed the connection. No request is left that could end with it.
    #[error("the connection was closed here")]
    Closed,
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// The peer's process ended, or the network to it is gone.
    #[error("the peer is gone: its control connection ended without a close frame")]
    PeerGone,
    /// The peer violated the protocol.
    #[error("the peer violated the protocol: {0}")]
    Violation(#[from] Violation),
    /// The peer reported a violation of ours, or another error.
    #[error("the peer ended the connection: {0}")]
    PeerError(String),
    /// All rails were down for longer than [`Config::give_up`](super::Config::give_up).
    #[error("all rails have been down for too long: check the links, then connect again")]
    AllRailsDown,
    /// A device of the receiver failed after it had acknowledged a message to the sender, and before it reported the message.
    /// The sender has no copy any more.
    #[error(
        "a device failed between the acknowledgement and the completion of a message: the message is lost"
    )]
    LostCompletion,
    /// The program aborted the connection.
    #[error("the connection was aborted here")]
    Aborted,
    /// A message lost parts more often than it can be sent again.
    #[error("rails failed too often during one message: check the links, then connect again")]
    TooManyReplays,
}

/// A send or receive was not accepted. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The connection has ended.
    #[error(transparent)]
    Ended(#[from] Cause),
    /// The message is longer than the receiver's buffer.
    #[error("a message of {len} bytes, but the receiver has posted {room} bytes")]
    TooLong {
        /// Bytes to send.
        len: usize,
        /// Bytes of the receiver's buffer.
        room: usize,
    },
    /// The range is not inside the memory.
    #[error(transparent)]
    OutOfRegion(#[from] OutOfRegion),
    /// Too many buffers in a request, or none; or a buffer longer than any message.
    #[error("a request has 1 to {max_group} buffers of at most {max_message} bytes")]
    BadGroup {
        /// [`Config::max_group`](super::Config::max_group).
        max_group: usize,
        /// The longest message of the devices.
        max_message: u64,
    },
    /// The memory is registered in another context.
    #[error("the memory belongs to another context of rails")]
    WrongMemory,
    /// The request was completed before, or belongs to another connection.
    #[error("no such request: it has completed before, or belongs to another connection")]
    NoSuchRequest,
}
