//! One client at work: what is measured, and nothing else in the way of it.
//!
//! A client never waits: a [turn](Worker::turn) takes the answers that are there and begins what is due, and
//! [`turns`](super::client_loop) has one thread give its clients their turns. Requests come from a pattern that was made before,
//! answers are all looked at, and nothing is allocated, locked or printed while time is taken.
//!
//! In a closed loop with one operation at a time, all are timed, with one reading of the clock for each: the end of one is the
//! start of the client's next, and if its thread is with another client then, that time counts. With more at a time, one in [`SAMPLE_EVERY`] is: a reading for each would slow them all. In an open loop all are
//! timed, from when they should have started.

use std::time::Duration;

use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

use crate::history::{Pending, Recorder, now};
use crate::workload::{self, Entry, Pattern, Schedule, key_bytes};
use crosstie_kv::client::{BeginBytesError, Client};
use crosstie_kv::wire::{self, BytesOp, Status, WordRequest, WordResponse};

/// One operation in so many is timed where several are under way. Odd, so that it is not always the same part of a pattern.
pub const SAMPLE_EVERY: u64 = 17;
/// After so long without an answer nobody waits any more.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client sleeps at most that waits for its next start: short enough to notice the end.
pub(super) const MAX_SLEEP: Duration = Duration::from_millis(10);
/// What values that are byte strings consist of, behind their key.
pub(super) const FILLER: u8 = 0xab;
/// A start so close is awaited by spinning, in nanoseconds.
const SPIN_BEFORE_START_NS: u64 = 100_000;

/// What a client is told before anything else.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    /// The node to attach to.
    pub(super) node: String,
    pub(super) rank: u32,
    /// Among the clients of its node.
    pub(super) client: u32,
    /// Among all clients.
    pub(super) number: u32,
    pub(super) workload: workload::Plan,
    pub(super) depth: usize,
    /// Operations per second of this client, in an open loop.
    pub(super) rate: Option<f64>,
    /// Operations that are recorded in each run at most, where they are, and runs.
    pub(super) recorded: Option<(usize, usize)>,
    /// Where its thread stays.
    pub(super) core: Option<usize>,
    /// Rounds without an answer in which its thread spins; 0 where that has no core to itself, and lets others run at once.
    pub(super) spins: u32,
}

/// What a client did in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Of the machine's monotonic clock, in nanoseconds.
    pub(super) begun: u64,
    pub(super) ended: u64,
    /// Operations that ended, errors and those without a node among them.
    pub(super) ops: u64,
    pub(super) errors: u64,
    pub(super) node_gone: u64,
    /// Operations of an open loop that should have started and did not.
    pub(super) not_started: u64,
    /// Whether the client ended the run of its own accord.
    pub(super) gave_up: bool,
}

/// What a turn came to. Of the turns of several clients the least says what their thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// Answers came.
    Completed,
    /// None came; a start is close.
    StartDue,
    /// None came; operations are under way, and no start is close.
    Waiting,
    /// Nothing is under way, and nothing will be for so many nanoseconds.
    IdleFor(u64),
}

/// Writes down what is asked and answered, or does not.
pub(super) trait Recording {
    type Pending;
    /// `None`: there is no more room in this run.
    fn begin(&mut self, request: &WordRequest) -> Option<Self::Pending>;
    fn end(&mut self, pending: Self::Pending, response: &WordResponse);
    /// A run begins.
    fn start_run(&mut self) {}
    /// Whether puts must write values that nobody else writes.
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

/// A recorder with room for each run.
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

/// What comes back with an answer.
struct Token<M> {
    /// When it was, or should have been, begun; 0 if nobody wants to know.
    start: u64,
    pending: M,
    key: u32,
    is_read: bool,
}

/// A client with all that it needs.
pub(super) struct Worker<R: Recording> {
    task: Task,
    client: Client<Token<R::Pending>>,
    pattern: Pattern,
    /// Requests so far, which is where it is in the pattern.
    position: u64,
    /// Until the next operation that is timed.
    untimed: u64,
    /// Runs so far.
    runs: u64,
    /// Of this run.
    measured: bool,
    tally: Tally,
    in_flight: usize,
    /// When an answer was last seen, where that is of interest: with one operation at a time, the start of the next.
    seen: u64,
    /// In an open loop, when operations start, and the next one's time.
    starts: Option<Schedule>,
    due: u64,
    /// Operations that had ended, and the time, when somebody last looked and saw that some had.
    answered: u64,
    silent_since: u64,
    pub(super) record: R,
    /// Of measured runs.
    pub(super) latency: Histogram,
    /// Where keys and values are byte strings, what puts write; its first bytes are the key's.
    value: Option<Box<[u8]>>,
}

impl<R: Recording> Worker<R> {
    /// Attaches to the node, and makes everything in advance.
    pub(super) fn new(task: Task, record: R) -> Result<Worker<R>, super::Error> {
        if let Some(core) = task.core {
            super::topology::pin_thread(core)?;
        }
        let mut client = Client::attach_pipelined(&task.node)?;
        let value = (!task.workload.has_words()).then(|| vec![FILLER; task.workload.value_size].into());
        if value.is_some() {
            // The first byte string at a daemon connects, which takes time.
            for daemon in 0..client.info().daemons {
                client.stats(task.rank, daemon).map_err(super::Error::Strings)?;
            }
        }
        let pattern = task.workload.pattern(&client.shard_map(), task.rank, task.client)?;
        let latency = Histogram::new();
        Ok(Worker {
            task,
            client,
            pattern,
            position: 0,
            untimed: 0,
            runs: 0,
            measured: false,
            tally: Tally::default(),
            in_flight: 0,
            seen: 0,
            starts: None,
            due: 0,
            answered: 0,
            silent_since: 0,
            record,
            latency,
            value,
        })
    }

