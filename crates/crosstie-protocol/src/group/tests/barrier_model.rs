//! An exhaustive model of one barrier: four members, which may die at any instant. A death is told to one survivor only.

use std::vec;
use std::vec::Vec;

use stateright::{Checker, Model, Property};

use super::super::*;
use super::BrokenRule;
use super::net::Net;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    net: Net,
    /// For each member: whether it waits, and the outcome of each of its rounds (`true`: success).
    apps: Vec<(bool, Vec<bool>)>,
    failure: Option<&'static str>,
    /// Members below this one do not take part.
    first: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Enter(usize),
    Deliver(usize, usize),
    Kill(usize),
    Notice(usize, usize),
}

pub(super) struct BarrierModel {
    pub(super) members: usize,
    pub(super) rounds: usize,
    /// Members below this one do not take part in the barrier. They still help to find out its outcome.
    pub(super) first: usize,
    pub(super) deaths: usize,
    pub(super) broken_rule: Option<BrokenRule>,
}

impl State {
    fn apply(&mut self, member: usize, events: Vec<Event>) {
        for event in events {
            match event {
                Event::BarrierCompleted { round, .. } => self.end(member, round, true),
                Event::BarrierFailed { round, dead, .. } => {
                    self.end(member, round, false);
                    if dead.iter().any(|dead| self.net.alive[dead.index()]) {
                        self.failure = Some("a live member was blamed");
                    }
                }
                Event::MemberDied(_) | Event::ViewInstalled(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn end(&mut self, member: usize, round: u64, success: bool) {
        let (waits, ended) = &mut self.apps[member];
        *waits = false;
        ended.push(success);
        if ended.len() as u64 != round {
            self.failure = Some("a member skipped a round");
        }
        // A dead member is missed in one round, which fails; later rounds go on without it.
        let was_reported = ended.contains(&false);
        let everybody_entered = self.apps.iter().enumerate().all(|(member, (waits, ended))| {
            member < self.first
                || ended.len() + usize::from(*waits) >= round as usize
                || (!self.net.alive[member] && was_reported)
        });
        if success && !everybody_entered {
            self.failure = Some("a round ended before everybody had entered it");
        }
        if !success && self.net.alive.iter().all(|alive| *alive) {
            self.failure = Some("a round failed although nobody is dead");
        }
    }
}

impl Model for BarrierModel {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let net = Net::new(self.members, |config| {
            config.locks = 0;
            config.barrier_members = (self.first..self.members).map(MemberId::new).collect();
        });
        let net = net.with_broken_rule(self.broken_rule);
        vec![State { net, apps: vec![(false, vec![]); self.members], failure: None, first: self.first }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let members = 0..self.members;
        for member in members.clone().filter(|member| state.net.alive[*member]) {
            let (waits, ended) = &state.apps[member];
            if member >= self.first && !waits && ended.len() < self.rounds {
                actions.push(Action::Enter(member));
            }
            for from in members.clone().filter(|from| state.net.can_deliver(*from, member)) {
                actions.push(Action::Deliver(from, member));
            }
            for dead in members.clone().filter(|dead| !state.net.alive[*dead] && !state.net.is_known(*dead)) {
                actions.push(Action::Notice(member, dead));
            }
        }
        if state.net.alive.iter().filter(|alive| !**alive).count() < self.deaths {
            actions.extend(members.filter(|member| state.net.alive[*member]).map(Action::Kill));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Enter(member) => {
                state.apps[member].0 = true;
                let mut outcome = None;
                let events =
                    state.net.act(member, |group, out| outcome = Some(group.enter(0, None, out).unwrap()));
                match outcome {
                    Some(BarrierOutcome::Completed(round)) => state.end(member, round, true),
                    Some(BarrierOutcome::Failed { round, .. }) => state.end(member, round, false),
                    _ => {}
                }
                state.apply(member, events);
            }
            Action::Deliver(from, to) => {
                let events = state.net.deliver(from, to);
                state.apply(to, events);
            }
            Action::Kill(member) => state.net.kill(member),
            Action::Notice(member, dead) => {
                let events = state.net.notice(member, dead);
                state.apply(member, events);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no round is overtaken, and errors name the dead", |_, state: &State| {
                state.failure.is_none()
            }),
            Property::always("if nothing moves, all that live agree on one view", |_, state: &State| {
                !state.net.is_quiet() || state.net.has_one_view()
            }),
            Property::always("a round has the same outcome for all survivors", |_, state: &State| {
                let alive = |member: &usize| state.net.alive[*member];
                (0..state.apps.len()).filter(alive).all(|a| {
                    (0..state.apps.len()).filter(alive).all(|b| {
                        let (a, b) = (&state.apps[a].1, &state.apps[b].1);
                        a.iter().zip(b).all(|(a, b)| a == b)
                    })
                })
            }),
            Property::always(
                "everything ends: if nothing moves, no complete round waits",
                |model, state: &State| {
                    let live = || (model.first..state.apps.len()).filter(|member| state.net.alive[*member]);
                    // Some application has not entered yet, or nobody waits.
                    !state.net.is_quiet()
                        || live()
                            .any(|member| !state.apps[member].0 && state.apps[member].1.len() < model.rounds)
                        || live().all(|member| !state.apps[member].0)
                },
            ),
            Property::sometimes("all rounds end", |model, state: &State| {
                state.apps[model.first..].iter().all(|(_, ended)| ended.len() == model.rounds)
            }),
        ]
    }
}

fn check(model: BarrierModel) -> usize {
    let checker = model.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    std::println!("{} states", checker.unique_state_count());
    checker.unique_state_count()
}

#[test]
fn barrier_of_four_members_with_one_death_never_hangs_and_all_survivors_agree() {
    let states = check(BarrierModel { members: 4, rounds: 2, first: 0, deaths: 1, broken_rule: None });
    assert!(states > 10_000, "{states} states: the model hardly does anything");
}

/// Here a release can overtake the outcome of the death of the coordinator.
#[test]
fn barrier_of_four_members_beside_a_coordinator_that_dies_never_hangs() {
    let states = check(BarrierModel { members: 5, rounds: 1, first: 1, deaths: 1, broken_rule: None });
    assert!(states > 10_000, "{states} states: the model hardly does anything");
}

#[test]
fn barrier_of_three_members_with_two_deaths_never_hangs_and_all_survivors_agree() {
    let states = check(BarrierModel { members: 3, rounds: 2, first: 0, deaths: 2, broken_rule: None });
    assert!(states > 1_000, "{states} states: the model hardly does anything");
}

#[test]
fn barrier_of_four_members_is_never_overtaken() {
    let states = check(BarrierModel { members: 4, rounds: 8, first: 0, deaths: 0, broken_rule: None });
    assert!(states > 400, "{states} states: the model hardly does anything");
}

#[test]
fn barrier_whose_coordinator_does_not_take_part_never_hangs_and_all_survivors_agree() {
    let states = check(BarrierModel { members: 4, rounds: 2, first: 1, deaths: 1, broken_rule: None });
    assert!(states > 5_000, "{states} states: the model hardly does anything");
}
