//! The requests of benchmark clients, generated in advance from a seed.
//!
//! A [`Plan`] defines the keys, their distribution, and the share of reads. Each client generates its own [`Pattern`] from it: a list of
//! requests that it repeats, so that no random numbers are drawn while time is measured. The pattern depends only on the plan, which has
//! the seed, the rank and the client. It is the same on all machines (with a Zipf distribution, if the logarithms of the machines agree
//! to the last bit). The patterns of different clients are independent.
//!
//! ```
//! use crosstie_kv::sharding::ShardMap;
//! use crosstie_bench::workload::Plan;
//! let plan = Plan { keys: 1000, read_ratio: 0.9, zipf: Some(0.99), ..Plan::default() };
//! let cluster = ShardMap::new(2, 2).unwrap();
//! let pattern = plan.pattern(&cluster, 0, 3)?;
//! let reads = pattern.entries().iter().filter(|entry| entry.is_read).count();
//! assert!((0.89..0.91).contains(&(reads as f64 / pattern.entries().len() as f64)));
//! # Ok::<(), crosstie_bench::workload::PlanError>(())
//! ```

#![forbid(unsafe_code)]

mod random;
mod schedule;
mod zipf;

use serde::{Deserialize, Serialize};

use crosstie_kv::sharding::{ShardId, ShardMap};
use crosstie_kv::wire::{MAX_VALUE, Op, WordRequest};
use random::{Random, Stream};
use zipf::Zipf;

pub use schedule::Schedule;

/// Most keys of a plan. With this limit an entry of a pattern takes eight bytes.
pub const MAX_KEYS: u64 = 1 << 32;
/// Most entries of a pattern.
pub const MAX_ENTRIES: usize = 1 << 20;
/// Entries of a pattern by default.
const DEFAULT_ENTRIES: usize = 1 << 16;
/// The largest exponent of a Zipf distribution.
pub const MAX_ZIPF: f64 = 8.0;

/// The workload of all clients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The keys are `0..keys`. At most [`MAX_KEYS`].
    pub keys: u64,
    /// The share of requests that read, 0 to 1; the others put.
    pub read_ratio: f64,
    /// If given, the frequency of key `k` is proportional to `1 / (k + 1)^theta`, `0 < theta <= `[`MAX_ZIPF`]; otherwise all keys
    /// are equally frequent. The shard of a key does not depend on its rank in the distribution, so hot keys are spread over all shards.
    pub zipf: Option<f64>,
    /// Bytes of a value. With 8, keys and values are words ([`WordRequest`]). Otherwise they are byte strings
    /// ([`BytesRequest`](crosstie_kv::wire::BytesRequest)), see [`key_bytes`].
    pub value_size: usize,
    /// If given, the share of requests for keys of the client's own node, 0 to 1; otherwise it follows from the distribution of keys.
    /// Has no effect in a cluster of one node.
    pub local_share: Option<f64>,
    /// Entries of a pattern: a power of two, at most [`MAX_ENTRIES`].
    pub entries: usize,
    /// The seed of all random numbers.
    pub seed: u64,
}

/// One request of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: u32,
    /// The node that has it.
    pub rank: u16,
    /// The daemon of that node.
    pub daemon: u8,
    /// Whether it is a get; otherwise it is a put.
    pub is_read: bool,
}

/// One client's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    entries: Box<[Entry]>,
}

/// Why a plan is invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Too few or too many keys.
    #[error("{0} keys: give 1 to {MAX_KEYS}")]
    Keys(u64),
    /// A share is not between 0 and 1.
    #[error("{what} {value}: give 0 to 1")]
    Share {
        /// "read ratio" or "local share".
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// The Zipf exponent is out of range.
    #[error(
        "Zipf exponent {0}: give more than 0, at most {MAX_ZIPF}; leave it out for a uniform distribution"
    )]
    Zipf(f64),
    /// Values are too long.
    #[error("values of {0} bytes: give at most {MAX_VALUE}")]
    ValueSize(usize),
    /// The number of entries is not a power of two, or too large.
    #[error("{0} entries: give a power of two, at most {MAX_ENTRIES}")]
    Entries(usize),
    /// The cluster has no such rank.
    #[error("rank {rank}: the cluster has {nodes} nodes, with ranks from 0")]
    Rank {
        /// What was given.
        rank: u32,
        /// The cluster's nodes.
        nodes: u32,
    },
    /// The local share cannot be reached: there are no, or hardly any, requests for local or for remote keys.
    #[error(
        "node {rank} finds hardly any {kind} key among {keys}: use more keys, a smaller Zipf exponent, or no local share"
    )]
    OneSided {
        /// The node.
        rank: u32,
        /// "local" or "remote".
        kind: &'static str,
        /// The number of keys.
        keys: u64,
    },
    /// The rate is not positive or not finite.
    #[error("rate {0} per second: give more than 0, and a finite number")]
    Rate(f64),
}

const _: () = assert!(size_of::<Entry>() == 8);

/// Draws for one entry before it is an error that no key fits.
const MAX_DRAWS: u32 = 100_000;

impl Default for Plan {
    /// A million keys, uniform distribution, half of the requests are gets, 8-byte values.
    fn default() -> Plan {
        Plan {
            keys: 1_000_000,
            read_ratio: 0.5,
            zipf: None,
            value_size: 8,
            local_share: None,
            entries: DEFAULT_ENTRIES,
            seed: 1,
        }
    }
}

