//! Deadlines of operations, by the index of their entry in the table.
//!
//! There is one place for each entry, and a lower bound of all deadlines. When the bound has passed, all places are checked. So to add
//! a deadline costs two stores, an operation that ends in time costs nothing, and a check is as rare as deadlines are long.

use std::time::Instant;

use crate::ring::operation_table::OperationKey;

pub(super) struct Deadlines {
    places: Box<[Option<(OperationKey, Instant)>]>,
    /// No deadline is earlier.
    next: Option<Instant>,
}

impl Deadlines {
    pub(super) fn new(operations: u32) -> Deadlines {
        Deadlines { places: vec![None; operations as usize].into(), next: None }
    }

    #[inline]
    pub(super) fn add(&mut self, key: OperationKey, deadline: Instant) {
        self.places[key.index as usize] = Some((key, deadline));
        self.next = Some(self.next.map_or(deadline, |next| next.min(deadline)));
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Calls `end` for each operation whose deadline has passed. Returns for how many it returned true.
    pub(super) fn expire(
        &mut self,
        now: Instant,
        mut end: impl FnMut(OperationKey) -> bool,
        is_live: impl Fn(OperationKey) -> bool,
    ) -> usize {
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
