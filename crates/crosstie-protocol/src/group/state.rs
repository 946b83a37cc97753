//! One member of a group: its locks, its barriers, and who is dead.

use alloc::boxed::Box;

use thiserror::Error;

use super::barrier::{Barrier, BarrierError, BarrierOutcome, TreeOptions};
use super::control::{Control, Object};
use super::fence::Token;
use super::lock::{self, LockCounters, LockError, LockOutcome, LockState, Locks};
use super::member::{MAX_MEMBERS, MemberId, MemberSet};
use super::packet::PacketKind;
use super::view;
use super::{ControlViolation, Event, Limits, Output};

/// How a group is made. All members use the same values, except `me`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// This member.
    pub me: MemberId,
    /// Number of members, 1 to [`MAX_MEMBERS`].
    pub members: usize,
    /// Number of locks, spread over the members as managers.
    pub locks: usize,
    /// Number of barriers.
    pub barriers: usize,
    /// Who takes part in the barriers from the start.
    pub barrier_members: MemberSet,
    /// The tree of the barriers.
    pub tree: TreeOptions,
    /// Whether a view needs more than half of the members of the view before it. Needed if a member can be declared dead although it is
    /// only unreachable: of two parts of a divided network, at most one goes on. Off if the driver knows for certain who is dead.
    pub needs_quorum: bool,
    /// The number of the first view, at most 2^63: above the numbers of all views of groups before this one whose tokens a resource may
    /// have seen. A group uses up to 2^20 numbers from here on.
    pub first_view: u64,
}

/// The highest count of a token. No view lives long enough to get there; a higher one is a peer's mistake.
const MAX_COUNT: u64 = u64::MAX >> 1;
/// The highest number of a first view.
const MAX_FIRST_VIEW: u64 = 1 << 63;

impl Config {
    /// The usual configuration of member `me` in a group of `members`.
    pub fn new(me: MemberId, members: usize) -> Self {
        Config {
            me,
            members,
            locks: 64,
            barriers: 1,
            barrier_members: MemberSet::first(members),
            tree: TreeOptions::default(),
            needs_quorum: false,
            first_view: 0,
        }
    }
}

/// A value of a [`Config`] is outside of its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("`{field}` of the group's configuration is outside of its limits")]
pub struct ConfigError {
    /// The field of [`Config`].
    pub field: &'static str,
}

/// Locks and barriers of a group, as one member sees them.
///
/// ```
/// use crosstie_protocol::group::{Config, Control, Event, Group, LockOutcome, MemberId, Output, Token};
///
/// #[derive(Default)]
/// struct Wire { packets: Vec<(MemberId, u16, Control)>, events: Vec<Event> }
/// impl Output for Wire {
///     fn send(&mut self, to: MemberId, view: u16, packet: &Control) { self.packets.push((to, view, *packet)); }
///     fn event(&mut self, event: Event) { self.events.push(event); }
/// }
///
/// let (a, b) = (MemberId::new(0), MemberId::new(1));
/// let mut groups = [Group::new(&Config::new(a, 2))?, Group::new(&Config::new(b, 2))?];
/// let mut wires = [Wire::default(), Wire::default()];
/// // Lock 0 is managed by member 0, which has never used it.
/// assert_eq!(groups[1].lock(0, None, &mut wires[1])?, LockOutcome::Waiting);
/// for _ in 0..2 {
///     for from in [a, b] {
///         for (to, view, packet) in std::mem::take(&mut wires[from.index()].packets) {
///             groups[to.index()].on_packet(from, view, &packet, &mut wires[to.index()])?;
///         }
///     }
/// }
/// assert_eq!(wires[1].events, [Event::LockAcquired { lock: 0, fence: Token { view: 0, count: 1 } }]);
/// groups[1].unlock(0, &mut wires[1])?;
/// // The last holder takes it again without a message.
/// assert_eq!(groups[1].lock(0, None, &mut wires[1])?, LockOutcome::Acquired(Token { view: 0, count: 2 }));
/// assert!(wires[1].packets.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    pub(super) me: MemberId,
    pub(super) members: usize,
    pub(super) needs_quorum: bool,
    pub(super) first_view: u64,
    /// Who is no member, as far as this member knows; its view lacks these, or the next one will.
    pub(super) gone: MemberSet,
    /// Whom this member's view lacks.
    pub(super) installed: MemberSet,
    /// While this member coordinates the next view: who has accepted it.
    pub(super) accepted_by: Option<MemberSet>,
    /// Members of the newest view that is known to be installed.
    pub(super) quorum_of: usize,
    pub(super) state: State,
    locks: Locks,
    barriers: Box<[Barrier]>,
    sent: [u64; PacketKind::ALL.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum State {
    Member,
    NoQuorum,
    Expelled,
    Left,
}

impl State {
    /// How everything ends that waits.
    pub(super) const fn errors(self) -> (LockError, BarrierError, Option<Event>) {
        match self {
            State::NoQuorum => (LockError::NoQuorum, BarrierError::NoQuorum, Some(Event::QuorumLost)),
            State::Expelled => (LockError::Expelled, BarrierError::Expelled, Some(Event::Expelled)),
            State::Member | State::Left => (LockError::Left, BarrierError::Left, None),
        }
    }
}

/// What locks and barriers need of the group.
pub(super) struct Scope<'a, O> {
    pub(super) me: MemberId,
    pub(super) members: usize,
    /// Whom the view lacks.
    pub(super) dead: &'a MemberSet,
    /// How many these are: the view, as packets carry it.
    pub(super) view: u16,
    gone: &'a MemberSet,
    first_view: u64,
    pub(super) out: &'a mut O,
    sent: &'a mut [u64; PacketKind::ALL.len()],
}

