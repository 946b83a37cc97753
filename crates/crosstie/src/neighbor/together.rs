//! Waiting for answers on several connections at once.

use std::time::Duration;

use super::bell::{self, Waiting};

/// Looks at the answers that are due before all calls under way are looked at. Fewer than waiting makes before it sleeps.
const LOOKS_AT_FIRST: u32 = 32;

/// A connection on which answers can be awaited together with others: an [`ipc::Client`](crate::ipc::Client) or a
/// [`delegation::Client`](crate::delegation::Client).
pub trait Awaited: sealed::Awaited {}

impl<A: sealed::Awaited + ?Sized> Awaited for A {}

pub(crate) mod sealed {
    use crate::neighbor::bell::Bell;

    pub trait Awaited {
        /// Whose owner we are.
        fn bell(&self) -> &Bell;
        /// Whether calls are under way.
        fn has_calls(&self) -> bool;
        /// Whether there is something to poll: an answer, or the end. Looks where an answer is due, or everywhere.
        fn has_news(&self, everywhere: bool) -> bool;
    }
}

/// Waits until one of the connections has something to poll, at most for `timeout`; says whether one has. At once if none
/// has calls under way. Whichever server answers first ends the wait, as with one connection.
///
/// A `wait` with a timeout of zero at each of them then says which, and has its next poll find it.
///
/// ```
/// use crosstie::ipc::{Client, Config, Server};
/// use crosstie::{Awaited, Waiting, wait_any};
///
/// let names = ["doc-any-1", "doc-any-2"];
/// let mut servers = names.map(|name| Server::<u64, u64>::create(name, &Config::default()).unwrap());
/// let mut clients = names.map(|name| Client::<u64, u64>::connect(name).unwrap());
/// clients.iter_mut().for_each(|client| client.call(&7, ()).unwrap());
///
/// servers[1].poll();
/// servers[1].recv().unwrap().reply(&8)?;
/// assert!(wait_any(clients.iter().map(|client| client as &dyn Awaited), Waiting::default(), None));
/// assert_eq!(clients[0].poll(|(), _| ())?, 0);
/// assert_eq!(clients[1].poll(|(), answer| assert_eq!(*answer, 8))?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn wait_any<'a>(
    connections: impl Iterator<Item = &'a dyn Awaited> + Clone,
    how: Waiting,
    timeout: Option<Duration>,
) -> bool {
    let connections = connections.filter(|connection| connection.has_calls());
    if connections.clone().next().is_none() {
        return false;
    }
    let mut looks = 0;
    bell::wait_at(connections.clone().map(sealed::Awaited::bell), how, timeout, || {
        looks += 1;
        connections.clone().any(|connection| connection.has_news(looks > LOOKS_AT_FIRST))
    })
}
