//! RPC between the threads of one process: every thread can call every other.
//!
//! [`network`] creates N nodes at once; each thread gets a [`Node`], which is a client and a server of every other. A node calls others
//! ([`Node::call`]) and polls for their responses ([`Node::poll`]). It serves the requests of others ([`Node::serve`], or one by one
//! [`Node::recv`]), and replies at once ([`Request::reply`]) or later, in any order ([`Node::reply`]). Messages are of any type that is
//! `Send`; they are moved, never copied or serialised.
//!
//! ```
//! use crosstie::flux::{Config, NotCalled, network};
//!
//! let mut nodes = network::<u64, u64, &str>(2, &Config::default())?;
//! let (mut callee, mut caller) = (nodes.pop().unwrap(), nodes.pop().unwrap());
//! let server = std::thread::spawn(move || {
//!     callee.wait(None);
//!     callee.serve(|request| {
//!         assert_eq!(request.client(), 0);
//!         request.reply_with(|number| number * number).expect("the caller waits");
//!     });
//! });
//! caller.call(1, 12, "twelve squared")?;
//! let mut responses = Vec::new();
//! while caller.poll(|token, response| responses.push((token, response))) == 0 {
//!     caller.wait(None);
//! }
//! assert_eq!(responses, [("twelve squared", 144)]);
//! server.join().unwrap();
//! // A call to a node that was dropped hands the request and the token back.
//! caller.wait(None);
//! let refused = caller.call(1, 13, "").unwrap_err();
//! assert_eq!((refused.cause, refused.request, refused.token), (NotCalled::NodeGone { target: 1 }, 13, ""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Layout.** Every ordered pair of nodes has a lane: an array of slots of one cache line each, or more if messages are
//! large. Request and response of a call use the same slot, one after the other, so a call moves one cache line there and
//! back.
//!
//! ```text
//!            callee 0       callee 1       callee 2                 a slot, 64 bytes or a multiple
//!          +--------------+--------------+--------------+          +--------+------------------------+
//! caller 0 | lane to self | lane 0 -> 1  | lane 0 -> 2  |          |  word  |  request or response   |
//!          +--------------+--------------+--------------+          +--------+------------------------+
//! caller 1 | lane 1 -> 0  |   [][][][] --- queue_depth + 1 slots    which side owns the slot, for which
//!          +--------------+--------------+--------------+           call, and the slot of the next request
//! caller 2 | lane 2 -> 0  | lane 2 -> 1  | lane to self |
//!          +--------------+--------------+--------------+
//!
//! node 1 has:    row 1 as caller: a call table for each lane, with the tokens
//!                column 1 as callee: the slot of each caller's next request
//!                its node state: whether it is parked, whether it is gone (others read it, and rarely write it)
//! ```
//!
//! The word is the one of [`crosstie_protocol::lane`].
//!
//! **Promises.**
//! - Every accepted call ends exactly once: its response is polled or, if the target was dropped before it replied, the call
//!   is [lost](Node::take_lost). A lost call includes the request, if the target never received it. (If a target drops a
//!   [`Request`] or its [`Ticket`] and lives on, that call stays in flight as long as the target lives.)
//! - Requests and responses that nobody took are dropped once, when the last node that could take them is gone.
//! - No call, poll, receive or reply allocates, locks, or makes a system call, except to wake a parked node.
//! - A node that is dropped, also by a panic of its thread, wakes all waiting nodes, and later calls to it fail with
//!   [`NodeGone`](NotCalled::NodeGone). Requests that it had sent before are still delivered; replies to them fail with
//!   [`ClientGone`](NotReplied::ClientGone).
//!
//! **Limits.** [`Config::queue_depth`] limits the calls of one caller to one callee to the slots of their lane, so a callee
//! always has room for a reply. [`Config::max_in_flight`] limits the calls of one node to all targets together. A call
//! counts until its response is polled. Beyond the limits a call is refused, and its request and token are handed back.
//!
//! **A node may call itself.** A daemon that owns one shard of many then uses the same loop for every key, its own
//! included.

mod error;
mod lane;
mod node;
#[cfg(all(test, not(loom)))]
mod tests;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use error::{CallError, CreateError, Lost, NotCalled, NotReplied, ReplyError};
pub use lane::{Request, Ticket};
pub use node::Node;

use crate::ring::fence;
use crate::wait::WaitStrategy;

/// Most nodes of a network.
pub const MAX_NODES: usize = 1024;
/// Largest [`Config::queue_depth`].
pub const MAX_QUEUE_DEPTH: usize = crosstie_protocol::lane::MAX_SLOTS - 1;
/// Most memory for all slots of a network.
pub const MAX_BYTES: usize = 1 << 30;

/// Configuration of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most calls of one node to one other in flight: 1 to [`MAX_QUEUE_DEPTH`].
    pub queue_depth: usize,
    /// Most calls of one node to all others together in flight, at least 1.
    pub max_in_flight: usize,
    /// How [`Node::wait`] waits.
    pub wait_strategy: WaitStrategy,
}

impl Default for Config {
    fn default() -> Self {
        Config { queue_depth: 64, max_in_flight: 1024, wait_strategy: WaitStrategy::default() }
    }
}

impl Config {
    /// Bytes of memory of a network with this many nodes.
    pub fn bytes<Req, Resp, Token>(&self, nodes: usize) -> u64 {
        let lane = lane::lane_bytes::<Req, Resp>(self.queue_depth)
            + lane::call_table_bytes::<Token>(self.queue_depth);
        lane.saturating_mul(nodes).saturating_mul(nodes) as u64
    }
}

/// Creates a network. Other nodes call element `i` of the vector as node `i`.
///
/// # Errors
/// If a limit is exceeded, or the system refuses what parking needs.
pub fn network<Req: Send, Resp: Send, Token>(
    nodes: usize,
    config: &Config,
) -> Result<Vec<Node<Req, Resp, Token>>, CreateError> {
    static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
    let &Config { queue_depth, max_in_flight, wait_strategy } = config;
    CreateError::check("nodes", nodes, MAX_NODES)?;
    CreateError::check("queue_depth", queue_depth, MAX_QUEUE_DEPTH)?;
    CreateError::check("max_in_flight", max_in_flight, usize::MAX)?;
    let lanes = nodes * nodes;
    if lane::lane_bytes::<Req, Resp>(queue_depth).saturating_mul(lanes) > MAX_BYTES {
        return Err(CreateError::TooLarge { nodes, queue_depth });
    }
    // A node that spins may also be one of several sources that a thread waits for, and parks at.
    let can_park = match fence::register() {
        Ok(()) => true,
        Err(_) if wait_strategy == WaitStrategy::Spin => false,
        Err(e) => return Err(CreateError::Parking(e)),
    };
    // Relaxed: only the value itself matters.
    let first_key = NEXT_KEY.fetch_add(lanes as u64, Relaxed);
    let node = |(id, lanes)| Node::new(id, lanes, max_in_flight, wait_strategy, can_park);
    Ok(lane::create_lanes(nodes, queue_depth, first_key).into_iter().enumerate().map(node).collect())
}
