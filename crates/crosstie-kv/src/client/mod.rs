//! The client library: for a thread of a node, or for another process on its machine.
//!
//! A client attaches to a node by name, through shared memory, and reaches all keys of the cluster through it. The node must run
//! on the same machine under the same user. Requests for keys of that node go directly to the daemon that owns the key; all
//! others travel as the cluster's [backend](crate::Backend) says.
//!
//! One operation at a time:
//!
//! ```
//! # use crosstie_kv::node::{Node, NodeConfig};
//! use crosstie_kv::client::{Client, SwapOutcome};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let node = Node::start(&NodeConfig::single("doc-client"))?;
//! let mut client = Client::attach("doc-client")?;
//! client.put(1, 10)?;
//! assert_eq!(client.compare_and_swap(1, 10, 11)?, SwapOutcome::Done);
//! assert_eq!(client.get(1)?, Some(11));
//! client.put_bytes(b"name", b"crosstie")?;
//! assert_eq!(client.get_bytes(b"name")?.as_deref(), Some(&b"crosstie"[..]));
//! # Ok(()) }
//! ```
//!
//! Many operations at a time. Each has a token, which comes back with the response:
//!
//! ```
//! # use crosstie_kv::node::{Node, NodeConfig};
//! use crosstie_kv::client::Client;
//! use crosstie_kv::wire::{Op, WordRequest, Status};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let node = Node::start(&NodeConfig::single("doc-pipelined"))?;
//! let mut client = Client::<&str>::attach_pipelined("doc-pipelined")?;
//! client.begin(WordRequest { value: 5, ..WordRequest::new(Op::Put, 0, 77) }, "put")?;
//! client.begin(WordRequest::new(Op::Get, 0, 78), "get")?;
//! while client.in_flight() > 0 {
//!     client.wait(None);
//!     client.poll(|token, response| match token {
//!         "put" => assert_eq!(response.status, Status::Done),
//!         _ => assert_eq!(response.status, Status::NotFound),
//!     });
//! }
//! # Ok(()) }
//! ```
//!
//! Operations on byte strings work the same way, with [`begin_bytes`](Client::begin_bytes) and
//! [`poll_bytes`](Client::poll_bytes). Both kinds may be in flight at the same time. They have separate lanes, so an operation on
//! an 8-byte key does not wait behind a value of a megabyte. [`wait`](Client::wait) and [`in_flight`](Client::in_flight) cover
//! both.
//!
//! # When no response comes
//!
//! The client notices when the node ends, however it does. A node that is stopped (SIGSTOP, a debugger, a machine that swaps) does
//! not end and does not respond. Calls that wait for a response return [`Error::TimedOut`] after the client's
//! [timeout](Client::set_timeout), by default [`DEFAULT_TIMEOUT`]. **The operation may then have been done, may be done later
//! when the node continues, or never.** To put the same value again is safe; a compare-and-swap or an insert tells by its
//! response what happened. The client retries nothing by itself. It drops a response that comes too late, and never takes it for
//! that of another operation. The client can be used again when the node continues.
//!
//! Pipelined operations have no timeout of their own: the program decides how long it polls. It may drop the client at any time.
//!
//! # Promises
//!
//! - Every operation that was begun ends once: with the response of the node that owns the key, or as
//!   [`NodeGone`](Status::NodeGone) if that node, or the node that the client is attached to, went away. In the second case the
//!   operation may have been done.
//! - Operations of one client on one key are done in the order in which they were begun, if nothing fails.
//! - `begin` and `poll` do not allocate, lock or make system calls, except for the first byte-string operations, see
//!   [`begin_bytes`](Client::begin_bytes), and except for this one: a program that polls in a loop without [`wait`](Client::wait)
//!   would keep its core from the daemons that it waits for, so a poll lets other threads run (`sched_yield`) after some hundred
//!   polls in a row without a response, and sooner if other threads were waiting for the core. If another thread computes on this core,
//!   the poll sleeps until a response comes, for at most 50 µs, because a yield would take some milliseconds. Not with
//!   [`WaitStrategy::Spin`].
//! - `wait` spins, yields, then sleeps until a response comes, see [`WaitStrategy`].

mod bytes;
mod error;
mod words;

use std::time::{Duration, Instant};

use crosstie::{WaitStrategy, Waitable, delegation, ipc, park_any, wait_any, yield_core};

pub use error::{AttachError, BeginBytesError, BeginError, Error};

