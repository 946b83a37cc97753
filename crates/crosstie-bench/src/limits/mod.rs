//! What the machine allows: minimal code that exchanges the same messages between the same two cores.
//!
//! This code has no checks, no access rights, no errors and no handling of a dead peer; there is one sender and one receiver. It is
//! the fastest that a reader could write by hand. Both sides call matching functions in the same order (`lead_*` and `follow_*`); the
//! leading side ends a slice when its time is over. Sequence numbers only grow, so the next slice needs no reset.
//!
//! | limit | compared with |
//! | --- | --- |
//! | [`CacheLinePingPong`] | everything: the round trip of one cache line |
//! | [`PlainDevice`] | `bench device` |
//! | [`in_place`], [`two_rings`] | `bench ipc`, `bench delegation`, `bench flux`; `two_rings` also `bench copyrpc` |
//! | [`Memcpy`] | large payloads |
//!
//! ```text
//! region   0 cache line | 256-384 device | 512-640 slice barrier of the clients | 4096 rings
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

/// Offset of the rings in the region; single words come before.
pub(crate) const RINGS: usize = 4096;

/// Flag in the number of the last message of a slice.
const END: u64 = 1 << 63;

/// Operations, and the time that they took.
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

/// Spins until a word has this number. Returns whether it has the flag of the last message.
#[inline(always)]
fn wait_for_number(word: &AtomicU64, number: u64, spin: &mut SpinWait) -> Result<bool, Error> {
    loop {
        // Acquire, partner: the Release store of the number by the other side.
        let found = word.load(Acquire);
        if found & !END == number {
            spin.reset();
            return Ok(found != number);
        }
        spin.idle()?;
    }
}

/// memcpy inside this process: copies `payload` bytes at a time, cycling through as many buffers as messages in flight.
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
        let mut operations = 0;
        loop {
            for (to, from) in self.to.chunks_exact_mut(self.payload).zip(self.from.chunks_exact(self.payload))
            {
                black_box(&mut *to).copy_from_slice(from);
                operations += 1;
            }
            let time = begin.elapsed();
            if time >= slice {
                return Throughput { operations, time };
            }
        }
    }
}
