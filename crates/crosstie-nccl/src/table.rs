//! Tables of the objects that NCCL holds keys of.
//!
//! Slots are never freed, so a lookup takes no lock but that of the object. An old key finds at worst the slot of another
//! object, and the slot knows the key of its own. A slot is used again after its object is removed.
//!
//! ```text
//!   keys     Slab        which keys are in use                      one lock: to insert and to remove
//!   chunks   0 |1 |2 3 |4 5 6 7 |8 ...      slots by index;         a lock for each slot
//!                                           each chunk is made when its first slot is needed
//! ```

use core::ops::{Deref, DerefMut};
use std::sync::{OnceLock, PoisonError};

#[cfg(all(test, loom))]
use loom::sync::{Mutex, MutexGuard};
#[cfg(not(all(test, loom)))]
use std::sync::{Mutex, MutexGuard};

use crate::fault::Fault;
use crate::key::{Key, KeySlab, Kind};

/// Objects of one kind.
pub(crate) struct Table<T> {
    kind: Kind,
    limit: u32,
    keys: Mutex<KeySlab<()>>,
    chunks: [OnceLock<Box<[Slot<T>]>>; CHUNKS],
}

/// Enough for 2^20 slots: a chunk has as many as all before it.
const CHUNKS: usize = 21;

/// A place for an object: the lock, and what a call looks at first, are on one cache line.
#[repr(align(64))]
struct Slot<T>(Mutex<Option<Entry<T>>>);

#[repr(C)]
struct Entry<T> {
    key: Key,
    value: T,
}

/// Exclusive access to an object.
pub(crate) struct Guard<'a, T>(MutexGuard<'a, Option<Entry<T>>>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // A guard is made for a slot with an object only, and nobody else can take it out meanwhile.
        &self.0.as_ref().expect("a slot that is held has an object").value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0.as_mut().expect("a slot that is held has an object").value
    }
}

impl<T> Table<T> {
    /// A table of at most `limit` objects. It is not constant, because loom's locks are not.
    pub(crate) fn new(kind: Kind, limit: u32) -> Table<T> {
        assert!(limit <= 1 << (CHUNKS - 1));
        let chunks = [const { OnceLock::new() }; CHUNKS];
        Table { kind, limit, keys: Mutex::new(KeySlab::new(limit)), chunks }
    }

    /// Adds an object.
    pub(crate) fn insert(&self, value: T) -> Result<Key, Fault> {
        self.insert_with(|_| value)
    }

    /// Adds an object that knows its key.
    pub(crate) fn insert_with(&self, make: impl FnOnce(Key) -> T) -> Result<Key, Fault> {
        let inserted = self.lock_keys().insert(());
        let full = |()| Fault::TooMany { what: self.kind, limit: self.limit };
        let key = Key::new(self.kind, inserted.map_err(full)?);
        let entry = Entry { key, value: make(key) };
        let (chunk, at) = place(key.entry().index);
        let slots = self.chunks[chunk].get_or_init(|| {
            let slot = |_| Slot(Mutex::new(None));
            (0..chunk_len(chunk)).map(slot).collect()
        });
        *slots[at].lock_ignoring_poison() = Some(entry);
        Ok(key)
    }

