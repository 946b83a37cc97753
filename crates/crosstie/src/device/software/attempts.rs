//! Attempts to execute requests that name regions by their keys: the memory of a region that is deregistered meanwhile is kept until they end.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::lock::locked;
use crate::ring::presence;

/// The words of all threads that execute requests which name regions by their keys: those of this device that do it outside of a program's
/// call, and those of [`RcQp::post_detached`](super::RcQp::post_detached).
#[derive(Clone, Debug, Default)]
pub(super) struct Attempts(Arc<Mutex<Vec<Arc<AtomicU64>>>>);

impl Attempts {
    /// Adds the word of a thread or a queue pair.
    pub(super) fn add(&self) -> AttemptWord {
        let word = Arc::new(AtomicU64::new(0));
        locked(&self.0).push(word.clone());
        AttemptWord { word, all: self.clone() }
    }

    /// The attempts that are under way now. The caller took an object away and then passed a heavy fence.
    pub(super) fn current(&self) -> Vec<ObservedAttempt> {
        let observe = |word: &Arc<AtomicU64>| {
            presence::observe(&**word).map(|seen| ObservedAttempt { word: word.clone(), seen })
        };
        locked(&self.0).iter().filter_map(observe).collect()
    }
}

/// The word of one thread, or of one queue pair. Odd during an attempt, as a peer line's `busy`: see [`crate::ring::presence`].
#[derive(Debug)]
pub(super) struct AttemptWord {
    word: Arc<AtomicU64>,
    all: Attempts,
}

impl AttemptWord {
    /// Begins an attempt. It lasts until the guard is dropped; the memory of a region that is deregistered meanwhile is kept until then. The
    /// owner of the word has one attempt at a time.
    pub(super) fn begin(&mut self) -> Attempt {
        presence::enter(&*self.word);
        Attempt(self.word.clone())
    }
}

impl Drop for AttemptWord {
    fn drop(&mut self) {
        locked(&self.all.0).retain(|word| !Arc::ptr_eq(word, &self.word));
    }
}

/// An attempt to execute a request, see [`AttemptWord::begin`].
pub(super) struct Attempt(Arc<AtomicU64>);

impl Drop for Attempt {
    fn drop(&mut self) {
        presence::leave(&*self.0);
    }
}

/// An attempt that was under way.
#[derive(Debug)]
pub(super) struct ObservedAttempt {
    word: Arc<AtomicU64>,
    seen: u64,
}

impl ObservedAttempt {
    pub(super) fn has_ended(&self) -> bool {
        presence::has_left(&*self.word, self.seen)
    }
}
