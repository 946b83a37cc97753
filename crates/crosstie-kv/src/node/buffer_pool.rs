//! Buffers for byte strings that have to wait: for another daemon, or for space in a connection.

use crate::wire::MAX_REQUEST;

/// The most bytes of free buffers that a daemon's pool keeps.
pub(super) const MAX_FREE_BYTES: usize = MAX_REQUEST;

/// Free buffers, kept for the next message that has to wait.
#[derive(Default)]
pub(super) struct BufferPool {
    free: Vec<Vec<u8>>,
    /// Memory that the free buffers take.
    free_bytes: usize,
}

impl BufferPool {
    /// Copies `bytes` into a buffer of the pool. [`release`](BufferPool::release) gives the buffer back.
    pub(super) fn copy_of(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut copy = self.free.pop().unwrap_or_default();
        self.free_bytes -= Self::cost(&copy).min(self.free_bytes);
        copy.clear();
        copy.extend_from_slice(bytes);
        copy
    }

    /// Gives a buffer back. The pool frees it if it would hold more than [`MAX_FREE_BYTES`].
    pub(super) fn release(&mut self, buffer: Vec<u8>) {
        let bytes = self.free_bytes + Self::cost(&buffer);
        if bytes <= MAX_FREE_BYTES {
            self.free_bytes = bytes;
            self.free.push(buffer);
        }
    }

    fn cost(buffer: &Vec<u8>) -> usize {
        buffer.capacity() + 2 * size_of_val(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_the_pool_is_bounded() {
        let mut pool = BufferPool::default();
        let first = pool.copy_of(&[1; 5000]);
        let at = first.as_ptr();
        pool.release(first);
        let again = pool.copy_of(&[2; 3000]);
        assert_eq!((again.as_ptr(), again.as_slice(), pool.free_bytes), (at, &[2; 3000][..], 0));
        (0..100).for_each(|_| pool.release(vec![0; MAX_FREE_BYTES / 10]));
        assert_eq!(pool.free.len(), 9);
        (0..9).for_each(|_| drop(pool.copy_of(&[])));
        assert_eq!((pool.free.len(), pool.free_bytes), (0, 0));
        (0..1_000_000).for_each(|_| pool.release(Vec::new()));
        assert!(pool.free.len() < MAX_FREE_BYTES / 24, "empty buffers count, too");
    }
}
