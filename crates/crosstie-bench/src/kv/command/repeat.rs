//! Independent runs: each run starts its own cluster, and their figures are merged.
//!
//! What a cluster is like for its whole life, such as where its memory lies or which thread got which core, differs from one start to
//! the next. Runs of one cluster share it and look more alike than they are; two clusters of the same code then seem to differ.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::figures::{Figures, Rank};
use crate::kv::Outcome;
use crate::median::median;
use crosstie::telemetry::Histogram;

use super::arguments::Arguments;
use crate::error::Error;

/// Calls `launch` once for each run, with options for one run. The order of the backends alternates. Ends early after an error or an
/// interruption.
pub(super) fn run_independently(
    arguments: &Arguments,
    interrupt: &AtomicBool,
    mut launch: impl FnMut(u32, &Arguments) -> Result<Outcome, Error>,
) -> Result<Outcome, Error> {
    let (mut parts, mut error) = (Vec::new(), None);
    for run in 0..arguments.runs {
        let mut one = arguments.clone();
        one.runs = 1;
        one.duration = arguments.duration / f64::from(arguments.runs);
        if run % 2 == 1 {
            one.backend.reverse();
        }
        let mut outcome = match launch(run, &one) {
            // Interrupted before this run was measured: keeps the runs before.
            Err(_) if !parts.is_empty() && interrupt.load(Relaxed) => {
                parts.iter_mut().flatten().for_each(|figures: &mut Figures| figures.interrupted = true);
                break;
            }
            outcome => outcome?,
        };
        if run % 2 == 1 {
            outcome.figures.reverse();
        }
        let over = outcome.error.is_some() || outcome.figures.iter().any(|figures| figures.interrupted);
        parts.push(outcome.figures);
        if over {
            error = outcome.error;
            break;
        }
    }
    let backends = parts.iter().map(Vec::len).min().unwrap_or(0);
    let of_backend = |nth: usize| parts.iter().filter_map(|figures| figures.get(nth).cloned()).collect();
    Ok(Outcome { figures: (0..backends).filter_map(|nth| merge(of_backend(nth))).collect(), error })
}

/// Merges the figures of several runs of one plan. `None` if there are none.
fn merge(parts: Vec<Figures>) -> Option<Figures> {
    let mut merged = parts.first()?.clone();
    let sum = |count: fn(&Figures) -> u64| parts.iter().map(count).sum::<u64>();
    merged.ops = sum(|part| part.ops);
    merged.errors = sum(|part| part.errors);
    merged.node_gone = sum(|part| part.node_gone);
    merged.seconds = parts.iter().map(|part| part.seconds).sum();
    merged.interrupted = parts.iter().any(|part| part.interrupted);
    merged.runs = parts.iter().flat_map(|part| part.runs.iter().copied()).collect();
    merged.ops_per_s = median(merged.runs.iter().map(|run| run.ops_per_s)).unwrap_or(0.0);
    let mut latency = Histogram::new();
    for [value, count] in parts.iter().flat_map(|part| &part.latency) {
        latency.record_n(*value, *count);
    }
    let quantile = |q| latency.quantile(q).unwrap_or(0);
    (merged.p50_ns, merged.p99_ns, merged.p999_ns) = (quantile(0.5), quantile(0.99), quantile(0.999));
    merged.max_ns = parts.iter().map(|part| part.max_ns).max().unwrap_or(0);
    merged.latency = latency.counts().map(|(value, count)| [value, count]).collect();
    merged.batches.clear();
    for [size, count] in parts.iter().flat_map(|part| &part.batches) {
        match merged.batches.binary_search_by_key(size, |[size, _]| *size) {
            Ok(at) => merged.batches[at][1] += count,
            Err(at) => merged.batches.insert(at, [*size, *count]),
        }
    }
    for part in &parts[1..] {
        for (name, count) in &part.counters {
            // Every run has the same keys.
            if name != "keys_used" {
                *merged.counters.entry(name.clone()).or_default() += count;
            }
        }
    }
    merged.per_rank = merged.per_rank.iter().map(|rank| merge_rank(*rank, &parts)).collect();
    let limits: Vec<f64> = parts.iter().filter_map(|part| part.limit_ops_per_s).collect();
    merged.set_limit(median(limits));
    Some(merged)
}

