//! Connections that have not sent their hello yet: how many there may be, and for how long.
//!
//! Code that accepts connections uses this limit, so that a client cannot use up file descriptors by connecting without a hello.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::socket::{ListeningSocket, Peer, Socket};

/// Most connections that have not sent a hello yet. When another one arrives, the oldest is closed.
pub(crate) const MAX_AWAITING_HELLO: usize = 64;
/// How long an accepted connection may take to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// The connections of one listening socket that have not sent a hello yet, by their ids. Ids must increase.
#[derive(Debug, Default)]
pub(crate) struct AwaitingHello {
    deadlines: BTreeMap<u64, Instant>,
}

impl AwaitingHello {
    /// Adds an accepted connection. Returns a connection that must be closed, if there are too many.
    #[must_use]
    pub(crate) fn add(&mut self, id: u64, now: Instant) -> Option<u64> {
        self.deadlines.insert(id, now + HELLO_TIMEOUT);
        if self.deadlines.len() <= MAX_AWAITING_HELLO {
            return None;
        }
        self.deadlines.pop_first().map(|(oldest, _)| oldest)
    }

    /// Removes a connection that sent its hello, or that was closed.
    pub(crate) fn remove(&mut self, id: u64) {
        self.deadlines.remove(&id);
    }

    /// Removes and returns a connection that has taken too long, and must be closed. `None` if there is no more.
    #[must_use]
    pub(crate) fn take_late(&mut self, now: Instant) -> Option<u64> {
        let late = self.deadlines.first_entry().filter(|oldest| *oldest.get() <= now)?;
        Some(late.remove_entry().0)
    }

    /// When the oldest connection will have taken too long.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first_key_value().map(|(_, deadline)| *deadline)
    }

    pub(crate) fn len(&self) -> usize {
        self.deadlines.len()
    }
}

/// Accepts one connection from a process of our own user, without waiting. The socket is not blocking. Connections of other
/// users are closed at once. `None` if no connection is pending. An error means that there are no descriptors or no memory
/// left; the connection stays pending.
pub(crate) fn accept(listening: &ListeningSocket) -> Result<Option<(Socket, Peer)>, Errno> {
    // If more connections of other users are pending, the next event accepts them.
    for _ in 0..MAX_AWAITING_HELLO {
        match listening.accept() {
            Ok(socket) => {
                if let Ok(peer) = Peer::of(&socket)
                    && peer.is_our_user()
                {
                    return Ok(Some((socket, peer)));
                }
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn oldest_connection_gives_way_and_late_ones_are_closed() {
        let (mut awaiting, begun) = (AwaitingHello::default(), Instant::now());
        let most = MAX_AWAITING_HELLO as u64;
        assert!((0..most).all(|id| awaiting.add(id, begun).is_none()));
        assert_eq!(awaiting.add(most, begun + HELLO_TIMEOUT / 2), Some(0));
        awaiting.remove(1);
        assert_eq!(
            (awaiting.len(), awaiting.next_deadline()),
            (MAX_AWAITING_HELLO - 1, Some(begun + HELLO_TIMEOUT))
        );
        assert_eq!(awaiting.take_late(begun), None);
        let late: Vec<_> = std::iter::from_fn(|| awaiting.take_late(begun + HELLO_TIMEOUT)).collect();
        assert_eq!(late, (2..most).collect::<Vec<_>>());
        assert_eq!((awaiting.len(), awaiting.next_deadline()), (1, Some(begun + HELLO_TIMEOUT * 3 / 2)));
    }
}
