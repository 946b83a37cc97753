//! One cache line there and back.

use core::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use super::{END, await_number};
use crate::arena::Arena;
use crate::error::Error;
use crate::patience::Patience;

const LINE: usize = 0;

/// One side of a ping-pong of one word, each side spinning on it.
pub(crate) struct Line<'a> {
    arena: &'a Arena,
    patience: Patience,
    /// Turns so far, both sides' counted.
    turns: u64,
}

impl<'a> Line<'a> {
    /// Turns that [`Line::lead`] times together.
    const TOGETHER: u64 = 64;

    pub(crate) fn new(arena: &'a Arena, patience: Patience) -> Line<'a> {
        Line { arena, patience, turns: 0 }
    }

    /// One cache line back and forth; records how long every [`Line::TOGETHER`] turns took.
    pub(crate) fn lead(&mut self, slice: Duration, times: &mut Histogram) -> Result<(), Error> {
        let begin = Instant::now();
        let mut last = begin;
        loop {
            for _ in 0..Self::TOGETHER {
                self.turn(0)?;
            }
            let now = Instant::now();
            times.record((now - last).as_nanos() as u64);
            last = now;
            if now - begin >= slice {
                return self.turn(END);
            }
        }
    }

    /// The other side of [`Line::lead`].
    pub(crate) fn follow(&mut self) -> Result<(), Error> {
        loop {
            self.turns += 2;
            let end = await_number(self.arena.word(LINE), self.turns - 1, &mut self.patience)?;
            // Release, partner: the Acquire in `turn`.
            self.arena.word(LINE).store(self.turns, Release);
            if end {
                return Ok(());
            }
        }
    }

    /// Nanoseconds of one turn, from what [`Line::lead`] recorded.
    pub(crate) fn median(times: &Histogram) -> Option<f64> {
        times.quantile(0.5).map(|ns| ns as f64 / Self::TOGETHER as f64)
    }

    #[inline]
    fn turn(&mut self, end: u64) -> Result<(), Error> {
        self.turns += 2;
        // Release, partner: the Acquire in `follow`.
        self.arena.word(LINE).store((self.turns - 1) | end, Release);
        await_number(self.arena.word(LINE), self.turns, &mut self.patience).map(drop)
    }
}
