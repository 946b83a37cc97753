//! When the peer's consumer position is read by RDMA READ, to find room in its ring.
//!
//! The first READ after a refused call is posted at once. As long as READs find that the peer has released nothing, the delay
//! before the next one doubles, from [`MIN_DELAY`] to [`MAX_DELAY`]. After [`MAX_READS`] of them without another refused call
//! nobody wants the room any more, and they stop. So a peer that releases nothing costs a waiting caller next to nothing, and the
//! room is found at most [`MAX_DELAY`] after the peer has released it.

use std::time::{Duration, Instant};

const MIN_DELAY: Duration = Duration::from_micros(16);
const MAX_DELAY: Duration = Duration::from_millis(4);
/// READs that find nothing after a call was refused.
const MAX_READS: u32 = 16;

pub(super) struct PositionReads {
    /// A READ is under way: to find room, or to probe the peer.
    pub(super) is_under_way: bool,
    /// READs that found nothing, since a call was last refused.
    fruitless: u32,
    /// The delay before the next READ. Zero after the peer has released something.
    delay: Duration,
    /// When the next READ may be posted, if there is a delay.
    next: Option<Instant>,
    /// The peer's position when the last READ was posted.
    position: u64,
}

/// When to post a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadTime {
    Now,
    Later,
    Never,
}

impl PositionReads {
    pub(super) fn new() -> PositionReads {
        PositionReads { is_under_way: false, fruitless: 0, delay: Duration::ZERO, next: None, position: 0 }
    }

    /// Notes that a call was refused: somebody wants room.
    pub(super) fn note_refusal(&mut self) {
        self.fruitless = 0;
    }

    /// When to post a READ that would help. `position` is the peer's position as far as it is known. Reads the clock only if
    /// the last READ found nothing.
    pub(super) fn time(&mut self, position: u64) -> ReadTime {
        if self.fruitless >= MAX_READS {
            self.next = None;
            return ReadTime::Never;
        }
        if position > self.position {
            // A batch of the peer has brought news since.
            self.delay = Duration::ZERO;
            self.next = None;
        }
        match self.next {
            Some(at) if Instant::now() < at => ReadTime::Later,
            _ => ReadTime::Now,
        }
    }

    /// When the next READ may be posted, if it has to wait.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Notes that a READ was posted while the peer's position was known to be `position`.
    pub(super) fn posted(&mut self, position: u64) {
        self.is_under_way = true;
        self.position = position;
        self.next = None;
    }

    /// Notes that the READ has completed. `is_wanted`: somebody still wants room. Returns whether the application should hear of
    /// it: there is news, or there will be no more READs until a call is refused.
    pub(super) fn done(&mut self, position: u64, is_wanted: bool) -> bool {
        self.is_under_way = false;
        if position > self.position {
            self.fruitless = 0;
            self.delay = Duration::ZERO;
            return true;
        }
        if !is_wanted {
            return false;
        }
        self.fruitless += 1;
        self.delay = (2 * self.delay).clamp(MIN_DELAY, MAX_DELAY);
        self.next = Instant::now().checked_add(self.delay);
        self.fruitless == MAX_READS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_that_find_nothing_are_delayed_and_end() {
        let mut reads = PositionReads::new();
        let mut delays = Vec::new();
        for number in 1..=MAX_READS {
            while reads.time(64) == ReadTime::Later {
                assert!(reads.next().is_some());
            }
            reads.posted(64);
            assert_eq!(reads.done(64, true), number == MAX_READS);
            delays.push(reads.delay);
        }
        assert!(delays.is_sorted() && delays[0] == MIN_DELAY && delays[15] == MAX_DELAY, "{delays:?}");
        assert_eq!((reads.time(64), reads.next()), (ReadTime::Never, None));
        // The next refused call continues with the longest delay.
        reads.note_refusal();
        assert_eq!(reads.time(64), ReadTime::Now, "none was posted for long");
        reads.posted(64);
        assert!(!reads.done(64, true));
        assert_eq!(reads.delay, MAX_DELAY);
        // News ends the delay, from a batch or from a READ.
        assert_eq!(reads.time(96), ReadTime::Now);
        reads.posted(96);
        assert!(reads.done(128, true));
        assert_eq!(reads.time(128), ReadTime::Now);
        // A probe that finds nothing changes nothing.
        reads.posted(128);
        assert!(!reads.done(128, false));
        assert_eq!((reads.time(128), reads.fruitless), (ReadTime::Now, 0));
    }
}
