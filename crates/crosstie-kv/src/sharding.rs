//! Which shard owns a key: which node, and which daemon of that node.
//!
//! Every client and every node computes the same shard from the key and the size of the cluster. There is no directory and no
//! lookup.

use crate::wire::WordRequest;

/// The most nodes of a cluster.
pub const MAX_NODES: u32 = 256;
/// The most daemons of a node.
pub const MAX_DAEMONS: u32 = 64;

/// One shard: a daemon of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardId {
    /// The node.
    pub rank: u32,
    /// The daemon of that node.
    pub daemon: u32,
}

/// The mapping from keys to shards. The size of the cluster determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardMap {
    nodes: u32,
    daemons: u32,
}

impl ShardMap {
    /// The mapping for `nodes` nodes with `daemons` daemons each. `None` if one of them is zero or beyond [`MAX_NODES`] or
    /// [`MAX_DAEMONS`].
    pub fn new(nodes: u32, daemons: u32) -> Option<ShardMap> {
        let legal = (1..=MAX_NODES).contains(&nodes) && (1..=MAX_DAEMONS).contains(&daemons);
        legal.then_some(ShardMap { nodes, daemons })
    }

    /// Nodes of the cluster.
    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Daemons of each node.
    pub fn daemons(&self) -> u32 {
        self.daemons
    }

    /// The shard that owns an 8-byte key.
    ///
    /// ```
    /// use crosstie_kv::sharding::ShardMap;
    /// let map = ShardMap::new(2, 2).unwrap();
    /// let on_first = (0..10_000).filter(|key| map.shard_of_word(*key).rank == 0).count();
    /// assert!((4_500..5_500).contains(&on_first));
    /// ```
    #[inline]
    pub fn shard_of_word(&self, key: u64) -> ShardId {
        self.shard_of_hash(hash_word(key))
    }

    /// The shard that owns a byte-string key.
    pub fn shard_of_bytes(&self, key: &[u8]) -> ShardId {
        self.shard_of_hash(hash_bytes(key))
    }

    /// Sets the request's rank to that of the node that owns its key.
    #[inline]
    pub fn route(&self, request: WordRequest) -> WordRequest {
        WordRequest { rank: self.shard_of_word(request.key).rank, ..request }
    }

    #[inline]
    fn shard_of_hash(&self, hash: u64) -> ShardId {
        // The high half chooses the node and the low half the daemon, so the two choices are independent of each other.
        let scale = |half: u64, count: u32| ((half * u64::from(count)) >> 32) as u32;
        ShardId { rank: scale(hash >> 32, self.nodes), daemon: scale(hash & 0xffff_ffff, self.daemons) }
    }
}

/// Hashes an 8-byte key: each bit of `key` changes about half of the result's bits. Equal on all machines.
#[inline]
pub fn hash_word(key: u64) -> u64 {
    let key = (key ^ (key >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let key = (key ^ (key >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    key ^ (key >> 32)
}

/// Hashes a byte string. Equal on all machines.
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain(std::iter::once(&last));
    words.fold(bytes.len() as u64, |hash, word| hash_word(hash ^ u64::from_le_bytes(*word)).rotate_left(17))
}
