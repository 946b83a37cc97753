//! The result of a benchmark of devices or RPC: as JSON and as a table.

use std::collections::BTreeMap;

use crosstie::telemetry::Histogram;
use serde::Serialize;

use crate::table;
use crate::units::{scaled, time};

/// From this payload in bytes on, the result includes bytes per second.
pub(crate) const LARGE: usize = 4096;

/// What was measured: the options of the benchmark. Options that a benchmark does not have are `None` and not in the JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Setup {
    pub(crate) bench: &'static str,
    pub(crate) device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) op: Option<&'static str>,
    pub(crate) payload: usize,
    /// Bytes of a response, if they differ from those of a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) response: Option<usize>,
    /// Blocks of one operation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) batch: Option<usize>,
    pub(crate) queue_depth: usize,
    /// Queue pairs of a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) qps: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) clients: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) endpoints: Option<usize>,
    pub(crate) processes: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiting: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) registered_in_place: Option<bool>,
    /// The cores of the leading side, of the other side, and of further clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cores: Option<Vec<usize>>,
}

impl Setup {
    /// A line of text that describes the setup. `may_be_remote`: the two sides may be on different machines.
    fn title(&self, may_be_remote: bool) -> String {
        let kind = if self.processes { "processes" } else { "threads" };
        let cores = match self.cores.as_deref() {
            Some([left, right]) => format!("on cores {left} and {right}"),
            Some(cores) => {
                let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
                format!("on cores {}", cores.join(", "))
            }
            None if may_be_remote => "placed by their launcher".into(),
            None => "on one core".into(),
        };
        let participants = match self.clients {
            None | Some(1) => format!("two {kind} {cores}"),
            Some(clients) => format!("one server and {clients} clients, {kind} {cores}"),
        };
        let waiting = self.waiting.map_or_else(String::new, |waiting| format!(", waiting: {waiting}"));
        let registration =
            if self.registered_in_place == Some(true) { ", target registered in place" } else { "" };
        let response =
            self.response.map_or_else(String::new, |response| format!(" with {response} B responses"));
        let endpoints = match self.endpoints {
            None => String::new(),
            Some(1) => ", one endpoint".into(),
            Some(endpoints) => format!(", {endpoints} endpoints"),
        };
        let batch = self.batch.filter(|batch| *batch > 1);
        let batch = batch.map_or_else(String::new, |batch| format!(" in batches of {batch}"));
        let qps = self.qps.map_or_else(String::new, |qps| format!(", queue pairs {qps}"));
        format!(
            "{} of {} B{batch}{response}, queue depth {}{qps}{endpoints}, {participants}, device {}{waiting}{registration}",
            self.op.unwrap_or(self.bench),
            self.payload,
            self.queue_depth,
            self.device
        )
    }
}

/// Everything that a benchmark measured.
pub(crate) struct Measurements<'a> {
    pub(crate) ops: u64,
    pub(crate) seconds: f64,
    pub(crate) ops_per_s: f64,
    pub(crate) latency: &'a Histogram,
    pub(crate) errors: u64,
    pub(crate) counters: BTreeMap<String, u64>,
    /// Throughput of the same RPCs with one SEND per message, if it was measured.
    pub(crate) sends_ops_per_s: Option<f64>,
    /// The same operations without an endpoint, if that was measured.
    pub(crate) beside_device: Option<Beside>,
    /// How long it takes to start an operation, if that was measured.
    pub(crate) issue_p50_ns: Option<u64>,
    pub(crate) limits: Limits,
}

/// Another way to do the same, measured in the same run.
#[derive(Clone, Copy)]
pub(crate) struct Beside {
    pub(crate) ops_per_s: f64,
    pub(crate) p50_ns: u64,
}

/// What the machine allows; a limit that was not measured is `None`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Limits {
    /// Round trip of one cache line.
    pub(crate) cache_line_ns: Option<f64>,
    /// Throughput of the plain code that the result is compared with.
    pub(crate) ops_per_s: Option<f64>,
    pub(crate) in_place_ops_per_s: Option<f64>,
    pub(crate) two_rings_ops_per_s: Option<f64>,
    /// Copies per second by memcpy of the same payload.
    pub(crate) copies_per_s: Option<f64>,
}

/// The JSON object that `--json` prints. Limits are absent if the two sides are on different machines. Ratios are absent if the
/// limit measures something else than the benchmark.
#[derive(Debug, Serialize)]
pub struct Summary {
    #[serde(flatten)]
    setup: Setup,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    /// Operations that failed or carried wrong data.
    pub errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages_per_batch: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sends_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    batching_gain: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    issue_p50_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_ops_per_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_p50_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio_to_device: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_to_device: Option<f64>,
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
}

