//! One client at work: what is measured, and nothing else in the way of it.
//!
//! Requests come from a pattern that was made before, answers are all looked at, and nothing is allocated, locked or printed while
//! time is taken. Somebody else watches the time and sets a flag when it is over.
//!
//! In a closed loop with one operation at a time, all are timed, with one reading of the clock for each: the end of one is the
//! start of the next. With more at a time, one in [`TIMED`] is: a reading for each would slow them all. In an open loop all are
//! timed, from when they should have started.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};

use crate::client::{BeginError, Client, Error};
use crate::history::{Pending, Recorder, now};
use crate::message::{Request, Response, Status};
use crate::workload::{self, Entry, Pattern, Schedule, key_bytes};

/// One operation in so many is timed where several are under way. Odd, so that it is not always the same part of a pattern.
pub const TIMED: u64 = 17;
/// After so long without an answer nobody waits any more.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a client sleeps at a time when it waits for its last answers, or for the next start.
const NAP: Duration = Duration::from_millis(1);
/// How long a client sleeps at a time that has waited for a while, and does not know for how long.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// A yield that takes so many nanoseconds went to somebody who does not yield.
const TAKEN: u64 = 500_000;
/// A start so close is awaited by spinning.
const CLOSE: u64 = 100_000;
/// Turns without an answer in which a client that has no core to itself lets others run, before it sleeps.
const YIELDS: u32 = 256;

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
    /// Where it stays.
    pub(super) core: Option<usize>,
    /// Turns without an answer in which it spins; 0 where it has no core to itself, and lets others run at once.
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

/// Writes down what is asked and answered, or does not.
pub(super) trait Recording {
    type Mark;
    /// `None`: there is no more room in this run.
    fn begin(&mut self, request: &Request) -> Option<Self::Mark>;
    fn end(&mut self, mark: Self::Mark, response: &Response);
    /// A run begins.
    fn refresh(&mut self) {}
    /// Whether puts must write values that nobody else writes.
    const UNIQUE: bool;
}

impl Recording for () {
    type Mark = ();
    const UNIQUE: bool = false;

    #[inline]
    fn begin(&mut self, _: &Request) -> Option<()> {
        Some(())
    }

    #[inline]
    fn end(&mut self, (): (), _: &Response) {}
}

/// A recorder with room for each run.
pub(super) struct Ration {
    pub(super) recorder: Recorder,
    each: usize,
    left: usize,
}

impl Ration {
    pub(super) fn new(number: u32, each: usize, runs: usize) -> Ration {
        Ration { recorder: Recorder::new(number, each * runs), each, left: each }
    }
}

impl Recording for Ration {
    type Mark = Pending;
    const UNIQUE: bool = true;

    fn begin(&mut self, request: &Request) -> Option<Pending> {
        self.left = self.left.checked_sub(1)?;
        self.recorder.begin(request)
    }

    fn end(&mut self, mark: Pending, response: &Response) {
        self.recorder.end(mark, response);
    }

    fn refresh(&mut self) {
        self.left = self.each;
    }
}

/// What comes back with an answer.
struct Token<M> {
    /// When it was, or should have been, begun; 0 if nobody wants to know.
    start: u64,
    mark: M,
    key: u32,
    is_read: bool,
}

/// A client with all that it needs.
pub(super) struct Worker<R: Recording> {
    task: Task,
    client: Client<Token<R::Mark>>,
    pattern: Pattern,
    /// Requests so far, which is where it is in the pattern.
    position: u64,
    /// Until the next operation that is timed.
    untimed: u64,
    /// Runs so far.
    runs: u64,
    /// When it first gave way after the last answer.
    silent_since: u64,
    pub(super) record: R,
    /// Of measured runs.
    pub(super) latency: Histogram,
    value: Vec<u8>,
}

impl<R: Recording> Worker<R> {
    /// Attaches to the node, and makes everything in advance.
    pub(super) fn new(task: Task, record: R) -> Result<Worker<R>, super::Error> {
        if let Some(core) = task.core {
            super::place::pin(core)?;
        }
        let client = Client::pipelined(&task.node)?;
        let pattern = task.workload.pattern(&client.placement(), task.rank, task.client)?;
        let value = vec![0xab; task.workload.value_size];
        let latency = Histogram::new();
        Ok(Worker {
            task,
            client,
            pattern,
            position: 0,
            untimed: 0,
            runs: 0,
            silent_since: 0,
            record,
            latency,
            value,
        })
    }

