//! In a new view: the manager of each lock rebuilds its queue.
//!
//! The manager asks all members of the view (`LockQuery`). Each freezes its part of the queue, so that no lock is handed over any more, and
//! reports it. From all reports the manager finds
//!
//! - where the token is: at the member with the newest fencing token, or on its way to the member that this one gave it to. If that
//!   member is gone, the token is lost: the first in the queue gets a new one, made in this view. All older ones belong to earlier views, so
//!   it is higher than all of them, also those of members that only stopped;
//! - the order of the queue: tickets rise by one from place to place, so a member that does not know its own ticket knows it from
//!   that of its successor. A place without a ticket is the end of the queue.
//!
//! It sends each member its new place (`LockHeal`). Queries, reports and places count only in the view to which they belong: a place is the
//! answer to the last report of its receiver, or it is ignored. In the next view the manager starts again.
//!
//! A manager heals one lock at a time, so its memory does not depend on the number of locks.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::super::control::Control;
use super::super::fence::Token;
use super::super::member::{MemberId, MemberSet};
use super::super::{ControlViolation, Event, Output, Scope};
use super::{Locks, Place};

/// A member's part of a lock's queue, for the manager that rebuilds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueReport {
    /// The member has the token.
    pub has_token: bool,
    /// The member is in the queue.
    pub in_queue: bool,
    /// Its newest fencing token.
    pub fence: Token,
    /// Who got the token after that one.
    pub gave_to: Option<MemberId>,
    /// Its position in the queue, if it knows it.
    pub ticket: Option<u32>,
}

const HAS_TOKEN: u8 = 1;
const IN_QUEUE: u8 = 2;
const HAS_TICKET: u8 = 4;

impl QueueReport {
    pub(in super::super) fn encode_flags(&self) -> u8 {
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        flag(self.has_token, HAS_TOKEN)
            | flag(self.in_queue, IN_QUEUE)
            | flag(self.ticket.is_some(), HAS_TICKET)
    }

    pub(in super::super) fn decode(
        flags: u8,
        fence: Token,
        gave_to: Option<MemberId>,
        ticket: u32,
    ) -> Option<Self> {
        (flags & !(HAS_TOKEN | IN_QUEUE | HAS_TICKET) == 0).then_some(QueueReport {
            has_token: flags & HAS_TOKEN != 0,
            in_queue: flags & IN_QUEUE != 0,
            fence,
            gave_to,
            ticket: (flags & HAS_TICKET != 0).then_some(ticket),
        })
    }
}

/// A place in a rebuilt queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueuePlace {
    /// The position in the queue.
    pub ticket: u32,
    /// Who comes next.
    pub next: Option<MemberId>,
}

/// The lock that this manager is healing, and what it knows about it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Healing {
    lock: Option<u32>,
    reports: Box<[Option<QueueReport>]>,
    /// Requests that arrived while their lock waits for healing, in order.
    held_back: Vec<(u32, MemberId)>,
}

impl Healing {
    pub(super) fn new(members: usize) -> Self {
        Healing {
            lock: None,
            reports: (0..members).map(|_| None).collect(),
            held_back: Vec::with_capacity(members),
        }
    }

    pub(super) fn concerns(&self, lock: u32) -> bool {
        self.lock == Some(lock)
    }

    /// Remembers a request: its order decides among places without a ticket.
    pub(super) fn hold_back(&mut self, lock: u32, from: MemberId) {
        if !self.held_back.contains(&(lock, from)) {
            self.held_back.push((lock, from));
        }
    }
}

impl Locks {
    /// A new view. `before`: whom the view before it lacked.
    pub(in super::super) fn on_view<O: Output>(&mut self, before: &MemberSet, scope: &mut Scope<'_, O>) {
        for (lock, managed) in self.managed.iter_mut().enumerate() {
            let lock = lock as u32;
            let mine = scope.manager(lock) == Some(scope.me);
            let inherited = super::manager(lock, scope.members, before) != Some(scope.me);
            // A lock that nobody asked for has its token at its manager.
            if mine && (managed.used || inherited || self.healing.lock == Some(lock)) {
                managed.needs_heal = true;
            }
        }
        self.healing.lock = None;
        self.heal_next(scope);
    }

