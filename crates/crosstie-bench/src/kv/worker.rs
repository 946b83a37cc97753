//! One benchmark client: sends the requests of its pattern, checks the responses and measures latency.
//!
//! A client makes one step at a time and never waits; [`client_loop`](super::client_loop) runs the clients of a thread. The requests come
//! from a pattern that was generated before the run, so that generating them is not measured.

use std::time::Duration;

use crosstie::Waitable;
use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

use super::totals::Tally;
use crate::cores;
use crate::error::Error;
use crate::history::{Pending, Recorder, now};
use crate::workload::{self, Entry, Pattern, Schedule, key_bytes};
use crosstie_kv::client::{BeginBytesError, Client};
use crosstie_kv::wire::{self, BytesOp, Status, WordRequest, WordResponse};

/// One operation in so many is timed if several are in flight. It is odd, so that the sample does not always hit the same part of a
/// pattern.
pub const SAMPLE_EVERY: u64 = 17;
/// A client that gets no response for this long gives up.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest sleep of a client that waits for its next start: short enough to notice the end of the run.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(10);
/// The bytes of byte-string values after their key.
pub(super) const FILLER: u8 = 0xab;
/// A start that is closer than this, in nanoseconds, is waited for by spinning.
const SPIN_BEFORE_START_NS: u64 = 100_000;

/// The task of a client: its node, its workload and how it runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    /// The node to attach to.
    pub(super) node: String,
    pub(super) rank: u32,
    /// Number among the clients of its node.
    pub(super) client: u32,
    /// Number among all clients.
    pub(super) number: u32,
    pub(super) workload: workload::Plan,
    pub(super) depth: usize,
    /// Operations per second of this client, in an open loop.
    pub(super) rate: Option<f64>,
    /// If operations are recorded: how many in each run at most, and the number of runs.
    pub(super) recorded: Option<(usize, usize)>,
    /// The core that its thread is pinned to.
    pub(super) core: Option<usize>,
    /// Rounds without a response in which its thread spins; 0 if the thread shares its core and must yield at once.
    pub(super) spins: u32,
}

/// The result of one step. The least of several clients' results decides what their thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// Responses came.
    Completed,
    /// No response came; the next start is close.
    StartDue,
    /// No response came; operations are in flight, and no start is close.
    Waiting,
    /// Nothing is in flight, and the next start is this many nanoseconds away.
    IdleFor(u64),
}

/// Records requests and responses, or does nothing.
pub(super) trait Recording {
    type Pending;
    /// Returns `None` if there is no more room in this run.
    fn begin(&mut self, request: &WordRequest) -> Option<Self::Pending>;
    fn end(&mut self, pending: Self::Pending, response: &WordResponse);
    /// Called at the start of a run.
    fn start_run(&mut self) {}
    /// Whether every put must write a unique value.
    const UNIQUE: bool;
}

impl Recording for () {
    type Pending = ();
    const UNIQUE: bool = false;

    #[inline]
    fn begin(&mut self, _: &WordRequest) -> Option<()> {
        Some(())
    }

    #[inline]
    fn end(&mut self, (): (), _: &WordResponse) {}
}

/// A recorder with the same capacity for each run.
pub(super) struct RunRecorder {
    pub(super) recorder: Recorder,
    each: usize,
    left: usize,
}

impl RunRecorder {
    pub(super) fn new(number: u32, each: usize, runs: usize) -> RunRecorder {
        RunRecorder { recorder: Recorder::new(number, each * runs), each, left: each }
    }
}

impl Recording for RunRecorder {
    type Pending = Pending;
    const UNIQUE: bool = true;

    fn begin(&mut self, request: &WordRequest) -> Option<Pending> {
        self.left = self.left.checked_sub(1)?;
        self.recorder.begin(request)
    }

    fn end(&mut self, pending: Pending, response: &WordResponse) {
        self.recorder.end(pending, response);
    }

    fn start_run(&mut self) {
        self.left = self.each;
    }
}

/// Returned with the response of an operation.
struct Token<M> {
    /// When the operation started, or should have started; 0 if it is not timed.
    start: u64,
    pending: M,
    key: u32,
    is_read: bool,
}

/// A client and its state.
pub(super) struct Worker<R: Recording> {
    task: Task,
    client: Client<Token<R::Pending>>,
    pattern: Pattern,
    /// Requests so far: the position in the pattern.
    position: u64,
    /// Attempts to start a request so far: more than `position` if the client was full.
    attempts: u64,
    /// Operations until the next one that is timed.
    untimed: u64,
    /// Runs so far.
    runs: u64,
    /// Whether this run is measured; false for the warm-up.
    measured: bool,
    tally: Tally,
    in_flight: usize,
    /// When the last response was seen. With one operation in flight it is the start of the next.
    seen: u64,
    /// In an open loop: the schedule of starts, and the time of the next start.
    starts: Option<Schedule>,
    due: u64,
    /// For the timeout: completed operations at the last check that saw progress, and its time.
    progress_ops: u64,
    silent_since: u64,
    pub(super) record: R,
    /// Latencies of measured runs.
    pub(super) latency: Histogram,
    /// For byte strings: the value that puts write. It begins with the key.
    value: Option<Box<[u8]>>,
}

