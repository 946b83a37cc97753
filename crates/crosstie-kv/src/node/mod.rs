//! A node: the daemons of one rank, and what connects them with clients, each other and other nodes.
//!
//! ```
//! use crosstie_kv::client::Client;
//! use crosstie_kv::node::{Node, NodeConfig};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let node = Node::start(&NodeConfig { daemons: 2, ..NodeConfig::single("doc-node") })?;
//! let mut client = Client::attach("doc-node")?;
//! client.put(42, 7)?;
//! assert_eq!(client.get(42)?, Some(7));
//! drop(client);
//! node.stop()?;
//! # Ok(()) }
//! ```
//!
//! # Who does what
//!
//! A daemon is a thread with a shard of the node's keys. Its loop (delegation architecture §5 and §6) takes in turn from other
//! nodes, from the ring, from its clients and from other daemons; what it can answer it answers at once, all else it passes
//! on, and keeps in mind where the answer goes.
//!
//! ```text
//!                     client's request for a key of
//!                     this node             another node
//! Meta                ipc, to the owner     ipc, to the client's daemon; flux, to the daemon that holds the connection; copyrpc
//! Delegation          ipc, to the owner     the ring, to daemon 0, which holds all connections; copyrpc
//!
//! another node's request: copyrpc, to the daemon that holds the connection; flux, to the owner if that is another one
//! ```
//!
//! # Promises
//!
//! - No request is dropped. What finds no room waits in a backlog, in order; backlogs are bounded, because somebody waits for
//!   each request in them and may only have so many unanswered.
//! - No circular wait. A daemon never waits for anything, and never stops taking from anybody: a shard answers at once; so
//!   requests for its keys from other daemons do not wait (requests for other nodes cannot fill their lane); so other nodes'
//!   requests are answered; so requests for other nodes are. (It takes no more from other nodes while four mebibytes of their byte
//!   strings are at other daemons, whose shards answer at once.)
//! - Memory has a limit: [`NodeConfig::memory_bound`].
//! - A node that goes away ends all requests for it as [`NodeGone`](crate::wire::Status::NodeGone), pending ones and later
//!   ones, until it is back. See [`Node::peers`].
//! - If a daemon panics, the node ends: its clients and the other nodes notice, nobody waits for it.
//! - No request for an 8-byte key allocates, locks or makes a system call, once queues have grown to their size.
//! - An idle node sleeps most of the time: the longer it is idle the longer its naps, up to four milliseconds. A client's
//!   request for a key of the daemon that it sleeps at ends the nap; others wait for its end.

mod config;
mod control;
mod counters;
mod daemon;
mod error;
mod idle;
mod inside;
mod memory;
mod network;
mod passing;
mod spares;
mod strings;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crosstie::device::{Device, DeviceSpec};
use crosstie::{delegation, ipc};

pub use config::{MAX_CLIENTS, MAX_NAME, MAX_QUEUE_DEPTH, Membership, NodeConfig, QueueSizes};
pub use counters::{DaemonActivity, DaemonCounters};
pub use error::{Panicked, PeerMissing, PeersMissing, StartError};
pub use memory::MemoryBound;
pub use strings::MAX_BYTES_DEPTH;

use control::Control;
use daemon::Daemon;
use idle::Idle;
use inside::Inside;
use network::{Command, Event, Network, NoRing, Nowhere, Way};
use passing::Passing;
use strings::Strings;

use crate::service_names;
use crate::sharding::{ShardId, ShardMap};
use crate::store::Shard;
use crate::wire::{self, NodeInfo, WordRequest, WordResponse};

/// A node that runs, until it is stopped or dropped. See the [module](self).
pub struct Node {
    shared: Arc<Shared>,
    config: NodeConfig,
    threads: Vec<JoinHandle<()>>,
}

/// What is known about another node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerState {
    /// Its rank.
    pub rank: u32,
    /// Whether requests for it are sent.
    pub is_up: bool,
    /// Differs from one start of that node to the next; known while it is up.
    pub incarnation: Option<u64>,
    /// How often it has come up.
    pub times_up: u64,
    /// Why it is not up.
    pub problem: Option<String>,
}

