//! One cache line there and back.

use core::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use super::{END, await_number};
use crate::error::Error;
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

const LINE: usize = 0;

/// One side of a ping-pong of one word, each side spinning on it.
pub(crate) struct CacheLinePingPong<'a> {
    region: &'a SharedRegion,
    spin: SpinWait,
    /// Turns so far, both sides' counted.
    turns: u64,
}

impl<'a> CacheLinePingPong<'a> {
    /// Turns that [`CacheLinePingPong::lead`] times together.
    const TOGETHER: u64 = 64;

    pub(crate) fn new(region: &'a SharedRegion, spin: SpinWait) -> CacheLinePingPong<'a> {
        CacheLinePingPong { region, spin, turns: 0 }
    }

    /// One cache line back and forth; records how long every [`CacheLinePingPong::TOGETHER`] turns took.
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

    /// The other side of [`CacheLinePingPong::lead`].
    pub(crate) fn follow(&mut self) -> Result<(), Error> {
        loop {
            self.turns += 2;
            let end = await_number(self.region.word(LINE), self.turns - 1, &mut self.spin)?;
            // Release, partner: the Acquire in `turn`.
            self.region.word(LINE).store(self.turns, Release);
            if end {
                return Ok(());
            }
        }
    }

    /// Nanoseconds of one turn, from what [`CacheLinePingPong::lead`] recorded.
    pub(crate) fn median(times: &Histogram) -> Option<f64> {
        times.quantile(0.5).map(|ns| ns as f64 / Self::TOGETHER as f64)
    }

    #[inline]
    fn turn(&mut self, end: u64) -> Result<(), Error> {
        self.turns += 2;
        // Release, partner: the Acquire in `follow`.
        self.region.word(LINE).store((self.turns - 1) | end, Release);
        await_number(self.region.word(LINE), self.turns, &mut self.spin).map(drop)
    }
}
