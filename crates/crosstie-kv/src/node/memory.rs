//! How much memory a node can take, by what it is for.
//!
//! Every part has a limit, so the sum has one. Most of it is space for byte strings. That space becomes memory when byte strings
//! first use it, and stays memory: a store with only 8-byte keys takes little more than its tables.
//!
//! Not counted: fragmentation of the heap in a store whose values change size a lot; and, where nodes share a machine, what a
//! node maps of the others' memory, which is counted there.

use crosstie::ipc;

use super::buffer_pool::MAX_FREE_BYTES;
use super::config::NodeConfig;
use super::origin::CallOrigin;
use super::{bytes_server, connections, forward};
use crate::wire::{MAX_REQUEST, MAX_RESPONSE, WordRequest, WordResponse};

/// The program itself: its code, the stacks of its threads, and what the system's libraries keep.
const PROCESS: u64 = 8 << 20;
/// The touched part of a daemon's stack, and small allocations of its modules.
const DAEMON: u64 = 512 << 10;
/// What a client's lane takes besides its slots: rounding up to pages, and the bookkeeping of both ends.
const LANE: u64 = 16 << 10;
/// A request in a backlog, with its origin. The queue may have a capacity of twice its length.
const BACKLOGGED: u64 = 2 * (size_of::<WordRequest>() + size_of::<CallOrigin>()) as u64;

/// The most memory that a node takes, in bytes, by what it is for. See [`NodeConfig::memory_bound`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryBound {
    /// Keys and values: [`NodeConfig::memory_limit`].
    pub store: u64,
    /// Daemons, and what they forward to each other.
    pub daemons: u64,
    /// Lanes of the largest number of clients, and their requests in backlogs.
    pub clients: u64,
    /// Connections of all daemons with all other nodes, and unsent responses.
    pub peers: u64,
    /// The program itself.
    pub process: u64,
}

impl MemoryBound {
    /// The sum.
    pub fn total(&self) -> u64 {
        let MemoryBound { store, daemons, clients, peers, process } = *self;
        [store, daemons, clients, peers, process].into_iter().fold(0, u64::saturating_add)
    }
}

impl NodeConfig {
    /// The most memory that a node with this configuration takes, in a cluster whose nodes all have the same configuration.
    ///
    /// ```
    /// use crosstie_kv::node::NodeConfig;
    /// let bound = NodeConfig { max_clients: 1, memory_limit: 64 << 20, ..NodeConfig::single("doc-bound") }.memory_bound();
    /// assert!(bound.peers == 0 && bound.total() < 160 << 20);
    /// ```
    pub fn memory_bound(&self) -> MemoryBound {
        let clients = self.max_clients as u64;
        let daemons = u64::from(self.daemons);
        let others = u64::from(self.nodes.saturating_sub(1));
        let connection = self.queues.connection;
        let client_requests = clients * self.queue_depth as u64;

        // The current request and one that was received ahead of it, and a response in a buffer that grows by doubling.
        let byte_strings = (2 * MAX_REQUEST + 2 * MAX_RESPONSE) as u64;
        let mut daemon = DAEMON + byte_strings;
        let mut forwarding = 0;
        if others > 0 {
            // A request of another node, in such a buffer, and the buffer pool.
            daemon += connections::config(self.nodes).bytes() + (2 * MAX_REQUEST + MAX_FREE_BYTES) as u64;
        }
        if self.backend.forwards(self.nodes, self.daemons) {
            let lanes = forward::config(self.daemons, self.queues.forward);
            forwarding = lanes.bytes::<WordRequest, WordResponse, ipc::Ticket>(self.daemons as usize)
                + daemons * daemons * BACKLOGGED * client_requests;
        }

        let words = self.words_lanes().bytes_per_client::<WordRequest, WordResponse>();
        let bytes = self.bytes_lanes().bytes_per_client::<[u8], [u8]>();
        let mut client = daemons * (words + bytes + 2 * LANE);
        let mut rings = 0;
        if others > 0 {
            // Byte-string requests in the backlogs of connections.
            client += daemons * (bytes_server::depth(self.queue_depth) * MAX_REQUEST) as u64;
        }
        if self.backend.uses_rings(self.nodes) {
            rings = daemons * (self.ring().bytes::<WordRequest, WordResponse>() + clients * LANE);
        }

        // Unsent responses belong to calls that have reserved space for them, so they cannot take more than that space.
        let responses = (connection.bulk + connection.credit) as u64;
        let peer = connection.bytes() + responses + BACKLOGGED * client_requests;
        MemoryBound {
            store: self.memory_limit,
            daemons: (daemons * daemon).saturating_add(forwarding),
            clients: (clients * client).saturating_add(rings),
            peers: (daemons * others).saturating_mul(peer),
            process: PROCESS,
        }
    }
}
