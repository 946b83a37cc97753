//! The state of the connection, for threads that do not have the engine.

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cause::{Cause, NotStarted, Peer};

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Status {
    /// 0: not connected; 1: connected; else the cause of its end, plus 2 in the upper half.
    word: AtomicU32,
    peer: Mutex<Option<Peer>>,
}

impl Status {
    pub(super) fn connect(&self, peer: Option<Peer>) {
        *locked(&self.peer) = peer;
        self.word.store(1, Release);
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        *locked(&self.peer)
    }

    pub(super) fn end(&self, cause: Cause) {
        self.word.store(2 << 16 | u32::from(cause.encode()), Release);
    }

    pub(super) fn reset(&self) {
        self.word.store(0, Release);
    }

    /// Whether operations can be started.
    #[inline]
    pub(super) fn check(&self) -> Result<(), NotStarted> {
        // Acquire, partner: the Release stores above. An operation that sees `connected` a moment too long ends with the cause.
        match self.word.load(Acquire) {
            1 => Ok(()),
            0 => Err(NotStarted::NotConnected),
            ended => Err(NotStarted::Ended(Cause::decode(ended as u16).unwrap_or(Cause::Closed))),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