/// What the threads of a node share.
struct Shared {
    incarnation: u64,
    stop: AtomicBool,
    /// The thread that panicked first.
    panicked: OnceLock<String>,
    board: counters::Board,
    peers: Mutex<Vec<PeerState>>,
    peers_changed: Condvar,
    refusals: AtomicU64,
    /// A few for each connection that is made: daemons answer commands.
    events: Sender<Event>,
    /// Wakes the control plane.
    bell: Option<UnixStream>,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        // Relaxed: nothing but the flag matters.
        self.stop.load(Relaxed)
    }

    fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.ring();
    }

    fn tell(&self, event: Event) {
        // Nobody listens where there are no other nodes, and at the end.
        if self.events.send(event).is_ok() {
            self.ring();
        }
    }

    fn ring(&self) {
        if let Some(mut bell) = self.bell.as_ref() {
            // A full pipe rings, too.
            bell.write_all(&[1]).ok();
        }
    }

    fn peers(&self) -> MutexGuard<'_, Vec<PeerState>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peer_is_up(&self, rank: usize, incarnation: Option<u64>) {
        let mut peers = self.peers();
        let peer = &mut peers[rank];
        (peer.is_up, peer.incarnation, peer.problem) = (true, incarnation, None);
        peer.times_up += 1;
        self.peers_changed.notify_all();
    }

    fn peer_is_down(&self, rank: usize, why: String) {
        let mut peers = self.peers();
        let peer = &mut peers[rank];
        (peer.is_up, peer.incarnation, peer.problem) = (false, None, Some(why));
        self.peers_changed.notify_all();
    }

    fn count_refusal(&self) {
        self.refusals.fetch_add(1, Relaxed);
    }
}

/// What a thread of a node leaves behind when it panics.
struct Alarm(Arc<Shared>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The first one is the cause; others may follow from it.
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            self.0.panicked.get_or_init(|| thread);
            self.0.stop();
        }
    }
}

impl Node {
    /// Starts the only node of a cluster.
    pub fn start(config: &NodeConfig) -> Result<Node, StartError> {
        Node::launch(config, None)
    }

    /// Starts a node of a cluster of several. Returns when clients can attach; other nodes may come later, see
    /// [`wait_for_peers`](Node::wait_for_peers).
    pub fn join(config: &NodeConfig, membership: Membership) -> Result<Node, StartError> {
        Node::launch(config, Some(membership))
    }

    fn launch(config: &NodeConfig, membership: Option<Membership>) -> Result<Node, StartError> {
        let placement = config.check(membership.as_ref())?;
        if membership.is_none() && config.device != DeviceSpec::Software {
            // Nothing goes through it, but whoever names a device wants to know that it is there.
            Device::open(&config.device).map_err(|cause| StartError::Device {
                daemon: 0,
                device: config.device.to_string(),
                cause,
            })?;
        }
        let (bell, far_bell) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        let (mut node, events) = Node::prepare(config, membership.is_some().then_some(bell));
        let commands = node.start_daemons(placement)?;
        if let Some(membership) = membership {
            let shared = node.shared.clone();
            let control = Control::new(config, membership, commands, events, far_bell, shared.clone())?;
            let alarm = Alarm(shared);
            let run = move || {
                let _alarm = alarm;
                control.run();
            };
            node.threads.push(std::thread::Builder::new().name("kv-control".to_owned()).spawn(run)?);
        }
        Ok(node)
    }

    /// A node without threads yet. From here on one that does not start ends those of its threads that have.
    fn prepare(config: &NodeConfig, bell: Option<UnixStream>) -> (Node, Receiver<Event>) {
        let (sender, events) = channel();
        let peer = |rank| PeerState { rank, is_up: false, incarnation: None, times_up: 0, problem: None };
        let shared = Arc::new(Shared {
            incarnation: incarnation(),
            stop: AtomicBool::new(false),
            panicked: OnceLock::new(),
            board: (0..config.daemons).map(|_| Mutex::default()).collect(),
            peers: Mutex::new((0..config.nodes).map(peer).collect()),
            peers_changed: Condvar::new(),
            refusals: AtomicU64::new(0),
            events: sender,
            bell,
        });
        (Node { shared, config: config.clone(), threads: Vec::new() }, events)
    }

