//! An exhaustive model of one lock: three members, which may die or be expelled at any instant.
//!
//! A death is told to one survivor only. A member that is expelled lives on, and may hold the lock until it learns of it: every
//! order of deliveries is a pause of any length.
//!
//! stateright visits every state that any order of requests, releases, deliveries, deaths and their discovery can lead to.

use std::vec;
use std::vec::Vec;

use stateright::{Checker, Model, Property};

use super::super::*;
use super::net::Net;
use super::{BrokenRule, failed_rules};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    net: Net,
    apps: Vec<App>,
    /// Requests in the order in which they reached the manager, until it dies. Each is removed when it is granted.
    order: Vec<usize>,
    /// A property was broken on the way to this state.
    failure: Option<&'static str>,
    newest_fence: Token,
    deaths_left: usize,
    expulsions_left: usize,
    expelled: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct App {
    /// Requests that the application will still make.
    left: u8,
    state: Wants,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wants {
    Nothing,
    Waits,
    Holds,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Lock(usize),
    TryLock(usize),
    Cancel(usize),
    Unlock(usize),
    Deliver(usize, usize),
    Kill(usize),
    Notice(usize, usize),
    /// One member declares another one dead.
    Expel(usize, usize),
}

pub(super) struct LockModel {
    pub(super) members: usize,
    pub(super) requests: u8,
    pub(super) deaths: usize,
    pub(super) expulsions: usize,
    pub(super) may_give_up: bool,
    pub(super) broken_rule: Option<BrokenRule>,
}

impl LockModel {
    fn apply(state: &mut State, member: usize, events: Vec<Event>) {
        for event in events {
            match event {
                Event::LockAcquired { fence, .. } => state.grant(member, fence),
                Event::LockBusy { .. } => state.give_up(member),
                Event::LockFailed { .. } => state.give_up(member),
                Event::MemberDied(_) | Event::ViewInstalled(_) => {}
                // It has learned that it is no member any more.
                Event::Expelled => {
                    state.give_up(member);
                    state.net.kill(member);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

impl State {
    fn grant(&mut self, member: usize, fence: Token) {
        if fence <= self.newest_fence && !self.expelled[member] {
            self.failure = Some("a fencing token did not rise");
        }
        self.newest_fence = self.newest_fence.max(fence);
        if self.apps[member].state != Wants::Waits {
            self.failure = Some("a lock was granted that nobody asked for");
        }
        self.apps[member].state = Wants::Holds;
        if let Some(index) = self.order.iter().position(|waiting| *waiting == member) {
            if self.order[..index].iter().any(|before| self.apps[*before].state == Wants::Waits) {
                self.failure = Some("a later request was granted first");
            }
            self.order.remove(index);
        }
    }

    fn give_up(&mut self, member: usize) {
        self.apps[member].state = Wants::Nothing;
    }

    /// The member is gone: nothing of it is served in order any more.
    fn lose(&mut self, member: usize) {
        self.order.retain(|waiting| *waiting != member);
        if member == 0 {
            // The manager alone knew the order of requests that nobody else has heard of.
            self.order.clear();
        }
    }

    fn nobody_is_gone(&self) -> bool {
        self.net.alive.iter().all(|alive| *alive) && !self.expelled.contains(&true)
    }
}

impl Model for LockModel {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            net: Net::new(self.members, |_| ()).with_broken_rule(self.broken_rule),
            apps: vec![App { left: self.requests, state: Wants::Nothing }; self.members],
            order: vec![],
            failure: None,
            newest_fence: Token::default(),
            deaths_left: self.deaths,
            expulsions_left: self.expulsions,
            expelled: vec![false; self.members],
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let members = 0..self.members;
        for member in members.clone().filter(|member| state.net.alive[*member]) {
            let app = &state.apps[member];
            match app.state {
                Wants::Nothing if app.left > 0 => {
                    actions.push(Action::Lock(member));
                    if self.may_give_up {
                        actions.push(Action::TryLock(member));
                    }
                }
                Wants::Waits if self.may_give_up => actions.push(Action::Cancel(member)),
                Wants::Holds => actions.push(Action::Unlock(member)),
                _ => {}
            }
            for from in members.clone().filter(|from| state.net.can_deliver(*from, member)) {
                actions.push(Action::Deliver(from, member));
            }
            for dead in members.clone().filter(|dead| !state.net.alive[*dead] && !state.net.is_known(*dead)) {
                actions.push(Action::Notice(member, dead));
            }
            let is_well = |member: &usize| state.net.alive[*member] && !state.expelled[*member];
            if state.expulsions_left > 0 && is_well(&member) {
                let others = members.clone().filter(is_well).filter(|other| *other != member);
                actions.extend(others.map(|other| Action::Expel(member, other)));
            }
        }
        if state.deaths_left > 0 {
            actions.extend(members.filter(|member| state.net.alive[*member]).map(Action::Kill));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Lock(member) | Action::TryLock(member) => {
                state.apps[member].left -= 1;
                state.apps[member].state = Wants::Waits;
                let mut outcome = None;
                let events = state.net.act(member, |group, out| {
                    let asked = match action {
                        Action::TryLock(_) => group.try_lock(0, out),
                        _ => group.lock(0, None, out),
                    };
                    outcome = Some(asked.unwrap());
                });
                match outcome {
                    Some(LockOutcome::Acquired(fence)) => state.grant(member, fence),
                    Some(LockOutcome::Busy) => state.give_up(member),
                    // The manager's own request is in its place at once.
                    _ if member == 0 && state.nobody_is_gone() => state.order.push(member),
                    _ => {}
                }
                Self::apply(&mut state, member, events);
            }
            Action::Cancel(member) => {
                state.apps[member].state = Wants::Nothing;
                state.order.retain(|waiting| *waiting != member);
                state.net.act(member, |group, _| assert!(group.cancel_lock(0)));
            }
            Action::Unlock(member) => {
                state.apps[member].state = Wants::Nothing;
                let events = state.net.act(member, |group, out| group.unlock(0, out).unwrap());
                Self::apply(&mut state, member, events);
            }
            Action::Deliver(from, to) => {
                if state.nobody_is_gone()
                    && matches!(state.net.links[from][to].front(), Some((_, Control::LockRequest { .. })))
                {
                    state.order.push(from);
                }
                let events = state.net.deliver(from, to);
                Self::apply(&mut state, to, events);
            }
            Action::Kill(member) => {
                state.deaths_left -= 1;
                state.net.kill(member);
                state.apps[member].state = Wants::Nothing;
                state.lose(member);
            }
            Action::Expel(member, other) => {
                state.expulsions_left -= 1;
                state.expelled[other] = true;
                state.lose(other);
                let events = state.net.act(member, |group, out| group.member_died(MemberId::new(other), out));
                Self::apply(&mut state, member, events);
            }
            Action::Notice(member, dead) => {
                let events = state.net.notice(member, dead);
                Self::apply(&mut state, member, events);
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("first come, first served; tokens rise", |_, state: &State| {
                state.failure.is_none()
            }),
            Property::always("at most one member has the lock that was not expelled", |_, state: &State| {
                let holds = |(app, expelled): &(&App, &bool)| app.state == Wants::Holds && !**expelled;
                state.apps.iter().zip(&state.expelled).filter(holds).count() <= 1
            }),
            Property::always("if nothing moves, all that live agree on one view", |_, state: &State| {
                !state.net.is_quiet() || state.net.has_one_view()
            }),
            Property::always(
                "everything ends: if nothing moves, nobody waits for a free lock",
                |_, state: &State| {
                    !state.net.is_quiet()
                        || state.apps.iter().any(|app| app.state == Wants::Holds)
                        || state.apps.iter().all(|app| app.state == Wants::Nothing)
                },
            ),
            Property::sometimes("the last holder of a contended lock is served", |_, state: &State| {
                state.apps.iter().all(|app| app.left == 0) && state.net.is_quiet()
            }),
        ]
    }
}

fn check(model: LockModel) -> usize {
    let checker = model.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(failed_rules(&checker).is_empty());
    std::println!("{} states", checker.unique_state_count());
    checker.unique_state_count()
}

#[test]
fn lock_of_three_members_with_two_deaths_is_exclusive_fair_and_never_stuck() {
    let states = check(LockModel {
        members: 3,
        requests: 1,
        deaths: 2,
        expulsions: 0,
        may_give_up: false,
        broken_rule: None,
    });
    assert!(states > 10_000, "{states} states: the model hardly does anything");
}

#[test]
fn lock_of_three_members_that_ask_twice_is_exclusive_fair_and_never_stuck() {
    let states = check(LockModel {
        members: 3,
        requests: 2,
        deaths: 0,
        expulsions: 0,
        may_give_up: false,
        broken_rule: None,
    });
    assert!(states > 1_000, "{states} states: the model hardly does anything");
}

#[test]
fn lock_of_three_members_that_try_and_give_up_with_one_death_is_never_stuck() {
    let states = check(LockModel {
        members: 3,
        requests: 1,
        deaths: 1,
        expulsions: 0,
        may_give_up: true,
        broken_rule: None,
    });
    assert!(states > 10_000, "{states} states: the model hardly does anything");
}

/// The expelled member lives, and may have the lock.
#[test]
fn lock_of_three_members_with_an_expulsion_and_a_death_is_exclusive_and_never_stuck() {
    let states = check(LockModel {
        members: 3,
        requests: 1,
        deaths: 1,
        expulsions: 1,
        may_give_up: false,
        broken_rule: None,
    });
    assert!(states > 10_000, "{states} states: the model hardly does anything");
}
