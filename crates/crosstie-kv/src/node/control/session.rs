//! The messages between this node and one other about their connection.
//!
//! ```text
//! both    1 HELLO      version u32 | rank u32 | incarnation u64 | nodes u32 | daemons u32 | backend u8 | zero [7]
//! both    2 ADDRESS    daemon u32 | the address of the connection that this daemon of the sender created for the receiver's
//! both    3 READY      daemon u32: this daemon of the sender has connected with the receiver's
//! both    4 HEARTBEAT  empty
//! both    5 REJECT     UTF-8: why the two nodes cannot belong to one cluster; follows a HELLO
//! to R    6 REPLACED   incarnation u64: of a node that was started later, with the receiver's rank
//! ```
//!
//! Each message is one frame of an authenticated [`Channel`]. There is an ADDRESS and a READY for each daemon. Requests flow between two
//! daemons when both are ready; the node is up when all are. If anything fails, the session ends; the next one starts from HELLO, with
//! new connections.

use std::ops::Range;
use std::time::{Duration, Instant};

use crosstie::bootstrap::channel::{Channel, ChannelError, ChannelEvent};
use crosstie::copyrpc::ConnectionAddress;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::super::commands::ConnectionCommand;
use crate::Backend;

/// The longest payload of a message, in bytes.
pub(super) const MAX_FRAME: usize = 1024;
/// Pauses between two attempts to connect: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Heartbeats of this node without a message of the other after which the other counts as failed. This node counts its own
/// heartbeats, not time: if this node itself was stopped, that says nothing about the other.
const MAX_SILENT_HEARTBEATS: u32 = 10;

const HELLO: u8 = 1;
const ADDRESS: u8 = 2;
const READY: u8 = 3;
const HEARTBEAT: u8 = 4;
const REJECT: u8 = 5;
const REPLACED: u8 = 6;

/// What a node says about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Hello {
    /// [`Hello::VERSION`]. First in all versions; the rest may differ.
    pub(super) version: u32,
    pub(super) rank: u32,
    pub(super) incarnation: u64,
    pub(super) nodes: u32,
    pub(super) daemons: u32,
    pub(super) backend: Backend,
    pub(super) reserved: [u8; 7],
}

impl Hello {
    /// Changes whenever a node of the version before could no longer talk to a node of this one: with these messages, or with the
    /// requests that nodes forward to each other.
    pub(super) const VERSION: u32 = 3;

    /// Decodes the hello of the node at the address of `rank`, and compares it with that of this node. The error says why the two
    /// cannot belong to one cluster. `None`: it is invalid.
    fn decode(&self, payload: &[u8], rank: u32) -> Option<Result<Hello, String>> {
        let version = u32::from_le_bytes(*payload.first_chunk()?);
        if version != self.version {
            return Some(Err(format!(
                "rank {rank} has version {version} of the protocol between nodes, rank {} has version {}: \
                 run the same release on all nodes",
                self.rank, self.version
            )));
        }
        let theirs = Hello::try_read_from_bytes(payload).ok()?;
        Some(self.find_mismatch(&theirs, rank).map_or(Ok(theirs), Err))
    }

    /// Compares the configurations of this node and of the node at the address of `rank`. Returns why the two cannot belong to one
    /// cluster.
    fn find_mismatch(&self, theirs: &Hello, rank: u32) -> Option<String> {
        if theirs.rank != rank {
            Some(format!(
                "the node at the address of rank {rank} has rank {}: check the list of addresses",
                theirs.rank
            ))
        } else if (theirs.nodes, theirs.daemons, theirs.backend) != (self.nodes, self.daemons, self.backend) {
            Some(format!(
                "rank {rank} has {} nodes, {} daemons, {:?}; rank {} has {} nodes, {} daemons, {:?}: \
                 start all nodes with the same options",
                theirs.nodes,
                theirs.daemons,
                theirs.backend,
                self.rank,
                self.nodes,
                self.daemons,
                self.backend
            ))
        } else {
            None
        }
    }
}

/// The session of this node with one other.
pub(super) struct PeerSession {
    pub(super) rank: u32,
    /// Counts sessions with this rank.
    pub(super) epoch: u64,
    pub(super) channel: Option<Channel>,
    /// When to connect next, if this node is the one that connects.
    pub(super) connect_at: Option<Instant>,
    retry_pause: Duration,
    /// That of the other node. Set by its HELLO.
    incarnation: Option<u64>,
    /// By daemon.
    connections: Box<[ConnectionState]>,
    silent_heartbeats: u32,
}

