//! One shard: the keys that one daemon owns.
//!
//! A [`Shard`] belongs to one thread. It has two keyspaces under one memory limit: 8-byte keys with 8-byte values, and byte
//! strings. Which shard owns a key is decided elsewhere, see [`sharding`](crate::sharding).
//!
//! # Promises
//!
//! - A request is done completely or not at all. [`Status::OutOfMemory`] means that nothing has changed.
//! - All memory that the shard allocates counts against the limit: tables with their vacant slots and their directories, and byte
//!   strings with the allocator's overhead for each. The shard never holds more, not even while a table grows.
//! - A get does not allocate. Neither does a put of an 8-byte key that exists, or of a byte string of the same length as before.
//! - Chosen keys cannot degrade the tables: slots depend on a random seed of the shard.
//!
//! The memory of deleted byte strings is freed at once. Slots of deleted keys stay allocated for new keys.

mod bytes_map;
mod hash;
mod table;

use core::hint::select_unpredictable;

use crosstie::group::Token;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::wire::{self, Op, Status, WordRequest, WordResponse};
use bytes_map::BytesMap;
use hash::Seed;
use table::{Slot, Table};

/// The keys that one daemon owns.
///
/// ```
/// use crosstie_kv::wire::{Op, WordRequest, Status};
/// use crosstie_kv::store::Shard;
/// let mut shard = Shard::new(1 << 20);
/// let put = WordRequest { value: 7, ..WordRequest::new(Op::Put, 0, 42) };
/// assert_eq!(shard.apply(&put).status, Status::Done);
/// assert_eq!(shard.apply(&WordRequest::new(Op::Get, 0, 42)).value, 7);
/// ```
pub struct Shard {
    seed: Seed,
    words: Table<WordEntry, WORD_GROUPS>,
    /// The value of key zero, which is not in the table: there, key zero marks a vacant slot.
    zero_value: Option<u64>,
    bytes: BytesMap,
    /// The newest fencing token of each byte-string key that has seen one.
    fences: BytesMap,
    /// Without what [`Shard::stats`] computes.
    stats: ShardStats,
    missed_gets: u64,
    /// Never read. A get stores here what a put stores in its entry, so that the two differ in an address only, see [`Shard::execute`].
    discarded: u64,
}

/// Statistics of a shard: the value of the response to [`wire::BytesOp::Stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShardStats {
    /// 8-byte keys in the shard.
    pub words: u64,
    /// Byte-string keys in the shard.
    pub strings: u64,
    /// Bytes that the shard has allocated.
    pub bytes: u64,
    /// Bytes that the shard may allocate.
    pub limit: u64,
    /// Gets so far.
    pub gets: u64,
    /// Gets that found their key.
    pub hits: u64,
    /// Puts so far.
    pub puts: u64,
    /// Deletes so far.
    pub deletes: u64,
    /// Inserts so far.
    pub inserts: u64,
    /// Compare-and-swaps so far.
    pub swaps: u64,
    /// Inserts that found a value, and compare-and-swaps that found another value or none.
    pub mismatches: u64,
    /// Requests that failed because no memory was left.
    pub out_of_memory: u64,
}

/// In a table larger than this, nearly every lookup misses the cache: a few times the size of a core's private cache.
const MAX_CACHED_BYTES: usize = 8 << 20;
/// Groups of a segment: 64 KiB.
const WORD_GROUPS: usize = 1024;

/// A key that is not zero, and its value.
type WordEntry = [u64; 2];

/// Slots that fill a cache line.
#[repr(align(64))]
pub(crate) struct WordGroup([WordEntry; 4]);

impl AsRef<[WordEntry]> for WordGroup {
    #[inline]
    fn as_ref(&self) -> &[WordEntry] {
        &self.0
    }
}

impl AsMut<[WordEntry]> for WordGroup {
    #[inline]
    fn as_mut(&mut self) -> &mut [WordEntry] {
        &mut self.0
    }
}

