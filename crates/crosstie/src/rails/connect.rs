//! Connecting and accepting, without blocking the caller.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Channel, SyncSender, TryRecvError, sync_channel};
use std::time::Instant;

use crosstie_protocol::rails::Mask;

use super::config::{HANDSHAKE_TIMEOUT, MAX_HANDSHAKES, MAX_UNAUTHENTICATED, Split, UNAUTHENTICATED_TIMEOUT};
use super::connections::{Core, RecvConnection, SendConnection};
use super::context::Context;
use super::control::Control;
use super::endpoint::{Agreement, Endpoint, EndpointAddress, Role};
use super::error::SetupError;
use super::frames::{Frame, HEADER, MAGIC};
use super::mailbox::Mailbox;
use super::receiver::RecvCore;
use super::sender::SendCore;

/// The address of a listener and its secret, for the sender that will connect. Pass it over a channel that others cannot read:
/// who has it can connect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    bytes: [u8; Handle::LEN],
}

impl Handle {
    /// Length in bytes.
    pub const LEN: usize = 64;
    const VERSION: [u8; 4] = *b"CTR\x01";

    pub(super) fn new(at: SocketAddr, secret: [u8; 32]) -> Handle {
        let mut bytes = [0; Handle::LEN];
        let ip = match at.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[..4].copy_from_slice(&Handle::VERSION);
        bytes[4..6].copy_from_slice(&at.port().to_le_bytes());
        bytes[8..24].copy_from_slice(&ip.octets());
        bytes[24..56].copy_from_slice(&secret);
        Handle { bytes }
    }

    /// The handle as bytes.
    pub fn to_bytes(&self) -> [u8; Handle::LEN] {
        self.bytes
    }

    /// The handle with these bytes.
    pub fn from_bytes(bytes: &[u8; Handle::LEN]) -> Result<Handle, SetupError> {
        if bytes[..4] != Handle::VERSION || bytes[4..6] == [0, 0] {
            return Err(SetupError::BadHandle);
        }
        Ok(Handle { bytes: *bytes })
    }

    fn address(&self) -> SocketAddr {
        let octets: [u8; 16] = core::array::from_fn(|i| self.bytes[8 + i]);
        let port = u16::from_le_bytes([self.bytes[4], self.bytes[5]]);
        SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), port)
    }

    fn secret(&self) -> [u8; 32] {
        core::array::from_fn(|i| self.bytes[24 + i])
    }
}

impl core::fmt::Debug for Handle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Handle({})", self.address())
    }
}

/// What a handshake produces.
pub(super) struct Parts {
    pub(super) context: Arc<Context>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) agreed: Agreement,
    pub(super) endpoints: Vec<Endpoint>,
    /// Receiver: the rails that the sender will use at first.
    pub(super) first_mask: Mask,
}

type Outcome<T> = Result<T, SetupError>;

/// A connection to a listener that is being set up.
#[derive(Debug)]
pub struct Connecting {
    outcome: Channel<Outcome<SendConnection>>,
}

impl Connecting {
    pub(super) fn start(context: Arc<Context>, handle: &Handle) -> Result<Connecting, SetupError> {
        let handle = *handle;
        let outcome = spawn(move |outcome| match connect(&context, &handle) {
            Ok((parts, control)) => publish(&outcome, SendConnection::new(SendCore::new(parts)), control),
            Err(error) => {
                // If nobody waits any more, nobody wants to know.
                outcome.send(Err(error)).ok();
            }
        })?;
        Ok(Connecting { outcome })
    }

    /// The connection, when it is ready; `None` means: ask again. Never blocks. After the connection or an error was returned,
    /// it must not be called any more.
    pub fn poll(&mut self) -> Result<Option<SendConnection>, SetupError> {
        poll(&self.outcome)
    }
}

/// Accepts connections of senders.
#[derive(Debug)]
pub struct Listener {
    context: Arc<Context>,
    socket: TcpListener,
    handle: Handle,
    /// Connections that have not shown the secret yet, oldest first.
    unauthenticated: VecDeque<Unauthenticated>,
    handshakes: Vec<Channel<Outcome<RecvConnection>>>,
}

