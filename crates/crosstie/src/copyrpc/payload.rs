//! Bytes that a peer wrote.

use zerocopy::{IntoBytes, KnownLayout, TryFromBytes};

use crate::device::Mr;

/// A message in the receive ring.
///
/// A peer that broke the rules could still write there. So its bytes are copied out, never borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'r> {
    ring: &'r Mr,
    offset: usize,
    len: usize,
}

impl<'r> Payload<'r> {
    /// `offset..offset + len` is inside the ring.
    pub(super) fn new(ring: &'r Mr, offset: usize, len: usize) -> Payload<'r> {
        debug_assert!(offset + len <= ring.len());
        Payload { ring, offset, len }
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies as much as fits into `to`; says how much that was.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let len = self.len.min(to.len());
        let copied = self.ring.read(self.offset, &mut to[..len]);
        debug_assert!(copied.is_ok());
        len
    }

    /// A copy.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }

    /// The message as a value, if it has the length and the bytes of one.
    #[inline]
    pub fn read<T: TryFromBytes + KnownLayout>(&self) -> Option<T> {
        if self.len != size_of::<T>() {
            return None;
        }
        // Through a buffer of words for small ones, so that they stay in registers or on the stack.
        let mut words = [0u64; 16];
        match words.as_mut_bytes().get_mut(..size_of::<T>()) {
            Some(small) => {
                self.copy_to(small);
                T::try_read_from_bytes(small).ok()
            }
            None => T::try_read_from_bytes(&self.to_vec()).ok(),
        }
    }
}