use crate::node::idle::CROWDED;
use crate::service_names;
use crate::sharding::ShardMap;
use crate::wire::{self, NodeInfo, Status, WordRequest, WordResponse};

/// How long calls wait for a response by default, see [`Client::set_timeout`].
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Polls in a row without a response after which a poll lets other threads run.
const POLLS_BEFORE_YIELD: u32 = 256;
/// The same, where other threads were seen to wait for the core.
const CROWDED_POLLS: u32 = 32;
/// The longest sleep of a poll, where a yield would take longer.
const POLL_SLEEP: Duration = Duration::from_micros(50);

/// A client of a node. `T` is the type of the tokens of pipelined operations. See the [module](self).
pub struct Client<T = ()> {
    name: String,
    info: NodeInfo,
    shard_map: ShardMap,
    /// The daemon that takes this client's requests for other nodes, where there are no rings.
    home: usize,
    /// By daemon.
    words: Vec<ipc::Client<WordRequest, WordResponse, T>>,
    /// A bit for each daemon: set while operations are in flight there. It may stay set a little longer.
    busy_words: u64,
    /// The delegation rings, by daemon. Empty without that backend.
    rings: Vec<delegation::Client<WordRequest, WordResponse, T>>,
    /// As `busy_words`, for `rings`.
    busy_rings: u64,
    /// By daemon; connected when first used.
    bytes: Vec<Option<bytes::Lane<T>>>,
    /// As `busy_words`, for `bytes`.
    busy_bytes: u64,
    /// A buffer for the encoded request of a call that waits.
    scratch: Vec<u8>,
    waiting: WaitStrategy,
    /// Polls in a row that found no response.
    empty_polls: u32,
    /// After how many such polls other threads run.
    polls_before_yield: u32,
    timeout: Duration,
}

const _: () = assert!(crate::sharding::MAX_DAEMONS <= u64::BITS, "a bit for each daemon");

/// The result of a compare-and-swap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapOutcome<V> {
    /// The key had the expected value and has the new one now.
    Done,
    /// The key has this value, not the expected one.
    Mismatch(V),
    /// The key does not exist.
    NotFound,
}

/// The result of an operation with a fencing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FencedOutcome {
    /// The operation was done.
    Done,
    /// The key has seen a newer token: the lock has passed on. Nothing has changed.
    Stale {
        /// The newest token that the key has seen.
        newest: crosstie::group::Token,
    },
}

impl Client<()> {
    /// Attaches to the node `name` on this machine.
    pub fn attach(name: &str) -> Result<Client, AttachError> {
        Client::attach_pipelined(name)
    }
}

impl<T> Client<T> {
    /// Attaches to the node `name` on this machine, for pipelined operations with tokens.
    pub fn attach_pipelined(name: &str) -> Result<Client<T>, AttachError> {
        Client::attach_within(name, DEFAULT_TIMEOUT)
    }

    /// Attaches to the node `name` on this machine, within `timeout`. The calls of the client have the same timeout, see
    /// [`set_timeout`](Client::set_timeout).
    pub fn attach_within(name: &str, timeout: Duration) -> Result<Client<T>, AttachError> {
        let limit = TimeLimit::new(timeout);
        let info = request_info(name, limit)?;
        let version = || AttachError::OtherVersion { name: name.to_owned() };
        let shard_map = ShardMap::new(info.nodes, info.daemons).ok_or_else(version)?;
        let words = (0..info.daemons).map(|daemon| {
            connect(name, service_names::words(name, daemon), limit, ipc::Client::connect_within)
        });
        let words = words.collect::<Result<_, _>>()?;
        let rings = if info.backend.uses_rings(info.nodes) { info.daemons } else { 0 };
        let rings = (0..rings).map(|daemon| {
            connect(name, service_names::ring(name, daemon), limit, delegation::Client::connect_within)
        });
        let rings = rings.collect::<Result<_, _>>()?;
        Ok(Client {
            name: name.to_owned(),
            info,
            shard_map,
            home: (info.attach_count % info.daemons) as usize,
            words,
            busy_words: 0,
            rings,
            busy_rings: 0,
            bytes: (0..info.daemons).map(|_| None).collect(),
            busy_bytes: 0,
            scratch: Vec::new(),
            waiting: WaitStrategy::default(),
            empty_polls: 0,
            polls_before_yield: POLLS_BEFORE_YIELD,
            timeout,
        })
    }

