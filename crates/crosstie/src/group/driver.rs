//! Who runs the engine, and how threads wait.
//!
//! A thread of the application that waits in a call of the group runs the engine itself, so that no thread hands anything over on
//! the way from a packet to its waiter. When no call of the application has used the engine for a while, the group's own thread takes
//! over: it serves locks, barriers and messages of other members, and parks at the completion queue while nothing comes.
//!
//! ```text
//!   application in a call      spins, yields, then parks at the completion queue
//!   other application threads  wait for the engine, or park until something has ended
//!   group's thread             looks every TICK whether the application uses the engine; if not, serves and parks at the queue
//! ```

use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use core::task::Waker;
use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use super::engine::Engine;
use super::error::GroupError;
use crate::WaitStrategy;
use crate::device::CqParker;
use crate::wait::{Parker, park_once};

/// How often the group's thread looks whether the application uses the engine.
const TICK: Duration = Duration::from_millis(2);
/// Passes before a waiting thread first reads the clock.
const SPIN_PASSES: u32 = 64;
/// How long a waiting thread spins, and then yields, before it parks. In nanoseconds.
const SPIN_TIME: u64 = 5_000;
const YIELD_TIME: u64 = 50_000;
/// Longest park where a thread has to hold the engine while it parks: others wait for it.
const DEVICE_WAIT: Duration = Duration::from_millis(1);
/// How long a thread waits for the right to park: while the group's thread gives it back, and while another thread of the
/// application has it.
const RIGHT_WAIT: Duration = Duration::from_micros(100);
const OTHER_DRIVER_WAIT: Duration = Duration::from_millis(5);

/// What all handles of a group share.
#[derive(Debug)]
pub(super) struct Shared {
    engine: Mutex<Engine>,
    /// Threads that wait for the engine.
    contenders: AtomicU32,
    /// Changes with every use by the application. Only a hint: written without read-modify-write.
    uses: AtomicU32,
    /// Threads of the application inside a wait.
    drivers: AtomicU32,
    /// The application will not run the engine for now: a future waits.
    hand_over: AtomicBool,
    stop: AtomicBool,
    /// Where a thread parks until a packet comes. Empty if the device has no such place.
    parkers: Vec<CqParker>,
    /// Wakes the thread that parks at `parkers`.
    wake: Parker,
    /// Who has it may park at `parkers`.
    park_right: Mutex<()>,
    /// The group's thread has the right, and gives it back when it is woken.
    thread_has_right: AtomicBool,
    /// Threads without the right sleep here until something has ended. The number changes with every notification.
    sleeping: Mutex<u32>,
    ended: Condvar,
    sleepers: AtomicU32,
    strategy: WaitStrategy,
    thread: Mutex<Option<std::thread::Thread>>,
}

/// The engine, while one thread has it. When the thread gives it back, futures and threads are woken for which something has ended: not before, since
/// a waker may poll its future at once, and the future needs the engine.
#[derive(Debug)]
pub(super) struct EngineGuard<'s> {
    /// `None` only while it is dropped.
    engine: Option<MutexGuard<'s, Engine>>,
    shared: &'s Shared,
}

impl Deref for EngineGuard<'_> {
    type Target = Engine;

    #[inline]
    fn deref(&self) -> &Engine {
        match &self.engine {
            Some(engine) => engine,
            None => unreachable!("the engine was given back"),
        }
    }
}

impl DerefMut for EngineGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Engine {
        match &mut self.engine {
            Some(engine) => engine,
            None => unreachable!("the engine was given back"),
        }
    }
}

impl Drop for EngineGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut engine) = self.engine.take() else { return };
        let results = &mut engine.wires.results;
        let has_ended = core::mem::take(&mut results.changed);
        let to_wake = match results.to_wake.is_empty() {
            true => Vec::new(),
            false => core::mem::take(&mut results.to_wake),
        };
        drop(engine);
        if !to_wake.is_empty() {
            self.shared.wake_futures(to_wake);
        }
        if has_ended {
            self.shared.notify();
        }
    }
}

impl Shared {
    pub(super) fn new(engine: Engine, strategy: WaitStrategy) -> Shared {
        Shared {
            parkers: engine.parkers(),
            engine: Mutex::new(engine),
            contenders: AtomicU32::new(0),
            uses: AtomicU32::new(0),
            drivers: AtomicU32::new(0),
            hand_over: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            wake: Parker::default(),
            park_right: Mutex::new(()),
            thread_has_right: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            ended: Condvar::new(),
            sleepers: AtomicU32::new(0),
            strategy,
            thread: Mutex::new(None),
        }
    }

