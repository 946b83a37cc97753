//! Messages between a connection, which one thread of the program uses, and its control thread.

use core::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::PoisonError;
use std::time::Duration;

use crosstie_protocol::rails::FenceEntry;
use rustix::event::EventfdFlags;

use super::endpoint::Endpoint;
use super::error::Cause;
use super::frames::Frame;
use sync::{AtomicBool, Condvar, Mutex};

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use core::sync::atomic::AtomicBool;
    pub(super) use std::sync::{Condvar, Mutex};
}

#[cfg(all(test, loom))]
mod sync {
    pub(super) use loom::sync::Mutex;
    pub(super) use loom::sync::atomic::AtomicBool;

    /// No time passes in loom: it reports a wait that does not end.
    #[derive(Debug)]
    pub(super) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(super) fn new() -> Condvar {
            Condvar(loom::sync::Condvar::new())
        }

        pub(super) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(super) fn wait_timeout_while<'a, T>(
            &self,
            mut guard: loom::sync::MutexGuard<'a, T>,
            _: core::time::Duration,
            mut condition: impl FnMut(&mut T) -> bool,
        ) -> loom::sync::MutexGuard<'a, T> {
            while condition(&mut guard) {
                guard = self.0.wait(guard).unwrap();
            }
            guard
        }
    }
}

/// From the control thread to the connection.
#[derive(Debug)]
pub(super) enum Mail {
    RailError {
        rail: usize,
        epoch: u32,
    },
    Fence {
        rail: usize,
        epoch: u32,
        next: u64,
        entries: Vec<FenceEntry>,
    },
    Answer {
        rail: usize,
        epoch: u32,
        entries: Vec<FenceEntry>,
    },
    /// A new endpoint of a rail that works.
    Returned {
        rail: usize,
        endpoint: Box<Endpoint>,
    },
    /// The peer has closed the connection, and is done with the messages before `next` that are not in `open`.
    PeerClosed {
        next: u64,
        open: Vec<u64>,
    },
    Ended(Cause),
}

/// From the connection to the control thread.
#[derive(Debug)]
pub(super) enum Order {
    Send(Frame),
    /// Sender: build the rail again, with this epoch.
    Rebuild {
        rail: usize,
        epoch: u32,
    },
    /// Send this frame as the last one, and end.
    Close(Frame),
}

/// What wakes the control thread: the kernel's eventfd or, in tests, a model of it.
pub(super) trait Wake {
    /// Wakes the control thread, or keeps it from sleeping.
    fn set(&self);
    /// Lets it sleep again.
    fn clear(&self);
}

impl Wake for OwnedFd {
    fn set(&self) {
        // It fails only if the counter is full, and then the thread is awake.
        rustix::io::write(self, &1u64.to_ne_bytes()).ok();
    }

    fn clear(&self) {
        let mut count = [0; 8];
        // It fails if nothing was written since the last read.
        rustix::io::read(self, &mut count).ok();
    }
}

#[derive(Debug)]
pub(super) struct Mailbox<W = OwnedFd> {
    has_mail: AtomicBool,
    /// Mail was put since [`Mailbox::take_unattended`]. Only the control thread uses it.
    is_unattended: AtomicBool,
    mail: Mutex<Vec<Mail>>,
    orders: Mutex<Vec<Order>>,
    wake: W,
    /// Whether the control thread has sent its last frame, or cannot send it.
    has_ended: Mutex<bool>,
    ended: Condvar,
}

/// How long [`Mailbox::wait_until_ended`] waits. It is over at once, unless the peer does not read and the buffers are full.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

