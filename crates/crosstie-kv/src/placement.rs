//! Which node, and which of its daemons, has a key.
//!
//! Everybody computes the same from the key and the size of the cluster; nothing is looked up.

use crate::message::Request;

/// Nodes of a cluster at most.
pub const MAX_NODES: u32 = 256;
/// Daemons of a node at most.
pub const MAX_DAEMONS: u32 = 64;

/// A key's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The node.
    pub rank: u32,
    /// The daemon of that node.
    pub daemon: u32,
}

/// The size of a cluster, which decides where keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    nodes: u32,
    daemons: u32,
}

impl Placement {
    /// A cluster of `nodes` with `daemons` each; `None` if one is zero or beyond [`MAX_NODES`], [`MAX_DAEMONS`].
    pub fn new(nodes: u32, daemons: u32) -> Option<Placement> {
        let legal = (1..=MAX_NODES).contains(&nodes) && (1..=MAX_DAEMONS).contains(&daemons);
        legal.then_some(Placement { nodes, daemons })
    }

    /// Nodes.
    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Daemons of each node.
    pub fn daemons(&self) -> u32 {
        self.daemons
    }

    /// Where an 8-byte key is.
    ///
    /// ```
    /// use crosstie_kv::placement::Placement;
    /// let cluster = Placement::new(2, 2).unwrap();
    /// let on_first = (0..10_000).filter(|key| cluster.of_word(*key).rank == 0).count();
    /// assert!((4_500..5_500).contains(&on_first));
    /// ```
    #[inline]
    pub fn of_word(&self, key: u64) -> Place {
        self.of_hash(mix(key))
    }

    /// Where a byte string is.
    pub fn of_bytes(&self, key: &[u8]) -> Place {
        self.of_hash(hash_bytes(key))
    }

    /// The request for the node that has its key.
    #[inline]
    pub fn route(&self, request: Request) -> Request {
        Request { rank: self.of_word(request.key).rank, ..request }
    }

    #[inline]
    fn of_hash(&self, hash: u64) -> Place {
        // The high half says which node, the low half which daemon: independent of each other.
        let of = |half: u64, count: u32| ((half * u64::from(count)) >> 32) as u32;
        Place { rank: of(hash >> 32, self.nodes), daemon: of(hash & 0xffff_ffff, self.daemons) }
    }
}

/// Spreads neighbouring keys over all bits: each bit of `key` changes about half of the result.
#[inline]
pub fn mix(key: u64) -> u64 {
    let key = (key ^ (key >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let key = (key ^ (key >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    key ^ (key >> 32)
}

/// The same for byte strings: equal on all machines.
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain(std::iter::once(&last));
    words.fold(bytes.len() as u64, |hash, word| mix(hash ^ u64::from_le_bytes(*word)).rotate_left(17))
}
