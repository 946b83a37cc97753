//! Asking the store: from a thread of a node, or from another process on its machine.
//!
//! A client attaches to a node by its name and reaches all keys of the cluster through it. Requests for keys of that node
//! go straight to the daemon that has them, all others on the [way](crate::long::Backend) that the cluster was started
//! with.
//!
//! One at a time:
//!
//! ```
//! # use crosstie_kv::node::{Node, NodeConfig};
//! use crosstie_kv::client::{Client, Swap};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let node = Node::start(&NodeConfig::alone("doc-client"))?;
//! let mut client = Client::attach("doc-client")?;
//! client.put(1, 10)?;
//! assert_eq!(client.compare_and_swap(1, 10, 11)?, Swap::Done);
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
//! use crosstie_kv::message::{Op, Request, Status};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let node = Node::start(&NodeConfig::alone("doc-pipelined"))?;
//! let mut client = Client::<&str>::pipelined("doc-pipelined")?;
//! client.begin(Request { value: 5, ..Request::new(Op::Put, 0, 77) }, "put")?;
//! client.begin(Request::new(Op::Get, 0, 78), "get")?;
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
//! # Promises
//!
//! - Every operation that was begun ends once: with what the node that has the key answered, or as
//!   [`NodeGone`](Status::NodeGone) if that node, or the one that the client is attached to, went away. Then it may have been done.
//! - Operations on one key end in the order in which they were begun, if they are of one client and nothing fails.
//! - Beginning and polling neither allocate nor lock nor make system calls.

mod bytes;
mod error;

use std::time::{Duration, Instant};

use crosstie::{Waiting, delegation, ipc};

pub use error::{AttachError, BeginError, Error};

use crate::long::{self, Info};
use crate::message::{Op, Request, Response, Status};
use crate::node::{has_ring, long_name, ring_name, words_name};
use crate::placement::Placement;

/// How long a wait looks at one of several lanes at a time.
const WAIT_SLICE: Duration = Duration::from_micros(50);
/// Rounds in which it only lets others run in between.
const WAIT_YIELDS: u32 = 64;

/// Asks the store. `T` is whatever comes back with the answers to pipelined operations. See the [module](self).
pub struct Client<T = ()> {
    name: String,
    info: Info,
    placement: Placement,
    /// The daemon that takes requests for other nodes, where there is no ring.
    home: usize,
    /// By daemon.
    words: Vec<ipc::Client<Request, Response, T>>,
    /// A bit for each daemon: operations are under way. May be set without, never the other way.
    busy: u64,
    ring: Option<delegation::Client<Request, Response, T>>,
    /// By daemon; connected when first used.
    long: Vec<Option<ipc::Client<[u8], [u8]>>>,
    scratch: Vec<u8>,
    waiting: Waiting,
}

const _: () = assert!(crate::placement::MAX_DAEMONS <= u64::BITS, "a bit for each daemon");

/// How a compare-and-swap ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swap<V> {
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
        Client::pipelined(name)
    }
}

impl<T> Client<T> {
    /// Attaches to the node of that name, on this machine, for operations with tokens.
    pub fn pipelined(name: &str) -> Result<Client<T>, AttachError> {
        let info = ask_info(name)?;
        let version = || AttachError::OtherVersion { name: name.to_owned() };
        let placement = Placement::new(info.nodes, info.daemons).ok_or_else(version)?;
        let words =
            (0..info.daemons).map(|daemon| connect(name, words_name(name, daemon), ipc::Client::connect));
        let words = words.collect::<Result<_, _>>()?;
        let ring = match has_ring(info.backend, info.nodes) {
            true => Some(connect(name, ring_name(name), delegation::Client::connect)?),
            false => None,
        };
        Ok(Client {
            name: name.to_owned(),
            info,
            placement,
            home: (info.turn % info.daemons) as usize,
            words,
            busy: 0,
            ring,
            long: (0..info.daemons).map(|_| None).collect(),
            scratch: Vec::new(),
            waiting: Waiting::default(),
        })
    }

