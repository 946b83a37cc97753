//! In a new view: all its members agree which round has succeeded last, and which fails.
//!
//! The coordinator, the first member of the view, asks all others (`BarrierQuery`). Each freezes, so that no round ends
//! any more, and reports its rounds. The newest of the reports is the truth: a round that has ended for one survivor has ended for
//! all. The round after it fails, if a member that died takes part in the barrier. The coordinator sends the outcome to all
//! (`BarrierHeal`), and the next round uses a tree without the dead.
//!
//! A member that knows the outcome may end the next round before another one knows it, if the dead did not take part. A release that
//! comes while a member is frozen is therefore held until it knows the outcome, too.
//!
//! Failed rounds since the last success are consecutive, because a success needs every member to know about the failures before
//! it. So two numbers describe them all.

use super::super::control::Control;
use super::super::member::{MemberId, MemberSet};
use super::super::{ControlViolation, Event, Output, Scope};
use super::{Barrier, NEVER};

/// What a member knows about the rounds of a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rounds {
    /// The last round that has ended.
    pub ended: u64,
    /// The first failed round since the last success; all rounds from it to `ended` have failed. `u64::MAX`: the last round
    /// succeeded.
    pub failed_from: u64,
    /// The members whose death made them fail.
    pub blame: MemberSet,
    /// Who takes part in the next round.
    pub active: MemberSet,
}

/// The coordinator's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Healing {
    reported: MemberSet,
    newest: Option<Rounds>,
}

impl Barrier {
    pub(in super::super) fn on_view<O: Output>(&mut self, scope: &mut Scope<'_, O>) {
        self.joins = self.joins.without(scope.dead);
        self.healing = None;
        if scope.coordinator() == Some(scope.me) {
            self.healing = Some(Healing { reported: MemberSet::EMPTY, newest: None });
            for member in scope.live_peers() {
                scope.send(member, &Control::BarrierQuery { barrier: self.id });
            }
            self.frozen = Some(scope.view);
            self.add_report(scope.me, self.rounds, scope);
        }
    }

    pub(super) fn handle_heal<O: Output>(
        &mut self,
        from: MemberId,
        view: u16,
        packet: &Control,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        match *packet {
            // The coordinator asks again in this member's view.
            Control::BarrierQuery { .. } | Control::BarrierReport { .. } if view != scope.view => Ok(()),
            Control::BarrierQuery { barrier } => {
                if scope.coordinator() != Some(from) {
                    return Err(ControlViolation::Barrier { barrier });
                }
                self.frozen = (!rule_broken!(self, EndsRoundsWhileHealing)).then_some(view);
                let report = Control::BarrierReport { barrier, rounds: self.rounds };
                scope.send(from, &report);
                Ok(())
            }
            Control::BarrierReport { rounds, .. } => {
                self.add_report(from, rounds, scope);
                Ok(())
            }
            Control::BarrierHeal { barrier, rounds } => {
                if scope.coordinator() != Some(from) {
                    return Err(ControlViolation::Barrier { barrier });
                }
                // Otherwise it is not the answer to the last report: another query follows.
                if self.frozen == Some(view) || rule_broken!(self, EndsRoundsWhileHealing) {
                    if rounds.ended < self.rounds.ended {
                        return Err(ControlViolation::Barrier { barrier });
                    }
                    self.apply(rounds, scope);
                    if let Some((from, view, packet)) = self.held.take() {
                        return self.handle(from, view, &packet, scope);
                    }
                }
                Ok(())
            }
            _ => Err(ControlViolation::Kind(packet.kind())),
        }
    }

    fn add_report<O: Output>(&mut self, from: MemberId, rounds: Rounds, scope: &mut Scope<'_, O>) {
        let Some(healing) = &mut self.healing else { return };
        healing.reported.insert(from);
        // Of two that know the same round, one that takes part knows better.
        let rank = |rounds: &Rounds| (rounds.ended, rounds.failed_from != NEVER);
        let is_newer = healing.newest.is_none_or(|newest| rank(&rounds) > rank(&newest));
        if is_newer && !(rule_broken!(self, TrustsTheCoordinatorOnly) && from != scope.me) {
            healing.newest = Some(rounds);
        }
        let all = MemberSet::first(scope.members).without(scope.dead);
        if all.without(&healing.reported).is_empty()
            && let Some(newest) = healing.newest
        {
            self.healing = None;
            self.decide(newest, scope);
        }
    }

    /// All reports are here.
    fn decide<O: Output>(&mut self, newest: Rounds, scope: &mut Scope<'_, O>) {
        let mut rounds = newest;
        let died = rounds.active.intersection(scope.dead);
        if !died.is_empty() {
            rounds.ended += 1;
            rounds.failed_from = rounds.failed_from.min(rounds.ended);
            rounds.blame = rounds.blame.union(&died);
            rounds.active = rounds.active.without(&died);
        }
        for member in scope.live_peers() {
            scope.send(member, &Control::BarrierHeal { barrier: self.id, rounds });
        }
        // Nobody knew the outcome before: what was held is older.
        self.held = None;
        self.apply(rounds, scope);
    }

    fn apply<O: Output>(&mut self, rounds: Rounds, scope: &mut Scope<'_, O>) {
        self.frozen = None;
        let took_part = self.takes_part(scope.me);
        self.rounds.ended = rounds.ended;
        self.rounds.failed_from = rounds.failed_from;
        self.rounds.blame = rounds.blame;
        self.change_active(rounds.active, scope);
        let takes_part = self.takes_part(scope.me);
        if !took_part && takes_part {
            // The welcome was lost with the former root.
            self.start_taking_part(scope);
        }
        self.report(scope);
        // What the former root was asked for may be lost.
        if self.joining {
            self.ask_root(Control::BarrierJoin { barrier: self.id, member: scope.me }, scope);
        } else if self.leaving {
            self.ask_root(Control::BarrierLeave { barrier: self.id, member: scope.me }, scope);
        }
        self.advance(scope);
        if took_part && !takes_part && self.waiting {
            self.waiting = false;
            self.deadline = None;
            scope.out.event(Event::BarrierLeft { barrier: self.id });
        }
    }
}
