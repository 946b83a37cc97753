//! RPC through shared memory: one server, many clients, and an SPSC lane for each client.
//!
//! Server and clients are threads or processes of one user on one machine. A client finds its server by name. Messages are
//! typed (any zerocopy type) or byte strings, see [`Message`](crate::Message). The server may reply in any order and at any
//! later time. Neither side allocates, locks or makes a system call per message; only waking a parked peer costs one.
//!
//! ```
//! use crosstie::ipc::{Client, Config, Server};
//!
//! let mut server = Server::<u64, u64>::create("doc-ipc", &Config::default())?;
//! let mut client = Client::<u64, u64, &str>::connect("doc-ipc")?;
//! client.call(&20, "returned with the response").unwrap();
//! server.serve(|request| {
//!     let response = request.message() + 1;
//!     request.reply(&response).ok(); // fails if the client has ended
//! });
//! client.poll(|token, response| assert_eq!((token, *response), ("returned with the response", 21)))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Shared memory
//!
//! Each client has a segment of its own, its *lane*. Only the client and the server map it, so a client that overwrites its
//! lane harms nobody else. All clients also map the *server page*. A *parker* is a futex word at which its owner sleeps until
//! another process wakes it.
//!
//! ```text
//!  lane                                                          writer
//!     0  magic u64 | version u32 | slots u32 | stride u32        server, once
//!    64  parker of the client                                    client; the server when it wakes the client
//!   128  slot 0:  +0 word u64   +8 payload                       client and server alternately, see below
//!        slot 1   ... each `stride` bytes, a multiple of 64
//!
//!  server page
//!     0  parker of the server                                    server; a client when it wakes the server
//! ```
//!
//! The word of a slot says which side owns the slot, see [`crosstie_protocol::lane`]. The client writes a request into the
//! slot, and the server writes the response into the same slot. So a call with small messages moves one cache line there
//! and back. The word of a request also names the slot of the client's next request. The server cannot compute it: responses
//! free the slots in any order.
//!
//! # When a process ends
//!
//! Either side may end at any instruction. When a client ends, the server unmaps its lane, and another client can take its
//! place. When the server ends, its clients notice within milliseconds. They still receive the responses that it wrote;
//! then every operation fails with [`ServerGone`](Disconnected::ServerGone). The name is free at once for a new server, to
//! which the clients [reconnect](Client::reconnect). Segments have no names; the kernel frees them with their last user.
//!
//! # Mistakes that do not compile
//!
//! Replying twice to one request:
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
//! Keeping the message of a request while the next request is received (keep a copy instead):
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
//! Each side copies what the other side wrote out of shared memory once, and validates the copy. The server disconnects a
//! client that breaks the protocol and counts it ([`Counters`]); the other clients are not affected.
//!
//! One word is shared: every client writes the word at which the server sleeps. A client that clears it all the time lets the server sleep
//! on, for up to 50 ms each time; one that sets it all the time makes each request of the others cost a system call.

mod admission;
mod client;
mod lane;
mod server;

pub use client::Client;
pub use server::{Counters, Request, Server, Ticket};

use crate::WaitStrategy;
pub use crate::local_rpc::error::{
    CallError, ConnectError, CreateError, Disconnected, ExchangeError, MessageSize, NotCalled, NotReplied,
    ReplyError,
};

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Most clients at a time: 1 to [`MAX_CLIENTS`].
    pub max_clients: usize,
    /// Most calls of one client in flight: 1 to [`MAX_QUEUE_DEPTH`].
    pub queue_depth: usize,
    /// Largest request in bytes, if requests are `[u8]`: 1 to [`MAX_MESSAGE`].
    pub request_limit: usize,
    /// Largest response in bytes, if responses are `[u8]`: 1 to [`MAX_MESSAGE`].
    pub response_limit: usize,
    /// How [`Server::wait`] waits.
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
    /// Bytes of shared memory per client, at most. Pages of slots for long messages are allocated when they are first used.
    ///
    /// ```
    /// use crosstie::ipc::Config;
    /// let config = Config { queue_depth: 32, ..Config::default() };
    /// assert!(config.bytes_per_client::<u64, u64>() < 4096);
    /// assert!(config.bytes_per_client::<[u8], [u8]>() > 32 * config.request_limit as u64);
    /// ```
    pub fn bytes_per_client<Req: crate::Message + ?Sized, Resp: crate::Message + ?Sized>(&self) -> u64 {
        lane::LaneLayout::new(self, Req::SIZE, Resp::SIZE).bytes()
    }
}

/// Largest [`Config::max_clients`].
pub const MAX_CLIENTS: usize = 4096;
/// Largest [`Config::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;
/// Largest message, in bytes.
pub const MAX_MESSAGE: usize = crosstie_protocol::lane::MAX_LEN;

/// The kind of service, as a part of its address.
const KIND: &str = "ipc";

#[cfg(all(test, not(loom)))]
mod fuzz_tests;
#[cfg(all(test, not(loom)))]
mod hostile_tests;