    /// Takes the engine for a call of the application.
    #[inline]
    pub(super) fn engine(&self) -> EngineGuard<'_> {
        self.uses.store(self.uses.load(Relaxed).wrapping_add(1), Relaxed);
        self.lock()
    }

    /// Takes the engine without counting as a use of it.
    #[inline]
    pub(super) fn lock(&self) -> EngineGuard<'_> {
        self.guard(match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.lock_contended(),
        })
    }

    #[inline]
    fn guard<'s>(&'s self, engine: MutexGuard<'s, Engine>) -> EngineGuard<'s> {
        EngineGuard { engine: Some(engine), shared: self }
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, Engine> {
        self.contenders.fetch_add(1, Relaxed);
        // The thread that has the engine may be parked in the device.
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.contenders.fetch_sub(1, Relaxed);
        engine
    }

    /// Gives the engine back, and wakes those for whom something has ended.
    #[inline]
    pub(super) fn release(&self, engine: EngineGuard<'_>) {
        drop(engine);
    }

    #[cold]
    fn wake_futures(&self, mut wakers: Vec<Waker>) {
        wakers.drain(..).for_each(Waker::wake);
        // Its memory is used again.
        if let Ok(mut engine) = self.engine.try_lock()
            && engine.wires.results.to_wake.capacity() == 0
        {
            engine.wires.results.to_wake = wakers;
        }
    }

    #[inline]
    fn notify(&self) {
        if !self.parkers.is_empty() {
            self.wake.notify();
        }
        if self.sleepers.load(Relaxed) > 0 {
            let mut notified = self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
            *notified = notified.wrapping_add(1);
            self.ended.notify_all();
        }
    }

    /// Runs the engine until `check` returns something, or the deadline has passed.
    #[inline]
    pub(super) fn wait<'s, T>(
        &'s self,
        mut engine: EngineGuard<'s>,
        deadline: Option<Instant>,
        mut check: impl FnMut(&mut Engine) -> Option<T>,
    ) -> Result<T, GroupError> {
        for _ in 0..SPIN_PASSES {
            if let Some(result) = check(&mut engine) {
                self.release(engine);
                return Ok(result);
            }
            if engine.progress() == 0 {
                core::hint::spin_loop();
            }
        }
        self.drivers.fetch_add(1, Relaxed);
        let result = self.wait_long(engine, deadline, check);
        self.uses.store(self.uses.load(Relaxed).wrapping_add(1), Relaxed);
        self.drivers.fetch_sub(1, Relaxed);
        result
    }

    fn wait_long<'s, T>(
        &'s self,
        mut engine: EngineGuard<'s>,
        deadline: Option<Instant>,
        mut check: impl FnMut(&mut Engine) -> Option<T>,
    ) -> Result<T, GroupError> {
        let mut begin = engine.read_clock();
        let mut found = None;
        loop {
            for _ in 0..SPIN_PASSES {
                if let Some(result) = found.take().or_else(|| check(&mut engine)) {
                    self.release(engine);
                    return Ok(result);
                }
                if engine.progress() > 0 {
                    // The next packet is probably near.
                    begin = engine.now();
                } else {
                    core::hint::spin_loop();
                }
                if self.contenders.load(Relaxed) > 0 {
                    break;
                }
            }
            if let Some(error) = engine.failed.clone() {
                self.release(engine);
                return Err(error);
            }
            let waited = engine.read_clock().saturating_sub(begin);
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.release(engine);
                return Err(GroupError::TimedOut);
            }
            let contended = self.contenders.load(Relaxed) > 0;
            if contended
                || (self.strategy == WaitStrategy::Adaptive && (SPIN_TIME..YIELD_TIME).contains(&waited))
            {
                self.release(engine);
                std::thread::yield_now();
                engine = self.lock();
            } else if (self.strategy == WaitStrategy::Park
                || (self.strategy == WaitStrategy::Adaptive && waited >= SPIN_TIME))
                && engine.progress_before_park() == 0
            {
                let limit = engine.time_to_next_deadline().min(left.unwrap_or(Duration::MAX));
                engine = self.park(engine, limit, &mut |engine| {
                    found = found.take().or_else(|| check(engine));
                    found.is_some()
                });
            }
        }
    }

    /// Parks until a packet comes, something has ended, or the time is over.
    fn park<'s>(
        &'s self,
        mut engine: EngineGuard<'s>,
        limit: Duration,
        check: &mut dyn FnMut(&mut Engine) -> bool,
    ) -> EngineGuard<'s> {
        if check(&mut engine) {
            return engine;
        }
        let Ok(right) = self.park_right.try_lock() else {
            // Another thread serves packets meanwhile: a thread of the application that waits, too, or for a moment still the
            // group's.
            self.sleepers.fetch_add(1, Relaxed);
            let by_thread = self.thread_has_right.load(Relaxed);
            if by_thread && !self.parkers.is_empty() {
                self.wake.wake();
            }
            let limit = limit.min(if by_thread { RIGHT_WAIT } else { OTHER_DRIVER_WAIT });
            let seen = *self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
            drop(engine);
            // Not with the engine's mutex: a thread that takes that again behind a wait is no contender, and the one that parks in the
            // device with the engine would keep it.
            let sleeping = self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.ended.wait_timeout_while(sleeping, limit, |notified| *notified == seen));
            self.sleepers.fetch_sub(1, Relaxed);
            return self.lock();
        };
        if self.parkers.is_empty() {
            engine.wait_in_device(limit.min(DEVICE_WAIT));
            drop(right);
            return engine;
        }
        self.release(engine);
        self.park_at_queues(limit, check);
        drop(right);
        self.lock()
    }

    /// Parks without the engine. The caller has the right to park.
    fn park_at_queues(&self, limit: Duration, check: &mut dyn FnMut(&mut Engine) -> bool) {
        let parkers = self.parkers.iter().map(CqParker::parker).chain([&self.wake]);
        park_once(parkers, limit, || match self.engine.try_lock() {
            Ok(engine) => {
                let mut engine = self.guard(engine);
                engine.is_ready() || check(&mut engine)
            }
            // Somebody has the engine: look again what has become of it.
            Err(_) => true,
        });
    }

    /// A future waits, and its thread may sleep now: the group's thread takes over at once.
    pub(super) fn hand_over(&self) {
        if !self.hand_over.swap(true, Relaxed)
            && let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner)
        {
            thread.unpark();
        }
    }

    /// Starts the group's thread.
    pub(super) fn start_thread(self: &Arc<Shared>) -> std::io::Result<std::thread::JoinHandle<()>> {
        let shared = self.clone();
        self.lock().combines = true;
        let handle =
            std::thread::Builder::new().name("crosstie-group".into()).spawn(move || shared.run_thread())?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle.thread().clone());
        Ok(handle)
    }

    pub(super) fn stop_thread(&self) {
        self.stop.store(true, Relaxed);
        let mut engine = self.lock();
        engine.combines = false;
        engine.post_open_packets();
        self.release(engine);
        if let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            thread.unpark();
        }
        if !self.parkers.is_empty() {
            self.wake.wake();
        }
    }

    fn run_thread(&self) {
        let mut seen = self.uses.load(Relaxed);
        while !self.stop.load(Relaxed) {
            let uses = self.uses.load(Relaxed);
            let is_used = uses != seen || self.drivers.load(Relaxed) > 0;
            if is_used && !self.hand_over.swap(false, Relaxed) {
                seen = uses;
                // The application may have stopped after messages that wait for others. If it has the engine, it has not.
                if let Ok(engine) = self.engine.try_lock() {
                    self.guard(engine).post_open_packets();
                }
                std::thread::park_timeout(TICK);
                continue;
            }
            let Ok(right) = self.park_right.try_lock() else {
                std::thread::park_timeout(TICK);
                continue;
            };
            self.thread_has_right.store(true, Relaxed);
            self.serve(uses);
            self.thread_has_right.store(false, Relaxed);
            drop(right);
        }
    }

    /// Serves packets while the application does not use the engine, then parks once.
    fn serve(&self, uses: u32) {
        let mut engine = self.lock();
        let mut begin = engine.read_clock();
        loop {
            if engine.progress_before_park() > 0 {
                begin = engine.now();
            }
            if engine.failed.is_some() {
                self.release(engine);
                std::thread::park_timeout(TICK);
                return;
            }
            if engine.now().saturating_sub(begin) > YIELD_TIME {
                break;
            }
            self.release(engine);
            std::thread::yield_now();
            if self.uses.load(Relaxed) != uses || self.stop.load(Relaxed) {
                return;
            }
            engine = self.lock();
        }
        let limit = engine.time_to_next_deadline();
        if self.parkers.is_empty() {
            engine.wait_in_device(limit.min(DEVICE_WAIT));
            self.release(engine);
            return;
        }
        self.release(engine);
        self.park_at_queues(limit, &mut |_| self.stop.load(Relaxed) || self.uses.load(Relaxed) != uses);
    }
}
