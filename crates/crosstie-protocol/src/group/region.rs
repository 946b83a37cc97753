//! How a member describes a region of its memory to other members, and which descriptions they accept.
//!
//! ```text
//!  0        8      12       14  16                64
//!  +--------+------+--------+---+------------------+
//!  | group  |epoch | member | 0 | region descriptor|       all integers little-endian
//!  +--------+------+--------+---+------------------+
//! ```

use super::GroupId;
use super::member::{MAX_MEMBERS, MemberId, MemberSet};
use super::packet::{Dropped, Gate, InvalidPacket};
use crate::region::{DESCRIPTOR_SIZE, RemoteRegion};

/// A region of a member's memory. Only members of the same creation of the same group accept it.
///
/// ```
/// use crosstie_protocol::group::{Dropped, Gate, GroupId, MemberId, MemberRegion, MemberSet};
/// use crosstie_protocol::region::{RemoteRegion, Rights};
/// let region = RemoteRegion::new(0x1000, 64, 5, Rights { read: true, ..Rights::default() }, [0; 16])?;
/// let described = MemberRegion { group: GroupId { group: 7, epoch: 1 }, member: MemberId::new(2), region };
/// let mut gate = Gate::new(7, 1, MemberId::new(0), 4);
/// assert_eq!(gate.check_region(&described.encode(), &MemberSet::EMPTY), Ok(described));
/// let mut other = Gate::new(8, 1, MemberId::new(0), 4);
/// assert_eq!(other.check_region(&described.encode(), &MemberSet::EMPTY), Err(Dropped::ForeignGroup(7)));
/// assert_eq!(other.dropped().foreign_group, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberRegion {
    /// The group, and which creation of it.
    pub group: GroupId,
    /// The member whose memory it is.
    pub member: MemberId,
    /// The region.
    pub region: RemoteRegion,
}

impl MemberRegion {
    /// Bytes of the encoding.
    pub const SIZE: usize = 16 + DESCRIPTOR_SIZE;

    /// Encodes it.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.group.group.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.group.epoch.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.member.bits().to_le_bytes());
        bytes[16..].copy_from_slice(&self.region.encode());
        bytes
    }

    /// Decodes bytes that a peer sent. [`Gate::check_region`] also checks whether this member may use it.
    pub fn decode(bytes: &[u8]) -> Result<MemberRegion, Dropped> {
        let short = Dropped::Invalid(InvalidPacket::Short { len: bytes.len(), needed: Self::SIZE });
        let bytes: &[u8; Self::SIZE] = bytes.try_into().map_err(|_| short)?;
        let member = u16::from_le_bytes([bytes[12], bytes[13]]);
        let member = MemberId::from_wire(member, MAX_MEMBERS)
            .ok_or(Dropped::Invalid(InvalidPacket::Member(member)))?;
        if bytes[14..16] != [0, 0] {
            return Err(Dropped::Invalid(InvalidPacket::Reserved));
        }
        let descriptor = core::array::from_fn(|i| bytes[16 + i]);
        let region =
            RemoteRegion::decode(&descriptor).map_err(|_| Dropped::Invalid(InvalidPacket::Reserved))?;
        let group = GroupId {
            group: u64::from_le_bytes(core::array::from_fn(|i| bytes[i])),
            epoch: u32::from_le_bytes(core::array::from_fn(|i| bytes[8 + i])),
        };
        Ok(MemberRegion { group, member, region })
    }
}

impl Gate {
    /// The description of a region that this member may use: of its group and epoch, and of a live peer. Others are counted.
    pub fn check_region(&mut self, bytes: &[u8], dead: &MemberSet) -> Result<MemberRegion, Dropped> {
        let checked = MemberRegion::decode(bytes).and_then(|described| {
            self.check_member(described.group, described.member, dead)?;
            Ok(described)
        });
        if let Err(cause) = &checked {
            self.count(cause);
        }
        checked
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::region::Rights;

    proptest! {
        #[test]
        fn changed_description_is_refused_or_another_one(
            at in 0..MemberRegion::SIZE, to: u8, addr in 0..u64::MAX / 2, len in 0..u64::MAX / 4, rkey: u32
        ) {
            let rights = Rights { read: true, ..Rights::default() };
            let region = RemoteRegion::new(addr, len, rkey, rights, [3; 16]).unwrap();
            let group = GroupId { group: 7, epoch: 9 };
            let described = MemberRegion { group, member: MemberId::new(2), region };
            let mut bytes = described.encode();
            prop_assert_eq!(MemberRegion::decode(&bytes), Ok(described));
            bytes[at] = to;
            let mut gate = Gate::new(7, 9, MemberId::new(0), 4);
            match gate.check_region(&bytes, &MemberSet::EMPTY) {
                Ok(other) => {
                    prop_assert_eq!(other.encode(), bytes);
                    prop_assert_eq!(other.group, group);
                    prop_assert!(other.member.index() < 4 && other.member != MemberId::new(0));
                }
                Err(_) => {
                    let dropped = gate.dropped();
                    let counted = dropped.foreign_group + dropped.foreign_epoch + dropped.not_a_peer + dropped.invalid;
                    prop_assert_eq!(counted, 1);
                }
            }
        }
    }

    #[test]
    fn region_of_a_dead_member_or_of_an_earlier_epoch_is_refused() {
        let region = RemoteRegion::new(0, 8, 1, Rights::default(), [0; 16]).unwrap();
        let described =
            MemberRegion { group: GroupId { group: 7, epoch: 1 }, member: MemberId::new(2), region };
        let dead = MemberSet::from_iter([MemberId::new(2)]);
        let mut gate = Gate::new(7, 1, MemberId::new(0), 4);
        let refused = gate.check_region(&described.encode(), &dead);
        assert_eq!(refused, Err(Dropped::DeadSender(MemberId::new(2))));
        let mut later = Gate::new(7, 2, MemberId::new(0), 4);
        let refused = later.check_region(&described.encode(), &MemberSet::EMPTY);
        assert_eq!(refused, Err(Dropped::ForeignEpoch(1)));
        assert_eq!((gate.dropped().dead_sender, later.dropped().foreign_epoch), (1, 1));
    }
}
