//! BARRIER: a tree that gathers arrivals and spreads the release (RHiNET §4).
//!
//! ```text
//!       0 <---> 1       arrivals go up, when a member and all its children have arrived;
//!       |      / \      the root and its partner, its first child, tell each other:         N messages
//!       2     3   4     the releases of both go down:                                       N - 2 messages
//!                       steps, one after the other: at most 2 log2 N, and 1 between two members
//! ```
//!
//! The root and its partner each release their own side, when both sides have arrived. An arrival stays true, whatever happens later, so
//! it does no harm if one of the two releases its side and the other one dies.
//!
//! Rounds are numbered from 1 and never repeat, so an arrival that comes early is only noted.
//!
//! - Members that take part may change between rounds: a change is spread with a release, in the old tree, and holds from the next
//!   round on. In such a round the root tells its partner nothing before the release, because only the root knows the change.
//! - A death ends one round with an error at every survivor, the same round for all: a round that has succeeded for one survivor
//!   succeeds for all (`heal.rs`). The barrier then goes on without the dead member.
//! - A member that stops waiting (time-out) has still arrived. If it enters again, it waits for the same round.
//!
//! All packets between two members must arrive once and in order, or one of the two is declared dead.

mod heal;
mod tree;

use alloc::boxed::Box;

use thiserror::Error;

use super::control::{Control, Status};
use super::member::{MemberId, MemberSet};
use super::{ControlViolation, Event, Output, Scope};
use heal::Healing;
pub use heal::Rounds;
pub use tree::{Tree, TreeOptions};

/// The highest round. No group lives long enough to get there; a higher one is a peer's mistake.
const MAX_ROUND: u64 = u64::MAX >> 1;
/// No round has failed.
const NEVER: u64 = u64::MAX;

/// The result of entering a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BarrierOutcome {
    /// The round ends with an event. If this member was the last to arrive, the event has been given already.
    Waiting(u64),
    /// The round has ended already, while nobody waited for it.
    Completed(u64),
    /// The round has failed already: these members died.
    Failed {
        /// The round.
        round: u64,
        /// The members that died.
        dead: MemberSet,
    },
}

/// Why a barrier operation is refused. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum BarrierError {
    /// The group has no barrier with this number.
    #[error("the group has no barrier {0}")]
    Unknown(u32),
    /// This member waits in the barrier already.
    #[error("this member already waits in barrier {0}")]
    AlreadyWaiting(u32),
    /// This member does not take part.
    #[error("this member does not take part in barrier {0}: join it first")]
    NotActive(u32),
    /// This member takes part already.
    #[error("this member already takes part in barrier {0}")]
    AlreadyActive(u32),
    /// The group has declared this member dead.
    #[error("the group has declared this member dead")]
    Expelled,
    /// Too few members are alive to decide anything.
    #[error("too few members are alive: this may be the smaller part of a divided group")]
    NoQuorum,
    /// This member has left the group.
    #[error("this member has left the group")]
    Left,
}

/// One barrier, as one member sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Barrier {
    id: u32,
    options: TreeOptions,
    tree: Tree,
    rounds: Rounds,
    /// The last round that each member's subtree is known to have entered.
    arrived: Box<[u64]>,
    /// The last round that this member has entered, that has ended for the application, and whose arrival was sent to the parent, or by
    /// the root to its partner.
    entered: u64,
    reported: u64,
    sent: u64,
    /// The application waits for `entered`.
    waiting: bool,
    deadline: Option<u64>,
    /// The outcome of the current round is being found out in this view.
    frozen: Option<u16>,
    joining: bool,
    leaving: bool,
    /// The root's list of changes for the next release.
    joins: MemberSet,
    leaves: MemberSet,
    healing: Option<Healing>,
    /// A release or welcome that came while frozen. It may be of a member that knows the outcome already, which is on its way to this one.
    held: Option<(MemberId, u16, Control)>,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::tests::BrokenRule>,
}