    /// Sets how it waits for answers.
    #[must_use]
    pub fn with_waiting(mut self, waiting: Waiting) -> Client<T> {
        let words = self.words.into_iter().map(|lane| lane.with_waiting(waiting));
        self.words = words.collect();
        self.ring = self.ring.map(|ring| ring.with_waiting(waiting));
        self.long = self.long.into_iter().map(|lane| lane.map(|lane| lane.with_waiting(waiting))).collect();
        self.waiting = waiting;
        self
    }

    /// Attaches to the node of the same name again, which may be another one by now. Operations that are under way are
    /// over: [poll](Client::poll) before, to have their tokens.
    pub fn reconnect(&mut self) -> Result<(), AttachError> {
        let waiting = self.waiting;
        // Its places are needed.
        self.words.clear();
        (self.ring, self.busy) = (None, 0);
        self.long.clear();
        *self = Client::pipelined(&self.name)?.with_waiting(waiting);
        Ok(())
    }

    /// What the node said it is.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Where keys are.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Begins an operation. Never waits. The request's rank is set to that of the node that has the key.
    #[inline]
    pub fn begin(&mut self, request: Request, token: T) -> Result<(), BeginError<T>> {
        let place = self.placement.of_word(request.key);
        let request = Request { rank: place.rank, ..request };
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

    /// Hands the answers that are there to `each`; says how many. Never waits. If the node is gone, all operations under way
    /// end as [`Status::NodeGone`].
    ///
    /// Of one daemon at most half of the operations under way end at a time, so that it has something to do while new ones
    /// are begun.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(T, Response)) -> usize {
        let mut count = 0;
        let mut left = self.busy;
        while left != 0 {
            let daemon = left.trailing_zeros();
            left &= left - 1;
            let lane = &mut self.words[daemon as usize];
            match lane.poll(|token, response| each(token, *response)) {
                Ok(ended) => count += ended,
                Err(_) => {
                    count += lane.in_flight();
                    lane.abandon(|token| each(token, Response::new(Status::NodeGone, 0)));
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
                    ring.abandon(|token| each(token, Response::new(Status::NodeGone, 0)));
                }
            }
        }
        count
    }

    /// Operations under way.
    pub fn in_flight(&self) -> usize {
        let words: usize = self.words.iter().map(ipc::Client::in_flight).sum();
        words + self.ring.as_ref().map_or(0, delegation::Client::in_flight)
    }

