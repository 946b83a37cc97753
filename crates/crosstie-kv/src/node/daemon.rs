//! A daemon's loop.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::Shared;
use super::counters::DaemonCounters;
use super::idle::{Idle, Rest, shortened};
use super::inside::Inside;
use super::network::{Command, Event, Way};

/// Passes between looks at requests in bytes, if there were none the last time.
const LONG_PASSES: u64 = 16;
/// Passes between looks at everything that is rare.
const RARE_PASSES: u64 = 1024;
/// Time between two publications of counters.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(5);

/// `FLUX`: there are other daemons to talk to.
pub(super) struct Daemon<W, const FLUX: bool> {
    inside: Inside,
    way: W,
    idle: Idle,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    published: Instant,
}

impl<W: Way, const FLUX: bool> Daemon<W, FLUX> {
    pub(super) fn new(
        inside: Inside,
        way: W,
        idle: Idle,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Daemon<W, FLUX> {
        Daemon { inside, way, idle, commands, shared, published: Instant::now() }
    }

    /// Until the node is told to stop.
    pub(super) fn run(mut self) {
        let mut passes = 0u64;
        loop {
            passes += 1;
            let mut done = self.way.turn(&mut self.inside);
            done += self.inside.serve_clients(&mut self.way);
            if FLUX {
                done += self.inside.serve_daemons(&mut self.way);
            }
            if passes.is_multiple_of(LONG_PASSES) || self.inside.long.is_busy() {
                done += self.inside.serve_long(&mut self.way);
            }
            if passes.is_multiple_of(RARE_PASSES) {
                self.inside.counts.passes = passes;
                if self.see_to_the_rare() {
                    break;
                }
            }
            if done > 0 {
                self.inside.counts.busy_passes += 1;
                self.idle.reset();
                continue;
            }
            match self.idle.next() {
                Rest::Spin => std::hint::spin_loop(),
                Rest::Yield => {
                    let before = Instant::now();
                    std::thread::yield_now();
                    self.idle.yielded(before.elapsed());
                }
                Rest::Nap(nap) => {
                    self.inside.counts.passes = passes;
                    if self.nap(nap) {
                        break;
                    }
                }
            }
        }
        self.publish();
    }

    /// Sleeps, unless there is something to do after all; a client that asks ends it. Says whether to stop.
    #[cold]
    fn nap(&mut self, nap: Duration) -> bool {
        if self.see_to_the_rare() {
            return true;
        }
        if self.inside.serve_long(&mut self.way) > 0 {
            self.idle.reset();
            return false;
        }
        self.inside.counts.sleeps += 1;
        let waits = self.way.in_flight() || self.inside.passing.in_flight();
        self.inside.words.wait(Some(if waits { shortened(nap) } else { nap }));
        false
    }

    /// Says whether to stop.
    #[cold]
    fn see_to_the_rare(&mut self) -> bool {
        if self.shared.is_stopping() {
            return true;
        }
        while let Ok(command) = self.commands.try_recv() {
            if let Some(event) = self.way.command(command, &mut self.inside) {
                self.shared.tell(event);
            }
        }
        let shared = &self.shared;
        self.way.tend(&mut self.inside, |event: Event| shared.tell(event));
        if FLUX {
            self.inside.end_lost(&mut self.way);
        }
        if self.published.elapsed() >= PUBLISH_INTERVAL {
            self.publish();
        }
        false
    }

    fn publish(&mut self) {
        self.published = Instant::now();
        let (network, ring) = self.way.counters();
        let mut counts = self.inside.counts;
        counts.undelivered += self.inside.long.undelivered();
        let counters = DaemonCounters {
            activity: counts,
            shard: self.inside.shard.stats(),
            words: self.inside.words.counters(),
            bytes: self.inside.long.counters(),
            ring,
            network,
        };
        // Who reads them right now sees the next ones.
        if let Ok(mut place) = self.shared.board[self.inside.place.daemon as usize].try_lock() {
            *place = counters;
        }
    }
}
