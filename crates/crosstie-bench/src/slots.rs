//! Where the message slots of a benchmark are: each begins at a cache line of its own.

/// Distance between two slots in bytes, for messages of `len` bytes.
#[inline]
pub(crate) fn stride(len: usize) -> usize {
    len.max(1).next_multiple_of(64)
}
