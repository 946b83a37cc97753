//! Notices: what the consumer of an MPSC ring has to do once it has read everything that was reserved before.
//!
//! Some events have a place between the entries of a ring: when a producer is gone, what it left behind is returned after everything that
//! it published has been read. As entries of the ring they would take the room of the producers, and each producer could forge them. So
//! they are in memory of the consumer's process, each with the position that was free when it happened.
//!
//! ```text
//!  producer                     owner's threads                        consumer
//!  reserve p, publish p
//!  ends            ---------->  collect what it left behind
//!                               notice at position head > p  ------->  take the notices
//!                                                                      read up to p
//!                                                                      cursor >= position: do what the notice says
//! ```
//!
//! **Promise.** When the consumer has read up to the position of a notice, it has read every entry that was published before the notice was
//! posted, if it looks at entries that it has passed ([`stalled`](super::stalled)) first. What a notice names was collected before it was
//! posted, so it does not matter who has the producer's number by then.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::PoisonError;

use super::Word;
use sync::{AtomicU32, Mutex, MutexGuard};

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use core::sync::atomic::AtomicU32;
    pub(super) use std::sync::{Mutex, MutexGuard};
}

#[cfg(all(test, loom))]
mod sync {
    pub(super) use loom::sync::atomic::AtomicU32;
    pub(super) use loom::sync::{Mutex, MutexGuard};
}

/// The notices for one consumer that it has not taken yet.
#[derive(Debug)]
pub(crate) struct Notices<T> {
    /// With the position before which everything has to be read. `None` once the consumer is gone, so that what the notices refer to
    /// and the ring do not keep each other alive.
    list: Mutex<Option<Vec<(u64, T)>>>,
    /// How many were posted. Changes only while `list` is locked.
    count: AtomicU32,
}

impl<T> Notices<T> {
    pub(crate) fn new() -> Notices<T> {
        Notices { list: Mutex::new(Some(Vec::new())), count: AtomicU32::new(0) }
    }

    /// Posts a notice behind everything that has been reserved. `head`: that of the ring.
    pub(crate) fn post<W: Word>(&self, head: &W, notice: T) {
        let mut list = self.list();
        if let Some(list) = &mut *list {
            // Acquire, partner: the Release reservation in `reservation::reserve`.
            list.push((head.load(Acquire), notice));
        }
        // Release, partner: the Acquire load in `has_new`.
        self.count.store(self.count.load(Relaxed).wrapping_add(1), Release);
    }

    /// Whether there is a notice that the consumer has not taken. `seen` is what [`take`](Notices::take) has counted.
    #[inline]
    pub(crate) fn has_new(&self, seen: u32) -> bool {
        // Acquire, partner: the Release store in `post`. What happened before the notice is visible.
        self.count.load(Acquire) != seen
    }

    /// Takes the notices, in the order in which they were posted.
    pub(crate) fn take(&self, seen: &mut u32) -> Vec<(u64, T)> {
        let mut list = self.list();
        *seen = self.count.load(Relaxed);
        list.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The consumer is gone: drops the notices and all later ones.
    pub(crate) fn close(&self) {
        // Dropped without the lock: what a notice refers to may post here.
        let dropped = self.list().take();
        drop(dropped);
    }

    fn list(&self) -> MutexGuard<'_, Option<Vec<(u64, T)>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64};
    use loom::thread;

    use super::super::reservation::{self, IDLE, SHARED};
    use super::*;

    /// Receives, and entries of the ring.
    const RECEIVES: usize = 2;
    /// The number of both senders, one after the other.
    const NUMBER: u64 = 5;
    const NOT_TAKEN: u64 = 0;

    /// The completion ring of a datagram queue pair and its receives.
    struct Queue {
        head: AtomicU64,
        mode: AtomicU64,
        claims: [AtomicU64; 2],
        /// By position: one more than the receive that the entry there completes.
        entries: [AtomicU64; RECEIVES],
        /// Who took each receive.
        takers: [AtomicU64; RECEIVES],
        /// The first sender is dead.
        is_dead: AtomicBool,
        notices: Notices<Vec<usize>>,
    }

    impl Queue {
        fn take(&self, receive: usize) {
            self.takers[receive].store(NUMBER, Release);
        }

        fn complete(&self, producer: usize, receive: usize) {
            let claim = &self.claims[producer];
            let position = reservation::reserve(&self.head, &self.mode, claim, |_| true).unwrap();
            self.entries[position as usize].store(receive as u64 + 1, Release);
            reservation::clear_claim(claim);
        }

        fn taken(&self) -> Vec<usize> {
            (0..RECEIVES).filter(|receive| self.takers[*receive].load(Acquire) == NUMBER).collect()
        }
    }

    /// What the poller knows.
    #[derive(Default)]
    struct Poller {
        cursor: u64,
        seen: u32,
        waiting: Vec<(u64, Vec<usize>)>,
        /// By receive: whether it has completed, and whether with a message.
        ended: [Option<bool>; RECEIVES],
    }

    /// What a twin does wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// The poller collects what the number has taken when the notice is due.
        CollectsLate,
        /// The poller does not wait until it has read what was published before.
        DoesNotWait,
    }

