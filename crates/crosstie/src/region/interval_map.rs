//! A map from ranges of addresses to values. The ranges of one group do not overlap.

use core::ops::Range;
use std::collections::BTreeMap;

/// Ranges by group and start. A new range replaces those of its group that it overlaps, so that looking up an address takes one
/// step in the tree.
#[derive(Debug)]
pub(super) struct IntervalMap<V> {
    /// Group and start; end and value.
    ranges: BTreeMap<(u32, usize), (usize, V)>,
}

impl<V> Default for IntervalMap<V> {
    fn default() -> IntervalMap<V> {
        IntervalMap { ranges: BTreeMap::new() }
    }
}

impl<V> IntervalMap<V> {
    /// The value of the range of `group` that contains all of `range`, and the range's start. An empty range is contained in one
    /// that it begins in.
    pub(super) fn find(&self, group: u32, range: Range<usize>) -> Option<(usize, &V)> {
        let ((_, start), (end, value)) = self.ranges.range((group, 0)..=(group, range.start)).next_back()?;
        (range.end.max(range.start + 1) <= *end).then_some((*start, value))
    }

    /// Adds a range that is not empty. Returns the values of the ranges that it replaces.
    pub(super) fn insert(&mut self, group: u32, range: Range<usize>, value: V) -> Vec<V> {
        debug_assert!(!range.is_empty());
        let replaced = self.remove_overlapping(group, range.clone());
        self.ranges.insert((group, range.start), (range.end, value));
        replaced
    }

    /// Removes the ranges of `group` that overlap `range`.
    pub(super) fn remove_overlapping(&mut self, group: u32, range: Range<usize>) -> Vec<V> {
        let mut removed = Vec::new();
        while let Some((&key, _)) = self
            .ranges
            .range((group, 0)..(group, range.end))
            .next_back()
            .filter(|(_, (end, _))| *end > range.start)
        {
            removed.extend(self.ranges.remove(&key).map(|(_, value)| value));
        }
        removed
    }

    /// Removes the range that begins here.
    pub(super) fn remove(&mut self, group: u32, start: usize) -> Option<V> {
        self.ranges.remove(&(group, start)).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Operation {
        Find(u32, usize, usize),
        Insert(u32, usize, usize),
        Remove(u32, usize),
        RemoveOverlapping(u32, usize, usize),
    }

    fn operation() -> impl Strategy<Value = Operation> {
        let group = 0..2u32;
        prop_oneof![
            (group.clone(), 0..40usize, 0..12usize).prop_map(|(g, at, len)| Operation::Find(g, at, len)),
            (group.clone(), 0..40usize, 1..12usize).prop_map(|(g, at, len)| Operation::Insert(g, at, len)),
            (group.clone(), 0..40usize).prop_map(|(g, at)| Operation::Remove(g, at)),
            (group, 0..40usize, 0..12usize).prop_map(|(g, at, len)| Operation::RemoveOverlapping(g, at, len)),
        ]
    }

    /// All ranges in a list, searched from one end to the other.
    #[derive(Default)]
    struct Oracle(Vec<(u32, Range<usize>, usize)>);

    impl Oracle {
        fn take(&mut self, remove: impl Fn(u32, &Range<usize>) -> bool) -> Vec<usize> {
            self.0
                .extract_if(.., |(group, range, _)| remove(*group, range))
                .map(|(_, _, value)| value)
                .collect()
        }
    }

    fn sorted(mut values: Vec<usize>) -> Vec<usize> {
        values.sort_unstable();
        values
    }

    proptest! {
        #[test]
        fn the_map_agrees_with_a_list(operations in proptest::collection::vec(operation(), 1..80)) {
            let (mut map, mut oracle) = (IntervalMap::default(), Oracle::default());
            for (number, operation) in operations.into_iter().enumerate() {
                match operation {
                    Operation::Find(group, at, len) => {
                        let expected = oracle.0.iter().find(|(g, r, _)| {
                            *g == group && r.contains(&at) && at + len <= r.end
                        });
                        let found = map.find(group, at..at + len).map(|(start, value)| (start, *value));
                        prop_assert_eq!(found, expected.map(|(_, r, value)| (r.start, *value)));
                    }
                    Operation::Insert(group, at, len) => {
                        let expected = oracle.take(|g, r| g == group && r.start < at + len && at < r.end);
                        prop_assert_eq!(sorted(map.insert(group, at..at + len, number)), sorted(expected));
                        oracle.0.push((group, at..at + len, number));
                    }
                    Operation::Remove(group, at) => {
                        let expected = oracle.take(|g, r| g == group && r.start == at);
                        prop_assert_eq!(map.remove(group, at), expected.first().copied());
                    }
                    Operation::RemoveOverlapping(group, at, len) => {
                        let expected = oracle.take(|g, r| g == group && r.start < at + len && at < r.end);
                        prop_assert_eq!(sorted(map.remove_overlapping(group, at..at + len)), sorted(expected));
                    }
                }
                prop_assert_eq!(map.ranges.len(), oracle.0.len());
            }
        }
    }
}
