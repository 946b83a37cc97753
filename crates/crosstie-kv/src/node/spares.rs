//! Buffers for byte strings that have to wait: for another daemon, or for room in a connection.

use crate::wire::MAX_REQUEST;

/// Bytes of buffers that wait to be used again, of a daemon.
pub(super) const SPARE_BYTES: usize = MAX_REQUEST;

/// Buffers for what has to wait, kept for the next that does.
#[derive(Default)]
pub(super) struct Spares {
    free: Vec<Vec<u8>>,
    /// What they take.
    bytes: usize,
}

impl Spares {
    /// The bytes, in a buffer that is to be given back.
    pub(super) fn copy_of(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut copy = self.free.pop().unwrap_or_default();
        self.bytes -= Self::cost(&copy).min(self.bytes);
        copy.clear();
        copy.extend_from_slice(bytes);
        copy
    }

    /// Keeps a buffer, unless there are enough.
    pub(super) fn give(&mut self, buffer: Vec<u8>) {
        let bytes = self.bytes + Self::cost(&buffer);
        if bytes <= SPARE_BYTES {
            self.bytes = bytes;
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
    fn buffers_are_used_again_and_bounded() {
        let mut spares = Spares::default();
        let first = spares.copy_of(&[1; 5000]);
        let at = first.as_ptr();
        spares.give(first);
        let again = spares.copy_of(&[2; 3000]);
        assert_eq!((again.as_ptr(), again.as_slice(), spares.bytes), (at, &[2; 3000][..], 0));
        (0..100).for_each(|_| spares.give(vec![0; SPARE_BYTES / 10]));
        assert_eq!(spares.free.len(), 9);
        (0..9).for_each(|_| drop(spares.copy_of(&[])));
        assert_eq!((spares.free.len(), spares.bytes), (0, 0));
        (0..1_000_000).for_each(|_| spares.give(Vec::new()));
        assert!(spares.free.len() < SPARE_BYTES / 24, "empty ones count, too");
    }
}