    /// Exclusive access to the object with this key. Waits while another thread has it.
    ///
    /// Inlined, as [`lock_index`](Table::lock_index) is: returning guards through memory took 8 % of the time of a short message.
    #[inline]
    pub(crate) fn lock(&self, key: Key) -> Result<Guard<'_, T>, Fault> {
        let guard = self.lock_index(key.entry().index)?;
        match &*guard.0 {
            Some(entry) if entry.key == key => Ok(guard),
            _ => Err(Fault::InvalidKey(self.kind)),
        }
    }

    /// As [`lock`](Table::lock), for the object that is in a slot now, whatever its key.
    #[inline]
    pub(crate) fn lock_index(&self, index: u32) -> Result<Guard<'_, T>, Fault> {
        // `ok_or` would make the error, and drop it, in every call.
        let Some(slot) = self.slot(index) else { return Err(Fault::InvalidKey(self.kind)) };
        match slot.0.lock() {
            Ok(entry) if entry.is_some() => Ok(Guard(entry)),
            Ok(_) => Err(Fault::InvalidKey(self.kind)),
            Err(_) => Err(Fault::Poisoned(self.kind)),
        }
    }

    /// Calls `each` with every object, one at a time. Those that a panic left in an unknown state are left out.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&mut T)) {
        for slot in self.slots() {
            if let Ok(mut entry) = slot.0.lock()
                && let Some(entry) = &mut *entry
            {
                each(&mut entry.value);
            }
        }
    }

    /// Removes all objects to which the condition applies.
    pub(crate) fn remove_if(&self, condition: impl Fn(&T) -> bool) {
        for slot in self.slots() {
            let applies = |entry: &&Entry<T>| condition(&entry.value);
            let key = slot.lock_ignoring_poison().as_ref().filter(applies).map(|entry| entry.key);
            // Somebody else may have removed it since.
            key.into_iter().for_each(|key| drop(self.remove(key)));
        }
    }

    /// Takes the object out; its key is invalid from then on.
    pub(crate) fn remove(&self, key: Key) -> Result<T, Fault> {
        let invalid = Fault::InvalidKey(self.kind);
        let Some(slot) = self.slot(key.entry().index) else { return Err(invalid) };
        let removed = {
            let mut entry = slot.lock_ignoring_poison();
            let removed = entry.take_if(|entry| entry.key == key).ok_or(invalid)?;
            // An object that a panic left in an unknown state can be removed all the same. Loom's locks are never poisoned.
            #[cfg(not(all(test, loom)))]
            slot.0.clear_poison();
            removed
        };
        // Not before: from here on another object may use the slot.
        self.lock_keys().remove(key.entry());
        Ok(removed.value)
    }

    fn lock_keys(&self) -> MutexGuard<'_, KeySlab<()>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn slot(&self, index: u32) -> Option<&Slot<T>> {
        let (chunk, at) = place(index);
        self.chunks.get(chunk)?.get()?.get(at)
    }

    fn slots(&self) -> impl Iterator<Item = &Slot<T>> {
        self.chunks.iter().filter_map(OnceLock::get).flatten()
    }
}

impl<T> Slot<T> {
    /// Waits while another thread has the slot. The object may be in an unknown state, since a panic.
    fn lock_ignoring_poison(&self) -> MutexGuard<'_, Option<Entry<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The chunk of a slot, and the slot's place in it.
#[inline]
fn place(index: u32) -> (usize, usize) {
    let chunk = (u64::from(index) << 1 | 1).ilog2() as usize;
    (chunk, index as usize - chunk_start(chunk))
}

/// The first index of a chunk: 0, 1, 2, 4, 8, ...
#[inline]
fn chunk_start(chunk: usize) -> usize {
    (1 << chunk) / 2
}

fn chunk_len(chunk: usize) -> usize {
    chunk_start(chunk).max(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn old_and_forged_keys_are_refused_and_slots_are_used_again() {
        let table = Table::<String>::new(Kind::Send, 3);
        let first = table.insert("first".into()).unwrap();
        let second = table.insert_with(|key| format!("{}", key.bits())).unwrap();
        assert_eq!(*table.lock(second).unwrap(), second.bits().to_string());
        table.lock(first).unwrap().push('!');
        assert_eq!(table.remove(first).unwrap(), "first!");
        assert!(table.lock(first).is_err() && table.remove(first).is_err());

        let third = table.insert("third".into()).unwrap();
        assert_eq!(third.entry().index, first.entry().index);
        assert!(table.lock(first).is_err() && table.remove(first).is_err());
        assert_eq!(*table.lock(third).unwrap(), "third");
        for forged in [0, 1, u64::MAX, third.bits() + 1, third.bits() ^ 1 << 60, third.bits() + 1000] {
            let forged = Key::from_bits(forged);
            assert!(table.lock(forged).is_err() && table.remove(forged).is_err(), "{forged:?}");
        }
        table.insert("fourth".into()).unwrap();
        assert!(matches!(table.insert("fifth".into()), Err(Fault::TooMany { limit: 3, .. })));
    }

    #[test]
    fn every_object_has_a_slot_of_its_own() {
        let table = Table::<u32>::new(Kind::Send, 1000);
        let keys: Vec<Key> = (0..1000).map(|value| table.insert(value).unwrap()).collect();
        assert!(keys.iter().zip(0..).all(|(key, value)| *table.lock(*key).unwrap() == value));
        table.remove_if(|value| value % 3 == 0);
        let (mut count, mut sum) = (0, 0);
        table.for_each(|value| (count, sum) = (count + 1, sum + *value));
        assert_eq!((count, sum), (666, (0..1000).filter(|value| value % 3 != 0).sum::<u32>()));
    }

    #[test]
    fn object_stays_unusable_after_a_panic_until_its_own_key_removes_it() {
        let table = Table::<u32>::new(Kind::Send, 1);
        let old = table.insert(1).unwrap();
        table.remove(old).unwrap();
        let key = table.insert(2).unwrap();
        let panicked = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
            let _value = table.lock(key).unwrap();
            panic!("on purpose");
        }));
        assert!(panicked.is_err() && matches!(table.lock(key), Err(Fault::Poisoned(Kind::Send))));
        assert!(table.remove(old).is_err());
        assert!(matches!(table.lock(key), Err(Fault::Poisoned(Kind::Send))), "an old key changes nothing");
        assert_eq!(table.remove(key).unwrap(), 2);
        let next = table.insert(3).unwrap();
        assert_eq!(*table.lock(next).unwrap(), 3);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;
    use crate::key::EntryKey;

