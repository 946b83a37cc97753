//! Accepted connections that have not proved the secret yet: bounded, and safe from each other.
//!
//! Anybody who reaches the control port can open connections. A flood of them must not keep a node out that knows the secret:
//!
//! - Connections from the addresses in the list of nodes and all others have separate places, [`MAX_PER_CLASS`] each. So a flood from
//!   elsewhere takes nothing away from a node.
//! - Within a class the newest replaces the oldest, but none in its first second ([`GRACE`]). A handshake takes one round trip, so it
//!   is never pushed out. If all are younger, the new connection is closed; a node tries again after at most 0.5 s.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The most connections from addresses in the list of nodes, and the most from others, at one time.
pub(super) const MAX_PER_CLASS: usize = 32;
/// The time in which no other connection replaces a connection.
const GRACE: Duration = Duration::from_secs(1);

/// Accepted connections that have not proved the secret, with their deadlines.
pub(super) struct Unauthenticated<C> {
    /// From the addresses in the list of nodes, oldest first.
    listed: VecDeque<Entry<C>>,
    /// From other addresses, oldest first.
    others: VecDeque<Entry<C>>,
}

struct Entry<C> {
    connection: C,
    accepted: Instant,
    deadline: Instant,
}

impl<C> Unauthenticated<C> {
    pub(super) fn new() -> Unauthenticated<C> {
        Unauthenticated { listed: VecDeque::new(), others: VecDeque::new() }
    }

    /// Adds a connection that was accepted at `now` and must prove the secret within `timeout`. `is_listed`: it comes from an address
    /// in the list of nodes. Returns the connection that is closed for it: the oldest, or the new one itself.
    pub(super) fn insert(
        &mut self,
        connection: C,
        is_listed: bool,
        now: Instant,
        timeout: Duration,
    ) -> Option<C> {
        let class = if is_listed { &mut self.listed } else { &mut self.others };
        let mut replaced = None;
        if class.len() == MAX_PER_CLASS {
            if class.front().is_some_and(|oldest| now.duration_since(oldest.accepted) < GRACE) {
                return Some(connection);
            }
            replaced = class.pop_front().map(|oldest| oldest.connection);
        }
        class.push_back(Entry { connection, accepted: now, deadline: now + timeout });
        replaced
    }

    /// The connections, with their deadlines.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&C, Instant)> {
        self.listed.iter().chain(&self.others).map(|entry| (&entry.connection, entry.deadline))
    }

    /// Passes each connection to `keep`, and keeps those that it returns while their deadline has not passed at `now`.
    pub(super) fn retain(&mut self, now: Instant, mut keep: impl FnMut(C) -> Option<C>) {
        for class in [&mut self.listed, &mut self.others] {
            for Entry { connection, accepted, deadline } in std::mem::take(class) {
                if let Some(connection) = keep(connection).filter(|_| deadline > now) {
                    class.push_back(Entry { connection, accepted, deadline });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    #[test]
    fn flood_from_elsewhere_does_not_touch_connections_of_listed_nodes() {
        let (mut pool, start) = (Unauthenticated::new(), Instant::now());
        assert_eq!(pool.insert(0, true, start, TIMEOUT), None);
        for n in 1..1000 {
            // Long after the grace of the first one has ended.
            let closed = pool.insert(n, false, start + GRACE * 3, TIMEOUT);
            assert_ne!(closed, Some(0));
        }
        assert!(pool.iter().any(|(n, _)| *n == 0));
        assert_eq!(pool.iter().count(), 1 + MAX_PER_CLASS);
    }

    #[test]
    fn flood_from_the_same_class_does_not_push_out_a_handshake_in_its_first_second() {
        let (mut pool, start) = (Unauthenticated::new(), Instant::now());
        assert_eq!(pool.insert(0, true, start, TIMEOUT), None);
        for n in 1..1000 {
            assert_ne!(pool.insert(n, true, start + GRACE / 2, TIMEOUT), Some(0));
        }
        assert!(pool.iter().any(|(n, _)| *n == 0));
        // Later a new connection takes the place of the oldest.
        assert_eq!(pool.insert(1000, true, start + GRACE, TIMEOUT), Some(0));
        assert_eq!(pool.iter().count(), MAX_PER_CLASS);
    }

    #[test]
    fn connections_end_at_their_deadlines() {
        let (mut pool, start) = (Unauthenticated::new(), Instant::now());
        pool.insert(1, true, start, TIMEOUT);
        pool.insert(2, false, start + GRACE, TIMEOUT);
        pool.retain(start + TIMEOUT, Some);
        assert_eq!(pool.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [2]);
        pool.retain(start, |_| None);
        assert_eq!(pool.iter().count(), 0);
    }
}
