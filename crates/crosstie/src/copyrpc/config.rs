//! Sizes of contexts and connections.

use crosstie_protocol::copyrpc::MAX_BULK;

use super::flush_policy::SEND_DEPTH;

/// Sizes of a context.
#[derive(Clone, Debug)]
pub struct Config {
    /// The most connections at a time: at most 4096, and at most as many as the device's longest completion queue has room for.
    /// Each connection can have 128 work requests under way, and all of them can fail at once.
    pub max_connections: usize,
    /// Receives that are kept posted, for all connections together: the most batches that may arrive between two polls.
    pub receives: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config { max_connections: 512, receives: 1024 }
    }
}

impl Config {
    /// The most bytes of memory that a context takes, without its connections.
    pub fn bytes(&self) -> u64 {
        // A completion has 32 bytes on the software device and up to 128 elsewhere. Devices round the number of completions up.
        // Everything else that is kept for each is less.
        let sent = self.max_connections as u64 * u64::from(SEND_DEPTH);
        let completions = 3 * u64::from(self.receives) + sent;
        let receives = u64::from(self.receives);
        2 * 192 * (completions + receives) + (64 << 10)
    }
}

/// Sizes of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionConfig {
    /// Bytes of the receive ring: a power of two from 256 to 2 GiB.
    pub ring: usize,
    /// The most bytes of response credit that the peer may have outstanding. At most a quarter of the peer's ring is used.
    /// It does not follow `ring`: with larger rings, set both, or responses do not use what the rings have.
    pub credit: usize,
    /// The most calls of this side that can wait for a response, up to 65536.
    pub pending_calls: usize,
    /// Bytes of bulk memory for each of four purposes, up to 1 GiB: outgoing requests, incoming requests, outgoing responses,
    /// incoming responses. Memory is allocated when it is first used, in regions that are at most an eighth longer than their
    /// payload (and at least 64 KiB), and kept until the connection is closed. The longest payload of a connection is the smaller
    /// value of both sides. Zero: payloads that do not fit into a ring are refused. (Rings of 256 bytes carry no bulk
    /// calls either.)
    pub bulk: usize,
    /// The largest receive ring of a peer, in bytes. This side allocates a staging ring of the same size as the peer's receive
    /// ring, so [`connect`](super::Connection::connect) refuses a larger one. A peer's ring may always be as large as this side's.
    pub max_peer_ring: usize,
}

impl Default for ConnectionConfig {
    fn default() -> ConnectionConfig {
        ConnectionConfig {
            ring: 1 << 20,
            credit: 1 << 18,
            pending_calls: 1024,
            bulk: 64 << 20,
            max_peer_ring: 16 << 20,
        }
    }
}

impl ConnectionConfig {
    /// The most bytes of memory that this side of a connection takes, if the peer's has the same sizes: a receive ring, a staging ring,
    /// bulk memory for four purposes, and what is kept for each call and in the queue pair. A peer with a larger ring can add up to
    /// [`max_peer_ring`](ConnectionConfig::max_peer_ring).
    ///
    /// ```
    /// use crosstie::copyrpc::ConnectionConfig;
    /// let config = ConnectionConfig { bulk: 8 << 20, ..ConnectionConfig::default() };
    /// assert_eq!(config.bytes() >> 20, 2 + 4 * 8);
    /// ```
    pub fn bytes(&self) -> u64 {
        let bulk = self.bulk.min(MAX_BULK as usize) as u64;
        2 * self.ring as u64 + 4 * bulk + 256 * self.pending_calls as u64 + (256 << 10)
    }
}
