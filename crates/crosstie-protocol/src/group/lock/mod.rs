//! LOCK: a distributed queue (RHiNET §3).
//!
//! Each lock has a manager, which knows only who asked last. Each member in the queue knows only who comes after it.
//!
//! ```text
//!     P3 ── lock_req ──> manager ── lock_forw(P3) ──> P2        last = P3; P2 remembers: next = P3
//!     P1 unlocks: P1 ── lock_reply ──> P2                       P1's next was P2
//!     P2 unlocks: P2 ── lock_reply ──> P3                       one message from unlock to lock
//! ```
//!
//! - First come, first served: in the order in which requests reach the manager.
//! - An acquisition takes at most three messages. The last holder takes the lock again without any message, as long as nobody has
//!   asked for it.
//! - A member that gives up (time-out, cancellation, `try_lock`) cannot leave the queue: it keeps its *place*. When its turn comes,
//!   it passes the lock on. If it asks again before, it takes its old place, and sends nothing.
//! - `try_lock` travels like a request. The member that asked last, which alone can know, answers: it hands the lock over if it
//!   has it and does not use it, and says *busy* otherwise.
//! - Each acquisition has a fencing token, higher than all before it: [`Token`].
//! - In each new view the manager rebuilds the queue in the same order without the members that are gone (`heal.rs`). If the manager is
//!   gone, the next member in the list becomes the manager.
//!
//! All packets between two members must arrive once and in order, or one of the two is declared dead.

mod heal;

use alloc::boxed::Box;
use alloc::vec::Vec;

use thiserror::Error;

use super::control::{Control, Status};
use super::fence::Token;
use super::member::{MemberId, MemberSet};
use super::{ControlViolation, Event, Output, Scope};
use heal::Healing;
pub use heal::{QueuePlace, QueueReport};

/// What a member does with a lock (RHiNET §3.1, and `Idle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum LockState {
    /// Not in the queue.
    Idle = 0,
    /// In the queue, and waiting for the lock.
    Wait = 1,
    /// Has the lock, and nobody is known to come after it.
    Lock = 2,
    /// Has the lock, and another member comes after it.
    Queued = 3,
    /// Has released the lock, and nobody has asked for it since: takes it again without a message.
    Last = 4,
    /// In the queue, but no longer waiting: passes the lock on when its turn comes.
    Abandoned = 5,
}

impl LockState {
    /// The state with this number.
    pub fn from_wire(number: u32) -> Option<Self> {
        use LockState::{Abandoned, Idle, Last, Lock, Queued, Wait};
        [Idle, Wait, Lock, Queued, Last, Abandoned].into_iter().find(|state| *state as u32 == number)
    }
}

/// The result of asking for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockOutcome {
    /// The caller has the lock, with this fencing token. No message was needed.
    Acquired(Token),
    /// The answer comes as an event.
    Waiting,
    /// `try_lock` only: another member has the lock, or is before this one. No message was needed.
    Busy,
}

/// Why a lock operation is refused. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum LockError {
    /// The group has no lock with this number.
    #[error("the group has no lock {0}")]
    Unknown(u32),
    /// This member already has the lock.
    #[error("this member already has lock {0}")]
    AlreadyHeld(u32),
    /// This member already waits for the lock.
    #[error("this member already waits for lock {0}")]
    AlreadyWaiting(u32),
    /// This member does not have the lock.
    #[error("this member does not have lock {0}")]
    NotHeld(u32),
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

/// How many steps of the lock protocol this member has made. Exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LockCounters {
    /// Acquisitions that needed messages.
    pub acquired: u64,
    /// Acquisitions by the last holder, without a message.
    pub reacquired: u64,
    /// Locks handed to the next member.
    pub handed_over: u64,
    /// Locks that came to an abandoned place.
    pub passed_on: u64,
    /// Queues rebuilt by this member.
    pub healed: u64,
    /// Tokens that were lost with a dead member and made anew.
    pub tokens_lost: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Idle,
    Waiting,
    Held,
    Last,
}

