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
/// One poll in this many, and each at which the clock is due, is a [step](PollClock::is_step).
const STEP: u32 = 16;
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
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        let left = self.polls_left.get();
        if left <= 1 {
            return true;
        }
        self.polls_left.set(left - 1);
        false
    }

    /// Counts a poll. Returns whether it should do what need not be done by every poll, one in [`STEP`], and what goes by time. After a step,
    /// [`is_due_at_step`](PollClock::is_due_at_step) must be called.
    #[inline]
    pub(crate) fn is_step(&self) -> bool {
        let left = self.polls_left.get().wrapping_sub(1);
        self.polls_left.set(left);
        left.is_multiple_of(STEP)
    }

    /// Whether the clock should be [read](PollClock::read) at this step. Otherwise it stays due.
    pub(crate) fn is_due_at_step(&self) -> bool {
        let is_due = self.polls_left.get() == 0;
        if is_due {
            self.polls_left.set(1);
        }
        is_due
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
    fn steps_come_every_16_polls_and_when_the_clock_is_due() {
        let (clock, start) = (PollClock::new(), Instant::now());
        let (mut now, mut polls, mut steps) = (start, 0, Vec::new());
        while polls < 200 {
            polls += 1;
            now += Duration::from_nanos(50);
            if clock.is_step() {
                let is_due = clock.is_due_at_step();
                steps.push((polls, is_due));
                if is_due {
                    assert!(clock.is_step() && clock.is_due_at_step(), "due until it is read");
                    clock.advance(now);
                }
            }
        }
        let due: Vec<u32> = steps.iter().filter(|(_, is_due)| *is_due).map(|(poll, _)| *poll).collect();
        assert_eq!(due, [1, 3, 7, 15, 31, 63, 127, 191]);
        assert!(steps.windows(2).all(|pair| pair[1].0 - pair[0].0 <= STEP));
        assert_eq!(steps.len(), 8 + 1 + 3 + 3);
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
