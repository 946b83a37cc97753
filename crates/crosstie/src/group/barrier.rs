//! Barriers (RHiNET §4): blocking, with a time-out, and as futures.

use core::pin::Pin;
use core::task::{Context, Poll};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::group::{BarrierError, BarrierOutcome, MemberId, MemberSet, Object, Status};

use super::config::deadline_after;
use super::config::limits::STATUS_WAIT;
use super::driver::Shared;
use super::engine::Engine;
use super::error::{GroupError, MemberReport};
use super::wires::BarrierResult;

/// One barrier of a group. One thread of a member at a time waits in it.
#[derive(Clone, Debug)]
pub struct Barrier {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u32,
}

impl Barrier {
    /// Enters the next round and waits until all members have entered it. Returns the round's number.
    ///
    /// When members die, the wait of every other member ends with [`GroupError::MembersDied`], which names them.
    #[inline]
    pub fn wait(&self) -> Result<u64, GroupError> {
        let mut engine = self.shared.engine();
        if let Some(round) = engine.enter_barrier(self.id, None)? {
            self.shared.release(engine);
            return Ok(round);
        }
        let id = self.id;
        match self.shared.wait(engine, None, |engine| engine.take_barrier(id))? {
            BarrierResult::Completed(round) => Ok(round),
            other => Err(self.error(other)),
        }
    }

    /// As [`Barrier::wait`], for at most `timeout`. The error lists the members that have not entered, and what each did last.
    /// This member has still arrived: the next wait continues the same round.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<u64, GroupError> {
        let mut engine = self.shared.engine();
        let deadline = deadline_after(engine.read_clock(), Some(timeout));
        if let Some(round) = engine.enter_barrier(self.id, deadline)? {
            self.shared.release(engine);
            return Ok(round);
        }
        let id = self.id;
        match self.shared.wait(engine, None, |engine| engine.take_barrier(id))? {
            BarrierResult::Completed(round) => Ok(round),
            BarrierResult::TimedOut(round) => {
                Err(GroupError::BarrierTimedOut { barrier: id, round, missing: self.find_missing(round) })
            }
            other => Err(self.error(other)),
        }
    }

    /// Enters the next round now. The returned future ends when all members have entered it, so the caller can do something else
    /// meanwhile.
    pub fn enter(&self) -> Result<BarrierWait, GroupError> {
        let mut engine = self.shared.engine();
        let done = engine.enter_barrier(self.id, None)?;
        self.shared.release(engine);
        Ok(BarrierWait { barrier: self.clone(), done, ended: false })
    }

    /// Takes part from the next round on. Waits until the other members know it.
    pub fn join(&self) -> Result<(), GroupError> {
        self.change(None, |engine, id| engine.machine.join_barrier(id, &mut engine.wires))
    }

    /// As [`Barrier::join`], for at most `timeout`. After [`GroupError::TimedOut`] the wish remains: call again to go on waiting.
    pub fn join_timeout(&self, timeout: Duration) -> Result<(), GroupError> {
        self.change(Some(timeout), |engine, id| engine.machine.join_barrier(id, &mut engine.wires))
    }

    /// Takes part no longer, from the next round on. Waits until the other members know it, so until the round has ended.
    pub fn leave(&self) -> Result<(), GroupError> {
        self.change(None, |engine, id| engine.machine.leave_barrier(id, &mut engine.wires))
    }

    /// As [`Barrier::leave`], for at most `timeout`. After [`GroupError::TimedOut`] the wish remains: call again to go on waiting.
    pub fn leave_timeout(&self, timeout: Duration) -> Result<(), GroupError> {
        self.change(Some(timeout), |engine, id| engine.machine.leave_barrier(id, &mut engine.wires))
    }

    /// Who takes part.
    pub fn members(&self) -> MemberSet {
        let engine = self.shared.engine();
        engine.machine.barrier_members(self.id).copied().unwrap_or(MemberSet::EMPTY)
    }

    fn change(
        &self,
        timeout: Option<Duration>,
        start: impl FnOnce(&mut Engine, u32) -> Result<(), BarrierError>,
    ) -> Result<(), GroupError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut engine = self.shared.engine();
        let id = self.id;
        if let Some(slot) = engine.wires.results.barriers.get_mut(id as usize) {
            slot.changed = false;
        }
        start(&mut engine, id)?;
        self.shared.wait(engine, until, |engine| {
            let slot = engine.wires.results.barriers.get_mut(id as usize)?;
            core::mem::take(&mut slot.changed).then_some(())
        })
    }

    fn error(&self, result: BarrierResult) -> GroupError {
        match result {
            BarrierResult::Failed(round, dead) => GroupError::MembersDied { barrier: self.id, round, dead },
            BarrierResult::Refused(error) => GroupError::Barrier(error),
            BarrierResult::TimedOut(round) | BarrierResult::Completed(round) => {
                GroupError::BarrierTimedOut { barrier: self.id, round, missing: Vec::new() }
            }
        }
    }

    /// Asks all members what they did last, and returns those that have not entered the round.
    fn find_missing(&self, round: u64) -> Vec<MemberReport> {
        let active = self.members();
        let reports = ask_members(&self.shared, Object::Barrier(self.id));
        let is_missing = |report: &MemberReport| match report.status {
            Some(Status::Barrier { entered, .. }) => entered < round,
            _ => true,
        };
        reports.into_iter().filter(|report| active.contains(report.member)).filter(is_missing).collect()
    }
}