impl<O: Output> Scope<'_, O> {
    pub(super) fn send(&mut self, to: MemberId, packet: &Control) {
        // Nothing goes to a member that is gone, even before the view lacks it.
        if !self.gone.contains(to) {
            self.sent[packet.kind().position()] += 1;
            self.out.send(to, self.view, packet);
        }
    }

    /// The number of the view.
    pub(super) fn view_number(&self) -> u64 {
        view::number(self.first_view, self.members, self.dead)
    }

    /// Whether a token of a peer may exist: it was made in a view that this member has accepted.
    pub(super) fn is_possible(&self, token: Token) -> bool {
        token.view <= view::number(self.first_view, self.members, self.gone) && token.count <= MAX_COUNT
    }

    /// The manager of a lock.
    pub(super) fn manager(&self, lock: u32) -> Option<MemberId> {
        lock::manager(lock, self.members, self.dead)
    }

    /// The member that finds out the outcome of barriers after a death: the first that is alive.
    pub(super) fn coordinator(&self) -> Option<MemberId> {
        lock::manager(0, self.members, self.dead)
    }

    pub(super) fn live_peers(&self) -> impl Iterator<Item = MemberId> + use<O> {
        let (me, dead) = (self.me, *self.dead);
        (0..self.members).map(MemberId::new).filter(move |member| *member != me && !dead.contains(*member))
    }
}

