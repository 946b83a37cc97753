//! copyrpc: RPC between two peers by RDMA WRITE with immediate into each other's receive ring.
//!
//! Each side of a connection has
//! - a receive ring, which only its peer writes to,
//! - a staging ring of the same size as the *peer's* receive ring, in which it builds what it will write,
//! - a [`Flow`], which decides what goes where. It does no I/O: its caller copies the bytes and posts the WRITEs.
//!
//! One WRITE carries a batch: flow metadata, then any number of messages. The immediate tells the receiver how many
//! bytes of its ring the batch took. `docs/wire-format.md` draws the bytes.
//!
//! ```text
//!        call, reply                        accept, next_message, retain, release
//!   caller ──────────> staging ring ═══WRITE+IMM═══> receive ring ──────────> callee
//!      next_write, write_posted   (same offsets, same size)
//!          <────────── receive ring <═══WRITE+IMM═══ staging ring <──────────
//! ```
//!
//! The following holds as long as both applications poll and release the messages that they retain:
//! - `in_flight + 2R <= C` on both sides ([`FlowState::invariant_holds`]). So there is always room for a reply, and two
//!   sides that call each other cannot block each other.
//! - The bytes of a message stay unchanged until the next message is asked for. A message that the application retains stays unchanged until
//!   it is released. Messages are released in any order.
//! - A call that was refused for lack of room or credit can be made later. Room is returned by the metadata of the peer's
//!   batches and by an RDMA READ of the peer's consumer position. Credit is returned by batches; if there is no other batch
//!   to carry it, by a batch of metadata alone. Two idle sides send nothing.
//! - Every byte from the peer is checked before it is used. A [`Violation`] ends this connection and no other.
//!
//! One duty is left to the application: while it retains a message, the ring space behind that message stays occupied, even
//! if newer messages were released. An application that calls its caller back while it handles a request should copy
//! the request first, or use large rings.
//!
//! One poll looks like this:
//!
//! ```
//! # use crosstie_protocol::copyrpc::*;
//! # let params = FlowParams { ring: 4096, peer_ring: 4096, credit_limit: 1024, peer_credit_limit: 1024, pending_calls: 4, compact: true };
//! # let (mut client, mut server) = (Flow::<&str>::new(&params)?, Flow::<()>::new(&params)?);
//! # let (mut staging, mut ring) = (vec![0u8; 4096], vec![0u8; 4096]);
//! // A call is written to the staging ring...
//! let (_, placement) = client.call(Content::Bytes, 5, 100, "attached").unwrap();
//! staging[placement.offset..][..12].copy_from_slice(&placement.header.encode());
//! staging[placement.payload_offset()..][..5].copy_from_slice(b"hello");
//! // ...and goes to the peer with the next poll.
//! while let Some(write) = client.next_write() {
//!     ring[write.offset..][..write.len].copy_from_slice(&write.bytes(&mut staging)); // the WRITE
//!     client.write_posted(&write);
//!     // The peer gets a completion with the immediate.
//!     server.accept(write.imm, ring.as_slice())?;
//!     while let Some(message) = server.next_message(ring.as_slice())? {
//!         let Message::Request { reply_token, offset, len, .. } = message else { continue };
//!         assert_eq!(&ring[offset..][..len], b"hello");
//!         let reply = server.reply(Content::Bytes, reply_token, 5).unwrap();
//! #       assert_eq!(reply.header.payload_len, 5);
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// Whether a test has turned this rule off, to show which failure the rule prevents. Always false outside of tests.
macro_rules! rule_broken {
    ($state:expr, $rule:ident) => {{
        #[cfg(test)]
        let broken = $state.broken_rule == Some(super::tests::BrokenRule::$rule);
        #[cfg(not(test))]
        let broken = false;
        broken
    }};
}

#[macro_use]
mod violation;

mod bulk;
mod flow;
mod message;
mod params;
mod pending_calls;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;
pub mod wire;
mod write;

pub use bulk::{
    BULK_NO_MEMORY, BULK_REQUEST_SIZE, BULK_RESPONSE_SIZE, BulkMemory, BulkRequest, BulkResponse, MAX_BULK,
    decode_bulk_response,
};
pub use flow::Flow;
pub use message::{Content, Message, Placement, ReplyToken, RingBytes};
pub use params::{FlowParams, FlowState, MAX_RING, MIN_RING, Progress};
pub use pending_calls::{CallId, MAX_PENDING_CALLS};
pub use receiver::RetainedSpace;
pub use violation::{CallRefused, FlowParamsError, Refusal, ReplyError, ReplyRefused, Violation};
pub use write::{Write, WriteKind};
