//! What an endpoint's handles, futures and progress thread share, and how they wait.
//!
//! The engine is behind a [combining lock](crate::ring::combining_lock): no thread waits for it, except for rare calls. A thread that
//! starts an operation runs the engine itself if no other thread does: it posts the work requests and polls once, so that on the software
//! device the operation has usually ended when the call returns. Else it submits the operation, and the thread that has the engine finds it
//! before it unlocks. No thread sleeps while it has the engine.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use core::task::Waker;
use std::sync::{Arc, Mutex};
use std::task::Wake;
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::cause::{Cause, NotStarted, Peer};
use super::config::{EndpointConfig, Progress};
use super::counters::EndpointCounters;
use super::engine::{Engine, Started};
use super::flags::Flags;
use super::operation::{Operation, Table};
use super::returned::{Item, Returned};
use super::status::Status;
use crate::WaitStrategy;
use crate::device::{CqParker, Device, DeviceError, Pd};
use crate::process::Creator;
use crate::ring::combining_lock::{CombiningLock, Guard};
use crate::ring::fence;
use crate::wait::{Parker, park_once, wakers};

/// Checks before the clock is read.
const CHECKS_PER_CLOCK_READING: u32 = 64;
/// How long a waiting thread spins, and then yields, before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(5);
const YIELD_TIME: Duration = Duration::from_micros(50);
/// Longest sleep.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Longest sleep while another thread has the engine. That thread may leave work behind.
const MAX_LOCKED_SLEEP: Duration = Duration::from_micros(200);
/// How long a thread sleeps that waits for another one to unlock the engine.
const LOCK_RETRY: Duration = Duration::from_micros(50);
/// Longest sleep where no completion wakes the sleeper: another thread waits at the device, or the device has no way to wake it.
const MAX_UNNOTIFIED_SLEEP: Duration = Duration::from_millis(1);

