//! What a simulation found.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::plan::Plan;

/// The result of one simulation. Times are virtual.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The scenario.
    pub scenario: &'static str,
    /// Members of the group.
    pub members: usize,
    /// The seed that repeats this run.
    pub seed: u64,
    /// Operations that succeeded.
    pub operations: u64,
    /// Operations that ended with an error: a death, a time-out, a busy lock.
    pub ended_with_error: u64,
    /// Virtual time of the whole run.
    pub virtual_ns: u64,
    /// Median time of an operation. Barrier: from the last entry to the last exit.
    pub p50_ns: u64,
    /// 99th percentile of the time of an operation.
    pub p99_ns: u64,
    /// Packets sent, by kind.
    pub packets: BTreeMap<&'static str, u64>,
    /// Packets of all kinds that the network lost. [`Scenario::Message`](crate::Scenario::Message) only, as the next two.
    pub lost: u64,
    /// Data packets that were sent again.
    pub resent: u64,
    /// Messages that travelled in the packet of an earlier one.
    pub combined: u64,
    /// Packets for each operation that succeeded.
    pub packets_per_operation: f64,
    /// What the checkers found wrong. Empty: the run is correct.
    pub failures: Vec<String>,
}

/// The most failures that an outcome lists.
const MAX_FAILURES: usize = 20;

impl Outcome {
    pub(crate) fn new(
        plan: &Plan,
        virtual_ns: u64,
        mut times: Vec<u64>,
        ended_with_error: u64,
        packets: BTreeMap<&'static str, u64>,
        mut failures: Vec<String>,
    ) -> Self {
        times.sort_unstable();
        let quantile = |q: f64| times.get(((times.len() as f64 * q) as usize).min(times.len().max(1) - 1));
        failures.truncate(MAX_FAILURES);
        let total: u64 = packets.values().sum();
        Outcome {
            scenario: plan.scenario.name(),
            members: plan.members,
            seed: plan.seed,
            operations: times.len() as u64,
            ended_with_error,
            virtual_ns,
            p50_ns: quantile(0.5).copied().unwrap_or(0),
            p99_ns: quantile(0.99).copied().unwrap_or(0),
            packets,
            lost: 0,
            resent: 0,
            combined: 0,
            packets_per_operation: total as f64 / times.len().max(1) as f64,
            failures,
        }
    }
}
