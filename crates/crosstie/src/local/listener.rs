//! The server side: a listener owns a name, accepts connections, and tells its [`ClientHandler`] which clients connect
//! and disconnect.
//!
//! Clients are other processes, or threads of this one, that [connect](super::connection::Connection::connect). This
//! module checks the peer's user, reads the hello and limits the number of connections. The [`ClientHandler`] decides
//! whether a client is admitted and what it gets.
//!
//! The states of one accepted connection:
//!
//! | state | event | next state |
//! | --- | --- | --- |
//! | `AwaitingHello` | a valid hello arrives | `AwaitingAdmission` |
//! | | invalid hello, closed, process died, timeout, too many connections in this state | dropped |
//! | `AwaitingAdmission` | `admit` returns `Accept` | `Admitted` |
//! | | `admit` returns `RetryLater` | the same; `admit` is called again after 1 ms |
//! | | `admit` returns `Refuse`; closed, process died, sent more data, too many clients | dropped |
//! | `Admitted` | closed, process died, sent more data, [`Listener::disconnect`] | `Removing` |
//! | `Removing` | `remove` returns false | the same; `remove` is called again after 1 ms |
//! | | `remove` returns true | dropped |
//!
//! So the handler's `remove` is called for admitted clients only.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::awaiting_hello::{self, AwaitingHello, MAX_AWAITING_HELLO};
use super::lock;
use super::socket::{self, Address, ListeningSocket, Name, Peer, Socket};
use super::watcher::{EventHandler, EventSource, Watcher, has_data_or_eof};

/// Largest hello, in bytes.
pub(crate) const MAX_HELLO: usize = 4096;
/// Largest reply to a hello, in bytes.
pub(crate) const MAX_REPLY: usize = 4096;
/// Most clients of one listener that have sent a hello and are not removed yet.
pub(crate) const MAX_CLIENTS: usize = 4096;
/// How long [`Listener::open`] waits for a name that a dead server's descriptors still use.
const STALE_NAME_TIMEOUT: Duration = Duration::from_millis(200);
/// Interval at which postponed work is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Identifies one client connection. Unique within the process: ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClientId(pub(crate) u64);

/// What a service does when clients connect and disconnect.
///
/// The watcher thread makes all calls, one at a time. A method never blocks, never runs code of the library's user, and
/// never connects to a listener. It may disconnect clients, and drop listeners and connections.
pub(crate) trait ClientHandler: Send + Sync + 'static {
    /// Decides about a process of our own user that sent `hello`, which has 0 to [`MAX_HELLO`] bytes.
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission;

    /// Removes an admitted client: its process died, it closed its connection, or it was
    /// [disconnected](Listener::disconnect). Everything that a dead process wrote is visible. A client that was
    /// disconnected, or that broke the protocol on its socket, may still run and write to the memory it was given.
    ///
    /// False: not done yet; the watcher calls again in a millisecond.
    fn remove(&self, client: ClientId) -> bool;
}

/// A decision about a client. Replies have at most [`MAX_REPLY`] bytes.
#[derive(Debug)]
pub(crate) enum Admission {
    /// Admit the client, and send it `reply` with `files`, at most [`MAX_FILES`](socket::MAX_FILES). Later
    /// [`remove`](ClientHandler::remove) is called for this client, unless the listener is dropped first.
    Accept { reply: Vec<u8>, files: Vec<OwnedFd> },
    /// Send `reply`, and close the connection.
    Refuse { reply: Vec<u8> },
    /// Call `admit` again in a millisecond.
    RetryLater,
}

/// Why a listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("the name {name:?} is taken by a live process: end that process, or choose another name")]
    NameTaken { name: String },
    #[error("the name {name:?} is still used by a forked child of a dead server: end that child process")]
    NameUsedByChild { name: String },
    #[error("opening {name:?}: {source}")]
    Os { name: String, source: io::Error },
}

/// Listens at a name. Dropping it frees the name at once and closes all connections. After the drop no method of its
/// [`ClientHandler`] is running or will be called; if such a method drops the listener itself, it is the last call.
pub(crate) struct Listener {
    inner: Arc<Inner>,
}