/// This member's part of one lock's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Slot {
    place: Place,
    /// The application waits for the lock or has it.
    wanted: bool,
    /// The application waits for the answer to `try_lock`.
    trying: bool,
    /// The queue is being rebuilt in this view: nothing is handed over or asked for.
    frozen: Option<u16>,
    /// Who comes next, and its ticket: its position in the queue.
    next: Option<(MemberId, u32)>,
    /// This member's own ticket, once it is known.
    ticket: Option<u32>,
    /// The newest fencing token that this member had.
    fence: Token,
    /// Who got the lock, with the token after `fence`.
    gave_to: Option<MemberId>,
    acquired: u64,
}

/// What the manager of a lock knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Managed {
    last: MemberId,
    /// The ticket of the last requester.
    ticket: u32,
    /// Someone has asked for the lock.
    used: bool,
    needs_heal: bool,
}

/// All locks of a group, as one member sees them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Locks {
    slots: Box<[Slot]>,
    managed: Box<[Managed]>,
    /// Deadlines of requests. A place has at most one.
    deadlines: Vec<(u64, u32)>,
    healing: Healing,
    pub(super) counters: LockCounters,
    #[cfg(test)]
    pub(super) broken_rule: Option<super::tests::BrokenRule>,
}

impl Locks {
    pub(super) fn new(locks: usize, members: usize, me: MemberId, first_view: u64) -> Self {
        let slot = |lock: usize| Slot {
            // The first manager starts as the last holder. So there is always a last requester.
            place: if manager(lock as u32, members, &MemberSet::EMPTY) == Some(me) {
                Place::Last
            } else {
                Place::Idle
            },
            wanted: false,
            trying: false,
            frozen: None,
            next: None,
            ticket: None,
            fence: Token { view: first_view, count: 0 },
            gave_to: None,
            acquired: 0,
        };
        let managed = |lock: usize| Managed {
            last: manager(lock as u32, members, &MemberSet::EMPTY).unwrap_or(me),
            ticket: 0,
            used: false,
            needs_heal: false,
        };
        Locks {
            slots: (0..locks).map(slot).collect(),
            managed: (0..locks).map(managed).collect(),
            deadlines: Vec::with_capacity(locks),
            healing: Healing::new(members),
            counters: LockCounters::default(),
            #[cfg(test)]
            broken_rule: None,
        }
    }

    pub(super) fn lock<O: Output>(
        &mut self,
        lock: u32,
        trying: bool,
        deadline: Option<u64>,
        scope: &mut Scope<'_, O>,
    ) -> Result<LockOutcome, LockError> {
        let slot = self.slots.get_mut(lock as usize).ok_or(LockError::Unknown(lock))?;
        let outcome = match slot.place {
            Place::Held => return Err(LockError::AlreadyHeld(lock)),
            _ if slot.wanted => return Err(LockError::AlreadyWaiting(lock)),
            Place::Last if slot.frozen.is_none() => {
                slot.take_again();
                self.counters.reacquired += 1;
                LockOutcome::Acquired(slot.fence)
            }
            Place::Waiting if trying => LockOutcome::Busy,
            // The outcome depends on what the manager finds out about the death.
            Place::Idle | Place::Last if slot.frozen.is_some() && trying => LockOutcome::Busy,
            // An abandoned place; or the request goes out when the queue is rebuilt.
            Place::Waiting | Place::Last => {
                slot.wanted = true;
                LockOutcome::Waiting
            }
            Place::Idle => {
                slot.wanted = true;
                slot.trying = trying;
                if slot.frozen.is_none() {
                    self.request(lock, scope);
                }
                LockOutcome::Waiting
            }
        };
        if outcome == LockOutcome::Waiting
            && let Some(deadline) = deadline
        {
            self.deadlines.push((deadline, lock));
        }
        Ok(outcome)
    }

