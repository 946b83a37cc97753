//! Tests of the combining lock.

use super::*;

/// A thread becomes the owner when it takes the lock for the second time in a row.
#[derive(Debug)]
struct Soon;
impl Orders for Soon {
    const IN_A_ROW: (u32, u32) = (1, 1);
}

fn make_owner<O: Orders>(lock: &CombiningLock<usize, O>) {
    for _ in 0..=O::IN_A_ROW.0 {
        assert!(lock.try_lock().unwrap().unlock().is_none());
    }
    let guard = lock.try_lock().unwrap();
    assert!(guard.owner != 0 && guard.unlock().is_none());
}

#[cfg(not(loom))]
mod threads {
    use super::*;

    /// With and without an owner.
    #[test]
    fn a_call_keeps_the_holder_until_it_has_looked() {
        for is_owner in [false, true] {
            let lock = CombiningLock::<usize>::new(0);
            if is_owner {
                make_owner(&lock);
            }
            let mut guard = lock.try_lock().unwrap();
            assert_eq!(guard.owner != 0, is_owner);
            assert!(
                lock.try_lock().is_none() && lock.lock_or_call().is_none() && lock.lock_or_call().is_none()
            );
            *guard += 1;
            let guard = guard.unlock().expect("called");
            assert!(lock.try_lock().is_none() && guard.owner == 0);
            assert!(guard.unlock().is_none());
            let guard = lock.lock_or_call().expect("free");
            assert_eq!((*guard, guard.owner != 0), (1, is_owner));
            drop(guard);
            assert!(lock.try_lock().is_some(), "a dropped guard unlocks");
        }
    }

    #[test]
    fn another_thread_finds_the_owner_inside_and_ends_its_ownership() {
        fence::register().unwrap();
        let lock = CombiningLock::<usize>::new(0);
        make_owner(&lock);
        let guard = lock.try_lock().unwrap();
        let in_another_thread = |calls: bool| {
            std::thread::scope(|s| s.spawn(|| lock.lock_as_any(thread_number(), calls).is_some()).join())
        };
        assert!(!in_another_thread(false).unwrap(), "the owner is inside");
        // It is not the owner any more, but it is inside: nobody else enters, nor does it enter again.
        assert!(!in_another_thread(false).unwrap() && lock.try_lock().is_none());
        assert!(guard.unlock().is_none(), "nobody has called");
        assert!(in_another_thread(true).unwrap(), "free");
        let guard = lock.try_lock().unwrap();
        assert!(guard.owner == 0, "it has to take the lock more often first");
        assert!(!in_another_thread(true).unwrap());
        assert!(guard.unlock().expect("called").unlock().is_none());
    }

    /// Many threads, owners that change: each piece of work is done once, by one thread at a time.
    #[test]
    fn threads_take_turns_as_owners() {
        fence::register().unwrap();
        const ROUNDS: usize = 5_000;
        let lock = CombiningLock::<(usize, usize), Soon>::new((0, 0));
        let published = core::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for round in 0..ROUNDS {
                        published.fetch_add(1, Relaxed);
                        let mut guard = lock.lock_or_call();
                        while let Some(mut locked) = guard {
                            // Plain counters: two threads inside would lose some.
                            let more = published.swap(0, Relaxed);
                            locked.0 += more;
                            core::hint::black_box(&mut locked);
                            locked.1 += more;
                            guard = locked.unlock();
                        }
                        if round % 1000 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.try_lock().unwrap(), (3 * ROUNDS, 3 * ROUNDS), "nothing is left, and nothing lost");
    }
}

