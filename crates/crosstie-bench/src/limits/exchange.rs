//! What `bench ipc`, `bench delegation` and `bench flux` are measured against: requests and responses in a closed loop.
//!
//! ```text
//! in place    one ring; a place holds request k, then response k          number 2k+1, then 2k+2
//! two rings   a ring requests, a ring back; a place holds message k          number k+1
//! ```
//!
//! A place is a line for payloads up to 56 bytes. The number in it is the flag: no indices, no counts, nothing else is
//! shared. Each side copies the payload in and out. The asking side has up to `depth` requests in flight and takes
//! responses in their order, one at a time or all that are there ([`TakeResponses`]), before it asks anew. Which is faster depends on depth and machine, so
//! both are measured. No hints to the processor (a `prefetchw` of a place two ahead would give two rings up to a third more
//! at great depths): that is a feature.

use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::{END, Throughput, await_number};
use crate::error::Error;
use crate::shared_region::{SharedRegion, SlotRing};
use crate::spin_wait::SpinWait;

/// How many responses the asking side takes before it asks anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeResponses {
    One,
    All,
}

/// One side of a plain exchange.
pub(crate) trait PlainExchange {
    /// Caller until the time is over.
    fn lead(&mut self, slice: Duration, take: TakeResponses) -> Result<Throughput, Error>;
    /// Responder until the last request.
    fn follow(&mut self) -> Result<(), Error>;
}

/// How much of an region [`in_place`] takes.
pub(crate) fn in_place_len(payload: usize, depth: usize) -> usize {
    SlotRing::len(depth.next_power_of_two(), payload)
}

/// A ring of `depth` places, request and response in the same.
pub(crate) fn in_place<'a>(
    region: &'a SharedRegion,
    offset: usize,
    payload: usize,
    depth: usize,
    spin: SpinWait,
) -> Box<dyn PlainExchange + 'a> {
    let ring = region.slot_ring(offset, depth.next_power_of_two(), payload);
    sized(InPlace { ring }, payload, depth, spin)
}

/// How much of an region [`two_rings`] take.
pub(crate) fn two_rings_len(payload: usize, places: usize) -> usize {
    2 * SlotRing::len(places.next_power_of_two(), payload)
}

/// A ring of `places`, at least `depth`, each rings.
pub(crate) fn two_rings<'a>(
    region: &'a SharedRegion,
    offset: usize,
    payload: usize,
    depth: usize,
    places: usize,
    spin: SpinWait,
) -> Box<dyn PlainExchange + 'a> {
    let count = places.max(depth).next_power_of_two();
    let requests = region.slot_ring(offset, count, payload);
    let responses = region.slot_ring(offset + SlotRing::len(count, payload), count, payload);
    sized(TwoRings { requests, responses }, payload, depth, spin)
}

/// Gives usual payloads a length that the compiler knows, as anybody would who writes it by hand.
fn sized<'a, W: RingLayout + 'a>(
    rings: W,
    payload: usize,
    depth: usize,
    spin: SpinWait,
) -> Box<dyn PlainExchange + 'a> {
    match payload {
        8 => Box::new(PlainPeer::new(rings, Box::new([1; 8]), depth, spin)),
        16 => Box::new(PlainPeer::new(rings, Box::new([1; 16]), depth, spin)),
        32 => Box::new(PlainPeer::new(rings, Box::new([1; 32]), depth, spin)),
        48 => Box::new(PlainPeer::new(rings, Box::new([1; 48]), depth, spin)),
        56 => Box::new(PlainPeer::new(rings, Box::new([1; 56]), depth, spin)),
        64 => Box::new(PlainPeer::new(rings, Box::new([1; 64]), depth, spin)),
        _ => Box::new(PlainPeer::new(rings, vec![1; payload].into_boxed_slice(), depth, spin)),
    }
}

/// Where request and response `k` are, and by which number one knows them.
trait RingLayout {
    fn request(&self) -> &SlotRing<'_>;
    fn request_number(k: u64) -> u64;
    fn response(&self) -> &SlotRing<'_>;
    fn response_number(k: u64) -> u64;
}

