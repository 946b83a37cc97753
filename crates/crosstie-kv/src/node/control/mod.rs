//! The control plane: one thread that connects this node with all others, over TCP.
//!
//! Membership is static: every node knows the address of every other. Of two nodes, the one with the higher rank connects, and
//! retries until it succeeds. A node that cannot prove the secret is refused before anything it sends is read. Then the two
//! nodes exchange what their daemons need to connect with each other, and heartbeats; [`session`] has the messages.
//!
//! A node that connects as rank R replaces the session that rank R had, if it was started later. So a restarted node is served at once, even if
//! nobody has noticed yet that its predecessor died. If the predecessor lives, it is told to end: also when it was stopped meanwhile, continues,
//! and connects again.

mod session;
mod unauthenticated;

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use crosstie::bootstrap::Secret;
use crosstie::bootstrap::channel::{Channel, ChannelError, ChannelEvent};
use crosstie::bootstrap::limits::HANDSHAKE_TIMEOUT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::commands::{ConnectionCommand, ConnectionEvent};
use super::config::{Membership, NodeConfig};
use super::error::NodeEnded;
use super::shared::Shared;
use session::{Action, Claim, Hello, MAX_FRAME, PeerSession};
use unauthenticated::Unauthenticated;

/// The most connections that are accepted in a row, before other work is done.
const MAX_ACCEPTS: usize = 64;
/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Pause before the next `accept` after one has failed. The usual cause: no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the secret is used for; see [`Secret::derive`].
const PURPOSE: &str = "crosstie-kv control 1";

/// The control plane of one node.
pub(super) struct Control {
    hello: Hello,
    secret: Secret,
    listener: TcpListener,
    /// Set after an `accept` failed.
    accept_paused_until: Option<Instant>,
    addresses: Vec<SocketAddr>,
    unauthenticated: Unauthenticated<Channel>,
    /// By rank. The session of this node's own rank is never used.
    sessions: Vec<PeerSession>,
    /// Nodes that have proved the secret, with a rank that has a session, until they say which was started later: at most one of each rank,
    /// and until when it has to say so.
    claims: Vec<(usize, Channel, Instant)>,
    /// By daemon.
    commands: Vec<SyncSender<ConnectionCommand>>,
    events: Receiver<ConnectionEvent>,
    /// Readable when there are events, or when the node stops.
    wake: UnixStream,
    shared: Arc<Shared>,
    next_heartbeat: Instant,
}

impl Control {
    pub(super) fn new(
        config: &NodeConfig,
        membership: Membership,
        commands: Vec<SyncSender<ConnectionCommand>>,
        events: Receiver<ConnectionEvent>,
        wake: UnixStream,
        shared: Arc<Shared>,
    ) -> std::io::Result<Control> {
        membership.listener.set_nonblocking(true)?;
        wake.set_nonblocking(true)?;
        let &NodeConfig { rank, nodes, daemons, backend, .. } = config;
        let (version, incarnation) = (Hello::VERSION, shared.incarnation);
        Ok(Control {
            hello: Hello { version, rank, incarnation, nodes, daemons, backend, reserved: [0; 7] },
            secret: membership.secret.derive(PURPOSE),
            listener: membership.listener,
            accept_paused_until: None,
            addresses: membership.addresses,
            unauthenticated: Unauthenticated::new(),
            sessions: (0..nodes).map(|other| PeerSession::new(other, rank > other, daemons)).collect(),
            claims: Vec::new(),
            commands,
            events,
            wake,
            shared,
            next_heartbeat: Instant::now() + HEARTBEAT_INTERVAL,
        })
    }

    /// Runs until the node stops.
    pub(super) fn run(mut self) {
        while !self.shared.is_stopping() {
            self.wait();
            self.handle_events();
            self.accept_connections();
            self.authenticate_connections();
            self.weigh_claims();
            self.connect_to_peers();
            for rank in 0..self.sessions.len() {
                let action = self.sessions[rank].advance(&self.hello);
                self.perform(rank, action);
            }
            self.send_heartbeats();
        }
    }