    pub(super) fn unlock<O: Output>(&mut self, lock: u32, scope: &mut Scope<'_, O>) -> Result<(), LockError> {
        let slot = self.slots.get_mut(lock as usize).ok_or(LockError::Unknown(lock))?;
        if slot.place != Place::Held {
            return Err(LockError::NotHeld(lock));
        }
        slot.place = Place::Last;
        slot.wanted = false;
        self.hand_over(lock, scope);
        Ok(())
    }

    /// Gives up waiting. Returns whether the member was waiting.
    pub(super) fn cancel(&mut self, lock: u32) -> bool {
        match self.slots.get_mut(lock as usize) {
            Some(slot) if slot.wanted && slot.place != Place::Held => {
                (slot.wanted, slot.trying) = (false, false);
                self.deadlines.retain(|(_, waiting)| *waiting != lock);
                true
            }
            _ => false,
        }
    }

    pub(super) fn expire<O: Output>(&mut self, now: u64, scope: &mut Scope<'_, O>) {
        while let Some(index) = self.deadlines.iter().position(|(deadline, _)| now >= *deadline) {
            let (_, lock) = self.deadlines.swap_remove(index);
            self.cancel(lock);
            scope.out.event(Event::LockTimedOut { lock });
        }
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.deadlines.iter().map(|(deadline, _)| *deadline).min()
    }

    /// All waiting requests fail, because this member is no longer part of the group.
    pub(super) fn fail_all<O: Output>(&mut self, error: LockError, scope: &mut Scope<'_, O>) {
        for lock in 0..self.slots.len() as u32 {
            let slot = &self.slots[lock as usize];
            if slot.place == Place::Held || self.cancel(lock) {
                scope.out.event(Event::LockFailed { lock, error });
            }
        }
    }

    pub(super) fn state(&self, lock: u32) -> Option<LockState> {
        let slot = self.slots.get(lock as usize)?;
        Some(match slot.place {
            Place::Idle if slot.wanted => LockState::Wait,
            Place::Idle => LockState::Idle,
            Place::Waiting if slot.wanted => LockState::Wait,
            Place::Waiting => LockState::Abandoned,
            Place::Held if slot.next.is_some() => LockState::Queued,
            Place::Held => LockState::Lock,
            Place::Last => LockState::Last,
        })
    }

    pub(super) fn status(&self, lock: u32) -> Option<Status> {
        let slot = self.slots.get(lock as usize)?;
        Some(Status::Lock { state: self.state(lock)?, fence: slot.fence, acquired: slot.acquired })
    }

    pub(super) fn handle<O: Output>(
        &mut self,
        from: MemberId,
        view: u16,
        packet: &Control,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        match *packet {
            Control::LockRequest { lock, trying } => self.on_request(from, lock, trying, scope),
            Control::LockForward { lock, requester, ticket, trying } => {
                self.on_forward(from, lock, requester, ticket, trying, scope)
            }
            Control::LockReply { lock, fence, ticket } => self.on_reply(lock, fence, ticket, scope),
            Control::LockBusy { lock } => self.on_busy(lock, scope),
            _ => self.handle_heal(from, view, packet, scope),
        }
    }

    /// Asks the manager. The member is not in the queue.
    fn request<O: Output>(&mut self, lock: u32, scope: &mut Scope<'_, O>) {
        let slot = &mut self.slots[lock as usize];
        slot.place = Place::Waiting;
        slot.ticket = None;
        let packet = Control::LockRequest { lock, trying: slot.trying };
        if let Some(manager) = scope.manager(lock) {
            self.route(manager, &packet, scope);
        }
    }

    fn on_request<O: Output>(
        &mut self,
        from: MemberId,
        lock: u32,
        trying: bool,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        let managed = self.managed.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if scope.manager(lock) != Some(scope.me) {
            // The requester knows of a death that this member has not heard of. When it does, it finds the request in the
            // requester's report.
            return Ok(());
        }
        if managed.needs_heal || self.healing.concerns(lock) {
            self.healing.hold_back(lock, from);
            return Ok(());
        }
        if managed.last == from {
            return Err(ControlViolation::Lock { lock });
        }
        let previous = managed.last;
        managed.last = from;
        managed.ticket = managed.ticket.wrapping_add(1);
        managed.used = true;
        let forward = Control::LockForward { lock, requester: from, ticket: managed.ticket, trying };
        self.route(previous, &forward, scope);
        Ok(())
    }

