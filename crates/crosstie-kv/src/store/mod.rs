//! One daemon's part of the store.
//!
//! A [`Shard`] belongs to one thread. 8-byte keys with 8-byte values, and byte strings, are two spaces of keys beside each
//! other under one memory limit.
//!
//! # Promises
//!
//! - A request is done or not done. [`Status::OutOfMemory`] means that nothing has changed.
//! - All that the shard allocates counts against the limit: tables with their free slots and their directories, and byte strings with
//!   what the allocator adds to each. It never holds more, not even for the moment in which it grows.
//! - A get allocates nothing; neither does a put of an 8-byte key that exists, nor one of a byte string of the same length as before.
//! - Keys that somebody chooses to harm the table do not: where a key lies depends on a seed that the shard draws.
//!
//! Memory of deleted byte strings is free again at once; places in the tables stay for new keys.

mod hash;
mod strings;
mod table;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::wire::{self, Op, Status, WordRequest, WordResponse};
use hash::Seed;
use strings::Strings;
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
    words: Table<Word, WORD_SLOTS>,
    /// The value of key zero: in the table, zero means that there is no key.
    zero: Option<u64>,
    strings: Strings,
    stats: ShardStats,
}

/// Figures of a shard: the answer to [`wire::BytesOp::Stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ShardStats {
    /// 8-byte keys that it has.
    pub words: u64,
    /// Byte strings that it has.
    pub strings: u64,
    /// Bytes that it has allocated.
    pub bytes: u64,
    /// Bytes that it may allocate.
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
    /// Inserts and compare-and-swaps that found another value, or for a swap none.
    pub mismatches: u64,
    /// Requests refused for want of memory.
    pub out_of_memory: u64,
}

/// A table beyond this waits for memory at nearly every look-up: some times what a core's own cache holds.
const CACHED: usize = 8 << 20;
/// 64 KiB.
const WORD_SLOTS: usize = 4096;

/// A key that is not zero, and its value.
type Word = [u64; 2];

impl Slot for Word {
    const VACANT: Word = [0; 2];
    #[inline]
    fn is_vacant(&self) -> bool {
        self[0] == 0
    }
}

impl Shard {
    /// An empty shard that may allocate `limit` bytes. The first key of each kind takes some 64 KiB.
    pub fn new(limit: usize) -> Shard {
        Shard {
            seed: Seed::random(),
            words: Table::new(),
            zero: None,
            strings: Strings::new(),
            stats: ShardStats { limit: limit as u64, ..ShardStats::default() },
        }
    }

    /// Does what `request` says.
    ///
    /// Whether the key belongs here is the caller's to check; its `rank` is not looked at.
    #[inline]
    pub fn apply(&mut self, request: &WordRequest) -> WordResponse {
        let WordRequest { op, key, value, .. } = *request;
        // The two that nearly all requests are, by branches: a jump table costs more when they alternate at random.
        if op == Op::Get {
            self.stats.gets += 1;
            let found = self.word(key);
            self.stats.hits += u64::from(found.is_some());
            return found.map_or(WordResponse::new(Status::NotFound, 0), |value| {
                WordResponse::new(Status::Done, value)
            });
        }
        if op == Op::Put {
            self.stats.puts += 1;
            if let Some(current) = self.word_mut(key) {
                *current = value;
                return WordResponse::new(Status::Done, 0);
            }
        }
        self.change(request)
    }

    /// Whether a core's own cache has most of the 8-byte keys, as far as one can tell from how many there are.
    #[inline]
    pub(crate) fn words_fit_in_cache(&self) -> bool {
        self.words.allocated() <= CACHED
    }

    /// Where an 8-byte key is if it is anywhere, or close to it: memory that [`Shard::apply`] will read.
    #[inline]
    pub(crate) fn home_slot(&self, key: u64) -> Option<&[u64; 2]> {
        self.words.home(self.seed.word(key))
    }

    /// The other requests, and puts of new keys.
    #[inline(never)]
    fn change(&mut self, request: &WordRequest) -> WordResponse {
        let WordRequest { op, key, value, expected, .. } = *request;
        let (status, value) = match op {
            // Never a get: `apply` has answered it.
            Op::Get => (Status::NotFound, 0),
            Op::Put => (self.add_word(key, value), 0),
            Op::Delete => {
                self.stats.deletes += 1;
                (if self.remove_word(key) { Status::Done } else { Status::NotFound }, 0)
            }
            Op::Insert => {
                self.stats.inserts += 1;
                match self.word(key) {
                    Some(current) => (Status::Mismatch, current),
                    None => (self.add_word(key, value), 0),
                }
            }
            Op::CompareAndSwap => {
                self.stats.swaps += 1;
                match self.word_mut(key) {
                    Some(current) if *current == expected => {
                        *current = value;
                        (Status::Done, 0)
                    }
                    Some(current) => (Status::Mismatch, *current),
                    None => (Status::NotFound, 0),
                }
            }
        };
        self.count(op, status);
        WordResponse::new(status, value)
    }

