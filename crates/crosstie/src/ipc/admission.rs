//! Admitting and removing clients: what the watcher thread does, and how it tells the server's thread.
//!
//! ```text
//!  watcher thread                         server thread, in `poll`
//!  admit: create a lane, changes += it    version differs from the last one seen ?
//!  remove: changes += the id              take the changes: add and remove clients
//!  version += 1, wake the server
//! ```

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::IntoBytes;

use super::lane::{Lane, LaneLayout, ServerPage};
use crate::local::listener::{Admission, ClientHandler, ClientId};
use crate::local_rpc::hello::{Hello, Refusal};

/// What the watcher thread and the server's thread share.
#[derive(Debug)]
pub(super) struct ClientRegistry {
    pub(super) server_page: ServerPage,
    layout: LaneLayout,
    hello: Hello,
    max_clients: usize,
    changes: Mutex<ClientChanges>,
    /// Counts the updates of `changes`.
    version: AtomicU32,
}

/// The clients that connected and disconnected since the server last took the changes.
#[derive(Debug, Default)]
pub(super) struct ClientChanges {
    pub(super) connected: Vec<(ClientId, Lane)>,
    pub(super) disconnected: Vec<ClientId>,
    /// Admitted clients that are not removed, whether the server knows them already or not.
    admitted: usize,
}

impl ClientRegistry {
    pub(super) fn new(
        server_page: ServerPage,
        layout: LaneLayout,
        hello: Hello,
        max_clients: usize,
    ) -> ClientRegistry {
        ClientRegistry {
            server_page,
            layout,
            hello,
            max_clients,
            changes: Mutex::default(),
            version: AtomicU32::new(0),
        }
    }

    /// Differs from an earlier value if there were changes in between.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        // Acquire, partner: the Release add in `publish`. (The mutex behind it would be enough.)
        self.version.load(Acquire)
    }

    /// Takes the changes since the last call: the clients that connected, and those that disconnected.
    pub(super) fn take_changes(&self) -> (Vec<(ClientId, Lane)>, Vec<ClientId>) {
        let mut changes = self.changes();
        (std::mem::take(&mut changes.connected), std::mem::take(&mut changes.disconnected))
    }

    fn changes(&self) -> MutexGuard<'_, ClientChanges> {
        // Every update is one statement: a panic leaves no update half done.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, changes: MutexGuard<'_, ClientChanges>) {
        drop(changes);
        // Release, partner: the Acquire load in `version`.
        self.version.fetch_add(1, Release);
        self.server_page.parker().wake();
    }
}

impl ClientHandler for ClientRegistry {
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission {
        if let Some(refusal) = self.hello.refusal_for(hello) {
            return refusal.into();
        }
        let mut changes = self.changes();
        if changes.admitted >= self.max_clients {
            return Refusal::full(self.max_clients).into();
        }
        let files = Lane::create(&self.layout).and_then(|lane| {
            let files = vec![lane.file()?, self.server_page.file()?];
            Ok((lane, files))
        });
        match files {
            Ok((lane, files)) => {
                changes.connected.push((client, lane));
                changes.admitted += 1;
                self.publish(changes);
                Admission::Accept { reply: self.layout.as_bytes().to_vec(), files }
            }
            Err(error) => Refusal::system(&error).into(),
        }
    }

    fn remove(&self, client: ClientId) -> bool {
        let mut changes = self.changes();
        changes.admitted -= 1;
        // The server may never take the changes. A client that it does not know yet, it need not remove either.
        let before = changes.connected.len();
        changes.connected.retain(|(id, _)| *id != client);
        if changes.connected.len() == before {
            changes.disconnected.push(client);
        }
        self.publish(changes);
        true
    }
}
