//! Adds up the results of all ranks and makes the figures from them.

use std::time::{Duration, Instant};

use crosstie::bootstrap::Bootstrap;
use serde::{Deserialize, Serialize};

use super::Plan;
use super::client_pool::ClientResults;
use super::topology::{self, Topology};
use crate::copyrpc::COUNTERS;
use crate::error::Error;
use crate::figures::{self, Figures, LoopKind, Rank, Run};
use crate::median::median;
use crate::runner::{Collective, Counts};
use crosstie_kv::Backend;
use crosstie_kv::node::Node;

/// Time for all daemons to publish their counters, even on an overloaded machine.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(3);

/// What was done in one run: by one client, by all clients of a rank, or by all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Start and end of the run, on the machine's monotonic clock, in nanoseconds.
    pub(super) begun: u64,
    pub(super) ended: u64,
    /// Completed operations, including errors and those whose node was gone.
    pub(super) ops: u64,
    pub(super) errors: u64,
    pub(super) node_gone: u64,
    /// Operations of an open loop that should have started but did not.
    pub(super) not_started: u64,
    /// Whether a client ended the run by itself.
    pub(super) gave_up: bool,
    /// Whether a rank was interrupted.
    pub(super) interrupted: bool,
}

impl Tally {
    /// All together: from the first start to the last end. Without the same clock, only durations can be compared.
    pub(super) fn total(all: &[Tally], same_clock: bool) -> Tally {
        let mut total = Tally::default();
        all.iter().for_each(|one| total.add(one));
        if same_clock {
            total.begun = all.iter().map(|one| one.begun).min().unwrap_or(0);
            total.ended = all.iter().map(|one| one.ended).max().unwrap_or(0);
        } else {
            total.ended = all.iter().map(|one| one.ended.saturating_sub(one.begun)).max().unwrap_or(0);
        }
        total
    }

    /// Adds counts, not times.
    pub(super) fn add(&mut self, other: &Tally) {
        self.ops += other.ops;
        self.errors += other.errors;
        self.node_gone += other.node_gone;
        self.not_started += other.not_started;
        self.gave_up |= other.gave_up;
        self.interrupted |= other.interrupted;
    }

    pub(super) fn seconds(&self) -> f64 {
        self.ended.saturating_sub(self.begun) as f64 / 1e9
    }

    /// Whether no more runs should follow. Clients that record also stop when their recorder is full; that does not count.
    pub(super) fn ends(&self, recorded: bool) -> bool {
        self.interrupted || self.node_gone > 0 || (self.gave_up && !recorded)
    }
}

/// The counters of a node's daemons.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct NodeCounters {
    counts: Counts,
    batch_sizes: Vec<u64>,
}

impl NodeCounters {
    /// Reads the counters after each daemon has published them once more, which takes up to 50 ms.
    pub(super) fn of(node: &Node) -> NodeCounters {
        let passes = || node.counters().iter().map(|daemon| daemon.activity.passes).collect::<Vec<_>>();
        let (before, end) = (passes(), Instant::now() + PUBLISH_TIMEOUT);
        while before.iter().zip(passes()).any(|(before, now)| *before == now) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        let mut counters = NodeCounters::default();
        for daemon in node.counters() {
            let (counts, network, shard) = (daemon.activity, daemon.network, daemon.shard);
            let of_daemon = [
                ("passes", counts.passes),
                ("busy_passes", counts.busy_passes),
                ("naps", counts.sleeps),
                ("served", counts.served),
                ("forwarded", counts.forwarded),
                ("sent", counts.sent),
                ("backlogged", counts.backlogged),
                ("undelivered", counts.undelivered),
                ("client_requests", daemon.words.requests),
                ("string_requests", daemon.bytes.requests),
                ("ring_requests", daemon.ring.requests),
                ("gets", shard.gets),
                ("hits", shard.hits),
                ("puts", shard.puts),
                ("out_of_memory", shard.out_of_memory),
                ("messages", network.calls + network.replies),
            ];
            let of_network = COUNTERS.map(|(name, count)| (name, count(&network)));
            counters.counts.add(Counts::new(of_daemon.into_iter().chain(of_network), 0));
            counters.add_sizes(&network.batch_sizes);
        }
        counters
    }

    pub(super) fn since(mut self, before: &NodeCounters) -> NodeCounters {
        for (name, count) in &mut self.counts.counters {
            *count = count.saturating_sub(before.counts.counter(name));
        }
        for (count, before) in self.batch_sizes.iter_mut().zip(&before.batch_sizes) {
            *count = count.saturating_sub(*before);
        }
        self
    }

    fn add_sizes(&mut self, sizes: &[u64]) {
        self.batch_sizes.resize(self.batch_sizes.len().max(sizes.len()), 0);
        for (sum, count) in self.batch_sizes.iter_mut().zip(sizes) {
            *sum += count;
        }
    }
}

/// The results of one rank over all runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankResults {
    rank: u32,
    tally: Tally,
    seconds: f64,
    /// Memory in use, and its limit.
    memory: [u64; 2],
    max: u64,
    /// The latencies are those of its clients.
    counters: NodeCounters,
}