    /// Sets how the client waits for responses.
    #[must_use]
    pub fn with_wait_strategy(mut self, waiting: WaitStrategy) -> Client<T> {
        let words = self.words.into_iter().map(|lane| lane.with_wait_strategy(waiting));
        self.words = words.collect();
        let rings = self.rings.into_iter().map(|ring| ring.with_wait_strategy(waiting));
        self.rings = rings.collect();
        self.bytes =
            self.bytes.into_iter().map(|lane| lane.map(|lane| lane.with_wait_strategy(waiting))).collect();
        self.waiting = waiting;
        self
    }

    /// Sets how long calls wait for a response before they return [`Error::TimedOut`]. With [`Duration::MAX`] they wait for ever. The
    /// [module](self) says what a timeout means for the operation.
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// use std::time::Duration;
    /// use crosstie_kv::client::{Client, Error};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::single("doc-timeout"))?;
    /// let mut client = Client::attach("doc-timeout")?;
    /// client.set_timeout(Duration::from_millis(500));
    /// match client.put(1, 10) {
    ///     Ok(()) => {}
    ///     // The put may still be done.
    ///     Err(Error::TimedOut { rank, .. }) => eprintln!("rank {rank} is slow"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// How long calls wait for a response.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Attaches again to the node of the same name, which may have been restarted. Operations in flight are dropped with their
    /// tokens: call [`poll`](Client::poll) and [`poll_bytes`](Client::poll_bytes) before, to get them.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        // Disconnects first: the node may have no slot for one more client.
        self.words.clear();
        self.rings.clear();
        self.bytes.clear();
        (self.busy_words, self.busy_rings, self.busy_bytes) = (0, 0, 0);
        *self = Client::attach_within(&self.name, self.timeout)?.with_wait_strategy(self.waiting);
        Ok(())
    }

    /// The description of the node that the client is attached to.
    pub fn info(&self) -> &NodeInfo {
        &self.info
    }

    /// Which shard owns a key.
    pub fn shard_map(&self) -> ShardMap {
        self.shard_map
    }

    /// Begins an operation. Never waits. Sets the request's rank to that of the node that owns the key.
    #[inline]
    pub fn begin(&mut self, request: WordRequest, token: T) -> Result<(), BeginError<T>> {
        let place = self.shard_map.shard_of_word(request.key);
        let request = WordRequest { rank: place.rank, ..request };
        let daemon = if place.rank == self.info.rank {
            place.daemon as usize
        } else if let Some(ring) = self.rings.get_mut(place.daemon as usize) {
            ring.call(&request, token)?;
            self.busy_rings |= 1 << place.daemon;
            return Ok(());
        } else {
            self.home
        };
        let Some(lane) = self.words.get_mut(daemon) else { return Err(BeginError::ServerGone(token)) };
        lane.call(&request, token)?;
        self.busy_words |= 1 << daemon;
        Ok(())
    }

    /// Passes each response to an operation on an 8-byte key that has arrived to `each`. Returns how many. Never waits. If the node
    /// is gone, all operations in flight end as [`Status::NodeGone`].
    ///
    /// One call ends at most half of the operations in flight at one daemon, a quarter of many, so that the daemon has something to do while the
    /// program begins new ones.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(T, WordResponse)) -> usize {
        let mut count = 0;
        for daemon in bits(self.busy_words) {
            let lane = &mut self.words[daemon];
            match lane.poll(|token, response| each(token, *response)) {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += lane.in_flight();
                    lane.disconnect(|token| each(token, WordResponse::new(Status::NodeGone, 0)));
                }
            }
            if lane.in_flight() == 0 {
                self.busy_words &= !(1 << daemon);
            }
        }
        for daemon in bits(self.busy_rings) {
            let ring = &mut self.rings[daemon];
            match ring.poll(|token, response| each(token, *response)) {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += ring.in_flight();
                    ring.disconnect(|token| each(token, WordResponse::new(Status::NodeGone, 0)));
                }
            }
            if ring.in_flight() == 0 {
                self.busy_rings &= !(1 << daemon);
            }
        }
        if self.is_yield_due(count) {
            self.yield_core();
        }
        count
    }

    /// Records how many responses a poll found. Returns whether other threads should run now.
    #[inline]
    fn is_yield_due(&mut self, count: usize) -> bool {
        self.empty_polls = if count == 0 { self.empty_polls + 1 } else { 0 };
        if self.empty_polls < self.polls_before_yield {
            return false;
        }
        self.empty_polls = 0;
        self.waiting != WaitStrategy::Spin
    }

    /// Lets other threads run: yields, or sleeps where a yield would take too long.
    #[cold]
    fn yield_core(&mut self) {
        let took = yield_core();
        if took.is_none() {
            park_any(self.sources(), POLL_SLEEP);
        }
        self.record_yield(took);
    }

    fn record_yield(&mut self, took: Option<Duration>) {
        let is_crowded = took.is_none_or(|took| took > CROWDED);
        self.polls_before_yield = if is_crowded { CROWDED_POLLS } else { POLLS_BEFORE_YIELD };
    }

    /// The connections on which responses to pipelined operations are expected, for [`crosstie::wait_any`] and [`crosstie::park_any`]: to wait for
    /// several clients, or for a client and something else. Afterwards call [`wait`](Client::wait) with a timeout of zero, so that the next poll
    /// finds every response.
    ///
    /// ```
    /// # use crosstie_kv::node::{Node, NodeConfig};
    /// # use crosstie_kv::client::Client;
    /// # use crosstie_kv::wire::{Op, WordRequest};
    /// use std::time::Duration;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let node = Node::start(&NodeConfig::single("doc-sources"))?;
    /// let mut clients = [Client::attach("doc-sources")?, Client::attach("doc-sources")?];
    /// clients[1].begin(WordRequest::new(Op::Get, 0, 78), ())?;
    /// let sources = clients.iter().flat_map(Client::sources);
    /// assert!(crosstie::wait_any(sources, crosstie::WaitStrategy::Adaptive, None));
    /// let ready = clients.each_mut().map(|client| client.wait(Some(Duration::ZERO)));
    /// assert_eq!(ready, [false, true]);
    /// # Ok(()) }
    /// ```
    pub fn sources(&self) -> impl Iterator<Item = &dyn Waitable> + Clone {
        let words = bits(self.busy_words).map(|daemon| &self.words[daemon] as &dyn Waitable);
        let rings = bits(self.busy_rings).map(|daemon| &self.rings[daemon] as &dyn Waitable);
        let bytes = bits(self.busy_bytes).filter_map(|daemon| self.bytes[daemon].as_ref());
        words.chain(rings).chain(bytes.map(|lane| lane as &dyn Waitable))
    }

    /// Pipelined operations in flight, of both kinds.
    pub fn in_flight(&self) -> usize {
        let words: usize = self.words.iter().map(ipc::Client::in_flight).sum();
        let bytes: usize = self.bytes.iter().flatten().map(ipc::Client::in_flight).sum();
        let rings: usize = self.rings.iter().map(delegation::Client::in_flight).sum();
        words + rings + bytes
    }

    /// Waits until [`poll`](Client::poll) or [`poll_bytes`](Client::poll_bytes) has a response, at most for `timeout`. Returns whether
    /// there is one. Returns at once if nothing is in flight.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let busy = [self.busy_words, self.busy_rings, self.busy_bytes];
        if timeout == Some(Duration::ZERO) || busy.into_iter().map(u64::count_ones).sum::<u32>() <= 1 {
            return self.wait_each(timeout);
        }
        // Then each lane is checked without waiting, which lets it find its responses.
        wait_any(self.sources(), self.waiting, timeout) && self.wait_each(Some(Duration::ZERO))
    }

    /// Waits at each lane with operations in flight. A lane whose server is gone counts as having responses: the failed operations.
    fn wait_each(&mut self, timeout: Option<Duration>) -> bool {
        let mut has_response = false;
        for daemon in bits(self.busy_words) {
            let lane = &mut self.words[daemon];
            has_response |= lane.in_flight() > 0 && lane.wait(timeout).unwrap_or(true);
        }
        for daemon in bits(self.busy_rings) {
            let ring = &mut self.rings[daemon];
            has_response |= ring.in_flight() > 0 && ring.wait(timeout).unwrap_or(true);
        }
        for daemon in bits(self.busy_bytes) {
            let lane = self.bytes[daemon].as_mut().filter(|lane| lane.in_flight() > 0);
            has_response |= lane.is_some_and(|lane| lane.wait(timeout).unwrap_or(true));
        }
        has_response
    }
}

