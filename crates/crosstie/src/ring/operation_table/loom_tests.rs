//! The table under every interleaving that loom explores.

use std::sync::Arc as StdArc;

use crosstie_protocol::endpoint::imm_matching::{ImmEvent, ImmMatching};
use loom::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use loom::sync::{Arc, Notify};
use loom::thread;

use super::*;

/// Orderings with one of them weakened.
struct WeakSubmit;
impl Orders for WeakSubmit {
    const SUBMIT: Ordering = Relaxed;
}
struct WeakGiveBack;
impl Orders for WeakGiveBack {
    const GIVE_BACK: Ordering = Relaxed;
}
struct WeakFree;
impl Orders for WeakFree {
    const FREE: Ordering = Relaxed;
}

/// A value that counts its drops.
struct Value(u64, Arc<AtomicUsize>);
impl Drop for Value {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
    }
}

/// Two threads submit; the engine gets both values, and gives them back.
fn check_hand_over<O: Orders + 'static>() {
    let mut model = loom::model::Builder::new();
    // The engine's loop has too many interleavings to explore all.
    model.preemption_bound = Some(3);
    model.check(|| {
        let table = Arc::new(OperationTable::<u64, O>::new(2));
        let submitters: Vec<_> = [10, 20]
            .into_iter()
            .map(|value| {
                let table = table.clone();
                thread::spawn(move || {
                    let side = table.lease(value).unwrap();
                    table.submit(&side);
                    side
                })
            })
            .collect();
        let mut seen = 0;
        let mut taken = 0;
        while taken < 2 {
            table.take_submitted(|mut op| {
                seen += op.with_value(&*table, |value| {
                    *value += 1;
                    *value
                });
                taken += 1;
                assert!(op.give_back(&*table, 0));
            });
            if taken < 2 {
                thread::yield_now();
            }
        }
        assert_eq!(seen, 32);
        let results: Vec<_> = submitters.into_iter().map(|thread| thread.join().unwrap()).collect();
        let values: u64 = results.into_iter().map(|side| side.take(&*table).unwrap()).sum();
        assert_eq!(values, 32);
    });
}

#[test]
fn loom_values_reach_the_engine() {
    check_hand_over::<Real>();
}

#[test]
#[should_panic]
fn loom_twin_weak_submit_is_caught() {
    check_hand_over::<WeakSubmit>();
}

/// The future takes the value as soon as it is back.
fn check_return<O: Orders + 'static>() {
    loom::model(|| {
        let table = Arc::new(OperationTable::<u64, O>::new(1));
        let side = table.lease(1).unwrap();
        table.submit(&side);
        let engine = thread::spawn({
            let table = table.clone();
            move || {
                table.take_submitted(|mut op| {
                    op.with_value(&*table, |value| *value = 7);
                    op.give_back(&*table, 3);
                });
            }
        });
        let mut side = Some(side);
        while let Some(waiting) = side.take() {
            match waiting.take(&*table) {
                Ok(value) => assert_eq!(value, 7),
                Err(again) => {
                    side = Some(again);
                    thread::yield_now();
                }
            }
        }
        engine.join().unwrap();
        assert!(table.lease(2).is_ok(), "the entry is free");
    });
}

#[test]
fn loom_values_come_back() {
    check_return::<Real>();
}

#[test]
#[should_panic]
fn loom_twin_weak_give_back_is_caught() {
    check_return::<WeakGiveBack>();
}

/// I1 and I2: the future lets go while the engine gives back, and a third thread waits for the entry. The entry is leased again
/// only after both are done with it, with another generation, and the value is dropped once.
fn check_reuse<O: Orders + 'static>() {
    loom::model(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let table = Arc::new(OperationTable::<Value, O>::new(1));
        let side = table.lease(Value(1, drops.clone())).ok().unwrap();
        let first = side.key();
        table.submit(&side);
        let engine = thread::spawn({
            let table = table.clone();
            move || {
                table.take_submitted(|mut op| {
                    op.with_value(&*table, |value| value.0 += 1);
                    op.give_back(&*table, 0);
                });
            }
        });
        let future = thread::spawn({
            let table = table.clone();
            move || {
                table.end(side.key(), 1);
                side.let_go(&*table);
            }
        });
        let mut value = Some(Value(5, drops.clone()));
        while let Some(next) = value.take() {
            match table.lease(next) {
                Ok(side) => {
                    assert_ne!(side.key(), first, "another generation");
                    assert_eq!(drops.load(SeqCst), 1, "the former value is gone");
                    assert!(!side.word(&*table).is_ended());
                    side.let_go(&*table);
                }
                Err(again) => {
                    value = Some(again);
                    thread::yield_now();
                }
            }
        }
        engine.join().unwrap();
        future.join().unwrap();
        assert!(!table.end(first, 2), "a key of a former operation ends nothing");
    });
}

#[test]
fn loom_entry_is_reused_only_when_nobody_sees_it() {
    check_reuse::<Real>();
}

#[test]
#[should_panic]
fn loom_twin_weak_free_is_caught() {
    check_reuse::<WeakFree>();
}

