//! Bytes and immediates of two-sided messages.
//!
//! A receiver announces each buffer with a [control message](Control). The sender writes the bytes straight into the buffer, with
//! one WRITE+IMM on each queue pair that carries a part, and the [immediate](DataImm) says which buffer it was. Control messages are
//! WRITE+IMMs, too: into a piece of the receiver's memory, which the [immediate](control_imm) names.
//!
//! ```text
//!  control message, 32 bytes, little-endian
//!   0       1       4              8                   16                  24             28             32
//!  +-------+-------+--------------+-------------------+-------------------+--------------+--------------+
//!  | kind  |   0   | slot or      |  address          |  length           |  rkey        |  sequence    |
//!  |       |       | granted      |                   |                   |              |              |
//!  +-------+-------+--------------+-------------------+-------------------+--------------+--------------+
//!
//!  immediate of the data
//!   31          24 23                12 11               0
//!  +--------------+--------------------+------------------+
//!  |  parts       |  generation        |  slot            |     parts: bit i is set if queue pair i carries a part
//!  +--------------+--------------------+------------------+
//!
//!  immediate of a control message
//!  +--------------+--------------------+------------------+
//!  |  0           |  0                 |  piece           |     a message has at least one part
//!  +--------------+--------------------+------------------+
//! ```
//!
//! Promise: decoding is total. Any bytes decode to a message that a correct peer could have sent, or to a [`Violation`].

use super::slots::{SLOT_BITS, SlotKey};

/// Bytes of a control message.
pub const CONTROL_SIZE: usize = 32;
/// The longest message: 2^40 bytes.
pub const MAX_MESSAGE: u64 = 1 << 40;
/// The most queue pairs that carry parts of one message.
pub const MAX_PARTS: usize = 8;
/// The most withdrawals of one side that the other side has not answered.
pub const MAX_WITHDRAWALS: u16 = 8;
/// Bits of the generation in an immediate.
const IMM_GENERATION_BITS: u32 = 12;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
const GENERATION_MASK: u32 = (1 << IMM_GENERATION_BITS) - 1;
const _: () = assert!(SLOT_BITS + IMM_GENERATION_BITS + MAX_PARTS as u32 == 32);

/// What a peer did that no correct peer does. The connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A control message has the wrong length, an unknown kind, or bytes that must be zero.
    #[error("a control message is malformed")]
    Malformed,
    /// An announced buffer is longer than any message, or wraps around the address space.
    #[error("an announced buffer is longer than {MAX_MESSAGE} bytes, or wraps around the address space")]
    Buffer,
    /// A buffer was announced out of order.
    #[error("buffer {found} was announced, but number {expected} is next")]
    Sequence {
        /// The number that is next.
        expected: u32,
        /// The number in the message.
        found: u32,
    },
    /// More buffers were announced than the peer may have announced.
    #[error("more than {limit} buffers were announced")]
    TooManyBuffers {
        /// The limit.
        limit: u32,
    },
    /// An immediate names no buffer that was announced, or a queue pair that carries no part of it.
    #[error("an immediate names no announced buffer: {imm:#010x}")]
    UnknownBuffer {
        /// The immediate.
        imm: u32,
    },
    /// More bytes arrived for a buffer than it has.
    #[error("{bytes} bytes arrived for a buffer of {limit} bytes")]
    Overflow {
        /// Bytes that arrived.
        bytes: u64,
        /// Length of the buffer.
        limit: u64,
    },
    /// Credit for more immediates than the window has.
    #[error("credit for more immediates than the window of {window} has")]
    Credit {
        /// The window.
        window: u32,
    },
    /// More immediates arrived than the peer had credit for.
    #[error("more immediates arrived than the window of {window} allows")]
    Window {
        /// The window.
        window: u32,
    },
    /// A withdrawal was answered that was not made, or more than [`MAX_WITHDRAWALS`] were made at a time.
    #[error(
        "a withdrawal was answered that was not made, or more than {MAX_WITHDRAWALS} were made at a time"
    )]
    Withdrawal,
    /// The address of the peer is malformed.
    #[error("the peer's address is malformed")]
    Address,
    /// The address of the peer has another version of the protocol.
    #[error(
        "the peer uses endpoint version {found}, this side version {expected}: both sides need the same release"
    )]
    Version {
        /// The version of this side.
        expected: u8,
        /// The version of the peer.
        found: u8,
    },
}

/// A slot in an immediate: its index, and the lower bits of the generation of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireSlot(u32);

impl WireSlot {
    /// The slot of this lease.
    pub const fn new(key: SlotKey) -> WireSlot {
        WireSlot((key.generation & GENERATION_MASK) << SLOT_BITS | key.index as u32 & SLOT_MASK)
    }

    /// The slot with these bits, of which only the lower 24 are used.
    pub const fn from_bits(bits: u32) -> WireSlot {
        WireSlot(bits & (GENERATION_MASK << SLOT_BITS | SLOT_MASK))
    }

    /// As an integer of 24 bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Index of the slot.
    pub const fn index(self) -> u16 {
        (self.0 & SLOT_MASK) as u16
    }

