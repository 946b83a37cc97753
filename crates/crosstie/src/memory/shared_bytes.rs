//! Bytes that others may write at the same time.

use core::marker::PhantomData;

use super::copy;

/// Bytes that a peer or a device may write at the same time. So they can be copied out, but not borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedBytes<'m> {
    start: *const u8,
    len: usize,
    of: PhantomData<&'m [u8]>,
}

// SAFETY: all that can be done with the bytes is to copy them out, which any thread may do at any time.
unsafe impl Send for SharedBytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes<'_> {}

impl<'m> SharedBytes<'m> {
    pub(crate) const EMPTY: SharedBytes<'static> = SharedBytes::from_slice(&[]);

    /// # Safety
    ///
    /// The bytes are valid for reads during `'m`.
    #[inline(always)]
    pub(crate) unsafe fn new(start: *const u8, len: usize) -> SharedBytes<'m> {
        SharedBytes { start, len, of: PhantomData }
    }

    #[inline(always)]
    pub(crate) const fn from_slice(bytes: &'m [u8]) -> SharedBytes<'m> {
        SharedBytes { start: bytes.as_ptr(), len: bytes.len(), of: PhantomData }
    }

    /// Where they are.
    #[inline(always)]
    pub(crate) fn addr(&self) -> usize {
        self.start.addr()
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies the bytes from `at` on: as many as `to` has room for. Copies nothing if there are fewer.
    #[inline(always)]
    pub(crate) fn copy_to(&self, at: usize, to: &mut [u8]) {
        debug_assert!(at + to.len() <= self.len);
        if at <= self.len && to.len() <= self.len - at {
            // SAFETY: the range is inside the bytes, which are valid for reads; `to` is borrowed exclusively, so they do not overlap.
            unsafe { copy::copy(self.start.add(at), to.as_mut_ptr(), to.len()) };
        }
    }
}
