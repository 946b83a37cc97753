//! Connecting and accepting, without blocking the caller.
//!
//! ```text
//!  sender                                                       listener
//!    | ---- TCP: connect ------------------------------------->  | the kernel accepts
//!    |      (as long as the listener's machine answers)          | the program calls `accept`
//!    | <--- each proves that it knows the handle's secret ---->  | a thread is started
//!    | ---- Hello: what is proposed, endpoints ---------------->  |
//!    | <--- Welcome: what is agreed, endpoints ----------------  |
//!    | ---- Ready --------------------------------------------->  |
//! ```
//!
//! A sender has no time limit for the second step: the listener's program may call [`Listener::accept`] much later. NCCL does so
//! when a rank reaches its first collective before the others do.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver as Outcomes, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use crosstie_protocol::rails::Mask;

use super::agreement::{Agreement, EndpointAddress, Role};
use super::config::{
    HANDSHAKE_TIMEOUT, MAX_ATTEMPTS, MAX_HANDSHAKES, MAX_UNAUTHENTICATED, Split, UNAUTHENTICATED_TIMEOUT,
};
use super::connections::{Core, RecvConnection, SendConnection};
use super::context::{Context, Rails};
use super::control::{Control, wait};
use super::endpoint::Endpoint;
use super::error::SetupError;
use super::frames::{Frame, MAX_PAYLOAD};
use super::mailbox::{Mailbox, Order};
use super::parts::Parts;
use super::receiver::RecvCore;
use super::sender::SendCore;
use crate::bootstrap::channel::{Channel, ChannelEvent};
use crate::bootstrap::is_closed_by_peer;
use crate::bootstrap::{Secret, random_bytes};

/// The address of a listener and its secret, for the sender that will connect. Pass it over a channel that others cannot read:
/// who has it can connect.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    bytes: [u8; Handle::LEN],
}

impl Handle {
    /// Length in bytes.
    pub const LEN: usize = 64;
    const VERSION: [u8; 4] = *b"CTR\x02";

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

    /// The handle of a listener at this address that was made with [`Rails::listen_with_secret`](super::Rails::listen_with_secret): who
    /// knows the address and the secret needs no handle from the listener.
    pub fn with_secret(address: SocketAddr, secret: &Secret) -> Handle {
        let secret = secret.derive("rails listener");
        Handle::new(address, core::array::from_fn(|i| secret.as_bytes()[i]))
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

    pub(super) fn address(&self) -> SocketAddr {
        let octets: [u8; 16] = core::array::from_fn(|i| self.bytes[8 + i]);
        let port = u16::from_le_bytes([self.bytes[4], self.bytes[5]]);
        SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), port)
    }

    pub(super) fn secret(&self) -> Result<Secret, SetupError> {
        Secret::new(&self.bytes[24..56]).map_err(|_| SetupError::BadHandle)
    }
}

impl core::fmt::Debug for Handle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Handle({})", self.address())
    }
}

type Outcome<T> = Result<T, SetupError>;

impl Rails {
    /// Starts to listen for connections of senders.
    pub fn listen(&self) -> Result<Listener, SetupError> {
        self.listen_at(self.context.config.listen_address)
    }

    /// Starts to listen at an address of this machine, at a port that the kernel chooses, with a random secret.
    pub fn listen_at(&self, address: IpAddr) -> Result<Listener, SetupError> {
        let secret = random_bytes().map_err(|error| SetupError::Os {
            what: "drawing the listener's secret",
            source: std::io::Error::other(error.to_string()),
        })?;
        self.listen_on(SocketAddr::new(address, 0), |at| Handle::new(at, secret))
    }

    /// Starts to listen at this address and port, for senders that know the secret: they make their handle with
    /// [`Handle::with_secret`].
    pub fn listen_with_secret(&self, address: SocketAddr, secret: &Secret) -> Result<Listener, SetupError> {
        self.listen_on(address, |at| Handle::with_secret(at, secret))
    }

    fn listen_on(
        &self,
        address: SocketAddr,
        handle: impl FnOnce(SocketAddr) -> Handle,
    ) -> Result<Listener, SetupError> {
        let os = |source| SetupError::Os { what: "listening for peers", source };
        let socket = TcpListener::bind(address).map_err(os)?;
        socket.set_nonblocking(true).map_err(os)?;
        let at = socket.local_addr().map_err(os)?;
        Listener::new(self.context.clone(), socket, handle(at))
    }

