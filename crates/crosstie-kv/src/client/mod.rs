//! Asking the store: from a thread of a node, or from another process on its machine.
//!
//! A client attaches to a node by its name and reaches all keys of the cluster through it. Requests for keys of that node
//! go straight to the daemon that has them, all others on the [way](crate::Backend) that the cluster was started
//! with.
//!
//! One at a time:
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
//! Many at a time, each with a token that comes back with its answer:
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
//! Byte strings the same way, with [`begin_bytes`](Client::begin_bytes) and [`poll_bytes`](Client::poll_bytes). Both kinds may be under way
//! at a time; they have lanes of their own, so an 8-byte operation does not wait behind a value of a megabyte, and a long
//! answer is only copied when it is polled for. [`wait`](Client::wait) and [`in_flight`](Client::in_flight) are about both.
//!
//! # When no answer comes
//!
//! A node that ends, however it does, is noticed. One that is stopped (SIGSTOP, a debugger, a machine that swaps) says nothing. Calls
//! that wait give up after the client's [timeout](Client::set_timeout), [`DEFAULT_TIMEOUT`] unless told, with [`Error::TimedOut`]. **What
//! was asked may then have been done, may be done later, when the node goes on, or never**: to put the same value again is
//! safe, a compare-and-swap or an insert tells by its answer. Nothing of the kind is tried again by itself. An answer that comes
//! too late is dropped; it is never taken for that of another operation. The client stays good for when the node goes on.
//! Pipelined operations have no deadline of their own: who has waited long enough leaves them, and drops the client, or polls on.
//!
//! # Promises
//!
//! - Every operation that was begun ends once: with what the node that has the key answered, or as
//!   [`NodeGone`](Status::NodeGone) if that node, or the one that the client is attached to, went away. Then it may have been done.
//! - Operations on one key are done in the order in which they were begun, if they are of one client and nothing fails.
//! - Beginning and polling neither allocate nor lock nor make system calls (but for the first byte strings: see there).
//! - WaitStrategy spins, lets others run, then sleeps until an answer comes on whichever way, see [`WaitStrategy`].

mod bytes;
mod error;
mod words;

use std::time::{Duration, Instant};

use crosstie::{WaitStrategy, Waitable, delegation, ipc, wait_any};

pub use error::{AttachError, BeginBytesError, BeginError, Error};

use crate::service_names;
use crate::sharding::ShardMap;
use crate::wire::{self, NodeInfo, Status, WordRequest, WordResponse};

/// How long calls that wait do so, unless [told](Client::set_timeout) otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks the store. `T` is whatever comes back with the answers to pipelined operations. See the [module](self).
pub struct Client<T = ()> {
    name: String,
    info: NodeInfo,
    shard_map: ShardMap,
    /// The daemon that takes requests for other nodes, where there is no ring.
    home: usize,
    /// By daemon.
    words: Vec<ipc::Client<WordRequest, WordResponse, T>>,
    /// A bit for each daemon: operations are under way. May be set without, never the other way.
    busy: u64,
    ring: Option<delegation::Client<WordRequest, WordResponse, T>>,
    /// By daemon; connected when first used.
    long: Vec<Option<bytes::Lane<T>>>,
    /// As `busy`, for those.
    busy_long: u64,
    /// The last long request that waited for its answer.
    scratch: Vec<u8>,
    waiting: WaitStrategy,
    timeout: Duration,
}

const _: () = assert!(crate::sharding::MAX_DAEMONS <= u64::BITS, "a bit for each daemon");

/// How a compare-and-swap ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwapOutcome<V> {
    /// The key has the new value.
    Done,
    /// The key has this value, not the expected one.
    Mismatch(V),
    /// There is no such key.
    NotFound,
}

impl Client<()> {
    /// Attaches to the node of that name, on this machine.
    pub fn attach(name: &str) -> Result<Client, AttachError> {
        Client::attach_pipelined(name)
    }
}

impl<T> Client<T> {
    /// Attaches to the node of that name, on this machine, for operations with tokens.
    pub fn attach_pipelined(name: &str) -> Result<Client<T>, AttachError> {
        Client::attach_within(name, DEFAULT_TIMEOUT)
    }