impl<R: Recording> Worker<R> {
    /// Attaches to the node and generates the pattern.
    pub(super) fn new(task: Task, record: R) -> Result<Worker<R>, Error> {
        if let Some(core) = task.core {
            cores::pin_thread(core)?;
        }
        let mut client = Client::attach_pipelined(&task.node)?;
        let value = (!task.workload.has_words()).then(|| vec![FILLER; task.workload.value_size].into());
        if value.is_some() {
            // Connects to each daemon for byte strings now, not during a run.
            for daemon in 0..client.info().daemons {
                client.stats(task.rank, daemon).map_err(Error::Strings)?;
            }
        }
        let pattern = task.workload.pattern(&client.shard_map(), task.rank, task.client)?;
        let latency = Histogram::new();
        Ok(Worker {
            task,
            client,
            pattern,
            position: 0,
            attempts: 0,
            untimed: 0,
            runs: 0,
            measured: false,
            tally: Tally::default(),
            in_flight: 0,
            seen: 0,
            starts: None,
            due: 0,
            progress_ops: 0,
            silent_since: 0,
            record,
            latency,
            value,
        })
    }

    /// Called at the start of a run.
    pub(super) fn start(&mut self, measured: bool) -> Result<(), Error> {
        self.runs += 1;
        self.record.start_run();
        (self.measured, self.in_flight, self.progress_ops) = (measured, 0, 0);
        let Task { rank, client, rate, .. } = self.task;
        let seed = self.task.workload.seed.wrapping_add(self.runs);
        self.starts = rate.map(|rate| Schedule::new(seed, rank, client, rate)).transpose()?;
        self.tally = Tally { begun: now(), ..Tally::default() };
        (self.seen, self.silent_since) = (self.tally.begun, self.tally.begun);
        self.next_start();
        Ok(())
    }

    /// Polls for responses and starts the operations that are due. Never waits.
    #[inline]
    pub(super) fn step(&mut self) -> Step {
        if self.starts.is_some() { self.step_open_loop() } else { self.step_closed_loop() }
    }

    /// Closed loop: keeps `depth` operations in flight.
    #[inline]
    fn step_closed_loop(&mut self) -> Step {
        let ended = self.poll();
        while self.in_flight < self.task.depth && !self.tally.gave_up {
            let start = if self.task.depth == 1 {
                self.seen
            } else if self.untimed == 0 {
                self.untimed = SAMPLE_EVERY;
                now()
            } else {
                0
            };
            if !self.begin(start) {
                break;
            }
            self.untimed = self.untimed.saturating_sub(1);
        }
        if ended > 0 { Step::Completed } else { Step::Waiting }
    }

    /// Open loop: starts operations at their intended times. With `depth` in flight they start late, and the delay counts as latency.
    fn step_open_loop(&mut self) -> Step {
        let ended = self.poll();
        let time = now();
        while self.due <= time && self.in_flight < self.task.depth && !self.tally.gave_up {
            if !self.begin(self.due) {
                break;
            }
            self.next_start();
        }
        let early = self.due.saturating_sub(time);
        if ended > 0 {
            Step::Completed
        } else if self.in_flight == self.task.depth
            || (self.in_flight > 0 && early > 2 * SPIN_BEFORE_START_NS)
        {
            Step::Waiting
        } else if early > 2 * SPIN_BEFORE_START_NS {
            Step::IdleFor(early - SPIN_BEFORE_START_NS)
        } else {
            Step::StartDue
        }
    }

    fn next_start(&mut self) {
        if let Some(starts) = &mut self.starts {
            self.due = self.tally.begun.saturating_add(starts.next().unwrap_or(u64::MAX));
        }
    }

    /// Whether the client has ended the run by itself.
    #[inline]
    pub(super) fn has_given_up(&self) -> bool {
        self.tally.gave_up
    }

    /// Gives up if no response came for too long. The loop calls it regularly.
    pub(super) fn check_timeout(&mut self, time: u64) {
        if self.in_flight == 0 || self.tally.ops != self.progress_ops {
            (self.progress_ops, self.silent_since) = (self.tally.ops, time);
        } else if time.saturating_sub(self.silent_since) > RESPONSE_TIMEOUT.as_nanos() as u64 {
            self.tally.gave_up = true;
        }
    }

    /// Ends the run: no more operations start.
    pub(super) fn stop(&mut self) {
        let end = now();
        if let Some(rate) = self.task.rate
            && self.starts.take().is_some()
            && self.due <= end
        {
            self.tally.not_started = ((end - self.due) as f64 / 1e9 * rate) as u64 + 1;
        }
        self.tally.ended = end;
    }

    pub(super) fn is_open_loop(&self) -> bool {
        self.starts.is_some()
    }

