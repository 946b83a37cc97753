//! Waiting for several connections and services at once.

use std::time::Duration;

use super::parker::{MAX_PARK, MAX_UNNOTIFIED_SLEEP};
use super::{WaitStrategy, Wakeup, park_once, wait_for_any};

/// Checks of the expected responses before every call in flight is checked. Fewer than the checks before a park.
const EXPECTED_ONLY_CHECKS: u32 = 32;

/// What can be awaited together with others: the responses of an [`ipc::Client`](crate::ipc::Client) or a
/// [`delegation::Client`](crate::delegation::Client); the requests of an [`ipc::Server`](crate::ipc::Server), a
/// [`delegation::Server`](crate::delegation::Server), a [`flux::Node`](crate::flux::Node) or a
/// [`copyrpc::Context`](crate::copyrpc::Context); a [`WakeFlag`](crate::WakeFlag).
pub trait Waitable: sealed::Waitable {}

impl<W: sealed::Waitable + ?Sized> Waitable for W {}

pub(crate) mod sealed {
    use std::time::Duration;

    use crate::wait::Parker;

    pub trait Waitable {
        /// The parker whose owner this is. None if nobody notifies one: then a wait checks every millisecond.
        fn parker(&self) -> Option<&Parker>;
        /// Whether anything can arrive: for a client, whether calls are in flight.
        fn is_expecting(&self) -> bool;
        /// Whether there is something to poll: a response, a request, or the end of the connection. A client checks the call
        /// whose response is expected next, or all calls.
        fn is_ready(&self, check_all: bool) -> bool;
        /// Called before the owner parks: sends what waits to be sent.
        fn prepare_park(&self) {}
        /// The longest park, where something may become due that nobody notifies us of.
        fn max_park(&self) -> Option<Duration> {
            None
        }
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
    let connections = connections.filter(|connection| connection.is_expecting());
    if connections.clone().next().is_none() {
        return false;
    }
    let mut checks = 0u32;
    let is_ready = || {
        checks = checks.saturating_add(1);
        connections.clone().any(|connection| connection.is_ready(checks > EXPECTED_ONLY_CHECKS))
    };
    let parkers = connections.clone().filter_map(sealed::Waitable::parker);
    wait_for_any(parkers, strategy, timeout, || prepare_park(connections.clone()), is_ready)
}

/// Parks once, until one of the sources has something to poll or `timeout` has passed, and says which of these ended the park.
/// For event loops that decide themselves how long to spin and yield before they park; [`wait_any`] does all three.
///
/// A park is at most 50 ms long, whatever the timeout. It is at most 1 ms long if a source has no way to wake its owner: a
/// [`copyrpc::Context`](crate::copyrpc::Context) on a device other than the software device.
///
/// ```
/// use std::time::Duration;
/// use crosstie::ipc::{Client, Config, Server};
/// use crosstie::{Waitable, WakeFlag, Wakeup, park_any};
///
/// let mut server = Server::<u64, u64>::create("doc-park-any", &Config::default()).unwrap();
/// let stop = WakeFlag::new().unwrap();
/// let stopped = std::thread::scope(|scope| {
///     scope.spawn(|| stop.set());
///     while !stop.take() {
///         while server.poll() > 0 {
///             // serve the requests
///         }
///         let sources: [&dyn Waitable; 2] = [&server, &stop];
///         park_any(sources.into_iter(), Duration::from_secs(1));
///     }
///     true
/// });
/// assert!(stopped);
/// ```
pub fn park_any<'a>(sources: impl Iterator<Item = &'a dyn Waitable> + Clone, timeout: Duration) -> Wakeup {
    let max_park = prepare_park(sources.clone());
    let parkers = sources.clone().filter_map(sealed::Waitable::parker);
    park_once(parkers, timeout.min(max_park), || sources.clone().any(|source| source.is_ready(true)))
}

/// Prepares all sources. Returns the longest park.
fn prepare_park<'a>(sources: impl Iterator<Item = &'a dyn Waitable>) -> Duration {
    let mut max_park = MAX_PARK;
    for source in sources {
        source.prepare_park();
        max_park = max_park.min(source.max_park().unwrap_or(MAX_PARK));
        if source.parker().is_none() {
            max_park = max_park.min(MAX_UNNOTIFIED_SLEEP);
        }
    }
    max_park
}