impl Summary {
    pub(crate) fn new(setup: Setup, measurements: &Measurements<'_>) -> Summary {
        let Measurements {
            ops,
            seconds,
            ops_per_s,
            latency,
            errors,
            ref counters,
            sends_ops_per_s,
            beside_device,
            issue_p50_ns,
            limits,
        } = *measurements;
        let quantile = |q| latency.quantile(q).unwrap_or(0);
        let p50_ns = quantile(0.5);
        let bytes = |ops: f64| Some(ops * setup.payload as f64).filter(|_| setup.payload >= LARGE);
        let bytes_per_s = bytes(ops_per_s);
        let limit_bytes_per_s = limits.copies_per_s.and_then(bytes);
        // The limits are measured with one client.
        let comparable = setup.clients.is_none_or(|clients| clients == 1);
        let ratio = |figure: f64, limit: Option<f64>| {
            limit.filter(|_| comparable).map(|limit| round(figure / limit, 1e4))
        };
        Summary {
            ops,
            seconds: round(seconds, 1e6),
            ops_per_s: round(ops_per_s, 1.0),
            p50_ns,
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            errors,
            bytes_per_s: bytes_per_s.map(f64::round),
            messages_per_batch: messages_per_batch(counters),
            sends_ops_per_s: sends_ops_per_s.map(f64::round),
            batching_gain: sends_ops_per_s.map(|sends| round(ops_per_s / sends, 100.0)),
            issue_p50_ns,
            device_ops_per_s: beside_device.map(|device| device.ops_per_s.round()),
            device_p50_ns: beside_device.map(|device| device.p50_ns),
            ratio_to_device: beside_device.map(|device| round(ops_per_s / device.ops_per_s, 1e4)),
            latency_to_device: beside_device
                .filter(|device| device.p50_ns > 0)
                .map(|device| round(p50_ns as f64 / device.p50_ns as f64, 1e4)),
            counters: counters.clone(),
            limit_ns: limits.cache_line_ns.map(|ns| round(ns, 10.0)),
            limit_ops_per_s: limits.ops_per_s.map(f64::round),
            limit_in_place_ops_per_s: limits.in_place_ops_per_s.map(f64::round),
            limit_two_rings_ops_per_s: limits.two_rings_ops_per_s.map(f64::round),
            limit_bytes_per_s: limit_bytes_per_s.map(f64::round),
            ratio_to_limit: ratio(ops_per_s, limits.ops_per_s),
            latency_to_limit: ratio(p50_ns as f64, limits.cache_line_ns.filter(|_| setup.queue_depth == 1)),
            bytes_to_limit: bytes_per_s.and_then(|bytes| ratio(bytes, limit_bytes_per_s)),
            setup,
        }
    }

    /// The result as a table: crosstie beside the limits of the machine.
    pub fn table(&self) -> String {
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
        let round_trip = self.limit_ns.map_or_else(|| "-".into(), |ns| time(ns.round() as u64));
        // One cache line says nothing about a batch of many blocks.
        let latency_to_limit = self.latency_to_limit.filter(|_| self.issue_p50_ns.is_none());
        rows.push(["p50".into(), time(self.p50_ns), round_trip, ratio(latency_to_limit)]);
        for (name, ns) in [("p99", self.p99_ns), ("p99.9", self.p999_ns)] {
            rows.push([name.into(), time(ns), "-".into(), "-".into()]);
        }
        for (name, limit) in [
            ("plain code, in place", self.limit_in_place_ops_per_s),
            ("plain code, two rings", self.limit_two_rings_ops_per_s),
        ] {
            rows.extend(limit.map(|limit| [name.into(), "-".into(), scaled(limit), "-".into()]));
        }
        if let Some(messages) = self.messages_per_batch {
            rows.push(["messages per batch".into(), format!("{messages:.1}"), "-".into(), "-".into()]);
        }
        if let (Some(sends), Some(gain)) = (self.sends_ops_per_s, self.batching_gain) {
            rows.push(["one SEND per message".into(), scaled(sends), "-".into(), "-".into()]);
            rows.push(["batching gain".into(), format!("{gain:.1} x"), "-".into(), "-".into()]);
        }
        if let Some(ns) = self.issue_p50_ns {
            rows.push(["starting a batch, p50".into(), time(ns), "-".into(), "-".into()]);
        }
        if let (Some(device), Some(ns)) = (self.device_ops_per_s, self.device_p50_ns) {
            rows.push(["device alone".into(), "-".into(), scaled(device), ratio(self.ratio_to_device)]);
            rows.push(["device alone, p50".into(), "-".into(), time(ns), ratio(self.latency_to_device)]);
        }
        let counters: Vec<String> =
            self.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        format!(
            "{}\n\n{}\n{} operations in {:.2} s, {} errors; {}\n\
             limit: minimal code for the same operations; for p50, the round trip of one cache line; for bytes, memcpy\n",
            self.setup.title(self.limit_ns.is_none()),
            table::figures(&rows),
            self.ops,
            self.seconds,
            self.errors,
            counters.join(", ")
        )
    }
}

/// Average number of messages in a batch.
fn messages_per_batch(counters: &BTreeMap<String, u64>) -> Option<f64> {
    let (batched, batches) = (*counters.get("batched")?, *counters.get("batches")?);
    (batches > 0).then(|| round(batched as f64 / batches as f64, 100.0))
}

fn round(figure: f64, steps: f64) -> f64 {
    (figure * steps).round() / steps
}