impl Listener {
    pub(crate) fn open(
        kind: &'static str,
        name: &Name,
        handler: Arc<dyn ClientHandler>,
    ) -> Result<Listener, ListenError> {
        let failed = |source| ListenError::Os { name: name.to_string(), source };
        let address = Address::of_service(kind, name).map_err(failed)?;
        let taken = || ListenError::NameTaken { name: name.to_string() };
        let mut probed = None;
        let socket = loop {
            match socket::listen(&address) {
                Ok(socket) => break socket,
                Err(e) if e.kind() != io::ErrorKind::AddrInUse => return Err(failed(e)),
                Err(_) => {}
            }
            match probed {
                // A child process has its parent's descriptors between fork and exec. This ends soon.
                Some(when) if Instant::now() < when + STALE_NAME_TIMEOUT => {
                    std::thread::sleep(RETRY_INTERVAL)
                }
                // Each probe occupies an entry in the accept queue of a listener that nobody serves, so probe at most
                // twice.
                _ if is_served(&address) => return Err(taken()),
                Some(_) => return Err(ListenError::NameUsedByChild { name: name.to_string() }),
                None => probed = Some(Instant::now()),
            }
        };
        Listener::serve(socket, handler).map_err(failed)
    }

    fn serve(socket: ListeningSocket, handler: Arc<dyn ClientHandler>) -> io::Result<Listener> {
        let watcher = Watcher::of_process()?;
        let id = watcher.new_id();
        let inner = Arc::new_cyclic(|this| Inner {
            this: this.clone(),
            handler,
            watcher,
            id,
            dropped: AtomicBool::new(false),
            calling: Mutex::new(()),
            state: Mutex::new(State { socket: Some(socket), ..State::default() }),
        });
        let state = lock(&inner.state);
        if let Some(socket) = &state.socket {
            inner.watcher.watch(id, inner.clone(), socket.as_fd(), None)?;
        }
        drop(state);
        Ok(Listener { inner })
    }