impl Slot for WordEntry {
    const VACANT: WordEntry = [0; 2];
    type Group = WordGroup;
    const VACANT_GROUP: WordGroup = WordGroup([WordEntry::VACANT; 4]);
    #[inline]
    fn is_vacant(&self) -> bool {
        self[0] == 0
    }
}

impl Shard {
    /// Creates an empty shard that may allocate `limit` bytes. The first key of each keyspace takes up to 64 KiB.
    pub fn new(limit: usize) -> Shard {
        Shard {
            seed: Seed::random(),
            words: Table::new(),
            zero_value: None,
            bytes: BytesMap::new(),
            fences: BytesMap::new(),
            stats: ShardStats { limit: limit as u64, ..ShardStats::default() },
            missed_gets: 0,
            discarded: 0,
        }
    }

    /// Executes a request for an 8-byte key.
    ///
    /// The caller checks that this shard owns the key; `rank` is ignored.
    // Inlined, with a status and a value that come back in registers: a response in memory is stored in parts, and the reply, which copies it
    // word by word, would wait until these stores have left the core.
    #[inline(always)]
    pub fn apply(&mut self, request: &WordRequest) -> WordResponse {
        let (status, value) = self.execute(request);
        WordResponse::new(status, value)
    }

    #[inline(never)]
    fn execute(&mut self, request: &WordRequest) -> (Status, u64) {
        let WordRequest { op, key, value, .. } = *request;
        // Nearly all requests are gets and puts of existing keys, in no order that could be predicted. They differ without a branch.
        if matches!(op, Op::Get | Op::Put)
            && key != 0
            && let hash = self.seed.hash_word(key)
            && let Some([_, current]) = self.words.get_mut_at_home(hash, |slot| slot[0] == key)
        {
            let (is_put, found) = (op == Op::Put, *current);
            *select_unpredictable(is_put, current, &mut self.discarded) = value;
            self.stats.puts += u64::from(is_put);
            self.stats.gets += u64::from(!is_put);
            return (Status::Done, select_unpredictable(is_put, 0, found));
        }
        self.execute_rare(request)
    }

    /// Whether most of the table of 8-byte keys fits in a core's private cache, judging by its size.
    #[inline]
    pub(crate) fn words_fit_in_cache(&self) -> bool {
        self.words.allocated() <= MAX_CACHED_BYTES
    }

    /// The slots with which the search for an 8-byte key starts: memory that [`Shard::apply`] will read, for prefetching.
    #[inline]
    pub(crate) fn home_group(&self, key: u64) -> Option<&WordGroup> {
        self.words.home(self.seed.hash_word(key))
    }

    /// Executes any request: those that `execute` does not execute itself.
    #[inline(never)]
    fn execute_rare(&mut self, request: &WordRequest) -> (Status, u64) {
        let WordRequest { op, key, value, expected, .. } = *request;
        let (status, value) = match op {
            Op::Get => {
                self.stats.gets += 1;
                let found = self.get_word(key);
                self.missed_gets += u64::from(found.is_none());
                found.map_or((Status::NotFound, 0), |value| (Status::Done, value))
            }
            Op::Put => {
                self.stats.puts += 1;
                (self.put_word(key, value), 0)
            }
            Op::Delete => {
                self.stats.deletes += 1;
                (if self.remove_word(key) { Status::Done } else { Status::NotFound }, 0)
            }
            Op::Insert => {
                self.stats.inserts += 1;
                match self.get_word(key) {
                    Some(current) => (Status::Mismatch, current),
                    None => (self.add_word(key, value), 0),
                }
            }
            Op::CompareAndSwap => {
                self.stats.swaps += 1;
                match self.get_word_mut(key) {
                    Some(current) if *current == expected => {
                        *current = value;
                        (Status::Done, 0)
                    }
                    Some(current) => (Status::Mismatch, *current),
                    None => (Status::NotFound, 0),
                }
            }
        };
        self.count_failure(op, status);
        (status, value)
    }

