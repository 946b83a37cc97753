//! What a benchmark found, for scripts and for people.

use std::collections::BTreeMap;
use std::fmt::{self, Display};

use crosstie::telemetry::{Counters, Histogram};
use serde::Serialize;

use super::device::{Op, Plan};
use crate::table;

/// Everything a benchmark measured.
pub(crate) struct Figures<'a> {
    pub(crate) ops: u64,
    pub(crate) seconds: f64,
    pub(crate) ops_per_s: f64,
    pub(crate) latency: &'a Histogram,
    pub(crate) errors: u64,
    pub(crate) counters: Counters,
    pub(crate) limit_ns: Option<f64>,
    pub(crate) limit_ops_per_s: Option<f64>,
    pub(crate) bytes_per_s: Option<f64>,
    pub(crate) limit_bytes_per_s: Option<f64>,
}

/// The JSON object. Limits are absent where the two sides are on different machines.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    bench: &'static str,
    device: String,
    op: Op,
    payload: usize,
    queue_depth: usize,
    processes: bool,
    registered_in_place: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<[usize; 2]>,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    pub(crate) errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<f64>,
    counters: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ns: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_to_limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_to_limit: Option<f64>,
}

impl Report {
    pub(crate) fn new(plan: &Plan, cores: Option<[usize; 2]>, figures: &Figures<'_>) -> Report {
        let quantile = |q| figures.latency.quantile(q).unwrap_or(0);
        let p50_ns = quantile(0.5);
        Report {
            bench: "device",
            device: plan.device_text(),
            op: plan.op,
            payload: plan.payload,
            queue_depth: plan.depth,
            processes: plan.processes,
            registered_in_place: plan.in_place,
            cores,
            ops: figures.ops,
            seconds: round(figures.seconds, 1e6),
            ops_per_s: round(figures.ops_per_s, 1.0),
            p50_ns,
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            errors: figures.errors,
            bytes_per_s: figures.bytes_per_s.map(f64::round),
            counters: Counters::NAMES.into_iter().zip(figures.counters.words()).collect(),
            limit_ns: figures.limit_ns.map(|ns| round(ns, 10.0)),
            limit_ops_per_s: figures.limit_ops_per_s.map(f64::round),
            limit_bytes_per_s: figures.limit_bytes_per_s.map(f64::round),
            ratio_to_limit: figures.limit_ops_per_s.map(|limit| round(figures.ops_per_s / limit, 1e4)),
            latency_to_limit: figures
                .limit_ns
                .filter(|_| plan.depth == 1)
                .map(|limit| round(p50_ns as f64 / limit, 1e4)),
            bytes_to_limit: figures
                .bytes_per_s
                .zip(figures.limit_bytes_per_s)
                .map(|(ours, limit)| round(ours / limit, 1e4)),
        }
    }

    /// What was measured, in words.
    fn title(&self) -> String {
        let sides = if self.processes { "processes" } else { "threads" };
        let cores = match self.cores {
            Some([left, right]) => format!("on cores {left} and {right}"),
            None if self.limit_ns.is_none() => "where their launcher put them".into(),
            None => "on one core".into(),
        };
        let place = if self.registered_in_place { ", target registered in place" } else { "" };
        format!(
            "{} of {} B, queue depth {}, two {sides} {cores}, device {}{place}",
            self.op.name(),
            self.payload,
            self.queue_depth,
            self.device
        )
    }

    /// For people: our figures beside the machine's.
    pub(crate) fn table(&self) -> String {
        let mut rows = vec![[String::new(), "crosstie".into(), "limit".into(), "ratio".into()]];
        let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
        rows.push([
            "operations/s".into(),
            scaled(self.ops_per_s),
            self.limit_ops_per_s.map_or_else(|| "-".into(), scaled),
            ratio(self.ratio_to_limit),
        ]);
        if let Some(bytes) = self.bytes_per_s {
            let limit = self.limit_bytes_per_s.map_or_else(|| "-".into(), scaled);
            rows.push(["bytes/s".into(), scaled(bytes), limit, ratio(self.bytes_to_limit)]);
        }
        let line = self.limit_ns.map_or_else(|| "-".into(), |ns| format!("{ns:.0} ns"));
        rows.push(["p50".into(), format!("{} ns", self.p50_ns), line, ratio(self.latency_to_limit)]);
        for (name, ns) in [("p99", self.p99_ns), ("p99.9", self.p999_ns)] {
            rows.push([name.into(), format!("{ns} ns"), "-".into(), "-".into()]);
        }
        let counters: Vec<String> =
            self.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "{}\n\n{}\n{} operations in {:.2} s, {} errors; {}\n\
             limit: the plainest code for the same exchange; for p50, one cache line there and back; for bytes, memcpy\n",
            self.title(),
            table::figures(&rows),
            self.ops,
            self.seconds,
            self.errors,
            counters.join(", ")
        )
    }

    /// A row of a table of several benchmarks, see [`Report::HEADER`].
    pub(crate) fn row(&self) -> [String; 9] {
        let or_none =
            |figure: Option<f64>| figure.map_or_else(|| "-".into(), |figure| format!("{figure:.2}"));
        [
            self.op.name().into(),
            self.payload.to_string(),
            self.queue_depth.to_string(),
            scaled(self.ops_per_s),
            or_none(self.ratio_to_limit),
            self.p50_ns.to_string(),
            self.p99_ns.to_string(),
            self.bytes_per_s.map_or_else(|| "-".into(), scaled),
            or_none(self.bytes_to_limit),
        ]
    }

    /// Names of the columns of [`Report::row`].
    pub(crate) const HEADER: [&'static str; 9] =
        ["op", "bytes", "depth", "ops/s", "of limit", "p50 ns", "p99 ns", "bytes/s", "of memcpy"];

    /// One cache line there and back, in nanoseconds.
    pub(crate) fn line(&self) -> Option<f64> {
        self.limit_ns
    }
}

/// The middle one; `None` of none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// A figure with three digits and a unit.
fn scaled(figure: f64) -> String {
    struct Scaled(f64);
    impl Display for Scaled {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let (figure, unit) = match self.0 {
                x if x >= 1e9 => (x / 1e9, "G"),
                x if x >= 1e6 => (x / 1e6, "M"),
                x if x >= 1e3 => (x / 1e3, "k"),
                x => (x, ""),
            };
            let digits = if figure >= 99.95 {
                0
            } else if figure >= 9.995 {
                1
            } else {
                2
            };
            write!(f, "{figure:.digits$} {unit}")
        }
    }
    Scaled(figure).to_string().trim_end().to_owned()
}

fn round(figure: f64, steps: f64) -> f64 {
    (figure * steps).round() / steps
}
