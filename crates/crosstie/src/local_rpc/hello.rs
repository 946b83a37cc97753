//! The handshake of a service: client and server check that they use the same message types and the same version of the
//! shared layout.
//!
//! ```text
//!  hello    magic u64 | version u32 | request size u32 | response size u32 | reserved u32       client -> server
//!  refusal  reason u32 | request size, limit or errno u32 | response size u32                   server -> client
//! ```

use std::sync::Arc;
use std::time::Duration;

use crosstie_protocol::lane::MAX_LEN;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::error::{ConnectError, CreateError, MessageSize};
use crate::local::connection::{Connection, HandshakeError};
use crate::local::listener::{self, Admission, ClientHandler, ListenError, Listener};
use crate::local::socket::{Name, ReceivedFile};
use crate::message::sealed::Message;

/// What a client sends first, and what the server compares it with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Hello {
    magic: u64,
    version: u32,
    /// Size of a request in bytes; [`ANY_SIZE`] for byte strings.
    request: u32,
    /// Size of a response, likewise.
    response: u32,
    reserved: u32,
}

/// The size of messages that are byte strings of any length.
const ANY_SIZE: u32 = u32::MAX;

impl Hello {
    /// The hello for these message types and this version of the shared layout.
    pub(crate) fn new<Req: Message + ?Sized, Resp: Message + ?Sized>(magic: u64, version: u32) -> Hello {
        let bytes =
            |size: Option<usize>| size.map_or(ANY_SIZE, |size| u32::try_from(size).unwrap_or(ANY_SIZE - 1));
        Hello { magic, version, request: bytes(Req::SIZE), response: bytes(Resp::SIZE), reserved: 0 }
    }

    /// Why a client with this hello is refused. None if it fits.
    pub(crate) fn refusal_for(&self, hello: &[u8]) -> Option<Refusal> {
        match Hello::read_from_bytes(hello) {
            Ok(theirs) if theirs == *self => None,
            Ok(theirs) if (theirs.magic, theirs.version) == (self.magic, self.version) => Some(Refusal {
                reason: Refusal::OTHER_MESSAGES,
                request: self.request,
                response: self.response,
            }),
            _ => Some(Refusal::new(Refusal::OTHER_VERSION, 0)),
        }
    }
}

/// What a server sends to a client that it refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Refusal {
    reason: u32,
    /// Size of a request, the limit of clients, or an error number: the reason decides.
    request: u32,
    response: u32,
}

impl Refusal {
    const OTHER_VERSION: u32 = 1;
    const OTHER_MESSAGES: u32 = 2;
    const FULL: u32 = 3;
    const SYSTEM: u32 = 4;

    fn new(reason: u32, value: u32) -> Refusal {
        Refusal { reason, request: value, response: 0 }
    }

    /// The server has `limit` clients already.
    pub(crate) fn full(limit: usize) -> Refusal {
        Refusal::new(Refusal::FULL, limit as u32)
    }

    /// A system call of the server failed.
    pub(crate) fn system(error: &std::io::Error) -> Refusal {
        Refusal::new(Refusal::SYSTEM, error.raw_os_error().unwrap_or(0) as u32)
    }
}

impl From<Refusal> for Admission {
    fn from(refusal: Refusal) -> Admission {
        Admission::Refuse { reply: refusal.as_bytes().to_vec() }
    }
}

/// Checks the message limits of a configuration. A message type of fixed size replaces its limit.
pub(crate) fn check_message_limits<Req: Message + ?Sized, Resp: Message + ?Sized>(
    request: usize,
    response: usize,
) -> Result<(), CreateError> {
    // Types of zero bytes are valid.
    CreateError::check("request_limit", Req::SIZE.map_or(request, |size| size.max(1)), MAX_LEN)?;
    CreateError::check("response_limit", Resp::SIZE.map_or(response, |size| size.max(1)), MAX_LEN)
}

