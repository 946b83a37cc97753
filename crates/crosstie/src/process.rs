//! Which process an object belongs to.
//!
//! **Fork.** A forked child may drop the objects of its parent, and must not use them. A drop there frees what the child has a copy of, and
//! nothing else: it does not write to shared memory, which the child has not mapped; it unmaps nothing, because other memory of the child may
//! be at those addresses; it waits for no thread, because the child has none of its parent's; it ends no connection and no process.

use std::thread::JoinHandle;

use rustix::process::Pid;

/// The process that made an object. A forked child has a copy of every object of its parent, but none of the parent's threads: it must
/// not act on what the two share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Creator(Pid);

impl Creator {
    pub(crate) fn this_process() -> Creator {
        Creator(rustix::process::getpid())
    }

    /// False in a forked child of the process that made the object.
    pub(crate) fn is_this_process(self) -> bool {
        self == Creator::this_process()
    }
}

/// A thread that its owner waits for. A forked child does not have it: there it does not wait.
#[derive(Debug)]
pub(crate) struct OwnThread {
    /// None once it was joined.
    thread: Option<JoinHandle<()>>,
    creator: Creator,
}

impl From<JoinHandle<()>> for OwnThread {
    fn from(thread: JoinHandle<()>) -> OwnThread {
        OwnThread { thread: Some(thread), creator: Creator::this_process() }
    }
}

impl OwnThread {
    /// Waits for its end. If it panicked, its panic message was printed.
    pub(crate) fn join(mut self) {
        if self.creator.is_this_process()
            && let Some(thread) = self.thread.take()
        {
            thread.join().ok();
        }
    }
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        if !self.creator.is_this_process() {
            // Detaching it would touch the memory of a thread that is not there.
            core::mem::forget(self.thread.take());
        }
    }
}
