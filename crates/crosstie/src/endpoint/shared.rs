//! What an endpoint's handles, futures and progress thread share, and how they wait.
//!
//! The engine is passed around with `try_lock`: whoever gets it runs it, and nobody waits for it. A thread that submits an operation
//! runs the engine itself if it is free; else the thread that has it looks once more after it has let go, and finds the operation.
//! Nobody sleeps while having the engine.

use core::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use core::task::Waker;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Wake;
use std::thread::Thread;
use std::time::{Duration, Instant};

use crosstie_protocol::endpoint::imm_matching::ImmEvent;

use super::cause::{Cause, NotStarted, Peer};
use super::config::{EndpointConfig, Progress};
use super::counters::EndpointCounters;
use super::engine::Engine;
use super::operation::Table;
use crate::WaitStrategy;
use crate::device::{Device, DeviceError, Pd, software};
use crate::ring::fence;
use crate::wait::{Parker, park_once};

/// Checks before the clock is read.
const CHECKS_PER_CLOCK_READING: u32 = 64;
/// How long a waiting thread spins, and then yields, before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(5);
const YIELD_TIME: Duration = Duration::from_micros(50);
/// Longest sleep.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Longest sleep where no completion wakes the sleeper: another thread waits at the device, or the device has no way to wake it.
const MAX_UNNOTIFIED_SLEEP: Duration = Duration::from_millis(1);

/// The state of the connection, for threads that do not have the engine.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// 0: not connected; 1: connected; else the cause of its end, plus 2 in the upper half.
    word: AtomicU32,
    peer: Mutex<Option<Peer>>,
}

impl Status {
    pub(super) fn connect(&self, peer: Option<Peer>) {
        *locked(&self.peer) = peer;
        self.word.store(1, Release);
    }

    pub(super) fn end(&self, cause: Cause) {
        self.word.store(2 << 16 | u32::from(cause.encode()), Release);
    }

    pub(super) fn reset(&self) {
        self.word.store(0, Release);
    }

    /// Whether operations can be started.
    #[inline]
    pub(super) fn check(&self) -> Result<(), NotStarted> {
        // Acquire, partner: the Release stores above. An operation that sees `connected` a moment too long ends with the cause.
        match self.word.load(Acquire) {
            1 => Ok(()),
            0 => Err(NotStarted::NotConnected),
            ended => Err(NotStarted::Ended(Cause::decode(ended as u16).unwrap_or(Cause::Closed))),
        }
    }
}

pub(super) struct Shared {
    // The engine is dropped first: its queue pairs, before the buffers in the table.
    engine: Mutex<Engine>,
    pub(super) table: Table,
    pub(super) config: EndpointConfig,
    status: Arc<Status>,
    /// Operations have ended that the engine may hold without need.
    reap: AtomicBool,
    /// Immediates of futures that were dropped with their result.
    returned_events: Mutex<Vec<ImmEvent>>,
    /// The thread that sleeps for the endpoint parks here, and at the completion queue.
    parker: Parker,
    attention: AtomicBool,
    /// Whoever has this may park.
    sleeper: Mutex<()>,
    /// `Endpoint` handles. With the last one the connection ends.
    handles: AtomicUsize,
    stop: AtomicBool,
}

impl Shared {
    pub(super) fn new(
        device: &Device,
        pd: &Arc<Pd>,
        config: &EndpointConfig,
    ) -> Result<Arc<Shared>, DeviceError> {
        config.check()?;
        fence::register().map_err(|source| DeviceError::Os { what: "membarrier", source })?;
        let status = Arc::new(Status::default());
        Ok(Arc::new(Shared {
            engine: Mutex::new(Engine::new(device, pd, config, &status)?),
            table: Table::new(config.operations),
            config: config.clone(),
            status,
            reap: AtomicBool::new(false),
            returned_events: Mutex::default(),
            parker: Parker::default(),
            attention: AtomicBool::new(false),
            sleeper: Mutex::new(()),
            handles: AtomicUsize::new(1),
            stop: AtomicBool::new(false),
        }))
    }

    #[inline]
    pub(super) fn check(&self) -> Result<(), NotStarted> {
        self.status.check()
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        *locked(&self.status.peer)
    }

    /// Runs the engine, if nobody else does. Returns how much happened.
    #[inline]
    pub(super) fn progress(&self) -> usize {
        let mut count = 0;
        loop {
            let Some(mut engine) = self.try_engine() else { return count };
            let reap = self.reap.load(Relaxed) && self.reap.swap(false, Acquire);
            if reap {
                let events = core::mem::take(&mut *locked(&self.returned_events));
                events.into_iter().for_each(|event| engine.put_back(&self.table, event));
            }
            count += engine.run(&self.table, reap);
            drop(engine);
            // Whoever submitted in between did not get the engine. The fence orders our release of it before this check, and theirs
            // orders the submission before the try.
            fence_seq_cst();
            if !self.table.has_submitted() && !self.reap.load(Relaxed) {
                return count;
            }
        }
    }

    /// After an operation was submitted.
    #[inline]
    pub(super) fn run_submitted(&self) {
        fence_seq_cst();
        self.progress();
    }

    /// Lets a thread that polls a future do the work where there is no progress thread.
    #[inline]
    pub(super) fn assist(&self) {
        if self.config.progress == Progress::Caller {
            self.progress();
        }
    }

    /// Wakes the progress thread, if it sleeps longer than it should.
    #[inline]
    pub(super) fn call_attention(&self) {
        // Release, partner: the Acquire swap in `sleep_until_ready`.
        self.attention.store(true, Release);
        self.parker.notify();
    }

