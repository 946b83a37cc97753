//! RPC through one MPSC ring that all clients share: one server, many clients, and response slots for each client.
//!
//! This is for a server that does the same work for all clients, such as the owner of a network card: it polls one
//! position, however many clients there are. Server and clients are threads or processes of one user on one machine. A
//! client finds its server by name. Messages are typed (any zerocopy type) or byte strings, see
//! [`Message`](crate::Message). The server may reply in any order and at any later time. Neither side allocates, locks or
//! makes a system call per message; only waking a parked peer costs one.
//!
//! ```
//! use crosstie::delegation::{Client, Config, Server};
//!
//! let mut server = Server::<u64, u64>::create("doc-delegation", &Config::default())?;
//! let mut client = Client::<u64, u64, &str>::connect("doc-delegation")?;
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
//! One segment, which the server and all clients map. A *parker* is a futex word at which its owner sleeps until another process wakes it.
//!
//! ```text
//!  header                                                             writer
//!     0  magic u64 | version u32 | max_clients u32                    server, once
//!    16  ring_depth u32 | resp_depth u32                              server, once
//!    24  next_client_id u32 (connects so far) | server_alive u8       server
//!    64  parker of the server u32                                     server; a client when it wakes the server
//!    72  mode u64: one client (EXCLUSIVE), or several (SHARED)        server
//!    80  stalled slots u64 (count) | 5 * u64 (slot + 1)               server
//!  ring control
//!   128  head u64: next position to reserve                           clients
//!   192  tail u64: the server has read all positions below it         server
//!  request slots: 256 + (position mod ring_depth) * align_up(16 + request limit, 64)
//!    +0  stamp u32, derived from the position | client key u32        the client that reserved the position
//!    +8  response key u32 | length u32                                  "
//!   +16  payload                                                        "
//!  response slots: after these, (client index * resp_depth + slot) * align_up(8 + response limit, 64)
//!    +0  response key u32 of the request | length u32                 server; the client before it uses the key again
//!    +8  payload                                                        "
//!  client areas: after these, client index * 128
//!    +0  claim u64: the position it is about to reserve and fill      that client
//!   +64  parker of the client u32                                     that client; the server when it wakes the client
//! ```
//!
//! A request is there when its slot has the stamp of its position. The server checks the stamp of the next position and
//! never reads `head` for this, so a request moves one cache line, and so does a response. A client key is an index with a
//! generation; a response key is a slot with the lower 21 bits of the number of the call. So a message that belongs to an
//! earlier client or call is recognised. Before a client uses a response key that its slot still has from an earlier
//! call, it changes the word of the slot.
//!
//! # When a process ends
//!
//! Either side may end at any instruction. A client that dies after reserving a position and before filling it leaves a
//! hole, which would stop the ring. The server skips such a position if it is reserved, not filled, and not claimed by any
//! live client (see `ring/reservation.rs`). The server drops the requests of a dead client, and gives its index to a new one.
//! A client that is alive but stopped there (SIGSTOP, a debugger) may still fill its position. The server passes the position after
//! 10 ms, at the next look for it, and other clients leave its slot out until the stopped one continues or ends
//! (`ring/stalled.rs`). So a stopped client delays others once, by less than 100 ms. Up to five clients can be stopped there at a
//! time; with a sixth the ring waits.
//!
//! When the server ends, its clients notice within milliseconds. They still receive the responses that it wrote; then
//! every operation fails with [`ServerGone`](Disconnected::ServerGone). The name is free at once for a new server, to which
//! the clients [reconnect](Client::reconnect). The segment has no name; the kernel frees it with its last user.
//!
//! # Trust
//!
//! The server copies what clients wrote out of the segment once, and validates the copy. It keeps its own state outside of
//! the segment. It disconnects a client that breaks the protocol and counts it ([`Counters`]). But all clients write to
//! the same ring: a client that overwrites the ring can destroy requests of other clients or stop the ring, and a client that writes
//! an invalid request in the name of another one gets that one disconnected, because the server cannot tell who wrote it. It
//! cannot harm the server, and [`call`](Client::call) of another client returns, at worst with
//! [`RingFull`](NotCalled::RingFull). If clients do not trust each other, use [`ipc`](crate::ipc), which gives each of them a lane of
//! its own.

mod admission;
mod client;
mod layout;
mod lease;
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
    /// Most requests of all clients that the server has not received yet: 1 to [`MAX_RING_DEPTH`], rounded up to a power of
    /// two.
    pub ring_depth: usize,
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
            ring_depth: 256,
            request_limit: 4096,
            response_limit: 4096,
            wait_strategy: WaitStrategy::default(),
        }
    }
}

impl Config {
    /// Bytes of shared memory, at most: the ring, and the response slots of all clients.
    ///
    /// ```
    /// use crosstie::delegation::Config;
    /// let config = Config { max_clients: 4, queue_depth: 8, ring_depth: 64, ..Config::default() };
    /// assert!(config.bytes::<u64, u64>() < 16 << 10);
    /// ```
    pub fn bytes<Req: crate::Message + ?Sized, Resp: crate::Message + ?Sized>(&self) -> u64 {
        layout::RingLayout::new(self, Req::SIZE, Resp::SIZE).bytes()
    }
}

/// Largest [`Config::max_clients`].
pub const MAX_CLIENTS: usize = 4096;
/// Largest [`Config::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = 1024;
/// Largest [`Config::ring_depth`].
pub const MAX_RING_DEPTH: usize = 1 << 16;
/// Largest message, in bytes.
pub const MAX_MESSAGE: usize = crosstie_protocol::lane::MAX_LEN;

/// The kind of service, as a part of its address.
const KIND: &str = "delegation";

#[cfg(all(test, not(loom)))]
mod fuzz_tests;
#[cfg(all(test, not(loom)))]
mod tests;
