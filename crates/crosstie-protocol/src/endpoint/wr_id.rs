//! The `wr_id` of a work request: an integer that names its owner, never a pointer.
//!
//! ```text
//!  63  62 61   58 57      46 45         24 23          0
//! +------+-------+----------+-------------+-------------+
//! | kind |  qp   |   slot   | generation  |  position   |
//! +------+-------+----------+-------------+-------------+
//! ```
//!
//! The generation is that of the slot's lease. So a completion that arrives late or twice finds no slot. The position is that of the
//! request in its send queue, modulo 2^24: it tells requests of one slot apart.

use super::slots::{GENERATION_BITS, SLOT_BITS, SlotKey};

/// The most queue pairs of a connection.
pub const MAX_QPS: usize = 16;
/// Bits of a position.
pub const POSITION_BITS: u32 = 24;

/// What a work request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WorkKind {
    /// READ, WRITE or WRITE+IMM of an operation.
    Transfer = 0,
    /// The bytes of a `send`.
    MessageData = 1,
    /// A control message: an announced buffer, credit, a skipped message.
    Control = 2,
    /// A posted receive. The slot is its number; it has no generation.
    Receive = 3,
}

/// A `wr_id`, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WrId {
    /// What the request is for.
    pub kind: WorkKind,
    /// The queue pair, counted in its connection.
    pub qp: u8,
    /// The slot and the generation of its lease.
    pub slot: SlotKey,
    /// The position in the send queue, modulo 2^24.
    pub position: u32,
}

const GENERATION_SHIFT: u32 = POSITION_BITS;
const SLOT_SHIFT: u32 = GENERATION_SHIFT + GENERATION_BITS;
const QP_SHIFT: u32 = SLOT_SHIFT + SLOT_BITS;
const KIND_SHIFT: u32 = QP_SHIFT + 4;
const _: () = assert!(KIND_SHIFT + 2 == 64 && MAX_QPS == 1 << 4);

const fn field(bits: u64, shift: u32, width: u32) -> u32 {
    ((bits >> shift) & ((1 << width) - 1)) as u32
}

impl WrId {
    /// The integer. Fields are cut off at their width.
    #[inline]
    pub const fn encode(self) -> u64 {
        const fn at(value: u32, shift: u32, width: u32) -> u64 {
            ((value as u64) & ((1 << width) - 1)) << shift
        }
        (self.kind as u64) << KIND_SHIFT
            | at(self.qp as u32, QP_SHIFT, 4)
            | at(self.slot.index as u32, SLOT_SHIFT, SLOT_BITS)
            | at(self.slot.generation, GENERATION_SHIFT, GENERATION_BITS)
            | at(self.position, 0, POSITION_BITS)
    }

    /// Any integer is a `wr_id`; whether it names something is checked where it is used.
    #[inline]
    pub const fn decode(bits: u64) -> WrId {
        WrId {
            kind: match bits >> KIND_SHIFT {
                0 => WorkKind::Transfer,
                1 => WorkKind::MessageData,
                2 => WorkKind::Control,
                _ => WorkKind::Receive,
            },
            qp: field(bits, QP_SHIFT, 4) as u8,
            slot: SlotKey {
                index: field(bits, SLOT_SHIFT, SLOT_BITS) as u16,
                generation: field(bits, GENERATION_SHIFT, GENERATION_BITS),
            },
            position: field(bits, 0, POSITION_BITS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_integer_is_one_wr_id(bits in any::<u64>()) {
            prop_assert_eq!(WrId::decode(bits).encode(), bits);
        }
    }
}
