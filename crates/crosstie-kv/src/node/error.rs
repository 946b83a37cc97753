//! Why a node does not start, or does not go on.

use crosstie::device::DeviceError;
use crosstie::{flux, ipc};

use crate::sharding::{MAX_DAEMONS, MAX_NODES};

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A field of the configuration is outside its limits.
    #[error("{what} is {value}, and must be between 1 and {limit}")]
    Limit {
        /// Which one.
        what: &'static str,
        /// What it was.
        value: usize,
        /// What it may be at most.
        limit: usize,
    },
    /// The rank is none of the cluster's.
    #[error(
        "rank {rank} of {nodes} nodes: ranks count from 0, and a cluster has at most {MAX_NODES} nodes of {MAX_DAEMONS} daemons"
    )]
    Rank {
        /// The rank.
        rank: u32,
        /// Nodes.
        nodes: u32,
    },
    /// Not as many cores as daemons.
    #[error("{cores} cores for {daemons} daemons: name one for each, or none at all")]
    Cores {
        /// Cores.
        cores: usize,
        /// Daemons.
        daemons: u32,
    },
    /// Not as many addresses as nodes.
    #[error("{addresses} addresses for {nodes} nodes: each node needs one, this one included")]
    Addresses {
        /// Addresses.
        addresses: usize,
        /// Nodes.
        nodes: u32,
    },
    /// A live node has the name.
    #[error("a live node has the name {name:?}: stop it first, or take another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A service of a daemon could not be created.
    #[error("the service {name:?} could not be created: {cause}")]
    Service {
        /// Its name.
        name: String,
        /// Why.
        cause: ipc::CreateError,
    },
    /// The daemons cannot talk to each other.
    #[error(transparent)]
    Passing(#[from] flux::ConfigError),
    /// A daemon cannot use the device.
    #[error("daemon {daemon} cannot use the device {device}: {cause}")]
    Device {
        /// Which daemon.
        daemon: u32,
        /// Which device.
        device: String,
        /// Why.
        cause: DeviceError,
    },
    /// A daemon's thread ended before it was ready.
    #[error("daemon {daemon} ended before it was ready: see what its thread printed")]
    Daemon {
        /// Which one.
        daemon: u32,
    },
    /// A daemon cannot be bound to its core.
    #[error("daemon {daemon} cannot be bound to core {core}: {cause}")]
    Core {
        /// Which daemon.
        daemon: u32,
        /// Which core.
        core: usize,
        /// Why.
        cause: std::io::Error,
    },
    /// The system refused something.
    #[error("the system refused what a node needs to start: {0}")]
    Os(#[from] std::io::Error),
}

/// Peers are not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not all nodes are there: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct PeersMissing(pub Vec<PeerMissing>);

/// A peer is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} ({why})")]
pub struct PeerMissing {
    /// Which one.
    pub rank: u32,
    /// What is known about it.
    pub why: String,
}

/// A thread of a node panicked, and took the node with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("thread {thread} panicked, and the node ended: see what it printed")]
pub struct Panicked {
    /// Which one.
    pub thread: String,
}
