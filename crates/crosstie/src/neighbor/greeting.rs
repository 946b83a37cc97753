//! Opening a service and joining it: both sides make sure that they mean the same messages.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crosstie_protocol::lane::MAX_LEN;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::error::{ConnectError, CreateError, Size};
use super::host::{Admission, Guests, Host, OpenError};
use super::member::{JoinError, Member};
use super::socket::Name;
use crate::message::sealed::Message;

/// What a client says first, and what the server compares it with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Greeting {
    magic: u64,
    version: u32,
    /// Bytes of a request; `ANY` if the length is free.
    request: u32,
    /// Bytes of an answer.
    response: u32,
    reserved: u32,
}

const ANY: u32 = u32::MAX;

impl Greeting {
    /// For these messages and this version of what is shared.
    pub(crate) fn new<Req: Message + ?Sized, Resp: Message + ?Sized>(magic: u64, version: u32) -> Greeting {
        let bytes = |size: Option<usize>| size.map_or(ANY, |size| u32::try_from(size).unwrap_or(ANY - 1));
        Greeting { magic, version, request: bytes(Req::SIZE), response: bytes(Resp::SIZE), reserved: 0 }
    }

    /// Why somebody who says `hello` is not let in.
    pub(crate) fn objection(&self, hello: &[u8]) -> Option<Refusal> {
        match Greeting::read_from_bytes(hello) {
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

/// What a server says to somebody whom it does not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Refusal {
    reason: u32,
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

    /// There are `limit` clients already.
    pub(crate) fn full(limit: usize) -> Refusal {
        Refusal::new(Refusal::FULL, limit as u32)
    }

    /// The server's system refused it something.
    pub(crate) fn system(error: &std::io::Error) -> Refusal {
        Refusal::new(Refusal::SYSTEM, error.raw_os_error().unwrap_or(0) as u32)
    }
}

impl From<Refusal> for Admission {
    fn from(refusal: Refusal) -> Admission {
        Admission::Refused { reply: refusal.as_bytes().to_vec() }
    }
}

/// Checks the limits of messages that a configuration names; types have a size of their own.
pub(crate) fn check_limits<Req: Message + ?Sized, Resp: Message + ?Sized>(
    request: usize,
    response: usize,
) -> Result<(), CreateError> {
    // Types without content have no bytes, which is fine.
    CreateError::check("request_limit", Req::SIZE.map_or(request, |size| size.max(1)), MAX_LEN)?;
    CreateError::check("response_limit", Resp::SIZE.map_or(response, |size| size.max(1)), MAX_LEN)
}

/// Opens a service.
pub(crate) fn open(kind: &'static str, name: &str, guests: Arc<dyn Guests>) -> Result<Host, CreateError> {
    let name = Name::new(name).map_err(|_| CreateError::BadName { name: name.to_owned() })?;
    Host::open(kind, &name, guests).map_err(|error| match error {
        OpenError::NameTaken { name } => CreateError::NameTaken { name },
        kept @ OpenError::NameKept { .. } => {
            CreateError::Os(std::io::Error::new(std::io::ErrorKind::AddrInUse, kept.to_string()))
        }
        OpenError::Os { source, .. } => CreateError::Os(source),
    })
}

/// Joins a service, within so long; returns what it said and handed over.
pub(crate) fn join(
    kind: &'static str,
    name: &str,
    greeting: &Greeting,
    patience: Duration,
) -> Result<(Member, Vec<u8>, Vec<OwnedFd>), ConnectError> {
    let valid = Name::new(name).map_err(|_| ConnectError::BadName { name: name.to_owned() })?;
    Member::join(kind, &valid, greeting.as_bytes(), patience).map_err(|error| match error {
        JoinError::NoServer { name } => ConnectError::NoServer { name },
        JoinError::OtherUser { name, uid } => ConnectError::OtherUser { name, uid },
        JoinError::OtherVersion { name } => ConnectError::OtherVersion { name },
        JoinError::Full { .. } => ConnectError::Full { limit: super::host::MAX_GUESTS },
        JoinError::Refused(reply) => refused(name, greeting, &reply),
        JoinError::Os(source) => ConnectError::Os(source),
        JoinError::NoAnswer { name, after } => ConnectError::TimedOut { name, after },
        other => ConnectError::NoAnswer { name: name.to_owned(), how: other.to_string() },
    })
}

fn refused(name: &str, ours: &Greeting, reply: &[u8]) -> ConnectError {
    let size = |bytes: u32| Size((bytes != ANY).then_some(bytes as usize));
    let name = name.to_owned();
    match Refusal::read_from_bytes(reply) {
        Ok(Refusal { reason: Refusal::OTHER_MESSAGES, request, response }) => {
            let (what, theirs, ours) = if request != ours.request {
                ("the request", request, ours.request)
            } else {
                ("the answer", response, ours.response)
            };
            ConnectError::Mismatch { what, theirs: size(theirs), ours: size(ours) }
        }
        Ok(Refusal { reason: Refusal::OTHER_VERSION, .. }) => ConnectError::OtherVersion { name },
        Ok(Refusal { reason: Refusal::FULL, request, .. }) => ConnectError::Full { limit: request as usize },
        Ok(Refusal { reason: Refusal::SYSTEM, request, .. }) => {
            let error = std::io::Error::from_raw_os_error(request as i32);
            ConnectError::NoAnswer { name, how: format!("could not make room for us: {error}") }
        }
        _ => ConnectError::Nonsense { name },
    }
}
