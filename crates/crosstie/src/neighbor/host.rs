//! The serving side: a name, and guests that come and go.
//!
//! Guests are other processes, or threads of this one, that [join](super::member::Member::join). What they want and what
//! they get is the business of whoever implements [`Guests`]; this module decides whom to listen to at all.
//!
//! ```text
//!  accepted --hello--> asking --Welcome--> admitted --hung up, dead, dismissed--> leaving --farewell: true--> forgotten
//!     |                  |  ^_Later, each ms                                         ^__false, each ms
//!     '-silent, nonsense-'-Refused, gone--> forgotten, without a farewell
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::locked;
use super::socket::{self, Address, Name, Peer};
use super::watcher::{Watched, Watcher, What, broke_silence};

/// Bytes of a guest's greeting at most.
pub(crate) const MAX_HELLO: usize = 4096;
/// Bytes of an answer at most.
pub(crate) const MAX_REPLY: usize = 4096;
/// Guests of one host at most, those that are asking or about to leave included.
pub(crate) const MAX_GUESTS: usize = 4096;
/// Connections that have not said hello yet at most; when another comes, the one that has been silent longest goes.
const MAX_STRANGERS: usize = 64;
/// How long a connection may be silent before its hello.
const HELLO_PATIENCE: Duration = Duration::from_secs(1);
/// How long a name may be held by what its dead server left behind.
const LEFTOVER_PATIENCE: Duration = Duration::from_millis(200);
/// How often what could not be done yet is tried.
const RECHECK: Duration = Duration::from_millis(1);

/// One guest's number; no other guest in this process ever has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct GuestId(pub(crate) u64);

/// What a host does with its guests. Called on the watcher's thread, one call at a time: never blocks, never runs what a
/// user of the library wrote, never joins a host. It may dismiss guests, and drop hosts and members.
pub(crate) trait Guests: Send + Sync + 'static {
    /// A process of our own user said `hello`, at most [`MAX_HELLO`] bytes, perhaps none.
    fn admit(&self, guest: GuestId, hello: &[u8]) -> Admission;

    /// The guest is gone: its process died, or it closed its connection, or it was dismissed. Everything it wrote before
    /// is visible. One that was dismissed or talks nonsense on its connection may live, and go on writing to what it was
    /// given. False: not done yet, call again in a millisecond.
    fn farewell(&self, guest: GuestId) -> bool;
}

/// What becomes of a guest. Answers have at most [`MAX_REPLY`] bytes.
#[derive(Debug)]
pub(crate) enum Admission {
    /// With at most [`MAX_FILES`](socket::MAX_FILES) files. One farewell follows some day, unless the host is dropped
    /// before.
    Welcome {
        reply: Vec<u8>,
        files: Vec<OwnedFd>,
    },
    Refused {
        reply: Vec<u8>,
    },
    /// Ask again in a millisecond.
    Later,
}

/// Why a host could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("{name:?} is taken: a live process serves it already; end that one, or choose another name")]
    NameTaken { name: String },
    #[error("{name:?} is still held by a forked child of a server that is gone: end that child")]
    NameKept { name: String },
    #[error("opening {name:?}: {source}")]
    Os { name: String, source: io::Error },
}

/// An open door. Dropping it frees the name at once and lets its guests see it gone; then no method of its [`Guests`] is
/// running or will be called, except when dropped by one of them, which then is the last.
pub(crate) struct Host {
    inner: Arc<Inner>,
}

impl Host {
    pub(crate) fn open(kind: &'static str, name: &Name, guests: Arc<dyn Guests>) -> Result<Host, OpenError> {
        let failed = |source| OpenError::Os { name: name.to_string(), source };
        let address = Address::of_service(kind, name).map_err(failed)?;
        let taken = || OpenError::NameTaken { name: name.to_string() };
        let mut probed = None;
        let listener = loop {
            match socket::listen(&address) {
                Ok(listener) => break listener,
                Err(e) if e.kind() != io::ErrorKind::AddrInUse => return Err(failed(e)),
                Err(_) => {}
            }
            match probed {
                // A process that is just being started holds its parent's descriptors for a moment.
                Some(when) if Instant::now() < when + LEFTOVER_PATIENCE => std::thread::sleep(RECHECK),
                // Each look leaves its trace in the queue of a listener that nobody serves, so look twice at most.
                _ if is_served(&address) => return Err(taken()),
                Some(_) => return Err(OpenError::NameKept { name: name.to_string() }),
                None => probed = Some(Instant::now()),
            }
        };
        Host::serve(listener, guests).map_err(failed)
    }