    pub(super) fn handle_heal<O: Output>(
        &mut self,
        from: MemberId,
        view: u16,
        packet: &Control,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        match *packet {
            // The manager asks again in this member's view.
            Control::LockQuery { .. } | Control::LockReport { .. } if view != scope.view => Ok(()),
            Control::LockQuery { lock } => self.on_query(from, lock, scope),
            Control::LockReport { lock, report } => self.on_report(from, lock, report, scope),
            Control::LockHeal { lock, place, fence } => self.on_heal(from, view, lock, place, fence, scope),
            _ => Err(ControlViolation::Kind(packet.kind())),
        }
    }

    /// Starts to heal the next lock that needs it.
    fn heal_next<O: Output>(&mut self, scope: &mut Scope<'_, O>) {
        let Some(lock) = self.managed.iter().position(|managed| managed.needs_heal) else { return };
        let lock = lock as u32;
        self.healing.lock = Some(lock);
        self.healing.reports.fill(None);
        let query = Control::LockQuery { lock };
        for member in scope.live_peers() {
            scope.send(member, &query);
        }
        self.route(scope.me, &query, scope);
    }

    fn on_query<O: Output>(
        &mut self,
        from: MemberId,
        lock: u32,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        let hands_over = rule_broken!(self, HandsOverWhileHealing);
        let slot = self.slots.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if scope.manager(lock) != Some(from) {
            return Err(ControlViolation::Lock { lock });
        }
        slot.frozen = (!hands_over).then_some(scope.view);
        if slot.trying {
            // The answer may have been lost with the dead member.
            self.cancel(lock);
            scope.out.event(Event::LockBusy { lock });
        }
        let slot = &self.slots[lock as usize];
        let report = QueueReport {
            has_token: matches!(slot.place, Place::Held | Place::Last),
            in_queue: slot.place != Place::Idle,
            fence: slot.fence,
            gave_to: if rule_broken!(self, ForgetsWhoGotTheLock) { None } else { slot.gave_to },
            ticket: slot.ticket.or(slot.next.map(|(_, ticket)| ticket.wrapping_sub(1))),
        };
        self.route(from, &Control::LockReport { lock, report }, scope);
        Ok(())
    }

    fn on_report<O: Output>(
        &mut self,
        from: MemberId,
        lock: u32,
        report: QueueReport,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        if !scope.is_possible(report.fence) {
            return Err(ControlViolation::Lock { lock });
        }
        if self.healing.lock != Some(lock) {
            return Ok(());
        }
        self.healing.reports[from.index()] = Some(report);
        let all = (0..scope.members)
            .map(MemberId::new)
            .all(|member| scope.dead.contains(member) || self.healing.reports[member.index()].is_some());
        if all {
            self.rebuild(lock, scope);
        }
        Ok(())
    }