    /// Starts to connect to a listener. Never blocks: [`Connecting::poll`] says when the connection is ready.
    pub fn connect(&self, handle: &Handle) -> Result<Connecting, SetupError> {
        Connecting::start(self.context.clone(), handle)
    }
}

/// A connection to a listener that is being set up. Dropping it ends the attempt.
#[derive(Debug)]
pub struct Connecting {
    outcome: Outcomes<Outcome<SendConnection>>,
    /// Of the thread that connects, until the connection is handed out.
    mailbox: Option<Arc<Mailbox>>,
}

impl Connecting {
    pub(super) fn start(context: Arc<Context>, handle: &Handle) -> Result<Connecting, SetupError> {
        let (handle, mailbox) = (*handle, new_mailbox()?);
        let outcome = spawn({
            let mailbox = mailbox.clone();
            move |outcome| match connect(&context, &handle, mailbox) {
                Ok((parts, control)) => publish(&outcome, SendConnection::new(SendCore::new(parts)), control),
                Err(error) => {
                    // If nobody waits any more, nobody wants to know.
                    outcome.send(Err(error)).ok();
                }
            }
        })?;
        Ok(Connecting { outcome, mailbox: Some(mailbox) })
    }

    /// The connection, when it is ready; `None` means: ask again. Never blocks. After the connection or an error was returned,
    /// it must not be called any more.
    ///
    /// It becomes ready after the listener's program has called [`Listener::accept`]. There is no limit on how late that may be: an error
    /// is returned when the listener is closed, its process has ended or its machine does not answer.
    pub fn poll(&mut self) -> Result<Option<SendConnection>, SetupError> {
        let polled = poll(&self.outcome);
        if matches!(polled, Ok(Some(_))) {
            self.mailbox = None;
        }
        polled
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if let Some(mailbox) = &self.mailbox {
            // Whatever its thread is waiting for.
            mailbox.put_order(Order::Close(Frame::Close { next: 0, open: Vec::new() }));
        }
    }
}

/// Accepts connections of senders.
#[derive(Debug)]
pub struct Listener {
    context: Arc<Context>,
    socket: TcpListener,
    handle: Handle,
    secret: Secret,
    /// Connections that have not proved the secret yet, oldest first.
    unauthenticated: VecDeque<Unauthenticated>,
    handshakes: Vec<Outcomes<Outcome<RecvConnection>>>,
}

/// A connection that has not proved the secret yet.
#[derive(Debug)]
struct Unauthenticated {
    channel: Channel,
    since: Instant,
}

impl Listener {
    pub(super) fn new(
        context: Arc<Context>,
        socket: TcpListener,
        handle: Handle,
    ) -> Result<Listener, SetupError> {
        let (unauthenticated, handshakes) = (VecDeque::new(), Vec::new());
        Ok(Listener { context, socket, secret: handle.secret()?, handle, unauthenticated, handshakes })
    }

