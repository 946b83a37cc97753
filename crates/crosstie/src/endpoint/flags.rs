//! Flags by which threads without the engine reach the thread that runs it, and the thread that sleeps for the endpoint.
//!
//! ```text
//!   any thread                                     thread that runs the engine
//!   end operations                                 take_reap?  yes: let go of all operations that have ended
//!   request_reap, lock the engine or call its holder
//!
//!   any thread                                     thread that sleeps
//!   change what the sleeper must know              take_attention?  yes: do not sleep, look at everything again
//!   call_attention, notify the parker
//! ```
//!
//! **Promises.** One `take_reap` can answer several requests: the thread sees everything that all their threads did before. A thread
//! that took a call for attention sees what the last caller did before it. What earlier callers did it sees at the latest after its next
//! sleep, which is short: a call is a store, because many operations make one.

use core::marker::PhantomData;
use core::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

#[cfg(not(all(test, loom)))]
use core::sync::atomic::AtomicBool;
#[cfg(all(test, loom))]
use loom::sync::atomic::AtomicBool;

/// The memory orderings. Tests replace one of them.
pub(super) trait Orders {
    /// Of the swap that requests a reap. Partner: `TAKE_REAP`.
    const REQUEST_REAP: Ordering = Release;
    /// Of the swap that takes the requests. Partner: `REQUEST_REAP`, of all requests so far.
    const TAKE_REAP: Ordering = Acquire;
    /// Of the store that calls for attention. Partner: `TAKE_ATTENTION`.
    const CALL_ATTENTION: Ordering = Release;
    /// Of the swap that takes the call. Partner: `CALL_ATTENTION`.
    const TAKE_ATTENTION: Ordering = Acquire;
}

/// The orderings that ship.
#[derive(Debug)]
pub(super) struct Real;

impl Orders for Real {}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Flags<O = Real> {
    /// Operations have ended that the engine may hold without need.
    reap: AtomicBool,
    attention: AtomicBool,
    orders: PhantomData<O>,
}

impl<O: Orders> Flags<O> {
    pub(super) fn new() -> Flags<O> {
        Flags { reap: AtomicBool::new(false), attention: AtomicBool::new(false), orders: PhantomData }
    }

    /// Operations have ended. The caller then lets the engine run.
    pub(super) fn request_reap(&self) {
        // Not a store: each swap continues the release sequence of the one before, so the thread that takes the last request sees what
        // the threads of all requests did.
        self.reap.swap(true, O::REQUEST_REAP);
    }

    /// Whether the engine has to look for operations that have ended. Only the thread that has the engine asks.
    #[inline]
    pub(super) fn take_reap(&self) -> bool {
        self.reap.load(Relaxed) && self.reap.swap(false, O::TAKE_REAP)
    }

    /// Keeps the thread that sleeps for the endpoint from sleeping. The caller then notifies its parker.
    #[inline]
    pub(super) fn call_attention(&self) {
        self.attention.store(true, O::CALL_ATTENTION);
    }

