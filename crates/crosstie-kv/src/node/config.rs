//! What a node is told when it starts, and the limits of it.

use std::net::{SocketAddr, TcpListener};

use crosstie::bootstrap::Secret;
use crosstie::copyrpc::EndpointConfig;
use crosstie::device::DeviceSpec;
use crosstie::{WaitStrategy, delegation, ipc};

use super::error::StartError;
use super::strings;
use crate::Backend;
use crate::sharding::{MAX_DAEMONS, MAX_NODES, ShardMap};
use crate::wire;

/// Bytes of a node's name at most: names of services are made from it.
pub const MAX_NAME: usize = 56;
/// Limit of [`NodeConfig::max_clients`].
pub const MAX_CLIENTS: usize = 1024;
/// Limit of [`NodeConfig::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;

/// A node.
///
/// ```
/// use crosstie_kv::node::NodeConfig;
/// let config = NodeConfig { daemons: 2, ..NodeConfig::single("doc-config") };
/// assert_eq!((config.rank, config.nodes), (0, 1));
/// ```
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// What clients on this machine attach to. No other live node of this user may have it.
    pub name: String,
    /// This node's number, from 0.
    pub rank: u32,
    /// Nodes of the cluster, at most [`MAX_NODES`].
    pub nodes: u32,
    /// Daemons: threads that own a share of the keys each, at most [`MAX_DAEMONS`]. The same on all nodes.
    pub daemons: u32,
    /// How requests leave for other nodes.
    pub backend: Backend,
    /// What other nodes are reached through.
    pub device: DeviceSpec,
    /// Bytes that keys and values of this node may take, all daemons together.
    pub memory_limit: u64,
    /// Clients at a time, at most [`MAX_CLIENTS`].
    pub max_clients: usize,
    /// Unanswered requests of a client at one daemon, at most [`MAX_QUEUE_DEPTH`].
    pub queue_depth: usize,
    /// A core for each daemon, if they are to stay there.
    pub cores: Option<Vec<usize>>,
    /// How daemons wait when there is nothing to do. [`WaitStrategy::Spin`] uses all of a core, and needs one for each daemon.
    pub waiting: WaitStrategy,
    /// QueueSizes of what lies between daemons and between nodes.
    pub queues: QueueSizes,
}

/// QueueSizes for requests on their way. More is seldom faster; with less, requests wait where they are.
#[derive(Clone, Copy, Debug)]
pub struct QueueSizes {
    /// Requests of one daemon at another, of each kind: for its keys, and for other nodes.
    pub forward: usize,
    /// Requests in the ring of daemon 0, where there is one.
    pub ring: usize,
    /// The connection with each other node.
    pub endpoint: EndpointConfig,
}

/// Bulk memory of each kind for each other node: four of the longest requests at a time; more wait.
const BULK: usize = 4 * (wire::MAX_REQUEST + 1);
const _: () = assert!(BULK >= wire::MAX_REQUEST && BULK >= wire::MAX_RESPONSE, "the longest must fit");

impl Default for QueueSizes {
    fn default() -> QueueSizes {
        QueueSizes {
            forward: 256,
            ring: 1024,
            endpoint: EndpointConfig { bulk: BULK, ..EndpointConfig::default() },
        }
    }
}

impl NodeConfig {
    /// The only node of its cluster, with one daemon.
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
            waiting: WaitStrategy::default(),
            queues: QueueSizes::default(),
        }
    }

    /// One of several.
    pub fn member(name: &str, rank: u32, nodes: u32) -> NodeConfig {
        NodeConfig { rank, nodes, ..NodeConfig::single(name) }
    }

    /// The lanes of 8-byte keys.
    pub(super) fn words(&self) -> ipc::Config {
        ipc::Config {
            max_clients: self.max_clients,
            queue_depth: self.queue_depth,
            // Daemons wait in their own way, and sleep here when they do.
            wait_strategy: WaitStrategy::Park,
            ..ipc::Config::default()
        }
    }

    /// The lanes of byte strings.
    pub(super) fn long(&self) -> ipc::Config {
        ipc::Config {
            queue_depth: strings::depth(self.queue_depth),
            request_limit: wire::MAX_REQUEST,
            response_limit: wire::MAX_RESPONSE,
            ..self.words()
        }
    }

    /// The ring of daemon 0, where there is one.
    pub(super) fn ring(&self) -> delegation::Config {
        delegation::Config {
            max_clients: self.max_clients,
            queue_depth: self.queue_depth,
            ring_depth: self.queues.ring,
            ..delegation::Config::default()
        }
    }

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
        // The limits above are those of a placement.
        ShardMap::new(self.nodes, self.daemons).ok_or(StartError::Rank { rank: self.rank, nodes: self.nodes })
    }
}

/// How the nodes of a cluster find each other. A static list: nodes come and go, places do not.
#[derive(Debug)]
pub struct Membership {
    /// Where this node listens for those of higher rank.
    pub listener: TcpListener,
    /// Where each node listens, by rank.
    pub addresses: Vec<SocketAddr>,
    /// What all nodes know, and nobody else does.
    pub secret: Secret,
}
