//! One connection between two processes that share a secret, for services that run longer than the start of a job.
//!
//! [`Bootstrap`](super::Bootstrap) connects all ranks and ends when the first of them dies. A channel connects two
//! processes: one connects, the other accepts. They prove the secret to each other before they read anything else, and
//! then exchange frames with a kind and a payload. Handshake and frames have the same bytes as those of the
//! [rendezvous](super::tcp). A channel never blocks, so one thread can serve many: poll its file descriptor, then call
//! [`Channel::poll_event`].
//!
//! ```
//! use crosstie::bootstrap::channel::{Channel, ChannelEvent};
//! use crosstie::bootstrap::Secret;
//! use std::net::TcpListener;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let secret = Secret::random()?.derive("example");
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let mut client = Channel::connect(listener.local_addr()?, 1, 2, &secret, 1 << 10)?;
//! let mut server = Channel::from_accepted(listener.accept()?.0, &secret, 1 << 10)?;
//! let received = loop {
//!     match client.poll_event()? {
//!         Some(ChannelEvent::Open) => client.send(7, b"hello")?,
//!         _ => std::thread::yield_now(),
//!     }
//!     match server.poll_event()? {
//!         Some(ChannelEvent::JoinRequest { rank: 1, size: 2 }) => server.accept_join()?,
//!         Some(ChannelEvent::Frame { kind: 7, payload }) => break payload,
//!         _ => {}
//!     }
//! };
//! assert_eq!(received, b"hello");
//! # Ok(()) }
//! ```
//!
//! ```text
//! connecting end   Connecting ─ connected ─> AwaitNonce ─ nonce ─> AwaitResponse ─ accepted ─> Open
//! accepting end    AwaitRequest ─ join request ─> AwaitDecision ─ accept_join() ─> Open
//! both             any error ─> Closed
//! ```

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::error::{Error, Violation};
use super::frame::{FrameDecoder, FrameEncoder};
use super::handshake::{JoinResponse, NONCE_BYTES, REQUEST_BYTES, RESPONSE_BYTES, Transcript};
use super::random::random_bytes;
use super::secret::Secret;
use super::stream::{is_closed_by_peer, is_transient};

/// The most bytes that a channel queues for writing. A peer that reads so little counts as failed
/// ([`ChannelError::Stalled`]).
pub const MAX_UNSENT: usize = 1 << 20;

/// One end of a connection. See the [module](self).
pub struct Channel {
    stream: TcpStream,
    secret: Secret,
    /// The longest payload that this end accepts.
    limit: usize,
    state: State,
    /// Bytes of the handshake that have arrived.
    received: Vec<u8>,
    unsent: Vec<u8>,
}

/// What happened on a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// The peer connected, proved the secret, and wants to join with this rank and size. Reply with
    /// [`accept_join`](Channel::accept_join), [`reject_rank`](Channel::reject_rank) or
    /// [`reject_size`](Channel::reject_size).
    JoinRequest {
        /// The peer's rank.
        rank: u32,
        /// The number of ranks that the peer was started with.
        size: u32,
    },
    /// The peer accepted this end's join request: frames may be sent.
    Open,
    /// The peer sent a frame.
    Frame {
        /// The kind that the peer passed to [`send`](Channel::send).
        kind: u8,
        /// The payload that the peer passed to [`send`](Channel::send).
        payload: Vec<u8>,
    },
}

/// Why a channel failed. It cannot be used any more: drop it, and connect again if needed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer closed the connection, or its process ended.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed the connection before it sent anything: it may be another program.
    #[error("the peer closed the connection before the handshake: check that it is a crosstie process")]
    ClosedBeforeHandshake,
    /// A system call failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer does not know the secret, or rejected this end.
    #[error(transparent)]
    Rejected(Error),
    /// The peer's bytes are not valid frames.
    #[error("the peer violated the protocol: {0}; run the same version of crosstie on both machines")]
    Violation(Violation),
    /// The peer does not read what this end sends.
    #[error(
        "the peer does not read: {MAX_UNSENT} bytes for it are waiting; check that its process is not stopped"
    )]
    Stalled,
}

/// The state of the handshake; the module has the diagram.
enum State {
    Connecting { rank: u32, size: u32 },
    AwaitNonce { rank: u32, size: u32, member_nonce: [u8; NONCE_BYTES] },
    AwaitResponse(Transcript),
    AwaitRequest { nonce: [u8; NONCE_BYTES] },
    AwaitDecision(Transcript),
    Open(Box<Codec>),
    Closed,
}

struct Codec {
    encoder: FrameEncoder,
    decoder: FrameDecoder,
}