/// The positions of the bits that are set.
#[inline]
fn bits(mut set: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(bit)
    })
}

/// The time limit of an operation with several steps.
#[derive(Clone, Copy)]
struct TimeLimit {
    /// `None`: no limit.
    deadline: Option<Instant>,
    timeout: Duration,
}

impl TimeLimit {
    fn new(timeout: Duration) -> TimeLimit {
        TimeLimit { deadline: Instant::now().checked_add(timeout), timeout }
    }

    fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }
}

/// The error of an operation on a key of `rank` that got no response.
#[cold]
fn no_response_error(rank: u32, error: ipc::ExchangeError) -> Error {
    match error {
        ipc::ExchangeError::TimedOut { after } => Error::TimedOut { rank, after },
        ipc::ExchangeError::Full => Error::Full,
        _ => Error::ServerGone,
    }
}

/// The error of an operation on a key of `rank` that ended with a status other than its usual results.
fn status_error(rank: u32, status: Status) -> Error {
    match status {
        Status::NodeGone => Error::NodeGone { rank },
        Status::OutOfMemory => Error::OutOfMemory { rank },
        Status::NoRegisteredMemory => Error::NoRegisteredMemory { rank },
        status => Error::Unexpected { rank, status },
    }
}

/// Requests the description of the node. Closes the lane afterwards: few clients need it again.
fn request_info(name: &str, limit: TimeLimit) -> Result<NodeInfo, AttachError> {
    let mut lane =
        connect(name, service_names::bytes(name, 0), limit, ipc::Client::<[u8], [u8]>::connect_within)?;
    let mut request = Vec::new();
    let version = || AttachError::OtherVersion { name: name.to_owned() };
    // The client does not know the node's rank yet. The node ignores the rank in this request.
    let request_info = wire::BytesRequest { rank: 0, daemon: 0, op: wire::BytesOp::Info };
    request_info.encode(&mut request).map_err(|_| version())?;
    let info = lane.exchange_within(&request, Some(limit.remaining()), |response| {
        NodeInfo::decode(wire::BytesResponse::decode(response).ok()?.value)
    });
    let failed = |error| match error {
        ipc::ExchangeError::TimedOut { .. } => {
            AttachError::TimedOut { name: name.to_owned(), after: limit.timeout }
        }
        _ => AttachError::Gone { name: name.to_owned() },
    };
    info.map_err(failed)?.ok_or_else(version)
}

