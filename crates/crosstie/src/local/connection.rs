//! The client side: a connection to a [`Listener`](super::listener::Listener), and notice of the server's end.
//!
//! The connection carries the handshake: a hello, and a reply with files. After that the socket stays silent; its end, or
//! the end of the server process, marks the connection as closed and wakes the parkers that were registered with it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use zerocopy::{FromZeros, IntoBytes};

use super::listener::{Header, MAX_HELLO, MAX_REPLY};
use super::lock;
use super::socket::{self, Address, Name, Peer, ReceivedFile, Socket};
use super::watcher::{EventHandler, EventSource, Watcher, has_data_or_eof};
use crate::memory::segment::SharedRef;
use crate::wait::Parker;

/// How long the server may take to reply, unless the caller says otherwise. A server replies at once unless it postpones
/// the decision, so this is long.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest pause before connecting again to a server that closed the connection.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Longer timeouts are cut to this, which can be added to any `Instant`.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Why connecting to a listener failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("no live process serves {name:?}: start the server first")]
    NoServer { name: String },
    #[error("{name:?} is served by user {uid}, not by our own user: nothing was sent to it")]
    OtherUser { name: String, uid: u32 },
    #[error("{name:?} uses another version of the protocol: build server and client from the same release")]
    OtherVersion { name: String },
    /// With the server's reason, in the format of its service.
    #[error("the server refused the connection")]
    Refused(Vec<u8>),
    #[error("{name:?} has as many clients as it can have: disconnect one of them first")]
    Full { name: String },
    #[error("{name:?} closed the connection before it replied: it is shutting down or overloaded; try again")]
    Closed { name: String },
    #[error("{name:?} did not reply within {after:?}: it is stopped, or has no room for another client")]
    NoReply { name: String, after: Duration },
    #[error("the hello has {0} bytes; at most {MAX_HELLO} are allowed")]
    HelloTooLong(usize),
    #[error("connecting: {0}")]
    Os(#[from] io::Error),
}

/// A connection to a listener. Dropping it closes the connection.
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    watcher: Arc<Watcher>,
    id: u64,
    closed: AtomicBool,
    /// Woken when the connection is closed.
    parkers: Mutex<Vec<SharedRef<Parker>>>,
    socket: Socket,
    process: Option<OwnedFd>,
}

