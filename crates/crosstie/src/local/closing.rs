//! Closes files of which only another process knows what they are.
//!
//! The last `close` of a file can block: that of a TCP socket waits for its linger time, that of a file in user space (FUSE) for its
//! daemon, both for as long as the process that sent the file likes. So no thread that others wait for closes such a file. It goes to a
//! thread that does nothing else, and that ends when nothing is left. Files of peers that follow the protocol never come here.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use super::lock;
use crate::process::Creator;

/// Files that may wait here while new connections are accepted, which could bring more.
const MAX_WAITING: usize = 64;

static CLOSING: Mutex<Closing> = Mutex::new(Closing { files: VecDeque::new(), thread: None });

struct Closing {
    files: VecDeque<OwnedFd>,
    /// The process whose thread takes files from the list, while there is one.
    thread: Option<Creator>,
}

/// Closes a file some time later.
pub(super) fn close_later(file: OwnedFd) {
    let mut closing = lock(&CLOSING);
    closing.files.push_back(file);
    if closing.thread.is_some_and(Creator::is_this_process) {
        return;
    }
    // If no thread can be started, the files stay open until the next one comes.
    if std::thread::Builder::new().name("crosstie-closing".into()).spawn(close_files).is_ok() {
        closing.thread = Some(Creator::this_process());
    }
}

/// Whether so many files wait that no more should be accepted.
pub(super) fn is_behind() -> bool {
    lock(&CLOSING).files.len() > MAX_WAITING
}

fn close_files() {
    loop {
        let mut closing = lock(&CLOSING);
        let Some(file) = closing.files.pop_front() else {
            closing.thread = None;
            return;
        };
        drop(closing);
        // Without the lock: this may block.
        drop(file);
    }
}