    /// Whether it names this lease.
    pub const fn is(self, key: SlotKey) -> bool {
        self.0 == WireSlot::new(key).0
    }
}

/// The immediate of a part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DataImm {
    /// The buffer.
    pub slot: WireSlot,
    /// Which queue pairs carry parts: bit i for queue pair i.
    pub parts: u8,
}

impl DataImm {
    /// The immediate.
    pub const fn encode(self) -> u32 {
        (self.parts as u32) << 24 | self.slot.0
    }

    /// Any immediate decodes; whether it names a buffer is checked where it is used.
    pub const fn decode(imm: u32) -> DataImm {
        DataImm { slot: WireSlot::from_bits(imm), parts: (imm >> 24) as u8 }
    }
}

/// The most pieces of memory for control messages.
pub const MAX_CONTROL_PIECES: u16 = 1 << SLOT_BITS;

/// The immediate of a control message in this piece of memory.
#[inline]
pub const fn control_imm(piece: u16) -> u32 {
    piece as u32 & SLOT_MASK
}

/// The piece of memory with the control message that has this immediate. `None`: it is the immediate of something else.
#[inline]
pub const fn control_piece(imm: u32) -> Option<u16> {
    if imm <= SLOT_MASK { Some(imm as u16) } else { None }
}

/// A buffer that the peer has announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AnnouncedBuffer {
    /// The peer's slot, which goes into the immediate.
    pub slot: WireSlot,
    /// Address in the peer's memory.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Key of the peer's region.
    pub rkey: u32,
    /// The number of the buffer on this connection, from zero, wrapping.
    pub sequence: u32,
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// The next `send` may write into this buffer.
    Buffer(AnnouncedBuffer),
    /// The peer may have sent so many immediates since the connection began, wrapping.
    ImmCredit(u32),
    /// The peer closes the connection.
    Close,
    /// The `recv` of this buffer has ended: no message is to take the buffer, unless one has. The answer is one of the next two.
    Withdraw(WireSlot),
    /// No message had taken the buffer, and none will.
    Withdrawn(WireSlot),
    /// A message had taken the buffer: it is on its way, or has arrived.
    Taken(WireSlot),
}

impl Control {
    /// Encodes the message.
    #[inline]
    pub fn encode(&self) -> [u8; CONTROL_SIZE] {
        let mut bytes = [0; CONTROL_SIZE];
        match *self {
            Control::Buffer(buffer) => {
                bytes[0] = 1;
                bytes[4..8].copy_from_slice(&buffer.slot.0.to_le_bytes());
                bytes[8..16].copy_from_slice(&buffer.addr.to_le_bytes());
                bytes[16..24].copy_from_slice(&buffer.len.to_le_bytes());
                bytes[24..28].copy_from_slice(&buffer.rkey.to_le_bytes());
                bytes[28..32].copy_from_slice(&buffer.sequence.to_le_bytes());
            }
            Control::ImmCredit(granted) => {
                bytes[0] = 2;
                bytes[4..8].copy_from_slice(&granted.to_le_bytes());
            }
            Control::Close => bytes[0] = 3,
            Control::Withdraw(slot) => bytes[..8].copy_from_slice(&about_slot(4, slot)),
            Control::Withdrawn(slot) => bytes[..8].copy_from_slice(&about_slot(5, slot)),
            Control::Taken(slot) => bytes[..8].copy_from_slice(&about_slot(6, slot)),
        }
        bytes
    }

    /// Decodes a message of `len` bytes.
    #[inline]
    pub fn decode(bytes: &[u8; CONTROL_SIZE], len: u32) -> Result<Control, Violation> {
        if len as usize != CONTROL_SIZE {
            return Err(Violation::Malformed);
        }
        let [head, addr, buffer_len, last] = words(bytes);
        let (kind, value) = (head as u32, (head >> 32) as u32);
        // Every message has one encoding: bytes without a meaning are zero, also those beside the kind.
        let is_short = addr | buffer_len | last == 0;
        match kind {
            1 => {
                let slot = WireSlot::from_bits(value);
                if slot.bits() != value {
                    return Err(Violation::Malformed);
                }
                if buffer_len > MAX_MESSAGE || addr.checked_add(buffer_len).is_none() {
                    return Err(Violation::Buffer);
                }
                let (rkey, sequence) = (last as u32, (last >> 32) as u32);
                Ok(Control::Buffer(AnnouncedBuffer { slot, addr, len: buffer_len, rkey, sequence }))
            }
            2 if is_short => Ok(Control::ImmCredit(value)),
            3 if is_short && value == 0 => Ok(Control::Close),
            4..=6 if is_short && WireSlot::from_bits(value).bits() == value => {
                let slot = WireSlot(value);
                Ok(match kind {
                    4 => Control::Withdraw(slot),
                    5 => Control::Withdrawn(slot),
                    _ => Control::Taken(slot),
                })
            }
            _ => Err(Violation::Malformed),
        }
    }
}

/// The first bytes of a control message that has only a slot.
fn about_slot(kind: u8, slot: WireSlot) -> [u8; 8] {
    (u64::from(slot.0) << 32 | u64::from(kind)).to_le_bytes()
}