impl Listener {
    pub(super) fn new(context: Arc<Context>, socket: TcpListener, handle: Handle) -> Listener {
        Listener { context, socket, handle, unauthenticated: VecDeque::new(), handshakes: Vec::new() }
    }

    /// What a sender needs to connect.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The next connection that is ready; `None` means: ask again. Never blocks. Peers that do not know the handle's secret, or
    /// do not complete the handshake, are dropped.
    ///
    /// Connections that have not shown the secret take no thread, are limited in number ([`MAX_UNAUTHENTICATED`]) and in time
    /// ([`UNAUTHENTICATED_TIMEOUT`]), and do not keep out a peer that shows it. They are looked at by calls of this function only.
    pub fn accept(&mut self) -> Result<Option<RecvConnection>, SetupError> {
        // If more connections are pending, the next call accepts them.
        for _ in 0..MAX_UNAUTHENTICATED {
            match self.socket.accept() {
                // A connection that cannot be read without blocking is closed.
                Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                    if self.unauthenticated.len() >= MAX_UNAUTHENTICATED
                        && let Some(oldest) = self.unauthenticated.pop_front()
                    {
                        // It gives way, unless it has shown the secret meanwhile.
                        self.advance(oldest)?;
                    }
                    self.unauthenticated.push_back(Unauthenticated::new(stream));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(source) => return Err(SetupError::Os { what: "accepting a connection", source }),
            }
        }
        let now = Instant::now();
        for _ in 0..self.unauthenticated.len() {
            let Some(peer) = self.unauthenticated.pop_front() else { break };
            // Those that take too long are dropped.
            if let Some(peer) = self.advance(peer)?.filter(|peer| now < peer.deadline) {
                self.unauthenticated.push_back(peer);
            }
        }
        let mut ready = None;
        self.handshakes.retain(|outcome| {
            if ready.is_some() {
                return true;
            }
            match poll(outcome) {
                Ok(None) => true,
                // A peer that fails its handshake is not our error.
                Err(_) => false,
                Ok(Some(connection)) => {
                    ready = Some(connection);
                    false
                }
            }
        });
        Ok(ready)
    }

    /// Starts the handshake with a peer if it has shown the secret. Returns the peer if it has shown too little so far.
    fn advance(&mut self, mut peer: Unauthenticated) -> Result<Option<Unauthenticated>, SetupError> {
        match peer.read_opening(&self.handle.secret()) {
            Opening::Incomplete => Ok(Some(peer)),
            Opening::Refused => Ok(None),
            // Too many at once: the peer's connection is closed, and it gets an error.
            Opening::Accepted if self.handshakes.len() >= MAX_HANDSHAKES => Ok(None),
            Opening::Accepted => {
                let (context, stream) = (self.context.clone(), peer.stream);
                self.handshakes.push(spawn(move |outcome| match accept(&context, stream) {
                    Ok((parts, control)) => {
                        publish(&outcome, RecvConnection::new(RecvCore::new(parts)), control)
                    }
                    Err(error) => {
                        outcome.send(Err(error)).ok();
                    }
                })?);
                Ok(None)
            }
        }
    }
}

/// A connection that has not shown the secret yet. Its stream does not block.
#[derive(Debug)]
struct Unauthenticated {
    stream: TcpStream,
    opening: [u8; OPENING],
    received: usize,
    deadline: Instant,
}

/// Bytes of what a sender sends first: the magic number and the secret.
const OPENING: usize = MAGIC.len() + 32;

enum Opening {
    Accepted,
    Refused,
    Incomplete,
}

impl Unauthenticated {
    fn new(stream: TcpStream) -> Unauthenticated {
        let deadline = Instant::now() + UNAUTHENTICATED_TIMEOUT;
        Unauthenticated { stream, opening: [0; OPENING], received: 0, deadline }
    }