    /// Does what `call` says. The response's value lies in the store.
    ///
    /// [`wire::BytesOp::Info`] is none of a shard's business, and is answered with [`Status::Misrouted`]. A key or value beyond
    /// its limit is [`Status::Malformed`].
    pub fn apply_bytes<'s>(&'s mut self, call: &wire::BytesOp<'_>) -> wire::BytesResponse<'s> {
        use wire::BytesOp;
        let done = |status| wire::BytesResponse::new(status);
        if let BytesOp::Info = call {
            return done(Status::Misrouted);
        }
        let Some(key) = call.key() else {
            self.stats = self.stats();
            return wire::BytesResponse { status: Status::Done, value: self.stats.as_bytes() };
        };
        let hash = self.seed.string(key);
        let (op, status) = match *call {
            BytesOp::Get { .. } => {
                self.stats.gets += 1;
                (Op::Get, if self.strings.get(hash, key).is_some() { Status::Done } else { Status::NotFound })
            }
            BytesOp::Put { value, .. } => {
                self.stats.puts += 1;
                (Op::Put, self.put_string(hash, key, value))
            }
            BytesOp::Delete { .. } => {
                self.stats.deletes += 1;
                (Op::Delete, if self.strings.remove(hash, key) { Status::Done } else { Status::NotFound })
            }
            BytesOp::Insert { value, .. } => {
                self.stats.inserts += 1;
                let status = match self.strings.get(hash, key) {
                    Some(_) => Status::Mismatch,
                    None => self.put_string(hash, key, value),
                };
                (Op::Insert, status)
            }
            BytesOp::CompareAndSwap { expected, value, .. } => {
                self.stats.swaps += 1;
                let status = match self.strings.get(hash, key) {
                    Some(current) if current == expected => self.put_string(hash, key, value),
                    Some(_) => Status::Mismatch,
                    None => Status::NotFound,
                };
                (Op::CompareAndSwap, status)
            }
            BytesOp::Info | BytesOp::Stats => unreachable!("they have no key"),
        };
        if op == Op::Get && status == Status::Done {
            self.stats.hits += 1;
        }
        self.count(op, status);
        match (op, status) {
            (Op::Get, Status::Done) | (_, Status::Mismatch) => {
                wire::BytesResponse { status, value: self.strings.get(hash, key).unwrap_or_default() }
            }
            _ => done(status),
        }
    }

    /// Figures, as of now.
    pub fn stats(&self) -> ShardStats {
        ShardStats {
            words: (self.words.len() + usize::from(self.zero.is_some())) as u64,
            strings: self.strings.len() as u64,
            bytes: self.allocated() as u64,
            ..self.stats
        }
    }

    fn allocated(&self) -> usize {
        self.words.allocated() + self.strings.allocated()
    }

    fn spare(&self) -> usize {
        (self.stats.limit as usize).saturating_sub(self.allocated())
    }

    fn count(&mut self, op: Op, status: Status) {
        match (op, status) {
            (_, Status::OutOfMemory) => self.stats.out_of_memory += 1,
            (Op::Insert | Op::CompareAndSwap, Status::Mismatch) | (Op::CompareAndSwap, Status::NotFound) => {
                self.stats.mismatches += 1
            }
            _ => {}
        }
    }

    #[inline]
    fn word(&self, key: u64) -> Option<u64> {
        if key == 0 {
            return self.zero;
        }
        self.words.get(self.seed.word(key), |slot| slot[0] == key).map(|slot| slot[1])
    }

    #[inline]
    fn word_mut(&mut self, key: u64) -> Option<&mut u64> {
        if key == 0 {
            return self.zero.as_mut();
        }
        self.words.get_mut(self.seed.word(key), |slot| slot[0] == key).map(|slot| &mut slot[1])
    }

    fn add_word(&mut self, key: u64, value: u64) -> Status {
        if key == 0 {
            self.zero = Some(value);
            return Status::Done;
        }
        let (hash, spare) = (self.seed.word(key), self.spare());
        if !self.words.reserve(hash, spare, |slot| self.seed.word(slot[0])) {
            return Status::OutOfMemory;
        }
        self.words.insert(hash, [key, value]);
        Status::Done
    }

    fn remove_word(&mut self, key: u64) -> bool {
        if key == 0 {
            return self.zero.take().is_some();
        }
        let hash = self.seed.word(key);
        self.words.remove(hash, |slot| slot[0] == key, |slot| self.seed.word(slot[0])).is_some()
    }

    fn put_string(&mut self, hash: u64, key: &[u8], value: &[u8]) -> Status {
        if key.len() > wire::MAX_KEY || value.len() > wire::MAX_VALUE {
            return Status::Malformed;
        }
        let spare = self.spare();
        if self.strings.put(hash, key, value, spare) { Status::Done } else { Status::OutOfMemory }
    }
}

#[cfg(test)]
mod tests;
