//! Calls between the threads of one process: everybody calls everybody.
//!
//! A [`network`] of N nodes is made at once; each thread gets a [`Node`]. A node calls others ([`Node::call`]) and takes
//! their responses ([`Node::poll`]), receives what others ask ([`Node::try_recv`]) and answers in any order
//! ([`Node::reply`]). Messages are any types that may move between threads; they are moved, never copied or serialised.
//!
//! ```
//! use crosstie::flux::{Config, network};
//!
//! let mut nodes = network::<u64, u64, &str>(2, &Config::default())?;
//! let (mut squares, mut asks) = (nodes.pop().unwrap(), nodes.pop().unwrap());
//! let server = std::thread::spawn(move || {
//!     squares.wait(None);
//!     let (from, number, ticket) = squares.try_recv().unwrap();
//!     assert_eq!(from, 0);
//!     squares.reply(ticket, number * number).unwrap();
//! });
//! asks.call(1, 12, "twelve squared")?;
//! let mut answers = Vec::new();
//! while asks.poll(|token, response| answers.push((token, response))) == 0 {
//!     asks.wait(None);
//! }
//! assert_eq!(answers, [("twelve squared", 144)]);
//! server.join().unwrap();
//! // Nodes that are dropped say so, and requests come back.
//! asks.wait(None);
//! assert_eq!(asks.call(1, 13, "").unwrap_err().into_parts(), (13, ""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **The layout.** Every ordered pair of nodes has a lane: a few slots of one cache line each, or more if messages are
//! large. Request and response of a call use the same slot, one after the other, so a call moves one line there and back.
//!
//! ```text
//!            callee 0       callee 1       callee 2                 a slot, 64 bytes or a multiple
//!          +--------------+--------------+--------------+          +--------+------------------------+
//! caller 0 | lane to self | lane 0 -> 1  | lane 0 -> 2  |          |  word  |  request or response   |
//!          +--------------+--------------+--------------+          +--------+------------------------+
//! caller 1 | lane 1 -> 0  |   [][][][] ------ capacity + 1 slots    whose turn it is, for which call,
//!          +--------------+--------------+--------------+           and where the next request will be
//! caller 2 | lane 2 -> 0  | lane 2 -> 1  | lane to self |
//!          +--------------+--------------+--------------+
//!
//! node 1 holds:  row 1 as caller: what is under way in each lane, with tokens
//!                column 1 as callee: where each caller's next request will be
//!                its door: whether it sleeps and must be woken, whether it is gone (others read it, and rarely write)
//! ```
//!
//! The word is the one of [`crosstie_protocol::lane`].
//!
//! **Promises.**
//! - Every call that was accepted ends in one way: its response is polled, or, once the target is gone, it is
//!   [lost](Node::take_lost); with the request, if the target never received it. (A target that lives and drops its
//!   [`Ticket`] owes an answer as long as it lives.)
//! - Requests and responses that nobody took are dropped once, when the last node that could have is gone.
//! - No call, poll, receive or reply allocates, locks, or makes a system call, but one: waking a node that sleeps.
//! - A node that is dropped, also by a panic of its thread, wakes all others that wait, and later calls to it are `Gone`.
//!   What it had called for before is still delivered; the replies are then `Gone`.
//!
//! **Limits.** [`Config::capacity`] is a pair's: the slots of a lane bound what one caller can load onto one callee, so a
//! callee always has room for a reply. [`Config::max_in_flight`] is a node's, over all targets: what it must remember and
//! be ready to poll. Both are counted until the response is polled. Beyond them a call is refused and handed back.
//!
//! **Calling oneself** is legal. A daemon that owns one shard of many then treats its own like those of others, and its
//! loop is the same for every key.

mod error;
mod node;
mod slots;
#[cfg(all(test, not(loom)))]
mod tests;

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use error::{CallError, ConfigError, Lost, ReplyError};
pub use node::Node;
pub use slots::Ticket;

use crate::ring::fence;
use crate::wait::WaitStrategy;

/// Most nodes of a network.
pub const MAX_NODES: usize = 1024;
/// Largest [`Config::capacity`].
pub const MAX_CAPACITY: usize = crosstie_protocol::lane::MAX_SLOTS - 1;
/// Most memory for all slots of a network.
pub const MAX_BYTES: usize = 1 << 30;

/// What all nodes of a network have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Calls that one node may have under way to one other: 1 to [`MAX_CAPACITY`].
    pub capacity: usize,
    /// Calls that one node may have under way to all others together, at least 1.
    pub max_in_flight: usize,
    /// How [`Node::wait`] waits.
    pub wait_strategy: WaitStrategy,
}

impl Default for Config {
    fn default() -> Self {
        Config { capacity: 64, max_in_flight: 1024, wait_strategy: WaitStrategy::default() }
    }
}

impl Config {
    /// Bytes of memory that a network of so many nodes takes.
    pub fn bytes<Req, Resp, Token>(&self, nodes: usize) -> u64 {
        let lane = slots::lane_bytes::<Req, Resp>(self.capacity) + slots::book_bytes::<Token>(self.capacity);
        lane.saturating_mul(nodes).saturating_mul(nodes) as u64
    }
}

/// Makes a network. Node `i` of the vector is the one that others call as `i`.
///
/// # Errors
/// If a limit is exceeded, or the system cannot make threads park.
pub fn network<Req: Send, Resp: Send, Token>(
    nodes: usize,
    config: &Config,
) -> Result<Vec<Node<Req, Resp, Token>>, ConfigError> {
    static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
    let &Config { capacity, max_in_flight, wait_strategy } = config;
    if !(1..=MAX_NODES).contains(&nodes) {
        return Err(ConfigError::Nodes(nodes));
    }
    if !(1..=MAX_CAPACITY).contains(&capacity) {
        return Err(ConfigError::Capacity(capacity));
    }
    if max_in_flight == 0 {
        return Err(ConfigError::MaxInFlight);
    }
    let lanes = nodes * nodes;
    if slots::lane_bytes::<Req, Resp>(capacity).saturating_mul(lanes) > MAX_BYTES {
        return Err(ConfigError::TooLarge { nodes, capacity });
    }
    if wait_strategy != WaitStrategy::Spin {
        fence::register().map_err(ConfigError::Parking)?;
    }
    // Relaxed: nothing but the number matters.
    let first_key = NEXT_KEY.fetch_add(lanes as u64, Relaxed);
    let node = |(id, halves)| Node::new(id, halves, max_in_flight, wait_strategy);
    Ok(slots::lay(nodes, capacity, first_key).into_iter().enumerate().map(node).collect())
}