impl Barrier {
    pub(super) fn new(
        id: u32,
        me: MemberId,
        members: usize,
        active: MemberSet,
        options: TreeOptions,
    ) -> Self {
        Barrier {
            id,
            tree: Tree::new(me, &active, &options),
            options,
            rounds: Rounds { ended: 0, failed_from: NEVER, blame: MemberSet::EMPTY, active },
            arrived: (0..members).map(|_| 0).collect(),
            entered: 0,
            reported: 0,
            sent: 0,
            waiting: false,
            deadline: None,
            frozen: None,
            joining: false,
            leaving: false,
            joins: MemberSet::EMPTY,
            leaves: MemberSet::EMPTY,
            healing: None,
            held: None,
            #[cfg(test)]
            broken_rule: None,
        }
    }

    pub(super) fn enter<O: Output>(
        &mut self,
        deadline: Option<u64>,
        scope: &mut Scope<'_, O>,
    ) -> Result<BarrierOutcome, BarrierError> {
        if self.waiting {
            return Err(BarrierError::AlreadyWaiting(self.id));
        }
        let round = self.reported + 1;
        if round <= self.rounds.ended {
            self.reported = round;
            self.entered = self.entered.max(round);
            return Ok(self.outcome(round));
        }
        if !self.takes_part(scope.me) || self.leaving {
            return Err(BarrierError::NotActive(self.id));
        }
        self.entered = round;
        self.waiting = true;
        self.deadline = deadline;
        self.advance(scope);
        Ok(BarrierOutcome::Waiting(round))
    }

    pub(super) fn join<O: Output>(&mut self, scope: &mut Scope<'_, O>) -> Result<(), BarrierError> {
        if self.takes_part(scope.me) {
            return Err(BarrierError::AlreadyActive(self.id));
        }
        if self.joining {
            // The application had stopped waiting for it.
            return Ok(());
        }
        self.joining = true;
        if self.frozen.is_none() {
            self.ask_root(Control::BarrierJoin { barrier: self.id, member: scope.me }, scope);
        }
        Ok(())
    }

    pub(super) fn leave<O: Output>(&mut self, scope: &mut Scope<'_, O>) -> Result<(), BarrierError> {
        if !self.takes_part(scope.me) {
            return Err(BarrierError::NotActive(self.id));
        }
        if self.leaving {
            return Ok(());
        }
        self.leaving = true;
        if self.frozen.is_none() {
            self.ask_root(Control::BarrierLeave { barrier: self.id, member: scope.me }, scope);
            self.advance(scope);
        }
        Ok(())
    }

    pub(super) fn takes_part(&self, member: MemberId) -> bool {
        self.rounds.active.contains(member)
    }

    pub(super) fn active(&self) -> &MemberSet {
        &self.rounds.active
    }

    pub(super) fn rounds_ended(&self) -> u64 {
        self.rounds.ended
    }