    /// Reads what has arrived, without waiting, and no byte beyond the secret.
    fn read_opening(&mut self, secret: &[u8; 32]) -> Opening {
        while self.received < OPENING {
            match self.stream.read(&mut self.opening[self.received..]) {
                Ok(0) => return Opening::Refused,
                Ok(count) => self.received += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Opening::Incomplete,
                Err(_) => return Opening::Refused,
            }
        }
        // In constant time, so that the secret cannot be guessed byte by byte.
        let expected = MAGIC.iter().chain(secret);
        let differing = self.opening.iter().zip(expected).fold(0, |all, (a, b)| all | (a ^ b));
        if differing == 0 { Opening::Accepted } else { Opening::Refused }
    }
}

fn poll<T>(outcome: &Channel<Outcome<T>>) -> Result<Option<T>, SetupError> {
    match outcome.try_recv() {
        Ok(outcome) => outcome.map(Some),
        Err(TryRecvError::Empty) => Ok(None),
        Err(TryRecvError::Disconnected) => {
            Err(SetupError::Handshake(io::Error::other("its result was taken before")))
        }
    }
}

fn spawn<T: Send + 'static>(
    run: impl FnOnce(SyncSender<Outcome<T>>) + Send + 'static,
) -> Result<Channel<Outcome<T>>, SetupError> {
    let (sender, outcome) = sync_channel(1);
    std::thread::Builder::new()
        .name("crosstie-rails".into())
        .stack_size(256 << 10)
        .spawn(move || run(sender))
        .map_err(|source| SetupError::Os { what: "starting the control thread of a connection", source })?;
    Ok(outcome)
}

/// Hands out the connection, and serves it until it ends.
fn publish<T>(outcome: &SyncSender<Outcome<T>>, (connection, core): (T, Core), control: Control) {
    match outcome.send(Ok(connection)) {
        Ok(()) => control.run(&core),
        // Nobody wants it any more.
        Err(unwanted) => {
            control.give_up();
            drop(unwanted);
        }
    }
}

fn connect(context: &Arc<Context>, handle: &Handle) -> Result<(Parts, Control), SetupError> {
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let config = &context.config;
    let proposal = Agreement {
        rails: context.devices.len(),
        slots: config.slots,
        max_group: config.max_group,
        data_qps: config.data_qps,
        staging: context.staging,
    };
    let mut endpoints = create_endpoints(context, Role::Sender, &proposal)?;
    let addresses = endpoints.iter().map(Endpoint::address).collect();
    let first_mask = match config.split {
        Split::Adaptive => (1 << proposal.rails) - 1,
        Split::Fixed(weights) => {
            (0..proposal.rails).fold(0, |mask, rail| mask | u8::from(weights[rail] > 0) << rail)
        }
    };
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&handle.secret());
    bytes.extend_from_slice(&Frame::Hello(proposal, first_mask, addresses).encode());
    // The opening follows the connection at once: the listener limits connections that show nothing.
    let mut stream =
        TcpStream::connect_timeout(&handle.address(), HANDSHAKE_TIMEOUT).map_err(SetupError::Handshake)?;
    set_timeouts(&stream)?;
    stream.write_all(&bytes).map_err(SetupError::Handshake)?;
    let (agreed, peers) = match read_frame(&mut stream, deadline)? {
        Frame::Welcome(agreed, peers) => (agreed, peers),
        Frame::Error(text) => return Err(SetupError::Refused(text)),
        _ => return Err(SetupError::Refused("it sent something else than a welcome".into())),
    };
    let fits = agreed.rails == proposal.rails
        && agreed.data_qps == proposal.data_qps
        && agreed.slots <= proposal.slots
        && agreed.max_group <= proposal.max_group
        && agreed.staging <= proposal.staging;
    if !fits {
        return Err(SetupError::Refused("it agreed to something that was not proposed".into()));
    }
    connect_endpoints(context, &mut endpoints, &peers)?;
    stream.write_all(&Frame::Ready.encode()).map_err(SetupError::Handshake)?;
    finish(context, stream, Role::Sender, agreed, endpoints, first_mask)
}

