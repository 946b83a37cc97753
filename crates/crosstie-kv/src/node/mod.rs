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
//! # Threads and data flow
//!
//! A daemon is a thread that owns a shard of the node's keys. Its loop takes messages in turn
//! from other nodes, from the delegation ring, from its clients and from other daemons. It executes requests for its own shard
//! at once. It sends all others on, and remembers who gets the response.
//!
//! ```text
//! client's request for a key of   this node           another node
//! Meta                            ipc to the owner    ipc to the client's home daemon; flux to the daemon with the number of
//!                                                     the owner; copyrpc to the owner
//! Delegation                      ipc to the owner    the delegation ring of the daemon with the number of the owner; copyrpc to
//!                                                     the owner
//! ```
//!
//! Each daemon is connected with the daemon of the same number of every other node, so a request that arrives from another node is for the
//! shard of the daemon that receives it.
//!
//! In a cluster of several nodes one more thread, the *control plane*, connects the node with the others over TCP and detects
//! when one of them fails.
//!
//! # Promises
//!
//! - No request is dropped. What finds no space waits in a backlog, in order. Backlogs are bounded: somebody waits for each
//!   request in them, and may have only so many requests in flight.
//! - No circular wait. A daemon never blocks and never stops receiving from anybody. A shard responds at once. So other nodes' requests
//!   get their responses at once. So requests for other nodes do, and with them those that daemons forward to each other.
//! - Memory has a limit: [`NodeConfig::memory_bound`].
//! - When a node goes away, all requests for it end as [`NodeGone`](crate::wire::Status::NodeGone): those in flight, and later
//!   ones until it is back. See [`Node::peers`].
//! - Of two nodes with the same rank, the one that was started earlier ends, with [`NodeEnded::Replaced`], as soon as both have reached a
//!   node with a lower rank.
//! - If a daemon panics, the node stops. Its clients and the other nodes notice; nobody waits for it.
//! - Once the queues have grown to their size, a request for an 8-byte key causes no allocation, no lock and no system call.
//! - An idle node sleeps, and whatever arrives wakes it: requests of clients for 8-byte keys and byte strings, the delegation ring,
//!   requests and responses of other daemons and other nodes. With the software device a sleep is 50 ms long if nobody ends it;
//!   with other devices it is 1 ms, because their completions wake nobody.

mod buffer_pool;
mod bytes_server;
mod commands;
mod config;
mod connections;
mod control;
mod counters;
mod daemon;
mod error;
mod forward;
pub(crate) mod idle;
#[cfg(all(test, not(debug_assertions)))]
mod instruction_tests;
mod memory;
mod origin;
#[cfg(test)]
mod pass_tests;
mod ring;
mod serve_bytes;
mod serve_words;
mod shard_server;
mod shared;
mod start;
mod transport;

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crosstie::device::{Device, DeviceSpec};

pub use bytes_server::MAX_BYTES_DEPTH;
pub use config::{MAX_CLIENTS, MAX_NAME, MAX_QUEUE_DEPTH, Membership, NodeConfig, QueueSizes};
pub use counters::{DaemonActivity, DaemonCounters};
pub use error::{NodeEnded, PeerMissing, PeersMissing, StartError};
pub use memory::MemoryBound;
pub use shared::PeerState;

use commands::{ConnectionCommand, ConnectionEvent};
use control::Control;
use shared::{Shared, StopOnPanic};

use crate::sharding::ShardMap;

/// A running node. It stops when it is dropped. See the [module](self).
pub struct Node {
    shared: Arc<Shared>,
    config: NodeConfig,
    threads: Vec<JoinHandle<()>>,
}

impl Node {
    /// Starts a node as a one-node cluster.
    pub fn start(config: &NodeConfig) -> Result<Node, StartError> {
        Node::launch(config, None)
    }

    /// Starts a node of a cluster of several. Returns when clients can attach. Other nodes may start later, see
    /// [`wait_for_peers`](Node::wait_for_peers).
    pub fn join(config: &NodeConfig, membership: Membership) -> Result<Node, StartError> {
        Node::launch(config, Some(membership))
    }

