//! What clients of a benchmark do, made in advance from a seed.
//!
//! A [`Plan`] says which keys are asked for, how often each, and how many of the requests read. Each client gets a
//! [`Pattern`] of its own from it, a list of requests that it goes through again and again, so that nothing is drawn while
//! time is taken. The same seed, rank and client make the same pattern every time, and on every machine (with Zipf's law,
//! as far as the machines' logarithms are the same to the last bit); different ones have nothing to do with each other.
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

/// Keys at most, so that an entry of a pattern is eight bytes.
pub const MAX_KEYS: u64 = 1 << 32;
/// Entries of a pattern at most.
pub const MAX_ENTRIES: usize = 1 << 20;
/// The steepest Zipf distribution.
pub const MAX_ZIPF: f64 = 8.0;

/// What to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The keys are `0..keys`. At most [`MAX_KEYS`].
    pub keys: u64,
    /// The share of requests that read, 0 to 1; the others put.
    pub read_ratio: f64,
    /// If given, key `k` is asked for in proportion to `1 / (k + 1)^theta`, `0 < theta <= `[`MAX_ZIPF`]; otherwise all keys
    /// alike. Where a key lies has nothing to do with its number, so the hot keys are spread over nodes and daemons.
    pub zipf: Option<f64>,
    /// Bytes of a value. With 8, requests are those of [`message`](crosstie_kv::wire); otherwise keys are byte strings, see
    /// [`key_bytes`], and requests are [`long`](crosstie_kv::wire).
    pub value_size: usize,
    /// If given, the share of requests for keys of the client's own node, 0 to 1; otherwise chance decides. Without meaning in a
    /// cluster of one node.
    pub local_share: Option<f64>,
    /// Entries of a pattern: a power of two, at most [`MAX_ENTRIES`].
    pub entries: usize,
    /// What everything is drawn from.
    pub seed: u64,
}

/// A request to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: u32,
    /// The node that has it.
    pub rank: u16,
    /// The daemon of that node.
    pub daemon: u8,
    /// Whether it is to be got, rather than put.
    pub is_read: bool,
}

/// One client's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    entries: Box<[Entry]>,
}

/// Why there is no such pattern.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Too few or too many keys.
    #[error("{0} keys; there must be 1 to {MAX_KEYS}")]
    Keys(u64),
    /// Not a share.
    #[error("a {what} of {value}; it must be 0 to 1")]
    Share {
        /// "read ratio" or "local share".
        what: &'static str,
        /// What was given.
        value: f64,
    },
    /// A Zipf exponent that is none.
    #[error(
        "a Zipf exponent of {0}; it must be more than 0, and {MAX_ZIPF} at most (leave it out to ask for all keys alike)"
    )]
    Zipf(f64),
    /// Values too long.
    #[error("values of {0} bytes; they may have {MAX_VALUE} at most")]
    ValueSize(usize),
    /// Not a power of two, or too many.
    #[error("{0} entries; there must be a power of two of them, {MAX_ENTRIES} at most")]
    Entries(usize),
    /// The rank is not one of the cluster.
    #[error("rank {rank} of {nodes} nodes")]
    Rank {
        /// What was given.
        rank: u32,
        /// The cluster's nodes.
        nodes: u32,
    },
    /// The local share cannot be kept: one kind of key is not there or hardly ever asked for.
    #[error(
        "node {rank} finds hardly any {kind} key among {keys}: use more keys, a smaller Zipf exponent, or no local share"
    )]
    OneSided {
        /// The node.
        rank: u32,
        /// "local" or "remote".
        kind: &'static str,
        /// How many keys there are.
        keys: u64,
    },
    /// A rate that is none.
    #[error("a rate of {0} per second; it must be more than 0, and finite")]
    Rate(f64),
}

const _: () = assert!(size_of::<Entry>() == 8);

/// Draws for one entry before it is said that there is no such key.
const MAX_DRAWS: u32 = 100_000;

impl Default for Plan {
    /// A million keys, all alike, half of the requests read, 8-byte values.
    fn default() -> Plan {
        Plan {
            keys: 1_000_000,
            read_ratio: 0.5,
            zipf: None,
            value_size: 8,
            local_share: None,
            entries: 1 << 16,
            seed: 1,
        }
    }
}

impl Plan {
    /// Says what is wrong with it.
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
        let [mut keys, mut kinds, mut sides] = [Stream::Keys, Stream::Kinds, Stream::Sides]
            .map(|stream| Random::new(self.seed, rank, client, stream));
        let zipf = self.zipf.map(|theta| Zipf::new(self.keys, theta));
        let mut draw = || match &zipf {
            Some(zipf) => zipf.draw(&mut keys),
            None => keys.below(self.keys),
        };
        let local_share = self.local_share.filter(|_| cluster.nodes() > 1);
        let entries = (0..self.entries).map(|_| {
            let local = local_share.map(|share| sides.unit() < share);
            let (key, place) = (0..MAX_DRAWS)
                .map(|_| draw())
                .map(|key| (key, self.place(cluster, key)))
                .find(|(_, place)| local.is_none_or(|local| (place.rank == rank) == local))
                .ok_or_else(|| {
                    let kind = if local == Some(true) { "local" } else { "remote" };
                    PlanError::OneSided { rank, kind, keys: self.keys }
                })?;
            let is_read = kinds.unit() < self.read_ratio;
            // All within the limits of keys, nodes and daemons.
            Ok(Entry { key: key as u32, rank: place.rank as u16, daemon: place.daemon as u8, is_read })
        });
        Ok(Pattern { entries: entries.collect::<Result<_, _>>()? })
    }

    /// Where `key` lies.
    pub fn place(&self, cluster: &ShardMap, key: u64) -> ShardId {
        if self.has_words() { cluster.shard_of_word(key) } else { cluster.shard_of_bytes(&key_bytes(key)) }
    }

    /// The keys of node `rank`, to be put before anything is measured.
    pub fn keys_of(&self, cluster: &ShardMap, rank: u32) -> impl Iterator<Item = u64> {
        (0..self.keys).filter(move |key| self.place(cluster, *key).rank == rank)
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
    /// All of them, in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// WordRequest number `n`: after the last comes the first again.
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