/// Asks all other live members what they do with a lock or barrier, for a short time.
pub(super) fn ask_members(shared: &Shared, object: Object) -> Vec<MemberReport> {
    let mut engine = shared.engine();
    engine.wires.results.statuses.retain(|(_, asked, _)| *asked != object);
    let peers: Vec<MemberId> = engine.wires.links.iter().flatten().map(|link| link.peer).collect();
    let Engine { machine, wires, .. } = &mut *engine;
    machine.ask_status(object, wires);
    let answers = |engine: &Engine| -> Vec<MemberReport> {
        let statuses = &engine.wires.results.statuses;
        let status = |member: MemberId| {
            statuses.iter().find(|(from, asked, _)| (*from, *asked) == (member, object)).map(|(_, _, s)| *s)
        };
        peers.iter().map(|member| MemberReport { member: *member, status: status(*member) }).collect()
    };
    let all = |engine: &mut Engine| {
        let reports = answers(engine);
        reports.iter().all(|report| report.status.is_some()).then_some(reports)
    };
    match shared.wait(engine, Some(Instant::now() + STATUS_WAIT), all) {
        Ok(reports) => reports,
        Err(_) => answers(&shared.engine()),
    }
}

impl Engine {
    /// Enters a barrier. Returns the round if it has ended already.
    #[inline]
    pub(super) fn enter_barrier(
        &mut self,
        id: u32,
        deadline: Option<u64>,
    ) -> Result<Option<u64>, GroupError> {
        let Some(slot) = self.wires.results.barriers.get_mut(id as usize) else {
            return Err(BarrierError::Unknown(id).into());
        };
        if slot.waiting {
            return Err(GroupError::Busy);
        }
        slot.result = None;
        match self.machine.enter(id, deadline, &mut self.wires)? {
            BarrierOutcome::Waiting(_) => {
                self.wires.results.barriers[id as usize].waiting = true;
                Ok(None)
            }
            BarrierOutcome::Completed(round) => Ok(Some(round)),
            BarrierOutcome::Failed { round, dead } => {
                Err(GroupError::MembersDied { barrier: id, round, dead: Box::new(dead) })
            }
        }
    }

    /// How the wait has ended, once it has.
    #[inline]
    pub(super) fn take_barrier(&mut self, id: u32) -> Option<BarrierResult> {
        let slot = &mut self.wires.results.barriers[id as usize];
        let result = slot.result.take()?;
        slot.waiting = false;
        Some(result)
    }
}

/// A round of a barrier that this member has entered. Dropping it stops waiting, but the member has still arrived in that round. The next
/// call of this member that enters the barrier waits for the same round, and returns at once if that round has ended since.
#[derive(Debug)]
#[must_use = "a barrier that nobody waits for synchronises nothing"]
pub struct BarrierWait {
    barrier: Barrier,
    /// The round, if it has ended.
    done: Option<u64>,
    /// The program has the outcome.
    ended: bool,
}

impl BarrierWait {
    /// Waits until all members have entered the round.
    pub fn wait(mut self) -> Result<u64, GroupError> {
        if let Some(round) = self.done {
            self.ended = true;
            return Ok(round);
        }
        let (engine, id) = (self.barrier.shared.engine(), self.barrier.id);
        let result = self.barrier.shared.wait(engine, None, |engine| engine.take_barrier(id))?;
        self.ended = true;
        match result {
            BarrierResult::Completed(round) => Ok(round),
            other => Err(self.barrier.error(other)),
        }
    }
}

impl Future for BarrierWait {
    type Output = Result<u64, GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(round) = self.done {
            self.ended = true;
            return Poll::Ready(Ok(round));
        }
        let this = &mut *self;
        let mut engine = this.barrier.shared.engine();
        engine.progress();
        if let Some(error) = engine.failed.clone() {
            return Poll::Ready(Err(error));
        }
        let Some(result) = engine.take_barrier(this.barrier.id) else {
            engine.wires.results.barriers[this.barrier.id as usize].waker = Some(context.waker().clone());
            this.barrier.shared.release(engine);
            this.barrier.shared.hand_over();
            return Poll::Pending;
        };
        this.barrier.shared.release(engine);
        this.ended = true;
        Poll::Ready(match result {
            BarrierResult::Completed(round) => {
                this.done = Some(round);
                Ok(round)
            }
            other => Err(this.barrier.error(other)),
        })
    }
}

impl Drop for BarrierWait {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut engine = self.barrier.shared.engine();
        let id = self.barrier.id;
        let mut is_known = self.done.is_some();
        if !is_known {
            let slot = &mut engine.wires.results.barriers[id as usize];
            is_known = matches!(slot.result, Some(BarrierResult::Completed(_) | BarrierResult::Failed(..)));
            (slot.waiting, slot.result, slot.waker) = (false, None, None);
        }
        if is_known {
            engine.machine.return_barrier_outcome(id);
        } else {
            engine.machine.cancel_barrier(id);
        }
    }
}
