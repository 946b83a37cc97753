//! A daemon's loop.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crosstie::{Waitable, Wakeup, park_any, yield_core};

use super::commands::{ConnectionCommand, ConnectionEvent, MAX_COMMANDS};
use super::counters::DaemonCounters;
use super::idle::{IdleAction, IdleBackoff};
use super::shard_server::ShardServer;
use super::shared::Shared;
use super::transport::Transport;

/// Passes between checks for byte-string requests, when there were none recently.
const BYTES_PASSES: u64 = 16;
/// Passes between checks of everything that is rare.
const RARE_PASSES: u64 = 1024;
/// Time between two publications of the counters.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(5);

/// A daemon. With `FORWARDS`, daemons of the node forward requests to each other.
pub(super) struct Daemon<T, const FORWARDS: bool> {
    server: ShardServer,
    transport: T,
    idle: IdleBackoff,
    commands: Receiver<ConnectionCommand>,
    shared: Arc<Shared>,
    last_published: Instant,
    /// `busy_passes` as of the last publication.
    published_busy_passes: u64,
}

impl<T: Transport, const FORWARDS: bool> Daemon<T, FORWARDS> {
    pub(super) fn new(
        server: ShardServer,
        transport: T,
        idle: IdleBackoff,
        commands: Receiver<ConnectionCommand>,
        shared: Arc<Shared>,
    ) -> Daemon<T, FORWARDS> {
        Daemon {
            server,
            transport,
            idle,
            commands,
            shared,
            last_published: Instant::now(),
            published_busy_passes: 0,
        }
    }

    /// Runs until the node stops.
    pub(super) fn run(mut self) {
        let mut passes = 0u64;
        loop {
            passes += 1;
            let mut done = self.transport.poll(&mut self.server);
            done += self.server.serve_clients(&mut self.transport);
            if FORWARDS {
                done += self.server.serve_daemons(&mut self.transport);
            }
            if passes.is_multiple_of(BYTES_PASSES) || self.server.bytes.is_busy() {
                done += self.server.serve_bytes(&mut self.transport);
            }
            if passes.is_multiple_of(RARE_PASSES) {
                self.server.activity.passes = passes;
                if self.do_rare_work() {
                    break;
                }
            }
            if done > 0 {
                self.server.activity.busy_passes += 1;
                self.idle.reset();
                continue;
            }
            match self.idle.next_action() {
                IdleAction::Spin => std::hint::spin_loop(),
                IdleAction::Yield => self.idle.record_yield(yield_core()),
                IdleAction::Sleep => {
                    self.server.activity.passes = passes;
                    if self.sleep() {
                        break;
                    }
                }
            }
        }
        self.publish_counters();
    }

    /// Sleeps, unless there is something to do after all. Every way into the daemon wakes it: requests of clients (8-byte keys, byte
    /// strings, the ring), messages of other daemons and other nodes, commands, and the end of the node. Returns whether to stop.
    #[cold]
    fn sleep(&mut self) -> bool {
        if self.do_rare_work() {
            return true;
        }
        if self.server.serve_bytes(&mut self.transport) > 0 {
            self.server.activity.busy_passes += 1;
            self.idle.reset();
            return false;
        }
        self.server.activity.sleeps += 1;
        if self.server.activity.busy_passes != self.published_busy_passes {
            self.publish_counters();
        }
        let ShardServer { words, bytes, forwarder, id, .. } = &self.server;
        let wake_flag = &self.shared.wake_flags[id.daemon as usize];
        let has_backlog = self.transport.has_backlog() || forwarder.has_backlog();
        let [network, ring] = self.transport.sources();
        let forwarder: Option<&dyn Waitable> = if FORWARDS { Some(&forwarder.node) } else { None };
        let sources =
            [Some(words as &dyn Waitable), Some(&bytes.server), Some(wake_flag), forwarder, network, ring];
        let wakeup = park_any(sources.into_iter().flatten(), self.idle.sleep_time(has_backlog));
        // What the flag announces is handled before the next sleep, which checks the flag again.
        wake_flag.take();
        match wakeup {
            Wakeup::Ready => self.idle.record_ready(),
            Wakeup::Notified => self.server.activity.wakeups += 1,
            Wakeup::TimedOut => {}
        }
        // Byte strings are checked in few passes only.
        if self.server.serve_bytes(&mut self.transport) > 0 {
            self.server.activity.busy_passes += 1;
            self.idle.reset();
        }
        false
    }

    /// Executes commands of the control plane, checks connections and publishes counters. Returns whether to stop.
    #[cold]
    fn do_rare_work(&mut self) -> bool {
        if self.shared.is_stopping() {
            return true;
        }
        // The channel holds no more. Later ones are executed at the next time.
        for command in self.commands.try_iter().take(MAX_COMMANDS) {
            if let Some(event) = self.transport.execute_command(command, &mut self.server) {
                self.shared.send_event(event);
            }
        }
        let shared = &self.shared;
        self.transport.check_connections(&mut self.server, |event: ConnectionEvent| shared.send_event(event));
        if FORWARDS {
            self.server.fail_lost_forwards();
        }
        if self.last_published.elapsed() >= PUBLISH_INTERVAL {
            self.publish_counters();
        }
        false
    }

    fn publish_counters(&mut self) {
        self.last_published = Instant::now();
        self.published_busy_passes = self.server.activity.busy_passes;
        let (network, ring) = self.transport.counters();
        let mut activity = self.server.activity;
        activity.undelivered += self.server.bytes.undelivered();
        let counters = DaemonCounters {
            activity,
            shard: self.server.shard.stats(),
            words: self.server.words.counters(),
            bytes: self.server.bytes.counters(),
            ring,
            network,
        };
        // If somebody is reading the old counters, these are skipped and the next ones are published.
        if let Ok(mut published) = self.shared.counters[self.server.id.daemon as usize].try_lock() {
            *published = counters;
        }
    }
}
