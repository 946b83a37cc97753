//! One member of a group: its locks, its barriers, and who is dead.

use alloc::boxed::Box;

use thiserror::Error;

use super::barrier::{Barrier, BarrierError, BarrierOutcome, TreeOptions};
use super::control::{Control, Object};
use super::lock::{self, LockCounters, LockError, LockOutcome, LockState, Locks};
use super::member::{MAX_MEMBERS, MemberId, MemberSet};
use super::packet::PacketKind;
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
    /// Whether only more than half of all members may go on after deaths. Needed if a member can be declared dead although it is
    /// only unreachable: of two parts of a divided network, at most one goes on. Off if the driver knows for certain who is dead.
    pub needs_quorum: bool,
}

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
/// use crosstie_protocol::group::{Config, Control, Event, Group, LockOutcome, MemberId, Output};
///
/// #[derive(Default)]
/// struct Wire { packets: Vec<(MemberId, Control)>, events: Vec<Event> }
/// impl Output for Wire {
///     fn send(&mut self, to: MemberId, packet: &Control) { self.packets.push((to, *packet)); }
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
///         for (to, packet) in std::mem::take(&mut wires[from.index()].packets) {
///             groups[to.index()].on_packet(from, &packet, &mut wires[to.index()])?;
///         }
///     }
/// }
/// assert_eq!(wires[1].events, [Event::LockAcquired { lock: 0, fence: 1 }]);
/// groups[1].unlock(0, &mut wires[1])?;
/// // The last holder takes it again without a message.
/// assert_eq!(groups[1].lock(0, None, &mut wires[1])?, LockOutcome::Acquired(2));
/// assert!(wires[1].packets.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    me: MemberId,
    members: usize,
    needs_quorum: bool,
    dead: MemberSet,
    state: State,
    locks: Locks,
    barriers: Box<[Barrier]>,
    sent: [u64; PacketKind::ALL.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Member,
    NoQuorum,
    Expelled,
}

/// What locks and barriers need of the group.
pub(super) struct Scope<'a, O> {
    pub(super) me: MemberId,
    pub(super) members: usize,
    pub(super) dead: &'a MemberSet,
    pub(super) out: &'a mut O,
    sent: &'a mut [u64; PacketKind::ALL.len()],
}

impl<O: Output> Scope<'_, O> {
    pub(super) fn send(&mut self, to: MemberId, packet: &Control) {
        self.sent[packet.kind().position()] += 1;
        self.out.send(to, packet);
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
            dead: MemberSet::EMPTY,
            state: State::Member,
            locks: Locks::new(config.locks, config.members, config.me),
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

    /// A member is dead. Its packets must not be given to [`Group::on_packet`] any more.
    pub fn member_died(&mut self, member: MemberId, out: &mut impl Output) {
        if member.index() < self.members {
            self.learn_deaths(&MemberSet::from_iter([member]), out);
        }
    }

    /// The members that are known to be dead.
    pub fn dead(&self) -> &MemberSet {
        &self.dead
    }

    /// Handles a packet of a live peer. Packets of one peer must come once and in order.
    pub fn on_packet(
        &mut self,
        from: MemberId,
        packet: &Control,
        out: &mut impl Output,
    ) -> Result<(), ControlViolation> {
        if self.state != State::Member {
            return Ok(());
        }
        if let Control::LockQuery { dead, .. }
        | Control::LockReport { dead, .. }
        | Control::BarrierQuery { dead, .. }
        | Control::BarrierReport { dead, .. } = packet
        {
            self.learn_deaths(dead, out);
        }
        // Also if the packet itself said so.
        if self.dead.contains(from) || self.state != State::Member {
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
                locks.handle(from, packet, &mut scope)
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
                found.handle(from, packet, &mut scope)
            }
            Control::StatusRequest { object } => self.answer_status(from, object, out),
            Control::StatusReply { object, status } => {
                out.event(Event::Status { from, object, status });
                Ok(())
            }
            Control::Expelled => {
                self.end(State::Expelled, out);
                Ok(())
            }
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
        match self.state {
            State::Member => Ok(()),
            State::NoQuorum => Err(LockError::NoQuorum),
            State::Expelled => Err(LockError::Expelled),
        }
    }

    fn with_barrier<O: Output, T>(
        &mut self,
        barrier: u32,
        out: &mut O,
        action: impl FnOnce(&mut Barrier, &mut Scope<'_, O>) -> Result<T, BarrierError>,
    ) -> Result<T, BarrierError> {
        match self.state {
            State::Member => {}
            State::NoQuorum => return Err(BarrierError::NoQuorum),
            State::Expelled => return Err(BarrierError::Expelled),
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

    fn learn_deaths(&mut self, dead: &MemberSet, out: &mut impl Output) {
        let before = self.dead;
        let new = dead.without(&before);
        if new.is_empty() || self.state != State::Member {
            return;
        }
        if new.contains(self.me) {
            self.end(State::Expelled, out);
            return;
        }
        self.dead = before.union(&new);
        for member in new.iter() {
            out.event(Event::MemberDied(member));
        }
        if self.needs_quorum && (self.members - self.dead.len()) * 2 <= self.members {
            self.end(State::NoQuorum, out);
            return;
        }
        let (locks, barriers, mut scope) = self.split(out);
        locks.on_deaths(&before, &mut scope);
        for barrier in barriers {
            barrier.on_deaths(&mut scope);
        }
    }

    /// Everything that waits ends, and nothing starts any more.
    fn end(&mut self, state: State, out: &mut impl Output) {
        self.state = state;
        let (locks, barriers, mut scope) = self.split(out);
        let expelled = state == State::Expelled;
        locks.fail_all(if expelled { LockError::Expelled } else { LockError::NoQuorum }, &mut scope);
        for barrier in barriers {
            barrier.fail(if expelled { BarrierError::Expelled } else { BarrierError::NoQuorum }, &mut scope);
        }
        out.event(if expelled { Event::Expelled } else { Event::QuorumLost });
    }

    fn split<'a, O: Output>(
        &'a mut self,
        out: &'a mut O,
    ) -> (&'a mut Locks, &'a mut [Barrier], Scope<'a, O>) {
        let scope = Scope { me: self.me, members: self.members, dead: &self.dead, out, sent: &mut self.sent };
        (&mut self.locks, &mut self.barriers, scope)
    }
}