impl Plan {
    /// As many entries per client that `clients` clients together request nearly all keys (98 % of them, if keys are equally frequent):
    /// four requests for each key. With more than [`MAX_ENTRIES`] per client they cannot, see [`expected_keys`](Plan::expected_keys).
    pub fn with_entries_for(mut self, clients: u64) -> Plan {
        let each = self.keys.saturating_mul(4).div_ceil(clients.max(1)).min(MAX_ENTRIES as u64) as usize;
        self.entries = each.next_power_of_two().max(DEFAULT_ENTRIES);
        self
    }

    /// How many different keys `clients` clients are expected to request, if keys are equally frequent.
    pub fn expected_keys(&self, clients: u64) -> u64 {
        let (keys, requests) = (self.keys as f64, self.entries as f64 * clients as f64);
        (keys * (1.0 - (-requests / keys).exp())).round() as u64
    }

    /// Checks the plan.
    pub fn validate(&self) -> Result<(), PlanError> {
        let share = |what, value: f64| match value {
            0.0..=1.0 => Ok(()),
            _ => Err(PlanError::Share { what, value }),
        };
        if !(1..=MAX_KEYS).contains(&self.keys) {
            return Err(PlanError::Keys(self.keys));
        }
        share("read ratio", self.read_ratio)?;
        share("local share", self.local_share.unwrap_or(0.0))?;
        if let Some(theta) = self.zipf.filter(|theta| !(*theta > 0.0 && *theta <= MAX_ZIPF)) {
            return Err(PlanError::Zipf(theta));
        }
        if self.value_size > MAX_VALUE {
            return Err(PlanError::ValueSize(self.value_size));
        }
        if !self.entries.is_power_of_two() || self.entries > MAX_ENTRIES {
            return Err(PlanError::Entries(self.entries));
        }
        Ok(())
    }

    /// The requests of client `client` of node `rank`.
    pub fn pattern(&self, cluster: &ShardMap, rank: u32, client: u32) -> Result<Pattern, PlanError> {
        self.validate()?;
        if rank >= cluster.nodes() {
            return Err(PlanError::Rank { rank, nodes: cluster.nodes() });
        }
        let [mut keys, mut operations, mut locality] = [Stream::Keys, Stream::Operations, Stream::Locality]
            .map(|stream| Random::new(self.seed, rank, client, stream));
        let zipf = self.zipf.map(|theta| Zipf::new(self.keys, theta));
        let mut draw = || match &zipf {
            Some(zipf) => zipf.draw(&mut keys),
            None => keys.below(self.keys),
        };
        let local_share = self.local_share.filter(|_| cluster.nodes() > 1);
        let entries = (0..self.entries).map(|_| {
            let local = local_share.map(|share| locality.unit() < share);
            let (key, shard) = (0..MAX_DRAWS)
                .map(|_| draw())
                .map(|key| (key, self.shard_of(cluster, key)))
                .find(|(_, shard)| local.is_none_or(|local| (shard.rank == rank) == local))
                .ok_or_else(|| {
                    let kind = if local == Some(true) { "local" } else { "remote" };
                    PlanError::OneSided { rank, kind, keys: self.keys }
                })?;
            let is_read = operations.unit() < self.read_ratio;
            // The limits of keys, nodes and daemons fit into these types.
            Ok(Entry { key: key as u32, rank: shard.rank as u16, daemon: shard.daemon as u8, is_read })
        });
        Ok(Pattern { entries: entries.collect::<Result<_, _>>()? })
    }

    /// The shard that owns `key`.
    pub fn shard_of(&self, cluster: &ShardMap, key: u64) -> ShardId {
        if self.has_words() { cluster.shard_of_word(key) } else { cluster.shard_of_bytes(&key_bytes(key)) }
    }

    /// The keys of node `rank`, which the benchmark puts before it measures.
    pub fn keys_of(&self, cluster: &ShardMap, rank: u32) -> impl Iterator<Item = u64> {
        (0..self.keys).filter(move |key| self.shard_of(cluster, *key).rank == rank)
    }

    /// Whether keys and values are 8-byte words.
    pub fn has_words(&self) -> bool {
        self.value_size == 8
    }
}

/// `key` as a byte string.
pub fn key_bytes(key: u64) -> [u8; 8] {
    key.to_be_bytes()
}

impl Pattern {
    /// All requests, in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Request number `n`; after the last one, the pattern repeats.
    #[inline]
    pub fn at(&self, n: u64) -> Entry {
        // The length is a power of two.
        self.entries[n as usize & (self.entries.len() - 1)]
    }
}

impl Entry {
    /// The request, with `value` if it is a put.
    #[inline]
    pub fn request(&self, value: u64) -> WordRequest {
        let (op, value) = if self.is_read { (Op::Get, 0) } else { (Op::Put, value) };
        WordRequest { value, ..WordRequest::new(op, u32::from(self.rank), u64::from(self.key)) }
    }
}

const _: () =
    assert!(crosstie_kv::sharding::MAX_NODES <= 1 << 16 && crosstie_kv::sharding::MAX_DAEMONS <= 1 << 8);

#[cfg(test)]
mod tests;