struct InPlace<'a> {
    ring: SlotRing<'a>,
}

impl RingLayout for InPlace<'_> {
    #[inline(always)]
    fn request(&self) -> &SlotRing<'_> {
        &self.ring
    }
    #[inline(always)]
    fn request_number(k: u64) -> u64 {
        2 * k + 1
    }
    #[inline(always)]
    fn response(&self) -> &SlotRing<'_> {
        &self.ring
    }
    #[inline(always)]
    fn response_number(k: u64) -> u64 {
        2 * k + 2
    }
}

struct TwoRings<'a> {
    requests: SlotRing<'a>,
    responses: SlotRing<'a>,
}

impl RingLayout for TwoRings<'_> {
    #[inline(always)]
    fn request(&self) -> &SlotRing<'_> {
        &self.requests
    }
    #[inline(always)]
    fn request_number(k: u64) -> u64 {
        k + 1
    }
    #[inline(always)]
    fn response(&self) -> &SlotRing<'_> {
        &self.responses
    }
    #[inline(always)]
    fn response_number(k: u64) -> u64 {
        k + 1
    }
}

/// A side and its place in the sequence.
struct PlainPeer<W, M: ?Sized> {
    rings: W,
    message: Box<M>,
    depth: u64,
    spin: SpinWait,
    /// Exchanges between looks at the clock.
    per_look: u64,
    /// Requests sent or received, and responses received.
    asked: u64,
    answered: u64,
}

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> PlainPeer<W, M> {
    fn new(rings: W, message: Box<M>, depth: usize, spin: SpinWait) -> Self {
        let per_look = if (*message).as_ref().len() < 4096 { 64 } else { 1 };
        PlainPeer { rings, message, depth: depth as u64, spin, per_look, asked: 0, answered: 0 }
    }

    #[inline(always)]
    fn ask(&mut self, end: u64) {
        let k = self.asked;
        self.rings.request().put(k, &*self.message);
        // Release, partner: the Acquire in `follow`. The payload is requests.
        self.rings.request().number(k).store(W::request_number(k) | end, Release);
        self.asked += 1;
    }

    /// Takes a response if it is requests.
    #[inline(always)]
    fn take(&mut self) -> bool {
        let k = self.answered;
        // Acquire, partner: the Release in `follow`. The payload is requests.
        if self.rings.response().number(k).load(Acquire) != W::response_number(k) {
            return false;
        }
        self.rings.response().get(k, black_box(&mut *self.message));
        self.answered += 1;
        true
    }

    /// Waits for a response and takes it.
    #[inline(always)]
    fn await_one(&mut self) -> Result<(), Error> {
        while !self.take() {
            self.spin.idle()?;
        }
        self.spin.reset();
        Ok(())
    }
}

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> PlainExchange for PlainPeer<W, M> {
    fn lead(&mut self, slice: Duration, take: TakeResponses) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.asked);
        let mut looked = first;
        loop {
            while self.asked - self.answered < self.depth {
                self.ask(0);
            }
            self.await_one()?;
            while take == TakeResponses::All && self.answered < self.asked && self.take() {}
            if self.asked - looked >= self.per_look {
                looked = self.asked;
                if begin.elapsed() >= slice {
                    break;
                }
            }
        }
        while self.answered < self.asked {
            self.await_one()?;
        }
        let throughput = Throughput { operations: self.asked - first, time: begin.elapsed() };
        self.ask(END);
        self.await_one()?;
        Ok(throughput)
    }

    fn follow(&mut self) -> Result<(), Error> {
        loop {
            let k = self.asked;
            let end = await_number(self.rings.request().number(k), W::request_number(k), &mut self.spin)?;
            self.rings.request().get(k, black_box(&mut *self.message));
            self.rings.response().put(k, black_box(&*self.message));
            // Release, partner: the Acquire in `take`. The payload is requests.
            self.rings.response().number(k).store(W::response_number(k), Release);
            self.asked += 1;
            if end {
                self.answered = self.asked;
                return Ok(());
            }
        }
    }
}
