//! What `bench ipc`, `bench delegation` and `bench flux` are measured against: requests and responses in a closed loop.
//!
//! ```text
//! in place    one ring; a place holds request k, then response k          number 2k+1, then 2k+2
//! two rings   a ring there, a ring back; a place holds message k          number k+1
//! ```
//!
//! A place is a line for payloads up to 56 bytes. The number in it is the flag: no indices, no counts, nothing else is
//! shared. Each side copies the payload in and out. The asking side has up to `depth` requests in flight and takes
//! responses in their order, one at a time or all that are there ([`Take`]), before it asks anew. Which is faster depends on depth and machine, so
//! both are measured. No hints to the processor (a `prefetchw` of a place two ahead would give two rings up to a third more
//! at great depths): that is a feature.

use core::hint::black_box;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use super::{END, Pace, await_number};
use crate::arena::{Arena, Places};
use crate::error::Error;
use crate::patience::Patience;

/// How many responses the asking side takes before it asks anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    One,
    All,
}

/// One side of a plain exchange.
pub(crate) trait Exchange {
    /// Asks until the time is over.
    fn lead(&mut self, slice: Duration, take: Take) -> Result<Pace, Error>;
    /// Answers until the last request.
    fn follow(&mut self) -> Result<(), Error>;
}

/// How much of an arena [`in_place`] takes.
pub(crate) fn in_place_len(payload: usize, depth: usize) -> usize {
    Places::len(depth.next_power_of_two(), payload)
}

/// A ring of `depth` places, request and response in the same.
pub(crate) fn in_place<'a>(
    arena: &'a Arena,
    offset: usize,
    payload: usize,
    depth: usize,
    patience: Patience,
) -> Box<dyn Exchange + 'a> {
    let ring = arena.places(offset, depth.next_power_of_two(), payload);
    sized(InPlace { ring }, payload, depth, patience)
}

/// How much of an arena [`two_rings`] take.
pub(crate) fn two_rings_len(payload: usize, places: usize) -> usize {
    2 * Places::len(places.next_power_of_two(), payload)
}

/// A ring of `places`, at least `depth`, each way.
pub(crate) fn two_rings<'a>(
    arena: &'a Arena,
    offset: usize,
    payload: usize,
    depth: usize,
    places: usize,
    patience: Patience,
) -> Box<dyn Exchange + 'a> {
    let count = places.max(depth).next_power_of_two();
    let there = arena.places(offset, count, payload);
    let back = arena.places(offset + Places::len(count, payload), count, payload);
    sized(TwoRings { there, back }, payload, depth, patience)
}

/// Gives usual payloads a length that the compiler knows, as anybody would who writes it by hand.
fn sized<'a, W: Way + 'a>(
    way: W,
    payload: usize,
    depth: usize,
    patience: Patience,
) -> Box<dyn Exchange + 'a> {
    match payload {
        8 => Box::new(Side::new(way, Box::new([1; 8]), depth, patience)),
        16 => Box::new(Side::new(way, Box::new([1; 16]), depth, patience)),
        32 => Box::new(Side::new(way, Box::new([1; 32]), depth, patience)),
        48 => Box::new(Side::new(way, Box::new([1; 48]), depth, patience)),
        56 => Box::new(Side::new(way, Box::new([1; 56]), depth, patience)),
        64 => Box::new(Side::new(way, Box::new([1; 64]), depth, patience)),
        _ => Box::new(Side::new(way, vec![1; payload].into_boxed_slice(), depth, patience)),
    }
}

/// Where request and response `k` are, and by which number one knows them.
trait Way {
    fn request(&self) -> &Places<'_>;
    fn request_number(k: u64) -> u64;
    fn response(&self) -> &Places<'_>;
    fn response_number(k: u64) -> u64;
}

struct InPlace<'a> {
    ring: Places<'a>,
}

impl Way for InPlace<'_> {
    #[inline(always)]
    fn request(&self) -> &Places<'_> {
        &self.ring
    }
    #[inline(always)]
    fn request_number(k: u64) -> u64 {
        2 * k + 1
    }
    #[inline(always)]
    fn response(&self) -> &Places<'_> {
        &self.ring
    }
    #[inline(always)]
    fn response_number(k: u64) -> u64 {
        2 * k + 2
    }
}

struct TwoRings<'a> {
    there: Places<'a>,
    back: Places<'a>,
}

impl Way for TwoRings<'_> {
    #[inline(always)]
    fn request(&self) -> &Places<'_> {
        &self.there
    }
    #[inline(always)]
    fn request_number(k: u64) -> u64 {
        k + 1
    }
    #[inline(always)]
    fn response(&self) -> &Places<'_> {
        &self.back
    }
    #[inline(always)]
    fn response_number(k: u64) -> u64 {
        k + 1
    }
}

/// A side and its place in the sequence.
struct Side<W, M: ?Sized> {
    way: W,
    message: Box<M>,
    depth: u64,
    patience: Patience,
    /// Exchanges between looks at the clock.
    per_look: u64,
    /// Requests sent or received, and responses received.
    asked: u64,
    answered: u64,
}

impl<W: Way, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> Side<W, M> {
    fn new(way: W, message: Box<M>, depth: usize, patience: Patience) -> Self {
        let per_look = if (*message).as_ref().len() < 4096 { 64 } else { 1 };
        Side { way, message, depth: depth as u64, patience, per_look, asked: 0, answered: 0 }
    }

    #[inline(always)]
    fn ask(&mut self, end: u64) {
        let k = self.asked;
        self.way.request().put(k, &*self.message);
        // Release, partner: the Acquire in `follow`. The payload is there.
        self.way.request().number(k).store(W::request_number(k) | end, Release);
        self.asked += 1;
    }

    /// Takes a response if it is there.
    #[inline(always)]
    fn take(&mut self) -> bool {
        let k = self.answered;
        // Acquire, partner: the Release in `follow`. The payload is there.
        if self.way.response().number(k).load(Acquire) != W::response_number(k) {
            return false;
        }
        self.way.response().get(k, black_box(&mut *self.message));
        self.answered += 1;
        true
    }

    /// Waits for a response and takes it.
    #[inline(always)]
    fn await_one(&mut self) -> Result<(), Error> {
        while !self.take() {
            self.patience.idle()?;
        }
        self.patience.reset();
        Ok(())
    }
}

impl<W: Way, M: AsRef<[u8]> + AsMut<[u8]> + ?Sized> Exchange for Side<W, M> {
    fn lead(&mut self, slice: Duration, take: Take) -> Result<Pace, Error> {
        let (begin, first) = (Instant::now(), self.asked);
        let mut looked = first;
        loop {
            while self.asked - self.answered < self.depth {
                self.ask(0);
            }
            self.await_one()?;
            while take == Take::All && self.answered < self.asked && self.take() {}
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
        let pace = Pace { turns: self.asked - first, time: begin.elapsed() };
        self.ask(END);
        self.await_one()?;
        Ok(pace)
    }

    fn follow(&mut self) -> Result<(), Error> {
        loop {
            let k = self.asked;
            let end = await_number(self.way.request().number(k), W::request_number(k), &mut self.patience)?;
            self.way.request().get(k, black_box(&mut *self.message));
            self.way.response().put(k, black_box(&*self.message));
            // Release, partner: the Acquire in `take`. The payload is there.
            self.way.response().number(k).store(W::response_number(k), Release);
            self.asked += 1;
            if end {
                self.answered = self.asked;
                return Ok(());
            }
        }
    }
}
