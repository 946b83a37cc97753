//! What the machine itself allows: the plainest code that makes the same exchange between the same two cores.
//!
//! No checks, no rights, no errors, no death of a peer, one sender, one receiver: what a reader would write to embarrass
//! the library. Both sides call the function of the same name in the same order; the leading side ends a slice when its
//! time is over. Words only ever grow, so slices follow each other without a reset.
//!
//! | what | against |
//! | --- | --- |
//! | [`CacheLinePingPong`] | everything: one cache line there and back |
//! | [`PlainDevice`] | `bench device` |
//! | [`in_place`], [`two_rings`] | `bench ipc`, `bench delegation`, `bench flux` |
//! | [`Memcpy`] | large payloads |
//!
//! ```text
//! region   0 line | 256-384 device | 512-640 gate of the clients | 4096 rings
//! ```

mod cache_line;
mod device;
mod exchange;

use core::hint::black_box;
use core::sync::atomic::{AtomicU64, Ordering::Acquire};
use std::time::{Duration, Instant};

pub(crate) use cache_line::CacheLinePingPong;
pub(crate) use device::PlainDevice;
pub(crate) use exchange::{PlainExchange, TakeResponses, in_place, in_place_len, two_rings, two_rings_len};

use super::spin_wait::SpinWait;
use crate::error::Error;

/// Where rings begin; single words come before.
pub(crate) const RINGS: usize = 4096;

/// Marks the number of the last message of a slice.
const END: u64 = 1 << 63;

/// How often, in how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Throughput {
    pub(crate) operations: u64,
    pub(crate) time: Duration,
}

impl Throughput {
    pub(crate) fn per_second(&self) -> f64 {
        self.operations as f64 / self.time.as_secs_f64()
    }
}

/// Spins until a word has this number, and says whether it is marked as the last one.
#[inline(always)]
fn await_number(word: &AtomicU64, number: u64, spin: &mut SpinWait) -> Result<bool, Error> {
    loop {
        // Acquire, partner: the Release store of the other side's number.
        let found = word.load(Acquire);
        if found & !END == number {
            spin.reset();
            return Ok(found != number);
        }
        spin.idle()?;
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

    pub(crate) fn run(&mut self, slice: Duration) -> Throughput {
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
                return Throughput { operations: turns, time };
            }
        }
    }
}