/// Opens the listener of a service.
pub(crate) fn listen(
    kind: &'static str,
    name: &str,
    handler: Arc<dyn ClientHandler>,
) -> Result<Listener, CreateError> {
    let name = Name::new(name).map_err(|_| CreateError::BadName { name: name.to_owned() })?;
    Listener::open(kind, &name, handler).map_err(|error| match error {
        ListenError::NameTaken { name } => CreateError::NameTaken { name },
        used @ ListenError::NameUsedByChild { .. } => {
            CreateError::Os(std::io::Error::new(std::io::ErrorKind::AddrInUse, used.to_string()))
        }
        ListenError::Os { source, .. } => CreateError::Os(source),
    })
}

/// Connects to a service within `timeout`. Returns the server's reply and files.
pub(crate) fn connect(
    kind: &'static str,
    name: &str,
    hello: &Hello,
    timeout: Duration,
) -> Result<(Connection, Vec<u8>, Vec<ReceivedFile>), ConnectError> {
    let valid = Name::new(name).map_err(|_| ConnectError::BadName { name: name.to_owned() })?;
    Connection::connect(kind, &valid, hello.as_bytes(), timeout).map_err(|error| match error {
        HandshakeError::NoServer { name } => ConnectError::NoServer { name },
        HandshakeError::OtherUser { name, uid } => ConnectError::OtherUser { name, uid },
        HandshakeError::OtherVersion { name } => ConnectError::OtherVersion { name },
        HandshakeError::Full { .. } => ConnectError::Full { limit: listener::MAX_CLIENTS },
        HandshakeError::Refused(reply) => refusal_error(name, hello, &reply),
        HandshakeError::Os(source) => ConnectError::Os(source),
        HandshakeError::NoReply { name, after } => ConnectError::TimedOut { name, after },
        other => ConnectError::NoResponse { name: name.to_owned(), cause: other.to_string() },
    })
}

fn refusal_error(name: &str, ours: &Hello, reply: &[u8]) -> ConnectError {
    let size = |bytes: u32| MessageSize((bytes != ANY_SIZE).then_some(bytes as usize));
    let name = name.to_owned();
    match Refusal::read_from_bytes(reply) {
        Ok(Refusal { reason: Refusal::OTHER_MESSAGES, request, response }) => {
            let (what, theirs, ours) = if request != ours.request {
                ("the request", request, ours.request)
            } else {
                ("the response", response, ours.response)
            };
            ConnectError::Mismatch { what, theirs: size(theirs), ours: size(ours) }
        }
        Ok(Refusal { reason: Refusal::OTHER_VERSION, .. }) => ConnectError::OtherVersion { name },
        Ok(Refusal { reason: Refusal::FULL, request, .. }) => ConnectError::Full { limit: request as usize },
        Ok(Refusal { reason: Refusal::SYSTEM, request, .. }) => {
            let error = std::io::Error::from_raw_os_error(request as i32);
            ConnectError::NoResponse { name, cause: format!("could not allocate memory for us: {error}") }
        }
        _ => ConnectError::InvalidSegment { name },
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::fuzzing::fuzz;

    /// The first message of a client and the refusal of a server. Only the exact hello is accepted; a refusal becomes an error
    /// that can be printed.
    #[test]
    fn fuzz_local_hello() {
        let ours = Hello::new::<u64, [u8]>(7, 1);
        let refusals = [1, 2, 3, 4].map(|reason| Refusal { reason, request: 8, response: ANY_SIZE });
        let examples = refusals.iter().map(|refusal| refusal.as_bytes().to_vec());
        let examples = examples.chain([ours.as_bytes().to_vec()]).collect::<Vec<_>>();
        fuzz(env!("CARGO_MANIFEST_DIR"), "local_hello", examples, |input| {
            assert_eq!(ours.refusal_for(input).is_none(), input == ours.as_bytes());
            assert!(!refusal_error("name", &ours, input).to_string().is_empty());
        });
    }
}
