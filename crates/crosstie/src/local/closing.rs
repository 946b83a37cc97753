//! Closes files of which only another process knows what they are.
//!
//! The last `close` of a file can block: that of a TCP socket waits for its linger time, that of a file in user space (FUSE) for its
//! daemon, both for as long as the process that sent the file likes. So no thread that others wait for closes such a file. Threads
//! that do nothing else do: one at first, and one more while all are blocked, up to [`MAX_THREADS`]. They end when nothing is left. Files
//! of peers that follow the protocol never come here.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use super::lock;
use crate::process::Creator;

/// Threads that close files.
const MAX_THREADS: usize = 16;
/// Files that may wait here while new connections are accepted that could bring more.
const MAX_WAITING: usize = 64;

static CLOSING: Mutex<Option<Closing>> = Mutex::new(None);

struct Closing {
    /// Whose threads they are: a forked child has none of its parent's.
    creator: Creator,
    files: VecDeque<OwnedFd>,
    threads: usize,
    /// Threads that are inside a close.
    busy: usize,
}

/// Closes a file some time later.
pub(super) fn close_later(file: OwnedFd) {
    let mut closing = lock(&CLOSING);
    let closing = match &mut *closing {
        Some(closing) if closing.creator.is_this_process() => closing,
        other => other.insert(Closing {
            creator: Creator::this_process(),
            files: VecDeque::new(),
            threads: 0,
            busy: 0,
        }),
    };
    closing.files.push_back(file);
    if closing.busy == closing.threads && closing.threads < MAX_THREADS {
        let thread = std::thread::Builder::new().name("crosstie-closing".into()).stack_size(64 << 10);
        // If it cannot be started, the file stays open until the next one comes.
        closing.threads += usize::from(thread.spawn(close_files).is_ok());
    }
}

/// Whether so many files wait that no more should be accepted.
pub(super) fn is_behind() -> bool {
    lock(&CLOSING).as_ref().is_some_and(|closing| closing.files.len() > MAX_WAITING)
}

fn close_files() {
    let mut is_busy = false;
    loop {
        let mut guard = lock(&CLOSING);
        let Some(closing) = &mut *guard else { return };
        closing.busy -= usize::from(is_busy);
        let Some(file) = closing.files.pop_front() else {
            closing.threads -= 1;
            return;
        };
        closing.busy += 1;
        is_busy = true;
        drop(guard);
        // Without the lock: this may block.
        drop(file);
    }
}