    /// Waits until a socket is ready, a daemon has sent an event, or something is due.
    fn wait(&mut self) {
        let now = Instant::now();
        let connects = self.sessions.iter().filter_map(|session| session.connect_at);
        let deadlines = self.unauthenticated.iter().map(|(_, deadline)| deadline);
        let claims = self.claims.iter().map(|(_, _, until)| *until);
        let next = connects.chain(deadlines).chain(claims).chain(self.accept_paused_until).min();
        let next = next.map_or(self.next_heartbeat, |next| next.min(self.next_heartbeat));
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        if self.accept_paused_until.is_none() {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        let channels = self.sessions.iter().filter_map(|session| session.channel.as_ref());
        let claims = self.claims.iter().map(|(_, channel, _)| channel);
        for channel in channels.chain(claims).chain(self.unauthenticated.iter().map(|(channel, _)| channel)) {
            let writes = if channel.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::new(channel, PollFlags::IN | writes));
        }
        let timeout = Timespec::try_from(next.saturating_duration_since(now)).ok();
        if poll(&mut fds, timeout.as_ref()).is_err_and(|errno| errno != rustix::io::Errno::INTR) {
            // Without `poll`, check everything every few milliseconds.
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(fds);
        let mut bytes = [0; 64];
        // Empties the socket. The events themselves are in the channel and are received in any case.
        while self.wake.read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
    }

    /// Handles what the daemons said about their connections.
    fn handle_events(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            let (ConnectionEvent::Opened { rank, epoch, .. }
            | ConnectionEvent::Connected { rank, epoch, .. }
            | ConnectionEvent::Up { rank, epoch, .. }
            | ConnectionEvent::Failed { rank, epoch, .. }) = event;
            let rank = rank as usize;
            let session = &mut self.sessions[rank];
            if session.epoch != epoch || session.channel.is_none() {
                continue;
            }
            let action = match event {
                ConnectionEvent::Opened { daemon, address, .. } => session.note_opened(daemon, address),
                ConnectionEvent::Connected { daemon, .. } => session.note_connected(daemon),
                ConnectionEvent::Up { daemon, .. } => {
                    if session.connection_up(daemon) {
                        self.shared.set_peer_up(rank, session.incarnation());
                    }
                    None
                }
                ConnectionEvent::Failed { why, .. } => Some(Action::Disconnect(why)),
            };
            self.perform(rank, action);
        }
    }

    /// Performs the action, and all that follow from it.
    fn perform(&mut self, rank: usize, action: Option<Action>) {
        match action {
            None => {}
            Some(Action::Disconnect(why)) => self.disconnect(rank, why),
            Some(Action::EndNode) => {
                self.shared.ended.get_or_init(|| NodeEnded::Replaced { rank: self.hello.rank });
                self.shared.stop();
            }
            Some(Action::Command(daemons, command)) => {
                let mut is_sent = true;
                for daemon in daemons {
                    is_sent &= self.send_command(daemon as usize, command);
                }
                if is_sent {
                    // The session may have received more messages.
                    let action = self.sessions[rank].advance(&self.hello);
                    self.perform(rank, action);
                } else {
                    self.disconnect(rank, "a daemon of this node does not respond".to_owned());
                }
            }
        }
    }

    /// Sends a command to a daemon. Returns false if its channel is full or closed.
    fn send_command(&self, daemon: usize, command: ConnectionCommand) -> bool {
        let is_sent = self.commands[daemon].try_send(command).is_ok();
        self.shared.wake_flags[daemon].set();
        is_sent
    }

    fn disconnect(&mut self, rank: usize, why: String) {
        let epoch = self.sessions[rank].epoch;
        self.sessions[rank].end(self.hello.rank as usize > rank);
        self.shared.set_peer_down(rank, why);
        for daemon in 0..self.commands.len() {
            // If the daemon does not receive it, it is about to end, and its connections with it.
            self.send_command(daemon, ConnectionCommand::Close { rank: rank as u32, epoch });
        }
    }

