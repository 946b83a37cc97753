//! The two ends of a connection, as the program uses them.
//!
//! The state of an end is behind a biased lock: the program's thread is its owner and pays two stores and a load per call. The
//! control thread takes the lock when a rail has failed, so that a program that has got all its messages and does not call any
//! more does not hold up its peer.

use core::ops::Range;
use core::time::Duration;
use std::sync::Arc;

use crosstie_protocol::rails::Mask;

use super::config::Split;
use super::counters::{ConnectionCounters, Counters};
use super::error::{Cause, RequestError};
use super::memory::Memory;
use super::receiver::{Received, RecvBuffer, RecvCore, RecvRequest};
use super::sender::{SendCore, SendRequest};
use crate::process::Creator;
use crate::ring::biased_lock::{BiasedLock, BiasedOwner};

/// The state of an end, for its control thread.
pub(super) enum Core {
    Send(Arc<BiasedLock<SendCore>>),
    Recv(Arc<BiasedLock<RecvCore>>),
}

impl Core {
    /// Does what does not wait for the program. Returns when to do it again.
    pub(super) fn attend(&self) -> Option<Duration> {
        let again = match self {
            Core::Send(core) => {
                let mut core = core.lock();
                core.progress();
                core.needs_attention()
            }
            Core::Recv(core) => {
                let mut core = core.lock();
                core.progress();
                core.needs_attention()
            }
        };
        again.then_some(ATTENTION)
    }
}

/// How often the control thread looks after something that does not wait.
const ATTENTION: Duration = Duration::from_millis(5);

/// The sending end of a connection. One thread at a time uses it.
///
/// A message is sent when the receiver has posted a buffer for it. Sends and receives match in order; inside a group, the tag
/// chooses the buffer. Work is done inside the calls of [`isend`](SendConnection::isend) and [`test`](SendConnection::test):
/// call one of them while sends are under way. Dropping the connection closes it; sends that are not done may not arrive.
#[derive(Debug)]
pub struct SendConnection {
    core: BiasedOwner<SendCore>,
    counters: Arc<ConnectionCounters>,
    creator: Creator,
}

impl SendConnection {
    pub(super) fn new(core: SendCore) -> (SendConnection, Core) {
        let counters = core.counters.clone();
        let (core, shared) = BiasedOwner::new(core);
        (SendConnection { core, counters, creator: Creator::this_process() }, Core::Send(shared))
    }

    /// Starts to send `range` of `memory`. `None` if the receiver has not posted a buffer yet, or none with this tag in its
    /// current group: try again. The memory must not be changed before [`test`](SendConnection::test) says that the send is
    /// done.
    pub fn isend(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        tag: u32,
    ) -> Result<Option<SendRequest>, RequestError> {
        self.core.lock().isend(memory, range, tag)
    }

    /// Whether a send is done, and how many bytes it sent. After that the request is over.
    #[inline]
    pub fn test(&mut self, request: SendRequest) -> Result<Option<usize>, RequestError> {
        self.core.lock().test(request)
    }

    /// Makes progress without asking for a request: polls completions, handles failures, sends lost parts again.
    pub fn progress(&mut self) {
        self.core.lock().progress();
    }

    /// Changes how messages are split, from the next one on.
    pub fn set_split(&mut self, split: Split) {
        self.core.lock().set_split(split);
    }

    /// Why the connection has ended, if it has.
    pub fn cause(&mut self) -> Option<Cause> {
        self.core.lock().cause().cloned()
    }

    /// The rails that are in use: bit `r` is rail `r`.
    pub fn rails_up(&mut self) -> Mask {
        self.core.lock().rails_up()
    }

    /// What the connection has done so far.
    pub fn counters(&self) -> Counters {
        self.counters.snapshot()
    }

    /// Ends the connection at once: requests that are not done end with [`Cause::Aborted`], and no memory is accessed any more.
    pub fn abort(&mut self) {
        self.core.lock().abort();
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        // In a forked child the connection is still its parent's.
        if !self.creator.is_this_process() {
            return;
        }
        let mailbox = self.core.lock().close();
        mailbox.wait_until_ended();
    }
}

/// The receiving end of a connection. One thread at a time uses it.
///
/// Work is done inside the calls of [`irecv`](RecvConnection::irecv) and [`test`](RecvConnection::test): call one of them while
/// receives are outstanding. Dropping the connection closes it.
#[derive(Debug)]
pub struct RecvConnection {
    core: BiasedOwner<RecvCore>,
    counters: Arc<ConnectionCounters>,
    creator: Creator,
}

impl RecvConnection {
    pub(super) fn new(core: RecvCore) -> (RecvConnection, Core) {
        let counters = core.counters.clone();
        let (core, shared) = BiasedOwner::new(core);
        (RecvConnection { core, counters, creator: Creator::this_process() }, Core::Recv(shared))
    }

    /// Starts to receive into one buffer, or into a group of buffers: each takes one send, chosen by its tag. `None` if too many
    /// receives are outstanding: test them first. The memory must not be used before [`test`](RecvConnection::test) says that
    /// the receive is done.
    #[inline]
    pub fn irecv(&mut self, buffers: &[RecvBuffer<'_>]) -> Result<Option<RecvRequest>, RequestError> {
        self.core.lock().irecv(buffers)
    }

    /// Whether a receive is done, and how many bytes arrived in each buffer. After that the request is over.
    #[inline]
    pub fn test(&mut self, request: RecvRequest) -> Result<Option<Received>, RequestError> {
        self.core.lock().test(request)
    }

    /// Makes progress without asking for a request: polls completions, posts receives, handles failures.
    pub fn progress(&mut self) {
        self.core.lock().progress();
    }

    /// Why the connection has ended, if it has.
    pub fn cause(&mut self) -> Option<Cause> {
        self.core.lock().cause().cloned()
    }

    /// The rails that are in use: bit `r` is rail `r`.
    pub fn rails_up(&mut self) -> Mask {
        self.core.lock().rails_up()
    }

    /// What the connection has done so far.
    pub fn counters(&self) -> Counters {
        self.counters.snapshot()
    }

    /// Ends the connection at once: requests that are not done end with [`Cause::Aborted`], and no memory is accessed any more.
    pub fn abort(&mut self) {
        self.core.lock().abort();
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        // In a forked child the connection is still its parent's.
        if !self.creator.is_this_process() {
            return;
        }
        let mailbox = self.core.lock().close();
        mailbox.wait_until_ended();
    }
}
