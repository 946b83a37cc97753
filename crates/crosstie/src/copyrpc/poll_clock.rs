//! When a loop of polls reads the clock.
//!
//! The clock costs as much as a poll, so a fast loop reads it only once in [`MAX_POLLS`] polls. Polls can become slow at any time:
//! because the application works in between, or because the machine is overloaded and a yield takes milliseconds. If the
//! polls since the last reading took longer than [`SLOW`], or another time that the user chose, every poll reads the clock until polls
//! are fast again. So something that is due is noticed after at most [`MAX_POLLS`] polls, and in a slow loop with the next poll.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The most polls between two readings.
const MAX_POLLS: u32 = 64;
/// Polls that took longer than this since the last reading are slow.
const SLOW: Duration = Duration::from_micros(250);

#[derive(Debug)]
pub(crate) struct PollClock {
    /// Polls before the next reading.
    polls_left: Cell<u32>,
    /// Polls between the last two readings.
    interval: Cell<u32>,
    last: Cell<Instant>,
    slow: Duration,
}

impl PollClock {
    pub(crate) fn new() -> PollClock {
        PollClock::with_slow(SLOW)
    }

    /// Polls that took longer than `slow` since the last reading are slow: for users to whom a delay of `slow` does not matter.
    pub(crate) fn with_slow(slow: Duration) -> PollClock {
        let (polls_left, interval, last) = (Cell::new(1), Cell::new(1), Cell::new(Instant::now()));
        PollClock { polls_left, interval, last, slow }
    }

    /// Counts a poll. Returns whether the clock should be [read](PollClock::read) now.
    #[inline(always)]
    pub(crate) fn is_due(&self) -> bool {
        let left = self.polls_left.get();
        if left <= 1 {
            return true;
        }
        self.polls_left.set(left - 1);
        false
    }

    /// Reads the clock, and decides when it is read again.
    #[cold]
    pub(crate) fn read(&self) -> Instant {
        let now = Instant::now();
        self.advance(now);
        now
    }

    fn advance(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.last.replace(now));
        let interval = if elapsed > self.slow { 1 } else { (2 * self.interval.get()).min(MAX_POLLS) };
        self.interval.set(interval);
        self.polls_left.set(interval);
    }

    /// Lets the next poll read the clock, because time has passed without polls.
    pub(crate) fn read_soon(&self) {
        self.polls_left.set(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls until the clock is due, with so much time between two polls. Returns the number of polls.
    fn polls_until_due(clock: &PollClock, now: &mut Instant, each: Duration) -> u32 {
        let mut polls = 1;
        *now += each;
        while !clock.is_due() {
            polls += 1;
            *now += each;
        }
        clock.advance(*now);
        polls
    }

    #[test]
    fn fast_polls_read_the_clock_rarely_and_slow_polls_every_time() {
        let (clock, fast, slow) = (PollClock::new(), Duration::from_nanos(50), Duration::from_millis(1));
        let mut now = clock.last.get();
        let mut polls = |each| polls_until_due(&clock, &mut now, each);
        assert_eq!(std::array::from_fn(|_| polls(fast)), [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(std::array::from_fn(|_| polls(slow)), [64, 1, 1, 1]);
        assert_eq!(std::array::from_fn(|_| polls(fast)), [1, 2, 4, 8]);
    }

    #[test]
    fn a_due_clock_stays_due_until_it_is_read() {
        let clock = PollClock::new();
        assert!(clock.is_due() && clock.is_due());
        clock.read();
        assert!(!clock.is_due() && clock.is_due());
        (0..7).for_each(|_| _ = clock.read());
        clock.read_soon();
        assert!(clock.is_due());
    }
}
