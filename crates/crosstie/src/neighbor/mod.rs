//! Processes of one machine: they find each other by name, hand segments over, notice each other's death, and wake each
//! other up.
//!
//! ```text
//!   Member (client process)                         Host (server process)
//!     connect  "crosstie/KIND/UID/NAME"  ------->   accept, check the user
//!     hello    ------------------------->           Guests::admit      (on the watcher thread)
//!              <-------------------------           welcome: bytes, files (a segment)
//!     ... both work in the segment, and ring each other's Bell; the socket is silent ...
//!     socket closed, or process dead     ------->   Guests::farewell
//!     Member::gone, bells rung           <-------   socket closed, or process dead
//! ```
//!
//! **Promises.** Nothing lies in a file system, so nothing is left behind however a process ends. Only processes of one
//! user meet. A death is seen within milliseconds, also if a forked child keeps the sockets open. All of it costs one
//! thread per process, started by the first [`host::Host`] or [`member::Member`], which sleeps unless something happens
//! and never waits for a peer.

pub(crate) mod bell;
pub(crate) mod caller;
pub(crate) mod error;
pub(crate) mod greeting;
pub(crate) mod host;
pub(crate) mod member;
pub(crate) mod socket;
pub(crate) mod together;
mod watcher;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What every mutex here protects stays consistent when its holder panics.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
