//! Spinning that ends.

use std::time::{Duration, Instant};

use crate::error::Error;

/// How long nothing may happen.
const LIMIT: Duration = Duration::from_secs(5);

/// Counts idle turns of a spinning loop: gives the core away now and then, and ends the wait when it is hopeless.
///
/// The turns between are free of system calls; two sides that have a core each never get so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    idle: u32,
    yield_every: u32,
    since: Option<Instant>,
}

impl Patience {
    /// For sides that have a core each, or share one.
    pub(crate) fn new(own_core: bool) -> Patience {
        Patience { idle: 0, yield_every: if own_core { 1 << 14 } else { 1 << 5 }, since: None }
    }

    /// Something came.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.idle = 0;
    }

    /// Nothing came. Says whether it gave the core away, which is when to look for reasons.
    #[inline]
    pub(crate) fn idle(&mut self) -> Result<bool, Error> {
        self.idle += 1;
        if self.idle.is_multiple_of(self.yield_every) { self.give_way() } else { Ok(false) }
    }

    #[cold]
    fn give_way(&mut self) -> Result<bool, Error> {
        let now = Instant::now();
        if self.idle == self.yield_every {
            self.since = Some(now);
        }
        let since = *self.since.get_or_insert(now);
        if now - since > LIMIT {
            return Err(Error::Stuck(LIMIT.as_secs()));
        }
        // So that the count never wraps to zero and restarts the clock.
        self.idle = self.idle.min(u32::MAX / 2 / self.yield_every * self.yield_every);
        std::thread::yield_now();
        Ok(true)
    }
}
