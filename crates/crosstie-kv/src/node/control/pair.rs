//! What this node and one other say to each other about their connection.
//!
//! ```text
//! both    HELLO    who I am; refused with SORRY if the two cannot belong to one cluster
//! both    ADDRESS  the endpoint that my daemon made for you
//! both    READY    my daemon has connected it with yours
//! both    BEAT     I am here
//! ```
//!
//! Requests go out when both are ready. Whatever fails, the pair is down and begins anew, with fresh endpoints.

use std::time::{Duration, Instant};

use crosstie::bootstrap::channel::{Channel, ChannelError, ChannelEvent};
use crosstie::copyrpc::EndpointAddress;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::super::network::Command;
use crate::Backend;

/// The longest payload.
pub(super) const MAX_FRAME: usize = 1024;
/// Pauses between two attempts to dial: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Beats without a word after which the other node is gone. Counted in our own beats: if we were stopped ourselves, that
/// says nothing about others.
const SILENT_BEATS: u32 = 10;

const HELLO: u8 = 1;
const ADDRESS: u8 = 2;
const READY: u8 = 3;
const BEAT: u8 = 4;
const SORRY: u8 = 5;

/// Who a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Hello {
    pub(super) incarnation: u64,
    pub(super) rank: u32,
    pub(super) nodes: u32,
    pub(super) daemons: u32,
    pub(super) backend: Backend,
    pub(super) reserved: [u8; 3],
}