    fn launch(config: &NodeConfig, membership: Option<Membership>) -> Result<Node, StartError> {
        let shard_map = config.check(membership.as_ref())?;
        if membership.is_none() && config.device != DeviceSpec::Software {
            // A one-node cluster does not use the device, but a user who names one wants to know whether it works.
            Device::open(&config.device).map_err(|cause| StartError::Device {
                daemon: 0,
                device: config.device.to_string(),
                cause,
            })?;
        }
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let (mut node, events) = Node::prepare(config, membership.is_some().then_some(wake))?;
        let commands = node.start_daemons(shard_map)?;
        if let Some(membership) = membership {
            let shared = node.shared.clone();
            let control = Control::new(config, membership, commands, events, woken, shared.clone())?;
            let guard = StopOnPanic(shared);
            let run = move || {
                let _guard = guard;
                control.run();
            };
            node.threads.push(std::thread::Builder::new().name("kv-control".to_owned()).spawn(run)?);
        }
        Ok(node)
    }

    /// Creates a node without threads. If a later step of the start fails, dropping the node stops the threads that run by then.
    fn prepare(
        config: &NodeConfig,
        wake: Option<UnixStream>,
    ) -> std::io::Result<(Node, Receiver<ConnectionEvent>)> {
        let (shared, events) = Shared::new(config, wake)?;
        Ok((Node { shared: Arc::new(shared), config: config.clone(), threads: Vec::new() }, events))
    }

    fn start_daemons(
        &mut self,
        shard_map: ShardMap,
    ) -> Result<Vec<SyncSender<ConnectionCommand>>, StartError> {
        start::start_daemons(&self.config, shard_map, &self.shared, &mut self.threads)
    }

    /// The name that clients attach to.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// What is known about the other nodes, by rank. The entry of this node itself is never up.
    pub fn peers(&self) -> Vec<PeerState> {
        self.shared.peers().clone()
    }

    /// Waits until all other nodes are up, at most for `timeout`.
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
                        "it has not connected yet: start it with the same list of nodes".to_owned(),
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

    /// How many connections to the control port were refused: with another secret, with a wrong rank, or not from a node. Connections
    /// that were closed before they sent anything are not counted.
    pub fn refused_connections(&self) -> u64 {
        self.shared.refused_connections()
    }

    /// What each daemon has done, as of a few milliseconds ago.
    pub fn counters(&self) -> Vec<DaemonCounters> {
        let read =
            |counters: &Mutex<DaemonCounters>| *counters.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.counters.iter().map(read).collect()
    }

    /// Whether the node is running. False after it has ended by itself: [`stop`](Node::stop) says why.
    pub fn is_running(&self) -> bool {
        !self.shared.is_stopping()
    }

    /// Stops the node. Clients and other nodes notice. Returns an error if the node had ended by itself before.
    pub fn stop(mut self) -> Result<(), NodeEnded> {
        self.join_threads();
        self.shared.ended.get().map_or(Ok(()), |ended| Err(ended.clone()))
    }

    fn join_threads(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // The panic hook has printed a panic, and `StopOnPanic` has recorded it.
            drop(thread.join());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.join_threads();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::client::{Client, Error};
    use crate::wire::{Op, Status, WordRequest};

    /// Whatever makes a daemon panic, its node stops, and no client waits for it.
    #[test]
    fn daemon_panic_stops_the_node_and_ends_all_operations() {
        for backend in [Backend::Meta, Backend::Delegation] {
            let name = format!("kv-panic-{}-{backend:?}", std::process::id());
            let config = NodeConfig { daemons: 3, backend, ..NodeConfig::member(&name, 0, 2) };
            let (mut node, _events) = Node::prepare(&config, None).unwrap();
            let commands = node.start_daemons(ShardMap::new(2, 3).unwrap()).unwrap();
            let mut client = Client::<u64>::attach_pipelined(&name).unwrap();
            let local = (0..).find(|key| client.shard_map().shard_of_word(*key).rank == 0).unwrap();
            client.put(local, 5).unwrap();
            let remote = (0..).find(|key| client.shard_map().shard_of_word(*key).rank == 1).unwrap();
            assert_eq!(client.get(remote), Err(Error::NodeGone { rank: 1 }), "it was never connected");
            let mut begun = 0;
            for key in 0..60 {
                begun += usize::from(client.begin(WordRequest::new(Op::Get, 0, key), key).is_ok());
            }
            let owner = 1;
            // A rank that does not exist makes the daemon panic. The control plane never sends one, but it does not run here.
            commands[owner as usize].send(ConnectionCommand::Open { rank: 77, epoch: 1 }).unwrap();
            while node.is_running() {
                std::thread::yield_now();
            }
            let mut ended = 0;
            while ended < begun {
                client.wait(None);
                ended += client.poll(|_, response| assert_ne!(response.status, Status::Misrouted));
            }
            assert_eq!(node.stop(), Err(NodeEnded::Panicked { thread: format!("kv-daemon-{owner}") }));
            assert_eq!(client.get(local), Err(Error::ServerGone));
        }
    }
}
