//! The measured loops: what a user of the library would write, over whatever carries the messages.
//!
//! Every request has a number in its first 8 bytes, every response one that follows from it. A client checks each
//! response's number against its token, and at the end of a slice that every token came back once.

use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use crate::error::Error;
use crate::limits::Pace;
use crate::patience::Patience;
use crate::summary::LARGE;

/// One request in so many is timed: reading the clock twice takes a third as long as a round trip.
const TIMED: u64 = 32;
/// A sleeping side looks around this often.
const NAP: Duration = Duration::from_millis(1);
/// Idle turns of a spinning server between looks at the gate.
const TURNS: u32 = 64;

/// The asking half of what carries messages: one client.
pub(crate) trait Asking {
    /// Sends the request with this number, which is its token too. False where there is no room now.
    fn call(&mut self, number: u64) -> Result<bool, Error>;
    /// Hands over token and number of the responses that are there, and says how many.
    fn poll(&mut self, seen: impl FnMut(u64, u64)) -> Result<usize, Error>;
    /// Waits until there may be a response.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;
}

/// The answering half: the server.
pub(crate) trait Answering {
    /// Answers the requests that are there with [`answer`], and says how many.
    fn serve(&mut self) -> Result<usize, Error>;
    /// Waits until there may be a request.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;
    /// What the library has counted since it was opened.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The number of the response to the request with this number.
#[inline(always)]
pub(crate) fn answer(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1)
}

/// Waits as told, and not for ever.
pub(crate) struct Idle {
    spins: bool,
    patience: Patience,
}

impl Idle {
    pub(crate) fn new(spins: bool, patience: Patience) -> Idle {
        Idle { spins, patience }
    }

    #[inline(always)]
    fn reset(&mut self) {
        self.patience.reset();
    }

    #[inline(always)]
    fn idle(&mut self, nap: impl FnOnce(Duration) -> Result<(), Error>) -> Result<(), Error> {
        if self.spins {
            return self.patience.idle().map(drop);
        }
        nap(NAP)?;
        self.patience.slept()
    }
}

/// A client and its place in the sequence.
pub(crate) struct Client<A> {
    pub(crate) asking: A,
    depth: usize,
    idle: Idle,
    /// Of two requests that are timed, at least this far apart.
    timed: u64,
    /// The number of the next request.
    next: u64,
    pub(crate) tally: Tally,
}

/// What a client counted.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    /// Calls that found no room.
    pub(crate) refused: u64,
    /// Responses with a wrong number, and slices that ended with a token too many or too few.
    pub(crate) errors: u64,
    pub(crate) latency: Histogram,
}

impl Tally {
    /// Everything that went wrong, if the other side gave so many responses.
    pub(crate) fn errors_if_answered(&self, responses: u64) -> u64 {
        self.errors + self.requests.abs_diff(responses)
    }
}

impl<A: Asking> Client<A> {
    /// `id` sets its numbers apart from those of others.
    pub(crate) fn new(asking: A, id: usize, payload: usize, depth: usize, idle: Idle) -> Client<A> {
        let timed = if payload >= LARGE { 1 } else { TIMED };
        Client { asking, depth, idle, timed, next: (id as u64) << 48, tally: Tally::default() }
    }

    /// Asks, with up to `depth` requests in flight, until the time is over and everything is answered.
    pub(crate) fn ask(&mut self, slice: Duration) -> Result<Pace, Error> {
        let Client { asking, depth, idle, timed, next, tally } = self;
        let (begin, first) = (Instant::now(), *next);
        let (mut in_flight, mut over) = (0, false);
        let (mut sampled, mut sampled_at, mut sample_from) = (None, begin, first);
        let (mut issued, mut returned) = (0u64, 0u64);
        loop {
            while in_flight < *depth && !over {
                let sample = sampled.is_none() && *next >= sample_from;
                if sample {
                    sampled_at = Instant::now();
                }
                if !asking.call(*next)? {
                    tally.refused += 1;
                    break;
                }
                if sample {
                    sampled = Some(*next);
                }
                issued = issued.wrapping_add(*next);
                *next += 1;
                in_flight += 1;
            }
            let (mut wrong, mut sample_seen) = (0, false);
            let count = asking.poll(|token, number| {
                wrong += u64::from(number != answer(token));
                sample_seen |= sampled == Some(token);
                returned = returned.wrapping_add(token);
            })?;
            if count == 0 {
                idle.idle(|nap| asking.wait(nap))?;
                continue;
            }
            idle.reset();
            tally.errors += wrong;
            if count > in_flight {
                return Err(Error::Exchange { what: "poll", source: "more responses than requests".into() });
            }
            in_flight -= count;
            if sample_seen {
                let now = Instant::now();
                tally.latency.record((now - sampled_at).as_nanos() as u64);
                sampled = None;
                sample_from = *next - 1 + *timed;
                over = now - begin >= slice;
            }
            if over && in_flight == 0 {
                tally.errors += u64::from(issued != returned);
                tally.requests += *next - first;
                return Ok(Pace { turns: *next - first, time: begin.elapsed() });
            }
        }
    }
}

/// The server and what it counted.
pub(crate) struct Server<A> {
    pub(crate) answering: A,
    idle: Idle,
    pub(crate) responses: u64,
    /// Rounds that found requests.
    pub(crate) batches: u64,
}

impl<A: Answering> Server<A> {
    pub(crate) fn new(answering: A, idle: Idle) -> Server<A> {
        Server { answering, idle, responses: 0, batches: 0 }
    }

    pub(crate) fn counters(&self) -> Vec<(&'static str, u64)> {
        self.answering.counters()
    }

    /// Answers until nobody asks any more: `over` is looked at when there is nothing to answer.
    pub(crate) fn answer(&mut self, over: impl Fn(&A) -> bool) -> Result<(), Error> {
        let Server { answering, idle, responses, batches } = self;
        let mut turns = 0u32;
        loop {
            let count = answering.serve()?;
            if count > 0 {
                *responses += count as u64;
                *batches += 1;
                idle.reset();
                continue;
            }
            turns = turns.wrapping_add(1);
            if (!idle.spins || turns.is_multiple_of(TURNS)) && over(answering) {
                return Ok(());
            }
            idle.idle(|nap| answering.wait(nap))?;
        }
    }
}
