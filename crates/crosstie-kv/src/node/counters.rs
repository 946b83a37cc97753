//! What daemons have done so far.

use std::sync::Mutex;

use crosstie::{copyrpc, delegation, ipc};

use crate::store::ShardStats;

/// What one daemon did. Published every few milliseconds.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct DaemonCounters {
    /// Passes and requests.
    pub activity: DaemonActivity,
    /// Its shard's figures.
    pub shard: ShardStats,
    /// Clients' requests for 8-byte keys, as they came.
    pub words: ipc::Counters,
    /// Clients' requests in bytes, as they came.
    pub bytes: ipc::Counters,
    /// The ring's, at daemon 0 where there is one.
    pub ring: delegation::Counters,
    /// The connections', where the daemon has any.
    pub network: copyrpc::Counters,
}

/// Passes and requests of one daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DaemonActivity {
    /// Passes of its loop.
    pub passes: u64,
    /// Passes in which there was something to do.
    pub busy_passes: u64,
    /// Naps.
    pub sleeps: u64,
    /// Requests that its shard answered, whoever asked.
    pub served: u64,
    /// Requests of other nodes that it passed to daemons with the keys.
    pub forwarded_in: u64,
    /// Requests of clients that it passed to the daemon with the connection.
    pub forwarded_out: u64,
    /// Requests for other nodes, sent or found to be in vain.
    pub sent: u64,
    /// Requests that found no room at first, and had to wait.
    pub backlogged: u64,
    /// Answers that reached nobody, because who asked was gone.
    pub undelivered: u64,
}

/// Where daemons publish: one place each.
pub(super) type Board = Box<[Mutex<DaemonCounters>]>;
