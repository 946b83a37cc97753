//! Calls through shared memory: one server, many clients, each with a lane of its own.
//!
//! Server and clients are threads or processes of one user on one machine; a client finds its server by name. Messages
//! are typed (any zerocopy type) or raw bytes, see [`Message`](crate::Message). Calls may be answered in any order and at
//! any later time; neither side allocates, locks or enters the kernel per call.
//!
//! ```
//! use crosstie::ipc::{Client, Config, Server};
//!
//! let mut server = Server::<u64, u64>::create("doc-ipc", &Config::default())?;
//! let mut client = Client::<u64, u64, &str>::connect("doc-ipc")?;
//! client.call(&20, "the token comes back with the answer").unwrap();
//! server.poll();
//! while let Some(request) = server.recv() {
//!     let answer = request.message() + 1;
//!     request.reply(&answer)?;
//! }
//! client.poll(|token, answer| assert_eq!((token, *answer), ("the token comes back with the answer", 21)))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is shared
//!
//! Every client gets a segment of its own, its *lane*, mapped by itself and by the server; a client that scribbles over
//! it hurts itself only. One more page, the *server_page*, is mapped by all and holds the server's parker.
//!
//! ```text
//!  lane                                                          writer
//!     0  magic u64 | version u32 | slots u32 | stride u32        server, once
//!    64  the client's parker                                       client; the server when it wakes it
//!   128  slot 0:  +0 word u64   +8 payload                       client and server in turn, see below
//!        slot 1   ... each `stride` bytes, a multiple of 64
//!
//!  server_page
//!     0  the server's parker                                       server; a client when it wakes it
//! ```
//!
//! A slot's word says whose turn it is: a request is written into it and, when the server answers, the answer in its place,
//! so that a small call moves one cache line there and back. The word of a request also names the slot of the next one;
//! slots are free again in the order of the answers, whatever that is.
//!
//! # Life and death
//!
//! Either side may end at any instruction. A dead client's lane is unmapped and its place is free; a dead server is seen by
//! its clients within milliseconds: answers that it gave still arrive, then everything is
//! [`ServerGone`](Disconnected::ServerGone). Its name is free at once for a new server, and clients
//! [reconnect](Client::reconnect). Segments have no names and go with their last user.
//!
//! # What does not compile
//!
//! Answering twice, now or later:
//!
//! ```compile_fail,E0382
//! # use crosstie::ipc::Request;
//! fn f(request: Request<'_, u64, u64>) {
//!     request.reply(&1).unwrap();
//!     request.reply(&2).unwrap();
//! }
//! ```
//! ```compile_fail,E0382
//! # use crosstie::ipc::{Server, Ticket};
//! fn f(server: &mut Server<u64, u64>, ticket: Ticket) {
//!     server.reply(ticket, &1).unwrap();
//!     server.reply(ticket, &2).unwrap();
//! }
//! ```
//!
//! Keeping a request's message while the next one is received (a copy can be kept):
//!
//! ```compile_fail,E0499
//! # use crosstie::ipc::Server;
//! fn f(server: &mut Server<[u8], [u8]>) -> Option<()> {
//!     let first = server.recv()?.message();
//!     let second = server.recv()?.message();
//!     assert_ne!(first, second);
//!     Some(())
//! }
//! ```
//!
//! Messages that are not plain data:
//!
//! ```compile_fail,E0277
//! # use crosstie::ipc::{Config, Server};
//! let server = Server::<String, String>::create("strings", &Config::default());
//! ```
//!
//! # Trust
//!
//! Whatever the other side writes is copied out once and then checked. A client that breaks the rules is cut off and
//! counted; the others go on.

mod admission;
mod client;
mod lane;
mod server;

pub use client::Client;
pub use server::{Counters, Request, Server, Ticket};

use crate::WaitStrategy;
pub use crate::local_rpc::error::{
    CallError, ConnectError, CreateError, Disconnected, MessageSize, ReplyError,
};

/// What a server offers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Clients at a time, at most [`MAX_CLIENTS`].
    pub max_clients: usize,
    /// Unanswered calls of one client, at most [`MAX_QUEUE_DEPTH`].
    pub queue_depth: usize,
    /// Bytes of a request at most, where requests are `[u8]`; at most [`MAX_MESSAGE`].
    pub request_limit: usize,
    /// Bytes of an answer at most, where answers are `[u8]`; at most [`MAX_MESSAGE`].
    pub response_limit: usize,
    /// How the server waits, in [`Server::wait`].
    pub wait_strategy: WaitStrategy,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            max_clients: 64,
            queue_depth: 32,
            request_limit: 4096,
            response_limit: 4096,
            wait_strategy: WaitStrategy::default(),
        }
    }
}

impl Config {
    /// Bytes of memory that a client takes at most. Slots of long messages take what their messages have taken so far.
    ///
    /// ```
    /// use crosstie::ipc::Config;
    /// let config = Config { queue_depth: 32, ..Config::default() };
    /// assert!(config.bytes_per_client::<u64, u64>() < 4096);
    /// assert!(config.bytes_per_client::<[u8], [u8]>() > 32 * config.request_limit as u64);
    /// ```
    pub fn bytes_per_client<Req: crate::Message + ?Sized, Resp: crate::Message + ?Sized>(&self) -> u64 {
        lane::Shape::new(self, Req::SIZE, Resp::SIZE).bytes()
    }
}

/// Limit of [`Config::max_clients`].
pub const MAX_CLIENTS: usize = 4096;
/// Limit of [`Config::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;
/// Limit of a message, in bytes.
pub const MAX_MESSAGE: usize = crosstie_protocol::lane::MAX_LEN;

/// What kind of service a name belongs to.
const KIND: &str = "ipc";

#[cfg(all(test, not(loom)))]
mod hostile_tests;