    impl Poller {
        fn poll(&mut self, queue: &Queue, fault: Fault) {
            if queue.notices.has_new(self.seen) {
                self.waiting.extend(queue.notices.take(&mut self.seen));
            }
            if fault == Fault::DoesNotWait {
                self.return_due(queue, fault);
            }
            while let Some(entry) = queue.entries.get(self.cursor as usize).map(|entry| entry.load(Acquire))
                && entry != 0
            {
                let ended = &mut self.ended[entry as usize - 1];
                assert_eq!(*ended, None, "a receive completes twice");
                *ended = Some(true);
                self.cursor += 1;
            }
            self.return_due(queue, fault);
        }

        fn return_due(&mut self, queue: &Queue, fault: Fault) {
            let cursor = self.cursor;
            for (_, taken) in self
                .waiting
                .extract_if(.., |(position, _)| fault == Fault::DoesNotWait || cursor >= *position)
            {
                let taken = if fault == Fault::CollectsLate { queue.taken() } else { taken };
                for receive in taken {
                    self.ended[receive].get_or_insert(false);
                }
            }
        }
    }

    /// A sender takes a receive and dies, before or after it has published its completion. The owner returns what it left behind and
    /// gives its number to the next sender at once, which completes another receive. The poller polls at any time.
    fn number_is_used_again(publishes: bool, fault: Fault) {
        loom::model(move || {
            let word = AtomicU64::new;
            let queue = Arc::new(Queue {
                head: word(0),
                mode: word(SHARED),
                claims: [word(IDLE), word(IDLE)],
                entries: [word(0), word(0)],
                takers: [word(NOT_TAKEN), word(NOT_TAKEN)],
                is_dead: AtomicBool::new(false),
                notices: Notices::new(),
            });
            let first = thread::spawn({
                let queue = queue.clone();
                move || {
                    queue.take(0);
                    if publishes {
                        queue.complete(0, 0);
                    }
                    queue.is_dead.store(true, Release);
                }
            });
            let owner = thread::spawn({
                let queue = queue.clone();
                move || {
                    if queue.is_dead.load(Acquire) {
                        let taken = queue.taken();
                        queue.notices.post(&queue.head, taken);
                        // The next sender has the number.
                        queue.take(1);
                        queue.complete(1, 1);
                        true
                    } else {
                        false
                    }
                }
            });
            let mut poller = Poller::default();
            poller.poll(&queue, fault);
            poller.poll(&queue, fault);
            first.join().unwrap();
            let has_second = owner.join().unwrap();
            if !has_second {
                let taken = queue.taken();
                queue.notices.post(&queue.head, taken);
            }
            poller.poll(&queue, fault);
            poller.poll(&queue, fault);
            assert_eq!(poller.ended, [Some(publishes), has_second.then_some(true)]);
            assert!(poller.waiting.is_empty());
        });
    }

    #[test]
    fn loom_number_of_a_sender_that_ended_can_be_used_again_at_once() {
        number_is_used_again(true, Fault::None);
        number_is_used_again(false, Fault::None);
    }

    /// A twin that must fail: the next sender with the number loses its message.
    #[test]
    #[should_panic]
    fn loom_twin_that_collects_when_the_notice_is_due_is_caught() {
        number_is_used_again(false, Fault::CollectsLate);
    }

    /// A twin that must fail: a message of the sender that ended is lost.
    #[test]
    #[should_panic]
    fn loom_twin_that_does_not_wait_for_the_position_is_caught() {
        number_is_used_again(true, Fault::DoesNotWait);
    }
}
