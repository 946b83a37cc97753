//! The table of calls that wait for their response.
//!
//! Promise: each response finds the call that it belongs to, and only once. A call id is an index and a generation, 31 bits
//! together, so an id that is unknown or was answered before finds no call, until 32767 other calls have had its index. The table
//! allocates nothing after it is created.
//!
//! The entry that became free last is used first: few calls at a time need few cache lines.

use crate::key::Key;
use crate::slab::Slab;

const INDEX_BITS: u32 = 16;
/// The most calls that one connection can have pending.
pub const MAX_PENDING_CALLS: usize = 1 << INDEX_BITS;

type CallKey = Key<INDEX_BITS, 31>;

/// Identifies a pending call. Messages carry its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId(CallKey);

impl CallId {
    /// The call id in a message, which may be of no call.
    #[inline]
    pub(super) const fn from_bits(bits: u32) -> CallId {
        CallId(CallKey::from_bits(bits))
    }

    /// The 31 bits.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0.bits()
    }

    /// Below the number of [pending calls](super::FlowParams::pending_calls). No other pending call has the same.
    #[inline]
    pub const fn index(self) -> usize {
        self.0.index() as usize
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PendingCalls<U>(Slab<PendingCall<U>, CallKey>);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PendingCall<U> {
    credit_blocks: u32,
    /// `None` if the call was abandoned.
    user: Option<U>,
}

impl<U> PendingCalls<U> {
    /// A table of 1 to [`MAX_PENDING_CALLS`] entries.
    pub(super) fn new(size: usize) -> Self {
        PendingCalls(Slab::allocated(size.clamp(1, MAX_PENDING_CALLS) as u32, 0))
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.0.is_full()
    }

    /// Calls that wait for a response, including abandoned ones.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a call. The table is not full.
    #[inline]
    pub(super) fn insert(&mut self, credit_blocks: u32, user: U) -> CallId {
        let Ok(key) = self.0.insert(PendingCall { credit_blocks, user: Some(user) }) else {
            unreachable!("a call for which there is no room is refused before")
        };
        CallId(key)
    }

    /// Removes a call that [is pending](PendingCalls::credit_blocks). Returns what the caller attached, if the call was not abandoned.
    #[inline]
    pub(super) fn remove(&mut self, id: CallId) -> Option<U> {
        self.0.remove(id.0)?.user
    }

    /// The credit that this call uses, in blocks, if it is pending.
    #[inline]
    pub(super) fn credit_blocks(&self, id: CallId) -> Option<u32> {
        self.0.get(id.0).map(|call| call.credit_blocks)
    }

    /// Whether the call is pending and was not abandoned.
    pub(super) fn has_user(&self, id: CallId) -> bool {
        self.0.get(id.0).is_some_and(|call| call.user.is_some())
    }

    /// Returns what the caller attached. The entry stays until the response arrives, because the response returns the credit.
    pub(super) fn abandon(&mut self, id: CallId) -> Option<U> {
        self.0.get_mut(id.0)?.user.take()
    }

    /// Returns what all callers attached.
    pub(super) fn abandon_all(&mut self) -> impl Iterator<Item = U> + '_ {
        self.0.iter_mut().filter_map(|call| call.user.take())
    }

    /// Lets call ids repeat at once, so that the states of a model repeat.
    #[cfg(test)]
    pub(super) fn use_one_generation(&mut self) {
        self.0.one_generation = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn a_call_id_is_valid_once() {
        let mut table = PendingCalls::new(2);
        let a = table.insert(2, 'a');
        let b = table.insert(3, 'b');
        assert!(table.is_full());
        assert_eq!((table.credit_blocks(a), table.credit_blocks(b)), (Some(2), Some(3)));
        assert_eq!(table.remove(a), Some('a'));
        assert_eq!(table.credit_blocks(a), None, "answered twice");
        assert_eq!(table.credit_blocks(CallId::from_bits(a.bits() + (1 << 16))), None, "its index is free");
        let c = table.insert(4, 'c');
        assert_ne!(c, a, "another generation");
        assert_eq!(table.credit_blocks(a), None);
        for foreign in [0, 1, 7, 0x7fff_ffff, 0xffff_ffff, b.bits() ^ (1 << 30)] {
            assert_eq!(table.credit_blocks(CallId::from_bits(foreign)), None, "{foreign:#x}");
        }
        assert!(table.has_user(b) && table.has_user(c) && !table.has_user(a));
        assert_eq!(table.abandon(b), Some('b'));
        assert!(!table.has_user(b));
        assert_eq!(table.abandon(b), None);
        assert_eq!(table.credit_blocks(b), Some(3), "its credit is still out");
        assert_eq!(table.remove(b), None);
        assert_eq!(table.abandon_all().collect::<Vec<_>>(), ['c']);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn entry_that_became_free_last_is_used_first() {
        let mut table = PendingCalls::new(4);
        let ids: Vec<_> = (0..4).map(|i| table.insert(2, i)).collect();
        for &i in &[2, 0, 3, 1] {
            assert_eq!(table.remove(ids[i]), Some(i));
        }
        let again: Vec<_> = (0..4).map(|i| table.insert(2, i).index()).collect();
        assert_eq!(again, [1, 3, 0, 2]);
    }
}