    /// Where responses are expected.
    pub(super) fn sources(&self) -> impl Iterator<Item = &dyn Waitable> + Clone {
        self.client.sources()
    }

    /// Lets the next poll find every response that has arrived.
    pub(super) fn find_responses(&mut self) {
        self.client.wait(Some(Duration::ZERO));
    }

    /// Polls after the end of a run; `None` if nothing is in flight any more.
    pub(super) fn drain(&mut self) -> Option<Step> {
        if self.in_flight == 0 {
            return None;
        }
        let ended = self.poll();
        if self.in_flight == 0 {
            self.tally.ended = now();
        }
        Some(if ended > 0 { Step::Completed } else { Step::Waiting })
    }

    /// What the client did in the run. Operations still in flight count as errors.
    pub(super) fn tally(&mut self) -> Tally {
        let lost = std::mem::take(&mut self.in_flight) as u64;
        self.tally.errors += lost;
        self.tally.ops += lost;
        if lost > 0 {
            self.tally.ended = now();
        }
        self.tally
    }

    /// Starts the next operation; false if that is not possible now, or not at all.
    #[inline]
    fn begin(&mut self, start: u64) -> bool {
        let entry = self.pattern.at(self.position);
        // A value contains its key, so that a get can be checked. If histories are recorded, the value is unique instead: it contains
        // the client and the attempt. A request that found the client full is tried again, so that the mix stays as planned; its value
        // differs.
        let value = if R::UNIQUE {
            (u64::from(self.task.number) + 1) << 40 | self.attempts
        } else {
            self.position << 32 | u64::from(entry.key)
        };
        self.attempts += 1;
        let request = entry.request(value);
        let Some(pending) = self.record.begin(&request) else {
            self.tally.gave_up = true;
            return false;
        };
        let token = Token { start, pending, key: entry.key, is_read: entry.is_read };
        let begun = match &mut self.value {
            None => self.client.begin(request, token).map_err(BeginBytesError::from),
            Some(value) => begin_bytes_op(&mut self.client, entry, value, token),
        };
        match begun {
            Ok(()) => {
                self.position += 1;
                self.in_flight += 1;
                true
            }
            Err(BeginBytesError::Full(_)) => false,
            Err(BeginBytesError::ServerGone(_)) => {
                self.tally.gave_up = true;
                false
            }
            // Refused, or an error that a later version of the client adds.
            Err(_) => {
                self.tally.ops += 1;
                self.tally.errors += 1;
                self.tally.gave_up = true;
                false
            }
        }
    }

    /// Polls for responses and checks them.
    #[inline]
    fn poll(&mut self) -> usize {
        let Worker { client, record, latency, tally, measured, value, .. } = self;
        let mut time = 0;
        let mut end = |token: Token<R::Pending>, response: WordResponse, is_right: bool| {
            if token.start != 0 {
                if time == 0 {
                    time = now();
                }
                if *measured {
                    latency.record(time.saturating_sub(token.start));
                }
            }
            match response.status {
                Status::Done if R::UNIQUE || !token.is_read || is_right => {}
                Status::NodeGone => {
                    tally.node_gone += 1;
                    tally.gave_up = true;
                }
                _ => tally.errors += 1,
            }
            record.end(token.pending, &response);
        };
        let ended = match value {
            None => client.poll(|token, response| {
                let is_right = response.value as u32 == token.key;
                end(token, response, is_right);
            }),
            Some(value) => client.poll_bytes(|token, response| {
                let is_right = token.is_read && is_value_of(token.key, &response, value.len());
                end(token, WordResponse::new(response.status, 0), is_right);
            }),
        };
        if time != 0 {
            self.seen = time;
        }
        self.tally.ops += ended as u64;
        // More responses than operations come only if an earlier run timed out.
        self.in_flight = self.in_flight.saturating_sub(ended);
        ended
    }
}

/// Starts an operation on a byte string. A put's value begins with its key.
#[inline(never)]
fn begin_bytes_op<T>(
    client: &mut Client<T>,
    entry: Entry,
    value: &mut [u8],
    token: T,
) -> Result<(), BeginBytesError<T>> {
    let key = key_bytes(u64::from(entry.key));
    if entry.is_read {
        return client.begin_bytes(BytesOp::Get { key: &key }, token);
    }
    write_key_prefix(value, &key);
    client.begin_bytes(BytesOp::Put { key: &key, value }, token)
}

/// Writes the key to the beginning of a value, as far as the value is long enough.
pub(super) fn write_key_prefix(value: &mut [u8], key: &[u8; 8]) {
    let len = value.len().min(key.len());
    value[..len].copy_from_slice(&key[..len]);
}

/// Whether a value has the right length and begins with this key.
fn is_value_of(key: u32, response: &wire::BytesResponse<'_>, len: usize) -> bool {
    let key = key_bytes(u64::from(key));
    let common = len.min(key.len());
    response.value.len() == len && response.value[..common] == key[..common]
}
