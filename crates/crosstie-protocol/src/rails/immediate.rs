//! The immediate of a part.

use super::Mask;

/// The 32 bits of an immediate.
///
/// ```text
///  31          17  16     15      12 11     8 7        0
/// +---------------+------+----------+--------+----------+
/// |  generation   |staged| attempt  |  mask  |   slot   |
/// +---------------+------+----------+--------+----------+
/// ```
///
/// ```
/// use crosstie_protocol::rails::Immediate;
/// let imm = Immediate { slot: 200, mask: 0b11, attempt: 3, staged: false, generation: 77 };
/// assert_eq!(Immediate::from_bits(imm.bits()), imm);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate {
    /// The slot of the message.
    pub slot: u8,
    /// The rails that carry a part in this attempt.
    pub mask: Mask,
    /// The attempt, see the [module documentation](super).
    pub attempt: u8,
    /// Whether the bytes are in the receiver's staging memory and not in the buffer of the request.
    pub staged: bool,
    /// How often the slot was used before this message, modulo [`Immediate::GENERATIONS`].
    pub generation: u16,
}

impl Immediate {
    /// A generation repeats after so many uses of its slot.
    pub const GENERATIONS: u64 = 1 << 15;

    /// The generation of message `message` on a connection with `slots` slots.
    #[inline]
    pub fn generation_of(message: u64, slots: usize) -> u16 {
        // `slots` is a power of two.
        ((message >> slots.trailing_zeros()) % Self::GENERATIONS) as u16
    }

    /// The immediate as an integer.
    #[inline]
    pub fn bits(self) -> u32 {
        u32::from(self.slot)
            | u32::from(self.mask & 15) << 8
            | u32::from(self.attempt & 15) << 12
            | u32::from(self.staged) << 16
            | u32::from(self.generation) << 17
    }

    /// The immediate with these bits. Every value is valid here; [`Receiver::arrive`](super::Receiver::arrive) checks it.
    #[inline]
    pub fn from_bits(bits: u32) -> Immediate {
        Immediate {
            slot: bits as u8,
            mask: (bits >> 8) as u8 & 15,
            attempt: (bits >> 12) as u8 & 15,
            staged: bits >> 16 & 1 != 0,
            generation: (bits >> 17) as u16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_immediate_survives_encoding() {
        for slot in [0, 1, 255] {
            for mask in 0..16 {
                for attempt in 0..16 {
                    for (staged, generation) in [(false, 0), (true, 1), (false, 0x7fff), (true, 0x5555)] {
                        let imm = Immediate { slot, mask, attempt, staged, generation };
                        assert_eq!(Immediate::from_bits(imm.bits()), imm);
                    }
                }
            }
        }
        assert_eq!(Immediate::from_bits(u32::MAX).bits(), u32::MAX);
    }
}
