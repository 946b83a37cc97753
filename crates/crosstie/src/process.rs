//! Which process an object belongs to.

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