    fn accept_connections(&mut self) {
        let now = Instant::now();
        if self.accept_paused_until.is_some_and(|until| until > now) {
            return;
        }
        self.accept_paused_until = None;
        // Bounded, so that a flood of connections does not keep the thread from its other work.
        for _ in 0..MAX_ACCEPTS {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    // An IPv6 listener also gets IPv4 connections.
                    let is_listed = self
                        .addresses
                        .iter()
                        .any(|node| node.ip().to_canonical() == from.ip().to_canonical());
                    // A connection that has already failed is dropped.
                    if let Ok(channel) = Channel::from_accepted(stream, &self.secret, MAX_FRAME)
                        && self.unauthenticated.insert(channel, is_listed, now, HANDSHAKE_TIMEOUT).is_some()
                    {
                        self.shared.count_refused_connection();
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.accept_paused_until = Some(now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn authenticate_connections(&mut self) {
        let now = Instant::now();
        let (mut joining, shared) = (Vec::new(), &self.shared);
        self.unauthenticated.retain(now, |mut channel| {
            match channel.poll_event() {
                Ok(Some(ChannelEvent::JoinRequest { rank, size })) => joining.push((channel, rank, size)),
                Ok(None) => return Some(channel),
                // Nothing was refused: a program only looked whether the port is open.
                Ok(_) | Err(ChannelError::ClosedBeforeHandshake) => {}
                Err(_) => shared.count_refused_connection(),
            }
            None
        });
        for (channel, rank, size) in joining {
            self.admit(channel, rank, size);
        }
    }

    /// Starts a session with a node that has proved the secret, or refuses it.
    fn admit(&mut self, mut channel: Channel, rank: u32, size: u32) {
        if size != self.hello.nodes {
            self.shared.count_refused_connection();
            return channel.reject_size(self.hello.nodes);
        }
        // This node connects to the lower ranks itself.
        if rank <= self.hello.rank || rank >= size {
            self.shared.count_refused_connection();
            return channel.reject_rank();
        }
        if channel.accept_join().is_err() {
            return;
        }
        let rank = rank as usize;
        if self.sessions[rank].channel.is_some() {
            self.claims.retain(|(claimed, ..)| *claimed != rank);
            self.claims.push((rank, channel, Instant::now() + HANDSHAKE_TIMEOUT));
            return;
        }
        self.sessions[rank].begin(channel);
        let action = self.sessions[rank].send_hello(&self.hello);
        self.perform(rank, action);
    }

    /// Decides between the node of a session and another one with the same rank.
    fn weigh_claims(&mut self) {
        let now = Instant::now();
        for (rank, channel, until) in std::mem::take(&mut self.claims) {
            match self.sessions[rank].weigh_claim(channel, &self.hello) {
                Claim::Pending(channel) if until > now => self.claims.push((rank, channel, until)),
                Claim::Pending(_) | Claim::Refused => self.shared.count_refused_connection(),
                Claim::Newer(channel, hello) => {
                    if self.sessions[rank].channel.is_some() {
                        let why = "it has connected again: it was restarted, or another node was started with its rank";
                        self.disconnect(rank, why.to_owned());
                    }
                    self.sessions[rank].begin(channel);
                    let action = self.sessions[rank].send_hello(&self.hello);
                    self.perform(rank, action);
                    let action = self.sessions[rank].handle_hello(&hello, &self.hello);
                    self.perform(rank, action);
                }
            }
        }
    }

    fn connect_to_peers(&mut self) {
        let now = Instant::now();
        for rank in 0..self.sessions.len() {
            if self.sessions[rank].connect_at.is_none_or(|at| at > now) {
                continue;
            }
            let Hello { rank: ours, nodes, .. } = self.hello;
            match Channel::connect(self.addresses[rank], ours, nodes, &self.secret, MAX_FRAME) {
                Ok(channel) => self.sessions[rank].begin(channel),
                Err(error) => self.disconnect(rank, error.to_string()),
            }
        }
    }

    fn send_heartbeats(&mut self) {
        let now = Instant::now();
        if now < self.next_heartbeat {
            return;
        }
        self.next_heartbeat = now + HEARTBEAT_INTERVAL;
        for rank in 0..self.sessions.len() {
            let action = self.sessions[rank].heartbeat();
            self.perform(rank, action);
        }
    }
}