fn merge_rank(first: Rank, parts: &[Figures]) -> Rank {
    let ranks = || parts.iter().flat_map(|part| &part.per_rank).filter(move |rank| rank.rank == first.rank);
    Rank {
        ops_per_s: median(ranks().map(|rank| rank.ops_per_s)).unwrap_or(0.0),
        errors: ranks().map(|rank| rank.errors).sum(),
        memory_bytes: ranks().map(|rank| rank.memory_bytes).max().unwrap_or(0),
        ..first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crosstie_kv::Backend;

    fn figures(backend: Backend, ops: u64) -> Figures {
        let text = format!(
            r#"{{"bench": "kv", "device": "software", "backend": "{}", "ops": {ops}, "seconds": 1, "ops_per_s": {ops},
            "runs": [{{"ops": {ops}, "seconds": 1, "ops_per_s": {ops}}}], "p50_ns": {ops}, "p99_ns": {ops}, "p999_ns": {ops},
            "max_ns": {ops}, "latency": [[{ops}, 10]], "batches": [[1, 5], [{ops}, 2]], "errors": 1, "node_gone": 0,
            "interrupted": false, "nodes": 2, "daemons": 1, "clients": 1, "processes": false, "queue_depth": 1, "loop": "closed",
            "read_ratio": 0.5, "keys": 1000, "zipf": 0, "value_bytes": 8, "seed": 1, "launcher": "local",
            "counters": {{"batches": 10}}, "per_rank": [{{"rank": 1, "ops_per_s": {ops}, "errors": 1, "memory_bytes": {ops}}}]}}"#,
            backend.as_str(),
        );
        crate::figures::parse(text.as_bytes()).unwrap().remove(0)
    }

    #[test]
    fn every_run_starts_its_own_cluster_and_the_order_of_backends_alternates() {
        let arguments = Arguments { runs: 3, duration: 6.0, ..Arguments::example() };
        let mut launches = Vec::new();
        let outcome = run_independently(&arguments, &AtomicBool::new(false), |run, one| {
            launches.push((run, one.runs, one.duration, one.backend.clone()));
            let made =
                |backend: &Backend| figures(*backend, 32 << (run + 4 * u32::from(*backend == Backend::Meta)));
            Ok(Outcome { figures: one.backend.iter().map(made).collect(), error: None })
        });
        let both = vec![Backend::Meta, Backend::Delegation];
        let reversed = vec![Backend::Delegation, Backend::Meta];
        assert_eq!(launches, [(0, 1, 2.0, both.clone()), (1, 1, 2.0, reversed), (2, 1, 2.0, both.clone())]);
        let found = outcome.unwrap().figures;
        assert_eq!(found.iter().map(|figures| figures.backend).collect::<Vec<_>>(), both);
        let delegation = &found[1];
        let runs: Vec<u64> = delegation.runs.iter().map(|run| run.ops).collect();
        assert_eq!((runs, delegation.ops, delegation.ops_per_s), (vec![32, 64, 128], 224, 64.0));
        assert_eq!((delegation.p50_ns, delegation.max_ns, delegation.errors), (64, 128, 3));
        assert_eq!(delegation.counters["batches"], 30);
        assert_eq!(delegation.batches, [[1, 15], [32, 2], [64, 2], [128, 2]]);
        assert_eq!((delegation.per_rank[0].errors, delegation.per_rank[0].memory_bytes), (3, 128));
    }

    #[test]
    fn interrupted_run_ends_the_benchmark_and_keeps_the_runs_before() {
        let arguments = Arguments { runs: 5, ..Arguments::example() };
        let outcome = run_independently(&arguments, &AtomicBool::new(false), |run, one| {
            let interrupted = run == 1;
            let made = |backend: &Backend| Figures { interrupted, ..figures(*backend, 32) };
            Ok(Outcome { figures: one.backend.iter().map(made).collect(), error: None })
        });
        let found = outcome.unwrap().figures;
        assert!(found.iter().all(|figures| figures.interrupted && figures.runs.len() == 2));
    }
}
