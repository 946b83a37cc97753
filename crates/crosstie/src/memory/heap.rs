//! Allocation of ranges in a segment.

use std::collections::BTreeMap;

/// All ranges are multiples of this size.
pub(crate) const PAGE: u64 = 4096;
/// Ranges of at least this many bytes are aligned to it, so that huge pages can back them.
const HUGE: u64 = 2 << 20;

/// A first-fit allocator of offsets. It does not access the memory itself.
#[derive(Debug)]
pub(crate) struct Heap {
    /// Free ranges: start and length. Adjacent ranges are always merged.
    free: BTreeMap<u64, u64>,
}

impl Heap {
    /// A heap over `start..end`, both multiples of [`PAGE`].
    pub(crate) fn new(start: u64, end: u64) -> Heap {
        debug_assert!(start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE) && start <= end);
        Heap { free: BTreeMap::from([(start, end - start)]) }
    }

    /// Allocates at least `len` bytes, rounded up to pages. Returns start and length, or None if no free range is large enough.
    pub(crate) fn allocate(&mut self, len: u64) -> Option<(u64, u64)> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        let align = if len >= HUGE { HUGE } else { PAGE };
        let (start, room, at) = self.free.iter().find_map(|(&start, &room)| {
            let at = start.checked_next_multiple_of(align)?;
            (at - start <= room && room - (at - start) >= len).then_some((start, room, at))
        })?;
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + len < start + room {
            self.free.insert(at + len, start + room - at - len);
        }
        Some((at, len))
    }

    /// Frees a range, exactly as [`Heap::allocate`] returned it.
    pub(crate) fn free(&mut self, at: u64, len: u64) {
        let (mut at, mut len) = (at, len);
        if let Some((&before, &room)) = self.free.range(..at).next_back() {
            debug_assert!(before + room <= at, "freed twice");
            if before + room == at {
                self.free.remove(&before);
                at = before;
                len += room;
            }
        }
        if let Some(room) = self.free.remove(&(at + len)) {
            len += room;
        }
        self.free.insert(at, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_merge_when_freed() {
        let mut heap = Heap::new(PAGE, PAGE + (64 << 20));
        let mut seed = 12345u64;
        let mut held: Vec<(u64, u64)> = Vec::new();
        for _ in 0..5000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if seed >> 63 == 0 || held.is_empty() {
                if let Some((at, len)) = heap.allocate((seed >> 20) % (5 << 20)) {
                    assert!(held.iter().all(|&(a, l)| at + len <= a || a + l <= at));
                    assert!(len < HUGE || at % HUGE == 0);
                    held.push((at, len));
                }
            } else {
                let (at, len) = held.swap_remove((seed >> 8) as usize % held.len());
                heap.free(at, len);
            }
        }
        for (at, len) in held {
            heap.free(at, len);
        }
        assert_eq!(heap.free, BTreeMap::from([(PAGE, 64 << 20)]));
        assert_eq!(heap.allocate(u64::MAX), None);
    }
}
