//! What both sides must know before the first batch, and the figures that the flow control can be asked for.

use super::MAX_PENDING_CALLS;
use super::violation::FlowParamsError;
use super::wire::{self, ALIGNMENT};

/// The smallest receive ring. A quarter of it is credit for one response of up to 20 bytes; half of it takes one request of
/// up to 20 bytes, wherever the end of the ring is.
pub const MIN_RING: u64 = 256;
/// The largest receive ring. Lengths of work requests have 32 bits.
pub const MAX_RING: u64 = 1 << 31;
/// The smallest credit limit: one empty response and the metadata in front of it.
pub(super) const MIN_CREDIT: u64 = wire::call_credit(0);

/// The sizes that a side must know before the first batch: its own and those of its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowParams {
    /// Bytes of this side's receive ring.
    pub ring: u64,
    /// Bytes of the peer's receive ring.
    pub peer_ring: u64,
    /// The most response credit that this side grants.
    pub credit_limit: u64,
    /// The most response credit that the peer grants, as the peer announced it.
    pub peer_credit_limit: u64,
    /// The most calls of this side that can be pending.
    pub pending_calls: usize,
    /// Whether this side sends a short message that is alone in its batch as a compact batch. The two sides need not agree.
    pub compact: bool,
}

impl FlowParams {
    pub(super) fn check(&self) -> Result<(), FlowParamsError> {
        for size in [self.ring, self.peer_ring] {
            if !size.is_power_of_two() || !(MIN_RING..=MAX_RING).contains(&size) {
                return Err(FlowParamsError::RingSize { size });
            }
        }
        for limit in [self.credit_limit, self.peer_credit_limit] {
            if limit < MIN_CREDIT {
                return Err(FlowParamsError::CreditLimit { limit });
            }
        }
        if !(1..=MAX_PENDING_CALLS).contains(&self.pending_calls) {
            return Err(FlowParamsError::PendingCalls { calls: self.pending_calls });
        }
        Ok(())
    }
}

/// The credit that a side with limit `granter_limit` grants to a peer whose receive ring has `ring` bytes. It is at most a
/// quarter of that ring, because the responses go there: half of the ring is left for calls. Both sides compute it
/// from the same two numbers.
pub(super) fn agreed_credit(granter_limit: u64, ring: u64) -> u64 {
    granter_limit.min(ring / 4) & !(ALIGNMENT - 1)
}

/// Positions in the peer's ring, in bytes since the connection began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// End of the last message that was placed.
    pub placed: u64,
    /// End of the last batch that was posted.
    pub posted: u64,
    /// The peer's consumer position, as far as this side knows it.
    pub released: u64,
}

/// Figures of the flow control, for counters and checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowState {
    /// Bytes written to the peer's ring, or about to be, that the peer has not released as far as this side knows.
    pub in_flight: u64,
    /// R: what this side has granted to the peer and not got back.
    pub credit_granted: u64,
    /// C: bytes of the peer's ring.
    pub capacity: u64,
    /// What the peer has granted to this side and no pending call uses.
    pub credit_available: u64,
    /// Calls of this side that wait for their response.
    pub pending: usize,
}

impl FlowState {
    /// The invariant of the protocol: `in_flight + 2R <= C`.
    pub fn invariant_holds(&self) -> bool {
        self.in_flight + 2 * self.credit_granted <= self.capacity
    }
}