    fn start_daemons(
        &mut self,
        placement: ShardMap,
    ) -> Result<Vec<std::sync::mpsc::SyncSender<Command>>, StartError> {
        let config = &self.config;
        let mut parts = Vec::new();
        let passing = passing::network(config.daemons, config.queues.forward)?;
        for ((daemon, passing), corridor) in (0..).zip(passing).zip(strings::corridors(config.daemons)) {
            let words = service(&config.name, service_names::words(&config.name, daemon), |name| {
                ipc::Server::create(name, &config.words())
            })?;
            let long = service(&config.name, service_names::bytes(&config.name, daemon), |name| {
                ipc::Server::create(name, &config.long())
            })?;
            let ring = if daemon == 0 && config.backend.uses_ring(config.nodes) {
                let name = service_names::ring(&config.name);
                Some(service(&config.name, name, |name| delegation::Server::create(name, &config.ring()))?)
            } else {
                None
            };
            let strings = Strings::new(long, self.info(), daemon, corridor);
            parts.push(Parts { words, strings, ring, passing });
        }
        let mut commands = Vec::new();
        let mut starting = Vec::new();
        for (daemon, parts) in (0..).zip(parts) {
            let (sender, receiver) = sync_channel(control::MAX_COMMANDS);
            let (ready, is_ready) = sync_channel(1);
            commands.push(sender);
            let (config, shared) = (self.config.clone(), self.shared.clone());
            let alarm = Alarm(shared.clone());
            let run = move || {
                let _alarm = alarm;
                let started = Start { config, placement, daemon, parts, commands: receiver, shared, ready };
                started.run();
            };
            self.threads.push(std::thread::Builder::new().name(format!("kv-daemon-{daemon}")).spawn(run)?);
            starting.push(is_ready);
        }
        for (daemon, is_ready) in (0..).zip(starting) {
            is_ready.recv().unwrap_or(Err(StartError::Daemon { daemon }))?;
        }
        Ok(commands)
    }

    fn info(&self) -> NodeInfo {
        let config = &self.config;
        NodeInfo {
            version: NodeInfo::VERSION,
            rank: config.rank,
            nodes: config.nodes,
            daemons: config.daemons,
            queue_depth: config.queue_depth as u32,
            max_clients: config.max_clients as u32,
            max_key: wire::MAX_KEY as u32,
            max_value: wire::MAX_VALUE as u32,
            incarnation: self.shared.incarnation,
            memory_limit: shard_limit(config) as u64,
            backend: config.backend,
            reserved: [0; 3],
            attach_count: 0,
        }
    }

    /// What clients attach to.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// What it was started with.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// What is known about the other nodes. This node's own place is there, too, and never up.
    pub fn peers(&self) -> Vec<PeerState> {
        self.shared.peers().clone()
    }

