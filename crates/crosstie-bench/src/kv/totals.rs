//! Adds up the results of all ranks and makes the figures from them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crosstie::bootstrap::Bootstrap;
use crosstie::telemetry::Histogram;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::client_pool::ClientResults;
use super::topology::{self, Topology};
use super::worker::Tally;
use super::{Error, Plan, gather};
use crate::figures::{self, Figures, LoopKind, Rank, Run};
use crate::median::median;
use crosstie_kv::Backend;
use crosstie_kv::node::Node;

/// Time for all daemons to publish their counters, even on an overloaded machine.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(3);

/// Totals of one run, of one rank or of all ranks.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RunTotals {
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) ops: u64,
    pub(super) errors: u64,
    pub(super) node_gone: u64,
    pub(super) not_started: u64,
    /// Number of ranks that were interrupted.
    pub(super) interrupted: u64,
    /// Number of clients that gave up.
    pub(super) gave_up: u64,
    /// Errors of this rank alone.
    pub(super) own_errors: u64,
    pub(super) own_node_gone: u64,
}

impl RunTotals {
    /// The totals of one rank's clients.
    pub(super) fn of(tallies: &[Tally]) -> RunTotals {
        let sum = |count: fn(&Tally) -> u64| tallies.iter().map(count).sum();
        RunTotals {
            begun: tallies.iter().map(|tally| tally.begun).min().unwrap_or(0),
            ended: tallies.iter().map(|tally| tally.ended).max().unwrap_or(0),
            ops: sum(|tally| tally.ops),
            errors: sum(|tally| tally.errors),
            node_gone: sum(|tally| tally.node_gone),
            not_started: sum(|tally| tally.not_started),
            gave_up: sum(|tally| u64::from(tally.gave_up)),
            ..RunTotals::default()
        }
    }

    /// The totals of all ranks. Without the same clock, only durations can be compared.
    pub(super) fn sum(all: &[RunTotals], same_clock: bool) -> RunTotals {
        let mut sums = RunTotals::default();
        all.iter().for_each(|one| sums.add(one));
        if same_clock {
            sums.begun = all.iter().map(|one| one.begun).min().unwrap_or(0);
            sums.ended = all.iter().map(|one| one.ended).max().unwrap_or(0);
        } else {
            sums.begun = 0;
            sums.ended = all.iter().map(|one| one.ended - one.begun.min(one.ended)).max().unwrap_or(0);
        }
        sums
    }

    /// Adds counts, not times.
    pub(super) fn add(&mut self, other: &RunTotals) {
        self.ops += other.ops;
        self.errors += other.errors;
        self.node_gone += other.node_gone;
        self.not_started += other.not_started;
        self.interrupted += other.interrupted;
        self.gave_up += other.gave_up;
    }

    pub(super) fn seconds(&self) -> f64 {
        self.ended.saturating_sub(self.begun) as f64 / 1e9
    }

    /// Whether no more runs should follow. Clients that record also stop when their recorder is full; that does not count.
    pub(super) fn ends(&self, recorded: bool) -> bool {
        self.interrupted > 0 || self.node_gone > 0 || (self.gave_up > 0 && !recorded)
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<RunTotals, Error> {
        RunTotals::read_from_bytes(bytes).map_err(|_| Error::Protocol)
    }
}

/// The counters of a node's daemons.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct NodeCounters {
    counters: BTreeMap<String, u64>,
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
            for (name, count) in [
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
                ("calls", network.calls),
                ("replies", network.replies),
                ("messages", network.calls + network.replies),
                ("batches", network.batches),
                ("batched", network.batched),
                ("credit_batches", network.credit_batches),
                ("wraps", network.wraps),
                ("direct", network.direct),
                ("reads", network.reads),
                ("work_requests", network.work_requests),
                ("signaled", network.signaled),
                ("bytes", network.bytes),
                ("completions", network.completions),
                ("violations", network.violations),
                ("failures", network.failures),
            ] {
                *counters.counters.entry(name.to_owned()).or_default() += count;
            }
            counters.add_sizes(&network.batch_sizes);
        }
        counters
    }

    pub(super) fn since(mut self, before: &NodeCounters) -> NodeCounters {
        for (name, count) in &mut self.counters {
            *count = count.saturating_sub(before.counters.get(name).copied().unwrap_or(0));
        }
        for (count, before) in self.batch_sizes.iter_mut().zip(&before.batch_sizes) {
            *count = count.saturating_sub(*before);
        }
        self
    }

    fn add(&mut self, other: &NodeCounters) {
        for (name, count) in &other.counters {
            *self.counters.entry(name.clone()).or_default() += count;
        }
        self.add_sizes(&other.batch_sizes);
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
    ops: u64,
    errors: u64,
    node_gone: u64,
    not_started: u64,
    seconds: f64,
    /// Memory in use, and its limit.
    memory: [u64; 2],
    latency: Vec<(u64, u64)>,
    max: u64,
    counters: NodeCounters,
}

