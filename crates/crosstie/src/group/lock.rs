//! Locks (RHiNET §3): a distributed queue, first come, first served, with fencing tokens.

use core::pin::Pin;
use core::task::{Context, Poll};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crosstie_protocol::group::{LockError, LockOutcome, LockState, Object, Status, Token};

use super::barrier::ask_members;
use super::config::deadline_after;
use super::config::limits::TRY_WAIT;
use super::driver::Shared;
use super::engine::Engine;
use super::error::GroupError;
use super::wires::{LockResult, Wires};

/// One lock of a group. Threads of one member queue for it, too.
#[derive(Clone, Debug)]
pub struct Lock {
    pub(super) shared: Arc<Shared>,
    pub(super) id: u32,
}

/// What a thread or future that wants a lock does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Another thread of this member is before it.
    Queued,
    /// The other members were asked.
    Asked,
}

/// One thread's or future's wish for a lock.
#[derive(Debug)]
struct Request {
    lock: u32,
    waiter: u64,
    step: Step,
    trying: bool,
    deadline: Option<u64>,
}

impl Lock {
    /// Waits for the lock. The guard releases it when it is dropped.
    ///
    /// If the last holder was this member, no message is sent.
    #[inline]
    pub fn acquire(&self) -> Result<LockGuard, GroupError> {
        self.acquire_until(None, false)?.ok_or(GroupError::TimedOut)
    }

    /// As [`Lock::acquire`], for at most `timeout`. The error lists who has the lock and who waits for it.
    pub fn acquire_timeout(&self, timeout: Duration) -> Result<LockGuard, GroupError> {
        match self.acquire_until(Some(timeout), false) {
            Ok(guard) => guard.ok_or(GroupError::TimedOut),
            Err(GroupError::TimedOut) => {
                let mut members = ask_members(&self.shared, Object::Lock(self.id));
                members.retain(|report| match report.status {
                    Some(Status::Lock { state, .. }) => {
                        matches!(state, LockState::Lock | LockState::Queued | LockState::Wait)
                    }
                    _ => true,
                });
                Err(GroupError::LockTimedOut { lock: self.id, members })
            }
            Err(error) => Err(error),
        }
    }

    /// Takes the lock if nobody has it and nobody waits for it. `None`: somebody does. The answer takes at most three messages. If it does
    /// not come within 5 s, because the member that knows it is stopped, the call fails with [`GroupError::TimedOut`].
    pub fn try_acquire(&self) -> Result<Option<LockGuard>, GroupError> {
        self.try_acquire_timeout(TRY_WAIT)
    }

    /// As [`Lock::try_acquire`], and waits at most `timeout` for the answer.
    pub fn try_acquire_timeout(&self, timeout: Duration) -> Result<Option<LockGuard>, GroupError> {
        self.acquire_until(Some(timeout), true)
    }

    /// A future that ends with the lock. Dropping it stops waiting.
    pub fn acquire_async(&self) -> LockFuture {
        LockFuture { lock: self.clone(), request: None }
    }

    #[inline]
    fn acquire_until(
        &self,
        timeout: Option<Duration>,
        trying: bool,
    ) -> Result<Option<LockGuard>, GroupError> {
        let mut engine = self.shared.engine();
        let deadline = timeout.and_then(|timeout| deadline_after(engine.read_clock(), Some(timeout)));
        let mut request = engine.request_lock(self.id, trying, deadline)?;
        if trying && engine.wires.results.locks[self.id as usize].queue.len() > 1 {
            engine.end_request(&request);
            return Ok(None);
        }
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let waited = self.shared.wait(engine, until, |engine| engine.step_request(&mut request));
        let result = match waited {
            Ok(result) => result,
            Err(error) => {
                let mut engine = self.shared.engine();
                engine.abandon_request(&request);
                self.shared.release(engine);
                return Err(error);
            }
        };
        match result {
            LockResult::Acquired(fence) => Ok(Some(LockGuard {
                shared: self.shared.clone(),
                id: self.id,
                waiter: request.waiter,
                fence,
                released: false,
            })),
            ended => {
                let mut engine = self.shared.engine();
                engine.end_request(&request);
                self.shared.release(engine);
                match ended {
                    LockResult::Failed(error) => Err(error.into()),
                    LockResult::TimedOut => Err(GroupError::TimedOut),
                    _ => Ok(None),
                }
            }
        }
    }
}

impl Engine {
    /// Queues a request behind those of other threads of this member.
    #[inline]
    fn request_lock(
        &mut self,
        lock: u32,
        trying: bool,
        deadline: Option<u64>,
    ) -> Result<Request, GroupError> {
        let waiter = self.next_waiter();
        let slot = self.wires.results.locks.get_mut(lock as usize).ok_or(LockError::Unknown(lock))?;
        slot.queue.push_back(waiter);
        Ok(Request { lock, waiter, step: Step::Queued, trying, deadline })
    }