    /// Whether the thread that sleeps was called. Only that thread asks.
    pub(super) fn take_attention(&self) -> bool {
        self.attention.load(Relaxed) && self.attention.swap(false, O::TAKE_ATTENTION)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::ring::combining_lock::CombiningLock;
    use crate::ring::operation_table::{EngineSide, OperationTable};
    use crate::wait::ModelParker;

    struct WeakRequestReap;
    impl Orders for WeakRequestReap {
        const REQUEST_REAP: Ordering = Relaxed;
    }
    struct WeakTakeReap;
    impl Orders for WeakTakeReap {
        const TAKE_REAP: Ordering = Relaxed;
    }
    struct WeakCallAttention;
    impl Orders for WeakCallAttention {
        const CALL_ATTENTION: Ordering = Relaxed;
    }
    struct WeakTakeAttention;
    impl Orders for WeakTakeAttention {
        const TAKE_ATTENTION: Ordering = Relaxed;
    }

    /// Two threads cancel an operation each, as `Shared::reap_soon` does. The engine lets go of both. `is_late`: the threads request the
    /// reap after they have let the engine run.
    fn check_reap<O: Orders + 'static>(request: fn(&Flags<O>), is_late: bool) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let table = Arc::new(OperationTable::<u64>::new(2));
            let sides = [1, 2].map(|value| table.lease(value).unwrap());
            sides.iter().for_each(|side| table.submit(side));
            let mut held: Vec<EngineSide> = Vec::new();
            table.take_submitted(|op| held.push(op));
            let engine = Arc::new(CombiningLock::<_>::new(held));
            let flags = Arc::new(Flags::<O>::new());
            let cancel = |key| {
                let (table, engine, flags) = (table.clone(), engine.clone(), flags.clone());
                move || {
                    assert!(table.end(key, 9));
                    if !is_late {
                        request(&flags);
                    }
                    let mut guard = engine.lock_or_call();
                    while let Some(mut held) = guard {
                        if flags.take_reap() {
                            let (ended, live) =
                                held.drain(..).partition::<Vec<_>, _>(|op| op.is_ended(&*table));
                            ended.into_iter().for_each(|op| _ = op.give_back(&*table, 9));
                            *held = live;
                        }
                        guard = held.unlock();
                    }
                    if is_late {
                        request(&flags);
                    }
                }
            };
            let other = thread::spawn(cancel(sides[1].key()));
            cancel(sides[0].key())();
            other.join().unwrap();
            for side in sides {
                assert!(side.take(&*table).is_ok(), "the engine holds an operation that has ended");
            }
        });
    }

    #[test]
    fn loom_engine_lets_go_of_all_operations_that_have_ended() {
        check_reap::<Real>(Flags::request_reap, false);
    }

    #[test]
    #[should_panic(expected = "the engine holds an operation")]
    fn loom_twin_weak_request_reap_is_caught() {
        check_reap::<WeakRequestReap>(Flags::request_reap, false);
    }

    #[test]
    #[should_panic(expected = "the engine holds an operation")]
    fn loom_twin_weak_take_reap_is_caught() {
        check_reap::<WeakTakeReap>(Flags::request_reap, false);
    }

    /// A twin that must fail: the store of one thread replaces that of the other one.
    #[test]
    #[should_panic(expected = "the engine holds an operation")]
    fn loom_twin_request_reap_with_a_store_is_caught() {
        check_reap::<Real>(|flags| flags.reap.store(true, Release), false);
    }

    /// A twin that must fail: the request comes after the call of the engine's holder.
    #[test]
    #[should_panic(expected = "the engine holds an operation")]
    fn loom_twin_late_request_reap_is_caught() {
        check_reap::<Real>(Flags::request_reap, true);
    }

    /// The last handle is dropped: a thread says that the progress thread shall end, and calls it. `is_early`: it calls first.
    fn check_attention<O: Orders + 'static>(is_early: bool) {
        loom::model(move || {
            let shared = Arc::new((Flags::<O>::new(), ModelParker::new(), AtomicBool::new(false)));
            let caller = thread::spawn({
                let shared = shared.clone();
                move || {
                    let (flags, parker, stop) = &*shared;
                    if is_early {
                        flags.call_attention();
                        stop.store(true, Relaxed);
                    } else {
                        stop.store(true, Relaxed);
                        flags.call_attention();
                    }
                    parker.notify();
                    parker.finish();
                }
            });
            let (flags, parker, stop) = &*shared;
            while !stop.load(Relaxed) {
                parker.park(|| flags.take_attention());
            }
            caller.join().unwrap();
        });
    }

    #[test]
    fn loom_called_thread_sees_why_it_was_called() {
        check_attention::<Real>(false);
    }

    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_weak_call_attention_is_caught() {
        check_attention::<WeakCallAttention>(false);
    }

    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_weak_take_attention_is_caught() {
        check_attention::<WeakTakeAttention>(false);
    }

    /// A twin that must fail: the sleeper takes the call before there is something to see.
    #[test]
    #[should_panic(expected = "a wake-up was lost")]
    fn loom_twin_early_call_attention_is_caught() {
        check_attention::<Real>(true);
    }
}
