//! The joining side: a connection to a [`Host`](super::host::Host), and word of its death.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use zerocopy::{FromZeros, IntoBytes};

use super::bell::Bell;
use super::host::{Head, MAX_HELLO, MAX_REPLY};
use super::locked;
use super::socket::{self, Address, Name, Peer};
use super::watcher::{Watched, Watcher, What, broke_silence};
use crate::memory::segment::SharedRef;

/// How long an answer may take. A host answers at once unless it puts guests off, so this is long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// Pauses before a host that hung up is asked again: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Longer than anybody waits, and short enough to add to a time.
const PATIENCE_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Why joining failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JoinError {
    #[error("no live process serves {name:?}: start the server first")]
    NoServer { name: String },
    #[error("{name:?} is served by user {uid}, and we are not: nothing was sent to it")]
    OtherUser { name: String, uid: u32 },
    #[error("{name:?} speaks another version of the protocol: build server and client from the same release")]
    OtherVersion { name: String },
    /// With the host's reason, in its own terms.
    #[error("refused by the server")]
    Refused(Vec<u8>),
    #[error("{name:?} serves as many processes as it can: end one of them first")]
    Full { name: String },
    #[error("{name:?} hung up instead of answering: it is ending, or found us too slow; try again")]
    HungUp { name: String },
    #[error(
        "{name:?} did not answer within {after:?}: it is stopped, or has no room and tells nobody to leave"
    )]
    NoAnswer { name: String, after: Duration },
    #[error("a greeting has {MAX_HELLO} bytes at most, this one {0}")]
    HelloTooLong(usize),
    #[error("connecting: {0}")]
    Os(#[from] io::Error),
}

/// A place at a host. Dropping it leaves.
pub struct Member {
    inner: Arc<Inner>,
}

struct Inner {
    watcher: Arc<Watcher>,
    id: u64,
    gone: AtomicBool,
    bells: Mutex<Vec<SharedRef<Bell>>>,
    socket: OwnedFd,
    process: Option<OwnedFd>,
}