/// A control message as four little-endian words.
#[inline]
fn words(bytes: &[u8; CONTROL_SIZE]) -> [u64; CONTROL_SIZE / 8] {
    let (words, _) = bytes.as_chunks::<8>();
    core::array::from_fn(|at| u64::from_le_bytes(words[at]))
}

/// The parts of a message that have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArrivedParts {
    expected: u8,
    arrived: u8,
    bytes: u64,
}

impl ArrivedParts {
    /// Adds a part that arrived on queue pair `qp` with this immediate, for a buffer of `limit` bytes. Returns the length of the
    /// message when it is the last part.
    #[inline]
    pub fn arrive(&mut self, imm: DataImm, qp: u8, bytes: u32, limit: u64) -> Result<Option<u64>, Violation> {
        let unknown = Violation::UnknownBuffer { imm: imm.encode() };
        let bit = 1u8.checked_shl(qp.into()).unwrap_or(0);
        if imm.parts & bit == 0 || self.arrived & bit != 0 {
            return Err(unknown);
        }
        if self.arrived == 0 {
            self.expected = imm.parts;
        } else if self.expected != imm.parts {
            return Err(unknown);
        }
        self.arrived |= bit;
        self.bytes += u64::from(bytes);
        if self.bytes > limit {
            return Err(Violation::Overflow { bytes: self.bytes, limit });
        }
        Ok((self.arrived == self.expected).then_some(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_does_not_change() {
        let slot = WireSlot::new(SlotKey { index: 5, generation: 0x1002 });
        let buffer = AnnouncedBuffer { slot, addr: 0x0102_0304_0506_0708, len: 9, rkey: 10, sequence: 11 };
        let bytes = Control::Buffer(buffer).encode();
        assert_eq!(bytes[..16], [1, 0, 0, 0, 5, 0x20, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[16..], [9, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 11, 0, 0, 0]);
        assert_eq!(DataImm { slot, parts: 3 }.encode(), 0x0300_2005);
        assert_eq!(Control::ImmCredit(7).encode()[..8], [2, 0, 0, 0, 7, 0, 0, 0]);
        for (kind, control) in
            [(4, Control::Withdraw(slot)), (5, Control::Withdrawn(slot)), (6, Control::Taken(slot))]
        {
            assert_eq!(control.encode()[..8], [kind, 0, 0, 0, 5, 0x20, 0, 0]);
            assert_eq!(Control::decode(&control.encode(), CONTROL_SIZE as u32), Ok(control));
        }
    }

    #[test]
    fn parts_arrive_once_each_and_on_their_queue_pair() {
        let slot = WireSlot::new(SlotKey { index: 5, generation: 2 });
        let imm = DataImm { slot, parts: 0b101 };
        let unknown = Err(Violation::UnknownBuffer { imm: imm.encode() });
        let mut parts = ArrivedParts::default();
        assert_eq!(parts.arrive(imm, 1, 8, 100), unknown, "no part of it");
        assert_eq!(parts.arrive(imm, 2, 8, 100), Ok(None));
        assert_eq!(parts.arrive(imm, 2, 8, 100), unknown, "twice");
        let other = DataImm { slot, parts: 0b001 };
        assert_eq!(parts.arrive(other, 0, 8, 100), Err(Violation::UnknownBuffer { imm: other.encode() }));
        assert_eq!(parts.arrive(imm, 0, 92, 100), Ok(Some(100)));
        let mut parts = ArrivedParts::default();
        let one = DataImm { slot, parts: 1 };
        assert_eq!(parts.arrive(one, 0, 101, 100), Err(Violation::Overflow { bytes: 101, limit: 100 }));
        assert_eq!(
            ArrivedParts::default().arrive(one, 200, 1, 100),
            Err(Violation::UnknownBuffer { imm: one.encode() })
        );
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_message_or_a_violation(
            bytes in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => 1u8..7, 1 => any::<u8>()], 32), len in 0u32..64,
        ) {
            let bytes: [u8; 32] = bytes.try_into().unwrap();
            if let Ok(message) = Control::decode(&bytes, len) {
                prop_assert_eq!(message.encode(), bytes, "each message has exactly one encoding");
                prop_assert_eq!(len, 32);
            }
        }

        #[test]
        fn messages_survive_encode_and_decode(slot in any::<u32>(), addr in any::<u32>(), len in 0..=MAX_MESSAGE, rkey in any::<u32>(), sequence in any::<u32>()) {
            let buffer = AnnouncedBuffer { slot: WireSlot::from_bits(slot), addr: addr.into(), len, rkey, sequence };
            let withdrawals = [Control::Withdraw, Control::Withdrawn, Control::Taken].map(|control| control(buffer.slot));
            for message in [Control::Buffer(buffer), Control::ImmCredit(rkey), Control::Close].into_iter().chain(withdrawals) {
                prop_assert_eq!(Control::decode(&message.encode(), 32), Ok(message));
            }
            let imm = DataImm { slot: WireSlot::from_bits(slot), parts: rkey as u8 };
            prop_assert_eq!(DataImm::decode(imm.encode()), imm);
        }
    }
}
