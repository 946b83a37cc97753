//! Members of a group: their numbers, sets of them, and who is known to be dead.

use core::fmt;

/// Most members of a group.
pub const MAX_MEMBERS: usize = 1024;
const WORDS: usize = MAX_MEMBERS / 64;

/// The number of a member in the member list of its group, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(u16);

impl MemberId {
    /// The member with this number.
    ///
    /// # Panics
    /// If `index` is not below [`MAX_MEMBERS`].
    #[inline]
    pub const fn new(index: usize) -> Self {
        assert!(index < MAX_MEMBERS, "a group has at most 1024 members");
        MemberId(index as u16)
    }

    /// The member that a peer names by `bits`, if a group of `members` has it.
    #[inline]
    pub const fn from_wire(bits: u16, members: usize) -> Option<Self> {
        if (bits as usize) < members { Some(MemberId(bits)) } else { None }
    }

    /// The number, for tables.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The number as packets carry it.
    #[inline]
    pub const fn bits(self) -> u16 {
        self.0
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}", self.0)
    }
}

/// A set of members: one bit for each possible member, 128 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemberSet([u64; WORDS]);

impl MemberSet {
    /// Bytes of an encoded set.
    pub const ENCODED: usize = WORDS * 8;
    /// The empty set.
    pub const EMPTY: Self = MemberSet([0; WORDS]);

    /// The members 0 to `members - 1`.
    pub fn first(members: usize) -> Self {
        let mut set = Self::EMPTY;
        for index in 0..members.min(MAX_MEMBERS) {
            set.insert(MemberId::new(index));
        }
        set
    }

    /// Whether the set contains `member`.
    #[inline]
    pub const fn contains(&self, member: MemberId) -> bool {
        self.0[member.index() / 64] >> (member.index() % 64) & 1 == 1
    }

    /// Adds a member. Returns whether it is new.
    pub const fn insert(&mut self, member: MemberId) -> bool {
        let is_new = !self.contains(member);
        self.0[member.index() / 64] |= 1 << (member.index() % 64);
        is_new
    }

    /// Removes a member. Returns whether it was in the set.
    pub const fn remove(&mut self, member: MemberId) -> bool {
        let was = self.contains(member);
        self.0[member.index() / 64] &= !(1 << (member.index() % 64));
        was
    }

    /// Number of members in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// The members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = MemberId> + '_ {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut rest = *word;
            core::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest.checked_sub(1)?;
                Some(MemberId::new(index * 64 + bit))
            })
        })
    }

    /// Members of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        MemberSet(core::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// Members of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        MemberSet(core::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// Members of this set that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        MemberSet(core::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// The bytes of the set: bit `i % 8` of byte `i / 8` is member `i`.
    pub fn encode(&self, bytes: &mut [u8; Self::ENCODED]) {
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The set that a peer sent. `None` if it names a member that a group of `members` does not have.
    pub fn decode(bytes: &[u8; Self::ENCODED], members: usize) -> Option<Self> {
        let mut set = Self::EMPTY;
        for (word, chunk) in set.0.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        set.without(&Self::first(members)).is_empty().then_some(set)
    }
}

impl FromIterator<MemberId> for MemberSet {
    fn from_iter<I: IntoIterator<Item = MemberId>>(members: I) -> Self {
        let mut set = Self::EMPTY;
        for member in members {
            set.insert(member);
        }
        set
    }
}

impl fmt::Debug for MemberSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(MemberId::bits)).finish()
    }
}

/// Lists the members: `member 3`, or `members 1, 2, 5`.
impl fmt::Display for MemberSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.len() == 1 { "member " } else { "members " })?;
        for (index, member) in self.iter().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { ", " }, member.bits())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;
    use std::vec::Vec;

    use super::*;

    #[test]
    fn set_lists_its_members_in_order_and_survives_encoding() {
        let set: MemberSet = [3, 64, 65, 1023, 0].map(MemberId::new).into_iter().collect();
        assert_eq!(set.iter().map(MemberId::index).collect::<Vec<_>>(), [0, 3, 64, 65, 1023]);
        assert_eq!(set.len(), 5);
        let mut bytes = [0; MemberSet::ENCODED];
        set.encode(&mut bytes);
        assert_eq!(MemberSet::decode(&bytes, 1024), Some(set));
        assert_eq!(MemberSet::decode(&bytes, 1023), None, "the set names a member that is not in the group");
        assert_eq!(MemberSet::from_iter([MemberId::new(7)]).to_string(), "member 7");
        assert_eq!(MemberSet::first(3).to_string(), "members 0, 1, 2");
    }
}