    /// Waits until all other nodes are up, or the time is over.
    pub fn wait_for_peers(&self, timeout: Duration) -> Result<(), PeersMissing> {
        let deadline = Instant::now() + timeout;
        let mut peers = self.shared.peers();
        loop {
            let mut missing =
                peers.iter().filter(|peer| peer.rank != self.config.rank && !peer.is_up).peekable();
            if missing.peek().is_none() {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.shared.is_stopping() {
                let why = |peer: &PeerState| {
                    peer.problem.clone().unwrap_or(
                        "nothing was heard of it yet: start it, with the same list of nodes".to_owned(),
                    )
                };
                let missing = missing.map(|peer| PeerMissing { rank: peer.rank, why: why(peer) });
                return Err(PeersMissing(missing.collect()));
            }
            let slice = left.min(Duration::from_millis(100));
            (peers, _) =
                self.shared.peers_changed.wait_timeout(peers, slice).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Connections to the control port that were refused: wrong secret, wrong rank, or no node at all.
    pub fn refused_connections(&self) -> u64 {
        self.shared.refusals.load(Relaxed)
    }

    /// What each daemon did so far, a few milliseconds ago.
    pub fn counters(&self) -> Vec<DaemonCounters> {
        let read = |place: &Mutex<DaemonCounters>| *place.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.board.iter().map(read).collect()
    }

    /// Whether it runs. False after a daemon has panicked.
    pub fn is_running(&self) -> bool {
        !self.shared.is_stopping()
    }

    /// Ends it: clients see it go, other nodes too. Says if a panic had ended it before.
    pub fn stop(mut self) -> Result<(), Panicked> {
        self.end();
        match self.shared.panicked.get() {
            None => Ok(()),
            Some(thread) => Err(Panicked { thread: thread.clone() }),
        }
    }

    fn end(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // A panic was reported by its hook, and is remembered.
            drop(thread.join());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("config", &self.config)
            .field("peers", &self.peers())
            .finish_non_exhaustive()
    }
}

/// What a daemon is given.
struct Parts {
    words: ipc::Server<WordRequest, WordResponse>,
    strings: Strings,
    ring: Option<network::Ring>,
    passing: Passing,
}

/// A daemon on its own thread, about to start. Connections belong to the thread that makes them.
struct Start {
    config: NodeConfig,
    placement: ShardMap,
    daemon: u32,
    parts: Parts,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    ready: std::sync::mpsc::SyncSender<Result<(), StartError>>,
}

impl Start {
    fn run(mut self) {
        if let Err(error) = self.pin() {
            return self.report(Err(error));
        }
        let NodeConfig { rank, nodes, daemons, backend, .. } = self.config;
        let connects =
            (0..nodes).any(|other| other != rank && backend.connection_owner(other, daemons) == self.daemon);
        match self.parts.ring.take() {
            Some(ring) => match self.network(ring) {
                Ok(network) => self.serve(network),
                Err(error) => self.report(Err(error)),
            },
            None if connects => match self.network(NoRing) {
                Ok(network) => self.serve(network),
                Err(error) => self.report(Err(error)),
            },
            None => self.serve(Nowhere),
        }
    }

    fn network<R: network::RingSide>(&self, ring: R) -> Result<Network<R>, StartError> {
        let config = &self.config;
        Network::open(&config.device, config.nodes, config.queues.endpoint, ring).map_err(|cause| {
            StartError::Device { daemon: self.daemon, device: config.device.to_string(), cause }
        })
    }

    fn serve(self, way: impl Way) {
        self.report(Ok(()));
        let (config, placement) = (self.config, self.placement);
        let inside = Inside {
            place: ShardId { rank: config.rank, daemon: self.daemon },
            placement,
            backend: config.backend,
            words: self.parts.words,
            shard: Shard::new(shard_limit(&config)),
            passing: self.parts.passing,
            long: self.parts.strings,
            counts: DaemonActivity::default(),
        };
        let idle = Idle::new(config.waiting);
        // Daemons of a node alone have nothing to ask each other: clients ask the right one.
        if config.daemons > 1 && config.nodes > 1 {
            Daemon::<_, true>::new(inside, way, idle, self.commands, self.shared).run();
        } else {
            Daemon::<_, false>::new(inside, way, idle, self.commands, self.shared).run();
        }
    }

    fn pin(&self) -> Result<(), StartError> {
        let Some(core) = self.config.cores.as_ref().map(|cores| cores[self.daemon as usize]) else {
            return Ok(());
        };
        let refused = |cause| StartError::Core { daemon: self.daemon, core, cause };
        if core >= rustix::thread::CpuSet::MAX_CPU {
            return Err(refused(std::io::ErrorKind::InvalidInput.into()));
        }
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        rustix::thread::sched_setaffinity(None, &set).map_err(|errno| refused(errno.into()))
    }

    fn report(&self, result: Result<(), StartError>) {
        // Who starts the node has given up on it if it does not listen.
        self.ready.send(result).ok();
    }
}

fn shard_limit(config: &NodeConfig) -> usize {
    usize::try_from(config.memory_limit / u64::from(config.daemons)).unwrap_or(usize::MAX)
}

fn service<S>(
    node: &str,
    name: String,
    create: impl FnOnce(&str) -> Result<S, ipc::CreateError>,
) -> Result<S, StartError> {
    create(&name).map_err(|cause| match cause {
        ipc::CreateError::NameTaken { .. } => StartError::NameTaken { name: node.to_owned() },
        cause => StartError::Service { name, cause },
    })
}

/// A number that no other start of a node has, in all likelihood.
fn incarnation() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    crate::sharding::hash_word(now.as_nanos() as u64 ^ (u64::from(std::process::id()) << 40))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::client::{Client, Error};
    use crate::wire::{Op, Status};

    /// Whatever a daemon panics of, its node ends, and nobody waits for it.
    #[test]
    fn a_panic_ends_the_node_and_all_that_wait() {
        for backend in [Backend::Meta, Backend::Delegation] {
            let name = format!("kv-panic-{}-{backend:?}", std::process::id());
            let config = NodeConfig { daemons: 3, backend, ..NodeConfig::member(&name, 0, 2) };
            let (mut node, _events) = Node::prepare(&config, None);
            let commands = node.start_daemons(ShardMap::new(2, 3).unwrap()).unwrap();
            let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
            let local = (0..).find(|key| client.shard_map().shard_of_word(*key).rank == 0).unwrap();
            client.put(local, 5).unwrap();
            let remote = (0..).find(|key| client.shard_map().shard_of_word(*key).rank == 1).unwrap();
            assert_eq!(client.get(remote), Err(Error::NodeGone { rank: 1 }), "there never was one");
            let mut begun = 0;
            for key in 0..60 {
                begun += usize::from(client.begin(WordRequest::new(Op::Get, 0, key), key).is_ok());
            }
            let holder = backend.connection_owner(1, 3);
            // There is no such rank, and no control plane that would say so.
            commands[holder as usize].send(Command::Open { rank: 77, epoch: 1 }).unwrap();
            while node.is_running() {
                std::thread::yield_now();
            }
            let mut ended = 0;
            while ended < begun {
                client.wait(None);
                ended += client.poll(|_, response| assert_ne!(response.status, Status::Misrouted));
            }
            assert_eq!(node.stop(), Err(Panicked { thread: format!("kv-daemon-{holder}") }));
            assert_eq!(client.get(local), Err(Error::ServerGone));
        }
    }
}