    /// Waits until there is something to [poll](Client::poll), at most for `timeout`; says whether there is. At once if
    /// nothing is under way.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        let ring = self.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0);
        let lanes = self.busy.count_ones() + u32::from(ring);
        // A lane that is over has something to poll: the end of its operations.
        if lanes <= 1 {
            return self.wait_each(timeout);
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        for round in 0.. {
            if self.wait_each(Some(if round < WAIT_YIELDS { Duration::ZERO } else { WAIT_SLICE })) {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
            if round < WAIT_YIELDS && self.waiting != Waiting::Spin {
                std::thread::yield_now();
            }
        }
        unreachable!("rounds do not end")
    }

    /// Waits at each lane with something under way.
    fn wait_each(&mut self, timeout: Option<Duration>) -> bool {
        let mut left = self.busy;
        while left != 0 {
            let daemon = left.trailing_zeros() as usize;
            left &= left - 1;
            if self.words[daemon].in_flight() > 0 && self.words[daemon].wait(timeout).unwrap_or(true) {
                return true;
            }
        }
        let ring = self.ring.as_mut().filter(|ring| ring.in_flight() > 0);
        ring.is_some_and(|ring| ring.wait(timeout).unwrap_or(true))
    }
}

/// One at a time. Operations with tokens that are under way stay so.
impl<T: Default> Client<T> {
    /// The value of a key.
    pub fn get(&mut self, key: u64) -> Result<Option<u64>, Error> {
        match self.exchange(Request::new(Op::Get, 0, key))? {
            (_, Response { status: Status::Done, value, .. }) => Ok(Some(value)),
            (_, Response { status: Status::NotFound, .. }) => Ok(None),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value.
    pub fn put(&mut self, key: u64, value: u64) -> Result<(), Error> {
        match self.exchange(Request { value, ..Request::new(Op::Put, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(()),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Removes a key; says whether it was there.
    pub fn delete(&mut self, key: u64) -> Result<bool, Error> {
        match self.exchange(Request::new(Op::Delete, 0, key))? {
            (_, Response { status: Status::Done, .. }) => Ok(true),
            (_, Response { status: Status::NotFound, .. }) => Ok(false),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has none; else says which it has.
    pub fn insert(&mut self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        match self.exchange(Request { value, ..Request::new(Op::Insert, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(None),
            (_, Response { status: Status::Mismatch, value, .. }) => Ok(Some(value)),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    /// Gives a key a value if it has the expected one.
    pub fn compare_and_swap(&mut self, key: u64, expected: u64, value: u64) -> Result<Swap<u64>, Error> {
        match self.exchange(Request { value, expected, ..Request::new(Op::CompareAndSwap, 0, key) })? {
            (_, Response { status: Status::Done, .. }) => Ok(Swap::Done),
            (_, Response { status: Status::Mismatch, value, .. }) => Ok(Swap::Mismatch(value)),
            (_, Response { status: Status::NotFound, .. }) => Ok(Swap::NotFound),
            (rank, response) => Err(unexpected(rank, response.status)),
        }
    }

    fn exchange(&mut self, request: Request) -> Result<(u32, Response), Error> {
        let place = self.placement.of_word(request.key);
        let request = Request { rank: place.rank, ..request };
        let answer = if place.rank != self.info.rank && self.ring.is_some() {
            let ring = self.ring.as_mut().ok_or(Error::ServerGone)?;
            ring.exchange(&request, |response| *response)
        } else {
            let local = place.rank == self.info.rank;
            let daemon = if local { place.daemon as usize } else { self.home };
            self.words.get_mut(daemon).ok_or(Error::ServerGone)?.exchange(&request, |response| *response)
        };
        Ok((place.rank, answer.map_err(not_begun)?))
    }
}

/// What an exchange fails with.
fn not_begun(error: ipc::CallError<()>) -> Error {
    match BeginError::from(error) {
        BeginError::Full(()) => Error::Full,
        BeginError::ServerGone(()) => Error::ServerGone,
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
fn ask_info(name: &str) -> Result<Info, AttachError> {
    let mut lane = connect(name, long_name(name, 0), ipc::Client::<[u8], [u8]>::connect)?;
    let mut request = Vec::new();
    let version = || AttachError::OtherVersion { name: name.to_owned() };
    // A client that does not know the rank yet asks for the one that every cluster has; whoever gets it, answers.
    let call = long::Request { rank: 0, daemon: 0, call: long::Call::Info };
    call.encode(&mut request).map_err(|_| version())?;
    let info = lane.exchange(&request, |answer| Info::decode(long::Response::decode(answer).ok()?.value));
    info.map_err(|_| AttachError::Gone { name: name.to_owned() })?.ok_or_else(version)
}

fn connect<C>(
    node: &str,
    service: String,
    connect: impl FnOnce(&str) -> Result<C, ipc::ConnectError>,
) -> Result<C, AttachError> {
    connect(&service).map_err(|cause| match cause {
        ipc::ConnectError::NoServer { .. } => AttachError::NoNode { name: node.to_owned() },
        cause => AttachError::Connect { service, cause },
    })
}

impl<T> std::fmt::Debug for Client<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut client = f.debug_struct("Client");
        client.field("node", &self.name).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}
