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
    #[inline]
    pub(crate) unsafe fn new(start: *const u8, len: usize) -> SharedBytes<'m> {
        SharedBytes { start, len, of: PhantomData }
    }

    #[inline]
    pub(crate) const fn from_slice(bytes: &'m [u8]) -> SharedBytes<'m> {
        SharedBytes { start: bytes.as_ptr(), len: bytes.len(), of: PhantomData }
    }

    /// Where they are.
    #[inline]
    pub(crate) fn addr(&self) -> usize {
        self.start.addr()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The `8 * N` bytes from `at` on, as words. `None` if there are fewer.
    #[inline]
    pub(crate) fn load_words<const N: usize>(&self, at: usize) -> Option<[u64; N]> {
        if at > self.len || 8 * N > self.len - at {
            return None;
        }
        // SAFETY: the word is inside the bytes, which are valid for reads.
        Some(core::array::from_fn(|i| unsafe { copy::load_word(self.start.add(at + 8 * i)) }))
    }

    /// Copies the bytes from `at` on: as many as `to` has room for. Copies nothing if there are fewer.
    #[inline]
    pub(crate) fn copy_to(&self, at: usize, to: &mut [u8]) {
        debug_assert!(at + to.len() <= self.len);
        if at <= self.len && to.len() <= self.len - at {
            // SAFETY: the range is inside the bytes, which are valid for reads; `to` is borrowed exclusively, so they do not overlap.
            unsafe { copy::copy(self.start.add(at), to.as_mut_ptr(), to.len()) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_bytes_at_any_place() {
        let bytes: [u8; 40] = core::array::from_fn(|i| i as u8);
        let shared = SharedBytes::from_slice(&bytes);
        for at in 0..=bytes.len() - 16 {
            let words = [&bytes[at..at + 8], &bytes[at + 8..at + 16]]
                .map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            assert_eq!(shared.load_words(at), Some(words), "{at}");
        }
        for at in [25, 32, 40, 41, usize::MAX] {
            assert_eq!(shared.load_words::<2>(at), None, "{at}");
        }
        assert_eq!(shared.load_words::<0>(40), Some([]));
    }
}