/// How far the connection of a daemon of this node with that of the other node is.
#[derive(Clone, Copy, Default)]
struct ConnectionState {
    /// Whether this node's daemon has created its connection.
    is_open: bool,
    /// Of the connection that the other node's daemon created.
    remote_address: Option<ConnectionAddress>,
    is_connecting: bool,
    is_connected: bool,
    is_peer_ready: bool,
    is_up: bool,
}

/// What the control plane has to do next.
pub(super) enum Action {
    /// Send a command to these daemons.
    Command(Range<u32>, ConnectionCommand),
    /// End the session, for this reason.
    Disconnect(String),
    /// End this node: a newer one has its rank.
    EndNode,
}

/// What a node that has proved the secret, with the rank of a session, has said.
pub(super) enum Claim {
    /// Nothing yet.
    Pending(Channel),
    /// It was started after the node of the session, or is the same one: this is its HELLO.
    Newer(Channel, Vec<u8>),
    /// It is refused, and was told why.
    Refused,
}

impl PeerSession {
    pub(super) fn new(rank: u32, connects: bool, daemons: u32) -> PeerSession {
        PeerSession {
            rank,
            epoch: 0,
            channel: None,
            connect_at: connects.then(Instant::now),
            retry_pause: FIRST_PAUSE,
            incarnation: None,
            connections: (0..daemons).map(|_| ConnectionState::default()).collect(),
            silent_heartbeats: 0,
        }
    }

    /// Begins a new session on a channel that is being connected or was accepted.
    pub(super) fn begin(&mut self, channel: Channel) {
        self.reset();
        self.epoch += 1;
        self.connect_at = None;
        self.channel = Some(channel);
    }

    /// Ends the session. If this node is the one that connects, it does so again after a pause.
    pub(super) fn end(&mut self, connects: bool) {
        self.reset();
        self.channel = None;
        self.connect_at = connects.then(|| Instant::now() + self.retry_pause);
        self.retry_pause = (self.retry_pause * 2).min(LONGEST_PAUSE);
    }

    fn reset(&mut self) {
        self.incarnation = None;
        self.connections.fill(ConnectionState::default());
        self.silent_heartbeats = 0;
    }

    /// The other node's incarnation, once its HELLO has arrived.
    pub(super) fn incarnation(&self) -> Option<u64> {
        self.incarnation
    }

    /// Compares a node that has the rank of this session with the node of the session. The older one is told to end.
    pub(super) fn weigh_claim(&mut self, mut channel: Channel, hello: &Hello) -> Claim {
        let payload = match channel.poll_event() {
            Ok(None) => return Claim::Pending(channel),
            Ok(Some(ChannelEvent::Frame { kind: HELLO, payload })) => payload,
            Ok(_) | Err(_) => return Claim::Refused,
        };
        // Whether or not the other node receives the reason, it is refused.
        let refuse = |mut channel: Channel, kind, reason: &[u8]| {
            drop(channel.send(kind, &reason[..reason.len().min(MAX_FRAME)]));
            Claim::Refused
        };
        let theirs = match hello.decode(&payload, self.rank) {
            Some(Ok(theirs)) => theirs.incarnation,
            Some(Err(mismatch)) => return refuse(channel, REJECT, mismatch.as_bytes()),
            None => return Claim::Refused,
        };
        match self.incarnation {
            Some(current) if current > theirs => return refuse(channel, REPLACED, &current.to_le_bytes()),
            Some(current) if current < theirs => drop(self.send(REPLACED, &theirs.to_le_bytes())),
            _ => {}
        }
        Claim::Newer(channel, payload)
    }

    /// Handles the HELLO that came before the session began.
    pub(super) fn handle_hello(&mut self, payload: &[u8], hello: &Hello) -> Option<Action> {
        self.handle_message(HELLO, payload, hello)
    }

    pub(super) fn send_hello(&mut self, hello: &Hello) -> Option<Action> {
        self.send(HELLO, hello.as_bytes())
    }

    /// Receives messages until one requires an action, or there are no more.
    pub(super) fn advance(&mut self, hello: &Hello) -> Option<Action> {
        loop {
            let event = match self.channel.as_mut()?.poll_event() {
                Ok(Some(event)) => event,
                Ok(None) => return None,
                Err(ChannelError::Closed) => {
                    let why = match self.incarnation {
                        Some(_) => "it ended, or the connection with it was cut",
                        None => "no node responds at its address",
                    };
                    return Some(Action::Disconnect(why.to_owned()));
                }
                Err(ChannelError::ClosedBeforeHandshake) => {
                    let why = "a program at its address closed the connection before the handshake: is it a crosstie node?";
                    return Some(Action::Disconnect(why.to_owned()));
                }
                Err(error) => return Some(Action::Disconnect(error.to_string())),
            };
            self.silent_heartbeats = 0;
            let action = match event {
                ChannelEvent::Open => self.send_hello(hello),
                ChannelEvent::Frame { kind, payload } => self.handle_message(kind, &payload, hello),
                // The control plane handles join requests before a channel belongs to a session.
                ChannelEvent::JoinRequest { .. } => Some(protocol_violation()),
            };
            if action.is_some() {
                return action;
            }
        }
    }