pub(super) struct Shared {
    // The engine is dropped first: its queue pairs, before the buffers in the table.
    engine: CombiningLock<Engine>,
    pub(super) table: Table,
    pub(super) config: EndpointConfig,
    status: Arc<Status>,
    flags: Flags,
    returned: Arc<Returned>,
    /// The thread that sleeps for the endpoint parks here, and at the completion queue.
    parker: Parker,
    /// The thread that has this may park.
    sleeper: Mutex<()>,
    /// `Endpoint` handles. With the last one the connection ends.
    handles: AtomicUsize,
    stop: AtomicBool,
    creator: Creator,
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
        let returned = Arc::new(Returned::default());
        Ok(Arc::new(Shared {
            engine: CombiningLock::new(Engine::new(device, pd, config, &status, &returned)?),
            table: Table::new(config.operations),
            config: config.clone(),
            status,
            flags: Flags::new(),
            returned,
            parker: Parker::default(),
            sleeper: Mutex::new(()),
            handles: AtomicUsize::new(1),
            stop: AtomicBool::new(false),
            creator: Creator::this_process(),
        }))
    }

    #[inline]
    pub(super) fn check(&self) -> Result<(), NotStarted> {
        self.status.check()
    }

    pub(super) fn peer(&self) -> Option<Peer> {
        self.status.peer()
    }

    /// Starts an operation.
    #[inline]
    pub(super) fn start(&self, operation: &mut Operation, timeout: Option<Duration>) -> Started {
        let Some(mut engine) = self.engine.try_lock() else { return self.submit(operation, timeout) };
        let started = engine.start(&self.table, operation, timeout);
        self.unlock(engine);
        if self.config.progress == Progress::Thread
            && let (Started::InFlight(side), true) = (&started, timeout.is_some())
            && !side.word(&self.table).is_ended()
        {
            // The progress thread may sleep longer than the deadline allows.
            self.call_attention();
        }
        started
    }

    /// Starts an operation while another thread has the engine.
    #[inline(never)]
    fn submit(&self, operation: &mut Operation, timeout: Option<Duration>) -> Started {
        operation.timeout = timeout;
        let leased = self.table.lease(operation.take()).or_else(|operation| {
            self.with_engine(|engine, table| engine.free_spare(table));
            self.table.lease(operation)
        });
        let side = match leased {
            Ok(side) => side,
            Err(refused) => {
                *operation = refused;
                return Started::Refused;
            }
        };
        self.table.submit(&side);
        self.run_published();
        if timeout.is_some() && !side.word(&self.table).is_ended() {
            self.call_attention();
        }
        Started::InFlight(side)
    }

    /// Runs the engine, if no other thread does. Returns how much happened.
    #[inline]
    pub(super) fn progress(&self) -> usize {
        match self.engine.try_lock() {
            Some(mut engine) => self.run(&mut engine) + self.unlock(engine),
            None => 0,
        }
    }

    /// Runs the engine, or lets the thread that has it do so, for something that was published.
    fn run_published(&self) {
        if let Some(mut engine) = self.engine.lock_or_call() {
            self.run(&mut engine);
            self.unlock(engine);
        }
    }

    #[inline]
    fn run(&self, engine: &mut Engine) -> usize {
        let reap = self.flags.take_reap();
        if reap {
            engine.put_back_returned(&self.table);
        }
        engine.run(&self.table, reap)
    }

    /// Unlocks the engine, after having run it for the threads that found it locked. Then calls the wakers of operations that have ended: they
    /// may call the endpoint. Returns how much happened.
    #[inline]
    pub(super) fn unlock(&self, engine: Guard<'_, Engine>) -> usize {
        let count = match engine.unlock() {
            None => 0,
            Some(engine) => self.run_called(engine),
        };
        wakers::run_deferred();
        count
    }

    #[inline(never)]
    fn run_called(&self, mut engine: Guard<'_, Engine>) -> usize {
        let mut count = 0;
        loop {
            count += self.run(&mut engine);
            match engine.unlock() {
                None => return count,
                Some(again) => engine = again,
            }
        }
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
        self.flags.call_attention();
        self.parker.notify();
    }

    /// Operations have ended before the device was done with them.
    pub(super) fn reap_soon(&self) {
        self.flags.request_reap();
        self.call_attention();
        self.run_published();
        // Another thread may have the engine.
        wakers::run_deferred();
    }

    /// An immediate or a message that nobody has looked at.
    pub(super) fn put_back(&self, item: Item) {
        self.returned.push(item);
        self.reap_soon();
    }

    pub(super) fn cancel_all(&self) -> usize {
        let count = self.table.end_all(Cause::Cancelled.encode());
        self.reap_soon();
        count
    }

    /// Uses the engine for something rare: waits for it.
    pub(super) fn with_engine<R>(&self, f: impl FnOnce(&mut Engine, &Table) -> R) -> R {
        let mut tries = 0u32;
        let mut engine = loop {
            if let Some(engine) = self.engine.try_lock() {
                break engine;
            }
            // Another thread is running it, which takes microseconds, unless that thread was preempted.
            tries += 1;
            match tries {
                0..64 => core::hint::spin_loop(),
                64..256 => std::thread::yield_now(),
                _ => std::thread::sleep(LOCK_RETRY),
            }
        };
        let result = f(&mut engine, &self.table);
        self.unlock(engine);
        result
    }

    /// Looks at the engine, unless another thread has it.
    fn try_with_engine<R>(&self, f: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        let mut engine = self.engine.try_lock()?;
        let result = f(&mut engine);
        self.unlock(engine);
        Some(result)
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
        let looked = self.try_with_engine(|engine| {
            let parker: Option<CqParker> = engine.link().cq().parker();
            (engine.max_sleep(&self.table, Instant::now()), parker)
        });
        let Some((max_sleep, cq_parker)) = looked else {
            // The thread that has it is working, perhaps for long: on the software device it also copies. It must not be disturbed
            // by a thread that has nothing to do.
            let is_called = || done() || self.flags.take_attention();
            park_once(core::iter::once(&self.parker), timeout.min(MAX_LOCKED_SLEEP), is_called);
            return;
        };
        let timeout = timeout.min(max_sleep);
        let timeout = if cq_parker.is_some() { timeout } else { timeout.min(MAX_UNNOTIFIED_SLEEP) };
        let parkers = [Some(&self.parker), cq_parker.as_ref().map(CqParker::parker)];
        park_once(parkers.iter().copied().flatten(), timeout, || {
            if done() || self.flags.take_attention() || self.table.has_submitted() {
                return true;
            }
            // If another thread has the engine, it may leave completions behind.
            let Some(mut engine) = self.engine.try_lock() else { return true };
            let is_ready = engine.link().cq().is_ready();
            // Or a thread has submitted an operation meanwhile.
            self.unlock(engine) > 0 || is_ready
        });
    }

    /// The progress thread.
    pub(super) fn run_thread(&self) {
        let mut idle_since = None;
        loop {
            // Acquire, partner: the Release store in `remove_handle`.
            if self.stop.load(Acquire) && self.try_with_engine(|engine| engine.is_drained()) == Some(true) {
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
        // In a forked child the endpoint is still its parent's.
        if !self.creator.is_this_process() {
            return;
        }
        // AcqRel: the last handle sees what the others did.
        if self.handles.fetch_sub(1, core::sync::atomic::Ordering::AcqRel) == 1 {
            self.with_engine(|engine, table| engine.close(table, Cause::Closed));
            // Release, partner: the Acquire load in `run_thread`.
            self.stop.store(true, Release);
            self.call_attention();
        }
    }
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