    /// Works until `stop`, or until there is a reason to.
    pub(super) fn run(&mut self, measured: bool, stop: &AtomicBool) -> Result<Tally, super::Error> {
        self.runs += 1;
        self.record.refresh();
        let schedule = match self.task.rate {
            Some(rate) => {
                let Task { rank, client, .. } = self.task;
                Some(Schedule::new(self.task.workload.seed.wrapping_add(self.runs), rank, client, rate)?)
            }
            None => None,
        };
        let mut tally = Tally { begun: now(), ..Tally::default() };
        match schedule {
            _ if !self.task.workload.has_words() => self.strings(schedule, measured, stop, &mut tally),
            Some(schedule) => self.open(schedule, measured, stop, &mut tally),
            None => self.closed(measured, stop, &mut tally),
        }
        tally.ended = now();
        Ok(tally)
    }

    /// As many operations as allowed are always under way.
    fn closed(&mut self, measured: bool, stop: &AtomicBool, tally: &mut Tally) {
        let alone = self.task.depth == 1;
        let (mut in_flight, mut idle, mut last) = (0, 0, tally.begun);
        while !tally.gave_up && !stop.load(Relaxed) {
            while in_flight < self.task.depth {
                let start = if alone {
                    last
                } else if self.untimed == 0 {
                    self.untimed = TIMED;
                    now()
                } else {
                    0
                };
                if !self.begin(start, tally) {
                    break;
                }
                self.untimed = self.untimed.saturating_sub(1);
                in_flight += 1;
            }
            let ended = self.poll(measured, &mut last, tally);
            in_flight -= ended;
            self.rest(ended, &mut idle, tally);
        }
        self.drain(in_flight, measured, tally);
    }

    /// Operations start when they should, unless too many are under way; then they start late, and it counts.
    fn open(&mut self, mut starts: Schedule, measured: bool, stop: &AtomicBool, tally: &mut Tally) {
        let begun = tally.begun;
        let mut next = || begun.saturating_add(starts.next().unwrap_or(u64::MAX));
        let (mut start, mut in_flight, mut idle, mut seen) = (next(), 0, 0, begun);
        while !tally.gave_up && !stop.load(Relaxed) {
            let time = now();
            while start <= time && in_flight < self.task.depth {
                if !self.begin(start, tally) {
                    break;
                }
                in_flight += 1;
                start = next();
            }
            let ended = self.poll(measured, &mut seen, tally);
            in_flight -= ended;
            let early = start.saturating_sub(time);
            if ended > 0 {
                idle = 0;
            } else if in_flight == self.task.depth || (in_flight > 0 && early > 2 * CLOSE) {
                self.rest(0, &mut idle, tally);
            } else if in_flight == 0 && early > 2 * CLOSE {
                // Short enough to notice the end.
                std::thread::sleep(Duration::from_nanos(early - CLOSE).min(10 * NAP));
            } else if self.task.spins == 0 {
                std::thread::yield_now();
            } else {
                spin_loop();
            }
        }
        let end = now();
        if start <= end {
            tally.not_started = ((end - start) as f64 / 1e9 * self.task.rate.unwrap_or(0.0)) as u64 + 1;
        }
        self.drain(in_flight, measured, tally);
    }

    /// Byte strings, one at a time.
    fn strings(
        &mut self,
        mut starts: Option<Schedule>,
        measured: bool,
        stop: &AtomicBool,
        tally: &mut Tally,
    ) {
        let mut start = tally.begun;
        while !stop.load(Relaxed) {
            if let Some(starts) = &mut starts {
                start = tally.begun.saturating_add(starts.next().unwrap_or(u64::MAX));
                while now() < start && !stop.load(Relaxed) {
                    let early = Duration::from_nanos(start.saturating_sub(now()));
                    std::thread::sleep(early.min(10 * NAP));
                }
                if stop.load(Relaxed) {
                    return;
                }
            }
            let entry = self.pattern.at(self.position);
            self.position += 1;
            let answer = self.exchange(entry);
            let end = now();
            tally.ops += 1;
            match answer {
                Ok(true) => {}
                Ok(false) => tally.errors += 1,
                Err(Error::NodeGone { .. } | Error::ServerGone) => {
                    tally.node_gone += 1;
                    tally.gave_up = true;
                    return;
                }
                Err(_) => tally.errors += 1,
            }
            if measured {
                self.latency.record(end.saturating_sub(start));
            }
            start = end;
        }
    }

