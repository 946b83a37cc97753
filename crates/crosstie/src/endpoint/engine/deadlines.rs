//! Deadlines of operations, by the index of their entry in the table.
//!
//! There is one place for each entry, and a lower bound of all deadlines. When the bound has passed, all places are checked. So an
//! operation that ends in time costs a few stores, and a check is as rare as deadlines are long.
//!
//! An operation is added without reading the clock, which takes as long as a small operation. Its time begins with the
//! [next reading](Deadlines::begin), so it never ends too early.

use std::time::{Duration, Instant};

use crate::ring::operation_table::OperationKey;

/// The most operations whose time has not begun.
const MAX_ADDED: usize = 64;

pub(super) struct Deadlines {
    places: Box<[Option<(OperationKey, Instant)>]>,
    /// No deadline is earlier.
    next: Option<Instant>,
    /// Operations whose time has not begun.
    added: Vec<(OperationKey, Duration)>,
}

impl Deadlines {
    pub(super) fn new(operations: u32) -> Deadlines {
        let places = vec![None; operations as usize].into();
        Deadlines { places, next: None, added: Vec::with_capacity(MAX_ADDED) }
    }

    /// Adds an operation that has so much time from the next reading of the clock on.
    #[inline]
    pub(super) fn add(&mut self, key: OperationKey, timeout: Duration) {
        if self.added.len() == MAX_ADDED {
            self.begin(Instant::now());
        }
        self.added.push((key, timeout));
    }

    /// The time of the operations that were added begins now.
    #[inline]
    fn begin(&mut self, now: Instant) {
        // In their order: an entry of the table may have had several of them, of which the last one counts.
        for (key, timeout) in self.added.drain(..) {
            // A deadline that the clock cannot reach is none.
            let Some(deadline) = now.checked_add(timeout) else { continue };
            self.places[key.index as usize] = Some((key, deadline));
            self.next = Some(self.next.map_or(deadline, |next| next.min(deadline)));
        }
    }

    /// The earliest deadline, or an earlier time.
    pub(super) fn next(&mut self, now: Instant) -> Option<Instant> {
        self.begin(now);
        self.next
    }

    /// Calls `end` for each operation whose deadline has passed. Returns for how many it returned true.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        mut end: impl FnMut(OperationKey) -> bool,
        is_live: impl Fn(OperationKey) -> bool,
    ) -> usize {
        self.begin(now);
        if self.next.is_none_or(|next| next > now) {
            return 0;
        }
        let (mut count, mut next) = (0, None::<Instant>);
        for place in &mut self.places {
            match *place {
                Some((key, deadline)) if deadline <= now => {
                    count += usize::from(end(key));
                    *place = None;
                }
                Some((key, deadline)) if is_live(key) => {
                    next = Some(next.map_or(deadline, |next| next.min(deadline)));
                }
                _ => *place = None,
            }
        }
        self.next = next;
        count
    }
}
