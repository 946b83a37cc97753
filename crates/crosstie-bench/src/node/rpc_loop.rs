//! The measured loops: what a user of the library would write, over whatever carries the messages.
//!
//! Every request has a number in its first 8 bytes, every response one that follows from it. A client checks each
//! response's number against its token, and at the end of a slice that every token came back once.

use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use crate::error::Error;
use crate::limits::Throughput;
use crate::spin_wait::SpinWait;
use crate::summary::LARGE;

/// One request in so many is timed: reading the clock twice takes a third as long as a round trip.
const TIMED: u64 = 32;
/// A sleeping side looks around this often.
const NAP: Duration = Duration::from_millis(1);
/// Idle turns of a spinning server between looks at the barrier.
const TURNS: u32 = 64;

/// The rpc half of what carries messages: one client.
pub(crate) trait RpcClient {
    /// Sends the request with this number, which is its token too. False where there is no room now.
    fn call(&mut self, number: u64) -> Result<bool, Error>;
    /// Hands over token and number of the responses that are there, and says how many.
    fn poll(&mut self, seen: impl FnMut(u64, u64)) -> Result<usize, Error>;
    /// Waits until there may be a response.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;
}

/// The rpc half: the server.
pub(crate) trait RpcServer {
    /// Responds to the waiting requests with [`response_number`], and returns how many there were.
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
pub(crate) fn response_number(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1)
}

/// Waits as told, and not for ever.
pub(crate) struct Idle {
    spins: bool,
    spin: SpinWait,
}

impl Idle {
    pub(crate) fn new(spins: bool, spin: SpinWait) -> Idle {
        Idle { spins, spin }
    }

    #[inline(always)]
    fn reset(&mut self) {
        self.spin.reset();
    }

    #[inline(always)]
    fn idle(&mut self, nap: impl FnOnce(Duration) -> Result<(), Error>) -> Result<(), Error> {
        if self.spins {
            return self.spin.idle().map(drop);
        }
        nap(NAP)?;
        self.spin.count_sleep()
    }
}

/// A client whose transport was chosen at run time. Only the loops inside are compiled for each transport and message type;
/// one virtual call per slice costs nothing.
pub(crate) trait ClientLoop {
    /// See [`Client::run_slice`].
    fn run_slice(&mut self, slice: Duration) -> Result<Throughput, Error>;
    fn tally(&mut self) -> &mut Tally;
}

impl<A: RpcClient> ClientLoop for Client<A> {
    fn run_slice(&mut self, slice: Duration) -> Result<Throughput, Error> {
        Client::run_slice(self, slice)
    }

    fn tally(&mut self) -> &mut Tally {
        &mut self.tally
    }
}

/// A server whose transport was chosen at run time, see [`ClientLoop`].
pub(crate) trait ServerLoop {
    /// See [`Server::serve_until`].
    fn serve_until(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), Error>;
    /// Responses sent, and polls that found requests, since the last reset.
    fn responses_and_batches(&self) -> (u64, u64);
    fn reset_counters(&mut self);
    /// What the library has counted since the server was created.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}

impl<A: RpcServer> ServerLoop for Server<A> {
    fn serve_until(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), Error> {
        Server::serve_until(self, |_| is_over())
    }

    fn responses_and_batches(&self) -> (u64, u64) {
        (self.responses, self.batches)
    }

    fn reset_counters(&mut self) {
        (self.responses, self.batches) = (0, 0);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.rpc.counters()
    }
}

/// A client and its place in the sequence.
pub(crate) struct Client<A> {
    pub(crate) rpc: A,
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
    pub(crate) fn errors_given_responses(&self, responses: u64) -> u64 {
        self.errors + self.requests.abs_diff(responses)
    }
}

impl<A: RpcClient> Client<A> {
    /// `id` sets its numbers apart from those of others.
    pub(crate) fn new(rpc: A, id: usize, payload: usize, depth: usize, idle: Idle) -> Client<A> {
        let timed = if payload >= LARGE { 1 } else { TIMED };
        Client { rpc, depth, idle, timed, next: (id as u64) << 48, tally: Tally::default() }
    }

    /// Caller, with up to `depth` requests in flight, until the time is over and everything is answered.
    pub(crate) fn run_slice(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let Client { rpc, depth, idle, timed, next, tally } = self;
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
                if !rpc.call(*next)? {
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
            let count = rpc.poll(|token, number| {
                wrong += u64::from(number != response_number(token));
                sample_seen |= sampled == Some(token);
                returned = returned.wrapping_add(token);
            })?;
            if count == 0 {
                idle.idle(|nap| rpc.wait(nap))?;
                continue;
            }
            idle.reset();
            tally.errors += wrong;
            if count > in_flight {
                return Err(Error::Rpc { what: "poll", source: "more responses than requests".into() });
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
                return Ok(Throughput { operations: *next - first, time: begin.elapsed() });
            }
        }
    }
}

/// The server and what it counted.
pub(crate) struct Server<A> {
    pub(crate) rpc: A,
    idle: Idle,
    pub(crate) responses: u64,
    /// Rounds that found requests.
    pub(crate) batches: u64,
}

impl<A: RpcServer> Server<A> {
    pub(crate) fn new(rpc: A, idle: Idle) -> Server<A> {
        Server { rpc, idle, responses: 0, batches: 0 }
    }

    /// Responder until nobody asks any more: `over` is looked at when there is nothing to answer.
    pub(crate) fn serve_until(&mut self, over: impl Fn(&A) -> bool) -> Result<(), Error> {
        let Server { rpc, idle, responses, batches } = self;
        let mut turns = 0u32;
        loop {
            let count = rpc.serve()?;
            if count > 0 {
                *responses += count as u64;
                *batches += 1;
                idle.reset();
                continue;
            }
            turns = turns.wrapping_add(1);
            if (!idle.spins || turns.is_multiple_of(TURNS)) && over(rpc) {
                return Ok(());
            }
            idle.idle(|nap| rpc.wait(nap))?;
        }
    }
}