    fn handle_message(&mut self, kind: u8, payload: &[u8], hello: &Hello) -> Option<Action> {
        let (rank, epoch) = (self.rank, self.epoch);
        match kind {
            HELLO if self.incarnation.is_none() => {
                let theirs = match hello.decode(payload, rank) {
                    Some(Ok(theirs)) => theirs,
                    Some(Err(mismatch)) => {
                        // The session ends whether or not the other node receives the reason.
                        drop(self.send(REJECT, mismatch.as_bytes()));
                        return Some(Action::Disconnect(mismatch));
                    }
                    None => return Some(protocol_violation()),
                };
                self.incarnation = Some(theirs.incarnation);
                let all = 0..self.connections.len() as u32;
                Some(Action::Command(all, ConnectionCommand::Open { rank, epoch }))
            }
            ADDRESS if self.incarnation.is_some() => {
                let Some((daemon, connection, address)) = self.addressee(payload) else {
                    return Some(protocol_violation());
                };
                match ConnectionAddress::read_from_bytes(address) {
                    Ok(address) if connection.remote_address.is_none() => {
                        connection.remote_address = Some(address);
                        self.connect_peer(daemon)
                    }
                    _ => Some(protocol_violation()),
                }
            }
            READY => match self.addressee(payload) {
                Some((daemon, connection, []))
                    if connection.remote_address.is_some() && !connection.is_peer_ready =>
                {
                    connection.is_peer_ready = true;
                    self.enable_requests(daemon)
                }
                _ => Some(protocol_violation()),
            },
            HEARTBEAT => None,
            REPLACED => match payload.try_into().map(u64::from_le_bytes) {
                Ok(newer) if newer > hello.incarnation => Some(Action::EndNode),
                _ => Some(protocol_violation()),
            },
            REJECT => Some(Action::Disconnect(String::from_utf8_lossy(payload).into_owned())),
            _ => Some(protocol_violation()),
        }
    }

    /// The daemon that a message is for, the state of its connection, and the rest of the message.
    fn addressee<'p>(&mut self, payload: &'p [u8]) -> Option<(u32, &mut ConnectionState, &'p [u8])> {
        let (daemon, rest) = payload.split_first_chunk()?;
        let daemon = u32::from_le_bytes(*daemon);
        Some((daemon, self.connections.get_mut(daemon as usize)?, rest))
    }

    /// The daemon has created its connection.
    pub(super) fn note_opened(&mut self, daemon: u32, address: ConnectionAddress) -> Option<Action> {
        self.connections[daemon as usize].is_open = true;
        let message = [&daemon.to_le_bytes()[..], address.as_bytes()].concat();
        self.send(ADDRESS, &message).or_else(|| self.connect_peer(daemon))
    }

    /// The daemon has connected its side.
    pub(super) fn note_connected(&mut self, daemon: u32) -> Option<Action> {
        self.connections[daemon as usize].is_connected = true;
        self.send(READY, &daemon.to_le_bytes()).or_else(|| self.enable_requests(daemon))
    }

    /// The daemon sends requests. Returns whether all daemons do.
    pub(super) fn connection_up(&mut self, daemon: u32) -> bool {
        self.connections[daemon as usize].is_up = true;
        let is_up = self.connections.iter().all(|connection| connection.is_up);
        if is_up {
            self.retry_pause = FIRST_PAUSE;
        }
        is_up
    }

    /// Sends a heartbeat, and counts those since the other node's last message.
    pub(super) fn heartbeat(&mut self) -> Option<Action> {
        let channel = self.channel.as_ref()?;
        self.silent_heartbeats += 1;
        if self.silent_heartbeats > MAX_SILENT_HEARTBEATS {
            return Some(Action::Disconnect(
                "it has sent no heartbeat for 5 s: it is stopped, or its network is down".to_owned(),
            ));
        }
        if channel.is_open() { self.send(HEARTBEAT, &[]) } else { None }
    }

    /// Has the daemon connect, once both daemons have created their side of the connection.
    fn connect_peer(&mut self, daemon: u32) -> Option<Action> {
        let connection = &mut self.connections[daemon as usize];
        let (true, Some(address), false) =
            (connection.is_open, connection.remote_address, connection.is_connecting)
        else {
            return None;
        };
        connection.is_connecting = true;
        let (rank, epoch) = (self.rank, self.epoch);
        Some(Action::Command(daemon..daemon + 1, ConnectionCommand::Connect { rank, epoch, address }))
    }

    /// Has the daemon send requests, once both sides are connected.
    fn enable_requests(&self, daemon: u32) -> Option<Action> {
        let connection = &self.connections[daemon as usize];
        let (rank, epoch) = (self.rank, self.epoch);
        (connection.is_connected && connection.is_peer_ready)
            .then_some(Action::Command(daemon..daemon + 1, ConnectionCommand::Enable { rank, epoch }))
    }

    fn send(&mut self, kind: u8, payload: &[u8]) -> Option<Action> {
        let payload = &payload[..payload.len().min(MAX_FRAME)];
        let sent = self.channel.as_mut()?.send(kind, payload);
        sent.err().map(|error| Action::Disconnect(error.to_string()))
    }
}