    /// Executes an operation on a byte string, or returns the statistics. The response's value is borrowed from the shard.
    ///
    /// [`wire::BytesOp::Info`] is not for a shard: its response is [`Status::Misrouted`]. A key or a value that is too long is
    /// [`Status::Malformed`].
    pub fn apply_bytes<'s>(&'s mut self, op: &wire::BytesOp<'_>) -> wire::BytesResponse<'s> {
        use wire::BytesOp;
        if let BytesOp::Info = op {
            return wire::BytesResponse::new(Status::Misrouted);
        }
        let Some(key) = op.key() else {
            self.stats = self.stats();
            return wire::BytesResponse { status: Status::Done, value: self.stats.as_bytes() };
        };
        let hash = self.seed.hash_bytes(key);
        let (kind, status) = match *op {
            BytesOp::Get { .. } => {
                self.stats.gets += 1;
                (Op::Get, if self.bytes.get(hash, key).is_some() { Status::Done } else { Status::NotFound })
            }
            BytesOp::Put { value, .. } => {
                self.stats.puts += 1;
                (Op::Put, self.put_bytes(hash, key, value))
            }
            BytesOp::Delete { .. } => {
                self.stats.deletes += 1;
                (Op::Delete, if self.bytes.remove(hash, key) { Status::Done } else { Status::NotFound })
            }
            BytesOp::Insert { value, .. } => {
                self.stats.inserts += 1;
                let status = match self.bytes.get(hash, key) {
                    Some(_) => Status::Mismatch,
                    None => self.put_bytes(hash, key, value),
                };
                (Op::Insert, status)
            }
            BytesOp::CompareAndSwap { expected, value, .. } => {
                self.stats.swaps += 1;
                let status = match self.bytes.get(hash, key) {
                    Some(current) if current == expected => self.put_bytes(hash, key, value),
                    Some(_) => Status::Mismatch,
                    None => Status::NotFound,
                };
                (Op::CompareAndSwap, status)
            }
            BytesOp::FencedPut { token, value, .. } => {
                self.stats.puts += 1;
                (Op::Put, self.put_bytes_fenced(hash, key, value, token.get()))
            }
            BytesOp::FencedDelete { token, .. } => {
                self.stats.deletes += 1;
                let status = match self.raise_fence(hash, key, token.get()) {
                    Status::Done if !self.bytes.remove(hash, key) => Status::NotFound,
                    status => status,
                };
                (Op::Delete, status)
            }
            BytesOp::Fence { token, .. } => (Op::Put, self.raise_fence(hash, key, token.get())),
            BytesOp::Info | BytesOp::Stats => unreachable!("requests without a key were handled above"),
        };
        self.missed_gets += u64::from(kind == Op::Get && status != Status::Done);
        self.count_failure(kind, status);
        match (kind, status) {
            (_, Status::Fenced) => {
                wire::BytesResponse { status, value: self.fences.get(hash, key).unwrap_or_default() }
            }
            (Op::Get, Status::Done) | (_, Status::Mismatch) => {
                wire::BytesResponse { status, value: self.bytes.get(hash, key).unwrap_or_default() }
            }
            _ => wire::BytesResponse::new(status),
        }
    }

    /// The current statistics.
    pub fn stats(&self) -> ShardStats {
        ShardStats {
            words: (self.words.len() + usize::from(self.zero_value.is_some())) as u64,
            strings: self.bytes.len() as u64,
            bytes: self.allocated() as u64,
            hits: self.stats.gets - self.missed_gets,
            ..self.stats
        }
    }

    fn allocated(&self) -> usize {
        self.words.allocated() + self.bytes.allocated() + self.fences.allocated()
    }

    fn spare_bytes(&self) -> usize {
        (self.stats.limit as usize).saturating_sub(self.allocated())
    }