impl Channel {
    /// Starts to connect, as `rank` of `size`. `limit` is the longest payload that this end accepts.
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
        Ok(Channel::new(TcpStream::from(socket), secret, limit, State::Connecting { rank, size }))
    }

    /// Starts the handshake on a stream that a listener accepted. `limit` is the longest payload that this end accepts.
    pub fn from_accepted(stream: TcpStream, secret: &Secret, limit: usize) -> io::Result<Channel> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let nonce = random_bytes().map_err(io::Error::other)?;
        let mut channel = Channel::new(stream, secret, limit, State::AwaitRequest { nonce });
        channel.unsent.extend(nonce);
        Ok(channel)
    }

    fn new(stream: TcpStream, secret: &Secret, limit: usize, state: State) -> Channel {
        let (received, unsent) = (Vec::with_capacity(NONCE_BYTES + REQUEST_BYTES), Vec::new());
        Channel { stream, secret: secret.clone(), limit, state, received, unsent }
    }

    /// Reads and writes what the socket allows, and returns the next event; `None` if no event is ready. Call it
    /// until it returns `None`.
    pub fn poll_event(&mut self) -> Result<Option<ChannelEvent>, ChannelError> {
        let event = self.advance();
        let Err(error) = event else { return event };
        let is_closed = match &error {
            ChannelError::Closed => true,
            ChannelError::Io(error) => is_closed_by_peer(error),
            _ => false,
        };
        let is_before_handshake = is_closed && self.awaits_first_byte();
        self.state = State::Closed;
        Err(if is_before_handshake { ChannelError::ClosedBeforeHandshake } else { error })
    }

    /// Whether the peer has sent nothing yet.
    fn awaits_first_byte(&self) -> bool {
        match self.state {
            State::Connecting { .. } => true,
            State::AwaitNonce { .. } | State::AwaitRequest { .. } => self.received.is_empty(),
            State::AwaitResponse(_) | State::AwaitDecision(_) | State::Open(_) | State::Closed => false,
        }
    }

    /// Accepts the peer's [`ChannelEvent::JoinRequest`]: frames may be sent.
    pub fn accept_join(&mut self) -> Result<(), ChannelError> {
        let State::AwaitDecision(transcript) = self.state else { return Err(ChannelError::Closed) };
        self.unsent.extend(transcript.join_response(&self.secret, JoinResponse::Accepted));
        let (encoder, decoder) = transcript.coordinator_codec(&self.secret, self.limit);
        self.state = State::Open(Box::new(Codec { encoder, decoder }));
        self.write()
    }

    /// Rejects the peer's [`ChannelEvent::JoinRequest`]: its rank does not exist, or is not one that connects to this end.
    pub fn reject_rank(mut self) {
        self.reject(JoinResponse::DuplicateRank);
    }

    /// Rejects the peer's [`ChannelEvent::JoinRequest`]: the number of ranks is `size`.
    pub fn reject_size(mut self, size: u32) {
        self.reject(JoinResponse::SizeMismatch(size));
    }

    fn reject(&mut self, response: JoinResponse) {
        if let State::AwaitDecision(transcript) = self.state {
            self.unsent.extend(transcript.join_response(&self.secret, response));
            // A rejected peer may have disconnected already; that changes nothing here.
            drop(self.write());
        }
    }

    /// Queues a frame and writes as much as the socket takes. The payload must be within the peer's limit.
    pub fn send(&mut self, kind: u8, payload: &[u8]) -> Result<(), ChannelError> {
        let State::Open(codec) = &mut self.state else { return Err(ChannelError::Closed) };
        if self.unsent.len() + payload.len() > MAX_UNSENT {
            return Err(ChannelError::Stalled);
        }
        let encoded = codec.encoder.encode(kind, Arc::from(payload));
        self.unsent.extend(encoded.header);
        self.unsent.extend_from_slice(&encoded.payload);
        self.unsent.extend(encoded.tag);
        self.write()
    }

    /// Whether the peer's machine has accepted the connection. The peer's program may not have seen it yet.
    pub fn is_connected(&self) -> bool {
        !matches!(self.state, State::Connecting { .. } | State::Closed)
    }

    /// Whether frames may be sent.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    /// Whether to poll the file descriptor for writing, too.
    pub fn wants_write(&self) -> bool {
        !self.unsent.is_empty() || matches!(self.state, State::Connecting { .. })
    }

    fn advance(&mut self) -> Result<Option<ChannelEvent>, ChannelError> {
        loop {
            if let State::Connecting { rank, size } = self.state {
                if !self.has_connected()? {
                    return Ok(None);
                }
                let member_nonce = random_bytes().map_err(ChannelError::Rejected)?;
                self.unsent.extend(member_nonce);
                self.state = State::AwaitNonce { rank, size, member_nonce };
            }
            // What the peer sent before it closed the connection is still there when nothing can be written any more.
            let written = self.write();
            if let Some(event) = self.process_received()? {
                return Ok(Some(event));
            }
            match (self.read(), written) {
                (Ok(true), _) => {}
                (Ok(false), Ok(())) => return Ok(None),
                (_, Err(error)) | (Err(error), _) => return Err(error),
            }
        }
    }

    fn has_connected(&self) -> Result<bool, ChannelError> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error.into());
        }
        match self.stream.peer_addr() {
            // A connection attempt to a local port without a listener can connect to itself (TCP simultaneous open).
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

    /// Processes the received bytes until they yield an event or are used up.
    fn process_received(&mut self) -> Result<Option<ChannelEvent>, ChannelError> {
        match &mut self.state {
            State::AwaitNonce { rank, size, member_nonce } => {
                let Some(&coordinator_nonce) = self.received.first_chunk::<NONCE_BYTES>() else {
                    return Ok(None);
                };
                let (rank, size, member_nonce) = (*rank, *size, *member_nonce);
                let transcript = Transcript { coordinator_nonce, member_nonce, rank, size };
                self.received.drain(..NONCE_BYTES);
                self.unsent.extend(transcript.join_request(&self.secret));
                self.state = State::AwaitResponse(transcript);
                self.write()?;
                self.process_received()
            }
            State::AwaitResponse(transcript) => {
                let Some(response) = self.received.first_chunk::<RESPONSE_BYTES>() else {
                    return Ok(None);
                };
                let transcript = *transcript;
                match transcript.verify_join_response(&self.secret, response) {
                    Some(JoinResponse::Accepted) => {}
                    Some(JoinResponse::DuplicateRank) => {
                        return Err(ChannelError::Rejected(Error::DuplicateRank { rank: transcript.rank }));
                    }
                    Some(JoinResponse::SizeMismatch(theirs)) => {
                        let ours = transcript.size;
                        return Err(ChannelError::Rejected(Error::SizeMismatch { ours, theirs }));
                    }
                    None => return Err(ChannelError::Rejected(self.wrong_secret())),
                }
                let (encoder, mut decoder) = transcript.member_codec(&self.secret, self.limit);
                decoder.extend(&self.received[RESPONSE_BYTES..]);
                self.received = Vec::new();
                self.state = State::Open(Box::new(Codec { encoder, decoder }));
                Ok(Some(ChannelEvent::Open))
            }
            State::AwaitRequest { nonce } => {
                let Some((member_nonce, request)) = self.received.split_first_chunk::<NONCE_BYTES>() else {
                    return Ok(None);
                };
                let Some(request) = request.first_chunk::<REQUEST_BYTES>() else { return Ok(None) };
                match Transcript::verify_join_request(&self.secret, *nonce, *member_nonce, request) {
                    Some(transcript) => {
                        let (rank, size) = (transcript.rank, transcript.size);
                        self.received = Vec::new();
                        self.state = State::AwaitDecision(transcript);
                        Ok(Some(ChannelEvent::JoinRequest { rank, size }))
                    }
                    None => {
                        // A peer without the secret receives nothing that was computed from it.
                        self.unsent.extend([0; RESPONSE_BYTES]);
                        drop(self.write());
                        Err(ChannelError::Rejected(self.wrong_secret()))
                    }
                }
            }
            State::Open(codec) => match codec.decoder.next() {
                Ok(frame) => {
                    Ok(frame.map(|frame| ChannelEvent::Frame { kind: frame.kind, payload: frame.payload }))
                }
                Err(violation) => Err(ChannelError::Violation(violation)),
            },
            State::Connecting { .. } | State::AwaitDecision(_) => Ok(None),
            State::Closed => Err(ChannelError::Closed),
        }
    }

    fn wrong_secret(&self) -> Error {
        let peer = self.stream.peer_addr().map_or_else(|_| "the peer".to_owned(), |peer| peer.to_string());
        Error::WrongSecret { peer }
    }

    /// Reads what has arrived; returns whether there was anything. Reads nothing beyond a join request until it is
    /// accepted.
    fn read(&mut self) -> Result<bool, ChannelError> {
        let mut buffer = [0; 4096];
        let wanted = match &self.state {
            State::AwaitRequest { .. } => NONCE_BYTES + REQUEST_BYTES - self.received.len(),
            State::AwaitDecision(_) | State::Connecting { .. } => return Ok(false),
            _ => buffer.len(),
        };
        match self.stream.read(&mut buffer[..wanted]) {
            Ok(0) => Err(ChannelError::Closed),
            Ok(count) => {
                match &mut self.state {
                    State::Open(codec) => codec.decoder.extend(&buffer[..count]),
                    _ => self.received.extend_from_slice(&buffer[..count]),
                }
                Ok(true)
            }
            Err(error) if is_transient(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&mut self) -> Result<(), ChannelError> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if is_transient(&error) => break,
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
