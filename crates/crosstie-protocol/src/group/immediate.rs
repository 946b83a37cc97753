//! What the 32-bit immediate of a WRITE with immediate says, on a connection between two members: a barrier packet that fits into it, or
//! that the bytes of the WRITE are a packet.
//!
//! ```text
//!   31 30   29        24   23                   16   15                    0
//!  +-------+------------+-----------------------+------------------------+
//!  | kind  | barrier    | view, lowest 8 bits   | round, lowest 16 bits  |      kind: 1 arrive, 2 release, 3 packet (all other bits 0)
//!  +-------+------------+-----------------------+------------------------+
//! ```
//!
//! The connection itself says which group and member the packet comes from. The receiver knows the round to within one, so 16 bits
//! of it are enough. It has accepted every view of which it is a member before anybody installs it, so the view is the newest that it has
//! accepted with these bits.

use super::control::Control;

const ARRIVE: u32 = 1;
const RELEASE: u32 = 2;
const ROUND_BITS: u32 = 16;
const BARRIER_SHIFT: u32 = 24;

/// The immediate of a WRITE whose bytes are a lock or barrier packet with its header.
pub const PACKET_IMMEDIATE: u32 = 3 << 30;

impl Control {
    /// The packet as an immediate, if it has that form.
    ///
    /// ```
    /// use crosstie_protocol::group::Control;
    /// let packet = Control::BarrierArrive { barrier: 3, round: 0x1_0000_0001 };
    /// let immediate = packet.to_immediate(2).unwrap();
    /// assert_eq!(Control::from_immediate(immediate, 3, |_| Some(0x1_0000_0000)), Some((2, packet)));
    /// ```
    #[inline]
    pub fn to_immediate(&self, view: u16) -> Option<u32> {
        let (kind, barrier, round) = match *self {
            Control::BarrierArrive { barrier, round } => (ARRIVE, barrier, round),
            Control::BarrierRelease { barrier, round, active: None } => (RELEASE, barrier, round),
            _ => return None,
        };
        let round = round as u32 & ((1 << ROUND_BITS) - 1);
        (barrier < 64)
            .then_some(kind << 30 | barrier << BARRIER_SHIFT | u32::from(view as u8) << ROUND_BITS | round)
    }

    /// The packet that an immediate stands for, and the view of its sender. `accepted`: the newest view that this member has accepted.
    /// `ended` gives the last round of a barrier that has ended here; `None` for a barrier that the group does not have.
    #[inline]
    pub fn from_immediate(
        immediate: u32,
        accepted: u16,
        ended: impl FnOnce(u32) -> Option<u64>,
    ) -> Option<(u16, Control)> {
        let barrier = immediate >> BARRIER_SHIFT & 63;
        let behind = (accepted as u8).wrapping_sub((immediate >> ROUND_BITS) as u8);
        let view = accepted.saturating_sub(u16::from(behind));
        let ended = ended(barrier)?;
        // The round nearest to `ended` that has these lowest bits.
        let ahead = immediate.wrapping_sub(ended as u32) << (32 - ROUND_BITS);
        let round = ended.checked_add_signed(i64::from(ahead as i32 >> (32 - ROUND_BITS)))?;
        match immediate >> 30 {
            ARRIVE => Some((view, Control::BarrierArrive { barrier, round })),
            RELEASE => Some((view, Control::BarrierRelease { barrier, round, active: None })),
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
            barrier in 0u32..64, ended in 0u64..u64::MAX / 2, ahead in -1000i64..1000,
            accepted in 0u16..1024, behind in 0u16..256, release: bool
        ) {
            let view = accepted.saturating_sub(behind);
            let round = ended.saturating_add_signed(ahead);
            let packet = if release {
                Control::BarrierRelease { barrier, round, active: None }
            } else {
                Control::BarrierArrive { barrier, round }
            };
            let immediate = packet.to_immediate(view).unwrap();
            let decode = |barrier: u32| {
                Control::from_immediate(immediate, accepted, |asked| (asked == barrier).then_some(ended))
            };
            prop_assert_eq!(decode(barrier), Some((view, packet)));
            prop_assert_eq!(decode(barrier + 1), None);
        }

        #[test]
        fn any_immediate_is_a_packet_or_refused(immediate: u32, accepted in 256u16..1024, ended: u64) {
            if let Some((view, packet)) = Control::from_immediate(immediate, accepted, |_| Some(ended)) {
                prop_assert_eq!(packet.to_immediate(view), Some(immediate));
                prop_assert!(view <= accepted);
            }
        }
    }
}
