//! What the machine allows: minimal code that exchanges the same messages between the same two cores.
//!
//! This code has no checks, no access rights, no errors and no handling of a dead peer; there is one sender and one receiver. It is
//! the fastest that a reader could write by hand. One side leads: it ends a slice when its time is over, and the other one follows. Sequence numbers only grow, so the next slice needs no reset.
//!
//! | limit | compared with |
//! | --- | --- |
//! | [`CacheLinePingPong`] | everything: the round trip of one cache line |
//! | [`PlainDevice`] | `bench device`, `bench endpoint`, `bench message` |
//! | [`PlainRpc`] | `bench ipc`, `bench delegation`, `bench flux`, `bench copyrpc` |
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
pub(crate) use exchange::PlainRpc;
use serde::{Deserialize, Serialize};

use crate::device::Shape;
use crate::error::Error;
use crate::runner::{Contender, Exchange, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::spin_wait::SpinWait;

/// From this payload in bytes on, a result has bytes per second, which memcpy limits.
pub(crate) const LARGE: usize = 4096;

/// Offset of the rings in the region; single words come before.
pub(crate) const RINGS: usize = 4096;

/// Flag in the number of the last message of a slice.
const END: u64 = 1 << 63;

/// Operations, and the time that they took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
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

/// The round trip of a cache line between ranks 0 and 1.
pub(crate) fn cache_line<'a>(rank: &Rank<'a>, region: &'a SharedRegion) -> Contender<'a> {
    Contender::new(Role::CacheLine, CacheLinePingPong::new(region, rank.part(0, 1), rank.spin_of_two))
}

/// Plain code for an operation of a device between rank `leader` and the other one of ranks 0 and 1.
pub(crate) fn plain_device<'a>(
    rank: &Rank<'a>,
    region: &'a SharedRegion,
    shape: Shape,
    leader: usize,
) -> Contender<'a> {
    let part = rank.part(leader, 1 - leader);
    Contender::new(Role::PlainDevice, PlainDevice::new(region, part, shape, rank.spin_of_two))
}

/// memcpy inside the leading process, for large payloads: copies `payload` bytes at a time, in turns between `buffers` buffers.
pub(crate) fn memcpy<'a>(rank: &Rank<'a>, payload: usize, buffers: usize) -> Option<Contender<'a>> {
    let len = if rank.number == 0 { payload.saturating_mul(buffers) } else { 0 };
    let memcpy = || Memcpy { from: vec![1; len], to: vec![2; len], payload };
    (payload >= LARGE).then(|| Contender::new(Role::Memcpy, memcpy()))
}

struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
    payload: usize,
}

impl Exchange for Memcpy {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        let begin = Instant::now();
        let mut operations = 0;
        while !self.from.is_empty() {
            for (to, from) in self.to.chunks_exact_mut(self.payload).zip(self.from.chunks_exact(self.payload))
            {
                black_box(&mut *to).copy_from_slice(from);
                operations += 1;
            }
            let time = begin.elapsed();
            if time >= slice {
                return Ok(Some(Throughput { operations, time }));
            }
        }
        Ok(None)
    }
}