impl Member {
    /// Joins the host of that kind and name: says `hello` to it, returns what it answered. May take as long as `patience`
    /// says; not for the watcher's thread.
    ///
    /// A host hangs up on those who have not said hello yet when too many come at once. They come again, after a pause.
    pub(crate) fn join(
        kind: &'static str,
        name: &Name,
        hello: &[u8],
        patience: Duration,
    ) -> Result<(Member, Vec<u8>, Vec<OwnedFd>), JoinError> {
        // The system knows no time of zero, which would be for ever.
        let patience = patience.clamp(Duration::from_millis(1), PATIENCE_LIMIT);
        let deadline = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        loop {
            let joined = Member::try_join(kind, name, hello, patience, deadline);
            if !matches!(joined, Err(JoinError::HungUp { .. })) || Instant::now() + pause >= deadline {
                return joined;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn try_join(
        kind: &'static str,
        name: &Name,
        hello: &[u8],
        patience: Duration,
        deadline: Instant,
    ) -> Result<(Member, Vec<u8>, Vec<OwnedFd>), JoinError> {
        if hello.len() > MAX_HELLO {
            return Err(JoinError::HelloTooLong(hello.len()));
        }
        let watcher = Watcher::of_process()?;
        debug_assert!(!watcher.is_here(), "the watcher would wait for itself");
        let no_server = || JoinError::NoServer { name: name.to_string() };
        let hung_up = || JoinError::HungUp { name: name.to_string() };
        let no_answer = || JoinError::NoAnswer { name: name.to_string(), after: patience };

        let address = Address::of_service(kind, name)?;
        // The system knows no time of zero, which would be for ever.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let socket = socket::connect(&address, left).map_err(|e| match e.kind() {
            io::ErrorKind::ConnectionRefused => no_server(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => no_answer(),
            _ => JoinError::Os(e),
        })?;
        let peer = Peer::of(&socket)?;
        if !peer.is_our_user() {
            return Err(JoinError::OtherUser { name: name.to_string(), uid: peer.uid });
        }
        let process = peer.process().map_err(|e| match e.kind() {
            // A forked child of a dead server keeps its socket.
            io::ErrorKind::NotFound => no_server(),
            _ => JoinError::Os(e),
        })?;
        socket::send(&socket, Head::new(Head::HELLO).as_bytes(), hello, &[]).map_err(|_| hung_up())?;

        match answered(&socket, process.as_ref(), deadline)? {
            Answered::Yes => {}
            Answered::Died => return Err(no_server()),
            Answered::No => return Err(no_answer()),
        }
        let (mut head, mut reply) = (Head::new_zeroed(), vec![0; MAX_REPLY]);
        let (len, files) =
            socket::receive(&socket, head.as_mut_bytes(), &mut reply).map_err(|e| match e.kind() {
                io::ErrorKind::InvalidData => JoinError::OtherVersion { name: name.to_string() },
                _ => hung_up(),
            })?;
        reply.truncate(len);
        match head {
            Head { version, .. } if version != Head::VERSION => {
                return Err(JoinError::OtherVersion { name: name.to_string() });
            }
            Head { what: Head::WELCOME, .. } => {}
            Head { what: Head::REFUSED, .. } => return Err(JoinError::Refused(reply)),
            Head { what: Head::FULL, .. } => return Err(JoinError::Full { name: name.to_string() }),
            _ => return Err(JoinError::OtherVersion { name: name.to_string() }),
        }

        let id = watcher.number();
        let (gone, bells) = (AtomicBool::new(false), Mutex::default());
        let inner = Arc::new(Inner { watcher, id, gone, bells, socket, process });
        let process = inner.process.as_ref().map(AsFd::as_fd);
        inner.watcher.watch(id, inner.clone(), inner.socket.as_fd(), process)?;
        Ok((Member { inner }, reply, files))
    }

    /// Whether the host is gone. Then everything it ever wrote is visible.
    #[inline]
    pub(crate) fn gone(&self) -> bool {
        // Acquire, partner: the Release store in `happened`.
        self.inner.gone.load(Acquire)
    }

    /// Has a bell woken when the host is gone; at once, if it is.
    pub(crate) fn ring_when_gone(&self, bell: SharedRef<Bell>) {
        let mut bells = locked(&self.inner.bells);
        if self.gone() {
            bell.wake();
        } else {
            bells.push(bell);
        }
    }

    /// Leaves: the place is free for others. Nobody is told of the host's end any more.
    pub(crate) fn leave(&self) {
        // What a forked child has is still its parent's.
        if self.inner.watcher.is_of_this_process() {
            self.inner.forget();
            socket::hang_up(&self.inner.socket);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Inner {
    /// Is watched no longer, if it was.
    fn forget(&self) {
        self.watcher.forget(self.id, self.socket.as_fd(), self.process.as_ref().map(AsFd::as_fd));
    }
}

impl Watched for Inner {
    fn happened(&self, _: u64, what: What) {
        // A host says nothing after its welcome: whatever there is to read, it is over.
        if what == What::Socket && !broke_silence(&self.socket) {
            return;
        }
        // Release, partner: the Acquire load in `Member::gone`.
        self.gone.store(true, Release);
        self.forget();
        for bell in std::mem::take(&mut *locked(&self.bells)) {
            bell.wake();
        }
    }

    fn tend(&self, _: Instant) -> Option<Instant> {
        None
    }
}

enum Answered {
    Yes,
    No,
    Died,
}

fn answered(socket: &OwnedFd, process: Option<&OwnedFd>, deadline: Instant) -> io::Result<Answered> {
    let mut sources = vec![PollFd::new(socket, PollFlags::IN)];
    sources.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut sources, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(0) if left.is_zero() => return Ok(Answered::No),
            Ok(_) => {}
        }
        if !sources[0].revents().is_empty() {
            return Ok(Answered::Yes);
        }
        if sources.get(1).is_some_and(|process| !process.revents().is_empty()) {
            return Ok(Answered::Died);
        }
    }
}