/// Cancel against completion: one of them decides, both sides agree on which, and the value comes back in any case.
#[test]
fn loom_cancel_and_completion_agree() {
    loom::model(|| {
        let table = Arc::new(OperationTable::<u64>::new(1));
        let side = table.lease(1).unwrap();
        let key = side.key();
        table.submit(&side);
        let cancel = thread::spawn({
            let table = table.clone();
            move || table.end(key, 9)
        });
        let cancel_all = thread::spawn({
            let table = table.clone();
            move || table.end_all(8)
        });
        let mut completed = false;
        table.take_submitted(|op| completed = op.give_back(&*table, 0));
        let word = side.word(&*table);
        assert!(word.is_ended() && word.is_back());
        let (cancelled, all) = (cancel.join().unwrap(), cancel_all.join().unwrap());
        assert_eq!(usize::from(completed) + usize::from(cancelled) + all, 1, "one of them ended it");
        let expected = if completed {
            0
        } else if cancelled {
            9
        } else {
            8
        };
        assert_eq!(side.word(&*table).cause(), expected);
        assert_eq!(word.cause(), expected, "never flipped");
        assert_eq!(side.take(&*table).unwrap(), 1);
    });
}

/// The engine leases a reserved entry and gives the operation back, while another thread cancels everything: one of them ends it. Nobody else
/// gets the entry meanwhile.
#[test]
fn loom_reserved_entry_has_one_operation_which_ends_once() {
    loom::model(move || {
        let table = Arc::new(OperationTable::<u64>::new(1));
        let entry = table.reserve().unwrap();
        let cancel = thread::spawn({
            let table = table.clone();
            move || {
                assert!(table.lease(2).is_err(), "the entry is reserved, or in use");
                table.end_all(9)
            }
        });
        let (side, mut op) = table.lease_reserved(entry, 1);
        op.with_value(&*table, |value| *value = 7);
        let completed = op.give_back(&*table, 0);
        let cancelled = cancel.join().unwrap();
        assert_eq!(usize::from(completed) + cancelled, 1, "one of them ended it");
        assert_eq!(side.word(&*table).cause(), if completed { 0 } else { 9 });
        assert_eq!(side.take(&*table).unwrap(), 7);
        let entry = table.reserve().unwrap();
        table.free_reserved(entry);
        assert!(table.lease(2).is_ok());
    });
}

struct NotifyWaker(Notify);
impl std::task::Wake for NotifyWaker {
    fn wake(self: StdArc<Self>) {
        self.0.notify();
    }
}

/// A task that waits for the end, then for the value, is woken for both. `broken`: it does not look again after it has left its
/// waker.
fn check_signal(broken: bool) {
    loom::model(move || {
        let table = Arc::new(OperationTable::<u64>::new(1));
        let side = table.lease(1).unwrap();
        let key = side.key();
        table.submit(&side);
        let engine = thread::spawn({
            let table = table.clone();
            move || {
                table.end(key, 9);
                wakers::run_deferred();
                table.take_submitted(|op| _ = op.give_back(&*table, 0));
                wakers::run_deferred();
            }
        });
        for for_back in [false, true] {
            let done = || {
                let word = side.word(&*table);
                if for_back { word.is_back() } else { word.is_ended() }
            };
            while !done() {
                let notify = StdArc::new(NotifyWaker(Notify::new()));
                let waker = Waker::from(notify.clone());
                if broken {
                    *lock(&table.entry(key).waker) = Some(waker);
                    notify.0.wait();
                } else if side.set_waker(&*table, &waker, for_back) {
                    notify.0.wait();
                }
            }
        }
        engine.join().unwrap();
        assert!(side.take(&*table).is_ok());
    });
}

#[test]
fn loom_no_wake_up_is_lost() {
    check_signal(false);
}

#[test]
#[should_panic]
fn loom_twin_unchecked_waker_is_caught() {
    check_signal(true);
}

/// `imm_recv`: an immediate arrives, a call comes, and the call is cancelled, in every order. The immediate is given to the call, or
/// it waits for the next one: never lost, never given to a call that has ended.
fn check_matching(forgets: bool) {
    loom::model(move || {
        let table = Arc::new(OperationTable::<u64>::new(2));
        let engine = Arc::new(loom::sync::Mutex::new(ImmMatching::<EngineSide>::new(2, 2)));
        let give = move |table: &OperationTable<u64>, mut op: EngineSide, event: ImmEvent| {
            op.with_value(table, |value| *value = event.imm.into());
            op.give_back(table, 0) || forgets
        };
        let arrival = thread::spawn({
            let (table, engine) = (table.clone(), engine.clone());
            move || {
                let event = ImmEvent { imm: 77, bytes: 0 };
                engine.lock().unwrap().arrive(event, |op, event| give(&table, op, event));
            }
        });
        let side = table.lease(0).unwrap();
        let key = side.key();
        let cancel = thread::spawn({
            let table = table.clone();
            move || table.end(key, 9)
        });
        table.submit(&side);
        {
            let mut engine = engine.lock().unwrap();
            table.take_submitted(|op| _ = engine.call(op, |op, event| give(&table, op, event)));
        }
        arrival.join().unwrap();
        let cancelled = cancel.join().unwrap();
        // The next call gets the immediate if the first one was cancelled.
        let next = table.lease(0).unwrap();
        table.submit(&next);
        {
            let mut engine = engine.lock().unwrap();
            table.take_submitted(|op| _ = engine.call(op, |op, event| give(&table, op, event)));
        }
        let next_got = next.word(&*table).is_back();
        assert_eq!(next_got, cancelled, "the immediate was lost, or given twice");
        let winner = if cancelled { next } else { side };
        assert_eq!(winner.take(&*table).unwrap(), 77);
    });
}

#[test]
fn loom_immediate_reaches_exactly_one_call() {
    check_matching(false);
}

#[test]
#[should_panic(expected = "lost")]
fn loom_twin_immediate_of_a_cancelled_call_is_caught() {
    check_matching(true);
}