impl Group {
    /// Member `config.me` of a new group.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let checks = [
            ("members", (1..=MAX_MEMBERS).contains(&config.members)),
            ("me", config.me.index() < config.members),
            ("locks", config.locks <= Limits::MAX_LOCKS),
            ("barriers", config.barriers <= Limits::MAX_BARRIERS),
            (
                "barrier_members",
                !config.barrier_members.is_empty()
                    && config.barrier_members.without(&MemberSet::first(config.members)).is_empty(),
            ),
            ("tree.fanout", (1..=Limits::MAX_FANOUT).contains(&config.tree.fanout)),
            ("first_view", config.first_view <= MAX_FIRST_VIEW),
            ("tree.hosts", config.tree.hosts.len() <= config.members),
        ];
        if let Some((field, _)) = checks.into_iter().find(|(_, valid)| !valid) {
            return Err(ConfigError { field });
        }
        let barrier = |id: usize| {
            Barrier::new(id as u32, config.me, config.members, config.barrier_members, config.tree.clone())
        };
        Ok(Group {
            me: config.me,
            members: config.members,
            needs_quorum: config.needs_quorum,
            first_view: config.first_view,
            gone: MemberSet::EMPTY,
            installed: MemberSet::EMPTY,
            accepted_by: None,
            quorum_of: config.members,
            state: State::Member,
            locks: Locks::new(config.locks, config.members, config.me, config.first_view),
            barriers: (0..config.barriers).map(barrier).collect(),
            sent: [0; PacketKind::ALL.len()],
        })
    }

    /// Asks for a lock. With a deadline, waiting ends with [`Event::LockTimedOut`] when [`Group::expire`] sees that it has passed.
    pub fn lock(
        &mut self,
        lock: u32,
        deadline: Option<u64>,
        out: &mut impl Output,
    ) -> Result<LockOutcome, LockError> {
        self.check_lock_allowed()?;
        let (locks, _, mut scope) = self.split(out);
        locks.lock(lock, false, deadline, &mut scope)
    }

    /// Asks for a lock if nobody has it and nobody waits for it. The answer comes after at most three messages:
    /// [`Event::LockAcquired`] or [`Event::LockBusy`].
    ///
    /// A try that fails leaves an abandoned place in the queue. Until its turn comes, further tries are answered `Busy` without a
    /// message; when its turn has come, a try succeeds without a message, unless somebody else asked meanwhile.
    pub fn try_lock(&mut self, lock: u32, out: &mut impl Output) -> Result<LockOutcome, LockError> {
        self.check_lock_allowed()?;
        let (locks, _, mut scope) = self.split(out);
        locks.lock(lock, true, None, &mut scope)
    }

    /// Releases a lock, and hands it to the next member if there is one.
    pub fn unlock(&mut self, lock: u32, out: &mut impl Output) -> Result<(), LockError> {
        self.check_lock_allowed()?;
        let (locks, _, mut scope) = self.split(out);
        locks.unlock(lock, &mut scope)
    }

    /// Stops waiting for a lock. Returns whether the member waited. Its place in the queue is passed over.
    pub fn cancel_lock(&mut self, lock: u32) -> bool {
        self.locks.cancel(lock)
    }

    /// What this member does with a lock.
    pub fn lock_state(&self, lock: u32) -> Option<LockState> {
        self.locks.state(lock)
    }

    /// Enters the next round of a barrier. Unless the round has ended before, it ends with [`Event::BarrierCompleted`],
    /// [`Event::BarrierFailed`] or [`Event::BarrierTimedOut`].
    pub fn enter(
        &mut self,
        barrier: u32,
        deadline: Option<u64>,
        out: &mut impl Output,
    ) -> Result<BarrierOutcome, BarrierError> {
        self.with_barrier(barrier, out, |barrier, scope| barrier.enter(deadline, scope))
    }

    /// Stops waiting in a barrier. The member has still arrived. Returns whether it waited.
    pub fn cancel_barrier(&mut self, barrier: u32) -> bool {
        self.barriers.get_mut(barrier as usize).is_some_and(Barrier::cancel)
    }

    /// The application has not looked at how its last round ended, or failed: [`enter`](Group::enter) gives it that outcome again.
    pub fn return_barrier_outcome(&mut self, barrier: u32) {
        if let Some(barrier) = self.barriers.get_mut(barrier as usize) {
            barrier.return_outcome();
        }
    }

    /// Takes part in a barrier from the next round on: [`Event::BarrierJoined`].
    pub fn join_barrier(&mut self, barrier: u32, out: &mut impl Output) -> Result<(), BarrierError> {
        self.with_barrier(barrier, out, |barrier, scope| barrier.join(scope))
    }

    /// Takes part no longer, from the next round on: [`Event::BarrierLeft`]. Until then this member arrives by itself.
    pub fn leave_barrier(&mut self, barrier: u32, out: &mut impl Output) -> Result<(), BarrierError> {
        self.with_barrier(barrier, out, |barrier, scope| barrier.leave(scope))
    }

    /// Who takes part in a barrier.
    pub fn barrier_members(&self, barrier: u32) -> Option<&MemberSet> {
        self.barriers.get(barrier as usize).map(Barrier::active)
    }

    /// Rounds of a barrier that have ended.
    pub fn barrier_rounds(&self, barrier: u32) -> Option<u64> {
        self.barriers.get(barrier as usize).map(Barrier::rounds_ended)
    }

    /// Members whose arrival this member waits for: its children in the tree. One of their subtrees has not arrived.
    pub fn missing_children(&self, barrier: u32) -> impl Iterator<Item = MemberId> + '_ {
        self.barriers.get(barrier as usize).into_iter().flat_map(Barrier::missing_children)
    }

    /// Asks all live members what they do with a lock or barrier, for the error of a time-out. Answers come as [`Event::Status`].
    pub fn ask_status(&mut self, object: Object, out: &mut impl Output) {
        let (_, _, mut scope) = self.split(out);
        for member in scope.live_peers() {
            scope.send(member, &Control::StatusRequest { object });
        }
    }

    /// Ends waiting whose deadline has passed.
    pub fn expire(&mut self, now: u64, out: &mut impl Output) {
        let (locks, barriers, mut scope) = self.split(out);
        locks.expire(now, &mut scope);
        for barrier in barriers {
            barrier.expire(now, &mut scope);
        }
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<u64> {
        self.barriers.iter().filter_map(Barrier::deadline).chain(self.locks.next_deadline()).min()
    }

    /// Handles a packet of a live peer, and the view that it carries. Packets of one peer must come once and in order.
    pub fn on_packet(
        &mut self,
        from: MemberId,
        view: u16,
        packet: &Control,
        out: &mut impl Output,
    ) -> Result<(), ControlViolation> {
        // Who was expelled is told by members whose view it has not accepted.
        if *packet != Control::Expelled && self.state == State::Member && !self.gone.contains(from) {
            self.see_view(view, out)?;
        }
        if self.state != State::Member || self.gone.contains(from) {
            return Ok(());
        }
        match *packet {
            Control::LockRequest { .. }
            | Control::LockForward { .. }
            | Control::LockReply { .. }
            | Control::LockBusy { .. }
            | Control::LockQuery { .. }
            | Control::LockReport { .. }
            | Control::LockHeal { .. } => {
                let (locks, _, mut scope) = self.split(out);
                locks.handle(from, view, packet, &mut scope)
            }
            Control::BarrierArrive { barrier, .. }
            | Control::BarrierRelease { barrier, .. }
            | Control::BarrierJoin { barrier, .. }
            | Control::BarrierLeave { barrier, .. }
            | Control::BarrierWelcome { barrier, .. }
            | Control::BarrierQuery { barrier, .. }
            | Control::BarrierReport { barrier, .. }
            | Control::BarrierHeal { barrier, .. } => {
                let (_, barriers, mut scope) = self.split(out);
                let found =
                    barriers.get_mut(barrier as usize).ok_or(ControlViolation::Barrier { barrier })?;
                found.handle(from, view, packet, &mut scope)
            }
            Control::StatusRequest { object } => self.answer_status(from, object, out),
            Control::StatusReply { object, status } => {
                out.event(Event::Status { from, object, status });
                Ok(())
            }
            Control::ViewReport { .. }
            | Control::ViewPropose { .. }
            | Control::ViewInstall { .. }
            | Control::Leave
            | Control::Expelled => self.handle_view(from, packet, out),
        }
    }

    /// Packets sent of a kind. Exact.
    pub fn packets_sent(&self, kind: PacketKind) -> u64 {
        self.sent[kind.position()]
    }

    /// What this member did with locks.
    pub fn lock_counters(&self) -> &LockCounters {
        &self.locks.counters
    }

    /// Turns one rule off.
    #[cfg(test)]
    pub(super) fn break_rule(&mut self, rule: Option<super::tests::BrokenRule>) {
        self.locks.broken_rule = rule;
        for barrier in &mut self.barriers {
            barrier.broken_rule = rule;
        }
    }

    fn check_lock_allowed(&self) -> Result<(), LockError> {
        if self.state == State::Member { Ok(()) } else { Err(self.state.errors().0) }
    }

    fn with_barrier<O: Output, T>(
        &mut self,
        barrier: u32,
        out: &mut O,
        action: impl FnOnce(&mut Barrier, &mut Scope<'_, O>) -> Result<T, BarrierError>,
    ) -> Result<T, BarrierError> {
        if self.state != State::Member {
            return Err(self.state.errors().1);
        }
        let (_, barriers, mut scope) = self.split(out);
        let found = barriers.get_mut(barrier as usize).ok_or(BarrierError::Unknown(barrier))?;
        action(found, &mut scope)
    }

    fn answer_status<O: Output>(
        &mut self,
        from: MemberId,
        object: Object,
        out: &mut O,
    ) -> Result<(), ControlViolation> {
        let status = match object {
            Object::Lock(lock) => self.locks.status(lock).ok_or(ControlViolation::Lock { lock })?,
            Object::Barrier(barrier) => {
                let found = self.barriers.get(barrier as usize);
                found.map(Barrier::status).ok_or(ControlViolation::Barrier { barrier })?
            }
        };
        let (_, _, mut scope) = self.split(out);
        scope.send(from, &Control::StatusReply { object, status });
        Ok(())
    }

    pub(super) fn split<'a, O: Output>(
        &'a mut self,
        out: &'a mut O,
    ) -> (&'a mut Locks, &'a mut [Barrier], Scope<'a, O>) {
        let scope = Scope {
            me: self.me,
            members: self.members,
            dead: &self.installed,
            view: self.installed.len() as u16,
            gone: &self.gone,
            first_view: self.first_view,
            out,
            sent: &mut self.sent,
        };
        (&mut self.locks, &mut self.barriers, scope)
    }
}
