//! All members take locks: they think, ask, hold, release.

use crosstie_protocol::group::{Control, Event, LockOutcome, MemberSet, Token};

use super::cluster::{Cluster, Seen};
use crate::check::lock::LockChecker;
use crate::outcome::Outcome;
use crate::plan::Plan;

const ASK: u64 = 0;
const RELEASE: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
enum App {
    Thinks,
    Waits { lock: u32, since: u64 },
    Holds { lock: u32 },
    Done,
}

struct Run {
    plan: Plan,
    cluster: Cluster,
    checker: LockChecker,
    apps: Vec<App>,
    left: Vec<u64>,
    times: Vec<u64>,
    errors: u64,
    someone_died: bool,
}

pub(crate) fn run(plan: &Plan) -> Outcome {
    let mut run = Run {
        plan: *plan,
        cluster: Cluster::new(plan, MemberSet::first(plan.members)),
        checker: LockChecker::new(plan.locks),
        apps: vec![App::Thinks; plan.members],
        left: vec![plan.operations; plan.members],
        times: Vec::new(),
        errors: 0,
        someone_died: false,
    };
    if plan.partition || (plan.pauses > 0 && plan.is_lossy()) {
        // Which side a request reaches is not what first come, first served is about.
        (0..plan.locks as u32).for_each(|lock| run.checker.order_is_lost(lock));
    }
    for member in 0..plan.members {
        run.think(member);
    }
    while let Some(seen) = run.cluster.next() {
        run.see(seen);
    }
    run.finish()
}

impl Run {
    fn see(&mut self, seen: Seen) {
        match seen {
            Seen::Timer { member, what: ASK } => self.ask(member),
            Seen::Timer { member, .. } => self.release(member),
            Seen::Event(member, event) => self.event(member, event),
            Seen::Arrived { to, from, packet: Control::LockRequest { lock, .. } } => {
                let waits = matches!(self.apps[from], App::Waits { lock: asked, .. } if asked == lock);
                if to == lock as usize % self.plan.members && waits && !self.cluster.excused[from] {
                    self.checker.requested(lock, from);
                }
            }
            Seen::Arrived { .. } => {}
            Seen::Died(member) | Seen::Excused(member) => {
                self.someone_died = true;
                let lives = self.cluster.is_alive(member);
                if !lives {
                    self.apps[member] = App::Done;
                }
                for lock in 0..self.plan.locks as u32 {
                    // Who is expelled and lives may hold the lock until it learns of it.
                    if lives {
                        self.checker.gave_up(lock, member);
                    } else {
                        self.checker.lost(lock, member);
                    }
                    if lock as usize % self.plan.members == member {
                        self.checker.order_is_lost(lock);
                    }
                }
            }
        }
    }

    fn think(&mut self, member: usize) {
        self.apps[member] = App::Thinks;
        if self.left[member] == 0 {
            self.apps[member] = App::Done;
            return;
        }
        self.left[member] -= 1;
        let time = self.cluster.network.random.exponential(self.plan.latency_ns * 2);
        self.cluster.timer(member, time, ASK);
    }

    fn ask(&mut self, member: usize) {
        if self.apps[member] != App::Thinks {
            return;
        }
        let now = self.cluster.network.now;
        let lock = self.cluster.network.random.below(self.plan.locks as u64) as u32;
        let chance = if self.plan.restless { self.cluster.network.random.unit() } else { 1.0 };
        self.apps[member] = App::Waits { lock, since: now };
        // It takes its old place again, and sends no request.
        let has_place = self.cluster.has_abandoned_place(member, lock);
        let patience = self.plan.latency_ns * 10;
        let outcome = self.cluster.act(member, |group, out| match chance {
            0.0..0.2 => group.try_lock(lock, out),
            0.2..0.4 => group.lock(lock, Some(now + patience), out),
            _ => group.lock(lock, None, out),
        });
        match outcome {
            Ok(LockOutcome::Acquired(token)) => self.acquired(member, lock, token),
            Ok(LockOutcome::Busy) => self.gave_up(member, lock),
            Ok(LockOutcome::Waiting) => {
                // The manager's own request has reached it, unless it is rebuilding a queue after a death.
                let is_manager = lock as usize % self.plan.members == member;
                if is_manager && !has_place && !self.someone_died {
                    self.checker.requested(lock, member);
                }
            }
            // This member is no longer part of the group.
            Err(_) => self.stop(member),
        }
    }

    fn acquired(&mut self, member: usize, lock: u32, Token { view, count }: Token) {
        let now = self.cluster.network.now;
        let App::Waits { lock: asked, since } = self.apps[member] else {
            self.cluster
                .failures
                .push(format!("{now} ns: member {member} got lock {lock}, but did not wait"));
            return;
        };
        if asked != lock {
            self.cluster
                .failures
                .push(format!("{now} ns: member {member} got lock {lock} instead of {asked}"));
        }
        let excused = &self.cluster.excused;
        self.checker.acquired(now, lock, member, (view, count), |member| excused[member]);
        self.times.push(now - since);
        self.apps[member] = App::Holds { lock };
        let time = self.cluster.network.random.exponential(self.plan.latency_ns);
        self.cluster.timer(member, time, RELEASE);
    }

    fn release(&mut self, member: usize) {
        let App::Holds { lock } = self.apps[member] else { return };
        let now = self.cluster.network.now;
        let excused = &self.cluster.excused;
        self.checker.released(now, lock, member, |member| excused[member]);
        if self.cluster.act(member, |group, out| group.unlock(lock, out)).is_err() {
            self.stop(member);
        } else {
            self.think(member);
        }
    }

    fn gave_up(&mut self, member: usize, lock: u32) {
        self.checker.gave_up(lock, member);
        self.errors += 1;
        self.think(member);
    }

    fn stop(&mut self, member: usize) {
        for lock in 0..self.plan.locks as u32 {
            self.checker.lost(lock, member);
        }
        self.apps[member] = App::Done;
        self.errors += 1;
    }

    fn event(&mut self, member: usize, event: Event) {
        match event {
            Event::LockAcquired { lock, fence } => self.acquired(member, lock, fence),
            Event::LockBusy { lock } | Event::LockTimedOut { lock } => self.gave_up(member, lock),
            Event::LockFailed { .. } => self.stop(member),
            _ => {}
        }
    }

    fn finish(mut self) -> Outcome {
        self.cluster.check_views();
        let mut failures = self.cluster.failures;
        failures.append(&mut self.checker.failures);
        for (member, app) in self.apps.iter().enumerate() {
            if *app != App::Done {
                failures.push(format!("member {member} never ends: {app:?}"));
            }
        }
        let strict = !self.plan.restless && !self.plan.has_faults();
        let packets: u64 = self.cluster.packets.values().sum();
        if strict && packets > 3 * self.times.len() as u64 {
            failures.push(format!(
                "{packets} packets for {} acquisitions, more than three each",
                self.times.len()
            ));
        }
        let now = self.cluster.network.now;
        Outcome::new(&self.plan, now, self.times, self.errors, self.cluster.packets, failures)
    }
}
