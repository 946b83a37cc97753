//! Calls through one ring that all clients share: one server, many clients, and a place for every answer.
//!
//! For a server that does the same thing for everybody, as the owner of a network card does: it looks in one place,
//! however many clients there are. Server and clients are threads or processes of one user on one machine; a client
//! finds its server by name. Messages are typed (any zerocopy type) or raw bytes, see [`Message`](crate::Message). Calls
//! may be answered in any order and at any later time; neither side allocates, locks or enters the kernel per call.
//!
//! ```
//! use crosstie::delegation::{Client, Config, Server};
//!
//! let mut server = Server::<u64, u64>::create("doc-delegation", &Config::default())?;
//! let mut client = Client::<u64, u64, &str>::connect("doc-delegation")?;
//! client.call(&20, "the token comes back with the answer").unwrap();
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
//! One segment, which everybody maps (delegation architecture §2.1):
//!
//! ```text
//!  header                                                             writer
//!     0  magic u64 | version u32 | max_clients u32                    server, once
//!    16  ring_depth u32 | resp_depth u32                              server, once
//!    24  next_client_id u32 (clients so far) | server_alive u8        server
//!    64  the server's parker u32                                        server; a client when it wakes it
//!    72  mode u64: one client, or several                             server
//!  ring control
//!   128  head u64: next position to reserve                           clients
//!   192  tail u64: positions below it have been read                  server
//!  request slots: 256 + (position mod ring_depth) * align_up(16 + request limit, 64)
//!    +0  stamp u32, from the position | client key u32                the client that reserved the position
//!    +8  response key u32 | length u32                                  "
//!   +16  payload                                                        "
//!  response slots: behind, (client index * resp_depth + slot) * align_up(8 + response limit, 64)
//!    +0  response key u32 that it answers | length u32                server
//!    +8  payload                                                        "
//!  clients: behind, client index * 128
//!    +0  claim u64: the position it is about to reserve and fill      that client
//!   +64  its parker u32                                                 that client; the server when it wakes it
//! ```
//!
//! A request is there when its stamp is that of its position; the server looks at the stamp of the next one and never at
//! `head`, so a client that writes requests and a server that reads them move one line per request, and one per answer.
//! A key is an index with a generation (client) or the number of the call (response): answers to a use that is over are
//! recognised.
//!
//! # Life and death
//!
//! Either side may end at any instruction. A client that dies between reserving a position and filling it leaves a hole
//! that would stop the ring; the server skips it when it is reserved, not filled, and no client that lives has claimed it.
//! A dead client's requests are dropped and its index is given to another. A dead server is seen by its clients within
//! milliseconds: answers that it gave still arrive, then everything is [`ServerGone`](Disconnected::ServerGone). Its name
//! is free at once for a new server, and clients [reconnect](Client::reconnect). The segment has no name and goes with
//! its last user.
//!
//! Whatever clients write is copied out once and then checked; what the server relies on is not in the segment. A client
//! that breaks the rules is cut off and counted. But the ring is everybody's: one that scribbles over it can lose other
//! clients' requests or stop the ring, though never the server. Where clients do not trust each other,
//! [`ipc`](crate::ipc) keeps them apart.

mod admission;
mod client;
mod layout;
mod lease;
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
    /// Requests of all clients that the server has not received yet, at most [`MAX_RING_DEPTH`]; the next power of two
    /// is taken.
    pub ring_depth: usize,
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
            ring_depth: 256,
            request_limit: 4096,
            response_limit: 4096,
            wait_strategy: WaitStrategy::default(),
        }
    }
}

impl Config {
    /// Bytes of memory that the ring and the answers of all clients take at most.
    ///
    /// ```
    /// use crosstie::delegation::Config;
    /// let config = Config { max_clients: 4, queue_depth: 8, ring_depth: 64, ..Config::default() };
    /// assert!(config.bytes::<u64, u64>() < 16 << 10);
    /// ```
    pub fn bytes<Req: crate::Message + ?Sized, Resp: crate::Message + ?Sized>(&self) -> u64 {
        layout::Shape::new(self, Req::SIZE, Resp::SIZE).bytes()
    }
}

/// Limit of [`Config::max_clients`].
pub const MAX_CLIENTS: usize = 4096;
/// Limit of [`Config::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;
/// Limit of [`Config::ring_depth`].
pub const MAX_RING_DEPTH: usize = 1 << 16;
/// Limit of a message, in bytes.
pub const MAX_MESSAGE: usize = crosstie_protocol::lane::MAX_LEN;

/// What kind of service a name belongs to.
const KIND: &str = "delegation";

#[cfg(all(test, not(loom)))]
mod tests;