    /// Does what the request can do now. Returns how it has ended, once it has.
    #[inline]
    fn step_request(&mut self, request: &mut Request) -> Option<LockResult> {
        let lock = request.lock;
        if request.step == Step::Queued {
            let slot = &mut self.wires.results.locks[lock as usize];
            if slot.queue.front() != Some(&request.waiter) {
                return None;
            }
            slot.result = None;
            let outcome = if request.trying {
                self.machine.try_lock(lock, &mut self.wires)
            } else {
                self.machine.lock(lock, request.deadline, &mut self.wires)
            };
            match outcome {
                Ok(LockOutcome::Acquired(fence)) => return Some(LockResult::Acquired(fence)),
                Ok(LockOutcome::Busy) => return Some(LockResult::Busy),
                Ok(LockOutcome::Waiting) => request.step = Step::Asked,
                Err(error) => return Some(LockResult::Failed(error)),
            }
        }
        self.wires.results.locks[lock as usize].result.take()
    }

    /// Removes a request that has ended or a guard that was dropped: the next thread of this member is first.
    fn end_request(&mut self, request: &Request) {
        end_waiter(&mut self.wires, request.lock, request.waiter);
    }

    /// Removes a request that nobody waits for any more.
    fn abandon_request(&mut self, request: &Request) {
        if request.step == Step::Asked {
            let slot = &mut self.wires.results.locks[request.lock as usize];
            if let Some(LockResult::Acquired(_)) = slot.result.take() {
                // The answer came before anybody looked.
                _ = self.machine.unlock(request.lock, &mut self.wires);
            } else {
                self.machine.cancel_lock(request.lock);
            }
        }
        self.end_request(request);
    }
}

fn end_waiter(wires: &mut Wires, lock: u32, waiter: u64) {
    let slot = &mut wires.results.locks[lock as usize];
    slot.queue.retain(|queued| *queued != waiter);
    slot.wakers.retain(|(registered, _)| *registered != waiter);
    if !slot.queue.is_empty() {
        let next = slot.take_first_waker();
        wires.results.to_wake.extend(next);
        wires.results.changed = true;
    }
}

/// The lock belongs to this member while the guard exists.
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub struct LockGuard {
    shared: Arc<Shared>,
    id: u32,
    waiter: u64,
    fence: Token,
    released: bool,
}

impl LockGuard {
    /// The lock's number.
    pub fn lock(&self) -> u32 {
        self.id
    }

    /// The fencing token. It is higher than the tokens of all holders before. A store or receiver that is given it, and that keeps the
    /// highest it has seen ([`FenceTable`](super::FenceTable)), refuses holders that have lost the lock without noticing.
    pub fn fence(&self) -> Token {
        self.fence
    }

    /// Releases the lock, and says whether this member still had it: the group may have declared it dead meanwhile.
    pub fn release(mut self) -> Result<(), GroupError> {
        self.released = true;
        self.unlock()
    }

    #[inline]
    fn unlock(&self) -> Result<(), GroupError> {
        let mut engine = self.shared.engine();
        // A member that takes the lock again and again without a packet would not see that another one asks.
        engine.progress_if_ready();
        let Engine { machine, wires, .. } = &mut *engine;
        let result = machine.unlock(self.id, wires);
        end_waiter(wires, self.id, self.waiter);
        self.shared.release(engine);
        result.map_err(GroupError::from)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        // An error says that the lock was lost before: there is nothing to release.
        if !self.released && self.unlock().is_err() {}
    }
}

/// Ends with the lock. Made by [`Lock::acquire_async`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct LockFuture {
    lock: Lock,
    request: Option<Request>,
}

impl Future for LockFuture {
    type Output = Result<LockGuard, GroupError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut engine = this.lock.shared.engine();
        let mut request = match this.request.take() {
            Some(request) => request,
            None => match engine.request_lock(this.lock.id, false, None) {
                Ok(request) => request,
                Err(error) => return Poll::Ready(Err(error)),
            },
        };
        engine.progress();
        let result = match (engine.step_request(&mut request), engine.failed.clone()) {
            (Some(result), _) => result,
            (None, Some(error)) => {
                engine.end_request(&request);
                this.lock.shared.release(engine);
                return Poll::Ready(Err(error));
            }
            (None, None) => {
                let slot = &mut engine.wires.results.locks[this.lock.id as usize];
                slot.register(request.waiter, context.waker());
                this.request = Some(request);
                this.lock.shared.release(engine);
                this.lock.shared.hand_over();
                return Poll::Pending;
            }
        };
        let ended = match result {
            LockResult::Acquired(fence) => Ok(LockGuard {
                shared: this.lock.shared.clone(),
                id: this.lock.id,
                waiter: request.waiter,
                fence,
                released: false,
            }),
            LockResult::Failed(error) => Err(error.into()),
            LockResult::Busy | LockResult::TimedOut => Err(GroupError::TimedOut),
        };
        if ended.is_err() {
            engine.end_request(&request);
        }
        this.lock.shared.release(engine);
        Poll::Ready(ended)
    }
}

impl Drop for LockFuture {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            let mut engine = self.lock.shared.engine();
            engine.abandon_request(&request);
            self.lock.shared.release(engine);
        }
    }
}
