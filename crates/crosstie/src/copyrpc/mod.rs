//! Calls between nodes, carried by WRITE with immediate.
//!
//! A [`Context`] belongs to one thread and has any number of [`Endpoint`]s, each connected to one of a peer. Calls and
//! answers are written into a ring first, and travel together: one WRITE for all that came together since the last
//! [`poll`](Context::poll). Whoever receives them gets its memory written, and one completion per batch, on one queue
//! for all connections.
//!
//! ```
//! use crosstie::copyrpc::{Config, Context, EndpointConfig};
//! use crosstie::device::ConnectConfig;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (here, there) = (Context::<&str>::open(&"software".parse()?, &Config::default())?,
//!                      Context::<()>::open(&"software".parse()?, &Config::default())?);
//! let (client, server) = (here.create_endpoint(&EndpointConfig::default())?,
//!                         there.create_endpoint(&EndpointConfig::default())?);
//! // Between processes the addresses travel as bytes, see `crosstie::bootstrap`.
//! client.connect(&server.address(), &ConnectConfig::default())?;
//! server.connect(&client.address(), &ConnectConfig::default())?;
//!
//! client.call(b"ping", 16, "attached")?;
//! let mut answer = None;
//! while answer.is_none() {
//!     here.poll(|attached, response| answer = Some((attached, response.map(|bytes| bytes.to_vec()))));
//!     there.poll(|(), _| ());
//!     while let Some(request) = there.recv() {
//!         assert_eq!(request.data().to_vec(), b"ping");
//!         request.reply(b"pong").map_err(|(cause, _)| cause)?;
//!     }
//! }
//! assert_eq!(answer, Some(("attached", Ok(b"pong".to_vec()))));
//! # Ok(()) }
//! ```
//!
//! # Promises
//!
//! - No deadlock: a call is made only if there is credit for its answer, so an answer always has room, and two sides
//!   that call each other never wait for each other. `crosstie_protocol::copyrpc` has the rules and their proofs;
//!   `docs/wire-format.md` draws the bytes.
//! - Every call ends once: with its answer, or with a [`CallFailed`] that says why. Requests come in the order in which
//!   they were made; answers may be given in any order, at any time.
//! - Memory is bounded: two rings per endpoint, and [bulk memory](EndpointConfig::bulk) as configured. What does not fit
//!   is refused and handed back ([`CallError`]); poll, and try again.
//! - In the steady state a call allocates nothing, locks nothing and makes no system call.
//! - A peer that dies or breaks the rules ends its own connection, and no other.
//!
//! # Long payloads
//!
//! The same calls carry up to 1 GiB each way ([`MAX_BULK`]). What the ring does not hold goes by READ and WRITE, in pieces,
//! while small calls go on; [`EndpointConfig::bulk`] says how much memory that may take, and zero turns it off.
//!
//! ```
//! # use crosstie::copyrpc::{Config, Context, EndpointConfig};
//! # use crosstie::device::ConnectConfig;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (here, there) = (Context::<()>::open(&"software".parse()?, &Config::default())?,
//! #                      Context::<()>::open(&"software".parse()?, &Config::default())?);
//! let config = EndpointConfig { bulk: 8 << 20, ..EndpointConfig::default() };
//! let (client, server) = (here.create_endpoint(&config)?, there.create_endpoint(&config)?);
//! # client.connect(&server.address(), &ConnectConfig::default())?;
//! # server.connect(&client.address(), &ConnectConfig::default())?;
//! let picture = vec![7; 5 << 20];
//! client.call(&picture, picture.len(), ())?;
//! let mut answer = Vec::new();
//! while answer.is_empty() {
//!     here.poll(|(), response| answer = response.expect("an answer").to_vec());
//!     there.poll(|(), _| ());
//!     while let Some(request) = there.recv() {
//!         let mut inverted = request.data().to_vec();
//!         inverted.iter_mut().for_each(|byte| *byte = !*byte);
//!         request.reply(&inverted).map_err(|(cause, _)| cause)?;
//!     }
//! }
//! assert!(answer == vec![!7; 5 << 20]);
//! # Ok(()) }
//! ```
//!
//! - Requests still come in order: a long one holds up those behind it on its endpoint until it is there. When the memory of the
//!   side that is called is in use, it waits until requests are released, and nothing is lost.
//! - A long answer goes out over the polls that follow; [`RecvHandle::reply`] says what happens when there is no memory for it.
//! - Memory that a peer or the device may still touch is not used again: that of a call stays lent until the answer is there,
//!   also if the call has timed out.
//! - Every endpoint has its own: what one peer left in its memory, no other ever sees.
//!
//! [`Endpoint::read`] and [`Endpoint::write`] are there for those who know each other's memory: the regions are lent to the
//! operation, by type, and come back with its end from [`Context::take_finished`].
//!
//! # When batches go out
//!
//! With the next [`poll`](Context::poll), [`flush`](Context::flush) or [`wait`](Context::wait), and at once when 32 messages
//! have come together, so that the peer works on them while more are written. A poll holds a small batch
//! back, for a few polls at most, while the peer has not finished with the two before it: otherwise a fast loop would
//! send every message alone. A call that is alone never waits.

mod bulk;
mod connection;
mod context;
mod deadlines;
mod endpoint;
mod error;
mod operation;
mod payload;
mod pool;
pub mod service;
mod table;