    fn on_forward<O: Output>(
        &mut self,
        from: MemberId,
        lock: u32,
        requester: MemberId,
        ticket: u32,
        trying: bool,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        let manager = scope.manager(lock);
        let slot = self.slots.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if manager != Some(from) {
            // The former manager, if it is not known to be dead here yet, is dead for others: they will heal this queue.
            return Ok(());
        }
        if slot.place == Place::Idle || slot.next.is_some() || requester == scope.me {
            return Err(ControlViolation::Lock { lock });
        }
        slot.next = Some((requester, ticket));
        if slot.place == Place::Last && slot.frozen.is_none() {
            self.hand_over(lock, scope);
        } else if trying {
            self.route(requester, &Control::LockBusy { lock }, scope);
        }
        Ok(())
    }

    fn on_reply<O: Output>(
        &mut self,
        lock: u32,
        fence: Token,
        ticket: u32,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        let slot = self.slots.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if slot.place != Place::Waiting || fence <= slot.fence || !scope.is_possible(fence) {
            return Err(ControlViolation::Lock { lock });
        }
        slot.ticket = Some(ticket);
        self.receive_token(lock, fence, scope);
        Ok(())
    }

    fn on_busy<O: Output>(&mut self, lock: u32, scope: &mut Scope<'_, O>) -> Result<(), ControlViolation> {
        let slot = self.slots.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if slot.trying && slot.place == Place::Waiting {
            self.cancel(lock);
            scope.out.event(Event::LockBusy { lock });
        }
        Ok(())
    }

    /// The lock has come to this member.
    fn receive_token<O: Output>(&mut self, lock: u32, fence: Token, scope: &mut Scope<'_, O>) {
        let slot = &mut self.slots[lock as usize];
        slot.fence = fence;
        slot.gave_to = None;
        if slot.wanted {
            slot.place = Place::Held;
            slot.trying = false;
            slot.acquired += 1;
            self.counters.acquired += 1;
            self.deadlines.retain(|(_, waiting)| *waiting != lock);
            scope.out.event(Event::LockAcquired { lock, fence });
        } else {
            slot.place = Place::Last;
            self.counters.passed_on += 1;
            self.hand_over(lock, scope);
        }
    }

    /// Hands the lock, which nobody here uses, to the next member if there is one.
    fn hand_over<O: Output>(&mut self, lock: u32, scope: &mut Scope<'_, O>) {
        let slot = &mut self.slots[lock as usize];
        if slot.frozen.is_some() {
            return;
        }
        let Some((next, ticket)) = slot.next.take() else { return };
        slot.place = Place::Idle;
        slot.ticket = None;
        slot.gave_to = Some(next);
        self.counters.handed_over += 1;
        let packet = Control::LockReply { lock, fence: slot.fence.next(), ticket };
        self.route(next, &packet, scope);
    }

    /// Sends a packet, or handles it here if this member is its receiver.
    fn route<O: Output>(&mut self, to: MemberId, packet: &Control, scope: &mut Scope<'_, O>) {
        if to != scope.me {
            scope.send(to, packet);
        } else if self.handle(to, scope.view, packet, scope).is_err() {
            debug_assert!(false, "a member's own packet breaks the rules: {packet:?}");
        }
    }
}

impl Slot {
    /// The last holder takes the lock again.
    fn take_again(&mut self) {
        self.place = Place::Held;
        self.wanted = true;
        self.fence = self.fence.next();
        self.acquired += 1;
    }
}

/// The manager of a lock: the first live member from position `lock mod members` on. `None` if all are dead.
pub(super) fn manager(lock: u32, members: usize, dead: &MemberSet) -> Option<MemberId> {
    let first = lock as usize % members;
    (first..members).chain(0..first).map(MemberId::new).find(|member| !dead.contains(*member))
}
