//! The result of a benchmark: as JSON and as a table.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use crate::error::Error;
use crate::limits::{CacheLinePingPong, LARGE};
use crate::runner::{Job, Measured, Role};
use crate::units::{scaled, time};
use crate::{
    output,
    table::{self, DASH},
};

/// Fields of the JSON object that only some benchmarks have.
pub(crate) type Fields = BTreeMap<&'static str, Value>;

/// Fields with these names; those whose value is null are left out.
pub(crate) fn fields<const N: usize>(fields: [(&'static str, Value); N]) -> Fields {
    let mut present = Fields::new();
    // Not `collect`, which sorts: each caller would get a sort function of its own.
    present.extend(fields.into_iter().filter(|(_, value)| !value.is_null()));
    present
}

/// A line of the table: a name, the figure of crosstie, its limit, and the ratio of both.
pub(crate) type Row = [String; 4];

/// A line of the table without a limit.
pub(crate) fn row(name: &str, figure: String) -> Row {
    [name.into(), figure, dash(), dash()]
}

fn dash() -> String {
    DASH.into()
}

/// What a benchmark adds to its result.
#[derive(Debug)]
pub(crate) struct Report {
    /// Bytes that one operation moves, and whether the result has bytes per second.
    pub(crate) payload: usize,
    pub(crate) has_bytes: bool,
    /// Operations in flight. The latency of one alone is compared with the round trip of a cache line.
    pub(crate) queue_depth: Option<usize>,
    /// Operations per second of the plain code, and whether the result can be compared with it.
    pub(crate) limit: Option<f64>,
    pub(crate) is_comparable: bool,
    /// Figures that only this benchmark has.
    pub(crate) figures: Fields,
    pub(crate) rows: Vec<Row>,
    /// What follows the table.
    pub(crate) details: String,
}

impl Report {
    pub(crate) fn new(payload: usize, queue_depth: Option<usize>, limit: Option<f64>) -> Report {
        Report {
            payload,
            has_bytes: payload >= LARGE,
            queue_depth,
            limit,
            is_comparable: true,
            figures: Fields::new(),
            rows: Vec::new(),
            details: String::new(),
        }
    }
}

/// The JSON object that `--json` prints. Limits are absent if the two sides are on different machines. Ratios are absent if the
/// limit measures something else than the benchmark.
#[derive(Debug, Serialize)]
pub struct Summary {
    bench: &'static str,
    device: String,
    #[serde(flatten)]
    options: Fields,
    processes: bool,
    /// The cores of the leading side, of the other side, and of further ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    cores: Option<Vec<usize>>,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    /// Operations that failed or carried wrong data.
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<f64>,
    #[serde(flatten)]
    figures: Fields,
    counters: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ns: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_in_place_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_two_rings_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_to_limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_to_limit: Option<f64>,
    #[serde(skip)]
    as_json: bool,
    #[serde(skip)]
    what: String,
    #[serde(skip)]
    rows: Vec<Row>,
    #[serde(skip)]
    details: String,
}

impl Summary {
    pub(crate) fn new(job: Job<'_>, report: Report, measured: &Measured) -> Summary {
        let Report { payload, has_bytes, queue_depth, limit, is_comparable, .. } = report;
        let main = &measured.outcomes[0];
        let quantile = |q| main.counts.latency.quantile(q).unwrap_or(0);
        let ops_per_s = measured.rate(Role::Main).unwrap_or(0.0);
        let bytes = |ops: f64| has_bytes.then_some(ops * payload as f64);
        let (bytes_per_s, limit_bytes_per_s) =
            (bytes(ops_per_s), measured.rate(Role::Memcpy).and_then(bytes));
        let limit_ns = measured.median_latency(Role::CacheLine).map(CacheLinePingPong::one_round_trip);
        let ratio = |figure: f64, limit: Option<f64>| {
            limit.filter(|limit| is_comparable && *limit > 0.0).map(|limit| round(figure / limit, 1e4))
        };
        Summary {
            bench: job.bench,
            device: job.device,
            options: job.options,
            processes: measured.processes,
            cores: measured.cores.clone(),
            ops: main.slices.iter().map(|slice| slice.operations).sum(),
            seconds: round(main.slices.iter().map(|slice| slice.time).sum::<Duration>().as_secs_f64(), 1e6),
            ops_per_s: round(ops_per_s, 1.0),
            p50_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            errors: measured.outcomes.iter().map(|outcome| outcome.counts.errors).sum(),
            bytes_per_s: bytes_per_s.map(f64::round),
            figures: report.figures,
            counters: main.counts.counters.clone(),
            limit_ns: limit_ns.map(|ns| round(ns, 10.0)),
            limit_ops_per_s: limit.map(f64::round),
            limit_in_place_ops_per_s: measured.rate(Role::InPlace).map(f64::round),
            limit_two_rings_ops_per_s: measured.rate(Role::TwoRings).map(f64::round),
            limit_bytes_per_s: limit_bytes_per_s.map(f64::round),
            ratio_to_limit: ratio(ops_per_s, limit),
            latency_to_limit: ratio(quantile(0.5) as f64, limit_ns.filter(|_| queue_depth == Some(1))),
            bytes_to_limit: bytes_per_s.and_then(|bytes| ratio(bytes, limit_bytes_per_s)),
            as_json: job.common.json,
            what: format!("{}, {}", job.what, participants(job.ranks, measured)),
            rows: report.rows,
            details: report.details,
        }
    }

    /// Prints it to standard output, as the options of the benchmark ask. Messages with wrong data are an error.
    pub fn print(&self) -> Result<(), Error> {
        output::print(&if self.as_json { output::json(self)? } else { self.table() })?;
        if self.errors > 0 { Err(Error::WrongData(self.errors)) } else { Ok(()) }
    }

    /// The result as a table: crosstie beside the limits of the machine.
    fn table(&self) -> String {
        let ratio = |ratio: Option<f64>| ratio.map_or_else(dash, |ratio| format!("{ratio:.2}"));
        let limit = |limit: Option<f64>| limit.map_or_else(dash, scaled);
        let mut rows = vec![[String::new(), "crosstie".into(), "limit".into(), "ratio".into()]];
        let operations = scaled(self.ops_per_s);
        rows.push([
            "operations/s".into(),
            operations,
            limit(self.limit_ops_per_s),
            ratio(self.ratio_to_limit),
        ]);
        if let Some(bytes) = self.bytes_per_s {
            let memcpy = limit(self.limit_bytes_per_s);
            rows.push(["bytes/s".into(), scaled(bytes), memcpy, ratio(self.bytes_to_limit)]);
        }
        let round_trip = self.limit_ns.map_or_else(dash, |ns| time(ns.round() as u64));
        // One cache line says nothing about a batch of many blocks.
        let latency_to_limit = self.latency_to_limit.filter(|_| !self.figures.contains_key("issue_p50_ns"));
        rows.push(["p50".into(), time(self.p50_ns), round_trip, ratio(latency_to_limit)]);
        rows.extend([row("p99", time(self.p99_ns)), row("p99.9", time(self.p999_ns))]);
        for (name, limit) in [
            ("plain code, in place", self.limit_in_place_ops_per_s),
            ("plain code, two rings", self.limit_two_rings_ops_per_s),
        ] {
            rows.extend(limit.map(|limit| [name.into(), dash(), scaled(limit), dash()]));
        }
        rows.extend_from_slice(&self.rows);
        let counters: Vec<String> =
            self.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "{}, device {}\n\n{}\n{}{} operations in {:.2} s, {} errors; {}\n\
             limit: minimal code for the same operations; for p50, the round trip of one cache line; for bytes, memcpy\n",
            self.what,
            self.device,
            table::figures(&rows),
            self.details,
            self.ops,
            self.seconds,
            self.errors,
            counters.join(", ")
        )
    }
}

/// How many threads or processes there are, and where.
fn participants(ranks: usize, measured: &Measured) -> String {
    let kind = if measured.processes { "processes" } else { "threads" };
    let cores = measured.cores.as_ref().map_or_else(
        || "placed by the system".to_owned(),
        |cores| format!("on cores {}", cores.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    );
    format!("{ranks} {kind} {cores}")
}

/// Rounds to so many steps of 1.
pub(crate) fn round(figure: f64, steps: f64) -> f64 {
    (figure * steps).round() / steps
}