impl Mailbox {
    pub(super) fn new() -> std::io::Result<Mailbox> {
        Ok(Mailbox::with(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

impl<W: Wake> Mailbox<W> {
    fn with(wake: W) -> Mailbox<W> {
        Mailbox {
            has_mail: AtomicBool::new(false),
            is_unattended: AtomicBool::new(false),
            mail: Mutex::new(Vec::new()),
            orders: Mutex::new(Vec::new()),
            wake,
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        }
    }

    pub(super) fn put_mail(&self, mail: Mail) {
        self.is_unattended.store(true, Relaxed);
        self.mail.lock().unwrap_or_else(PoisonError::into_inner).push(mail);
        // Release, partner: the Acquire load in `has_mail`.
        self.has_mail.store(true, Release);
    }

    /// Whether there is mail: one load.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        // Acquire, partner: the Release store in `put_mail`.
        self.has_mail.load(Acquire)
    }

    /// Whether the control thread has put mail since the last call of this function, also if the program has taken the mail. What the
    /// program could not finish then is left to the control thread, because the program may not call any more.
    pub(super) fn take_unattended(&self) -> bool {
        self.is_unattended.swap(false, Relaxed)
    }

    pub(super) fn take_mail(&self) -> Vec<Mail> {
        let mut mail = self.mail.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_mail.store(false, Relaxed);
        core::mem::take(&mut mail)
    }

    pub(super) fn put_order(&self, order: Order) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.wake.set();
    }

    pub(super) fn take_orders(&self) -> Vec<Order> {
        // First: an order that is put after this wakes the thread again.
        self.wake.clear();
        core::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The control thread sends nothing any more.
    pub(super) fn set_ended(&self) {
        *self.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.notify_all();
    }

    /// Waits until the control thread has sent its last frame. A program may exit as soon as it has closed its connections; the
    /// peer would not learn then which messages are done.
    pub(super) fn wait_until_ended(&self) {
        let guard = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        // If it takes too long, the peer learns that the connection is gone.
        drop(self.ended.wait_timeout_while(guard, CLOSE_TIMEOUT, |has_ended| !*has_ended));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use core::sync::atomic::Ordering::AcqRel;

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    /// An eventfd. The kernel has a lock around its counter.
    #[derive(Debug)]
    struct Counter(AtomicU64);

    impl Counter {
        /// What `poll` says.
        fn is_readable(&self) -> bool {
            self.0.load(Acquire) != 0
        }
    }

    impl Wake for Counter {
        fn set(&self) {
            self.0.fetch_add(1, AcqRel);
        }

        fn clear(&self) {
            self.0.swap(0, AcqRel);
        }
    }

    type Model = Mailbox<Counter>;

    fn mailbox() -> Arc<Model> {
        Arc::new(Mailbox::with(Counter(AtomicU64::new(0))))
    }

    fn mail(epoch: u32) -> Mail {
        Mail::RailError { rail: 0, epoch }
    }

    /// The control thread puts two mails. The program looks at all times, also without the flag, as it does while no rail is up.
    fn check_mail(put: fn(&Model, Mail), take: fn(&Model) -> Vec<Mail>) {
        loom::model(move || {
            let mailbox = mailbox();
            let control = thread::spawn({
                let mailbox = mailbox.clone();
                move || (1..=2).for_each(|epoch| put(&mailbox, mail(epoch)))
            });
            let mut epochs = Vec::new();
            let mut look = |always: bool| {
                if always || mailbox.has_mail() {
                    let taken = take(&mailbox).into_iter();
                    epochs.extend(taken.map(|mail| match mail {
                        Mail::RailError { epoch, .. } => epoch,
                        other => panic!("{other:?}"),
                    }));
                }
            };
            look(false);
            look(true);
            look(false);
            control.join().unwrap();
            look(false);
            assert_eq!(epochs, [1, 2], "mail was lost");
        });
    }

    #[test]
    fn loom_no_mail_is_lost() {
        check_mail(Mailbox::put_mail, Mailbox::take_mail);
    }

    /// A twin that must fail: the flag is set before there is mail.
    #[test]
    #[should_panic(expected = "mail was lost")]
    fn loom_twin_flag_before_mail_is_caught() {
        let put = |mailbox: &Model, mail| {
            mailbox.has_mail.store(true, Release);
            mailbox.mail.lock().unwrap().push(mail);
        };
        check_mail(put, Mailbox::take_mail);
    }

    /// A twin that must fail: the flag is cleared when the mail is not locked any more.
    #[test]
    #[should_panic(expected = "mail was lost")]
    fn loom_twin_flag_cleared_after_mail_was_taken_is_caught() {
        let take = |mailbox: &Model| {
            let taken = core::mem::take(&mut *mailbox.mail.lock().unwrap());
            mailbox.has_mail.store(false, Relaxed);
            taken
        };
        check_mail(Mailbox::put_mail, take);
    }

    /// The control thread puts a mail, which needs more than one attempt. The program calls for the last time. The control thread attends to
    /// the connection if `is_due`, and goes on if something is left to do.
    fn check_attention(is_due: fn(&Model) -> bool) {
        loom::model(move || {
            let mailbox = mailbox();
            let unfinished = Arc::new(Mutex::new(0));
            // Without a look at the flag, which would hide from loom that the order of this look and that of `is_due` matters.
            let attend = |mailbox: &Model, unfinished: &Mutex<usize>| {
                let mut unfinished = unfinished.lock().unwrap();
                *unfinished += mailbox.take_mail().len();
                *unfinished > 0
            };
            let program = thread::spawn({
                let (mailbox, unfinished) = (mailbox.clone(), unfinished.clone());
                move || _ = attend(&mailbox, &unfinished)
            });
            mailbox.put_mail(mail(1));
            let goes_on = is_due(&mailbox) && attend(&mailbox, &unfinished);
            program.join().unwrap();
            assert_eq!(*unfinished.lock().unwrap(), 1);
            assert!(goes_on, "nobody finishes what the mail asks for");
        });
    }

    #[test]
    fn loom_control_thread_finishes_what_the_program_began() {
        check_attention(Mailbox::take_unattended);
    }

    /// A twin that must fail: the control thread attends only if the program has not taken the mail.
    #[test]
    #[should_panic(expected = "nobody finishes")]
    fn loom_twin_attention_only_if_mail_is_left_is_caught() {
        check_attention(Mailbox::has_mail);
    }

    /// The program puts two orders. The control thread takes orders when `poll` says that there are any.
    fn check_orders(put: fn(&Model, Order), take: fn(&Model) -> Vec<Order>) {
        loom::model(move || {
            let mailbox = mailbox();
            let program = thread::spawn({
                let mailbox = mailbox.clone();
                move || (1..=2).for_each(|epoch| put(&mailbox, Order::Rebuild { rail: 0, epoch }))
            });
            let mut epochs = Vec::new();
            let mut poll = || {
                if mailbox.wake.is_readable() {
                    epochs.extend(take(&mailbox).into_iter().map(|order| match order {
                        Order::Rebuild { epoch, .. } => epoch,
                        other => panic!("{other:?}"),
                    }));
                }
            };
            poll();
            poll();
            program.join().unwrap();
            poll();
            assert_eq!(epochs, [1, 2], "the control thread sleeps, and there is an order");
        });
    }

    #[test]
    fn loom_every_order_wakes_the_control_thread() {
        check_orders(Mailbox::put_order, Mailbox::take_orders);
    }

    /// A twin that must fail: the control thread is woken before there is an order.
    #[test]
    #[should_panic(expected = "the control thread sleeps")]
    fn loom_twin_wake_before_order_is_caught() {
        let put = |mailbox: &Model, order| {
            mailbox.wake.set();
            mailbox.orders.lock().unwrap().push(order);
        };
        check_orders(put, Mailbox::take_orders);
    }

    /// A twin that must fail: the eventfd is read after the orders were taken.
    #[test]
    #[should_panic(expected = "the control thread sleeps")]
    fn loom_twin_clear_after_orders_were_taken_is_caught() {
        let take = |mailbox: &Model| {
            let taken = core::mem::take(&mut *mailbox.orders.lock().unwrap());
            mailbox.wake.clear();
            taken
        };
        check_orders(Mailbox::put_order, take);
    }

    /// The program drops a connection: it puts the last order and waits until the control thread has sent the last frame.
    fn check_close(set_ended: fn(&Model)) {
        loom::model(move || {
            let mailbox = mailbox();
            let sent = Arc::new(AtomicU64::new(0));
            let control = thread::spawn({
                let (mailbox, sent) = (mailbox.clone(), sent.clone());
                move || {
                    while !mailbox.wake.is_readable() {
                        thread::yield_now();
                    }
                    let orders = mailbox.take_orders();
                    assert!(matches!(orders[..], [Order::Close(_)]));
                    sent.store(1, Relaxed);
                    set_ended(&mailbox);
                }
            });
            mailbox.put_order(Order::Close(Frame::Close { next: 0, open: Vec::new() }));
            mailbox.wait_until_ended();
            assert_eq!(sent.load(Relaxed), 1, "the program may exit before the last frame is sent");
            control.join().unwrap();
        });
    }

    #[test]
    fn loom_close_waits_for_the_last_frame_and_ends() {
        check_close(Mailbox::set_ended);
    }

    /// A twin that must fail: the waiting thread is woken before the flag is set.
    #[test]
    #[should_panic(expected = "deadlock")]
    fn loom_twin_notify_before_ended_is_caught() {
        check_close(|mailbox| {
            mailbox.ended.notify_all();
            *mailbox.has_ended.lock().unwrap() = true;
        });
    }
}
