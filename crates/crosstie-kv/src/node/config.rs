//! The configuration of a node, and its limits.

use std::net::{SocketAddr, TcpListener};

use crosstie::bootstrap::Secret;
use crosstie::copyrpc::ConnectionConfig;
use crosstie::device::DeviceSpec;
use crosstie::{WaitStrategy, delegation, ipc};

use super::bytes_server;
use super::error::StartError;
use crate::Backend;
use crate::sharding::{MAX_DAEMONS, MAX_NODES, ShardMap};
use crate::wire;

/// The longest name of a node, in bytes. The names of its services are longer and have a limit, too.
pub const MAX_NAME: usize = 56;
/// Limit of [`NodeConfig::max_clients`].
pub const MAX_CLIENTS: usize = 1024;
/// Limit of [`NodeConfig::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;

/// The configuration of a node.
///
/// ```
/// use crosstie_kv::node::NodeConfig;
/// let config = NodeConfig { daemons: 2, ..NodeConfig::single("doc-config") };
/// assert_eq!((config.rank, config.nodes), (0, 1));
/// ```
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The name that clients on this machine attach to. No other running node of this user may have it.
    pub name: String,
    /// The number of this node, from 0.
    pub rank: u32,
    /// The number of nodes in the cluster, at most [`MAX_NODES`].
    pub nodes: u32,
    /// The number of daemons, threads that own a shard of the keys each; at most [`MAX_DAEMONS`]. The same on all nodes.
    pub daemons: u32,
    /// How requests for other nodes travel. The same on all nodes.
    pub backend: Backend,
    /// The device for connections with other nodes.
    pub device: DeviceSpec,
    /// Bytes that keys and values of this node may take, in all daemons together.
    pub memory_limit: u64,
    /// The most clients that may be attached at a time, at most [`MAX_CLIENTS`].
    pub max_clients: usize,
    /// The most requests that a client may have in flight at one daemon, at most [`MAX_QUEUE_DEPTH`].
    pub queue_depth: usize,
    /// A core for each daemon, to which its thread is pinned. `None`: threads are not pinned.
    pub cores: Option<Vec<usize>>,
    /// How daemons wait when there is nothing to do. With [`WaitStrategy::Spin`] each daemon uses a whole core, even when idle.
    pub wait_strategy: WaitStrategy,
    /// Capacities of the queues between daemons and between nodes.
    pub queues: QueueSizes,
}

/// Capacities of the queues between daemons and between nodes. Larger queues are seldom faster; with smaller ones, requests wait
/// longer in backlogs.
#[derive(Clone, Copy, Debug)]
pub struct QueueSizes {
    /// Requests that one daemon has forwarded to another, with [`Backend::Meta`]. Every ordered pair of daemons has a
    /// lane with room for as many, so their memory grows with the square of the daemons.
    pub forward: usize,
    /// Requests in the delegation ring of each daemon, with [`Backend::Delegation`].
    pub ring: usize,
    /// The copyrpc connection of each daemon for each other node.
    pub connection: ConnectionConfig,
}

/// Bulk memory in each direction for each daemon and other node: four of the longest requests at a time. More have to wait.
const BULK: usize = 4 * (wire::MAX_REQUEST + 1);
const _: () =
    assert!(BULK >= wire::MAX_REQUEST && BULK >= wire::MAX_RESPONSE, "the longest message must fit");

impl Default for QueueSizes {
    fn default() -> QueueSizes {
        QueueSizes {
            forward: 256,
            ring: 1024,
            connection: ConnectionConfig { bulk: BULK, ..ConnectionConfig::default() },
        }
    }
}

impl NodeConfig {
    /// A one-node cluster with one daemon.
    pub fn single(name: &str) -> NodeConfig {
        NodeConfig {
            name: name.to_owned(),
            rank: 0,
            nodes: 1,
            daemons: 1,
            backend: Backend::default(),
            device: DeviceSpec::Software,
            memory_limit: 1 << 30,
            max_clients: 64,
            queue_depth: 32,
            cores: None,
            wait_strategy: WaitStrategy::default(),
            queues: QueueSizes::default(),
        }
    }

    /// A node of a cluster of several.
    pub fn member(name: &str, rank: u32, nodes: u32) -> NodeConfig {
        NodeConfig { rank, nodes, ..NodeConfig::single(name) }
    }

    /// The lanes for 8-byte keys.
    pub(super) fn words_lanes(&self) -> ipc::Config {
        ipc::Config {
            max_clients: self.max_clients,
            queue_depth: self.queue_depth,
            // The daemon's loop spins and yields itself, and waits on the lanes only to sleep.
            wait_strategy: WaitStrategy::Park,
            ..ipc::Config::default()
        }
    }

    /// The lanes for byte strings.
    pub(super) fn bytes_lanes(&self) -> ipc::Config {
        ipc::Config {
            queue_depth: bytes_server::depth(self.queue_depth),
            request_limit: wire::MAX_REQUEST,
            response_limit: wire::MAX_RESPONSE,
            ..self.words_lanes()
        }
    }

    /// The delegation ring of each daemon, where there are rings.
    pub(super) fn ring(&self) -> delegation::Config {
        delegation::Config {
            max_clients: self.max_clients,
            queue_depth: self.queue_depth,
            ring_depth: self.queues.ring,
            ..delegation::Config::default()
        }
    }

    /// Checks all limits. Returns the mapping from keys to shards.
    pub(super) fn check(&self, membership: Option<&Membership>) -> Result<ShardMap, StartError> {
        let limit = |what, value: usize, limit: usize| match value {
            0 => Err(StartError::Limit { what, value, limit }),
            _ if value > limit => Err(StartError::Limit { what, value, limit }),
            _ => Ok(()),
        };
        limit("bytes of the name", self.name.len(), MAX_NAME)?;
        limit("nodes", self.nodes as usize, MAX_NODES as usize)?;
        limit("daemons", self.daemons as usize, MAX_DAEMONS as usize)?;
        limit("max_clients", self.max_clients, MAX_CLIENTS)?;
        limit("queue_depth", self.queue_depth, MAX_QUEUE_DEPTH)?;
        if self.rank >= self.nodes {
            return Err(StartError::Rank { rank: self.rank, nodes: self.nodes });
        }
        if let Some(cores) = &self.cores
            && cores.len() != self.daemons as usize
        {
            return Err(StartError::Cores { cores: cores.len(), daemons: self.daemons });
        }
        let addresses = membership.map_or(1, |membership| membership.addresses.len());
        if addresses != self.nodes as usize {
            return Err(StartError::Addresses { addresses, nodes: self.nodes });
        }
        // It cannot fail: the limits above are the same.
        ShardMap::new(self.nodes, self.daemons).ok_or(StartError::Rank { rank: self.rank, nodes: self.nodes })
    }
}

/// How the nodes of a cluster find each other: a static list. A node may stop and come back, but the list does not change.
#[derive(Debug)]
pub struct Membership {
    /// Where this node listens for connections of the nodes with higher ranks.
    pub listener: TcpListener,
    /// The control address of each node, by rank.
    pub addresses: Vec<SocketAddr>,
    /// The secret that all nodes of the cluster share.
    pub secret: Secret,
}
