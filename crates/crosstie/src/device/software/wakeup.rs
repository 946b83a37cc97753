//! How other threads wake the service thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};

use rustix::event::EventfdFlags;

/// Wakes the service thread.
#[derive(Debug)]
pub(super) struct Wakeup {
    eventfd: OwnedFd,
    /// Whether a link was broken off that the thread still watches.
    has_broken_link: AtomicBool,
}

impl Wakeup {
    pub(super) fn open() -> io::Result<Wakeup> {
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Wakeup { eventfd, has_broken_link: AtomicBool::new(false) })
    }

    pub(super) fn wake(&self) {
        // The write fails only if the counter is at its limit, and then the eventfd is readable already.
        rustix::io::write(&self.eventfd, &1u64.to_ne_bytes()).ok();
    }

    /// The thread is awake.
    pub(super) fn reset(&self) {
        let mut count = [0; 8];
        // The read fails if the eventfd was reset already.
        rustix::io::read(&self.eventfd, &mut count).ok();
    }

    /// Has the thread forget the links that are dead.
    pub(super) fn report_broken_link(&self) {
        // Release, partner: the Acquire swap in `take_broken_link`: the thread sees that the link is dead.
        self.has_broken_link.store(true, Release);
        self.wake();
    }

    /// Whether a link was reported since the last call.
    pub(super) fn take_broken_link(&self) -> bool {
        // Acquire, partner: the Release store in `report_broken_link`.
        self.has_broken_link.swap(false, Acquire)
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
