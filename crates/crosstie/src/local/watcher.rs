//! The watcher: one thread per process that runs every [`Listener`](super::listener::Listener) and watches the peer of
//! every [`Connection`](super::connection::Connection).
//!
//! The thread starts with the first of them and lasts as long as the process. It sleeps in `epoll_wait` until a socket or
//! a pidfd becomes readable, or until postponed work is due. It never waits for a peer. A panic in one [`EventHandler`]
//! does not affect the others.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::Timespec;

use super::lock;
use crate::process::Creator;
use crate::ring::fence;

/// Handles the events of the sockets and processes that it watches. The watcher calls the methods on its own thread only;
/// they never block.
pub(super) trait EventHandler: Send + Sync {
    /// The socket that is watched as `id` is readable or closed, or its process has ended.
    fn handle_event(&self, id: u64, source: EventSource);
    /// Does the postponed work that is due at `now`, and returns when more will be due. The watcher calls it after every
    /// `handle_event`, and at the time that it returned.
    fn run_postponed(&self, now: Instant) -> Option<Instant>;
}

/// Which of the two descriptors of a watch has an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventSource {
    Socket,
    /// The pidfd of the peer process: it has ended.
    Process,
}

pub(super) struct Watcher {
    creator: Creator,
    poll: OwnedFd,
    handlers: Mutex<HashMap<u64, Arc<dyn EventHandler>>>,
    next_id: AtomicU64,
    thread: OnceLock<ThreadId>,
}

static WATCHER: Mutex<Option<Arc<Watcher>>> = Mutex::new(None);

impl Watcher {
    /// Returns the process's watcher. Starts it if it is not running.
    pub(super) fn of_process() -> io::Result<Arc<Watcher>> {
        let mut current = lock(&WATCHER);
        // A forked child does not have the thread of its parent's watcher, so it gets a watcher of its own.
        if let Some(watcher) = current.as_ref().filter(|watcher| watcher.is_of_this_process()) {
            return Ok(watcher.clone());
        }
        // Connections wake parkers, and services notify them: both need the asymmetric barrier.
        fence::register()?;
        let watcher = Arc::new(Watcher {
            creator: Creator::this_process(),
            poll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            handlers: Mutex::default(),
            next_id: AtomicU64::new(1),
            thread: OnceLock::new(),
        });
        std::thread::Builder::new().name("crosstie-watcher".into()).spawn({
            let watcher = watcher.clone();
            move || watcher.run()
        })?;
        *current = Some(watcher.clone());
        Ok(watcher)
    }

    /// False in a forked child. The child must not touch what it shares with its parent: the epoll instance and the
    /// connections.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.creator.is_this_process()
    }

    /// Whether the caller runs on the watcher's own thread.
    pub(super) fn is_current_thread(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// Returns an id that this watcher has never returned before.
    pub(super) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Watches a socket, and the process behind it, until [`Watcher::unwatch`].
    pub(super) fn watch(
        &self,
        id: u64,
        handler: Arc<dyn EventHandler>,
        socket: BorrowedFd<'_>,
        process: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        lock(&self.handlers).insert(id, handler);
        let add = |file, source| epoll::add(&self.poll, file, token(id, source), epoll::EventFlags::IN);
        let added = add(socket, EventSource::Socket)
            .and_then(|()| process.map_or(Ok(()), |process| add(process, EventSource::Process)));
        if added.is_err() {
            self.unwatch(id, socket, process);
        }
        Ok(added?)
    }

    /// Enables or disables the readable events of a watched socket. No event is lost while they are disabled.
    pub(super) fn set_readable_events(
        &self,
        id: u64,
        socket: BorrowedFd<'_>,
        enabled: bool,
    ) -> io::Result<()> {
        let flags = if enabled { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.poll, socket, token(id, EventSource::Socket), flags)?)
    }

    /// Stops watching. `handle_event` may be running for this id, or be about to, unless the caller is on the watcher's
    /// thread.
    pub(super) fn unwatch(&self, id: u64, socket: BorrowedFd<'_>, process: Option<BorrowedFd<'_>>) {
        for file in [Some(socket), process].into_iter().flatten() {
            // This fails only if the descriptor was never added.
            epoll::delete(&self.poll, file).ok();
        }
        let removed = lock(&self.handlers).remove(&id);
        // Drop outside of the lock: dropping the handler may unwatch other descriptors.
        drop(removed);
    }

    fn run(&self) {
        self.thread.get_or_init(|| std::thread::current().id());
        let mut events = Vec::with_capacity(64);
        let mut postponed = Postponed::new();
        loop {
            let timeout = postponed.values().map(|(when, _)| *when).min().map(time_until);
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.poll, spare, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // The system is perhaps short of memory. No error may end the watcher or make it spin.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            for event in &events {
                let (id, source) = parse_token(event.data.u64());
                let Some(handler) = lock(&self.handlers).get(&id).cloned() else { continue };
                dispatch(&mut postponed, handler, |handler| handler.handle_event(id, source));
            }
            let now = Instant::now();
            for (_, handler) in
                postponed.extract_if(|_, (when, _)| *when <= now).map(|(_, due)| due).collect::<Vec<_>>()
            {
                // A handler that was dropped has no work left.
                if let Some(handler) = handler.upgrade() {
                    dispatch(&mut postponed, handler, |_| ());
                }
            }
        }
    }
}

/// When to call `run_postponed` of which handler. The key is the handler's address, which is not reused as long as a
/// `Weak` exists.
type Postponed = HashMap<usize, (Instant, Weak<dyn EventHandler>)>;

/// Runs `act` and the postponed work of a handler, and records when more work is due. A panic in a handler is a bug of
/// ours; the panic hook has reported it on standard error, and the other handlers go on.
fn dispatch(postponed: &mut Postponed, handler: Arc<dyn EventHandler>, act: impl FnOnce(&dyn EventHandler)) {
    let next = catch_unwind(AssertUnwindSafe(|| {
        act(&*handler);
        handler.run_postponed(Instant::now())
    }));
    let key = Arc::as_ptr(&handler).cast::<()>().addr();
    match next {
        Ok(Some(when)) => postponed.insert(key, (when, Arc::downgrade(&handler))),
        Ok(None) | Err(_) => postponed.remove(&key),
    };
}

/// The epoll token of a descriptor: the id, and the source in the lowest bit.
fn token(id: u64, source: EventSource) -> epoll::EventData {
    epoll::EventData::new_u64(id << 1 | u64::from(source == EventSource::Process))
}

fn parse_token(token: u64) -> (u64, EventSource) {
    (token >> 1, if token & 1 == 1 { EventSource::Process } else { EventSource::Socket })
}

fn time_until(when: Instant) -> Timespec {
    let left = when.saturating_duration_since(Instant::now());
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

/// Whether a socket is really readable: it has data, or its peer has closed it. False for a spurious event.
pub(super) fn has_data_or_eof(socket: impl AsFd) -> bool {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    let got = rustix::net::recv(socket, &mut [0u8; 1], flags);
    !matches!(got, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR))
}
