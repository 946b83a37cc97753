//! Immediates of futures that were dropped with their result: the next calls of `imm_recv` get them.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

/// What threads without the engine hand to it.
///
/// A thread pushes an event before it starts its next call. Whoever starts that call in the engine sees the push, because the call came
/// through the engine's lock or through the list of submitted operations; so it takes the events first.
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

    /// Takes all events. Cheap if there are none.
    #[inline]
    pub(super) fn take(&self) -> Vec<ImmEvent> {
        if !self.has_any.load(Relaxed) {
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