    /// All reports are here.
    fn rebuild<O: Output>(&mut self, lock: u32, scope: &mut Scope<'_, O>) {
        let reports = self.healing.reports.clone();
        let reported = |member: MemberId| reports[member.index()].as_ref();
        let live = || (0..scope.members).map(MemberId::new).filter(|member| !scope.dead.contains(*member));
        let newest = live()
            .filter_map(|member| reported(member).map(|report| (member, report)))
            .max_by_key(|(_, report)| (report.fence, report.has_token, report.gave_to.is_some()));
        let owner = match newest {
            Some((member, report)) if report.has_token => Some(member),
            Some((_, report)) => report.gave_to.filter(|member| !scope.dead.contains(*member)),
            None => None,
        };
        let managed = self.managed[lock as usize];
        let held_back = |member| self.healing.held_back.iter().position(|held| *held == (lock, member));
        // The order of places without a ticket: the last requester, then requests that came later, then requests that were lost
        // with the former manager.
        let order = |member: &MemberId| {
            let report = reported(*member);
            match report.and_then(|report| report.ticket) {
                // Signed distance: tickets may wrap.
                Some(ticket) => (0, i64::from(ticket.wrapping_sub(managed.ticket) as i32), *member),
                None if managed.used && managed.last == *member => (1, 0, *member),
                None => (2, held_back(*member).map_or(i64::MAX, |index| index as i64), *member),
            }
        };
        let mut queue: Vec<MemberId> = live()
            .filter(|member| Some(*member) != owner)
            // Abandoned places, too: who asks again takes its old place.
            .filter(|member| reported(*member).is_some_and(|report| report.in_queue))
            .collect();
        queue.sort_by_key(order);
        let mut new_fence = None;
        match owner {
            Some(owner) => queue.insert(0, owner),
            None => {
                new_fence = Some(Token { view: scope.view_number(), count: 1 });
                self.counters.tokens_lost += 1;
                if queue.is_empty() {
                    queue.push(scope.me);
                }
            }
        }
        let managed = &mut self.managed[lock as usize];
        managed.ticket = queue.len() as u32 - 1;
        managed.last = queue[queue.len() - 1];
        managed.used = true;
        managed.needs_heal = false;
        self.healing.lock = None;
        self.healing.held_back.retain(|(held, _)| *held != lock);
        self.counters.healed += 1;
        // This member last: as the manager it may answer requests as soon as it has its own place, and the queue's members must
        // know theirs before.
        let live: Vec<MemberId> = live().filter(|member| *member != scope.me).chain([scope.me]).collect();
        for member in live {
            let index = queue.iter().position(|queued| *queued == member);
            let place =
                index.map(|index| QueuePlace { ticket: index as u32, next: queue.get(index + 1).copied() });
            let fence = new_fence.filter(|_| index == Some(0));
            self.route(member, &Control::LockHeal { lock, place, fence }, scope);
        }
        if self.healing.lock.is_none() {
            self.heal_next(scope);
        }
    }

    fn on_heal<O: Output>(
        &mut self,
        from: MemberId,
        view: u16,
        lock: u32,
        place: Option<QueuePlace>,
        fence: Option<Token>,
        scope: &mut Scope<'_, O>,
    ) -> Result<(), ControlViolation> {
        let hands_over = rule_broken!(self, HandsOverWhileHealing);
        let slot = self.slots.get_mut(lock as usize).ok_or(ControlViolation::Lock { lock })?;
        if scope.manager(lock) != Some(from) || fence.is_some_and(|fence| !scope.is_possible(fence)) {
            return Err(ControlViolation::Lock { lock });
        }
        if slot.frozen != Some(view) && !hands_over {
            // Not the answer to the last report.
            return Ok(());
        }
        slot.frozen = None;
        slot.next = place.and_then(|place| Some((place.next?, place.ticket.wrapping_add(1))));
        slot.ticket = place.map(|place| place.ticket);
        match (place, slot.place, fence) {
            (Some(_), _, Some(fence)) => self.receive_token(lock, fence, scope),
            (Some(_), Place::Last, None) if slot.wanted => {
                if slot.next.is_some() {
                    self.hand_over(lock, scope);
                    self.request(lock, scope);
                } else {
                    slot.take_again();
                    let fence = slot.fence;
                    self.counters.reacquired += 1;
                    self.deadlines.retain(|(_, waiting)| *waiting != lock);
                    scope.out.event(Event::LockAcquired { lock, fence });
                }
            }
            (Some(_), Place::Last, None) => self.hand_over(lock, scope),
            (Some(_), _, None) => {}
            (None, ..) => {
                slot.place = Place::Idle;
                if slot.wanted {
                    self.request(lock, scope);
                }
            }
        }
        Ok(())
    }
}