#[cfg(loom)]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    struct WeakUnlock;
    impl Orders for WeakUnlock {
        const UNLOCK: Ordering = Relaxed;
    }
    struct WeakCall;
    impl Orders for WeakCall {
        const CALL: Ordering = Relaxed;
    }
    struct WeakLeave;
    impl Orders for WeakLeave {
        const LEAVE: Ordering = Relaxed;
        const IN_A_ROW: (u32, u32) = Soon::IN_A_ROW;
    }
    struct OneFlag;
    impl Orders for OneFlag {
        const OWN_FLAGS: bool = false;
        const IN_A_ROW: (u32, u32) = Soon::IN_A_ROW;
    }
    struct NoFence;
    impl Orders for NoFence {
        const IN_A_ROW: (u32, u32) = Soon::IN_A_ROW;
        fn heavy_fence() {}
    }

    /// What is broken in a twin.
    #[derive(Clone, Copy, PartialEq)]
    enum Broken {
        Nothing,
        /// A thread that finds the lock taken does not call.
        Call,
        /// The owner does not look at CALLED when it leaves.
        Look,
    }

    /// Threads publish one item each and leave as soon as they may. When all have left, all items were taken. With `Soon` the first
    /// thread is the owner.
    fn check<O: Orders + 'static>(threads: usize, broken: Broken) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(if threads > 2 { 2 } else { 4 });
        model.check(move || {
            let work: Arc<Vec<_>> = Arc::new((0..threads).map(|_| AtomicUsize::new(0)).collect());
            let lock = Arc::new(CombiningLock::<usize, O>::new(0));
            if O::IN_A_ROW.0 == 1 {
                make_owner(&lock);
            }
            let run = |index: usize| {
                let (work, lock) = (work.clone(), lock.clone());
                move || {
                    // Not a store: loom lets a store change places with a swap that does not read it.
                    work[index].swap(1, Relaxed);
                    let mut guard =
                        if broken == Broken::Call { lock.try_lock() } else { lock.lock_or_call() };
                    while let Some(mut locked) = guard {
                        *locked += work.iter().map(|item| item.swap(0, Relaxed)).sum::<usize>();
                        if broken == Broken::Look && locked.owner != 0 {
                            return drop(locked);
                        }
                        guard = locked.unlock();
                    }
                }
            };
            let others: Vec<_> = (1..threads).map(|index| thread::spawn(run(index))).collect();
            run(0)();
            others.into_iter().for_each(|other| other.join().unwrap());
            assert_eq!(*lock.try_lock().unwrap(), threads, "work was lost");
        });
    }

    #[test]
    fn loom_published_work_is_done() {
        check::<Real>(2, Broken::Nothing);
    }

    #[test]
    fn loom_published_work_is_done_while_a_thread_is_the_owner() {
        check::<Soon>(2, Broken::Nothing);
    }

    #[test]
    fn loom_published_work_of_three_threads_is_done_while_one_is_the_owner() {
        check::<Soon>(3, Broken::Nothing);
    }

    #[test]
    #[should_panic(expected = "lost")]
    fn loom_twin_without_call_is_caught() {
        check::<Real>(2, Broken::Call);
    }

    #[test]
    #[should_panic(expected = "lost")]
    fn loom_twin_owner_that_does_not_look_is_caught() {
        check::<Soon>(2, Broken::Look);
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_unlock_is_caught() {
        check::<WeakUnlock>(2, Broken::Nothing);
    }

    #[test]
    #[should_panic]
    fn loom_twin_weak_leave_is_caught() {
        check::<WeakLeave>(2, Broken::Nothing);
    }

    #[test]
    #[should_panic]
    fn loom_twin_without_fence_is_caught() {
        check::<NoFence>(2, Broken::Nothing);
    }

    /// The owner takes the lock again and again while another thread does, and becomes the owner itself. Both leave when they find it
    /// taken.
    fn check_exclusion<O: Orders + 'static>() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let lock = Arc::new(CombiningLock::<usize, O>::new(0));
            make_owner(&lock);
            let add = |lock: &CombiningLock<usize, O>| match lock.try_lock() {
                Some(mut guard) => {
                    *guard += 1;
                    assert!(guard.unlock().is_none(), "nobody calls");
                    1
                }
                None => 0,
            };
            let other = thread::spawn({
                let lock = lock.clone();
                move || add(&lock) + add(&lock) + add(&lock)
            });
            let added = add(&lock) + add(&lock) + other.join().unwrap();
            assert_eq!(*lock.try_lock().unwrap(), added);
        });
    }

    #[test]
    fn loom_owners_and_others_exclude_each_other() {
        check_exclusion::<Soon>();
    }

    /// A thread that was the owner a moment ago takes its flag back, while another thread is the owner.
    #[test]
    #[should_panic]
    fn loom_twin_with_one_flag_for_all_owners_is_caught() {
        check_exclusion::<OneFlag>();
    }

    /// The item is a plain load, so that only the call's ordering makes it visible.
    fn check_call<O: Orders + 'static>() {
        loom::model(|| {
            let item = Arc::new(AtomicUsize::new(0));
            let lock = Arc::new(CombiningLock::<(), O>::new(()));
            let guard = lock.try_lock().unwrap();
            let other = thread::spawn({
                let (item, lock) = (item.clone(), lock.clone());
                move || {
                    item.store(1, Relaxed);
                    lock.lock_or_call().is_some_and(|guard| guard.unlock().is_none())
                }
            });
            let called = match guard.unlock() {
                Some(guard) => {
                    assert_eq!(item.load(Relaxed), 1, "the holder does not see what was published");
                    assert!(guard.unlock().is_none());
                    true
                }
                None => false,
            };
            assert_ne!(other.join().unwrap(), called, "the lock, or the call");
        });
    }

    #[test]
    fn loom_holder_sees_what_was_published_before_the_call() {
        check_call::<Real>();
    }

    #[test]
    #[should_panic(expected = "does not see")]
    fn loom_twin_weak_call_is_caught() {
        check_call::<WeakCall>();
    }
}
