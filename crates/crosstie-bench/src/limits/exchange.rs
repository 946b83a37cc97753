//! The limit of `bench ipc`, `bench delegation` and `bench flux`: requests and responses in a closed loop.
//!
//! ```text
//! in place    one ring; a slot holds request k, then response k             number 2k+1, then 2k+2
//! two rings   one for requests, one for responses; a slot holds message k   number k+1
//! ```
//!
//! A slot is one cache line for payloads up to 56 bytes. The number in it tells that the message is complete: no indices and no
//! counts are shared. Each side copies the payload in and out. The client has up to `depth` requests in flight. It takes responses in
//! their order, one at a time or all that are there ([`TakeResponses`]), before it sends the next request. Which is faster depends on
//! depth and machine, so both are measured. There are deliberately no hints to the processor (a `prefetchw` two slots ahead would give
//! two rings up to a third more at great depths).

use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::{END, Throughput, wait_for_number};
use crate::error::Error;
use crate::shared_region::{SharedRegion, SlotRing};
use crate::spin_wait::SpinWait;

/// How many responses the client takes before it sends the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeResponses {
    One,
    All,
}

/// One side of the exchange of requests and responses.
pub(crate) trait PlainExchange {
    /// The client: sends requests until the time is over.
    fn lead(&mut self, slice: Duration, take: TakeResponses) -> Result<Throughput, Error>;
    /// The server: responds until the last request.
    fn follow(&mut self) -> Result<(), Error>;
}

/// Bytes of a region that [`in_place`] takes.
pub(crate) fn in_place_len(payload: usize, depth: usize) -> usize {
    SlotRing::len(depth.next_power_of_two(), payload)
}

/// An exchange over one ring of `depth` slots: the response is in the slot of its request.
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

/// Bytes of a region that [`two_rings`] takes.
pub(crate) fn two_rings_len(payload: usize, slots: usize) -> usize {
    2 * SlotRing::len(slots.next_power_of_two(), payload)
}

/// An exchange over two rings of `slots`, at least `depth`, each.
pub(crate) fn two_rings<'a>(
    region: &'a SharedRegion,
    offset: usize,
    payload: usize,
    depth: usize,
    slots: usize,
    spin: SpinWait,
) -> Box<dyn PlainExchange + 'a> {
    let count = slots.max(depth).next_power_of_two();
    let requests = region.slot_ring(offset, count, payload);
    let responses = region.slot_ring(offset + SlotRing::len(count, payload), count, payload);
    sized(TwoRings { requests, responses }, payload, depth, spin)
}

/// Gives usual payloads a length that the compiler knows, as hand-written code would.
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

/// The rings of request and response `k`, and the numbers that mark them as complete.
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

/// One side, with its sequence numbers.
struct PlainPeer<W, M: ?Sized> {
    rings: W,
    message: Box<M>,
    depth: u64,
    spin: SpinWait,
    /// Requests between two reads of the clock.
    per_clock_read: u64,
    /// Requests sent (or received, on the server), and responses received.
    requests_sent: u64,
    responses_taken: u64,
}

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> PlainPeer<W, M> {
    fn new(rings: W, message: Box<M>, depth: usize, spin: SpinWait) -> Self {
        let per_clock_read = if (*message).as_ref().len() < 4096 { 64 } else { 1 };
        PlainPeer {
            rings,
            message,
            depth: depth as u64,
            spin,
            per_clock_read,
            requests_sent: 0,
            responses_taken: 0,
        }
    }

    #[inline(always)]
    fn send_request(&mut self, end: u64) {
        let k = self.requests_sent;
        self.rings.request().put(k, &*self.message);
        // Release, partner: the Acquire in `follow`. The payload is complete.
        self.rings.request().number(k).store(W::request_number(k) | end, Release);
        self.requests_sent += 1;
    }

    /// Takes the next response if it is complete.
    #[inline(always)]
    fn take(&mut self) -> bool {
        let k = self.responses_taken;
        // Acquire, partner: the Release in `follow`. The payload is complete.
        if self.rings.response().number(k).load(Acquire) != W::response_number(k) {
            return false;
        }
        self.rings.response().get(k, black_box(&mut *self.message));
        self.responses_taken += 1;
        true
    }

    /// Waits for the next response and takes it.
    #[inline(always)]
    fn wait_for_one(&mut self) -> Result<(), Error> {
        while !self.take() {
            self.spin.idle()?;
        }
        self.spin.reset();
        Ok(())
    }
}

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> PlainExchange for PlainPeer<W, M> {
    fn lead(&mut self, slice: Duration, take: TakeResponses) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.requests_sent);
        let mut checked_at = first;
        loop {
            while self.requests_sent - self.responses_taken < self.depth {
                self.send_request(0);
            }
            self.wait_for_one()?;
            while take == TakeResponses::All && self.responses_taken < self.requests_sent && self.take() {}
            if self.requests_sent - checked_at >= self.per_clock_read {
                checked_at = self.requests_sent;
                if begin.elapsed() >= slice {
                    break;
                }
            }
        }
        while self.responses_taken < self.requests_sent {
            self.wait_for_one()?;
        }
        let throughput = Throughput { operations: self.requests_sent - first, time: begin.elapsed() };
        self.send_request(END);
        self.wait_for_one()?;
        Ok(throughput)
    }

    fn follow(&mut self) -> Result<(), Error> {
        loop {
            let k = self.requests_sent;
            let end = wait_for_number(self.rings.request().number(k), W::request_number(k), &mut self.spin)?;
            self.rings.request().get(k, black_box(&mut *self.message));
            self.rings.response().put(k, black_box(&*self.message));
            // Release, partner: the Acquire in `take`. The payload is complete.
            self.rings.response().number(k).store(W::response_number(k), Release);
            self.requests_sent += 1;
            if end {
                self.responses_taken = self.requests_sent;
                return Ok(());
            }
        }
    }
}
