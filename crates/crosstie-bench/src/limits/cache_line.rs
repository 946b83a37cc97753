//! The round trip of one cache line between two cores.

use core::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use super::{END, Throughput, wait_for_number};
use crate::error::Error;
use crate::runner::{Counts, Exchange, Part};
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

/// Offset of the word in the region.
const WORD: usize = 0;

/// One side of a ping-pong with one word; each side spins on it.
pub(crate) struct CacheLinePingPong<'a> {
    region: &'a SharedRegion,
    part: Part,
    spin: SpinWait,
    /// Messages so far, those of both sides.
    messages: u64,
    /// Nanoseconds for every [`CacheLinePingPong::PER_SAMPLE`] round trips.
    times: Histogram,
}

impl<'a> CacheLinePingPong<'a> {
    /// Round trips that are timed together.
    const PER_SAMPLE: u64 = 64;

    pub(crate) fn new(region: &'a SharedRegion, part: Part, spin: SpinWait) -> CacheLinePingPong<'a> {
        CacheLinePingPong { region, part, spin, messages: 0, times: Histogram::new() }
    }

    fn lead(&mut self, slice: Duration) -> Result<(), Error> {
        let begin = Instant::now();
        let mut last = begin;
        loop {
            for _ in 0..Self::PER_SAMPLE {
                self.round_trip(0)?;
            }
            let now = Instant::now();
            self.times.record((now - last).as_nanos() as u64);
            last = now;
            if now - begin >= slice {
                return self.round_trip(END);
            }
        }
    }

    /// The other side of [`CacheLinePingPong::lead`].
    fn follow(&mut self) -> Result<(), Error> {
        loop {
            self.messages += 2;
            let end = wait_for_number(self.region.word(WORD), self.messages - 1, &mut self.spin)?;
            // Release, partner: the Acquire in `round_trip`.
            self.region.word(WORD).store(self.messages, Release);
            if end {
                return Ok(());
            }
        }
    }

    /// Median of one round trip in nanoseconds, given the median of [`Counts::latency`].
    pub(crate) fn one_round_trip(ns: u64) -> f64 {
        ns as f64 / Self::PER_SAMPLE as f64
    }

    #[inline]
    fn round_trip(&mut self, end: u64) -> Result<(), Error> {
        self.messages += 2;
        // Release, partner: the Acquire in `follow`.
        self.region.word(WORD).store((self.messages - 1) | end, Release);
        wait_for_number(self.region.word(WORD), self.messages, &mut self.spin).map(drop)
    }
}

impl Exchange for CacheLinePingPong<'_> {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        match self.part {
            Part::Lead => self.lead(slice)?,
            Part::Follow => self.follow()?,
            Part::Wait => {}
        }
        Ok(None)
    }

    fn reset(&mut self) {
        self.times.clear();
    }

    fn counts(&self) -> Counts {
        Counts { latency: self.times.clone(), ..Counts::default() }
    }
}
