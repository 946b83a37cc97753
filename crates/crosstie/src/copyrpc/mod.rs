//! RPC between machines or processes, carried by RDMA WRITE with immediate. Many calls share one WRITE.
//!
//! A [`Context`] belongs to one thread and has any number of [`Connection`]s, each to one peer. Calls and replies are first written to a
//! local ring. Each [`poll`](Context::poll) sends what has gathered there as one batch, with one WRITE into the peer's memory. The peer
//! gets one completion per batch, on one queue for all its connections.
//!
//! ```
//! use crosstie::copyrpc::{Config, ConnectionConfig, Context};
//! use crosstie::device::ConnectConfig;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (here, there) = (Context::<&str>::open(&"software".parse()?, &Config::default())?,
//!                      Context::<()>::open(&"software".parse()?, &Config::default())?);
//! let (client, server) = (here.create_connection(&ConnectionConfig::default())?,
//!                         there.create_connection(&ConnectionConfig::default())?);
//! // Between processes the addresses are sent as bytes, see `crosstie::bootstrap`.
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
//!         request.reply(b"pong")?;
//!     }
//! }
//! assert_eq!(answer, Some(("attached", Ok(b"pong".to_vec()))));
//! # Ok(()) }
//! ```
//!
//! A server that answers most requests at once uses [`serve`](Context::serve): a poll that hands each request to a handler, where it has
//! arrived. After a [`poll`](Context::poll), [`recv`](Context::recv) returns the requests that it has found, each as if a handler had
//! [deferred](Request::defer) it.
//!
//! # Promises
//!
//! - No deadlock. A call is made only if there is credit for its response, that is, space reserved in this side's receive ring.
//!   So a response always finds space, and two sides that call each other never wait for each other.
//!   `crosstie_protocol::copyrpc` contains the rules and their tests; `docs/wire-format.md` shows the bytes.
//! - Every call ends exactly once: with its response, or with a [`CallFailed`] that says why. Requests arrive in the order in
//!   which they were made. Replies may be sent in any order, at any time.
//! - Memory is bounded: two rings per connection (a peer's ring up to [a limit](ConnectionConfig::max_peer_ring)), and [bulk
//!   memory](ConnectionConfig::bulk) as configured. A call for which there is no space fails with a [`CallError`], which returns
//!   what was attached to the call: poll and try again.
//! - In the steady state a call allocates nothing, takes no lock and makes no system call.
//! - A peer that dies or violates the protocol ends its own connection and no other.
//!
//! # Long payloads
//!
//! The same calls carry up to 1 GiB each way ([`MAX_BULK`]). Payloads that do not fit into the ring are moved by READ and WRITE, in
//! pieces, while short calls continue. [`ConnectionConfig::bulk`] limits the memory for them; zero turns them off.
//!
//! ```
//! # use crosstie::copyrpc::{Config, ConnectionConfig, Context};
//! # use crosstie::device::ConnectConfig;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (here, there) = (Context::<()>::open(&"software".parse()?, &Config::default())?,
//! #                      Context::<()>::open(&"software".parse()?, &Config::default())?);
//! let config = ConnectionConfig { bulk: 8 << 20, ..ConnectionConfig::default() };
//! let (client, server) = (here.create_connection(&config)?, there.create_connection(&config)?);
//! # client.connect(&server.address(), &ConnectConfig::default())?;
//! # server.connect(&client.address(), &ConnectConfig::default())?;
//! let picture = vec![7; 5 << 20];
//! client.call(&picture, picture.len(), ())?;
//! let mut answer = Vec::new();
//! while answer.is_empty() {
//!     here.poll(|(), response| answer = response.expect("a response").to_vec());
//!     there.poll(|(), _| ());
//!     while let Some(request) = there.recv() {
//!         let mut inverted = request.data().to_vec();
//!         inverted.iter_mut().for_each(|byte| *byte = !*byte);
//!         request.reply(&inverted)?;
//!     }
//! }
//! assert!(answer == vec![!7; 5 << 20]);
//! # Ok(()) }
//! ```
//!
//! - Requests still arrive in order: a long request delays those behind it on its connection until its payload is complete. If the
//!   callee's bulk memory is in use, the request waits until other requests are released; nothing is lost.
//! - A long response goes out over the following polls. [`RecvHandle::reply`] says what happens if there is no memory for it.
//! - Memory that the peer or the device may still access is not used again: the memory of a call stays in use until its response
//!   has arrived, even if the call has timed out.
//! - Each connection has its own memory: no peer ever sees what another peer has left in it.
//!
//! [`Connection::read`] and [`Connection::write`] are one-sided operations for peers that know each other's memory. An operation owns
//! its memory region; [`Context::take_raw_completion`] returns the region when the operation has completed.
//!
//! # When batches go out
//!
//! A batch goes out with the next [`poll`](Context::poll), [`flush`](Context::flush) or [`wait`](Context::wait). A batch of 64
//! messages goes out at once, so that the peer works on them while this side writes more. A poll delays a small batch, for
//! a few polls and 50 us at most, while the peer has not released the two batches before it; otherwise a fast loop would send every
//! message alone. If no earlier batch is outstanding, nothing is delayed. A short reply that answers the last open request of its
//! connection, with nothing else to send, goes out at once: nothing could join it. So does a short call, if no other call of its connection
//! is pending; one between two polls.
//!
//! If a poll finds one batch, and it ends more than half of a connection's pending calls, the poll reports half of them and the next one the
//! others. A program that makes new calls in between keeps both sides busy.
//!
//! # Deadlines and dead peers
//!
//! The program has to [poll](Context::poll) or [wait](Context::wait): nothing happens in the background. Both notice deadlines and
//! dead peers by time, whatever the number of polls; [`Context::wait`] says how soon.

mod address;
mod bulk_state;
mod config;
mod connection;
mod context;
mod counters;
mod error;
mod flush_policy;
#[cfg(all(test, not(loom)))]
mod fuzz_tests;
mod operation;
mod payload;
mod qp_table;
mod receive_policy;
mod region_pool;
pub mod service;
mod wr_id;

pub use address::{ConnectionAddress, ConnectionId};
pub use config::{Config, ConnectionConfig};
pub use context::{Connection, Context, RecvHandle, Request};
pub use counters::{BATCH_CLASSES, Counters};
pub use crosstie_protocol::copyrpc::MAX_BULK;
pub use error::{
    CallError, CallFailed, ConnectError, Failure, NotCalled, NotPosted, NotReplied, RawError, ReplyError,
};
pub use operation::{RAW_DEPTH, RawCompletion};
pub use payload::Payload;