    /// Operations have ended before the device was done with them.
    pub(super) fn reap_soon(&self) {
        // Release, partner: the Acquire swap in `progress`.
        self.reap.store(true, Release);
        self.call_attention();
        self.progress();
    }

    /// An immediate that nobody has looked at.
    pub(super) fn return_event(&self, event: ImmEvent) {
        locked(&self.returned_events).push(event);
        self.reap_soon();
    }

    pub(super) fn cancel_all(&self) -> usize {
        let count = self.table.end_all(Cause::Cancelled.encode());
        self.reap_soon();
        count
    }

    #[inline]
    fn try_engine(&self) -> Option<MutexGuard<'_, Engine>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(engine)) => Some(engine.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Uses the engine for something rare: waits for it.
    pub(super) fn with_engine<R>(&self, f: impl FnOnce(&mut Engine, &Table) -> R) -> R {
        f(&mut locked(&self.engine), &self.table)
    }

    pub(super) fn counters(&self) -> EndpointCounters {
        self.with_engine(|engine, _| engine.counters())
    }

    /// Waits until `done`, or until the deadline. `set_waker` lets a change wake the thread; it returns false if `done` holds.
    pub(super) fn wait(
        &self,
        deadline: Option<Instant>,
        done: impl Fn() -> bool,
        set_waker: impl Fn(&Waker) -> bool,
    ) {
        let mut idle_since = None;
        let mut checks = 0u32;
        loop {
            if done() {
                return;
            }
            if self.progress() > 0 {
                idle_since = None;
                checks = 0;
                continue;
            }
            checks += 1;
            if !checks.is_multiple_of(CHECKS_PER_CLOCK_READING) {
                core::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            let left = deadline.map_or(MAX_SLEEP, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                return;
            }
            let waited = now - *idle_since.get_or_insert(now);
            match self.config.wait {
                WaitStrategy::Spin => continue,
                WaitStrategy::Adaptive if waited < SPIN_TIME => continue,
                WaitStrategy::Adaptive if waited < YIELD_TIME => std::thread::yield_now(),
                _ => self.sleep(left.min(MAX_SLEEP), &done, &set_waker),
            }
            // One check after a sleep is enough.
            checks = CHECKS_PER_CLOCK_READING - 1;
        }
    }

    /// Sleeps until something happens.
    fn sleep(&self, timeout: Duration, done: &impl Fn() -> bool, set_waker: &impl Fn(&Waker) -> bool) {
        let sleeper = match self.config.progress {
            Progress::Thread => None,
            Progress::Caller => self.sleeper.try_lock().ok(),
        };
        if sleeper.is_some() {
            self.sleep_until_ready(timeout, done);
            return;
        }
        // Another thread waits at the device, and wakes this one.
        let unnotified = self.config.progress == Progress::Caller;
        if THREAD_WAKER.with(set_waker) {
            std::thread::park_timeout(if unnotified { timeout.min(MAX_UNNOTIFIED_SLEEP) } else { timeout });
        }
    }

    /// Parks until there is a completion, a submitted operation, or a call for attention. One thread at a time calls this.
    pub(super) fn sleep_until_ready(&self, timeout: Duration, done: &impl Fn() -> bool) {
        let Some(mut engine) = self.try_engine() else {
            // Whoever has it is working.
            std::thread::yield_now();
            return;
        };
        let timeout = timeout.min(engine.max_sleep(Instant::now()));
        let cq_parker: Option<software::CqParker> = engine.link().cq().parker();
        drop(engine);
        let timeout = if cq_parker.is_some() { timeout } else { timeout.min(MAX_UNNOTIFIED_SLEEP) };
        let parkers = [Some(&self.parker), cq_parker.as_ref().map(software::CqParker::parker)];
        park_once(parkers.iter().copied().flatten(), timeout, || {
            // Acquire, partner: the Release store in `call_attention`.
            if done() || self.attention.swap(false, Acquire) || self.table.has_submitted() {
                return true;
            }
            // If another thread has the engine, it may leave completions behind.
            self.try_engine().is_none_or(|mut engine| engine.link().cq().is_ready())
        });
    }

    /// The progress thread.
    pub(super) fn run_thread(&self) {
        let mut idle_since = None;
        loop {
            // Acquire, partner: the Release store in `stop_thread`.
            if self.stop.load(Acquire) && self.try_engine().is_some_and(|engine| engine.is_drained()) {
                return;
            }
            if self.progress() > 0 {
                idle_since = None;
                continue;
            }
            let now = Instant::now();
            let waited = now - *idle_since.get_or_insert(now);
            match self.config.wait {
                WaitStrategy::Spin => core::hint::spin_loop(),
                WaitStrategy::Adaptive if waited < SPIN_TIME => core::hint::spin_loop(),
                WaitStrategy::Adaptive if waited < YIELD_TIME => std::thread::yield_now(),
                _ => self.sleep_until_ready(MAX_SLEEP, &|| false),
            }
        }
    }

    pub(super) fn add_handle(&self) {
        self.handles.fetch_add(1, Relaxed);
    }

    /// With the last handle the connection ends. The progress thread ends when nothing is at the device any more.
    pub(super) fn remove_handle(&self) {
        // AcqRel: the last handle sees what the others did.
        if self.handles.fetch_sub(1, core::sync::atomic::Ordering::AcqRel) == 1 {
            self.with_engine(|engine, table| engine.close(table, Cause::Closed));
            // Release, partner: the Acquire load in `run_thread`.
            self.stop.store(true, Release);
            self.call_attention();
        }
    }
}

fn fence_seq_cst() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under the lock comes from the device; the rules are consistent before each call of it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    /// Wakes this thread.
    static THREAD_WAKER: Waker = Arc::new(ThreadWaker(std::thread::current())).into();
}
