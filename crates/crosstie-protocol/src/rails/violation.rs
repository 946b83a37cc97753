//! What a peer can do wrong.

use super::Mask;

/// A peer violated the protocol. The connection ends; nothing that the peer sent wrongly reaches a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// An immediate names a slot without an outstanding request.
    #[error("an immediate arrived on rail {rail} for slot {slot}, which has no request")]
    UnknownSlot {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
    },
    /// An immediate belongs to an earlier use of its slot.
    #[error(
        "a late immediate arrived on rail {rail} for slot {slot}: its generation is {got}, the request's is {expected}"
    )]
    Late {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
        /// The generation in the immediate.
        got: u16,
        /// The generation of the request.
        expected: u16,
    },
    /// The same part arrived twice, or after its rail was closed.
    #[error("attempt {attempt} of slot {slot} arrived twice on rail {rail}")]
    Duplicate {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
        /// The attempt.
        attempt: u8,
    },
    /// A mask is empty, names a rail that does not exist or not the rail on which it arrived, or differs from the mask of an
    /// earlier arrival.
    #[error("slot {slot}: an immediate on rail {rail} has the invalid mask {mask:#06b}")]
    BadMask {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
        /// The mask.
        mask: Mask,
    },
    /// An attempt that no lost part explains.
    #[error("slot {slot}: attempt {attempt} arrived on rail {rail}, but only {lost} parts were lost")]
    BadAttempt {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
        /// The attempt.
        attempt: u8,
        /// Lost parts of the message.
        lost: u8,
    },
    /// More bytes than the request has room for, or sizes that do not match their record.
    #[error("slot {slot}: {got} bytes arrived, but the request has room for {room}")]
    TooLong {
        /// The slot.
        slot: u8,
        /// Bytes that arrived.
        got: u64,
        /// Bytes of the request.
        room: u64,
    },
    /// The completion record of a group does not belong to the message.
    #[error("slot {slot}: the completion record of the group is invalid")]
    BadRecord {
        /// The slot.
        slot: u8,
    },
    /// A fence names parts that cannot exist.
    #[error("the fence of rail {rail} names slot {slot}, generation {generation}, which is not under way")]
    BadFence {
        /// The rail.
        rail: usize,
        /// The slot.
        slot: u8,
        /// The generation.
        generation: u16,
    },
    /// A clear-to-send has impossible contents.
    #[error("message {message}: the peer's clear-to-send is invalid: {what}")]
    BadClearToSend {
        /// The message.
        message: u64,
        /// What is wrong.
        what: &'static str,
    },
}

impl Violation {
    /// The number of kinds.
    pub const KINDS: usize = 9;
    /// The names of the kinds, in the order of [`Violation::kind`].
    pub const NAMES: [&'static str; Violation::KINDS] = [
        "unknown_slot",
        "late",
        "duplicate",
        "bad_mask",
        "bad_attempt",
        "too_long",
        "bad_record",
        "bad_fence",
        "bad_clear_to_send",
    ];

    /// The number of this kind, for counters.
    pub fn kind(&self) -> usize {
        match self {
            Violation::UnknownSlot { .. } => 0,
            Violation::Late { .. } => 1,
            Violation::Duplicate { .. } => 2,
            Violation::BadMask { .. } => 3,
            Violation::BadAttempt { .. } => 4,
            Violation::TooLong { .. } => 5,
            Violation::BadRecord { .. } => 6,
            Violation::BadFence { .. } => 7,
            Violation::BadClearToSend { .. } => 8,
        }
    }
}
