//! copyrpc: calls between two sides by WRITE with immediate into each other's receive ring.
//!
//! Each side has a receive ring that its peer alone writes to, a staging ring of the *peer's* ring's size where it
//! builds what it will write, and an [`Endpoint`] that says what goes where. Many messages travel in one WRITE: a batch
//! of flow metadata and messages. The immediate says how far the ring was filled. `docs/wire-format.md` draws the bytes.
//!
//! ```text
//!        call, reply                          arrive, next, release
//!   caller ──────────> staging ring ═══WRITE+IMM═══> receive ring ──────────> callee
//!            emit, posted   (same offsets, same size)
//!          <────────── receive ring <═══WRITE+IMM═══ staging ring <──────────
//! ```
//!
//! What holds, whatever the two applications do, as long as both poll and release what they took:
//! - `in_flight + 2R <= C` on both sides ([`Ledger::holds`]): a reply always has room, so two sides that call each other
//!   cannot block each other.
//! - A byte of a message stays until the application releases it, in any order.
//! - A call that was refused can be made later. Room comes back by the metadata of the peer's batches and by READ
//!   of its consumer position; credit comes back by a batch of metadata alone if no other batch brings it. Two idle sides
//!   send nothing.
//! - Bytes of the peer are checked before they are believed; a [`Violation`] ends this connection and no other.
//!
//! One thing is the application's: while it keeps a message, the ring behind it stays taken, also if newer messages were
//! released. Who calls its caller back from within a request copies the request first, or keeps rings large.
//!
//! A poll is:
//!
//! ```
//! # use crosstie_protocol::copyrpc::*;
//! # let terms = Terms { ring: 4096, peer_ring: 4096, credit_limit: 1024, peer_credit_limit: 1024, pending_calls: 4 };
//! # let (mut client, mut server) = (Endpoint::<&str>::new(&terms)?, Endpoint::<()>::new(&terms)?);
//! # let (mut staging, mut ring) = (vec![0u8; 4096], vec![0u8; 4096]);
//! // A call goes to the staging ring…
//! let (_, placed) = client.call(5, 100, "attached").unwrap();
//! staging[placed.offset..][..12].copy_from_slice(&placed.header.encode());
//! staging[placed.payload_offset()..][..5].copy_from_slice(b"hello");
//! // …and with the next poll to the peer.
//! while let Some(emit) = client.emit() {
//!     staging[emit.offset..][..32].copy_from_slice(&emit.metadata.encode());
//!     ring[emit.offset..][..emit.len].copy_from_slice(&staging[emit.offset..][..emit.len]); // the WRITE
//!     client.posted();
//!     // The other side has a completion with the immediate.
//!     server.arrive(emit.imm, ring.as_slice())?;
//!     while let Some(arrival) = server.next(ring.as_slice())? {
//!         let Arrival::Request(request) = arrival else { continue };
//!         assert_eq!(&ring[request.offset..][..request.len], b"hello");
//!         assert!(server.release(request.held));
//!         let reply = server.reply(request.owed, 5).unwrap();
//! #       assert_eq!(reply.header.payload_len, 5);
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// Whether a test has reopened a trap on purpose, to show what the rule beside it is for. Never outside of tests.
macro_rules! reopened {
    ($state:expr, $trap:ident) => {{
        #[cfg(test)]
        let reopened = $state.trap == Some(super::tests::Trap::$trap);
        #[cfg(not(test))]
        let reopened = false;
        reopened
    }};
}

mod bulk;
mod endpoint;
mod pending;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;
mod violation;
pub mod wire;

pub use bulk::{
    BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkMemory, BulkRequest, MAX_BULK, decode_bulk_response,
};
pub use endpoint::{Arrival, Endpoint, Ledger, Owed, Placed, Progress, Request, Response, Terms, Undone};
pub use pending::{CallId, MAX_PENDING};
pub use receiver::Held;
pub use violation::{Refusal, ReplyError, TermsError, Violation};

/// The smallest receive ring: a quarter of it is credit for one empty response (or one of up to 20 bytes), half of it
/// takes one request of up to 20 bytes wherever the ring's end is.
pub const MIN_RING: u64 = 256;
/// The largest receive ring. Lengths of work requests have 32 bits.
pub const MAX_RING: u64 = 1 << 31;

/// Memory that headers and metadata are loaded from. The endpoint loads each once, checks it, and never looks again.
pub trait RingBytes {
    /// `N` bytes from `offset`. The endpoint stays within the ring that its terms name.
    fn load<const N: usize>(&self, offset: usize) -> [u8; N];
}

impl RingBytes for [u8] {
    #[inline]
    fn load<const N: usize>(&self, offset: usize) -> [u8; N] {
        let bytes = &self[offset..offset + N];
        core::array::from_fn(|i| bytes[i])
    }
}

/// One WRITE with immediate to post: `len` bytes from `offset` of the staging ring to `offset` of the peer's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Emit {
    /// In both rings.
    pub offset: usize,
    /// Bytes to write; of a wrap marker 32, however much it skips.
    pub len: usize,
    /// The immediate.
    pub imm: u32,
    /// To be encoded to `offset` of the staging ring first.
    pub metadata: wire::FlowMetadata,
    /// For counters.
    pub kind: EmitKind,
}

/// What a WRITE carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EmitKind {
    /// Messages.
    Batch,
    /// The marker that skips the ring's end.
    Wrap,
    /// Metadata alone.
    Credit,
}