    fn count_failure(&mut self, op: Op, status: Status) {
        match (op, status) {
            (_, Status::OutOfMemory) => self.stats.out_of_memory += 1,
            (Op::Insert | Op::CompareAndSwap, Status::Mismatch) | (Op::CompareAndSwap, Status::NotFound) => {
                self.stats.mismatches += 1
            }
            _ => {}
        }
    }

    fn get_word(&self, key: u64) -> Option<u64> {
        if key == 0 {
            return self.zero_value;
        }
        self.words.get(self.seed.hash_word(key), |slot| slot[0] == key).map(|slot| slot[1])
    }

    fn get_word_mut(&mut self, key: u64) -> Option<&mut u64> {
        if key == 0 {
            return self.zero_value.as_mut();
        }
        self.words.get_mut(self.seed.hash_word(key), |slot| slot[0] == key).map(|slot| &mut slot[1])
    }

    fn put_word(&mut self, key: u64, value: u64) -> Status {
        match self.get_word_mut(key) {
            Some(current) => {
                *current = value;
                Status::Done
            }
            None => self.add_word(key, value),
        }
    }

    /// Adds a key that the shard does not have.
    fn add_word(&mut self, key: u64, value: u64) -> Status {
        if key == 0 {
            self.zero_value = Some(value);
            return Status::Done;
        }
        let (hash, spare) = (self.seed.hash_word(key), self.spare_bytes());
        if !self.words.reserve(hash, spare, |slot| self.seed.hash_word(slot[0])) {
            return Status::OutOfMemory;
        }
        self.words.insert(hash, [key, value]);
        Status::Done
    }

    fn remove_word(&mut self, key: u64) -> bool {
        if key == 0 {
            return self.zero_value.take().is_some();
        }
        let hash = self.seed.hash_word(key);
        self.words.remove(hash, |slot| slot[0] == key, |slot| self.seed.hash_word(slot[0])).is_some()
    }

    /// The newest fencing token that the key has seen.
    fn newest_token(&self, hash: u64, key: &[u8]) -> Option<Token> {
        self.fences.get(hash, key).and_then(|bytes| bytes.first_chunk()).map(Token::from_bytes)
    }

    /// Stores a value with its fencing token, or changes nothing.
    fn put_bytes_fenced(&mut self, hash: u64, key: &[u8], value: &[u8], token: Token) -> Status {
        let former = self.newest_token(hash, key);
        let raised = self.raise_fence(hash, key, token);
        if raised != Status::Done {
            return raised;
        }
        let status = self.put_bytes(hash, key, value);
        match former {
            _ if status == Status::Done => {}
            // The token that was raised gives way to it: it has the same length, so it needs no memory.
            Some(former) => _ = self.fences.put(hash, key, &former.to_bytes(), 0),
            None => _ = self.fences.remove(hash, key),
        }
        status
    }

    /// Remembers a fencing token, unless the key has seen a newer one.
    fn raise_fence(&mut self, hash: u64, key: &[u8], token: Token) -> Status {
        match self.newest_token(hash, key) {
            Some(newest) if newest > token => return Status::Fenced,
            Some(newest) if newest == token => return Status::Done,
            _ => {}
        }
        if key.len() > wire::MAX_KEY {
            return Status::Malformed;
        }
        let spare = self.spare_bytes();
        if self.fences.put(hash, key, &token.to_bytes(), spare) { Status::Done } else { Status::OutOfMemory }
    }

    fn put_bytes(&mut self, hash: u64, key: &[u8], value: &[u8]) -> Status {
        if key.len() > wire::MAX_KEY || value.len() > wire::MAX_VALUE {
            return Status::Malformed;
        }
        let spare = self.spare_bytes();
        if self.bytes.put(hash, key, value, spare) { Status::Done } else { Status::OutOfMemory }
    }
}

#[cfg(test)]
mod tests;
