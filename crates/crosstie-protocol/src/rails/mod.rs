//! Messages over several rails: which bytes go over which rail, and when a message has arrived.
//!
//! A *rail* is a device at one end connected with a device at the other end. One end of a connection sends messages, the other
//! end receives them. The receiver posts a request (one buffer, or a group of up to [`MAX_GROUP`]) and tells the sender its
//! address with a [`ClearToSend`]. The sender decides how to split the message over the rails, and posts one WRITE with
//! immediate per rail that carries bytes. A rail without bytes sends nothing: the immediate names the rails in use, so the
//! receiver learns from the first arrival how many to expect.
//!
//! ```text
//!  receiver                                             sender
//!  post request -> message n, slot n % slots
//!       ---- ClearToSend (slot, n, address, size) ----->
//!                                                       split into parts, one per rail with bytes
//!       <--- rail 0: WRITE+IMM (slot, mask, generation, attempt 0) ---
//!       <--- rail 1: WRITE+IMM (the same immediate) ------------------
//!  seen == expected: done, size = sum of the parts
//! ```
//!
//! # Failover
//!
//! When a rail fails, the sender stops using it, names all parts that were under way on it in a [`FenceEntry`] list, and the
//! receiver closes its end of the rail. After that nothing can arrive on it any more. The receiver answers which of these parts
//! had arrived. The sender sends each other part again, over other rails, as a new *attempt*: attempt `k` of a message is its
//! `k`-th lost part. So both ends know how many attempts a message has, and no byte is sent again that has arrived.
//!
//! | file | contents |
//! | --- | --- |
//! | [`Immediate`] | the 32 bits of an immediate |
//! | [`ClearToSend`], [`Record`] | what peers write into each other's memory |
//! | [`Receiver`] | the receiver's table of requests |
//! | [`Sender`] | the sender's table of messages |
//! | [`split()`] | the decision how many bytes each rail gets |

mod immediate;
mod receiver;
mod sender;
mod split;
#[cfg(test)]
mod tests;
mod violation;
mod wire;

pub use immediate::Immediate;
pub use receiver::{Arrival, Receiver};
pub use sender::{Chunk, Part, PartState, SendError, Sender};
pub use split::{GRANULARITY, RailLoad, Rates, fixed_split, split};
pub use violation::Violation;
pub use wire::{CTS_LEN, ClearToSend, FenceEntry, RECORD_LEN, Record};

/// The most rails of a connection.
pub const MAX_RAILS: usize = 4;
/// The most buffers in one request.
pub const MAX_GROUP: usize = 8;
/// The most requests outstanding on a connection.
pub const MAX_SLOTS: usize = 256;
/// The most attempts of a message: one, and one for each part that was lost with its rail.
pub const MAX_ATTEMPTS: usize = 16;
/// The longest buffer of a request.
pub const MAX_MESSAGE: u64 = 1 << 30;

/// A set of rails: bit `r` is rail `r`.
pub type Mask = u8;

/// The rails of a mask, in ascending order.
pub fn rails_of(mask: Mask) -> impl Iterator<Item = usize> {
    (0..MAX_RAILS).filter(move |rail| mask & (1 << rail) != 0)
}

/// The rail that writes the completion record: the lowest rail of the mask.
pub fn leader(mask: Mask) -> Option<usize> {
    (mask != 0).then(|| mask.trailing_zeros() as usize)
}