    /// Attaches to the node of that name, on this machine, if that takes no longer than `timeout`; which is then that of its
    /// calls, too, see [`set_timeout`](Client::set_timeout).
    pub fn attach_within(name: &str, timeout: Duration) -> Result<Client<T>, AttachError> {
        let deadline = Deadline::new(timeout);
        let info = ask_info(name, deadline)?;
        let version = || AttachError::OtherVersion { name: name.to_owned() };
        let shard_map = ShardMap::new(info.nodes, info.daemons).ok_or_else(version)?;
        let words = (0..info.daemons).map(|daemon| {
            connect(name, service_names::words(name, daemon), deadline, ipc::Client::connect_within)
        });
        let words = words.collect::<Result<_, _>>()?;
        let ring = match info.backend.uses_ring(info.nodes) {
            true => {
                Some(connect(name, service_names::ring(name), deadline, delegation::Client::connect_within)?)
            }
            false => None,
        };
        Ok(Client {
            name: name.to_owned(),
            info,
            shard_map,
            home: (info.attach_count % info.daemons) as usize,
            words,
            busy: 0,
            ring,
            long: (0..info.daemons).map(|_| None).collect(),
            busy_long: 0,
            scratch: Vec::new(),
            waiting: WaitStrategy::default(),
            timeout,
        })
    }

    /// Sets how it waits for answers.
    #[must_use]
    pub fn with_wait_strategy(mut self, waiting: WaitStrategy) -> Client<T> {
        let words = self.words.into_iter().map(|lane| lane.with_wait_strategy(waiting));
        self.words = words.collect();
        self.ring = self.ring.map(|ring| ring.with_wait_strategy(waiting));
        self.long =
            self.long.into_iter().map(|lane| lane.map(|lane| lane.with_wait_strategy(waiting))).collect();
        self.waiting = waiting;
        self
    }

    /// Sets how long calls that wait do so before they end as [`Error::TimedOut`]; [`Duration::MAX`]: for ever. What that means for
    /// what was asked: see the [module](self).
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
    ///     // It may still be done.
    ///     Err(Error::TimedOut { rank, .. }) => eprintln!("rank {rank} is slow"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// How long calls that wait do so.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Attaches to the node of the same name again, which may be another one by now. Operations that are under way are
    /// over: [poll](Client::poll), and [poll](Client::poll_bytes) for byte strings, before, to have their tokens.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        // Its places are needed.
        self.words.clear();
        self.long.clear();
        (self.ring, self.busy, self.busy_long) = (None, 0, 0);
        *self = Client::attach_within(&self.name, self.timeout)?.with_wait_strategy(self.waiting);
        Ok(())
    }

    /// What the node said it is.
    pub fn info(&self) -> &NodeInfo {
        &self.info
    }

    /// Where keys are.
    pub fn shard_map(&self) -> ShardMap {
        self.shard_map
    }

    /// Begins an operation. Never waits. The request's rank is set to that of the node that has the key.
    #[inline]
    pub fn begin(&mut self, request: WordRequest, token: T) -> Result<(), BeginError<T>> {
        let place = self.shard_map.shard_of_word(request.key);
        let request = WordRequest { rank: place.rank, ..request };
        let daemon = if place.rank == self.info.rank {
            place.daemon as usize
        } else if let Some(ring) = &mut self.ring {
            return Ok(ring.call(&request, token)?);
        } else {
            self.home
        };
        let Some(lane) = self.words.get_mut(daemon) else { return Err(BeginError::ServerGone(token)) };
        lane.call(&request, token)?;
        self.busy |= 1 << daemon;
        Ok(())
    }

    /// Hands the answers to operations on 8-byte keys that are there to `each`; says how many. Never waits. If the node is gone, all operations under way
    /// end as [`Status::NodeGone`].
    ///
    /// Of one daemon at most half of the operations under way end at a time, so that it has something to do while new ones
    /// are begun.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(T, WordResponse)) -> usize {
        let mut count = 0;
        for daemon in bits(self.busy) {
            let lane = &mut self.words[daemon];
            match lane.poll(|token, response| each(token, *response)) {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += lane.in_flight();
                    lane.disconnect(|token| each(token, WordResponse::new(Status::NodeGone, 0)));
                }
            }
            if lane.in_flight() == 0 {
                self.busy &= !(1 << daemon);
            }
        }
        if let Some(ring) = &mut self.ring
            && ring.in_flight() > 0
        {
            match ring.poll(|token, response| each(token, *response)) {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += ring.in_flight();
                    ring.disconnect(|token| each(token, WordResponse::new(Status::NodeGone, 0)));
                }
            }
        }
        count
    }

    /// Operations with tokens under way, of both kinds.
    pub fn in_flight(&self) -> usize {
        let words: usize = self.words.iter().map(ipc::Client::in_flight).sum();
        let long: usize = self.long.iter().flatten().map(ipc::Client::in_flight).sum();
        words + long + self.ring.as_ref().map_or(0, delegation::Client::in_flight)
    }

    /// Waits until there is something to [poll](Client::poll), or to poll [for byte strings](Client::poll_bytes), at most for
    /// `timeout`; says whether there is. At once if nothing is under way.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let ring = self.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0);
        let lanes = self.busy.count_ones() + self.busy_long.count_ones() + u32::from(ring);
        if lanes <= 1 {
            return self.wait_each(timeout);
        }
        let words = self.words.iter().map(|lane| lane as &dyn Waitable);
        let ring = self.ring.iter().map(|ring| ring as &dyn Waitable);
        let long = self.long.iter().flatten().map(|lane| lane as &dyn Waitable);
        // Then each lane, so that those with answers know.
        wait_any(words.chain(ring).chain(long), self.waiting, timeout) && self.wait_each(Some(Duration::ZERO))
    }

    /// Waits at each lane with something under way. One that is over has something to poll: the end of its operations.
    fn wait_each(&mut self, timeout: Option<Duration>) -> bool {
        let mut is_there = false;
        for daemon in bits(self.busy) {
            let lane = &mut self.words[daemon];
            is_there |= lane.in_flight() > 0 && lane.wait(timeout).unwrap_or(true);
        }
        for daemon in bits(self.busy_long) {
            let lane = self.long[daemon].as_mut().filter(|lane| lane.in_flight() > 0);
            is_there |= lane.is_some_and(|lane| lane.wait(timeout).unwrap_or(true));
        }
        let ring = self.ring.as_mut().filter(|ring| ring.in_flight() > 0);
        is_there | ring.is_some_and(|ring| ring.wait(timeout).unwrap_or(true))
    }
}

