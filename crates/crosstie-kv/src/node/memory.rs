//! What the memory of a node is made of, and how much of it there can be.
//!
//! Every part has a limit, so the whole has one. Most of it is room for byte strings, which takes memory when strings have
//! been there, and keeps it: a store of 8-byte keys alone takes little more than its table.
//!
//! What is not counted: what the allocator loses between the values of a store that changes a lot, and, where nodes are on
//! one machine, what a node maps of the others' memory, which is theirs.

use super::config::NodeConfig;
use super::network::{self, HANDED_BYTES};
use super::passing::{self, Waiter};
use super::spares::SPARE_BYTES;
use super::strings;
use crate::wire::{MAX_REQUEST, MAX_RESPONSE, WordRequest, WordResponse};

/// What stands for the program itself: its code, stacks of its threads, what the system's libraries keep.
const PROCESS: u64 = 8 << 20;
/// The touched part of a daemon's stack, and what its parts keep for themselves.
const DAEMON: u64 = 512 << 10;
/// What a lane of a client takes beside its slots: rounding up to pages, and both sides' books.
const LANE: u64 = 16 << 10;
/// A request that waits, with who waits for it, in a queue that may have room for as many again.
const WAITING: u64 = 2 * (size_of::<WordRequest>() + size_of::<Waiter>()) as u64;

/// Bytes of memory that a node takes at most, by what they are for. See [`NodeConfig::memory_bound`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryBound {
    /// Keys and values: [`NodeConfig::memory_limit`].
    pub store: u64,
    /// Daemons, with what they hand each other.
    pub daemons: u64,
    /// Lanes of all clients that there may be, and their requests that wait.
    pub clients: u64,
    /// Connections with all other nodes, and answers that wait.
    pub peers: u64,
    /// The program.
    pub process: u64,
}

impl MemoryBound {
    /// All of it.
    pub fn total(&self) -> u64 {
        let MemoryBound { store, daemons, clients, peers, process } = *self;
        [store, daemons, clients, peers, process].into_iter().fold(0, u64::saturating_add)
    }
}

impl NodeConfig {
    /// How much memory a node of this configuration takes at most, in a cluster whose nodes all have it.
    ///
    /// ```
    /// use crosstie_kv::node::NodeConfig;
    /// let alone = NodeConfig { max_clients: 1, memory_limit: 64 << 20, ..NodeConfig::single("doc-bound") }.memory_bound();
    /// assert!(alone.peers == 0 && alone.total() < 160 << 20);
    /// ```
    pub fn memory_bound(&self) -> MemoryBound {
        let clients = self.max_clients as u64;
        let daemons = u64::from(self.daemons);
        let others = u64::from(self.nodes.saturating_sub(1));
        let endpoint = self.queues.endpoint;
        let asked_by_clients = clients * self.queue_depth as u64;
        let asked_by_others = others * endpoint.pending_calls as u64;

        // The request that came and one that was taken ahead, and an answer in a buffer that grows by doubling.
        let strings = (2 * MAX_REQUEST + 2 * MAX_RESPONSE) as u64;
        let mut daemon = DAEMON + strings;
        let mut passing = 0;
        if others > 0 {
            // Another node's request, in such a buffer, and buffers for those that wait.
            daemon += network::config(self.nodes).bytes() + (2 * MAX_REQUEST + SPARE_BYTES) as u64;
        }
        if others > 0 && daemons > 1 {
            daemon += (HANDED_BYTES + MAX_REQUEST) as u64;
            let lanes = passing::config(self.daemons, self.queues.forward);
            passing = lanes.bytes::<WordRequest, WordResponse, Waiter>(self.daemons as usize)
                + daemons * daemons * WAITING * (asked_by_clients + asked_by_others);
        }

        let words = self.words().bytes_per_client::<WordRequest, WordResponse>();
        let long = self.long().bytes_per_client::<[u8], [u8]>();
        let mut client = daemons * (words + long + 2 * LANE);
        let mut ring = 0;
        if others > 0 {
            // Long requests that wait until their connection has room.
            client += daemons * (strings::depth(self.queue_depth) * MAX_REQUEST) as u64;
        }
        if self.backend.uses_ring(self.nodes) {
            ring = self.ring().bytes::<WordRequest, WordResponse>() + clients * LANE;
        }

        // Answers that wait are those to calls that have room for them reserved: so much is all.
        let answers = (endpoint.bulk + endpoint.credit) as u64;
        let peer = endpoint.bytes() + answers + WAITING * asked_by_clients;
        MemoryBound {
            store: self.memory_limit,
            daemons: (daemons * daemon).saturating_add(passing),
            clients: (clients * client).saturating_add(ring),
            peers: others.saturating_mul(peer),
            process: PROCESS,
        }
    }
}