    /// Closes the connection of a client. A call of [`ClientHandler::remove`] follows.
    pub(crate) fn disconnect(&self, client: ClientId) {
        if let Some(Accepted { fds: Some(fds), .. }) = lock(&self.inner.state).connections.get(&client.0) {
            // The watcher sees this as if the client had closed its socket.
            socket::shut_down(&fds.socket);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let inner = &self.inner;
        // Release, partner: the Acquire load in `Inner::call_handler`.
        inner.dropped.store(true, Release);
        let (socket, connections) = {
            // In a forked child another thread of the parent may hold the lock, for ever.
            let mut state = match inner.state.try_lock() {
                Ok(state) => state,
                Err(_) if !inner.watcher.is_of_this_process() => return,
                Err(_) => lock(&inner.state),
            };
            (state.socket.take(), std::mem::take(&mut state.connections))
        };
        // A forked child only closes its descriptors: the connections are still its parent's.
        if inner.watcher.is_of_this_process() {
            if let Some(socket) = &socket {
                inner.watcher.unwatch(inner.id, socket.as_fd(), None);
            }
            for (id, connection) in &connections {
                if let Some(fds) = &connection.fds {
                    inner.unwatch(*id, fds);
                }
            }
            drop((socket, connections));
            // Wait until no method of the handler is running. Only the watcher thread calls them; on that thread, the only
            // running one is the one that drops the listener.
            if !inner.watcher.is_current_thread() {
                drop(lock(&inner.calling));
            }
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

struct Inner {
    this: Weak<Inner>,
    handler: Arc<dyn ClientHandler>,
    watcher: Arc<Watcher>,
    /// The watcher's id of the listening socket.
    id: u64,
    dropped: AtomicBool,
    /// Locked while a method of `handler` runs.
    calling: Mutex<()>,
    /// Never locked while a method of `handler` runs.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The listening socket; None once the listener is dropped.
    socket: Option<ListeningSocket>,
    /// Accepting failed for lack of descriptors or memory. The events of `socket` are disabled, and accepting is retried
    /// every [`RETRY_INTERVAL`].
    out_of_descriptors: bool,
    /// All accepted connections, by their ids.
    connections: BTreeMap<u64, Accepted>,
    awaiting_hello: AwaitingHello,
    /// Connections whose `admit` or `remove` is to be called again.
    postponed: BTreeSet<u64>,
}

/// One accepted connection.
struct Accepted {
    /// None in the stage `Removing`.
    fds: Option<ClientFds>,
    stage: Stage,
}

struct ClientFds {
    socket: Socket,
    /// The pidfd of the client process, where there is one.
    process: Option<OwnedFd>,
}

enum Stage {
    AwaitingHello,
    AwaitingAdmission { hello: Arc<[u8]> },
    Admitted,
    Removing,
}

impl EventHandler for Inner {
    fn handle_event(&self, id: u64, source: EventSource) {
        if id == self.id {
            return self.accept();
        }
        let admitted = {
            let mut state = lock(&self.state);
            let Some(Accepted { fds: Some(fds), stage }) = state.connections.get_mut(&id) else { return };
            if source == EventSource::Socket && !has_data_or_eof(&fds.socket) {
                return;
            }
            match stage {
                Stage::AwaitingHello if source == EventSource::Socket => {
                    match read_hello(&fds.socket) {
                        Some(hello) => *stage = Stage::AwaitingAdmission { hello },
                        None => {
                            // A client of another version reads ours in the header. If this fails, the client has closed the
                            // connection.
                            socket::send(&fds.socket, Header::new(Header::REFUSED).as_bytes(), &[], &[]).ok();
                            return self.drop_unadmitted(&mut state, id);
                        }
                    }
                    state.awaiting_hello.remove(id);
                    false
                }
                Stage::Admitted => true,
                // The client ended before it was admitted, or it sent more than its hello.
                _ => return self.drop_unadmitted(&mut state, id),
            }
        };
        if admitted {
            self.close_admitted(id);
        } else {
            self.decide_admission(id);
        }
    }

    fn run_postponed(&self, now: Instant) -> Option<Instant> {
        if lock(&self.state).out_of_descriptors {
            self.accept();
        }
        let postponed = std::mem::take(&mut lock(&self.state).postponed);
        for id in postponed {
            let removing = lock(&self.state)
                .connections
                .get(&id)
                .map(|connection| matches!(connection.stage, Stage::Removing));
            match removing {
                Some(true) => self.remove_client(id),
                Some(false) => self.decide_admission(id),
                None => {}
            }
        }
        let mut state = lock(&self.state);
        while let Some(id) = state.awaiting_hello.take_late(now) {
            self.drop_unadmitted(&mut state, id);
        }
        let retry = state.has_postponed_work().then(|| now + RETRY_INTERVAL);
        retry.or(state.awaiting_hello.next_deadline())
    }
}

impl State {
    fn has_postponed_work(&self) -> bool {
        self.out_of_descriptors || !self.postponed.is_empty()
    }
}

impl Inner {
    fn accept(&self) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let Some(listening) = &state.socket else { return };
        let mut out_of_descriptors = false;
        // If more connections are pending, the next event accepts them.
        for _ in 0..MAX_AWAITING_HELLO {
            match awaiting_hello::accept(listening) {
                // A connection that cannot be watched (its process is dead, or there are no descriptors left) is closed.
                Ok(Some((socket, peer))) => {
                    if let Ok(Some(id)) = self.add_connection(socket, peer, &mut state.connections)
                        && let Some(oldest) = state.awaiting_hello.add(id, Instant::now())
                        && let Some(Accepted { fds: Some(fds), .. }) = state.connections.remove(&oldest)
                    {
                        self.unwatch(oldest, &fds);
                    }
                }
                Ok(None) => break,
                // Out of descriptors or memory. The pending connection would cause the next event at once, so disable
                // these events and retry every `RETRY_INTERVAL`.
                Err(_) => {
                    out_of_descriptors = true;
                    break;
                }
            }
        }
        if out_of_descriptors != state.out_of_descriptors
            && self.watcher.set_readable_events(self.id, listening.as_fd(), !out_of_descriptors).is_ok()
        {
            state.out_of_descriptors = out_of_descriptors;
        }
    }

    /// Adds an accepted connection, and returns its id. None if the listener is being dropped.
    fn add_connection(
        &self,
        socket: Socket,
        peer: Peer,
        connections: &mut BTreeMap<u64, Accepted>,
    ) -> io::Result<Option<u64>> {
        let fds = ClientFds { socket, process: peer.process()? };
        let Some(this) = self.this.upgrade() else { return Ok(None) };
        let id = self.watcher.new_id();
        self.watcher.watch(id, this, fds.socket.as_fd(), fds.process.as_ref().map(AsFd::as_fd))?;
        connections.insert(id, Accepted { fds: Some(fds), stage: Stage::AwaitingHello });
        Ok(Some(id))
    }

    /// Asks the handler about a connection that has sent its hello, and sends the client the decision.
    fn decide_admission(&self, id: u64) {
        let hello = {
            let mut state = lock(&self.state);
            let count = state.connections.len() - state.awaiting_hello.len();
            let Some(Accepted { stage: Stage::AwaitingAdmission { hello }, fds: Some(fds) }) =
                state.connections.get(&id)
            else {
                return;
            };
            if count > MAX_CLIENTS {
                // If this fails, the client has closed the connection and needs no reply.
                socket::send(&fds.socket, Header::new(Header::FULL).as_bytes(), &[], &[]).ok();
                return self.drop_unadmitted(&mut state, id);
            }
            hello.clone()
        };
        let Some(admission) = self.call_handler(|handler| handler.admit(ClientId(id), &hello)) else {
            return;
        };
        let mut state = lock(&self.state);
        // The connection no longer exists if this call of `admit` dropped the listener.
        let Some(connection) = state.connections.get_mut(&id) else { return };
        let Some(fds) = &connection.fds else { return };
        match admission {
            Admission::RetryLater => {
                state.postponed.insert(id);
            }
            Admission::Refuse { reply } => {
                // If this fails, the client has closed the connection and needs no reply.
                socket::send(&fds.socket, Header::new(Header::REFUSED).as_bytes(), &reply, &[]).ok();
                self.drop_unadmitted(&mut state, id);
            }
            Admission::Accept { reply, files } => {
                debug_assert!(reply.len() <= MAX_REPLY && files.len() <= socket::MAX_FILES);
                connection.stage = Stage::Admitted;
                let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                let sent =
                    socket::send(&fds.socket, Header::new(Header::ACCEPTED).as_bytes(), &reply, &files);
                if sent.is_err() {
                    drop(state);
                    self.close_admitted(id);
                }
            }
        }
    }

    /// Closes the connection of an admitted client, and removes the client.
    fn close_admitted(&self, id: u64) {
        {
            let mut state = lock(&self.state);
            let Some(connection) = state.connections.get_mut(&id) else { return };
            let Some(fds) = connection.fds.take() else { return };
            connection.stage = Stage::Removing;
            self.unwatch(id, &fds);
            socket::shut_down(&fds.socket);
        }
        self.remove_client(id);
    }

    fn remove_client(&self, id: u64) {
        let Some(done) = self.call_handler(|handler| handler.remove(ClientId(id))) else { return };
        let mut state = lock(&self.state);
        if done {
            state.connections.remove(&id);
        } else if state.connections.contains_key(&id) {
            state.postponed.insert(id);
        }
    }

    /// Calls a method of `handler`, unless the listener was dropped.
    fn call_handler<R>(&self, method: impl FnOnce(&dyn ClientHandler) -> R) -> Option<R> {
        let _running = lock(&self.calling);
        // Acquire, partner: the Release store in `Listener::drop`, which locks `calling` after it. Either the drop waits
        // for this call, or this load sees the drop.
        (!self.dropped.load(Acquire)).then(|| method(&*self.handler))
    }

    /// Closes a connection that was not admitted.
    fn drop_unadmitted(&self, state: &mut State, id: u64) {
        state.awaiting_hello.remove(id);
        state.postponed.remove(&id);
        if let Some(Accepted { fds: Some(fds), .. }) = state.connections.remove(&id) {
            self.unwatch(id, &fds);
        }
    }

    fn unwatch(&self, id: u64, fds: &ClientFds) {
        self.watcher.unwatch(id, fds.socket.as_fd(), fds.process.as_ref().map(AsFd::as_fd));
    }
}

/// Whether a live process listens at an address. False if nobody does, or if a forked child of a dead server merely keeps
/// the descriptor open.
fn is_served(address: &Address) -> bool {
    match socket::connect(address, RETRY_INTERVAL) {
        Ok(socket) => match Peer::of(&socket).and_then(|peer| peer.process()) {
            Ok(_) => true,
            Err(e) => e.kind() != io::ErrorKind::NotFound,
        },
        // Any other error, such as a full accept queue, means that there is a listener.
        Err(e) => e.kind() != io::ErrorKind::ConnectionRefused,
    }
}

/// Reads the first message of a connection. None if it is not a valid hello.
fn read_hello(socket: &Socket) -> Option<Arc<[u8]>> {
    let (mut header, mut hello) = (Header::new_zeroed(), [0; MAX_HELLO]);
    let len = socket::receive(socket, header.as_mut_bytes(), &mut hello).ok()?;
    (header == Header::new(Header::HELLO)).then(|| hello[..len].into())
}

/// The first 8 bytes of every message on the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Header {
    pub(super) version: u32,
    /// One of the constants below.
    pub(super) kind: u32,
}

impl Header {
    /// Contains letters, so that other data is unlikely to match it.
    pub(super) const VERSION: u32 = u32::from_le_bytes(*b"CTN\x01");

    pub(super) const HELLO: u32 = 1;
    pub(super) const ACCEPTED: u32 = 2;
    pub(super) const REFUSED: u32 = 3;
    pub(super) const FULL: u32 = 4;

    pub(super) fn new(kind: u32) -> Header {
        Header { version: Header::VERSION, kind }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "listener_tests.rs"]
mod tests;
