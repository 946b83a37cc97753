//! What the 32-bit immediate of a WRITE with immediate says, on a connection between two members: a barrier packet that fits into it, or
//! that the bytes of the WRITE are a packet.
//!
//! ```text
//!   31 30   29        24   23                    0
//!  +-------+------------+------------------------+
//!  | kind  | barrier    | round, lowest 24 bits  |      kind: 1 arrive, 2 release, 3 packet (all other bits 0)
//!  +-------+------------+------------------------+
//! ```
//!
//! The connection itself says which group and member the packet comes from. The receiver knows the round to within one, so 24 bits
//! of it are enough.

use super::control::Control;

const ARRIVE: u32 = 1;
const RELEASE: u32 = 2;
const ROUND_BITS: u32 = 24;

/// The immediate of a WRITE whose bytes are a lock or barrier packet with its header.
pub const PACKET_IMMEDIATE: u32 = 3 << 30;

impl Control {
    /// The packet as an immediate, if it has that form.
    ///
    /// ```
    /// use crosstie_protocol::group::Control;
    /// let packet = Control::BarrierArrive { barrier: 3, round: 0x1_0000_0001 };
    /// let immediate = packet.to_immediate().unwrap();
    /// assert_eq!(Control::from_immediate(immediate, |_| Some(0x1_0000_0000)), Some(packet));
    /// ```
    #[inline]
    pub fn to_immediate(&self) -> Option<u32> {
        let (kind, barrier, round) = match *self {
            Control::BarrierArrive { barrier, round } => (ARRIVE, barrier, round),
            Control::BarrierRelease { barrier, round, active: None } => (RELEASE, barrier, round),
            _ => return None,
        };
        (barrier < 64).then_some(kind << 30 | barrier << ROUND_BITS | round as u32 & ((1 << ROUND_BITS) - 1))
    }

    /// The packet that an immediate stands for. `ended` gives the last round of a barrier that has ended here; `None` for a
    /// barrier that the group does not have.
    #[inline]
    pub fn from_immediate(immediate: u32, ended: impl FnOnce(u32) -> Option<u64>) -> Option<Control> {
        let barrier = immediate >> ROUND_BITS & 63;
        let ended = ended(barrier)?;
        // The round nearest to `ended` that has these lowest bits.
        let ahead = immediate.wrapping_sub(ended as u32) << (32 - ROUND_BITS);
        let round = ended.checked_add_signed(i64::from(ahead as i32 >> (32 - ROUND_BITS)))?;
        match immediate >> 30 {
            ARRIVE => Some(Control::BarrierArrive { barrier, round }),
            RELEASE => Some(Control::BarrierRelease { barrier, round, active: None }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn immediate_keeps_every_round_near_the_current_one(
            barrier in 0u32..64, ended in 0u64..u64::MAX / 2, ahead in -1000i64..1000, release: bool
        ) {
            let round = ended.saturating_add_signed(ahead);
            let packet = if release {
                Control::BarrierRelease { barrier, round, active: None }
            } else {
                Control::BarrierArrive { barrier, round }
            };
            let immediate = packet.to_immediate().unwrap();
            prop_assert_eq!(Control::from_immediate(immediate, |asked| (asked == barrier).then_some(ended)), Some(packet));
            prop_assert_eq!(Control::from_immediate(immediate, |_| None), None);
        }

        #[test]
        fn any_immediate_is_a_packet_or_refused(immediate: u32, ended: u64) {
            if let Some(packet) = Control::from_immediate(immediate, |_| Some(ended)) {
                prop_assert_eq!(packet.to_immediate(), Some(immediate));
            }
        }
    }
}
