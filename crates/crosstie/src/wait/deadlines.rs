//! Deadlines of calls or operations that have an index.
//!
//! There is one place for each index, and a lower bound of all deadlines. When the bound has passed, all places are checked. So what ends in
//! time costs a few stores, and a check is as rare as deadlines are long.

use std::time::Instant;

/// Deadlines, each with the key of what it belongs to. Keys of one index follow each other: a new one takes the place of the last.
pub(crate) struct Deadlines<K> {
    places: Vec<Option<(K, Instant)>>,
    /// No deadline is earlier.
    next: Option<Instant>,
}

impl<K> Default for Deadlines<K> {
    fn default() -> Deadlines<K> {
        Deadlines { places: Vec::new(), next: None }
    }
}

impl<K: Copy> Deadlines<K> {
    /// With places for so many indices. More are made when they are needed.
    pub(crate) fn new(indices: usize) -> Deadlines<K> {
        Deadlines { places: vec![None; indices], next: None }
    }

    /// Sets the deadline of the key that has this index now; it may have none.
    #[inline]
    pub(crate) fn set(&mut self, index: usize, key: K, deadline: Option<Instant>) {
        match deadline {
            Some(deadline) => self.insert(index, key, deadline),
            None if index < self.places.len() => self.places[index] = None,
            None => {}
        }
    }

    fn insert(&mut self, index: usize, key: K, deadline: Instant) {
        if index >= self.places.len() {
            self.places.resize(index + 1, None);
        }
        self.places[index] = Some((key, deadline));
        self.next = self.next.into_iter().chain([deadline]).min();
    }

    /// The earliest deadline, or an earlier time.
    #[inline]
    pub(crate) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// If the bound has passed: calls `visit` with each key, and whether its deadline has passed. Then it is removed; so is one for which
    /// `visit` returns false, because it needs no deadline any more.
    pub(crate) fn expire(&mut self, now: Instant, mut visit: impl FnMut(K, bool) -> bool) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        self.next = None;
        for place in &mut self.places {
            let Some((key, deadline)) = *place else { continue };
            let has_passed = deadline <= now;
            if visit(key, has_passed) && !has_passed {
                self.next = self.next.into_iter().chain([deadline]).min();
            } else {
                *place = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Keys of the same index follow each other: only the last one has its deadline, none if it was cleared. The bound is exact after a check.
    #[test]
    fn only_the_last_key_of_an_index_has_a_deadline() {
        let (mut deadlines, begin, second) = (Deadlines::default(), Instant::now(), Duration::from_secs(1));
        for number in 0..100_u32 {
            deadlines.set(number as usize % 4, number, Some(begin + (number + 1) * second));
        }
        deadlines.set(3, 100, None);
        deadlines.set(1000, 100, None);
        assert_eq!((deadlines.places.len(), deadlines.next()), (4, Some(begin + second)));
        let mut expire = |seconds, live: &[u32]| {
            let mut passed = Vec::new();
            deadlines.expire(begin + seconds * second, |key, has_passed| {
                passed.extend(has_passed.then_some(key));
                live.contains(&key)
            });
            (passed, deadlines.next())
        };
        assert_eq!(expire(0, &[]), (vec![], Some(begin + second)), "nothing is checked");
        assert_eq!(expire(1, &[97, 98]), (vec![], Some(begin + 98 * second)));
        assert_eq!(expire(98, &[98]), (vec![97], Some(begin + 99 * second)));
        assert_eq!(expire(1000, &[]), (vec![98], None));
        assert_eq!(expire(2000, &[]), (vec![], None));
    }
}
