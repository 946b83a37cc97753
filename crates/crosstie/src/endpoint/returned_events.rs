//! Immediates of futures that were dropped with their result: the next calls of `imm_recv` get them.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

/// What threads without the engine hand to it.
///
/// When a thread drops a future and then calls `imm_recv`, that call must get the immediate of the dropped future. The thread pushes the
/// immediate here before it makes the call. The engine takes all that was pushed before it starts an `imm_recv`. It sees the push,
/// because the call reaches it through its lock, or through the list of submitted operations; both order memory.
#[derive(Debug, Default)]
pub(super) struct ReturnedEvents {
    /// Changes only while `events` is locked.
    has_any: AtomicBool,
    events: Mutex<Vec<ImmEvent>>,
}

impl ReturnedEvents {
    pub(super) fn push(&self, event: ImmEvent) {
        let mut events = self.lock();
        events.push(event);
        self.has_any.store(true, Relaxed);
    }

    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.has_any.load(Relaxed)
    }

    /// Takes all events. Does not lock when there is nothing to take.
    pub(super) fn take(&self) -> Vec<ImmEvent> {
        if !self.has_any() {
            return Vec::new();
        }
        let mut events = self.lock();
        self.has_any.store(false, Relaxed);
        core::mem::take(&mut *events)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ImmEvent>> {
        // Nothing that can panic runs under this lock.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