    fn serve(listener: OwnedFd, guests: Arc<dyn Guests>) -> io::Result<Host> {
        let watcher = Watcher::of_process()?;
        let door = watcher.number();
        let inner = Arc::new_cyclic(|this| Inner {
            this: this.clone(),
            guests,
            watcher,
            door,
            closed: AtomicBool::new(false),
            calling: Mutex::new(()),
            state: Mutex::new(State { listener: Some(listener), ..State::default() }),
        });
        let state = locked(&inner.state);
        if let Some(listener) = &state.listener {
            inner.watcher.watch(door, inner.clone(), listener.as_fd(), None)?;
        }
        drop(state);
        Ok(Host { inner })
    }

    /// Cuts a guest off. Its farewell follows.
    pub(crate) fn dismiss(&self, guest: GuestId) {
        if let Some(Guest { line: Some(line), .. }) = locked(&self.inner.state).guests.get(&guest.0) {
            // The watcher hears it as if the guest had hung up.
            socket::hang_up(&line.socket);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let inner = &self.inner;
        // Release, partner: the Acquire load in `Inner::call`.
        inner.closed.store(true, Release);
        let (listener, guests) = {
            let mut state = locked(&inner.state);
            (state.listener.take(), std::mem::take(&mut state.guests))
        };
        // In a forked child the descriptors are closed and nothing else: all of it is still its parent's.
        if inner.watcher.is_of_this_process() {
            if let Some(listener) = &listener {
                inner.watcher.forget(inner.door, listener.as_fd(), None);
                // A process that is just being started may hold it too: nobody shall find it alive.
                socket::hang_up(listener);
            }
            for (id, guest) in &guests {
                if let Some(line) = &guest.line {
                    inner.unwatch(*id, line);
                    socket::hang_up(&line.socket);
                }
            }
            drop((listener, guests));
            // The watcher makes all calls: on its thread, none can be running but the one that we are in.
            if !inner.watcher.is_here() {
                drop(locked(&inner.calling));
            }
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("door", &self.inner.door).finish_non_exhaustive()
    }
}

struct Inner {
    this: Weak<Inner>,
    guests: Arc<dyn Guests>,
    watcher: Arc<Watcher>,
    /// The listener's number.
    door: u64,
    closed: AtomicBool,
    /// Held while a method of `guests` runs.
    calling: Mutex<()>,
    /// Never locked while one runs.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listener: Option<OwnedFd>,
    /// Whether the listener is not heeded, for want of descriptors.
    starved: bool,
    guests: BTreeMap<u64, Guest>,
    /// Those not yet admitted, oldest first.
    strangers: BTreeSet<u64>,
    /// Those to be asked about again.
    unfinished: BTreeSet<u64>,
}

struct Guest {
    /// None when it is leaving.
    line: Option<Line>,
    stage: Stage,
}

struct Line {
    socket: OwnedFd,
    process: Option<OwnedFd>,
}

enum Stage {
    Silent { until: Instant },
    Asking { hello: Arc<[u8]> },
    Admitted,
    Leaving,
}

impl Watched for Inner {
    fn happened(&self, id: u64, what: What) {
        if id == self.door {
            return self.accept();
        }
        let admitted = {
            let mut state = locked(&self.state);
            let Some(Guest { line: Some(line), stage }) = state.guests.get_mut(&id) else { return };
            if what == What::Socket && !broke_silence(&line.socket) {
                return;
            }
            match stage {
                Stage::Silent { .. } if what == What::Socket => {
                    match hear(&line.socket) {
                        Some(hello) => *stage = Stage::Asking { hello },
                        None => return self.forget(&mut state, id),
                    }
                    state.strangers.remove(&id);
                    false
                }
                Stage::Admitted => true,
                // Gone before it was admitted, or impatient.
                _ => return self.forget(&mut state, id),
            }
        };
        if admitted {
            self.leave(id);
        } else {
            self.ask(id);
        }
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        if locked(&self.state).starved {
            self.accept();
        }
        let unfinished = std::mem::take(&mut locked(&self.state).unfinished);
        for id in unfinished {
            let stage =
                locked(&self.state).guests.get(&id).map(|guest| matches!(guest.stage, Stage::Leaving));
            match stage {
                Some(true) => self.part(id),
                Some(false) => self.ask(id),
                None => {}
            }
        }
        let mut state = locked(&self.state);
        loop {
            let oldest = state.strangers.first().copied();
            match oldest.map(|id| (id, state.guests.get(&id).map(|guest| &guest.stage))) {
                Some((_, Some(Stage::Silent { until }))) if *until > now => {
                    let until = *until;
                    break if state.is_pressed() { Some(now + RECHECK) } else { Some(until) };
                }
                Some((id, _)) => self.forget(&mut state, id),
                None => break state.is_pressed().then(|| now + RECHECK),
            }
        }
    }
}

impl State {
    fn is_pressed(&self) -> bool {
        self.starved || !self.unfinished.is_empty()
    }
}

impl Inner {
    fn accept(&self) {
        let mut state = locked(&self.state);
        let state = &mut *state;
        let Some(listener) = &state.listener else { return };
        let mut starved = false;
        // The rest, should there be one, is for the next time.
        for _ in 0..MAX_STRANGERS {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                // Whoever cannot be watched (it is dead, or there are no descriptors left) is hung up on.
                Ok(socket) => state.strangers.extend(self.let_in(socket, &mut state.guests).ok().flatten()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                // Out of descriptors or memory. Who waits at the door would wake us at once: look by the clock instead.
                Err(_) => {
                    starved = true;
                    break;
                }
            }
            if state.strangers.len() > MAX_STRANGERS
                && let Some(oldest) = state.strangers.pop_first()
                && let Some(Guest { line: Some(line), .. }) = state.guests.remove(&oldest)
            {
                self.unwatch(oldest, &line);
            }
        }
        if starved != state.starved && self.watcher.heed(self.door, listener.as_fd(), !starved).is_ok() {
            state.starved = starved;
        }
    }

    /// Takes on somebody who connected, if it is of our user.
    fn let_in(&self, socket: OwnedFd, guests: &mut BTreeMap<u64, Guest>) -> io::Result<Option<u64>> {
        let peer = Peer::of(&socket)?;
        if !peer.is_our_user() {
            return Ok(None);
        }
        let line = Line { socket, process: peer.process()? };
        let Some(this) = self.this.upgrade() else { return Ok(None) };
        let id = self.watcher.number();
        self.watcher.watch(id, this, line.socket.as_fd(), line.process.as_ref().map(AsFd::as_fd))?;
        let stage = Stage::Silent { until: Instant::now() + HELLO_PATIENCE };
        guests.insert(id, Guest { line: Some(line), stage });
        Ok(Some(id))
    }

    fn ask(&self, id: u64) {
        let hello = {
            let mut state = locked(&self.state);
            let count = state.guests.len() - state.strangers.len();
            let Some(Guest { stage: Stage::Asking { hello }, line: Some(line) }) = state.guests.get(&id)
            else {
                return;
            };
            if count > MAX_GUESTS {
                // Whoever is gone before the answer needs none.
                socket::send(&line.socket, Head::new(Head::FULL).as_bytes(), &[], &[]).ok();
                return self.forget(&mut state, id);
            }
            hello.clone()
        };
        let Some(admission) = self.call(|guests| guests.admit(GuestId(id), &hello)) else { return };
        let mut state = locked(&self.state);
        // Not there any more: the host was dropped by the very call.
        let Some(guest) = state.guests.get_mut(&id) else { return };
        let Some(line) = &guest.line else { return };
        match admission {
            Admission::Later => {
                state.unfinished.insert(id);
            }
            Admission::Refused { reply } => {
                // As above.
                socket::send(&line.socket, Head::new(Head::REFUSED).as_bytes(), &reply, &[]).ok();
                self.forget(&mut state, id);
            }
            Admission::Welcome { reply, files } => {
                debug_assert!(reply.len() <= MAX_REPLY && files.len() <= socket::MAX_FILES);
                guest.stage = Stage::Admitted;
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                let sent = socket::send(&line.socket, Head::new(Head::WELCOME).as_bytes(), &reply, &files);
                if sent.is_err() {
                    drop(state);
                    self.leave(id);
                }
            }
        }
    }

    /// A guest that was admitted is gone.
    fn leave(&self, id: u64) {
        {
            let mut state = locked(&self.state);
            let Some(guest) = state.guests.get_mut(&id) else { return };
            let Some(line) = guest.line.take() else { return };
            guest.stage = Stage::Leaving;
            self.unwatch(id, &line);
            socket::hang_up(&line.socket);
        }
        self.part(id);
    }

    fn part(&self, id: u64) {
        let Some(done) = self.call(|guests| guests.farewell(GuestId(id))) else { return };
        let mut state = locked(&self.state);
        if done {
            state.guests.remove(&id);
        } else if state.guests.contains_key(&id) {
            state.unfinished.insert(id);
        }
    }

    /// Calls a method of `guests`, unless the host was dropped.
    fn call<R>(&self, method: impl FnOnce(&dyn Guests) -> R) -> Option<R> {
        let _running = locked(&self.calling);
        // Acquire, partner: the Release store in `Host::drop`, which takes `calling` after it: either it waits for us, or
        // we see it.
        (!self.closed.load(Acquire)).then(|| method(&*self.guests))
    }

    /// Lets go of somebody who was not admitted.
    fn forget(&self, state: &mut State, id: u64) {
        state.strangers.remove(&id);
        state.unfinished.remove(&id);
        if let Some(Guest { line: Some(line), .. }) = state.guests.remove(&id) {
            self.unwatch(id, &line);
        }
    }

    fn unwatch(&self, id: u64, line: &Line) {
        self.watcher.forget(id, line.socket.as_fd(), line.process.as_ref().map(AsFd::as_fd));
    }
}

/// Whether somebody alive listens there. False: nobody, or only descriptors are left that a forked child keeps.
fn is_served(address: &Address) -> bool {
    match socket::connect(address, RECHECK) {
        Ok(socket) => match Peer::of(&socket).and_then(|peer| peer.process()) {
            Ok(_) => true,
            Err(e) => e.kind() != io::ErrorKind::NotFound,
        },
        // Anything else, as a queue of guests that is full, means that there is somebody.
        Err(e) => e.kind() != io::ErrorKind::ConnectionRefused,
    }
}

/// A stranger's first message, if it makes sense. Files that came with it are closed.
fn hear(socket: &OwnedFd) -> Option<Arc<[u8]>> {
    let (mut head, mut hello) = (Head::new_zeroed(), [0; MAX_HELLO]);
    let (len, _files) = socket::receive(socket, head.as_mut_bytes(), &mut hello).ok()?;
    (head == Head::new(Head::HELLO)).then(|| hello[..len].into())
}

/// What stands before every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Head {
    pub(super) version: u32,
    pub(super) what: u32,
}

impl Head {
    /// With letters in it, so that it is not met by chance.
    pub(super) const VERSION: u32 = u32::from_le_bytes(*b"CTN\x01");

    pub(super) const HELLO: u32 = 1;
    pub(super) const WELCOME: u32 = 2;
    pub(super) const REFUSED: u32 = 3;
    pub(super) const FULL: u32 = 4;

    pub(super) fn new(what: u32) -> Head {
        Head { version: Head::VERSION, what }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "host_tests.rs"]
mod tests;
