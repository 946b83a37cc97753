//! What polls the context, so that futures get on.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::Duration;

use super::client::Client;
use super::desk::{Desk, DriverCounters, MAX_CALLS, Ticket};
use super::server::{Handlers, Service};
use crate::copyrpc::{Context, Counters, EndpointConfig};
use crate::device::DeviceError;

/// Rounds without news before [`Driver::run_until`] lets other threads have the core, and before it sleeps.
const SPINS: u32 = 2_000;
const SLEEPY: u32 = SPINS + 100;
/// How long it sleeps at a time: so late it may see that another thread woke its future.
const SLEEP: Duration = Duration::from_millis(5);
/// Rounds without news before [`Driver::run`] stops polling, when no call is open.
const LAST_ROUNDS: u32 = 64;

/// Polls a context for the futures of its calls. One thread's, as the context is.
///
/// One of three ways suits most programs:
///
/// | | who runs the futures | while there is nothing to do |
/// | --- | --- | --- |
/// | [`run_until`](Driver::run_until) | the driver | sleeps on the device |
/// | [`run`](Driver::run), spawned | any executor of this thread | no call open: does not run at all; else as it is told |
/// | [`step`](Driver::step), in a loop of the program's own | the program | as the program likes: see [`wait`](Driver::wait) |
///
/// Dropping it ends all calls as [closed](crate::copyrpc::Failure::Closed).
pub struct Driver {
    context: Context<Ticket>,
    desk: Rc<Desk>,
}

impl Driver {
    /// Drives a context, with as many calls open at a time as there can be (about a million).
    pub fn new(context: Context<Ticket>) -> Driver {
        Driver::with_limit(context, MAX_CALLS)
    }

    /// As [`new`](Driver::new), with at most `calls` open at a time, those included that wait for room. More end as
    /// [`TooManyCalls`](super::Error::TooManyCalls).
    pub fn with_limit(context: Context<Ticket>, calls: usize) -> Driver {
        Driver { context, desk: Rc::new(Desk::new(calls)) }
    }

    /// A new client, to be connected. Its connection can bring requests, too: see [`serve`](Driver::serve).
    pub fn create_client(&self, config: &EndpointConfig) -> Result<Client, DeviceError> {
        Ok(Client::new(self.desk.clone(), self.context.create_endpoint(config)?))
    }

    /// Polls once: sends what is due, wakes the futures of calls that have ended, and makes calls that waited for room.
    /// Says whether any call has got on. Never waits.
    #[inline]
    pub fn step(&self) -> bool {
        let answers = self.context.poll(|ticket, answer| self.desk.finish(ticket, answer));
        answers + self.desk.advance() > 0
    }

    /// Answers all requests that have come, as [`Service::serve`].
    pub fn serve<S, H: Handlers<S, Ticket>>(&self, service: &mut Service<S, Ticket, H>) -> usize {
        service.serve(&self.context)
    }

    /// Waits until something comes, as [`Context::wait`]: then [`step`](Driver::step).
    pub fn wait(&self, timeout: Duration) -> bool {
        let came = self.context.wait(timeout);
        self.desk.look_soon();
        came
    }

    /// Runs a future to its end on this thread, and the context with it. Spins while there is something to do, sleeps on the
    /// device while there is not. A future that another thread wakes meanwhile gets on within 5 ms.
    ///
    /// Requests that come meanwhile wait, and keep it from sleeping: see [`run_serving`](Driver::run_serving).
    pub fn run_until<F: Future>(&self, future: F) -> F::Output {
        self.run_with(future, || 0)
    }

    /// As [`run_until`](Driver::run_until), and answers requests meanwhile.
    pub fn run_serving<F: Future, S, H: Handlers<S, Ticket>>(
        &self,
        future: F,
        service: &mut Service<S, Ticket, H>,
    ) -> F::Output {
        self.run_with(future, || service.serve(&self.context))
    }

    fn run_with<F: Future>(&self, future: F, mut serve: impl FnMut() -> usize) -> F::Output {
        let mut future = pin!(future);
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        let mut task = TaskContext::from_waker(&waker);
        let mut idle = 0;
        loop {
            // Acquire: with the Release of `wake_by_ref`, so that the future sees why it was woken.
            if woken.0.load(Ordering::Relaxed) && woken.0.swap(false, Ordering::Acquire) {
                if let Poll::Ready(output) = future.as_mut().poll(&mut task) {
                    // What it called last, and did not wait for, still goes out.
                    self.context.flush();
                    return output;
                }
                idle = 0;
            }
            if self.step() | (serve() > 0) {
                idle = 0;
                continue;
            }
            idle += 1;
            match idle {
                ..SPINS => std::hint::spin_loop(),
                SPINS..SLEEPY => std::thread::yield_now(),
                _ => idle = if self.wait(SLEEP) { SPINS } else { SLEEPY },
            }
        }
    }

    /// Polls for ever, as a future for an executor of this thread: once each time that the executor runs it.
    ///
    /// While no call is open it does not run; the next call wakes it. While calls are open, and nothing has come for a
    /// while, it holds up the executor to sleep on the device, for `stall` at a time at most: other tasks may be late by that
    /// much. With a `stall` of zero it never does, and takes all the time that the executor has left over.
    ///
    /// It is for programs that call. Requests do not wake it: a program that serves too has
    /// [`run_serving`](Driver::run_serving), or a loop of its own.
    pub async fn run(&self, stall: Duration) -> ! {
        let mut idle = 0;
        let forever = poll_fn(|task| {
            idle = if self.step() { 0 } else { idle + 1 };
            if self.desk.open() == 0 && idle >= LAST_ROUNDS {
                idle = 0;
                // The peer may wait for credit.
                self.context.flush();
                self.desk.sleep(task.waker());
                return Poll::Pending;
            }
            if idle >= SPINS && !stall.is_zero() {
                self.wait(stall);
                idle = SPINS;
            }
            task.waker().wake_by_ref();
            Poll::<std::convert::Infallible>::Pending
        });
        match forever.await {}
    }

    /// What happened so far.
    pub fn counters(&self) -> DriverCounters {
        self.desk.counters()
    }

    /// What happened so far, on the context.
    pub fn context_counters(&self) -> Counters {
        self.context.counters()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.desk.shut();
    }
}

/// Whether a future is to be polled again.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Release: with the Acquire of `run_with`.
        self.0.store(true, Ordering::Release);
    }
}
