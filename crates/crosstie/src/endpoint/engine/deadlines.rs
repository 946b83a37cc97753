//! Deadlines of operations, by the index of their entry in the table.
//!
//! An operation is added without reading the clock, which takes as long as a small operation. Its time begins with the
//! [next reading](Deadlines::begin), so it never ends too early. Most operations have ended before that.

use std::time::{Duration, Instant};

use crate::ring::operation_table::OperationKey;
use crate::wait;

/// The most operations whose time has not begun.
const MAX_ADDED: usize = 64;

pub(super) struct Deadlines {
    begun: wait::Deadlines<OperationKey>,
    /// Operations whose time has not begun.
    added: Vec<(OperationKey, Duration)>,
}

impl Deadlines {
    pub(super) fn new(operations: u32) -> Deadlines {
        let begun = wait::Deadlines::new(operations as usize);
        Deadlines { begun, added: Vec::with_capacity(MAX_ADDED) }
    }

    /// Adds an operation that has so much time from the next reading of the clock on.
    #[inline]
    pub(super) fn add(
        &mut self,
        key: OperationKey,
        timeout: Duration,
        is_live: impl Fn(OperationKey) -> bool,
    ) {
        if self.added.len() == MAX_ADDED {
            self.forget_ended(is_live);
        }
        self.added.push((key, timeout));
    }

    /// Makes room for operations whose time has not begun.
    #[cold]
    fn forget_ended(&mut self, is_live: impl Fn(OperationKey) -> bool) {
        self.added.retain(|(key, _)| is_live(*key));
        if self.added.len() > MAX_ADDED / 2 {
            self.begin(Instant::now(), is_live);
        }
    }

    /// The time of the operations that were added begins now.
    #[inline]
    fn begin(&mut self, now: Instant, is_live: impl Fn(OperationKey) -> bool) {
        for (key, timeout) in self.added.drain(..) {
            // An entry of the table may have had several operations since the last reading. At most one of them is live.
            if !is_live(key) {
                continue;
            }
            // A time beyond the range of the clock never comes, so it needs no entry.
            self.begun.set(key.index as usize, key, now.checked_add(timeout));
        }
    }

    /// The earliest deadline, or an earlier time.
    pub(super) fn next(&mut self, now: Instant, is_live: impl Fn(OperationKey) -> bool) -> Option<Instant> {
        self.begin(now, is_live);
        self.begun.next()
    }

    /// Calls `end` for each operation whose deadline has passed. Returns for how many it returned true.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        mut end: impl FnMut(OperationKey) -> bool,
        is_live: impl Fn(OperationKey) -> bool,
    ) -> usize {
        self.begin(now, &is_live);
        let mut count = 0;
        self.begun.expire(now, |key, has_passed| {
            if has_passed {
                count += usize::from(end(key));
            }
            is_live(key)
        });
        count
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ring::operation_table::{FutureSide, OperationTable};

    const CAUSE: u16 = 7;

    fn lease(table: &OperationTable<u8>) -> FutureSide {
        table.lease(0).unwrap()
    }

    fn expire(deadlines: &mut Deadlines, table: &OperationTable<u8>, now: Instant) -> usize {
        deadlines.expire(now, |key| table.end(key, CAUSE), |key| table.is_live(key))
    }

    /// The time of an operation begins with the first reading of the clock after it was added: it does not end before its time, and it
    /// ends with the first reading after its time.
    #[test]
    fn time_begins_with_the_next_reading_of_the_clock() {
        let (table, mut deadlines) = (OperationTable::<u8>::new(4), Deadlines::new(4));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let sides = [lease(&table), lease(&table), lease(&table)];
        for (side, seconds) in sides.iter().zip([5, 2, u64::MAX]) {
            deadlines.add(side.key(), Duration::from_secs(seconds), |key| table.is_live(key));
        }
        let ended = || sides.each_ref().map(|side| side.word(&table).is_ended());
        assert_eq!(expire(&mut deadlines, &table, start + 10 * second), 0, "their time begins");
        let next = deadlines.next(start + 10 * second, |key| table.is_live(key));
        assert_eq!(next, Some(start + 12 * second), "the earliest one");
        assert_eq!(expire(&mut deadlines, &table, start + 12 * second - Duration::from_nanos(1)), 0);
        assert_eq!(ended(), [false; 3]);
        assert_eq!(expire(&mut deadlines, &table, start + 12 * second), 1);
        assert_eq!(ended(), [false, true, false]);
        assert_eq!(expire(&mut deadlines, &table, start + 1000 * second), 1);
        assert_eq!(ended(), [true, true, false], "a time beyond the range of the clock never comes");
    }

    /// Operations that use the same entry one after the other between two readings of the clock do not get each other's deadlines; and
    /// there is no limit to how many there are.
    #[test]
    fn deadlines_of_operations_that_have_ended_end_nothing() {
        let (table, mut deadlines) = (OperationTable::<u8>::new(1), Deadlines::new(1));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        for _ in 0..3 * MAX_ADDED {
            let side = lease(&table);
            deadlines.add(side.key(), second, |key| table.is_live(key));
            table.submit(&side);
            table.take_submitted(|op| _ = op.give_back(&table, 0));
            assert!(side.take(&table).is_ok());
        }
        let side = lease(&table);
        deadlines.add(side.key(), 9 * second, |key| table.is_live(key));
        assert_eq!(expire(&mut deadlines, &table, start), 0);
        assert_eq!(deadlines.next(start, |key| table.is_live(key)), Some(start + 9 * second));
        assert_eq!(expire(&mut deadlines, &table, start + 8 * second), 0);
        assert_eq!(expire(&mut deadlines, &table, start + 9 * second), 1);
        assert!(side.word(&table).is_ended());
    }

    /// More operations than wait for a reading of the clock.
    #[test]
    fn all_of_many_deadlines_pass() {
        const OPERATIONS: u32 = 5 * MAX_ADDED as u32;
        let (table, mut deadlines) = (OperationTable::<u8>::new(OPERATIONS), Deadlines::new(OPERATIONS));
        let sides: Vec<FutureSide> = (0..OPERATIONS).map(|_| lease(&table)).collect();
        for side in &sides {
            deadlines.add(side.key(), Duration::from_secs(5), |key| table.is_live(key));
        }
        let now = Instant::now();
        assert_eq!(expire(&mut deadlines, &table, now), 0);
        assert_eq!(expire(&mut deadlines, &table, now + Duration::from_secs(5)), OPERATIONS as usize);
    }
}
