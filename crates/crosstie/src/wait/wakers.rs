//! Wakers that are called when their thread has no lock and borrows nothing.
//!
//! A waker is code of the program. It may poll its future at once, and so call back into what wakes it. So a thread that ends operations
//! under a lock only [defers](defer) their wakers, and [calls them](run_deferred) when it has unlocked.
//!
//! **Promise.** Wakers are called in the order in which they were deferred, by the thread that deferred them. A waker that defers others
//! does not call them: the call that it is part of does. So wakers that wake each other need no more stack.

use core::cell::{Cell, RefCell};
use core::task::Waker;
use std::collections::VecDeque;

thread_local! {
    static HAS_ANY: Cell<bool> = const { Cell::new(false) };
    static IS_RUNNING: Cell<bool> = const { Cell::new(false) };
    static DEFERRED: RefCell<VecDeque<Waker>> = const { RefCell::new(VecDeque::new()) };
}

/// Remembers a waker. The thread then calls [`run_deferred`], when it has no lock and borrows nothing.
pub(crate) fn defer(waker: Waker) {
    let mut waker = Some(waker);
    let is_deferred = DEFERRED.try_with(|deferred| deferred.borrow_mut().extend(waker.take())).is_ok();
    HAS_ANY.set(is_deferred);
    // A thread that is ending may have no queue any more.
    waker.into_iter().for_each(Waker::wake);
}

/// Calls the wakers that this thread has deferred.
#[inline]
pub(crate) fn run_deferred() {
    if HAS_ANY.get() {
        run_all();
    }
}

#[cold]
fn run_all() {
    if IS_RUNNING.replace(true) {
        return;
    }
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            IS_RUNNING.set(false);
        }
    }
    // Also if a waker panics.
    let _end = End;
    while let Some(waker) = DEFERRED.with_borrow_mut(VecDeque::pop_front) {
        waker.wake();
    }
    HAS_ANY.set(false);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Wake;

    use super::*;

    /// Defers the next one when it is called, and calls the queue.
    struct Chain {
        left: u32,
        called: Arc<Mutex<Vec<u32>>>,
    }

    impl Wake for Chain {
        fn wake(self: Arc<Self>) {
            self.called.lock().unwrap().push(self.left);
            if self.left > 0 {
                defer(Arc::new(Chain { left: self.left - 1, called: self.called.clone() }).into());
            }
            run_deferred();
        }
    }

    #[test]
    fn wakers_that_defer_others_are_called_in_order_without_recursion() {
        let called = Arc::new(Mutex::new(Vec::new()));
        // As many nested calls would not fit on the stack of a test.
        for left in [100_000, 0] {
            defer(Arc::new(Chain { left, called: called.clone() }).into());
        }
        assert!(called.lock().unwrap().is_empty(), "deferred");
        run_deferred();
        let called = called.lock().unwrap();
        assert_eq!(called[..3], [100_000, 0, 99_999]);
        assert_eq!((called.len(), called[called.len() - 1]), (100_002, 0));
    }
}