impl RankResults {
    pub(super) fn new(
        rank: u32,
        tally: Tally,
        seconds: f64,
        memory: [u64; 2],
        mut counters: NodeCounters,
        found: &[ClientResults],
    ) -> RankResults {
        for (value, times) in found.iter().flat_map(|found| &found.latency) {
            counters.counts.latency.record_n(*value, *times);
        }
        let max = found.iter().map(|found| found.max).max().unwrap_or(0);
        RankResults { rank, tally, seconds, memory, max, counters }
    }
}

/// Exchanges the results between all ranks.
pub(super) fn exchange(job: &mut dyn Bootstrap, own: &RankResults) -> Result<Vec<RankResults>, Error> {
    Collective { job }.gather_values(Ok(own.clone()))
}

/// The figures of `all` ranks, or of those that are left, in the runs that all finished.
pub(super) fn figures(
    plan: &Plan,
    topology: &Topology,
    backend: Backend,
    nodes: u32,
    runs: &[Tally],
    all: &[RankResults],
) -> Figures {
    let mut counters = NodeCounters::default();
    let mut local = Tally::default();
    for of_rank in all {
        local.add(&of_rank.tally);
        counters.counts.add(of_rank.counters.counts.clone());
        counters.add_sizes(&of_rank.counters.batch_sizes);
    }
    let NodeCounters { counts: Counts { counters, latency, .. }, batch_sizes } = &mut counters;
    let clients = u64::from(nodes * plan.clients);
    for (name, count) in [
        ("not_started", local.not_started),
        ("timed", latency.count()),
        ("keys_used", plan.workload.expected_keys(clients)),
    ] {
        counters.insert(name.into(), count);
    }
    let rate = |ops: u64, seconds: f64| if seconds > 0.0 { (ops as f64 / seconds).round() } else { 0.0 };
    let mut runs: Vec<Run> = runs
        .iter()
        .map(|sums| Run { ops: sums.ops, seconds: sums.seconds(), ops_per_s: rate(sums.ops, sums.seconds()) })
        .collect();
    let longest = all.iter().map(|local| local.seconds).fold(0.0, f64::max);
    if runs.is_empty() || (all.len() as u32) < nodes {
        // Of runs that not all ranks finished, only the results of the surviving ranks are known.
        runs = vec![Run { ops: local.ops, seconds: longest, ops_per_s: rate(local.ops, longest) }];
    }
    let median = median(runs.iter().map(|run| run.ops_per_s)).unwrap_or(0.0);
    let quantile = |q| latency.quantile(q).unwrap_or(0);
    let max = all.iter().map(|local| local.max).max().unwrap_or(0);
    let sizes = batch_sizes.iter().enumerate().filter(|(_, count)| **count > 0);
    Figures {
        bench: figures::BENCH.into(),
        device: plan.device.to_string(),
        backend,
        ops: local.ops,
        seconds: runs.iter().map(|run| run.seconds).sum(),
        ops_per_s: median,
        runs,
        p50_ns: quantile(0.5),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        max_ns: max.max(quantile(1.0)),
        latency: latency.counts().map(|(value, count)| [value, count]).collect(),
        batches: sizes.map(|(log, count)| [1 << log, *count]).collect(),
        errors: local.errors,
        node_gone: local.node_gone,
        interrupted: false,
        counters: std::mem::take(counters),
        per_rank: all
            .iter()
            .map(|RankResults { rank, tally, seconds, memory: [used, bound], .. }| Rank {
                rank: *rank,
                ops_per_s: rate(tally.ops, *seconds),
                errors: tally.errors,
                memory_bytes: *used,
                memory_bound_bytes: Some(*bound),
            })
            .collect(),
        nodes,
        daemons: plan.daemons,
        clients: plan.clients,
        client_threads: Some(topology.threads),
        processes: plan.processes.is_some(),
        queue_depth: plan.queue_depth,
        loop_kind: if plan.rate.is_some() { LoopKind::Open } else { LoopKind::Closed },
        rate: plan.rate,
        read_ratio: plan.workload.read_ratio,
        keys: plan.workload.keys,
        zipf: plan.workload.zipf.unwrap_or(0.0),
        value_bytes: plan.workload.value_size as u64,
        local_share: plan.workload.local_share,
        seed: plan.workload.seed,
        launcher: plan.launcher.clone(),
        cores: topology.cores.clone(),
        machine: topology::machine_description(),
        limit_ns: None,
        limit_ops_per_s: None,
        ratio_to_limit: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_sum_up_all_ranks_from_the_first_start_to_the_last_end() {
        let ranks = [
            Tally { begun: 100, ended: 200, ops: 5, errors: 1, ..Tally::default() },
            Tally { begun: 150, ended: 270, ops: 7, interrupted: true, ..Tally::default() },
        ];
        let total = Tally::total(&ranks, true);
        let expected =
            Tally { begun: 100, ended: 270, ops: 12, errors: 1, interrupted: true, ..Tally::default() };
        assert_eq!(total, expected);
        // Without a common clock, the time is that of the slowest rank.
        assert_eq!(Tally::total(&ranks, false).seconds(), 120e-9);
        assert!(total.ends(true));
        assert!(!Tally { gave_up: true, ..Tally::default() }.ends(true));
        assert!(Tally { gave_up: true, ..Tally::default() }.ends(false));
    }
}
