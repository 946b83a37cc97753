//! The one thread per process that serves every [`Host`](super::host::Host) and watches for every
//! [`Member`](super::member::Member).
//!
//! It starts with the first of them and lasts as long as the process. It sleeps in `epoll_wait` until something happens, or
//! until something that could not be done yet is due; it never waits for a peer. A source that fails hurts no other one.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::process::Pid;
use rustix::time::Timespec;

use super::locked;
use crate::ring::fence;

/// Somebody for whom the watcher watches. Its methods are called on the watcher's thread alone, and never block.
pub(super) trait Watched: Send + Sync {
    /// Something can be read from the socket that is watched under this number, it has hung up, or its process is dead.
    fn happened(&self, id: u64, what: What);
    /// Does what is due, and says when something will be. Called after `happened`, and when due.
    fn tend(&self, now: Instant) -> Option<Instant>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Socket,
    Process,
}

pub(super) struct Watcher {
    pid: Pid,
    poll: OwnedFd,
    sources: Mutex<HashMap<u64, Arc<dyn Watched>>>,
    next: AtomicU64,
    thread: OnceLock<ThreadId>,
}

static WATCHER: Mutex<Option<Arc<Watcher>>> = Mutex::new(None);

impl Watcher {
    /// The process's watcher; starts it if need be.
    pub(super) fn of_process() -> io::Result<Arc<Watcher>> {
        let mut current = locked(&WATCHER);
        // In a forked child the thread is not there: it gets a watcher of its own.
        if let Some(watcher) = current.as_ref().filter(|watcher| watcher.is_of_this_process()) {
            return Ok(watcher.clone());
        }
        // Whoever is watched rings bells, or has its bells rung.
        fence::register()?;
        let watcher = Arc::new(Watcher {
            pid: rustix::process::getpid(),
            poll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            sources: Mutex::default(),
            next: AtomicU64::new(1),
            thread: OnceLock::new(),
        });
        std::thread::Builder::new().name("crosstie-watcher".into()).spawn({
            let watcher = watcher.clone();
            move || watcher.run()
        })?;
        *current = Some(watcher.clone());
        Ok(watcher)
    }

    /// False in a child that was forked. It must leave alone what it shares with its parent: the poll, the connections.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.pid == rustix::process::getpid()
    }

    /// Whether the caller is the watcher's own thread.
    pub(super) fn is_here(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// A number that was never given before.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Relaxed)
    }

    /// Watches a socket, and the process behind it, until [`Watcher::forget`].
    pub(super) fn watch(
        &self,
        id: u64,
        source: Arc<dyn Watched>,
        socket: BorrowedFd<'_>,
        process: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        locked(&self.sources).insert(id, source);
        let add = |file, what| epoll::add(&self.poll, file, token(id, what), epoll::EventFlags::IN);
        let added = add(socket, What::Socket)
            .and_then(|()| process.map_or(Ok(()), |process| add(process, What::Process)));
        if added.is_err() {
            self.forget(id, socket, process);
        }
        Ok(added?)
    }

    /// Has a socket watched for nothing, or again. Nothing is missed meanwhile.
    pub(super) fn heed(&self, id: u64, socket: BorrowedFd<'_>, heed: bool) -> io::Result<()> {
        let flags = if heed { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.poll, socket, token(id, What::Socket), flags)?)
    }

    /// Ends the watching. `happened` may be running for this number, or about to, unless this is the watcher's thread.
    pub(super) fn forget(&self, id: u64, socket: BorrowedFd<'_>, process: Option<BorrowedFd<'_>>) {
        for file in [Some(socket), process].into_iter().flatten() {
            // It fails only if it was never added.
            epoll::delete(&self.poll, file).ok();
        }
        let forgotten = locked(&self.sources).remove(&id);
        // Outside of the lock: whatever goes with it may be watched itself.
        drop(forgotten);
    }

    fn run(&self) {
        self.thread.get_or_init(|| std::thread::current().id());
        let mut events = Vec::with_capacity(64);
        let mut due = Due::new();
        loop {
            let timeout = due.values().map(|(when, _)| *when).min().map(until);
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.poll, spare, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // Short of memory, perhaps. Whatever it is, it must neither end the watching nor make it spin.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            for event in &events {
                let (id, what) = parse(event.data.u64());
                let Some(source) = locked(&self.sources).get(&id).cloned() else { continue };
                attend(&mut due, source, |source| source.happened(id, what));
            }
            let now = Instant::now();
            for (_, source) in
                due.extract_if(|_, (when, _)| *when <= now).map(|(_, late)| late).collect::<Vec<_>>()
            {
                // Who is not there any more has nothing to do.
                if let Some(source) = source.upgrade() {
                    attend(&mut due, source, |_| ());
                }
            }
        }
    }
}

/// Who has to be called when, by address, which is its own as long as a `Weak` is left.
type Due = HashMap<usize, (Instant, Weak<dyn Watched>)>;

/// Lets a source act, and notes when it wants to be called again. A panic in it is a mistake of ours, which has been
/// reported on standard error and concerns nobody else.
fn attend(due: &mut Due, source: Arc<dyn Watched>, act: impl FnOnce(&dyn Watched)) {
    let next = catch_unwind(AssertUnwindSafe(|| {
        act(&*source);
        source.tend(Instant::now())
    }));
    let key = Arc::as_ptr(&source).cast::<()>().addr();
    match next {
        Ok(Some(when)) => due.insert(key, (when, Arc::downgrade(&source))),
        Ok(None) | Err(_) => due.remove(&key),
    };
}

fn token(id: u64, what: What) -> epoll::EventData {
    epoll::EventData::new_u64(id << 1 | u64::from(what == What::Process))
}

fn parse(token: u64) -> (u64, What) {
    (token >> 1, if token & 1 == 1 { What::Process } else { What::Socket })
}

fn until(when: Instant) -> Timespec {
    let left = when.saturating_duration_since(Instant::now());
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
}

/// Whether a silent connection has something to say after all: an end, or nonsense.
pub(super) fn broke_silence(socket: impl AsFd) -> bool {
    let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
    let got = rustix::net::recv(socket, &mut [0u8; 1], flags);
    !matches!(got, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR))
}