    /// Whether the answer is right.
    fn exchange(&mut self, entry: Entry) -> Result<bool, Error> {
        let key = key_bytes(u64::from(entry.key));
        let len = self.value.len().min(key.len());
        if entry.is_read {
            let value = self.client.get_bytes(&key)?;
            let right = |value: Vec<u8>| value.len() == self.value.len() && value[..len] == key[..len];
            return Ok(value.is_some_and(right));
        }
        self.value[..len].copy_from_slice(&key[..len]);
        self.client.put_bytes(&key, &self.value)?;
        Ok(true)
    }

    /// Begins the next operation; false if that is not possible now, or not at all.
    #[inline]
    fn begin(&mut self, start: u64, tally: &mut Tally) -> bool {
        let entry = self.pattern.at(self.position);
        // A value tells which key it is of, or, where histories are recorded, who wrote it; one who tries again
        // takes another.
        let value = if R::UNIQUE {
            (u64::from(self.task.number) + 1) << 40 | self.position
        } else {
            self.position << 32 | u64::from(entry.key)
        };
        let request = entry.request(value);
        let Some(mark) = self.record.begin(&request) else {
            tally.gave_up = true;
            return false;
        };
        let token = Token { start, mark, key: entry.key, is_read: entry.is_read };
        match self.client.begin(request, token) {
            Ok(()) => {
                self.position += 1;
                true
            }
            Err(BeginError::Full(_)) => {
                self.position += 1;
                false
            }
            Err(BeginError::ServerGone(_)) => {
                tally.gave_up = true;
                false
            }
        }
    }

    /// Looks at the answers that are there. `seen` becomes the time, if somebody wants to know it.
    #[inline]
    fn poll(&mut self, measured: bool, seen: &mut u64, tally: &mut Tally) -> usize {
        let Worker { client, record, latency, .. } = self;
        let mut time = 0;
        let ended = client.poll(|token, response| {
            if token.start != 0 {
                if time == 0 {
                    time = now();
                }
                if measured {
                    latency.record(time.saturating_sub(token.start));
                }
            }
            match response.status {
                Status::Done if R::UNIQUE || !token.is_read || response.value as u32 == token.key => {}
                Status::NodeGone => {
                    tally.node_gone += 1;
                    tally.gave_up = true;
                }
                _ => tally.errors += 1,
            }
            record.end(token.mark, &response);
        });
        if time != 0 {
            *seen = time;
        }
        tally.ops += ended as u64;
        ended
    }

    /// After a look for answers that found `ended`.
    #[inline]
    fn rest(&mut self, ended: usize, idle: &mut u32, tally: &mut Tally) {
        if ended > 0 {
            *idle = 0;
        } else if *idle < self.task.spins {
            *idle += 1;
            spin_loop();
        } else {
            self.give_way(idle, tally);
        }
    }

    #[cold]
    fn give_way(&mut self, idle: &mut u32, tally: &mut Tally) {
        let yields = *idle - self.task.spins;
        if yields == 0 {
            self.silent_since = now();
        }
        if yields < YIELDS {
            let before = now();
            std::thread::yield_now();
            // Who got the core for so long does not give it back: one that sleeps and wakes gets it sooner.
            let taken = now() - before > TAKEN;
            *idle += if taken { YIELDS - yields } else { 1 };
        } else {
            std::thread::sleep(SHORT_NAP);
            tally.gave_up |= now() - self.silent_since > PATIENCE.as_nanos() as u64;
        }
    }

    /// Waits for what is still under way. What does not end then is an error.
    fn drain(&mut self, mut in_flight: usize, measured: bool, tally: &mut Tally) {
        let (end, mut seen) = (now() + PATIENCE.as_nanos() as u64, 0);
        while in_flight > 0 && now() < end {
            let ended = self.poll(measured, &mut seen, tally);
            in_flight -= ended;
            if ended == 0 {
                self.client.wait(Some(NAP));
            }
        }
        tally.errors += in_flight as u64;
        tally.ops += in_flight as u64;
    }
}
