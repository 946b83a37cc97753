//! One connection between two processes that know a secret, for services that outlive the start of a job.
//!
//! [`Bootstrap`](super::Bootstrap) serves all ranks at once, and ends with the first that dies. A channel is between two:
//! one dials, the other listens. They prove the secret to each other before anything else is read, and exchange tagged
//! frames then; the bytes are those of the [rendezvous](super::tcp). A channel never waits, so that one thread can hold
//! many: poll its file descriptor, then take its [news](Channel::poll_event).
//!
//! ```
//! use crosstie::bootstrap::channel::{Channel, Event};
//! use crosstie::bootstrap::Secret;
//! use std::net::TcpListener;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let secret = Secret::random()?.derive("greetings");
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let mut dialler = Channel::connect(listener.local_addr()?, 1, 2, &secret, 1 << 10)?;
//! let mut listening = Channel::from_accepted(listener.accept()?.0, &secret, 1 << 10)?;
//! let heard = loop {
//!     match dialler.poll_event()? {
//!         Some(Event::Open) => dialler.send(7, b"hello")?,
//!         _ => std::thread::yield_now(),
//!     }
//!     match listening.poll_event()? {
//!         Some(Event::JoinRequest { rank: 1, size: 2 }) => listening.accept_join()?,
//!         Some(Event::Frame { kind: 7, payload }) => break payload,
//!         _ => {}
//!     }
//! };
//! assert_eq!(heard, b"hello");
//! # Ok(()) }
//! ```

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::error::{Error, Violation};
use super::frame::{Opener, Sealer};
use super::handshake::{CLAIM, NONCE, Transcript, VERDICT, Verdict};
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::is_momentary;

/// Bytes that may wait to be written. A peer that reads none of them is as good as gone.
pub const MAX_UNSENT: usize = 1 << 20;

/// An end of a connection. See the [module](self).
pub struct Channel {
    stream: TcpStream,
    secret: Secret,
    limit: usize,
    stage: Stage,
    /// What came before the proof held.
    received: Vec<u8>,
    unsent: Vec<u8>,
}

/// What a channel has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Who dialled knows the secret, and says that it is this rank of so many: [accept](Channel::accept_join) it, or refuse.
    Claim {
        /// Its rank.
        rank: u32,
        /// How many ranks it counts.
        size: u32,
    },
    /// Our dialling was accepted: frames may be sent.
    Open,
    /// The other side sent this.
    Frame {
        /// What it is.
        kind: u8,
        /// What it carries.
        payload: Vec<u8>,
    },
}

/// Why a channel is over. There is nothing to be done but to drop it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The other side closed it, or went away.
    #[error("the other side has closed the connection")]
    Closed,
    /// The system says so.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The other side does not know the secret, or refuses us.
    #[error(transparent)]
    Refused(Error),
    /// What came is no frame of the other side's.
    #[error("the other side broke the protocol: {0}")]
    Violation(Violation),
    /// The other side does not read.
    #[error("the other side has left {MAX_UNSENT} bytes unread")]
    Stalled,
}

enum Stage {
    Connecting { rank: u32, size: u32 },
    AwaitNonce { rank: u32, size: u32, member_nonce: [u8; NONCE] },
    AwaitVerdict(Transcript),
    AwaitClaim { nonce: [u8; NONCE] },
    Judging(Transcript),
    Open(Box<Frames>),
    Over,
}

struct Frames {
    sealer: Sealer,
    opener: Opener,
}