    /// What a sender needs to connect.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// The next connection that is ready; `None` means: ask again. Never blocks. Peers that do not know the handle's secret, or
    /// do not complete the handshake, are dropped.
    ///
    /// Connections that have not proved that they know the secret take no thread, are limited in number ([`MAX_UNAUTHENTICATED`]) and
    /// in time ([`UNAUTHENTICATED_TIMEOUT`]), and do not keep out a peer that does. They are looked at by calls of this function only.
    pub fn accept(&mut self) -> Result<Option<RecvConnection>, SetupError> {
        let now = Instant::now();
        for _ in 0..self.unauthenticated.len() {
            let Some(peer) = self.unauthenticated.pop_front() else { break };
            self.advance(peer, now)?;
        }
        // If more connections are pending, the next call accepts them. The kernel keeps them meanwhile.
        for _ in 0..MAX_UNAUTHENTICATED {
            if self.handshakes.len() >= MAX_HANDSHAKES {
                break;
            }
            match self.socket.accept() {
                Ok((stream, _)) => {
                    // A connection without a channel is closed.
                    if let Ok(channel) = Channel::from_accepted(stream, &self.secret, MAX_PAYLOAD) {
                        if self.unauthenticated.len() >= MAX_UNAUTHENTICATED {
                            // It has just been looked at. If it is a sender, it tries again.
                            self.unauthenticated.pop_front();
                        }
                        self.advance(Unauthenticated { channel, since: now }, now)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(source) => return Err(SetupError::Os { what: "accepting a connection", source }),
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

    /// Starts the handshake with a peer if it has proved that it knows the secret, and otherwise keeps it until its time is over.
    fn advance(&mut self, mut peer: Unauthenticated, now: Instant) -> Result<(), SetupError> {
        if self.handshakes.len() >= MAX_HANDSHAKES {
            // It has to wait for the handshakes of others, and may be about to prove the secret: its time begins later.
            self.unauthenticated.push_back(Unauthenticated { since: now, ..peer });
            return Ok(());
        }
        match peer.channel.poll_event() {
            Ok(None) if now.duration_since(peer.since) < UNAUTHENTICATED_TIMEOUT => {
                self.unauthenticated.push_back(peer);
            }
            Ok(Some(ChannelEvent::JoinRequest { rank: SENDER, size: ENDS })) => {
                let (context, mut channel) = (self.context.clone(), peer.channel);
                if channel.accept_join().is_err() {
                    return Ok(());
                }
                self.handshakes.push(spawn(move |outcome| match accept(&context, channel) {
                    Ok((parts, control)) => {
                        publish(&outcome, RecvConnection::new(RecvCore::new(parts)), control)
                    }
                    Err(error) => {
                        outcome.send(Err(error)).ok();
                    }
                })?);
            }
            // Its time is over, or it is no sender.
            _ => {}
        }
        Ok(())
    }
}

/// How long a sender whose connection was closed before it was accepted waits, before it tries again.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);

/// What a sender calls itself towards a listener: rank 1 of the two ends.
pub(super) const SENDER: u32 = 1;
pub(super) const ENDS: u32 = 2;

fn poll<T>(outcome: &Outcomes<Outcome<T>>) -> Result<Option<T>, SetupError> {
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
) -> Result<Outcomes<Outcome<T>>, SetupError> {
    let (sender, outcome) = sync_channel(1);
    std::thread::Builder::new()
        .name("crosstie-rails".into())
        .stack_size(256 << 10)
        .spawn(move || run(sender))
        .map_err(|source| SetupError::Os { what: "starting the control thread of a connection", source })?;
    Ok(outcome)
}

fn new_mailbox() -> Result<Arc<Mailbox>, SetupError> {
    let mailbox = Mailbox::new().map_err(|source| SetupError::Os { what: "creating an eventfd", source })?;
    Ok(Arc::new(mailbox))
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

/// The control connection until both ends have connected their endpoints.
pub(super) struct Handshake {
    channel: Channel,
    mailbox: Arc<Mailbox>,
    /// When the step began that has a time limit.
    since: Instant,
}

impl Handshake {
    /// That of a sender.
    pub(super) fn start(
        handle: &Handle,
        mailbox: Arc<Mailbox>,
        now: Instant,
    ) -> Result<Handshake, SetupError> {
        let channel = Channel::connect(handle.address(), SENDER, ENDS, &handle.secret()?, MAX_PAYLOAD);
        let channel = channel.map_err(SetupError::Handshake)?;
        keep_alive(&channel);
        Ok(Handshake { channel, mailbox, since: now })
    }

    /// That of a receiver, whose sender has proved that it knows the secret.
    fn continue_accepted(channel: Channel, mailbox: Arc<Mailbox>) -> Handshake {
        keep_alive(&channel);
        Handshake { channel, mailbox, since: Instant::now() }
    }

    /// When the peer must have done the next step. `None` while the listener's program has not called `accept`: it may be busy
    /// with something else as long as it likes.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let waits_for_accept = self.channel.is_connected() && !self.channel.is_open();
        (!waits_for_accept).then(|| self.since + HANDSHAKE_TIMEOUT)
    }

    /// The next event, if there is one at the time `now`.
    pub(super) fn poll(&mut self, now: Instant) -> Result<Option<ChannelEvent>, SetupError> {
        let event = self.channel.poll_event()?;
        if matches!(event, Some(ChannelEvent::Open)) {
            self.since = now;
        }
        if event.is_none() && self.deadline().is_some_and(|deadline| deadline <= now) {
            return Err(SetupError::Handshake(io::ErrorKind::TimedOut.into()));
        }
        Ok(event)
    }

    /// Waits for the next event.
    fn next(&mut self) -> Result<ChannelEvent, SetupError> {
        loop {
            let now = Instant::now();
            if let Some(event) = self.poll(now)? {
                return Ok(event);
            }
            let left = self.deadline().map(|deadline| deadline.saturating_duration_since(now));
            let is_woken = wait(&self.channel, Some(&self.mailbox), left).map_err(SetupError::Handshake)?;
            if is_woken {
                return Err(SetupError::Handshake(io::Error::other(
                    "the program does not wait for it any more",
                )));
            }
        }
    }

    /// Waits for the next frame.
    fn read(&mut self) -> Result<Frame, SetupError> {
        match self.next()? {
            ChannelEvent::Frame { kind, payload } => Frame::decode(kind, &payload)
                .ok_or_else(|| SetupError::Refused("it sent an invalid frame".into())),
            _ => Err(SetupError::Refused("it sent something else than a frame".into())),
        }
    }

    fn send(&mut self, frame: &Frame) -> Result<(), SetupError> {
        Ok(frame.send(&mut self.channel)?)
    }

    fn finish(
        self,
        context: &Arc<Context>,
        role: Role,
        agreed: Agreement,
        endpoints: Vec<Endpoint>,
        first_mask: Mask,
    ) -> (Parts, Control) {
        let Handshake { channel, mailbox, .. } = self;
        let control = Control::new(context.clone(), mailbox.clone(), channel, role, agreed);
        (Parts { context: context.clone(), mailbox, agreed, endpoints, first_mask }, control)
    }
}

fn connect(
    context: &Arc<Context>,
    handle: &Handle,
    mailbox: Arc<Mailbox>,
) -> Result<(Parts, Control), SetupError> {
    let mut handshake = open(handle, &mailbox)?;
    // Only now: an attempt that waits takes no queue pairs.
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
    handshake.send(&Frame::Hello(proposal, first_mask, addresses))?;
    let (agreed, peers) = match handshake.read()? {
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
    handshake.send(&Frame::Ready)?;
    Ok(handshake.finish(context, Role::Sender, agreed, endpoints, first_mask))
}

/// Connects, and waits until both ends have proved that they know the secret.
fn open(handle: &Handle, mailbox: &Arc<Mailbox>) -> Result<Handshake, SetupError> {
    for attempt in 1.. {
        let mut handshake = Handshake::start(handle, mailbox.clone(), Instant::now())?;
        match handshake.next() {
            Ok(ChannelEvent::Open) => return Ok(handshake),
            Ok(_) => break,
            // Its place was given to a newer connection. If the listener is gone, the next attempt is refused.
            Err(SetupError::Handshake(error)) if is_closed_by_peer(&error) && attempt < MAX_ATTEMPTS => {
                std::thread::sleep(ATTEMPT_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
    Err(SetupError::Refused("it sent something else than its proof of the secret".into()))
}

/// The handshake with a peer that has proved that it knows the secret.
fn accept(context: &Arc<Context>, channel: Channel) -> Result<(Parts, Control), SetupError> {
    let mut handshake = Handshake::continue_accepted(channel, new_mailbox()?);
    let Frame::Hello(proposal, first_mask, peers) = handshake.read()? else {
        return Err(SetupError::Refused("it sent something else than a hello".into()));
    };
    let (agreed, endpoints) = match accept_proposal(context, &proposal, &peers) {
        Ok(made) => made,
        Err(error) => {
            handshake.send(&Frame::Error(error.to_string()))?;
            return Err(error);
        }
    };
    let addresses = endpoints.iter().map(Endpoint::address).collect();
    handshake.send(&Frame::Welcome(agreed, addresses))?;
    match handshake.read()? {
        Frame::Ready => Ok(handshake.finish(context, Role::Receiver, agreed, endpoints, first_mask)),
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

/// Makes the kernel notice a peer whose machine is gone. A socket without these options notices it much later, or never.
fn keep_alive(channel: &Channel) {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(channel, true).ok();
    sockopt::set_tcp_keepidle(channel, Duration::from_secs(10)).ok();
    sockopt::set_tcp_keepintvl(channel, Duration::from_secs(5)).ok();
    sockopt::set_tcp_keepcnt(channel, 3).ok();
}
