//! What locks and barriers send goes to the links; what they report goes to those who wait for it.

use core::task::Waker;
use std::collections::VecDeque;

use crosstie_protocol::group::{
    BarrierError, Control, Event, GroupId, LockError, MAX_CONTROL_SIZE, MemberId, MemberSet, Object, Output,
    SHORT_CONTROL_SIZE, Status, Token,
};

use super::config::limits::STAGING_SLOTS;
use super::error::GroupError;
use super::link::{Link, SLOT};
use crate::device::{Data, Mr, PostError, Posted};

/// Registered buffers for packets that are too long to be copied into the send queue. A slot is free again when its request has
/// completed.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) memory: Mr,
    free: Vec<u16>,
}

impl Staging {
    pub(super) fn new(memory: Mr) -> Staging {
        let slots = (memory.len() / SLOT).min(STAGING_SLOTS);
        Staging { memory, free: (0..slots as u16).collect() }
    }

    pub(super) fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn give_back(&mut self, slot: u16) {
        // The completion's key comes from the device. A key that is not ours must not make a slot free twice.
        if usize::from(slot) * SLOT < self.memory.len() && !self.free.contains(&slot) {
            self.free.push(slot);
        }
    }

    pub(super) fn write(&self, slot: u16, offset: usize, bytes: &[u8]) -> Result<(), PostError> {
        let at = usize::from(slot) * SLOT + offset;
        self.memory.write(at, bytes).map_err(|_| PostError::Invalid("packet longer than a staging slot"))
    }
}

/// How waiting for a lock has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockResult {
    Acquired(Token),
    Busy,
    TimedOut,
    Failed(LockError),
}

/// How waiting in a barrier has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BarrierResult {
    Completed(u64),
    Failed(u64, Box<MemberSet>),
    TimedOut(u64),
    Refused(BarrierError),
}

/// Threads and futures of this member that want one lock. The first of `queue` has it, or waits for the other members.
#[derive(Debug, Default)]
pub(super) struct LockSlot {
    pub(super) result: Option<LockResult>,
    pub(super) queue: VecDeque<u64>,
    pub(super) wakers: Vec<(u64, Waker)>,
}

/// The thread or future of this member that waits in one barrier.
#[derive(Debug, Default)]
pub(super) struct BarrierSlot {
    pub(super) result: Option<BarrierResult>,
    pub(super) waiting: bool,
    pub(super) waker: Option<Waker>,
    /// The outcome of joining or leaving.
    pub(super) changed: bool,
}

/// What the group has told this member and nobody has taken yet.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) locks: Box<[LockSlot]>,
    pub(super) barriers: Box<[BarrierSlot]>,
    /// Answers to the last question for diagnostics.
    pub(super) statuses: Vec<(MemberId, Object, Status)>,
    /// Members whose links are to be closed.
    pub(super) deaths: Vec<MemberId>,
    /// This member is no member any more, or too few are alive.
    pub(super) ended: Option<GroupError>,
    /// Something has ended that a parked thread may wait for.
    pub(super) changed: bool,
    /// Futures to wake when the engine was given back.
    pub(super) to_wake: Vec<Waker>,
}

/// Links, and who waits.
#[derive(Debug)]
pub(super) struct Wires {
    pub(super) id: GroupId,
    pub(super) me: MemberId,
    pub(super) links: Box<[Option<Link>]>,
    /// Links to members that are gone, until these have been told.
    pub(super) closing: Vec<Link>,
    pub(super) staging: Staging,
    pub(super) results: Results,
    /// Some link has packets that wait for room.
    pub(super) has_waiting: bool,
}

impl Wires {
    /// Posts what waited for room.
    #[cold]
    pub(super) fn post_waiting(&mut self) {
        self.has_waiting = false;
        for link in self.links.iter_mut().flatten() {
            self.has_waiting |= !post_waiting(link, &mut self.staging, self.id, self.me);
        }
    }

    /// Drops the links to members that are gone and have been told so, or cannot be.
    #[cold]
    pub(super) fn poll_closing(&mut self) {
        let Wires { closing, staging, id, me, .. } = self;
        closing.retain_mut(|link| {
            let is_told = post_waiting(link, staging, *id, *me) && link.queue.is_empty();
            !(is_told || link.is_broken())
        });
    }

    /// Takes the link to a member that is gone. What was sent to it before goes out.
    pub(super) fn close(&mut self, member: MemberId) -> bool {
        let Some(link) = self.links[member.index()].take() else { return false };
        self.closing.push(link);
        self.poll_closing();
        true
    }
}

/// Posts what waits for room at a link. Returns whether that is all of it.
fn post_waiting(link: &mut Link, staging: &mut Staging, id: GroupId, me: MemberId) -> bool {
    while let Some((view, packet)) = link.waiting.front().copied() {
        if post_control(link, staging, id, me, view, &packet).is_err() {
            return false;
        }
        link.waiting.pop_front();
    }
    true
}