    /// A run begins.
    pub(super) fn start(&mut self, measured: bool) -> Result<(), super::Error> {
        self.runs += 1;
        self.record.start_run();
        (self.measured, self.in_flight, self.answered) = (measured, 0, 0);
        let Task { rank, client, rate, .. } = self.task;
        let seed = self.task.workload.seed.wrapping_add(self.runs);
        self.starts = rate.map(|rate| Schedule::new(seed, rank, client, rate)).transpose()?;
        self.tally = Tally { begun: now(), ..Tally::default() };
        (self.seen, self.silent_since) = (self.tally.begun, self.tally.begun);
        self.next_start();
        Ok(())
    }

    /// Takes the answers that are there, and begins what is due. Never waits.
    #[inline]
    pub(super) fn step(&mut self) -> Step {
        if self.starts.is_some() { self.step_open_loop() } else { self.step_closed_loop() }
    }

    /// As many operations as allowed are always under way.
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

    /// Operations start when they should, unless too many are under way; then they start late, and it counts.
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

    /// Whether it ended the run of its own accord.
    #[inline]
    pub(super) fn has_given_up(&self) -> bool {
        self.tally.gave_up
    }

    /// Gives up if nothing was answered for too long. To be called now and then.
    pub(super) fn check_timeout(&mut self, time: u64) {
        if self.in_flight == 0 || self.tally.ops != self.answered {
            (self.answered, self.silent_since) = (self.tally.ops, time);
        } else if time.saturating_sub(self.silent_since) > RESPONSE_TIMEOUT.as_nanos() as u64 {
            self.tally.gave_up = true;
        }
    }

    /// The run is over: nothing is begun any more.
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

    /// A turn after the end, for what is still under way; `None` if nothing is.
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

    /// What it did. What has not ended by now is an error.
    pub(super) fn tally(&mut self) -> Tally {
        let lost = std::mem::take(&mut self.in_flight) as u64;
        self.tally.errors += lost;
        self.tally.ops += lost;
        if lost > 0 {
            self.tally.ended = now();
        }
        self.tally
    }

    /// Begins the next operation; false if that is not possible now, or not at all.
    #[inline]
    fn begin(&mut self, start: u64) -> bool {
        let entry = self.pattern.at(self.position);
        // A value tells which key it is of, or, where histories are recorded, who wrote it; one who tries again
        // takes another.
        let value = if R::UNIQUE {
            (u64::from(self.task.number) + 1) << 40 | self.position
        } else {
            self.position << 32 | u64::from(entry.key)
        };
        let request = entry.request(value);
        let Some(pending) = self.record.begin(&request) else {
            self.tally.gave_up = true;
            return false;
        };
        let token = Token { start, pending, key: entry.key, is_read: entry.is_read };
        let begun = match &mut self.value {
            None => self.client.begin(request, token).map_err(BeginBytesError::from),
            Some(value) => begin_string(&mut self.client, entry, value, token),
        };
        match begun {
            Ok(()) => {
                self.position += 1;
                self.in_flight += 1;
                true
            }
            Err(BeginBytesError::Full(_)) => {
                self.position += 1;
                false
            }
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

    /// Looks at the answers that are there.
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
        // More only if an earlier run did not wait for the last ones any longer.
        self.in_flight = self.in_flight.saturating_sub(ended);
        ended
    }
}

/// Begins an operation on a byte string. What a put writes starts with its key.
#[inline(never)]
fn begin_string<T>(
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

/// Has a value begin with its key, as far as it is long enough.
pub(super) fn write_key_prefix(value: &mut [u8], key: &[u8; 8]) {
    let len = value.len().min(key.len());
    value[..len].copy_from_slice(&key[..len]);
}

/// Whether a value is as long as all are, and begins with this key.
fn is_value_of(key: u32, response: &wire::BytesResponse<'_>, len: usize) -> bool {
    let key = key_bytes(u64::from(key));
    let common = len.min(key.len());
    response.value.len() == len && response.value[..common] == key[..common]
}