    /// A table that is never freed, as the real ones are.
    fn new_table(limit: u32) -> &'static Table<u32> {
        Box::leak(Box::new(Table::new(Kind::Send, limit)))
    }

    /// A thread uses a key that it was not given, while another one adds the first object: it finds a whole object, or nothing.
    #[test]
    fn loom_lookup_finds_a_whole_object_or_nothing() {
        loom::model(|| {
            let table = new_table(1);
            let adder = thread::spawn(move || table.insert(7).unwrap());
            let key = Key::new(Kind::Send, EntryKey { index: 0, generation: 0 });
            if let Ok(value) = table.lock(key) {
                assert_eq!(*value, 7);
            }
            assert_eq!(adder.join().unwrap(), key);
            assert_eq!(*table.lock(key).unwrap(), 7);
        });
    }

    /// A thread uses the key of an object while another thread removes the object and adds one, which gets the same slot. `read` returns
    /// the object that the key finds.
    fn check_old_key(read: fn(&Table<u32>, Key) -> Option<u32>) {
        loom::model(move || {
            let table = new_table(1);
            let old = table.insert(1).unwrap();
            let other = thread::spawn(move || {
                assert_eq!(table.remove(old).unwrap(), 1);
                table.insert(2).unwrap()
            });
            assert!(matches!(read(table, old), None | Some(1)), "an old key finds another object");
            let new = other.join().unwrap();
            assert_eq!(new.entry().index, old.entry().index);
            assert_eq!((read(table, old), read(table, new)), (None, Some(2)));
        });
    }

    #[test]
    fn loom_old_key_never_finds_another_object() {
        check_old_key(|table, key| table.lock(key).ok().map(|value| *value));
    }

    /// A twin that must fail: it checks the key, and then takes the lock again.
    #[test]
    #[should_panic(expected = "an old key finds another object")]
    fn loom_twin_lookup_that_checks_before_it_locks_is_caught() {
        check_old_key(|table, key| {
            drop(table.lock(key).ok()?);
            table.lock_index(key.entry().index).ok().map(|value| *value)
        });
    }

    /// Two threads remove the same object, and add one each. One of them gets the object, and the new ones get slots of their own.
    fn check_two_removes(remove: fn(&Table<u32>, Key) -> Result<u32, Fault>) {
        loom::model(move || {
            let table = new_table(2);
            let key = table.insert(1).unwrap();
            let run = move |value| (remove(table, key).ok(), table.insert(value).unwrap());
            let other = thread::spawn(move || run(20));
            let results = [run(10), other.join().unwrap()];
            let [(here, ten), (there, twenty)] = results;
            assert!(here.xor(there) == Some(1), "the object was lost, or removed twice");
            assert_ne!(ten.entry().index, twenty.entry().index, "two objects in one slot");
            assert_eq!((*table.lock(ten).unwrap(), *table.lock(twenty).unwrap()), (10, 20));
            assert!(matches!(table.insert(30), Err(Fault::TooMany { limit: 2, .. })));
        });
    }

    #[test]
    fn loom_object_is_removed_once_and_its_slot_is_used_again_once() {
        check_two_removes(Table::remove);
    }

    /// A twin that must fail: it checks the key, and then takes the lock again.
    #[test]
    #[should_panic(expected = "the object was lost, or removed twice")]
    fn loom_twin_remove_that_checks_before_it_locks_is_caught() {
        check_two_removes(|table, key| {
            drop(table.lock(key)?);
            let removed = table.slot(key.entry().index).unwrap().lock_ignoring_poison().take();
            table.lock_keys().remove(key.entry());
            removed.map(|entry| entry.value).ok_or(Fault::InvalidKey(table.kind))
        });
    }

    /// A thread removes the only object while another thread adds one, if there is room.
    fn check_remove_beside_insert(remove: fn(&Table<u32>, Key) -> Result<u32, Fault>) {
        loom::model(move || {
            let table = new_table(1);
            let key = table.insert(1).unwrap();
            let other = thread::spawn(move || table.insert(2).ok());
            assert_eq!(remove(table, key).ok(), Some(1), "the object was lost");
            if let Some(added) = other.join().unwrap() {
                assert_eq!(*table.lock(added).unwrap(), 2);
            }
        });
    }

    #[test]
    fn loom_slot_is_used_again_after_its_object_was_taken_out() {
        check_remove_beside_insert(Table::remove);
    }

    /// A twin that must fail: the slot is free before the object is taken out of it.
    #[test]
    #[should_panic(expected = "the object was lost")]
    fn loom_twin_slot_that_is_freed_too_early_is_caught() {
        check_remove_beside_insert(|table, key| {
            table.lock_keys().remove(key.entry());
            let slot = table.slot(key.entry().index).unwrap();
            let removed = slot.lock_ignoring_poison().take_if(|entry| entry.key == key);
            removed.map(|entry| entry.value).ok_or(Fault::InvalidKey(table.kind))
        });
    }

    /// A thread removes all objects while another thread removes one of them and adds one. `clear` removes them.
    fn check_clear(clear: fn(&Table<u32>)) {
        loom::model(move || {
            let table = new_table(2);
            let old = table.insert(1).unwrap();
            let other = thread::spawn(move || {
                table.remove(old).ok();
                table.insert(2).unwrap()
            });
            clear(table);
            let new = other.join().unwrap();
            let left = usize::from(table.lock(new).is_ok());
            let added = (0..3).filter_map(|value| table.insert(value).ok()).collect::<Vec<_>>();
            assert_eq!(left + added.len(), 2, "a slot was lost, or is used twice");
            assert!(added.iter().zip(0..).all(|(key, value)| *table.lock(*key).unwrap() == value));
        });
    }

    #[test]
    fn loom_clear_and_remove_free_each_slot_once() {
        check_clear(|table| table.remove_if(|_| true));
    }

    /// A twin that must fail: it frees the slots of objects that another thread has removed meanwhile.
    #[test]
    #[should_panic(expected = "a slot was lost, or is used twice")]
    fn loom_twin_clear_that_does_not_check_again_is_caught() {
        check_clear(|table| {
            for slot in table.slots() {
                let Some(key) = slot.lock_ignoring_poison().as_ref().map(|entry| entry.key) else { continue };
                *slot.lock_ignoring_poison() = None;
                table.lock_keys().remove(key.entry());
            }
        });
    }
}
