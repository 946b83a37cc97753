//! Spinning that ends.

use std::time::{Duration, Instant};

use crate::error::Error;

/// How long nothing may happen.
const LIMIT: Duration = Duration::from_secs(5);
/// What one turn of giving way counts for at most: a side that was itself kept from running has not waited.
const TURN: Duration = Duration::from_millis(10);

/// Counts idle turns of a spinning loop: gives the core away now and then, and ends the wait when it is hopeless.
///
/// The turns between are free of system calls; two sides that have a core each never get so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWait {
    idle: u32,
    yield_every: u32,
    last: Option<Instant>,
    waited: Duration,
}

impl SpinWait {
    /// For sides that have a core each, or share one.
    pub(crate) fn new(own_core: bool) -> SpinWait {
        let yield_every = if own_core { 1 << 14 } else { 1 << 5 };
        SpinWait { idle: 0, yield_every, last: None, waited: Duration::ZERO }
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

    /// Slept for a moment, and nothing came.
    #[cold]
    pub(crate) fn slept(&mut self) -> Result<(), Error> {
        let first = self.idle == 0;
        self.waited(first)
    }

    #[cold]
    fn give_way(&mut self) -> Result<bool, Error> {
        let first = self.idle == self.yield_every;
        self.waited(first)?;
        std::thread::yield_now();
        Ok(true)
    }

    /// Adds up how long nothing came; `first` says that something came before.
    fn waited(&mut self, first: bool) -> Result<(), Error> {
        let now = Instant::now();
        let turn = self.last.filter(|_| !first).map_or(Duration::ZERO, |last| now - last);
        self.last = Some(now);
        self.waited = if first { Duration::ZERO } else { self.waited + turn.min(TURN) };
        if self.waited > LIMIT {
            return Err(Error::NoProgress(LIMIT.as_secs()));
        }
        // Anything but the first, and never zero again.
        self.idle = 2 * self.yield_every;
        Ok(())
    }
}