fn connect<C>(
    node: &str,
    service: String,
    limit: TimeLimit,
    connect: impl FnOnce(&str, Duration) -> Result<C, ipc::ConnectError>,
) -> Result<C, AttachError> {
    connect(&service, limit.remaining()).map_err(|cause| match cause {
        ipc::ConnectError::NoServer { .. } => AttachError::NoNode { name: node.to_owned() },
        // All nodes of a release have the same messages.
        ipc::ConnectError::OtherVersion { .. } | ipc::ConnectError::Mismatch { .. } => {
            AttachError::OtherVersion { name: node.to_owned() }
        }
        ipc::ConnectError::TimedOut { .. } => {
            AttachError::TimedOut { name: node.to_owned(), after: limit.timeout }
        }
        cause => AttachError::Connect { service, cause },
    })
}

impl<T> std::fmt::Debug for Client<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut client = f.debug_struct("Client");
        client.field("node", &self.name).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::{Node, NodeConfig};

    #[test]
    fn polls_without_a_response_let_other_threads_run() {
        let name = format!("yields-{}", std::process::id());
        let _node = Node::start(&NodeConfig::single(&name)).unwrap();
        let mut client = Client::attach(&name).unwrap();
        let yields = |client: &mut Client, counts: &[usize]| {
            counts.iter().filter(|&&count| client.is_yield_due(count)).count()
        };
        let empty = [0; 10 * POLLS_BEFORE_YIELD as usize];
        assert_eq!(yields(&mut client, &empty), 10);
        // A response begins the count again.
        let almost = &empty[1..POLLS_BEFORE_YIELD as usize];
        assert_eq!(yields(&mut client, &[almost, &[1], almost, &[7], almost].concat()), 0);
        assert_eq!(yields(&mut client, &[0]), 1);
        // Sooner where other threads wait for the core.
        client.record_yield(Some(CROWDED * 2));
        assert_eq!(yields(&mut client, &empty[..10 * CROWDED_POLLS as usize]), 10);
        client.record_yield(Some(CROWDED / 2));
        assert_eq!(yields(&mut client, &empty), 10);
        client.record_yield(None);
        assert_eq!(yields(&mut client, &empty[..10 * CROWDED_POLLS as usize]), 10);
        client.record_yield(Some(CROWDED / 2));
        assert_eq!(yields(&mut client, &empty), 10);
        let mut client = client.with_wait_strategy(WaitStrategy::Spin);
        assert_eq!(yields(&mut client, &empty), 0);
    }
}
