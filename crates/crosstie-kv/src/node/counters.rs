//! What daemons have done so far.

use std::sync::Mutex;

use crosstie::{copyrpc, delegation, ipc};

use crate::store::ShardStats;

/// What one daemon has done. A daemon publishes it every few milliseconds.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct DaemonCounters {
    /// Passes of the daemon's loop, and requests by what happened with them.
    pub activity: DaemonActivity,
    /// Statistics of its shard.
    pub shard: ShardStats,
    /// The lanes of clients with requests for 8-byte keys.
    pub words: ipc::Counters,
    /// The lanes of clients with requests for byte strings.
    pub bytes: ipc::Counters,
    /// The delegation ring. Zero for a daemon without one.
    pub ring: delegation::Counters,
    /// The connections with other nodes. Zero for a daemon without any.
    pub network: copyrpc::Counters,
}

/// Passes of a daemon's loop, and requests by what happened with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DaemonActivity {
    /// Passes of the loop.
    pub passes: u64,
    /// Passes in which there was something to do.
    pub busy_passes: u64,
    /// Times that the daemon slept.
    pub sleeps: u64,
    /// Sleeps that ended because somebody woke the daemon: a client, another daemon, another node, the control plane.
    pub wakeups: u64,
    /// Requests that its shard executed, from clients and from other nodes.
    pub served: u64,
    /// Requests of clients that it forwarded to the daemon that is connected with the owner of the key.
    pub forwarded: u64,
    /// Requests for other nodes that it sent, or failed because the node was not connected.
    pub sent: u64,
    /// Requests that found no space at first and had to wait.
    pub backlogged: u64,
    /// Responses that could not be delivered, because the sender of the request was gone.
    pub undelivered: u64,
}

/// Where daemons publish their counters: one entry for each daemon.
pub(super) type PublishedCounters = Box<[Mutex<DaemonCounters>]>;
