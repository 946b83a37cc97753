//! Immediates and messages of futures that were dropped with their result: the next calls of `imm_recv` and `recv` get them.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

/// A message whose `recv` has ended.
#[derive(Debug)]
pub(super) struct Message {
    /// Its number on its connection.
    pub(super) sequence: u32,
    pub(super) bytes: Vec<u8>,
}

/// What a future was dropped with.
#[derive(Debug)]
pub(super) enum Item {
    Event(ImmEvent),
    Message(Message),
}

/// What threads without the engine hand to it.
///
/// When a thread drops a future and then calls `imm_recv` or `recv`, that call must get the result of the dropped future. The thread pushes
/// the result here before it makes the call. The engine takes all that was pushed before it starts such a call. It sees the push,
/// because the call reaches it through its lock, or through the list of submitted operations; both order memory.
#[derive(Debug, Default)]
pub(super) struct Returned {
    /// Changes only while `items` is locked.
    has_any: AtomicBool,
    items: Mutex<Vec<Item>>,
}

impl Returned {
    pub(super) fn push(&self, item: Item) {
        let mut items = self.lock();
        items.push(item);
        self.has_any.store(true, Relaxed);
    }

    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.has_any.load(Relaxed)
    }

    /// Takes everything. Does not lock when there is nothing to take.
    pub(super) fn take(&self) -> Vec<Item> {
        if !self.has_any() {
            return Vec::new();
        }
        let mut items = self.lock();
        self.has_any.store(false, Relaxed);
        core::mem::take(&mut *items)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Item>> {
        // Nothing that can panic runs under this lock.
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
