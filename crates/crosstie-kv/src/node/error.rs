//! Why a node does not start, and why it ends.

use crosstie::device::DeviceError;
use crosstie::{flux, ipc};

use crate::sharding::{MAX_DAEMONS, MAX_NODES};

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A field of the configuration is outside its limits.
    #[error("{what} is {value}; it must be between 1 and {limit}")]
    Limit {
        /// The field.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The largest value that is allowed.
        limit: usize,
    },
    /// The cluster has no such rank.
    #[error(
        "rank {rank} does not exist in a cluster of {nodes} nodes: ranks count from 0; \
         a cluster has at most {MAX_NODES} nodes of {MAX_DAEMONS} daemons"
    )]
    Rank {
        /// The rank.
        rank: u32,
        /// The number of nodes.
        nodes: u32,
    },
    /// The number of cores is not that of daemons.
    #[error("{cores} cores for {daemons} daemons: name one core for each daemon, or none at all")]
    Cores {
        /// The number of cores.
        cores: usize,
        /// The number of daemons.
        daemons: u32,
    },
    /// The number of addresses is not that of nodes.
    #[error("{addresses} addresses for {nodes} nodes: give one address for each node, this one included")]
    Addresses {
        /// The number of addresses.
        addresses: usize,
        /// The number of nodes.
        nodes: u32,
    },
    /// A running node has the name.
    #[error("a running node on this machine has the name {name:?}: stop it first, or choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A service of a daemon could not be created.
    #[error("cannot create the service {name:?}: {cause}")]
    Service {
        /// Its name.
        name: String,
        /// Why.
        cause: ipc::CreateError,
    },
    /// The lanes between daemons could not be created.
    #[error(transparent)]
    Forwarding(#[from] flux::CreateError),
    /// A daemon cannot use the device.
    #[error("daemon {daemon} cannot use the device {device}: {cause}")]
    Device {
        /// The daemon.
        daemon: u32,
        /// The device.
        device: String,
        /// Why.
        cause: DeviceError,
    },
    /// A daemon's thread ended before it was ready.
    #[error("daemon {daemon} ended before it was ready: see the message that its thread printed")]
    Daemon {
        /// The daemon.
        daemon: u32,
    },
    /// A daemon cannot be pinned to its core.
    #[error(
        "cannot pin daemon {daemon} to core {core}: {cause}: name cores that this process may use; `taskset -cp $$` lists them"
    )]
    Core {
        /// The daemon.
        daemon: u32,
        /// The core.
        core: usize,
        /// Why.
        cause: std::io::Error,
    },
    /// A system call failed.
    #[error("the node cannot start, because a system call failed: {0}")]
    Os(#[from] std::io::Error),
}

/// Some other nodes are not connected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not all nodes are connected: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct PeersMissing(pub Vec<PeerMissing>);

/// A node that is not connected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} ({why})")]
pub struct PeerMissing {
    /// Its rank.
    pub rank: u32,
    /// The reason, as far as it is known.
    pub why: String,
}

/// Why a node has ended by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeEnded {
    /// One of its threads panicked.
    #[error("thread {thread} panicked, and the node stopped: see the message that the thread printed")]
    Panicked {
        /// The thread.
        thread: String,
    },
    /// Another process runs the same rank of the same cluster, and was started later.
    #[error(
        "rank {rank} was started again elsewhere, so this older node has ended, and its keys are gone: start each rank once"
    )]
    Replaced {
        /// The rank.
        rank: u32,
    },
}
