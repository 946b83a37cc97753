//! What the machine itself allows: the plainest code that makes the same exchange between the same two cores.
//!
//! No checks, no rights, no errors, no death of a peer, one sender, one receiver: what a reader would write to embarrass
//! the library. Both sides call the function of the same name in the same order; the leading side ends a slice when its
//! time is over. Words only ever grow, so slices follow each other without a reset.
//!
//! | what | against |
//! | --- | --- |
//! | [`Line`] | everything: one cache line there and back |
//! | [`Plain`] | `bench device` |
//! | [`in_place`], [`two_rings`] | `bench ipc`, `bench delegation`, `bench flux` |
//! | [`Memcpy`] | large payloads |
//!
//! ```text
//! arena   0 line | 256-384 device | 512-640 gate of the clients | 4096 rings
//! ```

mod device;
mod exchange;
mod line;

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::time::{Duration, Instant};

pub(crate) use device::Plain;
pub(crate) use exchange::{Exchange, Take, in_place, in_place_len, two_rings, two_rings_len};
pub(crate) use line::Line;

use super::patience::Patience;
use crate::error::Error;

/// Where rings begin; single words come before.
pub(crate) const RINGS: usize = 4096;

/// Marks the number of the last message of a slice.
const END: u64 = 1 << 63;

/// How often, in how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) turns: u64,
    pub(crate) time: Duration,
}

impl Pace {
    pub(crate) fn per_second(&self) -> f64 {
        self.turns as f64 / self.time.as_secs_f64()
    }
}

/// Spins until a word has this number, and says whether it is marked as the last one.
#[inline(always)]
fn await_number(word: &AtomicU64, number: u64, patience: &mut Patience) -> Result<bool, Error> {
    loop {
        // Acquire, partner: the Release store of the other side's number.
        let found = word.load(Acquire);
        if found & !END == number {
            patience.reset();
            return Ok(found != number);
        }
        patience.idle()?;
    }
}

/// Copies `payload` bytes at a time inside this process, around as many buffers as there are messages in flight.
pub(crate) struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    payload: usize,
}

impl Memcpy {
    pub(crate) fn new(payload: usize, depth: usize) -> Memcpy {
        Memcpy { from: vec![1; payload * depth], to: vec![2; payload * depth], payload }
    }

    pub(crate) fn run(&mut self, slice: Duration) -> Pace {
        let begin = Instant::now();
        let mut turns = 0;
        loop {
            for (to, from) in self.to.chunks_exact_mut(self.payload).zip(self.from.chunks_exact(self.payload))
            {
                black_box(&mut *to).copy_from_slice(from);
                turns += 1;
            }
            let time = begin.elapsed();
            if time >= slice {
                return Pace { turns, time };
            }
        }
    }
}
