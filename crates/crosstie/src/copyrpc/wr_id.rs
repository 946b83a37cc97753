//! The `wr_id` of a work request: which connection posted it, and what it was.
//!
//! ```text
//! bits 63..34: key of the operation   bits 33..2: key of the connection   bits 1..0: kind
//! ```
//!
//! Both keys are an index with a generation. So a completion that arrives late or twice finds nothing.

/// What a work request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendKind {
    /// A batch, or a payload that was posted directly.
    Batch,
    /// A READ of the peer's consumer position.
    PositionRead,
    /// The operation with this key, see [`operation`](super::operation).
    Operation(u32),
}

/// The `wr_id` of a work request of the connection with this key.
pub(super) fn encode_wr_id(connection: u32, kind: SendKind) -> u64 {
    u64::from(connection) << 2
        | match kind {
            SendKind::Batch => 0,
            SendKind::PositionRead => 1,
            SendKind::Operation(operation) => u64::from(operation) << 34 | 2,
        }
}

/// The connection's key and the kind in a `wr_id`.
pub(super) fn decode_wr_id(wr_id: u64) -> (u32, SendKind) {
    let kind = match wr_id & 3 {
        0 => SendKind::Batch,
        1 => SendKind::PositionRead,
        _ => SendKind::Operation((wr_id >> 34) as u32),
    };
    ((wr_id >> 2) as u32, kind)
}
