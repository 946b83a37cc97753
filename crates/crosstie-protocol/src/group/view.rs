//! Who is a member: numbered views.
//!
//! Each member keeps the set of members that it counts as *gone*: dead, expelled, or left. The set only grows, and nothing of a gone
//! member is accepted any more. The *coordinator* is the first member that is not gone. It makes the next view in two steps:
//!
//! ```text
//!     any member                coordinator               all members of the next view
//!         |--- view_report(gone) --->|                              |       somebody is gone: only one needs to notice; it tells all
//!         |                          |                              |       members before itself, since the coordinator may be dead, too
//!         |                          |--- view_propose(gone) ------>|       they count the same members as gone
//!         |                          |<-- view_report(gone) --------|       ... and perhaps more: then it proposes again
//!         |                          |--- view_install(gone) ------>|       all have accepted the same set
//! ```
//!
//! When a coordinator dies, the next one proposes the union of what all survivors count as gone. That includes whatever may have been
//! decided before. A view is installed only if all its members have accepted it, so of two views that have a member in common, this member
//! has accepted one after the other: the later one lacks all members that the earlier one lacks. So views are numbered by how many members
//! they lack, and every packet carries that number. A packet of a newer view than the receiver's proves that the view was installed. The
//! reports and outcomes of locks and barriers count only in the view to which they belong.
//!
//! Where the network can part ([`Config::needs_quorum`](super::Config::needs_quorum)), a view has more than half of the members of the
//! view before it, so any two views have a member in common. Elsewhere deaths are certain, and only members that all expel each other at the
//! same time could make views without a common member; their numbers differ, because a number contains its coordinator.

use super::control::Control;
use super::lock;
use super::member::{MemberId, MemberSet};
use super::state::{Group, State};
use super::{ControlViolation, Event, Output};

/// Bits of a view's number below the count of members that it lacks: for its coordinator.
const COORDINATOR_BITS: u32 = 10;

/// The members of a group at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Rises from view to view, and is the same for all members of the view.
    pub number: u64,
    /// The members of the group that are not members of the view.
    pub gone: MemberSet,
}

/// The number of the view of a group of `members` without these.
pub(super) fn number(first_view: u64, members: usize, gone: &MemberSet) -> u64 {
    let coordinator = lock::manager(0, members, gone).map_or(0, MemberId::bits);
    first_view + ((gone.len() as u64) << COORDINATOR_BITS | u64::from(coordinator))
}

impl Group {
    /// The view of this member.
    pub fn view(&self) -> View {
        View { number: number(self.first_view, self.members, &self.installed), gone: self.installed }
    }

    /// Whether this member has not been expelled, has not left, and can decide with the others.
    pub fn is_member(&self) -> bool {
        self.state == State::Member
    }

    /// How many members the newest view lacks that this member has accepted: see [`Control::from_immediate`].
    pub fn accepted_view(&self) -> u16 {
        self.gone.len() as u16
    }

    /// A member is gone: it is dead, or this member expels it. Nothing of it may be given to [`Group::on_packet`] any more.
    pub fn member_died(&mut self, member: MemberId, out: &mut impl Output) {
        if member.index() < self.members
            && self.learn_gone(&MemberSet::from_iter([member]), out)
            && !self.propose_if_coordinator(out)
        {
            // The coordinator may be dead, and only somebody else may know it. So all that may have to coordinate hear of this death.
            let me = self.me;
            for lower in self.not_gone().take_while(|lower| *lower < me) {
                self.send(lower, &Control::ViewReport { gone: self.gone }, out);
            }
        }
    }

    /// Leaves the group: all others count this member as gone.
    pub fn leave(&mut self, out: &mut impl Output) {
        if self.state == State::Member {
            self.end(State::Left, out);
        }
    }

    /// The members that this member counts as gone. Its view lacks them, or its next one will.
    pub fn dead(&self) -> &MemberSet {
        &self.gone
    }

    /// Handles the view in a packet of a live peer.
    pub(super) fn see_view(&mut self, view: u16, out: &mut impl Output) -> Result<(), ControlViolation> {
        let accepted = self.accepted_view();
        if view > accepted {
            return Err(ControlViolation::View(view));
        }
        if usize::from(view) > self.installed.len() && view == accepted {
            // Somebody has installed the view that this member has accepted last.
            self.install(out);
        }
        // This member has accepted more than the view of the sender: it waits for the next one. But that view was installed, so a
        // majority of it is enough.
        self.quorum_of = self.quorum_of.min(self.members - usize::from(view));
        Ok(())
    }

