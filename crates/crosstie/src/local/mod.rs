//! Processes on one machine: they find each other by name, exchange a handshake, hand over memory segments, and notice
//! when the other process ends.
//!
//! ```text
//!   Connection (client process)                     Listener (server process)
//!     connect  "crosstie/KIND/UID/NAME"  ------->   accept, check the peer's user
//!     hello    ------------------------->           ClientHandler::admit     (on the watcher thread)
//!              <-------------------------           accepted: bytes, files (a segment)
//!     ... both sides work in the segment; the socket stays silent ...
//!     socket closed, or process dead     ------->   ClientHandler::remove    (on the watcher thread)
//!     Connection::is_closed, parkers woken  <----   socket closed, or process dead
//! ```
//!
//! **Promises.**
//! - Nothing lies in a file system, so nothing is left behind however a process ends.
//! - Only processes of the same user are connected. Connections of other users are closed when they are accepted, and
//!   connections that send no hello are limited in number and in time ([`awaiting_hello`]). The software device accepts its
//!   peers by the same rules.
//! - What another process sends is taken for nothing until it is checked ([`socket`], [`Segment::open`](crate::memory::segment::Segment::open)):
//!   a message with files that nobody asked for ends the connection, and no thread here waits for a `close` of a file that a peer sent.
//! - The death of a process is noticed within milliseconds, even if a forked child keeps its sockets open, and the end of a connection
//!   even if a forked child keeps its descriptor.
//! - All of this costs one thread per process, the [`watcher`]. The first [`Listener`](listener::Listener) or
//!   [`Connection`](connection::Connection) starts it. It sleeps unless an event arrives, and never waits for a peer.
//!
//! **Left to others.** What the hello and the reply contain ([`local_rpc`](crate::local_rpc)), and what lies in the
//! segments ([`ipc`](crate::ipc), [`delegation`](crate::delegation)).

pub(crate) mod awaiting_hello;
mod closing;
pub(crate) mod connection;
pub(crate) mod listener;
pub(crate) mod socket;
mod watcher;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, poisoned or not: the data behind every mutex of this module stays consistent when its holder panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