impl Hello {
    /// Why the two cannot belong to one cluster.
    fn objection(&self, theirs: &Hello, rank: u32) -> Option<String> {
        if theirs.rank != rank {
            Some(format!("rank {rank} was expected, and rank {} answered: check the addresses", theirs.rank))
        } else if (theirs.nodes, theirs.daemons, theirs.backend) != (self.nodes, self.daemons, self.backend) {
            Some(format!(
                "rank {rank} has {} nodes, {} daemons, {:?}; rank {} has {} nodes, {} daemons, {:?}: start all alike",
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

/// This node's connection with another.
pub(super) struct Pair {
    pub(super) rank: u32,
    pub(super) epoch: u64,
    pub(super) channel: Option<Channel>,
    /// When to dial next, where it is ours to dial.
    pub(super) dial_at: Option<Instant>,
    pause: Duration,
    incarnation: Option<u64>,
    ours: Option<EndpointAddress>,
    theirs: Option<EndpointAddress>,
    is_connecting: bool,
    is_connected: bool,
    is_peer_ready: bool,
    silent: u32,
}

/// What follows from what came.
pub(super) enum Step {
    /// The daemon that holds the connection has something to do.
    Command(Command),
    /// The pair is down.
    Down(String),
}

impl Pair {
    pub(super) fn new(rank: u32, dials: bool) -> Pair {
        Pair {
            rank,
            epoch: 0,
            channel: None,
            dial_at: dials.then(Instant::now),
            pause: FIRST_PAUSE,
            incarnation: None,
            ours: None,
            theirs: None,
            is_connecting: false,
            is_connected: false,
            is_peer_ready: false,
            silent: 0,
        }
    }

    /// Begins anew, over a channel that is being dialled or was accepted.
    pub(super) fn begin(&mut self, channel: Channel) {
        self.forget();
        self.epoch += 1;
        self.dial_at = None;
        self.channel = Some(channel);
    }

    /// Is over. Who dials, dials again after a pause.
    pub(super) fn end(&mut self, dials: bool) {
        self.forget();
        self.channel = None;
        self.dial_at = dials.then(|| Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    fn forget(&mut self) {
        (self.incarnation, self.ours, self.theirs) = (None, None, None);
        (self.is_connecting, self.is_connected, self.is_peer_ready) = (false, false, false);
        self.silent = 0;
    }

    /// The other node's, once it has said so.
    pub(super) fn incarnation(&self) -> Option<u64> {
        self.incarnation
    }

    /// Says who we are.
    pub(super) fn greet(&mut self, hello: &Hello) -> Option<Step> {
        self.send(HELLO, hello.as_bytes())
    }

    /// Takes in what came, one thing at a time.
    pub(super) fn advance(&mut self, hello: &Hello) -> Option<Step> {
        loop {
            let news = match self.channel.as_mut()?.poll_event() {
                Ok(Some(news)) => news,
                Ok(None) => return None,
                Err(ChannelError::Closed) => {
                    let why = match self.incarnation {
                        Some(_) => "it ended, or the connection to it was cut",
                        None => "no node answers at its address",
                    };
                    return Some(Step::Down(why.to_owned()));
                }
                Err(error) => return Some(Step::Down(error.to_string())),
            };
            self.silent = 0;
            let step = match news {
                ChannelEvent::Open => self.greet(hello),
                ChannelEvent::Frame { kind, payload } => self.hear(kind, &payload, hello),
                // Claims are judged before a channel belongs to a pair.
                ChannelEvent::JoinRequest { .. } => {
                    Some(Step::Down("it broke the protocol: is it of the same release?".to_owned()))
                }
            };
            if step.is_some() {
                return step;
            }
        }
    }

    fn hear(&mut self, kind: u8, payload: &[u8], hello: &Hello) -> Option<Step> {
        let (rank, epoch) = (self.rank, self.epoch);
        match kind {
            HELLO if self.incarnation.is_none() => {
                let Ok(theirs) = Hello::try_read_from_bytes(payload) else { return Some(nonsense()) };
                if let Some(objection) = hello.objection(&theirs, rank) {
                    // Whether it hears why or not, it is refused.
                    drop(self.send(SORRY, objection.as_bytes()));
                    return Some(Step::Down(objection));
                }
                self.incarnation = Some(theirs.incarnation);
                Some(Step::Command(Command::Open { rank, epoch }))
            }
            ADDRESS if self.incarnation.is_some() && self.theirs.is_none() => {
                let Ok(theirs) = EndpointAddress::read_from_bytes(payload) else { return Some(nonsense()) };
                self.theirs = Some(theirs);
                self.connect()
            }
            READY if self.theirs.is_some() && !self.is_peer_ready => {
                self.is_peer_ready = true;
                self.enable()
            }
            BEAT => None,
            SORRY => Some(Step::Down(String::from_utf8_lossy(payload).into_owned())),
            _ => Some(nonsense()),
        }
    }

    /// Our daemon has an endpoint.
    pub(super) fn opened(&mut self, address: EndpointAddress) -> Option<Step> {
        self.ours = Some(address);
        self.send(ADDRESS, address.as_bytes()).or_else(|| self.connect())
    }

    /// Our daemon has connected it.
    pub(super) fn connected(&mut self) -> Option<Step> {
        self.is_connected = true;
        self.send(READY, &[]).or_else(|| self.enable())
    }

    /// Our daemon sends requests.
    pub(super) fn up(&mut self) {
        self.pause = FIRST_PAUSE;
    }

    /// Says that we are here, and counts how long the other node has not.
    pub(super) fn beat(&mut self) -> Option<Step> {
        let channel = self.channel.as_ref()?;
        self.silent += 1;
        if self.silent > SILENT_BEATS {
            return Some(Step::Down(
                "it has said nothing for long: it is stopped, or its network is down".to_owned(),
            ));
        }
        if channel.is_open() { self.send(BEAT, &[]) } else { None }
    }

    fn connect(&mut self) -> Option<Step> {
        let (Some(_), Some(address), false) = (self.ours, self.theirs, self.is_connecting) else {
            return None;
        };
        self.is_connecting = true;
        Some(Step::Command(Command::Connect { rank: self.rank, epoch: self.epoch, address }))
    }

    fn enable(&mut self) -> Option<Step> {
        let both = self.is_connected && self.is_peer_ready;
        both.then_some(Step::Command(Command::Enable { rank: self.rank, epoch: self.epoch }))
    }

    fn send(&mut self, kind: u8, payload: &[u8]) -> Option<Step> {
        let payload = &payload[..payload.len().min(MAX_FRAME)];
        let sent = self.channel.as_mut()?.send(kind, payload);
        sent.err().map(|error| Step::Down(error.to_string()))
    }
}

fn nonsense() -> Step {
    Step::Down("it broke the protocol: is it of the same release?".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(rank: u32) -> Hello {
        Hello { incarnation: 7, rank, nodes: 3, daemons: 2, backend: Backend::Meta, reserved: [0; 3] }
    }

    #[test]
    fn nodes_of_other_clusters_are_refused_with_a_reason() {
        assert_eq!(hello(0).objection(&hello(1), 1), None);
        let reason = |theirs| hello(0).objection(&theirs, 1).unwrap();
        assert!(reason(hello(2)).contains("rank 1 was expected"));
        assert!(reason(Hello { daemons: 3, ..hello(1) }).contains("3 daemons"));
        assert!(reason(Hello { nodes: 4, ..hello(1) }).contains("4 nodes"));
        assert!(reason(Hello { backend: Backend::Delegation, ..hello(1) }).contains("Delegation"));
    }

    #[test]
    fn frames_out_of_order_end_the_pair() {
        let mut pair = Pair::new(1, false);
        for kind in [ADDRESS, READY, 77] {
            assert!(matches!(pair.hear(kind, &[], &hello(0)), Some(Step::Down(_))), "{kind}");
        }
        assert!(matches!(pair.hear(HELLO, &[1, 2], &hello(0)), Some(Step::Down(_))));
        let open = pair.hear(HELLO, hello(1).as_bytes(), &hello(0));
        assert!(matches!(open, Some(Step::Command(Command::Open { rank: 1, .. }))));
        assert!(matches!(pair.hear(HELLO, hello(1).as_bytes(), &hello(0)), Some(Step::Down(_))));
        assert!(matches!(pair.hear(READY, &[], &hello(0)), Some(Step::Down(_))));
    }

    #[test]
    fn silence_is_counted_in_beats() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let secret = crosstie::bootstrap::Secret::random().unwrap();
        let mut pair = Pair::new(1, true);
        assert!(pair.beat().is_none(), "nobody to listen to");
        pair.begin(Channel::connect(listener.local_addr().unwrap(), 1, 2, &secret, MAX_FRAME).unwrap());
        for _ in 0..SILENT_BEATS {
            assert!(pair.beat().is_none());
        }
        assert!(matches!(pair.beat(), Some(Step::Down(_))));
    }
}
