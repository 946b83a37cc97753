//! The measured loops of the RPC benchmarks. They are what an application would write, and are generic over the RPC that they measure.
//!
//! The first 8 bytes of a request are its number, which is also its token. The number of a response is computed from the number of
//! its request ([`response_number`]). A client checks the number of each response. At the end of a slice it checks that every token
//! came back once.

use std::time::{Duration, Instant};

use crosstie::telemetry::Histogram;

use crate::error::Error;
use crate::limits::{LARGE, Throughput};
use crate::runner::Counts;
use crate::spin_wait::SpinWait;

/// One small request in this many is timed: reading the clock twice takes a third as long as a round trip.
const SAMPLE_EVERY: u64 = 32;
/// The longest sleep before a sleeping side checks again whether the slice is over.
const MAX_SLEEP: Duration = Duration::from_millis(1);
/// A spinning server checks whether the slice is over every so many idle polls.
const CHECK_EVERY: u32 = 64;

/// An RPC client, as the measured loop uses it.
pub(crate) trait RpcClient {
    /// Sends the request with this number, which is also its token. Returns false if there is no room for it now.
    fn call(&mut self, number: u64) -> Result<bool, Error>;
    /// Calls `seen` with the token and the number of each response that has arrived. Returns how many there were.
    fn poll(&mut self, seen: impl FnMut(u64, u64)) -> Result<usize, Error>;
    /// Waits until a response may have arrived, at most for `timeout`.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;
}

/// An RPC server, as the measured loop uses it.
pub(crate) trait RpcServer {
    /// Responds to the waiting requests with [`response_number`], and returns how many there were.
    fn serve(&mut self) -> Result<usize, Error>;
    /// Waits until a request may have arrived, at most for `timeout`.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;
    /// The counters of the library since the server was created.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// The number of the response to the request with this number.
#[inline(always)]
pub(crate) fn response_number(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1)
}

/// Counts as errors the requests that the clients have sent and the servers have not answered.
pub(crate) fn check_all_answered(counts: &mut Counts) {
    counts.errors += counts.counter("requests").abs_diff(counts.counter("responses"));
}

/// How a loop waits when it has nothing to do: it spins, or it sleeps in the RPC's own `wait`. It fails after the timeout of [`SpinWait`].
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
    fn idle(&mut self, sleep: impl FnOnce(Duration) -> Result<(), Error>) -> Result<(), Error> {
        if self.spins {
            return self.spin.idle().map(drop);
        }
        sleep(MAX_SLEEP)?;
        self.spin.count_sleep()
    }
}

/// The loop of a client, with the number of its next request.
pub(crate) struct Client<A> {
    pub(crate) rpc: A,
    depth: usize,
    idle: Idle,
    /// One request in this many is timed.
    sample_every: u64,
    /// The number of the next request.
    next: u64,
    tally: Tally,
}

/// The counts of a client.
#[derive(Default)]
struct Tally {
    requests: u64,
    /// Calls refused because there was no room.
    refused: u64,
    /// Responses with a wrong number, and slices whose returned tokens differ from those issued.
    errors: u64,
    latency: Histogram,
}

impl<A: RpcClient> Client<A> {
    /// `id` makes the numbers of this client different from those of other clients.
    pub(crate) fn new(rpc: A, id: usize, payload: usize, depth: usize, idle: Idle) -> Client<A> {
        let sample_every = if payload >= LARGE { 1 } else { SAMPLE_EVERY };
        Client { rpc, depth, idle, sample_every, next: (id as u64) << 48, tally: Tally::default() }
    }

    pub(crate) fn reset(&mut self) {
        self.tally = Tally::default();
    }

    pub(crate) fn counts(&self) -> Counts {
        let Tally { requests, refused, errors, latency } = &self.tally;
        let counters = [("requests", *requests), ("refused", *refused)];
        Counts { latency: latency.clone(), ..Counts::new(counters, *errors) }
    }

    /// Sends requests, with up to `depth` in flight, until the time is over. Then waits for the remaining responses.
    pub(crate) fn run_slice(&mut self, slice: Duration) -> Result<Throughput, Error> {
        let Client { rpc, depth, idle, sample_every, next, tally } = self;
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
                idle.idle(|timeout| rpc.wait(timeout))?;
                continue;
            }
            idle.reset();
            tally.errors += wrong;
            if count > in_flight {
                return Err(Error::Rpc {
                    what: "poll",
                    source: "there were more responses than requests".into(),
                });
            }
            in_flight -= count;
            if sample_seen {
                let now = Instant::now();
                tally.latency.record((now - sampled_at).as_nanos() as u64);
                sampled = None;
                sample_from = *next - 1 + *sample_every;
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

/// The loop of a server, with its counts.
pub(crate) struct Server<A> {
    pub(crate) rpc: A,
    idle: Idle,
    pub(crate) responses: u64,
    /// Polls that found requests.
    pub(crate) batches: u64,
}

impl<A: RpcServer> Server<A> {
    pub(crate) fn new(rpc: A, idle: Idle) -> Server<A> {
        Server { rpc, idle, responses: 0, batches: 0 }
    }

    pub(crate) fn reset(&mut self) {
        (self.responses, self.batches) = (0, 0);
    }

    /// Serves requests until `is_over` returns true. It is called only when there is no request to serve.
    pub(crate) fn serve_until(&mut self, is_over: impl Fn(&A) -> bool) -> Result<(), Error> {
        let Server { rpc, idle, responses, batches } = self;
        let mut idle_polls = 0u32;
        loop {
            let count = rpc.serve()?;
            if count > 0 {
                *responses += count as u64;
                *batches += 1;
                idle.reset();
                continue;
            }
            idle_polls = idle_polls.wrapping_add(1);
            if (!idle.spins || idle_polls.is_multiple_of(CHECK_EVERY)) && is_over(rpc) {
                return Ok(());
            }
            idle.idle(|timeout| rpc.wait(timeout))?;
        }
    }
}