fn protocol_violation() -> Action {
    Action::Disconnect("it violated the protocol: run the same release on all nodes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: u32) -> Hello {
        let (version, backend) = (Hello::VERSION, Backend::Meta);
        Hello { version, rank, incarnation: 7, nodes: 3, daemons: 2, backend, reserved: [0; 7] }
    }

    #[test]
    fn node_of_another_cluster_is_rejected_with_the_reason() {
        assert_eq!(hello(0).find_mismatch(&hello(1), 1), None);
        let reason = |theirs| hello(0).find_mismatch(&theirs, 1).unwrap();
        assert!(reason(hello(2)).contains("the address of rank 1 has rank 2"));
        assert!(reason(Hello { daemons: 3, ..hello(1) }).contains("3 daemons"));
        assert!(reason(Hello { nodes: 4, ..hello(1) }).contains("4 nodes"));
        assert!(reason(Hello { backend: Backend::Delegation, ..hello(1) }).contains("Delegation"));
    }

    #[test]
    fn messages_out_of_order_end_the_session() {
        let mut session = PeerSession::new(1, false, 2);
        let ready = |daemon: u32| daemon.to_le_bytes();
        let address = |daemon: u32| [&ready(daemon)[..], &[5; size_of::<ConnectionAddress>()]].concat();
        for (kind, payload) in [(ADDRESS, &address(0)[..]), (READY, &ready(0)), (77, &[])] {
            let action = session.handle_message(kind, payload, &hello(0));
            assert!(matches!(action, Some(Action::Disconnect(_))), "{kind}");
        }
        let mut receive = |kind, payload: &[u8]| session.handle_message(kind, payload, &hello(0));
        assert!(matches!(receive(HELLO, &[1, 2]), Some(Action::Disconnect(_))));
        let Some(Action::Command(daemons, ConnectionCommand::Open { rank: 1, .. })) =
            receive(HELLO, hello(1).as_bytes())
        else {
            panic!("all daemons create a connection")
        };
        assert_eq!(daemons, 0..2);
        assert!(matches!(receive(HELLO, hello(1).as_bytes()), Some(Action::Disconnect(_))));
        assert!(matches!(receive(READY, &ready(0)), Some(Action::Disconnect(_))), "there is no address yet");
        assert!(receive(ADDRESS, &address(1)).is_none());
        for payload in [&address(1)[..], &address(2), &address(0)[1..], &[]] {
            assert!(matches!(receive(ADDRESS, payload), Some(Action::Disconnect(_))), "{payload:?}");
        }
        assert!(receive(READY, &ready(1)).is_none());
        for payload in [&ready(1)[..], &ready(0), &ready(2), &address(1), &[]] {
            assert!(matches!(receive(READY, payload), Some(Action::Disconnect(_))), "{payload:?}");
        }
    }

    #[test]
    fn node_is_up_when_all_daemons_are_connected() {
        let mut session = PeerSession::new(1, false, 2);
        session.handle_message(HELLO, hello(1).as_bytes(), &hello(0));
        let bytes = [5; size_of::<ConnectionAddress>()];
        for daemon in [1u32, 0] {
            let number = daemon.to_le_bytes();
            let only = daemon..daemon + 1;
            assert!(
                session.note_opened(daemon, ConnectionAddress::read_from_bytes(&bytes).unwrap()).is_none()
            );
            let connect = session.handle_message(ADDRESS, &[&number[..], &bytes].concat(), &hello(0));
            let Some(Action::Command(daemons, ConnectionCommand::Connect { .. })) = connect else {
                panic!("both sides of daemon {daemon} are open")
            };
            assert_eq!(daemons, only);
            assert!(session.note_connected(daemon).is_none());
            let enable = session.handle_message(READY, &number, &hello(0));
            let Some(Action::Command(daemons, ConnectionCommand::Enable { .. })) = enable else {
                panic!("both sides of daemon {daemon} are connected")
            };
            assert_eq!(daemons, only);
            assert_eq!(session.connection_up(daemon), daemon == 0, "daemon 0 is the second one");
        }
    }

    #[test]
    fn silence_is_counted_in_own_heartbeats() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let secret = crosstie::bootstrap::Secret::random().unwrap();
        let mut session = PeerSession::new(1, true, 1);
        assert!(session.heartbeat().is_none(), "there is no session yet");
        session.begin(Channel::connect(listener.local_addr().unwrap(), 1, 2, &secret, MAX_FRAME).unwrap());
        for _ in 0..MAX_SILENT_HEARTBEATS {
            assert!(session.heartbeat().is_none());
        }
        assert!(matches!(session.heartbeat(), Some(Action::Disconnect(_))));
    }

    /// Control messages of a node that knows the secret and sends anything, between the steps of this node's daemons. Commands come
    /// once each and in their order: open, and for each daemon connect, enable.
    ///
    /// Input: `0, kind, length, payload`: a message; `1, daemon`: the daemon has opened its connection; `2, daemon`: it has connected it.
    #[test]
    fn fuzz_kv_control() {
        use crate::fuzzing::{Steps, fuzz};

        let address = [5; size_of::<ConnectionAddress>()];
        let message = |kind: u8, payload: &[u8]| [&[0, kind, payload.len() as u8][..], payload].concat();
        let connects = |daemon: u32| {
            let number = daemon.to_le_bytes();
            [
                &[1, daemon as u8][..],
                &message(ADDRESS, &[&number[..], &address].concat()),
                &[2, daemon as u8],
                &message(READY, &number),
            ]
            .concat()
        };
        let examples = [
            [message(HELLO, hello(1).as_bytes()), connects(0), connects(1)].concat(),
            message(HEARTBEAT, &[]),
            message(REJECT, b"why"),
        ];
        fuzz(env!("CARGO_MANIFEST_DIR"), "kv_control", examples, |input| {
            let (mut session, mut steps) = (PeerSession::new(1, false, 2), Steps(input));
            let (mut open, mut connect, mut enable) = (0, [0; 2], [0; 2]);
            while !steps.is_empty() {
                let action = match steps.byte() % 3 {
                    0 => {
                        let (kind, len) = (steps.byte(), usize::from(steps.byte()));
                        session.handle_message(kind, steps.take(len), &hello(0))
                    }
                    // A daemon does what it was told, once.
                    step => {
                        let daemon = u32::from(steps.byte() % 2);
                        let state = session.connections[daemon as usize];
                        if step == 1 && open == 1 && !state.is_open {
                            session.note_opened(daemon, ConnectionAddress::read_from_bytes(&address).unwrap())
                        } else if step == 2 && connect[daemon as usize] == 1 && !state.is_connected {
                            session.note_connected(daemon)
                        } else {
                            None
                        }
                    }
                };
                match action {
                    None => {}
                    Some(Action::Disconnect(reason)) => {
                        assert!(!reason.is_empty() || input.contains(&REJECT));
                        return;
                    }
                    Some(Action::EndNode) => {
                        assert!(input.contains(&REPLACED));
                        return;
                    }
                    Some(Action::Command(daemons, ConnectionCommand::Open { rank: 1, .. })) => {
                        assert_eq!(daemons, 0..2);
                        open += 1;
                    }
                    Some(Action::Command(daemons, ConnectionCommand::Connect { rank: 1, .. })) => {
                        assert_eq!((open, daemons.len()), (1, 1));
                        connect[daemons.start as usize] += 1;
                    }
                    Some(Action::Command(daemons, ConnectionCommand::Enable { rank: 1, .. })) => {
                        assert_eq!((connect[daemons.start as usize], daemons.len()), (1, 1));
                        enable[daemons.start as usize] += 1;
                    }
                    Some(Action::Command(..)) => panic!("a command for another rank"),
                }
                assert!(open <= 1 && connect.into_iter().chain(enable).all(|count| count <= 1));
            }
        });
    }
}
