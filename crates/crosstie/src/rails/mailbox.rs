//! Messages between a connection, which one thread of the program uses, and its control thread.

use core::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crosstie_protocol::rails::FenceEntry;
use rustix::event::EventfdFlags;

use super::endpoint::Endpoint;
use super::error::Cause;
use super::frames::Frame;

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

#[derive(Debug)]
pub(super) struct Mailbox {
    has_mail: AtomicBool,
    mail: Mutex<Vec<Mail>>,
    orders: Mutex<Vec<Order>>,
    wake: OwnedFd,
    /// Whether the control thread has sent its last frame, or cannot send it.
    has_ended: Mutex<bool>,
    ended: Condvar,
}

/// How long [`Mailbox::wait_until_ended`] waits. It is over at once, unless the peer does not read and the buffers are full.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

impl Mailbox {
    pub(super) fn new() -> std::io::Result<Mailbox> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox {
            has_mail: AtomicBool::new(false),
            mail: Mutex::new(Vec::new()),
            orders: Mutex::new(Vec::new()),
            wake,
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        })
    }

    pub(super) fn put_mail(&self, mail: Mail) {
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

    pub(super) fn take_mail(&self) -> Vec<Mail> {
        let mut mail = self.mail.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_mail.store(false, Relaxed);
        core::mem::take(&mut mail)
    }

    pub(super) fn put_order(&self, order: Order) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        // It fails only if the counter is full, and then the thread is awake.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }

    pub(super) fn take_orders(&self) -> Vec<Order> {
        let mut count = [0; 8];
        // It fails if nothing was written since the last read.
        rustix::io::read(&self.wake, &mut count).ok();
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

    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
