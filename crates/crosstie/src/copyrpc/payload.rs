//! The payload of a received message.

use crosstie_protocol::copyrpc::wire::MAX_COMPACT_PAYLOAD;
use zerocopy::{IntoBytes, KnownLayout, TryFromBytes};

use crate::device::{Mr, RingRegion};
use crate::memory::shared_bytes::SharedBytes;

/// The payload of a message: in the receive ring, in bulk memory, or copied already.
///
/// A peer that violates the protocol could still write to the ring and to bulk memory. So the bytes are copied out, never
/// borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'r>(SharedBytes<'r>);

/// A copy of the payload of a compact batch, with bytes behind it that have no meaning.
pub(super) type ShortPayload = [u8; MAX_COMPACT_PAYLOAD as usize];

impl<'r> Payload<'r> {
    pub(super) const EMPTY: Payload<'static> = Payload(SharedBytes::EMPTY);

    /// `offset..offset + len` must be inside the memory.
    #[inline]
    pub(super) fn new(memory: &'r Mr, offset: usize, len: usize) -> Payload<'r> {
        let bytes = memory.bytes(offset, len);
        debug_assert!(bytes.is_ok());
        bytes.map_or(Payload::EMPTY, Payload)
    }

    /// As [`new`](Payload::new), in a ring.
    #[inline]
    pub(super) fn in_ring(ring: &'r RingRegion, offset: usize, len: usize) -> Payload<'r> {
        match ring.bytes(offset, len) {
            Some(bytes) => Payload(bytes),
            None => Payload::outside(),
        }
    }

    #[cold]
    #[inline(never)]
    fn outside() -> Payload<'static> {
        debug_assert!(false, "a payload outside of its ring");
        Payload::EMPTY
    }

    /// The first `len` bytes of a copy. There must be as many.
    #[inline]
    pub(super) fn from_copy(copy: &'r ShortPayload, len: usize) -> Payload<'r> {
        Payload(SharedBytes::from_slice(&copy[..len.min(copy.len())]))
    }

    /// Where it is in `memory`, if it is there.
    pub(super) fn offset_in(&self, memory: &Mr) -> usize {
        self.0.addr().wrapping_sub(memory.as_ptr().addr())
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the payload is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies as much as fits into `to`. Returns the number of bytes copied.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) -> usize {
        let len = self.len().min(to.len());
        self.copy_part(0, &mut to[..len]);
        len
    }

    /// Copies the bytes from `at` on. There are as many as `to` has room for.
    #[inline]
    fn copy_part(&self, at: usize, to: &mut [u8]) {
        self.0.copy_to(at, to);
    }

    /// The first 8 bytes. `None` if there are fewer.
    #[inline]
    pub(super) fn front(&self) -> Option<[u8; 8]> {
        self.0.load_words(0).map(|[word]| word.to_ne_bytes())
    }

    /// Copies the payload into a new vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }

    /// Reads the payload as a value of type `T`. `None` if its length or its bytes are not valid for `T`.
    #[inline]
    pub fn read<T: TryFromBytes + KnownLayout>(&self) -> Option<T> {
        self.read_from(0, || vec![0; size_of::<T>()])
    }

    /// Reads the bytes from `at` on as a value of type `T`. A value that is not small goes through `buffer`, which has room for
    /// it.
    #[inline]
    pub(super) fn read_from<T: TryFromBytes + KnownLayout, B: AsMut<[u8]>>(
        &self,
        at: usize,
        buffer: impl FnOnce() -> B,
    ) -> Option<T> {
        if self.len() != at + size_of::<T>() {
            return None;
        }
        // Small values need no buffer on the heap. The one on the stack is zeroed first, so it should not be much longer than the value.
        match size_of::<T>() {
            8 => self.read_words::<T, 1>(at),
            16 => self.read_words::<T, 2>(at),
            24 => self.read_words::<T, 3>(at),
            32 => self.read_words::<T, 4>(at),
            ..32 => self.read_through(at, [0u64; 4].as_mut_bytes()),
            33..=128 => self.read_through(at, [0u64; 16].as_mut_bytes()),
            _ => self.read_through(at, buffer().as_mut()),
        }
    }

    /// Reads a value of `N` words.
    #[inline]
    fn read_words<T: TryFromBytes + KnownLayout, const N: usize>(&self, at: usize) -> Option<T> {
        T::try_read_from_bytes(self.0.load_words::<N>(at)?.as_bytes()).ok()
    }

    #[inline]
    fn read_through<T: TryFromBytes + KnownLayout>(&self, at: usize, buffer: &mut [u8]) -> Option<T> {
        let bytes = buffer.get_mut(..size_of::<T>())?;
        self.copy_part(at, bytes);
        T::try_read_from_bytes(bytes).ok()
    }
}