impl Connection {
    /// Connects to the listener with this kind and name: sends `hello`, and returns the listener's reply and files. Takes at
    /// most `timeout`. Must not be called on the watcher's thread.
    ///
    /// When too many clients connect at once, a listener closes connections that have not sent their hello yet. This
    /// function then pauses and tries again.
    pub(crate) fn connect(
        kind: &'static str,
        name: &Name,
        hello: &[u8],
        timeout: Duration,
    ) -> Result<(Connection, Vec<u8>, Vec<ReceivedFile>), HandshakeError> {
        // For the kernel a socket timeout of zero means to wait for ever.
        let timeout = timeout.clamp(Duration::from_millis(1), MAX_TIMEOUT);
        let deadline = Instant::now() + timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            let connected = Connection::try_connect(kind, name, hello, timeout, deadline);
            if !matches!(connected, Err(HandshakeError::Closed { .. })) || Instant::now() + pause >= deadline
            {
                return connected;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn try_connect(
        kind: &'static str,
        name: &Name,
        hello: &[u8],
        timeout: Duration,
        deadline: Instant,
    ) -> Result<(Connection, Vec<u8>, Vec<ReceivedFile>), HandshakeError> {
        if hello.len() > MAX_HELLO {
            return Err(HandshakeError::HelloTooLong(hello.len()));
        }
        let watcher = Watcher::of_process()?;
        debug_assert!(!watcher.is_current_thread(), "the watcher thread would wait for itself");
        let no_server = || HandshakeError::NoServer { name: name.to_string() };
        let closed = || HandshakeError::Closed { name: name.to_string() };
        let no_reply = || HandshakeError::NoReply { name: name.to_string(), after: timeout };

        let address = Address::of_service(kind, name)?;
        // As in `connect`: zero would mean to wait for ever.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let socket = socket::connect(&address, left).map_err(|e| match e.kind() {
            io::ErrorKind::ConnectionRefused => no_server(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => no_reply(),
            _ => HandshakeError::Os(e),
        })?;
        let peer = Peer::of(&socket)?;
        if !peer.is_our_user() {
            return Err(HandshakeError::OtherUser { name: name.to_string(), uid: peer.uid });
        }
        let process = peer.process().map_err(|e| match e.kind() {
            // The server is dead; a forked child of it keeps the socket open.
            io::ErrorKind::NotFound => no_server(),
            _ => HandshakeError::Os(e),
        })?;
        socket::send(&socket, Header::new(Header::HELLO).as_bytes(), hello, &[]).map_err(|_| closed())?;

        match wait_for_reply(&socket, process.as_ref(), deadline)? {
            ReplyEvent::Readable => {}
            ReplyEvent::ServerDied => return Err(no_server()),
            ReplyEvent::TimedOut => return Err(no_reply()),
        }
        let (mut header, mut reply) = (Header::new_zeroed(), vec![0; MAX_REPLY]);
        let (len, files) =
            socket::receive_with_files(&socket, header.as_mut_bytes(), &mut reply).map_err(|e| {
                match e.kind() {
                    io::ErrorKind::InvalidData => HandshakeError::OtherVersion { name: name.to_string() },
                    _ => closed(),
                }
            })?;
        reply.truncate(len);
        match header {
            Header { version, .. } if version != Header::VERSION => {
                return Err(HandshakeError::OtherVersion { name: name.to_string() });
            }
            Header { kind: Header::ACCEPTED, .. } => {}
            Header { kind: Header::REFUSED, .. } => return Err(HandshakeError::Refused(reply)),
            Header { kind: Header::FULL, .. } => return Err(HandshakeError::Full { name: name.to_string() }),
            _ => return Err(HandshakeError::OtherVersion { name: name.to_string() }),
        }

        let id = watcher.new_id();
        let (closed, parkers) = (AtomicBool::new(false), Mutex::default());
        let inner = Arc::new(Inner { watcher, id, closed, parkers, socket, process });
        let process = inner.process.as_ref().map(AsFd::as_fd);
        inner.watcher.watch(id, inner.clone(), inner.socket.as_fd(), process)?;
        Ok((Connection { inner }, reply, files))
    }

    /// Whether the server process has ended or has closed the connection. If it has ended, everything it ever wrote is
    /// visible.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        // Acquire, partner: the Release store in `handle_event`.
        self.inner.closed.load(Acquire)
    }

    /// Wakes a parker when the connection is closed, or at once if it is closed already.
    pub(crate) fn notify_when_closed(&self, parker: SharedRef<Parker>) {
        let mut parkers = lock(&self.inner.parkers);
        if self.is_closed() {
            parker.wake();
        } else {
            parkers.push(parker);
        }
    }

    /// Closes the connection, which frees the client's place at the server. Registered parkers are not woken any more.
    pub(crate) fn close(&self) {
        // In a forked child the connection is still its parent's.
        if self.inner.watcher.is_of_this_process() {
            self.inner.unwatch();
            socket::shut_down(&self.inner.socket);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn unwatch(&self) {
        self.watcher.unwatch(self.id, self.socket.as_fd(), self.process.as_ref().map(AsFd::as_fd));
    }
}

impl EventHandler for Inner {
    fn handle_event(&self, _: u64, source: EventSource) {
        // A listener sends nothing after its reply: data and end of file both end the connection.
        if source == EventSource::Socket && !has_data_or_eof(&self.socket) {
            return;
        }
        // Release, partner: the Acquire load in `Connection::is_closed`.
        self.closed.store(true, Release);
        self.unwatch();
        for parker in std::mem::take(&mut *lock(&self.parkers)) {
            parker.wake();
        }
    }

    fn run_postponed(&self, _: Instant) -> Option<Instant> {
        None
    }
}

enum ReplyEvent {
    Readable,
    TimedOut,
    ServerDied,
}

/// Waits until the socket is readable, the server process has ended, or the deadline has passed.
fn wait_for_reply(socket: &Socket, process: Option<&OwnedFd>, deadline: Instant) -> io::Result<ReplyEvent> {
    let mut sources = vec![PollFd::new(socket, PollFlags::IN)];
    sources.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut sources, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(e.into()),
            Ok(0) if left.is_zero() => return Ok(ReplyEvent::TimedOut),
            Ok(_) => {}
        }
        if !sources[0].revents().is_empty() {
            return Ok(ReplyEvent::Readable);
        }
        if sources.get(1).is_some_and(|process| !process.revents().is_empty()) {
            return Ok(ReplyEvent::ServerDied);
        }
    }
}
