//! The map of byte strings: a hash table of entries, and one allocation for each key with its value.

use super::table::{Slot, Table};

/// Byte-string keys with their values.
pub(super) struct BytesMap {
    table: Table<Entry, SLOTS>,
    /// Memory that the records take, in bytes.
    record_bytes: usize,
}

/// Slots of a segment: 24 KiB.
const SLOTS: usize = 1024;

struct Entry {
    hash: u64,
    record: Option<Record>,
}

/// A key with its value, in one allocation:
///
/// ```text
/// | key_len u32 | key | value |
/// ```
struct Record(Box<[u8]>);

impl Slot for Entry {
    const VACANT: Entry = Entry { hash: 0, record: None };
    // A comparison may read a record, so slots are compared one by one.
    type Group = [Entry; 1];
    const VACANT_GROUP: [Entry; 1] = [Entry::VACANT];
    #[inline]
    fn is_vacant(&self) -> bool {
        self.record.is_none()
    }
}

impl BytesMap {
    pub(super) fn new() -> BytesMap {
        BytesMap { table: Table::new(), record_bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn allocated(&self) -> usize {
        self.table.allocated() + self.record_bytes
    }

    pub(super) fn get(&self, hash: u64, key: &[u8]) -> Option<&[u8]> {
        self.table.get(hash, |entry| entry.matches(hash, key))?.record.as_ref().map(|record| record.split().1)
    }

    /// Stores `value` if that takes at most `spare` bytes more than now. Returns whether it did.
    pub(super) fn put(&mut self, hash: u64, key: &[u8], value: &[u8], spare: usize) -> bool {
        let cost = Record::cost(key.len(), value.len());
        let Some(entry) = self.table.get_mut(hash, |entry| entry.matches(hash, key)) else {
            let fits = spare.checked_sub(cost);
            let Some(spare) = fits else { return false };
            if !self.table.reserve(hash, spare, |entry| entry.hash) {
                return false;
            }
            self.table.insert(hash, Entry { hash, record: Some(Record::new(key, value)) });
            self.record_bytes += cost;
            return true;
        };
        if let Some(record) = &mut entry.record {
            let old = record.value_mut();
            if old.len() == value.len() {
                old.copy_from_slice(value);
                return true;
            }
            let old = Record::cost(key.len(), old.len());
            if cost > old + spare {
                return false;
            }
            self.record_bytes = self.record_bytes - old + cost;
        }
        // The old record is freed first: both together may exceed the limit.
        entry.record = None;
        entry.record = Some(Record::new(key, value));
        true
    }

    pub(super) fn remove(&mut self, hash: u64, key: &[u8]) -> bool {
        let removed = self.table.remove(hash, |entry| entry.matches(hash, key), |entry| entry.hash);
        let Some(record) = removed.and_then(|entry| entry.record) else { return false };
        let (key, value) = record.split();
        self.record_bytes -= Record::cost(key.len(), value.len());
        true
    }
}

impl Entry {
    #[inline]
    fn matches(&self, hash: u64, key: &[u8]) -> bool {
        self.hash == hash && self.record.as_ref().is_some_and(|record| record.split().0 == key)
    }
}

impl Record {
    const PREFIX: usize = size_of::<u32>();

    fn new(key: &[u8], value: &[u8]) -> Record {
        Record([&(key.len() as u32).to_ne_bytes(), key, value].concat().into())
    }

    /// Memory that the allocator takes for a record: it adds 8 bytes and rounds up to a multiple of 16.
    fn cost(key: usize, value: usize) -> usize {
        (Self::PREFIX + key + value + 8).next_multiple_of(16).max(32)
    }

    fn key_len(&self) -> usize {
        self.0.first_chunk().map_or(0, |len| u32::from_ne_bytes(*len) as usize)
    }

    fn split(&self) -> (&[u8], &[u8]) {
        self.0[Self::PREFIX..].split_at(self.key_len())
    }

    fn value_mut(&mut self) -> &mut [u8] {
        let key = self.key_len();
        &mut self.0[Self::PREFIX + key..]
    }
}