    pub(super) fn handle_view(
        &mut self,
        from: MemberId,
        packet: &Control,
        out: &mut impl Output,
    ) -> Result<(), ControlViolation> {
        match packet {
            Control::ViewReport { gone } => {
                if self.learn_gone(gone, out)
                    && !self.propose_if_coordinator(out)
                    && let Some(coordinator) = self.coordinator()
                {
                    self.send(coordinator, &Control::ViewReport { gone: self.gone }, out);
                }
                if *gone == self.gone
                    && let Some(accepted) = &mut self.accepted_by
                {
                    accepted.insert(from);
                    self.install_if_accepted(out);
                }
                Ok(())
            }
            Control::ViewPropose { gone } => {
                self.learn_gone(gone, out);
                if self.state == State::Member {
                    // With what this member knows beyond the proposal.
                    self.send(from, &Control::ViewReport { gone: self.gone }, out);
                }
                Ok(())
            }
            // The view in the packet has said it.
            Control::ViewInstall { .. } => Ok(()),
            Control::Leave => {
                self.member_died(from, out);
                Ok(())
            }
            Control::Expelled => {
                self.end(State::Expelled, out);
                Ok(())
            }
            _ => Err(ControlViolation::Kind(packet.kind())),
        }
    }

    /// Counts members as gone. Returns whether that is news.
    fn learn_gone(&mut self, gone: &MemberSet, out: &mut impl Output) -> bool {
        let new = gone.without(&self.gone);
        if new.is_empty() || self.state != State::Member {
            return false;
        }
        if new.contains(self.me) {
            self.end(State::Expelled, out);
            return false;
        }
        for member in new.iter() {
            self.send(member, &Control::Expelled, out);
            out.event(Event::MemberDied(member));
        }
        self.gone = self.gone.union(&new);
        self.accepted_by = None;
        if self.needs_quorum && (self.members - self.gone.len()) * 2 <= self.quorum_of {
            self.end(State::NoQuorum, out);
            return false;
        }
        true
    }

    /// The first member that is not gone, as far as this member knows.
    fn coordinator(&self) -> Option<MemberId> {
        lock::manager(0, self.members, &self.gone)
    }

    /// Proposes the next view, if this member is the coordinator.
    fn propose_if_coordinator(&mut self, out: &mut impl Output) -> bool {
        if self.coordinator() != Some(self.me) {
            return false;
        }
        self.accepted_by = Some(MemberSet::from_iter([self.me]));
        for member in self.not_gone() {
            self.send(member, &Control::ViewPropose { gone: self.gone }, out);
        }
        self.install_if_accepted(out);
        true
    }

    fn install_if_accepted(&mut self, out: &mut impl Output) {
        let all = MemberSet::first(self.members).without(&self.gone);
        if self.accepted_by.is_some_and(|accepted| all.without(&accepted).is_empty()) {
            self.accepted_by = None;
            self.install(out);
        }
    }

    /// All members of the view have accepted it.
    fn install(&mut self, out: &mut impl Output) {
        let before = self.installed;
        self.installed = self.gone;
        self.quorum_of = self.members - self.gone.len();
        out.event(Event::ViewInstalled(self.view().number));
        if self.coordinator() == Some(self.me) {
            // Before the questions about locks and barriers: the packets of a pair of members stay in order.
            for member in self.not_gone() {
                self.send(member, &Control::ViewInstall { gone: self.gone }, out);
            }
        }
        let (locks, barriers, mut scope) = self.split(out);
        locks.on_view(&before, &mut scope);
        for barrier in barriers {
            barrier.on_view(&mut scope);
        }
    }

    fn not_gone(&self) -> impl Iterator<Item = MemberId> + use<> {
        let (me, gone) = (self.me, self.gone);
        (0..self.members).map(MemberId::new).filter(move |member| *member != me && !gone.contains(*member))
    }

    fn send<O: Output>(&mut self, to: MemberId, packet: &Control, out: &mut O) {
        self.split(out).2.send(to, packet);
    }

    /// This member is no member any more: everything that waits ends, nothing starts, and the others are told.
    fn end(&mut self, state: State, out: &mut impl Output) {
        self.state = state;
        self.accepted_by = None;
        for member in self.not_gone() {
            self.send(member, &Control::Leave, out);
        }
        let (locks, barriers, mut scope) = self.split(out);
        let (lock_error, barrier_error, event) = state.errors();
        locks.fail_all(lock_error, &mut scope);
        for barrier in barriers {
            barrier.fail(barrier_error, &mut scope);
        }
        if let Some(event) = event {
            out.event(event);
        }
    }
}
