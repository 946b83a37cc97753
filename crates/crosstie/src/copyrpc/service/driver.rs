//! The driver: polls a context, so that the futures of its calls make progress.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use super::call_table::{CallTable, DriverCounters};
use super::client::Client;
use super::server::{Handlers, Service};
use super::slots::{CallToken, MAX_CALLS};
use crate::copyrpc::{ConnectionConfig, Context, Counters};
use crate::device::DeviceError;

/// Rounds without progress before [`Driver::run_until`] yields the core instead of spinning, and before it sleeps.
const SPIN_ROUNDS: u32 = 2_000;
const YIELD_ROUNDS: u32 = SPIN_ROUNDS + 100;
/// How long it sleeps at a time. It notices at most this late that another thread woke its future.
const SLEEP: Duration = Duration::from_millis(5);
/// Rounds without progress before [`Driver::run`] stops polling, if no call is open.
const LAST_ROUNDS: u32 = 64;

/// Polls a context for the futures of its calls. It belongs to one thread, like the context.
///
/// There are three ways to use it:
///
/// | | what runs the futures | while there is nothing to do |
/// | --- | --- | --- |
/// | [`run_until`](Driver::run_until) | the driver | sleeps on the device |
/// | [`run`](Driver::run), spawned | any executor of this thread | no call open: does not run at all; otherwise polls, or sleeps for up to `stall` |
/// | [`step`](Driver::step), in a loop of the program's own | the program | the program decides, see [`wait`](Driver::wait) |
///
/// Dropping it ends all calls as [closed](crate::copyrpc::Failure::Closed).
pub struct Driver {
    context: Context<CallToken>,
    calls: Rc<CallTable>,
}

impl Driver {
    /// Creates a driver for a context. About a million calls can be open at a time.
    pub fn new(context: Context<CallToken>) -> Driver {
        Driver::with_limit(context, MAX_CALLS)
    }

    /// Like [`new`](Driver::new), with at most `calls` open at a time, including those that wait for room. Further calls end as
    /// [`TooManyCalls`](super::Error::TooManyCalls).
    pub fn with_limit(context: Context<CallToken>, calls: usize) -> Driver {
        Driver { context, calls: Rc::new(CallTable::new(calls)) }
    }

    /// Creates a client, which is then to be connected. Its connection can also carry requests of the peer, see
    /// [`step_serving`](Driver::step_serving).
    pub fn create_client(&self, config: &ConnectionConfig) -> Result<Client, DeviceError> {
        Ok(Client::new(self.calls.clone(), self.context.create_connection(config)?))
    }

    /// Polls once: sends what is due, wakes the futures of calls that have ended, and makes calls that waited for room.
    /// Returns whether any call made progress. Never waits.
    #[inline]
    pub fn step(&self) -> bool {
        let ended = self.context.poll(|token, result| self.calls.finish_call(token, result));
        ended + self.calls.make_waiting_calls() > 0
    }

    /// As [`step`](Driver::step), and answers the requests that it finds, see [`Service::poll`]. Returns whether there was anything to do.
    #[inline]
    pub fn step_serving<S, H: Handlers<S, CallToken>>(&self, service: &mut Service<S, CallToken, H>) -> bool {
        let count = service.poll(&self.context, |token, result| self.calls.finish_call(token, result));
        count + self.calls.make_waiting_calls() > 0
    }

    /// Waits until there is something to do, see [`Context::wait`]; also at the earliest deadline of a call that waits for room. Then
    /// [`step`](Driver::step).
    pub fn wait(&self, timeout: Duration) -> bool {
        let until_deadline = self.calls.time_until_deadline();
        let is_due = self.context.wait(until_deadline.map_or(timeout, |time| time.min(timeout)));
        self.calls.check_deadlines_soon();
        is_due || until_deadline.is_some_and(|time| time <= timeout)
    }

    /// Runs a future to its end on this thread, and polls the context for it. It spins while there is something to do, and sleeps on
    /// the device while there is not. If another thread wakes the future, it continues within 5 ms.
    ///
    /// Requests that arrive in the meantime wait, and prevent it from sleeping. See [`run_serving`](Driver::run_serving).
    pub fn run_until<F: Future>(&self, future: F) -> F::Output {
        self.run_with(future, || self.step())
    }

    /// Like [`run_until`](Driver::run_until), and answers requests in the meantime.
    pub fn run_serving<F: Future, S, H: Handlers<S, CallToken>>(
        &self,
        future: F,
        service: &mut Service<S, CallToken, H>,
    ) -> F::Output {
        self.run_with(future, || self.step_serving(service))
    }

    fn run_with<F: Future>(&self, future: F, mut step: impl FnMut() -> bool) -> F::Output {
        let mut future = pin!(future);
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut task = TaskContext::from_waker(&waker);
        let mut idle = 0;
        loop {
            // Acquire: pairs with the Release in `wake_by_ref`, so that the future sees what it was woken for.
            if woken.0.load(Ordering::Relaxed) && woken.0.swap(false, Ordering::Acquire) {
                if let Poll::Ready(output) = future.as_mut().poll(&mut task) {
                    // Calls that it made last and did not await still go out.
                    self.context.flush();
                    return output;
                }
                idle = 0;
            }
            if step() {
                idle = 0;
                continue;
            }
            idle += 1;
            match idle {
                ..SPIN_ROUNDS => std::hint::spin_loop(),
                SPIN_ROUNDS..YIELD_ROUNDS => std::thread::yield_now(),
                _ => idle = if self.wait(SLEEP) { SPIN_ROUNDS } else { YIELD_ROUNDS },
            }
        }
    }

    /// A future that polls for ever, for an executor of this thread. It polls once each time that the executor runs it.
    ///
    /// While no call is open it does not run; the next call wakes it. While calls are open and nothing has arrived for a while, it
    /// blocks the executor to sleep on the device, for at most `stall` at a time: other tasks may be late by that much. With
    /// a `stall` of zero it never blocks, and uses all the time that the executor has left over.
    ///
    /// It is for programs that only make calls. Requests do not wake it: a program that also serves uses
    /// [`run_serving`](Driver::run_serving), or a loop of its own.
    pub async fn run(&self, stall: Duration) -> ! {
        let mut idle = 0;
        let forever = poll_fn(|task| {
            idle = if self.step() { 0 } else { idle + 1 };
            if self.calls.open_calls() == 0 && idle >= LAST_ROUNDS {
                idle = 0;
                // The peer may wait for credit.
                self.context.flush();
                self.calls.wake_on_next_call(task.waker());
                return Poll::Pending;
            }
            if idle >= SPIN_ROUNDS && !stall.is_zero() {
                self.wait(stall);
                idle = SPIN_ROUNDS;
            }
            task.waker().wake_by_ref();
            Poll::<std::convert::Infallible>::Pending
        });
        match forever.await {}
    }

    /// What the driver has done so far.
    pub fn counters(&self) -> DriverCounters {
        self.calls.counters()
    }

    /// What the context has done so far.
    pub fn context_counters(&self) -> Counters {
        self.context.counters()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.calls.close();
    }
}

/// Whether the future was woken and must be polled again.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Release: pairs with the Acquire in `run_with`.
        self.0.store(true, Ordering::Release);
    }
}
