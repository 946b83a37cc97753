//! All members meet in a barrier until a number of rounds has ended. Some join late, and some leave.

use crosstie_protocol::group::{BarrierOutcome, Event, MemberId, MemberSet};

use super::cluster::{Cluster, Seen};
use crate::check::barrier::BarrierChecker;
use crate::outcome::Outcome;
use crate::plan::Plan;

const ENTER: u64 = 0;
const JOIN: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq)]
enum App {
    Outside,
    Thinks,
    Waits(u64),
    Leaves,
    Done,
}

struct Run {
    plan: Plan,
    cluster: Cluster,
    checker: BarrierChecker,
    apps: Vec<App>,
    entered: Vec<u64>,
}

pub(crate) fn run(plan: &Plan) -> Outcome {
    // Every fourth member joins later.
    let takes_part: Vec<bool> = (0..plan.members).map(|member| !plan.restless || member % 4 != 3).collect();
    let active: MemberSet =
        (0..plan.members).filter(|member| takes_part[*member]).map(MemberId::new).collect();
    let mut run = Run {
        plan: *plan,
        cluster: Cluster::new(plan, active),
        checker: BarrierChecker::new(&takes_part),
        apps: takes_part.iter().map(|part| if *part { App::Thinks } else { App::Outside }).collect(),
        entered: vec![0; plan.members],
    };
    for (member, part) in takes_part.into_iter().enumerate() {
        if part {
            run.think(member, 0);
        } else {
            let time = run.cluster.network.random.below(plan.latency_ns * 100);
            run.cluster.timer(member, time, JOIN);
        }
    }
    while let Some(seen) = run.cluster.next() {
        run.see(seen);
    }
    run.finish()
}

impl Run {
    fn see(&mut self, seen: Seen) {
        match seen {
            Seen::Timer { member, what: JOIN } => {
                if self.cluster.act(member, |group, out| group.join_barrier(0, out)).is_err() {
                    self.apps[member] = App::Done;
                }
            }
            Seen::Timer { member, .. } => self.enter(member),
            Seen::Event(member, event) => self.event(member, event),
            Seen::Died(member) => {
                self.apps[member] = App::Done;
                self.checker.died(member);
            }
            Seen::Arrived { .. } | Seen::Excused(_) => {}
        }
    }

    fn think(&mut self, member: usize, ended: u64) {
        if ended >= self.plan.operations {
            self.apps[member] = App::Done;
            return;
        }
        self.apps[member] = App::Thinks;
        let time = self.cluster.network.random.exponential(self.plan.latency_ns);
        self.cluster.timer(member, time, ENTER);
    }

    fn enter(&mut self, member: usize) {
        let now = self.cluster.network.now;
        if self.plan.restless && self.cluster.network.random.chance(0.02) {
            self.checker.leaves(member, self.entered[member]);
            self.apps[member] = App::Leaves;
            if self.cluster.act(member, |group, out| group.leave_barrier(0, out)).is_err() {
                self.apps[member] = App::Done;
            }
            return;
        }
        // Before the group does: this may be the last entry, and the round ends inside of the call.
        let round = self.entered[member] + 1;
        self.entered[member] = round;
        self.checker.entered(now, member, round);
        self.apps[member] = App::Waits(round);
        match self.cluster.act(member, |group, out| group.enter(0, None, out)) {
            Ok(BarrierOutcome::Waiting(entered)) if entered == round => {}
            Ok(BarrierOutcome::Failed { round: entered, .. }) if entered == round => {
                self.ended(member, round, false);
            }
            Ok(other) => {
                self.cluster.failures.push(format!("{now} ns: round {round} of {member}: {other:?}"))
            }
            Err(_) => self.apps[member] = App::Done,
        }
    }

    fn ended(&mut self, member: usize, round: u64, success: bool) {
        let now = self.cluster.network.now;
        if self.apps[member] != App::Waits(round) {
            let app = self.apps[member];
            self.cluster.failures.push(format!("{now} ns: round {round} ends for member {member}: {app:?}"));
        }
        let excused = &self.cluster.excused;
        self.checker.ended(now, member, round, success, |member| excused[member]);
        self.think(member, round);
    }

    fn event(&mut self, member: usize, event: Event) {
        match event {
            Event::BarrierCompleted { round, .. } => self.ended(member, round, true),
            Event::BarrierFailed { round, dead, .. } => {
                if dead.is_empty() || dead.iter().any(|dead| self.is_well(dead.index())) {
                    self.cluster.failures.push(format!("round {round} blames {dead}"));
                }
                self.ended(member, round, false);
            }
            Event::BarrierJoined { round, .. } => {
                self.entered[member] = round;
                self.checker.joined(member, round);
                self.think(member, round);
            }
            Event::BarrierLeft { .. } | Event::BarrierRefused { .. } => self.apps[member] = App::Done,
            Event::Expelled | Event::QuorumLost => self.apps[member] = App::Done,
            _ => {}
        }
    }

    fn is_well(&self, member: usize) -> bool {
        self.cluster.is_alive(member) && !self.cluster.excused[member]
    }

    fn finish(mut self) -> Outcome {
        let well: Vec<bool> = (0..self.plan.members).map(|member| self.is_well(member)).collect();
        self.checker.finish(|member| well[member]);
        self.cluster.check_views();
        let mut failures = self.cluster.failures;
        failures.append(&mut self.checker.failures);
        for (member, app) in self.apps.iter().enumerate() {
            // A join or leave takes effect with the next round, and there may be none.
            if matches!(app, App::Thinks | App::Waits(_)) {
                failures.push(format!("member {member} never ends: {app:?}"));
            }
        }
        let times = self.checker.times();
        let packets: u64 = self.cluster.packets.values().sum();
        let expected = 2 * (self.plan.members as u64 - 1) * times.len() as u64;
        let strict = !self.plan.restless && !self.plan.has_faults();
        if strict && packets != expected {
            failures.push(format!("{packets} packets for {} rounds, not {expected}", times.len()));
        }
        let now = self.cluster.network.now;
        let failed = self.checker.failed_rounds();
        Outcome::new(&self.plan, now, times, failed, self.cluster.packets, failures)
    }
}