    pub(super) fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Children whose arrival is missing for the current round.
    pub(super) fn missing_children(&self) -> impl Iterator<Item = MemberId> + '_ {
        let round = self.rounds.ended + 1;
        self.tree.children.iter().copied().filter(move |child| self.arrived[child.index()] < round)
    }

    pub(super) fn status(&self) -> Status {
        Status::Barrier {
            entered: self.entered,
            ended: self.rounds.ended,
            waits_for: if self.entered > self.rounds.ended { self.missing_children().next() } else { None },
        }
    }

    pub(super) fn expire<O: Output>(&mut self, now: u64, scope: &mut Scope<'_, O>) {
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            self.deadline = None;
            self.waiting = false;
            scope.out.event(Event::BarrierTimedOut { barrier: self.id, round: self.entered });
        }
    }

    /// The application stops waiting. It has still arrived.
    pub(super) fn cancel(&mut self) -> bool {
        self.deadline = None;
        core::mem::take(&mut self.waiting)
    }

    /// Nobody has looked at the outcome of the last round that ended for the application: the next [`enter`](Barrier::enter) gives it.
    pub(super) fn return_outcome(&mut self) {
        if !self.waiting && !self.leaving && self.reported == self.entered && self.entered > 0 {
            self.reported -= 1;
        }
    }

    pub(super) fn fail<O: Output>(&mut self, error: BarrierError, scope: &mut Scope<'_, O>) {
        if self.cancel() {
            scope.out.event(Event::BarrierRefused { barrier: self.id, error });
        }
    }

    pub(super) fn handle<O: Output>(
        &mut self,
        from: MemberId,
        view: u16,
        packet: &Control,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        match *packet {
            Control::BarrierWelcome { round: last, .. }
            | Control::BarrierReport { rounds: Rounds { ended: last, .. }, .. }
            | Control::BarrierHeal { rounds: Rounds { ended: last, .. }, .. }
                if last > MAX_ROUND =>
            {
                Err(ControlViolation::Barrier { barrier: self.id })
            }
            Control::BarrierArrive { round, .. } => {
                let arrived = &mut self.arrived[from.index()];
                *arrived = (*arrived).max(round);
                self.advance(scope);
                Ok(())
            }
            Control::BarrierRelease { .. } | Control::BarrierWelcome { .. }
                if self.frozen.is_some() && !rule_broken!(self, ForgetsReleasesWhileHealing) =>
            {
                self.held = Some((from, view, *packet));
                Ok(())
            }
            Control::BarrierRelease { round, active, .. } => {
                // An old release, which a death has overtaken.
                if self.frozen.is_some() || round <= self.rounds.ended {
                    return Ok(());
                }
                if Some(from) != self.tree.parent || round != self.rounds.ended + 1 || self.sent < round {
                    return Err(ControlViolation::Barrier { barrier: self.id });
                }
                self.release(round, active, scope);
                Ok(())
            }
            Control::BarrierJoin { member, .. } => {
                self.ask_root(Control::BarrierJoin { barrier: self.id, member }, scope);
                Ok(())
            }
            Control::BarrierLeave { member, .. } => {
                self.ask_root(Control::BarrierLeave { barrier: self.id, member }, scope);
                Ok(())
            }
            Control::BarrierWelcome { round, active, .. } => {
                // Not an old one, which a death has overtaken.
                if self.joining && active.contains(scope.me) && round >= self.rounds.ended {
                    self.rounds =
                        Rounds { ended: round, failed_from: NEVER, blame: MemberSet::EMPTY, active };
                    self.start_taking_part(scope);
                }
                Ok(())
            }
            _ => self.handle_heal(from, view, packet, scope),
        }
    }

    /// Reports what has become possible: sends the arrival up, or releases the round at the root.
    fn advance<O: Output>(&mut self, scope: &mut Scope<'_, O>) {
        let round = self.rounds.ended + 1;
        if self.frozen.is_some() || !self.takes_part(scope.me) || (self.entered < round && !self.leaving) {
            return;
        }
        let (parent, partner) = (self.tree.parent, self.tree.partner);
        if self.missing_children().any(|child| Some(child) != partner) {
            return;
        }
        // All on this member's side have arrived.
        let change = match parent {
            // What the partner was told holds: a change that came later waits for the next round.
            None if self.sent < round => self.changed_active(scope.me, scope.dead),
            _ => None,
        };
        let is_alone = parent.is_none() && partner.is_none();
        if is_alone && self.entered < round && change.is_none() {
            // The last member leaves when another one joins. Until then nobody asks for rounds.
            return;
        }
        if self.sent < round
            && change.is_none()
            && let Some(above) = parent.or(partner)
        {
            self.sent = round;
            scope.send(above, &Control::BarrierArrive { barrier: self.id, round });
        }
        let is_complete = match partner {
            Some(partner) => self.arrived[partner.index()] >= round,
            None => parent.is_none(),
        };
        if is_complete {
            self.release(round, change, scope);
        }
    }

    /// Who takes part after this round, if it changes. At the root.
    fn changed_active(&self, me: MemberId, dead: &MemberSet) -> Option<MemberSet> {
        // A dead member stays until its death has made a round fail.
        let joins = self.joins.without(dead);
        let mut changed = self.rounds.active.union(&joins).without(&self.leaves);
        if changed.is_empty() {
            // One stays: somebody has to know the round.
            changed.insert(me);
        }
        (changed != self.rounds.active).then_some(changed)
    }

    /// The round has succeeded: tells the children, except for a partner that knows, and the application.
    fn release<O: Output>(&mut self, round: u64, active: Option<MemberSet>, scope: &mut Scope<'_, O>) {
        let barrier = self.id;
        let knows = self.tree.partner.filter(|_| self.sent == round);
        for child in self.tree.children.iter().filter(|child| Some(**child) != knows) {
            scope.send(*child, &Control::BarrierRelease { barrier, round, active });
        }
        self.rounds.ended = round;
        self.rounds.failed_from = NEVER;
        self.rounds.blame = MemberSet::EMPTY;
        if let Some(active) = active {
            if self.tree.parent.is_none() {
                for member in active.without(&self.rounds.active).iter() {
                    scope.send(member, &Control::BarrierWelcome { barrier, round, active });
                }
            }
            self.change_active(active, scope);
        }
        self.report(scope);
        // A member that leaves arrives by itself.
        if self.leaving {
            self.advance(scope);
        }
    }

    fn change_active<O: Output>(&mut self, active: MemberSet, scope: &mut Scope<'_, O>) {
        self.rounds.active = active;
        self.tree.rebuild(scope.me, &self.rounds.active, &self.options);
        self.joins = self.joins.without(&active);
        self.leaves = self.leaves.intersection(&active);
        if !self.takes_part(scope.me) && core::mem::take(&mut self.leaving) {
            scope.out.event(Event::BarrierLeft { barrier: self.id });
        }
    }

    fn start_taking_part<O: Output>(&mut self, scope: &mut Scope<'_, O>) {
        self.joining = false;
        self.tree.rebuild(scope.me, &self.rounds.active, &self.options);
        (self.entered, self.reported) = (self.rounds.ended, self.rounds.ended);
        scope.out.event(Event::BarrierJoined { barrier: self.id, round: self.rounds.ended });
    }

    /// Tells the application that its round has ended, if it waits for it.
    fn report<O: Output>(&mut self, scope: &mut Scope<'_, O>) {
        if self.leaving {
            // The member arrives by itself; nobody asks for these rounds.
            self.entered = self.entered.max(self.rounds.ended);
            if !self.waiting {
                self.reported = self.rounds.ended;
            }
        }
        if self.waiting && self.reported < self.rounds.ended {
            let round = self.reported + 1;
            self.reported = round;
            self.waiting = false;
            self.deadline = None;
            scope.out.event(match self.outcome(round) {
                BarrierOutcome::Failed { round, dead } => {
                    Event::BarrierFailed { barrier: self.id, round, dead }
                }
                _ => Event::BarrierCompleted { barrier: self.id, round },
            });
        }
    }

    fn outcome(&self, round: u64) -> BarrierOutcome {
        if round >= self.rounds.failed_from {
            BarrierOutcome::Failed { round, dead: self.rounds.blame }
        } else {
            BarrierOutcome::Completed(round)
        }
    }

    /// Gives a wish to the root, directly or by way of a member that knows better who the root is.
    fn ask_root<O: Output>(&mut self, wish: Control, scope: &mut Scope<'_, O>) {
        let root = self.rounds.active.iter().find(|member| !scope.dead.contains(*member));
        if root == Some(scope.me) {
            match wish {
                Control::BarrierJoin { member, .. } => {
                    self.joins.insert(member);
                    self.leaves.remove(member);
                }
                Control::BarrierLeave { member, .. } => {
                    self.leaves.insert(member);
                    self.joins.remove(member);
                }
                _ => {}
            }
            // The last member, which leaves when another one joins.
            if self.leaving {
                self.advance(scope);
            }
        } else if let Some(root) = root {
            scope.send(root, &wish);
        }
    }
}
