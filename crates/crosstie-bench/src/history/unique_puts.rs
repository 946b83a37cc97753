//! Keys with gets and puts only, where each value is put at most once: decided without a search, however many operations overlap.
//!
//! A put and the gets of its value are a *cluster*; the register has the value from the put to the last of them. Let `first` be the
//! earliest return of a cluster's operations and `last` the latest call. If `first < last`, then the register has the value all the time between them: the
//! cluster's *zone*. Otherwise, it must have it at some instant between `last` and `first`. There is an order exactly if no
//! get returns before its put is called, no two zones of the first kind overlap, and none of the second kind lies inside one of the first
//! (Gibbons and Korach, Testing shared memories, 1997).

use std::collections::HashMap;

use super::{Event, Outcome};
use crosstie_kv::wire::Op;

/// A cluster's operations that matter.
struct Cluster {
    /// The put; `None` for the value at the start.
    put: Option<Event>,
    /// The earliest to return; `None` if that is what was before the start.
    first: Option<Event>,
    /// The latest to be called.
    last: Option<Event>,
    observed: bool,
}

impl Cluster {
    /// `None`, before all times, where it is the start.
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
/// `events` are one key's, sorted by their calls, without refused operations and gets of unknown outcome.
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
            Outcome::Done => Some(get.answer),
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
    // A put of unknown outcome that nobody saw need not have happened.
    let clusters = clusters.into_values().filter(|cluster| cluster.observed);
    let (mut lasting, instant): (Vec<_>, Vec<_>) =
        clusters.partition(|cluster| cluster.first() < cluster.last());
    lasting.sort_unstable_by_key(Cluster::first);
    if let Some(pair) = lasting.windows(2).find(|pair| pair[1].first() < pair[0].last()) {
        return Some(Err(contradiction(&pair[0], &pair[1])));
    }
    for cluster in &instant {
        // Those before are apart from each other, so the last to begin is the last to end.
        let begun = lasting.partition_point(|lasting| lasting.first() < cluster.last());
        if let Some(around) = lasting[..begun].last().filter(|lasting| cluster.first() < lasting.last()) {
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
