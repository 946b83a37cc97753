//! Checks keys that have only gets and puts, where each value is put at most once. No search is needed, however many operations overlap.
//!
//! A put and the gets of its value are a *cluster*; the register has the value from the put to the last of these gets. Let `first` be
//! the earliest return of a cluster's operations, and `last` the latest call. The *zone* of the cluster is the time between the two:
//!
//! - forward zone, `first < last`: the register has the value all the time from `first` to `last`;
//! - backward zone, otherwise: the register has the value at some instant between `last` and `first`.
//!
//! The history is linearizable exactly if no get returns before its put is called, no two forward zones overlap, and no backward zone
//! lies inside a forward zone (Gibbons and Korach, Testing shared memories, 1997).

use std::collections::HashMap;

use super::{Event, Outcome};
use crosstie_kv::wire::Op;

/// The operations that determine a cluster's zone.
struct Cluster {
    /// The put; `None` for the initial value.
    put: Option<Event>,
    /// The operation that returned first; `None` for the initial value, which was there before all operations.
    first: Option<Event>,
    /// The operation that was called last.
    last: Option<Event>,
    observed: bool,
}

impl Cluster {
    /// When the zone begins or ends; `None`, which is less than all times, for the initial value.
    fn first(&self) -> Option<u64> {
        self.first.map(|event| event.returned)
    }

    fn last(&self) -> Option<u64> {
        self.last.map(|event| event.called)
    }

    fn operations(&self) -> impl Iterator<Item = Event> {
        [self.put, self.first, self.last].into_iter().flatten()
    }
}

/// Checks a key. `Err` has operations that contradict each other; `None` if the key has other operations.
///
/// `events` are the operations on one key, sorted by their calls, without refused operations and gets of unknown outcome.
pub(super) fn check(events: &[Event], initial: Option<u64>) -> Option<Result<(), Vec<Event>>> {
    let at_start = Cluster { put: None, first: None, last: None, observed: true };
    let mut clusters = HashMap::from([(initial, at_start)]);
    for event in events.iter().filter(|event| event.op != Op::Get) {
        if event.op != Op::Put || !matches!(event.outcome, Outcome::Done | Outcome::Unknown) {
            return None;
        }
        let put = Some(*event);
        let observed = event.outcome == Outcome::Done;
        if clusters.insert(Some(event.value), Cluster { put, first: put, last: put, observed }).is_some() {
            return None;
        }
    }
    for get in events.iter().filter(|event| event.op == Op::Get) {
        let value = match get.outcome {
            Outcome::Done => Some(get.returned_value),
            Outcome::NotFound => None,
            _ => return None,
        };
        let Some(cluster) = clusters.get_mut(&value) else { return Some(Err(vec![*get])) };
        if let Some(put) = cluster.put.filter(|put| get.returned < put.called) {
            return Some(Err(vec![*get, put]));
        }
        cluster.observed = true;
        if Some(get.returned) < cluster.first() {
            cluster.first = Some(*get);
        }
        if Some(get.called) > cluster.last() {
            cluster.last = Some(*get);
        }
    }
    // A put of unknown outcome whose value no get returned need not have taken effect.
    let clusters = clusters.into_values().filter(|cluster| cluster.observed);
    let (mut forward, backward): (Vec<_>, Vec<_>) =
        clusters.partition(|cluster| cluster.first() < cluster.last());
    forward.sort_unstable_by_key(Cluster::first);
    if let Some(pair) = forward.windows(2).find(|pair| pair[1].first() < pair[0].last()) {
        return Some(Err(contradiction(&pair[0], &pair[1])));
    }
    for cluster in &backward {
        // Forward zones do not overlap, so the last one to begin is the last one to end.
        let begun = forward.partition_point(|zone| zone.first() < cluster.last());
        if let Some(around) = forward[..begun].last().filter(|zone| cluster.first() < zone.last()) {
            return Some(Err(contradiction(around, cluster)));
        }
    }
    Some(Ok(()))
}

fn contradiction(a: &Cluster, b: &Cluster) -> Vec<Event> {
    let mut operations: Vec<Event> = a.operations().chain(b.operations()).collect();
    operations.sort_unstable_by_key(|event| (event.called, event.returned, event.client, event.value));
    operations.dedup();
    operations
}