use crosstie_protocol::copyrpc::Violation;
use crosstie_protocol::copyrpc::wire::{CONNECT_INFO_SIZE, ConnectInfo};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use context::Context;
pub use crosstie_protocol::copyrpc::MAX_BULK;
pub use endpoint::{Endpoint, EndpointId, RecvHandle};
pub use error::{CallError, CallFailed, ConnectError, Failure, NotCalled, NotPosted, NotReplied, RawError};
pub use operation::{Finished, RAW_DEPTH};
pub use payload::Payload;

use crate::device::QpAddress;

/// Sizes of a context.
#[derive(Clone, Debug)]
pub struct Config {
    /// Endpoints at a time, at most 4096, and no more than the device's longest completion queue has room for: each can have
    /// 128 requests under way, and all can fail at once.
    pub max_endpoints: usize,
    /// Receives in stock, for all endpoints: batches that may come between two polls.
    pub receives: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config { max_endpoints: 512, receives: 1024 }
    }
}

impl Config {
    /// Bytes of memory that a context takes beside its endpoints, at most.
    pub fn bytes(&self) -> u64 {
        // Completions are 32 bytes on the software device and up to 128 elsewhere, of a number that devices round up; what
        // else is kept for each is less.
        let sent = self.max_endpoints as u64 * u64::from(connection::SEND_DEPTH);
        let completions = 2 * u64::from(self.receives) + sent;
        let receives = u64::from(self.receives);
        2 * 192 * (completions + receives) + (64 << 10)
    }
}

/// Sizes of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EndpointConfig {
    /// Bytes of the receive ring: a power of two from 256 to 2 GiB.
    pub ring: usize,
    /// Bytes of answers that the peer may have outstanding at most; half a ring and more is never used.
    pub credit: usize,
    /// Unanswered calls of this side, at most 65536.
    pub pending_calls: usize,
    /// Bytes of bulk memory for each of four purposes, up to 1 GiB: requests that go and that come, answers that come and
    /// that go. It is allocated when it is used, in pieces of at most an eighth more than their payload (and at least 64 KiB), and kept until the
    /// endpoint is closed. The lesser of
    /// both sides is the longest payload of a connection. Zero: what a ring does not hold is refused. (Rings of 256
    /// bytes carry no bulk calls either.)
    pub bulk: usize,
}

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig { ring: 1 << 20, credit: 1 << 18, pending_calls: 1024, bulk: 64 << 20 }
    }
}

impl EndpointConfig {
    /// Bytes of memory that an endpoint takes at most, connected with one of the same sizes: a ring to receive, one to send from,
    /// bulk memory for four purposes, and what is kept for each call and in the queue pair.
    ///
    /// ```
    /// use crosstie::copyrpc::EndpointConfig;
    /// let config = EndpointConfig { bulk: 8 << 20, ..EndpointConfig::default() };
    /// assert_eq!(config.bytes() >> 20, 2 + 4 * 8);
    /// ```
    pub fn bytes(&self) -> u64 {
        let bulk = self.bulk.min(MAX_BULK as usize) as u64;
        2 * self.ring as u64 + 4 * bulk + 256 * self.pending_calls as u64 + (256 << 10)
    }
}

/// Sizes of batches that are told apart, see [`Counters::batch_sizes`].
pub const BATCH_CLASSES: usize = 16;

/// What a context has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Calls made.
    pub calls: u64,
    /// Answers given.
    pub replies: u64,
    /// Requests that were dropped without an answer, and answered with nothing.
    pub unanswered: u64,
    /// Batches of messages sent.
    pub batches: u64,
    /// Messages in them.
    pub batched: u64,
    /// Batches by size: at `i` those with at most `2^i` messages, and more than those before; the last has all larger ones.
    pub batch_sizes: [u64; BATCH_CLASSES],
    /// Batches without messages, that only return credit.
    pub credit_batches: u64,
    /// Markers that skip the end of a ring.
    pub wraps: u64,
    /// Payloads that went straight to the peer's ring, ahead of their batch.
    pub direct: u64,
    /// READs of a peer's position.
    pub reads: u64,
    /// Requests posted to send queues.
    pub work_requests: u64,
    /// Those that asked for a completion.
    pub signaled: u64,
    /// Bytes written to peers.
    pub bytes: u64,
    /// Completions taken.
    pub completions: u64,
    /// Calls made whose request or room for the answer is in bulk memory.
    pub bulk_calls: u64,
    /// Answers given that are.
    pub bulk_replies: u64,
    /// READs of pieces of bulk requests.
    pub bulk_reads: u64,
    /// WRITEs of pieces of bulk answers.
    pub bulk_writes: u64,
    /// Bytes of both.
    pub bulk_bytes: u64,
    /// READs that the application asked for.
    pub raw_reads: u64,
    /// WRITEs that the application asked for.
    pub raw_writes: u64,
    /// Batches that broke the rules.
    pub violations: u64,
    /// Connections that ended other than by closing.
    pub failures: u64,
}

/// An endpoint, in a form that can be sent to the peer that shall connect to it.
///
/// ```
/// use crosstie::copyrpc::EndpointAddress;
/// use zerocopy::{FromBytes, IntoBytes};
/// let bytes = [0u8; size_of::<EndpointAddress>()];
/// assert_eq!(EndpointAddress::read_from_bytes(&bytes).unwrap().as_bytes(), bytes);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct EndpointAddress {
    qp: QpAddress,
    info: [u8; CONNECT_INFO_SIZE],
}

impl EndpointAddress {
    fn new(qp: QpAddress, info: &ConnectInfo) -> EndpointAddress {
        EndpointAddress { qp, info: info.encode() }
    }

    fn qp(&self) -> QpAddress {
        self.qp
    }

    fn info(&self) -> Result<ConnectInfo, Violation> {
        ConnectInfo::decode(&self.info)
    }
}