impl Channel {
    /// Begins to dial, as `rank` of `size`. `limit` is the longest payload that will be taken.
    pub fn connect(
        address: SocketAddr,
        rank: u32,
        size: u32,
        secret: &Secret,
        limit: usize,
    ) -> io::Result<Channel> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Channel::new(TcpStream::from(socket), secret, limit, Stage::Connecting { rank, size }))
    }

    /// Greets somebody that a listener accepted. `limit` is the longest payload that will be taken.
    pub fn from_accepted(stream: TcpStream, secret: &Secret, limit: usize) -> io::Result<Channel> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let nonce = random_bytes().map_err(io::Error::other)?;
        let mut channel = Channel::new(stream, secret, limit, Stage::AwaitClaim { nonce });
        channel.unsent.extend(nonce);
        Ok(channel)
    }

    fn new(stream: TcpStream, secret: &Secret, limit: usize, stage: Stage) -> Channel {
        let (received, unsent) = (Vec::with_capacity(NONCE + CLAIM), Vec::new());
        Channel { stream, secret: secret.clone(), limit, stage, received, unsent }
    }

    /// What happened, one thing at a time; `None` when there is no more for now. Writes what waits to be written.
    pub fn poll_event(&mut self) -> Result<Option<Event>, ChannelError> {
        let news = self.advance();
        if news.is_err() {
            self.stage = Stage::Over;
        }
        news
    }

    /// Answers a claim: the channel is open.
    pub fn accept_join(&mut self) -> Result<(), ChannelError> {
        let Stage::Judging(transcript) = self.stage else { return Err(ChannelError::Closed) };
        self.unsent.extend(transcript.verdict(&self.secret, Verdict::Accepted));
        let (sealer, opener) = transcript.coordinator_side(&self.secret, self.limit);
        self.stage = Stage::Open(Box::new(Frames { sealer, opener }));
        self.write()
    }

    /// Answers a claim: there is no such rank, or it is not the one to dial us.
    pub fn reject_rank(mut self) {
        self.refuse(Verdict::DuplicateRank);
    }

    /// Answers a claim: there are so many ranks.
    pub fn reject_size(mut self, size: u32) {
        self.refuse(Verdict::SizeMismatch(size));
    }

    fn refuse(&mut self, verdict: Verdict) {
        if let Stage::Judging(transcript) = self.stage {
            self.unsent.extend(transcript.verdict(&self.secret, verdict));
            // Whoever is refused may already have gone; that changes nothing here.
            drop(self.write());
        }
    }

    /// Sends a frame, as soon as the other side takes it. The payload must be within the other side's limit.
    pub fn send(&mut self, kind: u8, payload: &[u8]) -> Result<(), ChannelError> {
        let Stage::Open(frames) = &mut self.stage else { return Err(ChannelError::Closed) };
        if self.unsent.len() + payload.len() > MAX_UNSENT {
            return Err(ChannelError::Stalled);
        }
        let sealed = frames.sealer.seal(kind, Arc::from(payload));
        self.unsent.extend(sealed.head);
        self.unsent.extend_from_slice(&sealed.payload);
        self.unsent.extend(sealed.tag);
        self.write()
    }

    /// Whether frames may be sent.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open(_))
    }

    /// Whether it has something to write: then poll for that, too.
    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty() || matches!(self.stage, Stage::Connecting { .. })
    }

    fn advance(&mut self) -> Result<Option<Event>, ChannelError> {
        loop {
            if let Stage::Connecting { rank, size } = self.stage {
                if !self.has_connected()? {
                    return Ok(None);
                }
                let member_nonce = random_bytes().map_err(ChannelError::Refused)?;
                self.unsent.extend(member_nonce);
                self.stage = Stage::AwaitNonce { rank, size, member_nonce };
            }
            self.write()?;
            if let Some(news) = self.digest()? {
                return Ok(Some(news));
            }
            if !self.read()? {
                return Ok(None);
            }
        }
    }

    fn has_connected(&self) -> Result<bool, ChannelError> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error.into());
        }
        match self.stream.peer_addr() {
            // Trying a local port that nobody listens on can, by TCP's simultaneous open, end up connected to oneself.
            Ok(peer) if self.stream.local_addr()? == peer => {
                Err(ChannelError::Io(io::ErrorKind::ConnectionRefused.into()))
            }
            Ok(_) => {
                self.stream.set_nodelay(true)?;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the most of what was received.
    fn digest(&mut self) -> Result<Option<Event>, ChannelError> {
        match &mut self.stage {
            Stage::AwaitNonce { rank, size, member_nonce } => {
                let Some(&coordinator_nonce) = self.received.first_chunk::<NONCE>() else { return Ok(None) };
                let (rank, size, member_nonce) = (*rank, *size, *member_nonce);
                let transcript = Transcript { coordinator_nonce, member_nonce, rank, size };
                self.received.drain(..NONCE);
                self.unsent.extend(transcript.claim(&self.secret));
                self.stage = Stage::AwaitVerdict(transcript);
                self.write()?;
                self.digest()
            }
            Stage::AwaitVerdict(transcript) => {
                let Some(verdict) = self.received.first_chunk::<VERDICT>() else { return Ok(None) };
                let transcript = *transcript;
                match transcript.verify_verdict(&self.secret, verdict) {
                    Some(Verdict::Accepted) => {}
                    Some(Verdict::DuplicateRank) => {
                        return Err(ChannelError::Refused(Error::DuplicateRank { rank: transcript.rank }));
                    }
                    Some(Verdict::SizeMismatch(theirs)) => {
                        let ours = transcript.size;
                        return Err(ChannelError::Refused(Error::SizeMismatch { ours, theirs }));
                    }
                    None => return Err(ChannelError::Refused(self.wrong_secret())),
                }
                let (sealer, mut opener) = transcript.member_side(&self.secret, self.limit);
                opener.extend(&self.received[VERDICT..]);
                self.received = Vec::new();
                self.stage = Stage::Open(Box::new(Frames { sealer, opener }));
                Ok(Some(Event::Open))
            }
            Stage::AwaitClaim { nonce } => {
                let Some((member_nonce, claim)) = self.received.split_first_chunk::<NONCE>() else {
                    return Ok(None);
                };
                let Some(claim) = claim.first_chunk::<CLAIM>() else { return Ok(None) };
                match Transcript::verify_claim(&self.secret, *nonce, *member_nonce, claim) {
                    Some(transcript) => {
                        let (rank, size) = (transcript.rank, transcript.size);
                        self.received = Vec::new();
                        self.stage = Stage::Judging(transcript);
                        Ok(Some(Event::JoinRequest { rank, size }))
                    }
                    None => {
                        // A stranger gets nothing computed from the secret.
                        self.unsent.extend([0; VERDICT]);
                        drop(self.write());
                        Err(ChannelError::Refused(self.wrong_secret()))
                    }
                }
            }
            Stage::Open(frames) => match frames.opener.next() {
                Ok(frame) => Ok(frame.map(|frame| Event::Frame { kind: frame.kind, payload: frame.payload })),
                Err(violation) => Err(ChannelError::Violation(violation)),
            },
            Stage::Connecting { .. } | Stage::Judging(_) => Ok(None),
            Stage::Over => Err(ChannelError::Closed),
        }
    }

    fn wrong_secret(&self) -> Error {
        let peer = self.stream.peer_addr().map_or_else(|_| "the peer".to_owned(), |peer| peer.to_string());
        Error::WrongSecret { peer }
    }

    /// Reads on; whether anything came. Nothing beyond the claim is taken from somebody who is being judged.
    fn read(&mut self) -> Result<bool, ChannelError> {
        let mut buffer = [0; 4096];
        let wanted = match &self.stage {
            Stage::AwaitClaim { .. } => NONCE + CLAIM - self.received.len(),
            Stage::Judging(_) | Stage::Connecting { .. } => return Ok(false),
            _ => buffer.len(),
        };
        match self.stream.read(&mut buffer[..wanted]) {
            Ok(0) => Err(ChannelError::Closed),
            Ok(count) => {
                match &mut self.stage {
                    Stage::Open(frames) => frames.opener.extend(&buffer[..count]),
                    _ => self.received.extend_from_slice(&buffer[..count]),
                }
                Ok(true)
            }
            Err(error) if is_momentary(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&mut self) -> Result<(), ChannelError> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if is_momentary(&error) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut channel = f.debug_struct("Channel");
        channel.field("stream", &self.stream).field("open", &self.is_open()).finish_non_exhaustive()
    }
}