impl RankResults {
    pub(super) fn new(
        rank: u32,
        sums: &RunTotals,
        seconds: f64,
        memory: [u64; 2],
        counters: NodeCounters,
        found: &[ClientResults],
    ) -> RankResults {
        let mut latency = Histogram::new();
        for (value, times) in found.iter().flat_map(|found| &found.latency) {
            latency.record_n(*value, *times);
        }
        RankResults {
            rank,
            ops: sums.ops,
            errors: sums.errors,
            node_gone: sums.node_gone,
            not_started: sums.not_started,
            seconds,
            memory,
            latency: latency.counts().collect(),
            max: found.iter().map(|found| found.max).max().unwrap_or(0),
            counters,
        }
    }
}

/// Exchanges the results between all ranks.
pub(super) fn exchange(job: &mut dyn Bootstrap, own: &RankResults) -> Result<Vec<RankResults>, Error> {
    let own = serde_json::to_vec(own).map_err(Error::from);
    let all = gather::gather(job, own)?;
    all.iter().map(|local| Ok(serde_json::from_slice(local)?)).collect()
}

/// The figures of `all` ranks, or of those that are left, in the runs that all finished.
pub(super) fn figures(
    plan: &Plan,
    topology: &Topology,
    backend: Backend,
    nodes: u32,
    runs: &[RunTotals],
    all: &[RankResults],
) -> Figures {
    let mut latency = Histogram::new();
    let mut counters = NodeCounters::default();
    for local in all {
        local.latency.iter().for_each(|(value, times)| latency.record_n(*value, *times));
        counters.add(&local.counters);
    }
    let sum = |count: fn(&RankResults) -> u64| all.iter().map(count).sum::<u64>();
    counters.counters.insert("not_started".into(), sum(|local| local.not_started));
    counters.counters.insert("timed".into(), latency.count());
    let clients = u64::from(nodes * plan.clients);
    counters.counters.insert("keys_used".into(), plan.workload.expected_keys(clients));
    let rate = |ops: u64, seconds: f64| if seconds > 0.0 { (ops as f64 / seconds).round() } else { 0.0 };
    let mut runs: Vec<Run> = runs
        .iter()
        .map(|sums| Run { ops: sums.ops, seconds: sums.seconds(), ops_per_s: rate(sums.ops, sums.seconds()) })
        .collect();
    let longest = all.iter().map(|local| local.seconds).fold(0.0, f64::max);
    if runs.is_empty() || (all.len() as u32) < nodes {
        // Of runs that not all ranks finished, only the results of the surviving ranks are known.
        let ops = sum(|local| local.ops);
        runs = vec![Run { ops, seconds: longest, ops_per_s: rate(ops, longest) }];
    }
    let median = median(runs.iter().map(|run| run.ops_per_s)).unwrap_or(0.0);
    let quantile = |q| latency.quantile(q).unwrap_or(0);
    let max = all.iter().map(|local| local.max).max().unwrap_or(0);
    let sizes = counters.batch_sizes.iter().enumerate().filter(|(_, count)| **count > 0);
    Figures {
        bench: figures::BENCH.into(),
        device: plan.device.to_string(),
        backend,
        ops: sum(|local| local.ops),
        seconds: runs.iter().map(|run| run.seconds).sum(),
        ops_per_s: median,
        runs,
        p50_ns: quantile(0.5),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        max_ns: max.max(quantile(1.0)),
        latency: latency.counts().map(|(value, count)| [value, count]).collect(),
        batches: sizes.map(|(log, count)| [1 << log, *count]).collect(),
        errors: sum(|local| local.errors),
        node_gone: sum(|local| local.node_gone),
        interrupted: false,
        counters: counters.counters,
        per_rank: all
            .iter()
            .map(|local| Rank {
                rank: local.rank,
                ops_per_s: rate(local.ops, local.seconds),
                errors: local.errors,
                memory_bytes: local.memory[0],
                memory_bound_bytes: Some(local.memory[1]),
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
            RunTotals { begun: 100, ended: 200, ops: 5, errors: 1, ..RunTotals::default() },
            RunTotals { begun: 150, ended: 270, ops: 7, interrupted: 1, ..RunTotals::default() },
        ];
        let sums = RunTotals::sum(&ranks, true);
        assert_eq!((sums.begun, sums.ended, sums.ops, sums.errors, sums.interrupted), (100, 270, 12, 1, 1));
        // Without a common clock, the time is that of the slowest rank.
        assert_eq!(RunTotals::sum(&ranks, false).seconds(), 120e-9);
        assert!(sums.ends(true));
        assert!(!RunTotals { gave_up: 1, ..RunTotals::default() }.ends(true));
        assert!(RunTotals { gave_up: 1, ..RunTotals::default() }.ends(false));
        assert_eq!(RunTotals::from_bytes(&sums.to_bytes()).unwrap().ops, 12);
        assert!(RunTotals::from_bytes(&[0; 3]).is_err());
    }
}
