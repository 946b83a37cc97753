//! Letting clients in and out: what the watcher's thread does, and how the server hears of it.

use core::sync::atomic::{AtomicU32, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use zerocopy::IntoBytes;

use super::lane::{Lane, ServerPage, Shape};
use crate::local::listener::{Admission, ClientHandler, ClientId};
use crate::local_rpc::hello::{Hello, Refusal};

/// What the watcher's thread and the server share.
#[derive(Debug)]
pub(super) struct ClientRegistry {
    pub(super) server_page: ServerPage,
    shape: Shape,
    greeting: Hello,
    max_clients: usize,
    changes: Mutex<ClientChanges>,
    /// Counts changes of `changes`, ever.
    version: AtomicU32,
}

/// Who came and went since the server last asked.
#[derive(Debug, Default)]
pub(super) struct ClientChanges {
    pub(super) arrived: Vec<(ClientId, Lane)>,
    pub(super) left: Vec<ClientId>,
    /// Clients that are in, heard of or not.
    present: usize,
}

impl ClientRegistry {
    pub(super) fn new(
        server_page: ServerPage,
        shape: Shape,
        greeting: Hello,
        max_clients: usize,
    ) -> ClientRegistry {
        ClientRegistry {
            server_page,
            shape,
            greeting,
            max_clients,
            changes: Mutex::default(),
            version: AtomicU32::new(0),
        }
    }

    /// Changes whenever there is changes.
    #[inline]
    pub(super) fn version(&self) -> u32 {
        // Acquire, partner: the Release add in `tell`; though the mutex behind it would do.
        self.version.load(Acquire)
    }

    /// What is new.
    pub(super) fn take_changes(&self) -> (Vec<(ClientId, Lane)>, Vec<ClientId>) {
        let mut changes = self.changes();
        (std::mem::take(&mut changes.arrived), std::mem::take(&mut changes.left))
    }

    fn changes(&self) -> MutexGuard<'_, ClientChanges> {
        // Every change is one statement; a panic leaves nothing half done.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, changes: MutexGuard<'_, ClientChanges>) {
        drop(changes);
        // Release, partner: the Acquire load in `version`.
        self.version.fetch_add(1, Release);
        self.server_page.parker().wake();
    }
}

impl ClientHandler for ClientRegistry {
    fn admit(&self, client: ClientId, hello: &[u8]) -> Admission {
        if let Some(refusal) = self.greeting.refusal_for(hello) {
            return refusal.into();
        }
        let mut changes = self.changes();
        if changes.present >= self.max_clients {
            return Refusal::full(self.max_clients).into();
        }
        let files = Lane::create(&self.shape).and_then(|lane| {
            let files = vec![lane.file()?, self.server_page.file()?];
            Ok((lane, files))
        });
        match files {
            Ok((lane, files)) => {
                changes.arrived.push((client, lane));
                changes.present += 1;
                self.tell(changes);
                Admission::Accept { reply: self.shape.as_bytes().to_vec(), files }
            }
            Err(error) => Refusal::system(&error).into(),
        }
    }

    fn remove(&self, client: ClientId) -> bool {
        let mut changes = self.changes();
        changes.present -= 1;
        // The server may never ask: what it has not heard of, it need not hear of.
        let unheard = changes.arrived.len();
        changes.arrived.retain(|(id, _)| *id != client);
        if changes.arrived.len() == unheard {
            changes.left.push(client);
        }
        self.tell(changes);
        true
    }
}
