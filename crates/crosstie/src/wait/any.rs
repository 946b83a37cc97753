//! Waiting for responses on several connections at once.

use std::time::Duration;

use super::{WaitStrategy, wait_for_any};

/// Checks of the expected responses before every call in flight is checked. Fewer than the checks before a park.
const EXPECTED_ONLY_CHECKS: u32 = 32;

/// A connection whose responses can be awaited together with those of others: an [`ipc::Client`](crate::ipc::Client) or a
/// [`delegation::Client`](crate::delegation::Client).
pub trait Waitable: sealed::Waitable {}

impl<W: sealed::Waitable + ?Sized> Waitable for W {}

pub(crate) mod sealed {
    use crate::wait::Parker;

    pub trait Waitable {
        /// The parker whose owner this connection is.
        fn parker(&self) -> &Parker;
        /// Whether calls are in flight.
        fn has_calls(&self) -> bool;
        /// Whether there is something to poll: a response, or the end of the connection. Checks the call whose response is
        /// expected next, or all calls.
        fn is_ready(&self, check_all: bool) -> bool;
    }
}

/// Waits until one of the connections has something to poll, for at most `timeout`. Returns whether one has. Returns at
/// once if no connection has calls in flight. The first server that responds ends the wait, as with one connection.
///
/// To find out which connection is ready, call `wait` with a timeout of zero on each of them; the next poll of a ready one
/// then returns its response.
///
/// ```
/// use crosstie::ipc::{Client, Config, Server};
/// use crosstie::{WaitStrategy, Waitable, wait_any};
///
/// let names = ["doc-any-1", "doc-any-2"];
/// let mut servers = names.map(|name| Server::<u64, u64>::create(name, &Config::default()).unwrap());
/// let mut clients = names.map(|name| Client::<u64, u64>::connect(name).unwrap());
/// clients.iter_mut().for_each(|client| client.call(&7, ()).unwrap());
///
/// servers[1].poll();
/// servers[1].recv().unwrap().reply(&8)?;
/// assert!(wait_any(clients.iter().map(|client| client as &dyn Waitable), WaitStrategy::default(), None));
/// assert_eq!(clients[0].poll(|(), _| ())?, 0);
/// assert_eq!(clients[1].poll(|(), response| assert_eq!(*response, 8))?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn wait_any<'a>(
    connections: impl Iterator<Item = &'a dyn Waitable> + Clone,
    strategy: WaitStrategy,
    timeout: Option<Duration>,
) -> bool {
    let connections = connections.filter(|connection| connection.has_calls());
    if connections.clone().next().is_none() {
        return false;
    }
    let mut checks = 0u32;
    wait_for_any(connections.clone().map(sealed::Waitable::parker), strategy, timeout, || {
        checks = checks.saturating_add(1);
        connections.clone().any(|connection| connection.is_ready(checks > EXPECTED_ONLY_CHECKS))
    })
}