/// The numbers of the bits that are set.
#[inline]
fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(bit)
    })
}

/// When something that takes several steps must be done.
#[derive(Clone, Copy)]
struct Deadline {
    /// None: whenever.
    at: Option<Instant>,
    after: Duration,
}

impl Deadline {
    fn new(after: Duration) -> Deadline {
        Deadline { at: Instant::now().checked_add(after), after }
    }

    fn left(&self) -> Duration {
        self.at.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }
}

/// What an operation of this rank's fails with that has no answer.
#[cold]
fn failed(rank: u32, error: ipc::CallError<()>) -> Error {
    match error {
        ipc::CallError::TimedOut { after, .. } => Error::TimedOut { rank, after },
        error if error.is_back_pressure() => Error::Full,
        _ => Error::ServerGone,
    }
}

/// A status that is no answer to what was asked.
fn unexpected(rank: u32, status: Status) -> Error {
    match status {
        Status::NodeGone => Error::NodeGone { rank },
        Status::OutOfMemory => Error::OutOfMemory { rank },
        status => Error::Unexpected { rank, status },
    }
}

/// Asks the node what it is. The lane is given back: few clients need it again.
fn ask_info(name: &str, deadline: Deadline) -> Result<NodeInfo, AttachError> {
    let mut lane =
        connect(name, service_names::bytes(name, 0), deadline, ipc::Client::<[u8], [u8]>::connect_within)?;
    let mut request = Vec::new();
    let version = || AttachError::OtherVersion { name: name.to_owned() };
    // A client that does not know the rank yet asks for the one that every cluster has; whoever gets it, answers.
    let call = wire::BytesRequest { rank: 0, daemon: 0, op: wire::BytesOp::Info };
    call.encode(&mut request).map_err(|_| version())?;
    let info = lane.exchange_within(&request, Some(deadline.left()), |answer| {
        NodeInfo::decode(wire::BytesResponse::decode(answer).ok()?.value)
    });
    let failed = |error| match error {
        ipc::CallError::TimedOut { .. } => {
            AttachError::TimedOut { name: name.to_owned(), after: deadline.after }
        }
        _ => AttachError::Gone { name: name.to_owned() },
    };
    info.map_err(failed)?.ok_or_else(version)
}

fn connect<C>(
    node: &str,
    service: String,
    deadline: Deadline,
    connect: impl FnOnce(&str, Duration) -> Result<C, ipc::ConnectError>,
) -> Result<C, AttachError> {
    connect(&service, deadline.left()).map_err(|cause| match cause {
        ipc::ConnectError::NoServer { .. } => AttachError::NoNode { name: node.to_owned() },
        ipc::ConnectError::TimedOut { .. } => {
            AttachError::TimedOut { name: node.to_owned(), after: deadline.after }
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