/// Posts a lock or barrier packet.
#[inline]
fn post_control(
    link: &mut Link,
    staging: &mut Staging,
    id: GroupId,
    me: MemberId,
    view: u16,
    packet: &Control,
) -> Result<(), PostError> {
    if let Some(immediate) = packet.to_immediate(view) {
        return link.post_immediate(immediate).map(drop);
    }
    if packet.is_short() && SHORT_CONTROL_SIZE <= link.completion_data {
        let mut bytes = [0; SHORT_CONTROL_SIZE];
        let len = packet.encode(id, me, view, &mut bytes);
        return link.post_in_completion(&bytes[..len]).map(drop);
    }
    if matches!(packet, Control::Expelled | Control::Leave) {
        // The link closes when this one has gone out.
        link.queue.signal_next();
    }
    let mut bytes = [0; MAX_CONTROL_SIZE];
    let len = packet.encode(id, me, view, &mut bytes);
    if len <= link.max_inline {
        return link.post(Data::Inline(&bytes[..len]), None).map(drop);
    }
    let slot = staging.take().ok_or(PostError::Full)?;
    let posted = staging.write(slot, 0, &bytes[..len]).and_then(|()| {
        let at = usize::from(slot) * SLOT;
        let sge = staging.memory.sge(at..at + len).map_err(|_| PostError::Invalid("staging slot"))?;
        link.post(Data::Regions(&[sge]), Some(slot))
    });
    if posted != Ok(Posted::Queued) {
        staging.give_back(slot);
    }
    posted.map(drop)
}

impl Output for Wires {
    #[inline]
    fn send(&mut self, to: MemberId, view: u16, packet: &Control) {
        // A member without a link is dead: the packet would not arrive.
        let Some(link) = &mut self.links[to.index()] else { return };
        if !link.waiting.is_empty()
            || post_control(link, &mut self.staging, self.id, self.me, view, packet).is_err()
        {
            link.wait_for_room(view, packet);
            self.has_waiting = true;
        }
    }

    fn event(&mut self, event: Event) {
        let results = &mut self.results;
        results.changed = true;
        match event {
            Event::LockAcquired { lock, fence } => results.end_lock(lock, LockResult::Acquired(fence)),
            Event::LockBusy { lock } => results.end_lock(lock, LockResult::Busy),
            Event::LockTimedOut { lock } => results.end_lock(lock, LockResult::TimedOut),
            Event::LockFailed { lock, error } => results.end_lock(lock, LockResult::Failed(error)),
            Event::BarrierCompleted { barrier, round } => {
                results.end_barrier(barrier, BarrierResult::Completed(round));
            }
            Event::BarrierFailed { barrier, round, dead } => {
                results.end_barrier(barrier, BarrierResult::Failed(round, Box::new(dead)));
            }
            Event::BarrierTimedOut { barrier, round } => {
                results.end_barrier(barrier, BarrierResult::TimedOut(round));
            }
            Event::BarrierRefused { barrier, error } => {
                results.end_barrier(barrier, BarrierResult::Refused(error));
            }
            Event::BarrierJoined { barrier, .. } | Event::BarrierLeft { barrier } => {
                if let Some(slot) = results.barriers.get_mut(barrier as usize) {
                    slot.changed = true;
                    results.to_wake.extend(slot.waker.take());
                }
            }
            Event::MemberDied(member) => results.deaths.push(member),
            Event::Status { from, object, status } => {
                results.statuses.retain(|(member, asked, _)| (*member, *asked) != (from, object));
                results.statuses.push((from, object, status));
            }
            Event::Expelled => results.ended = Some(GroupError::Expelled),
            Event::QuorumLost => results.ended = Some(GroupError::NoQuorum),
            _ => {}
        }
    }
}

impl Results {
    pub(super) fn new(locks: usize, barriers: usize) -> Results {
        Results {
            locks: (0..locks).map(|_| LockSlot::default()).collect(),
            barriers: (0..barriers).map(|_| BarrierSlot::default()).collect(),
            statuses: Vec::new(),
            deaths: Vec::new(),
            ended: None,
            changed: false,
            to_wake: Vec::new(),
        }
    }

    fn end_lock(&mut self, lock: u32, result: LockResult) {
        if let Some(slot) = self.locks.get_mut(lock as usize) {
            slot.result = Some(result);
            self.to_wake.extend(slot.take_first_waker());
        }
    }

    fn end_barrier(&mut self, barrier: u32, result: BarrierResult) {
        if let Some(slot) = self.barriers.get_mut(barrier as usize) {
            slot.result = Some(result);
            self.to_wake.extend(slot.waker.take());
        }
    }
}

impl LockSlot {
    /// The waker of the future whose turn it is.
    pub(super) fn take_first_waker(&mut self) -> Option<Waker> {
        let first = self.queue.front().copied();
        let index = self.wakers.iter().position(|(id, _)| Some(*id) == first)?;
        Some(self.wakers.swap_remove(index).1)
    }

    /// Remembers whom to wake.
    pub(super) fn register(&mut self, id: u64, waker: &Waker) {
        match self.wakers.iter_mut().find(|(registered, _)| *registered == id) {
            Some((_, registered)) => registered.clone_from(waker),
            None => self.wakers.push((id, waker.clone())),
        }
    }
}
