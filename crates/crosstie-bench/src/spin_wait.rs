//! Spinning with a timeout.

use std::time::{Duration, Instant};

use crate::error::Error;

/// A wait without progress for this long fails.
const TIMEOUT: Duration = Duration::from_secs(5);
/// One yield counts at most this much towards the timeout: a side that did not get its core was not waiting for the other.
const MAX_YIELD: Duration = Duration::from_millis(10);

/// Counts the idle rounds of a spinning loop. It yields the core every so many rounds, and fails after a timeout.
///
/// Rounds without a yield make no system call. Two sides with a core each rarely reach a yield.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWait {
    idle: u32,
    yield_every: u32,
    last: Option<Instant>,
    waited: Duration,
}

impl SpinWait {
    /// `own_core`: the calling side does not share its core with another side.
    pub(crate) fn new(own_core: bool) -> SpinWait {
        let yield_every = if own_core { 1 << 14 } else { 1 << 5 };
        SpinWait { idle: 0, yield_every, last: None, waited: Duration::ZERO }
    }

    /// Progress was made: starts counting again.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.idle = 0;
    }

    /// Counts an idle round. Returns whether it yielded the core: then the caller can afford to check for errors.
    #[inline]
    pub(crate) fn idle(&mut self) -> Result<bool, Error> {
        self.idle += 1;
        if self.idle.is_multiple_of(self.yield_every) { self.yield_core() } else { Ok(false) }
    }

    /// Counts a short sleep after which there was still no progress.
    #[cold]
    pub(crate) fn count_sleep(&mut self) -> Result<(), Error> {
        let first = self.idle == 0;
        self.add_wait(first)
    }

    #[cold]
    fn yield_core(&mut self) -> Result<bool, Error> {
        let first = self.idle == self.yield_every;
        self.add_wait(first)?;
        std::thread::yield_now();
        Ok(true)
    }

    /// Adds to the time without progress. `first`: the first time since the last progress.
    fn add_wait(&mut self, first: bool) -> Result<(), Error> {
        let now = Instant::now();
        let elapsed = self.last.filter(|_| !first).map_or(Duration::ZERO, |last| now - last);
        self.last = Some(now);
        self.waited = if first { Duration::ZERO } else { self.waited + elapsed.min(MAX_YIELD) };
        if self.waited > TIMEOUT {
            return Err(Error::NoProgress(TIMEOUT.as_secs()));
        }
        // Not the value of a first yield, and not zero until the next reset.
        self.idle = 2 * self.yield_every;
        Ok(())
    }
}