/// The handshake with a peer that has shown the secret.
fn accept(context: &Arc<Context>, mut stream: TcpStream) -> Result<(Parts, Control), SetupError> {
    set_timeouts(&stream)?;
    let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
    let Frame::Hello(proposal, first_mask, peers) = read_frame(&mut stream, deadline)? else {
        return Err(SetupError::Refused("it sent something else than a hello".into()));
    };
    let made = accept_proposal(context, &proposal, &peers);
    let (agreed, endpoints) = match made {
        Ok(made) => made,
        Err(error) => {
            stream.write_all(&Frame::Error(error.to_string()).encode()).map_err(SetupError::Handshake)?;
            return Err(error);
        }
    };
    let addresses = endpoints.iter().map(Endpoint::address).collect();
    stream.write_all(&Frame::Welcome(agreed, addresses).encode()).map_err(SetupError::Handshake)?;
    match read_frame(&mut stream, deadline)? {
        Frame::Ready => finish(context, stream, Role::Receiver, agreed, endpoints, first_mask),
        _ => Err(SetupError::Refused("it did not get ready".into())),
    }
}

fn accept_proposal(
    context: &Context,
    proposal: &Agreement,
    peers: &[EndpointAddress],
) -> Result<(Agreement, Vec<Endpoint>), SetupError> {
    let config = &context.config;
    if proposal.rails != context.devices.len() {
        return Err(SetupError::Refused(format!(
            "one end has {} rails, the other {}",
            proposal.rails,
            context.devices.len()
        )));
    }
    let agreed = Agreement {
        rails: proposal.rails,
        slots: proposal.slots.min(config.slots),
        max_group: proposal.max_group.min(config.max_group),
        data_qps: proposal.data_qps,
        staging: proposal.staging.min(context.staging),
    };
    let mut endpoints = create_endpoints(context, Role::Receiver, &agreed)?;
    connect_endpoints(context, &mut endpoints, peers)?;
    Ok((agreed, endpoints))
}

fn create_endpoints(context: &Context, role: Role, agreed: &Agreement) -> Result<Vec<Endpoint>, SetupError> {
    (0..agreed.rails)
        .map(|rail| {
            Endpoint::create(context, rail, role, agreed, 0)
                .map_err(|source| SetupError::Device { rail, source })
        })
        .collect()
}

fn connect_endpoints(
    context: &Context,
    endpoints: &mut [Endpoint],
    peers: &[EndpointAddress],
) -> Result<(), SetupError> {
    for (rail, (endpoint, peer)) in endpoints.iter_mut().zip(peers).enumerate() {
        endpoint.connect(peer, context).map_err(|source| SetupError::Device { rail, source })?;
    }
    Ok(())
}

fn finish(
    context: &Arc<Context>,
    stream: TcpStream,
    role: Role,
    agreed: Agreement,
    endpoints: Vec<Endpoint>,
    first_mask: Mask,
) -> Result<(Parts, Control), SetupError> {
    let mailbox = Mailbox::new().map_err(|source| SetupError::Os { what: "creating an eventfd", source })?;
    let mailbox = Arc::new(mailbox);
    let control = Control::new(context.clone(), mailbox.clone(), stream, role, agreed);
    Ok((Parts { context: context.clone(), mailbox, agreed, endpoints, first_mask }, control))
}

fn set_timeouts(stream: &TcpStream) -> Result<(), SetupError> {
    let set = |stream: &TcpStream| {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
        stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))
    };
    set(stream).map_err(SetupError::Handshake)
}

fn read_frame(stream: &mut TcpStream, deadline: Instant) -> Result<Frame, SetupError> {
    let mut header = [0; HEADER];
    read_exact(stream, &mut header, deadline)?;
    let invalid = || SetupError::Refused("it sent an invalid frame".into());
    let len = Frame::body_len(&header).ok_or_else(invalid)?;
    let mut body = vec![0; len];
    read_exact(stream, &mut body, deadline)?;
    Frame::decode(&header, &body).ok_or_else(invalid)
}

/// Reads so many bytes before the deadline. A peer that sends one byte at a time does not get more time.
fn read_exact(stream: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> Result<(), SetupError> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(SetupError::Handshake(io::ErrorKind::TimedOut.into()));
        }
        stream.set_read_timeout(Some(left)).map_err(SetupError::Handshake)?;
        match stream.read(bytes) {
            Ok(0) => return Err(SetupError::Handshake(io::ErrorKind::UnexpectedEof.into())),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(SetupError::Handshake(error)),
        }
    }
    Ok(())
}
