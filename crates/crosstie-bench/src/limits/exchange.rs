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

use core::cell::Cell;
use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::rc::Rc;
use std::time::{Duration, Instant};

use TakeResponses::{All, One};

use super::{END, LARGE, RINGS, Throughput, wait_for_number};
use crate::error::Error;
use crate::runner::{Contender, Exchange, Part, Rank, Role};
use crate::shared_region::{SharedRegion, SlotRing};
use crate::spin_wait::SpinWait;

/// How many responses the client takes before it sends the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TakeResponses {
    One,
    All,
}

/// "Two rings" is also measured with rings of this many times the depth, unless they need more memory than usual caches have.
const LARGE_RINGS_FACTOR: usize = 4;
const MAX_LARGE_RINGS: usize = 16 << 20;

/// The requests and responses of which the plain code measures the limits, and where their rings are in the shared region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainRpc {
    payload: usize,
    depth: usize,
    /// Slots of the large rings.
    large_slots: Option<usize>,
}

impl PlainRpc {
    pub(crate) fn new(payload: usize, depth: usize) -> PlainRpc {
        let large_slots = (LARGE_RINGS_FACTOR * depth).next_power_of_two();
        let fits = two_rings_len(payload, large_slots) <= MAX_LARGE_RINGS;
        PlainRpc { payload, depth, large_slots: fits.then_some(large_slots) }
    }

    /// Bytes of the region.
    pub(crate) fn region_len(&self) -> usize {
        self.large_rings() + self.large_slots.map_or(0, |slots| two_rings_len(self.payload, slots))
    }

    fn two_rings(&self) -> usize {
        RINGS + SlotRing::len(self.depth.next_power_of_two(), self.payload)
    }

    fn large_rings(&self) -> usize {
        self.two_rings() + two_rings_len(self.payload, self.depth)
    }

    /// One ring of as many slots as requests in flight: the response is in the slot of its request.
    pub(crate) fn with_one_ring<'a>(&self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let next = Rc::new(Cell::new(0));
        let takes = if self.depth == 1 { &[One][..] } else { &[One, All] };
        let contender = |take: &TakeResponses| {
            let ring = region.slot_ring(RINGS, self.depth.next_power_of_two(), self.payload);
            self.contender(Role::InPlace, rank, InPlace { ring }, *take, next.clone())
        };
        takes.iter().map(contender).collect()
    }

    /// One ring for each direction: of as many slots as requests in flight, and of more.
    pub(crate) fn with_two_rings<'a>(&self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let large = self.large_slots.map(|slots| (self.large_rings(), slots));
        let contender = |(offset, slots): (usize, usize)| {
            let count = slots.next_power_of_two();
            let requests = region.slot_ring(offset, count, self.payload);
            let responses =
                region.slot_ring(offset + SlotRing::len(count, self.payload), count, self.payload);
            self.contender(Role::TwoRings, rank, TwoRings { requests, responses }, One, Rc::default())
        };
        [Some((self.two_rings(), self.depth)), large].into_iter().flatten().map(contender).collect()
    }

    /// Gives usual payloads a length that the compiler knows, as hand-written code would.
    fn contender<'a>(
        &self,
        role: Role,
        rank: &Rank<'a>,
        rings: impl RingLayout + 'a,
        take: TakeResponses,
        next: Rc<Cell<u64>>,
    ) -> Contender<'a> {
        match self.payload {
            8 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 8], take, next)),
            16 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 16], take, next)),
            32 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 32], take, next)),
            48 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 48], take, next)),
            56 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 56], take, next)),
            64 => Contender::new(role, PlainPeer::new(self, rank, rings, [1; 64], take, next)),
            payload => Contender::new(role, PlainPeer::new(self, rank, rings, vec![1; payload], take, next)),
        }
    }
}

fn two_rings_len(payload: usize, slots: usize) -> usize {
    2 * SlotRing::len(slots.next_power_of_two(), payload)
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
struct PlainPeer<W, M> {
    rings: W,
    message: M,
    part: Part,
    depth: u64,
    take: TakeResponses,
    spin: SpinWait,
    /// Requests between two reads of the clock.
    per_clock_read: u64,
    /// The number of the next request between two slices. Contenders with the same rings share it.
    next: Rc<Cell<u64>>,
    /// Requests sent (or received, on the server), and responses received.
    requests_sent: u64,
    responses_taken: u64,
}

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]>> PlainPeer<W, M> {
    fn new(
        rpc: &PlainRpc,
        rank: &Rank<'_>,
        rings: W,
        message: M,
        take: TakeResponses,
        next: Rc<Cell<u64>>,
    ) -> PlainPeer<W, M> {
        PlainPeer {
            rings,
            message,
            part: rank.part(0, 1),
            depth: rpc.depth as u64,
            take,
            spin: rank.spin_of_two,
            per_clock_read: if rpc.payload < LARGE { 64 } else { 1 },
            next,
            requests_sent: 0,
            responses_taken: 0,
        }
    }

    #[inline(always)]
    fn send_request(&mut self, end: u64) {
        let k = self.requests_sent;
        self.rings.request().put(k, &self.message);
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
        self.rings.response().get(k, black_box(&mut self.message));
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

    /// The client: sends requests until the time is over.
    fn lead(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let (begin, first) = (Instant::now(), self.requests_sent);
        let mut checked_at = first;
        loop {
            while self.requests_sent - self.responses_taken < self.depth {
                self.send_request(0);
            }
            self.wait_for_one()?;
            while self.take == All && self.responses_taken < self.requests_sent && self.take() {}
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

    /// The server: responds until the last request.
    fn follow(&mut self) -> Result<(), Error> {
        loop {
            let k = self.requests_sent;
            let end = wait_for_number(self.rings.request().number(k), W::request_number(k), &mut self.spin)?;
            self.rings.request().get(k, black_box(&mut self.message));
            self.rings.response().put(k, black_box(&self.message));
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

impl<W: RingLayout, M: AsRef<[u8]> + AsMut<[u8]>> Exchange for PlainPeer<W, M> {
    fn run_slice(&mut self, slice: Duration) -> Result<Option<Throughput>, Error> {
        (self.requests_sent, self.responses_taken) = (self.next.get(), self.next.get());
        let throughput = match self.part {
            Part::Lead => Some(self.lead(slice)?),
            Part::Follow => self.follow().map(|()| None)?,
            Part::Wait => None,
        };
        self.next.set(self.requests_sent);
        Ok(throughput)
    }
}
