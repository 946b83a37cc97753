//! The payload of a received message.

use zerocopy::{IntoBytes, KnownLayout, TryFromBytes};

use crate::device::Mr;

/// The payload of a message, in the receive ring or in bulk memory.
///
/// A peer that violates the protocol could still write there. So the bytes are copied out, never borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'r> {
    memory: &'r Mr,
    offset: usize,
    len: usize,
}

impl<'r> Payload<'r> {
    /// `offset..offset + len` must be inside the memory.
    pub(super) fn new(memory: &'r Mr, offset: usize, len: usize) -> Payload<'r> {
        debug_assert!(offset + len <= memory.len());
        Payload { memory, offset, len }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the payload is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies as much as fits into `to`. Returns the number of bytes copied.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let len = self.len.min(to.len());
        let copied = self.memory.read(self.offset, &mut to[..len]);
        debug_assert!(copied.is_ok());
        len
    }

    /// Copies the payload into a new vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }

    /// Reads the payload as a value of type `T`. `None` if its length or its bytes are not valid for `T`.
    #[inline]
    pub fn read<T: TryFromBytes + KnownLayout>(&self) -> Option<T> {
        if self.len != size_of::<T>() {
            return None;
        }
        // Small values go through a buffer of words, so that they stay in registers or on the stack.
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
