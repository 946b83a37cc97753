//! The results of a benchmark of the store: the JSON object that the benchmark prints and that reports read.
//!
//! A file has one object or an array of objects. The results of a sweep are many objects, in one file or in several. Fields that end in
//! `_ns` are nanoseconds; other times are seconds, rates are per second, and sizes are bytes. Every total is a sum over all ranks.
//!
//! Files are not trusted: [`read`] returns only results that have passed [`Figures::check`]. Otherwise it returns an error that names
//! the file and the field. Unknown fields are ignored.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crosstie_kv::Backend;
use crosstie_kv::sharding::{MAX_DAEMONS, MAX_NODES};

/// Most bytes of a file.
pub const MAX_FILE: usize = 64 << 20;
/// Most results in a file.
pub const MAX_RESULTS: usize = 4096;
/// Most bytes of a text in a result.
pub const MAX_TEXT: usize = 1024;
/// Most runs of a result.
pub const MAX_RUNS: usize = 4096;
/// Most buckets of a histogram. [`crosstie::telemetry::Histogram`] has fewer.
pub const MAX_BUCKETS: usize = 4096;
/// Most counters of a result.
pub const MAX_COUNTERS: usize = 1024;
/// The highest rate or time that is accepted.
pub const MAX_FIGURE: f64 = 1e18;
/// The value of [`Figures::bench`].
pub const BENCH: &str = "kv";

/// One result: one configuration, measured in one or several runs.
///
/// ```
/// use crosstie_bench::figures;
/// let text = r#"{
///     "bench": "kv", "device": "software", "backend": "delegation",
///     "ops": 3000, "seconds": 0.003, "ops_per_s": 1e6, "runs": [{"ops": 3000, "seconds": 0.003, "ops_per_s": 1e6}],
///     "p50_ns": 900, "p99_ns": 1100, "p999_ns": 1200, "max_ns": 1300,
///     "errors": 0, "node_gone": 0, "interrupted": false,
///     "nodes": 2, "daemons": 1, "clients": 1, "processes": false, "queue_depth": 1, "loop": "closed",
///     "read_ratio": 0.5, "keys": 1000, "zipf": 0, "value_bytes": 8, "seed": 1, "launcher": "local",
///     "counters": {"batches": 10}
/// }"#;
/// let results = figures::parse(text.as_bytes()).unwrap();
/// assert_eq!(results[0].backend, crosstie_kv::Backend::Delegation);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Always [`BENCH`].
    pub bench: String,
    /// The device specification, for example `software`.
    pub device: String,
    /// How requests reach other nodes.
    pub backend: Backend,

    /// Completed operations of all runs and ranks, including errors.
    pub ops: u64,
    /// Measured time, the sum of all runs.
    pub seconds: f64,
    /// Operations per second over all ranks: the median of the runs.
    pub ops_per_s: f64,
    /// Each run, in order. Empty if only the totals are known.
    #[serde(default)]
    pub runs: Vec<Run>,

    /// Median latency: from sending the request (in an open loop: from the intended start) until the client sees the response.
    pub p50_ns: u64,
    /// 99th percentile of the latency.
    pub p99_ns: u64,
    /// 99.9th percentile of the latency.
    pub p999_ns: u64,
    /// Maximum of the latency.
    pub max_ns: u64,
    /// Histogram of latencies: `[upper_ns, count]`, ascending. `count` operations took at most `upper_ns` and longer than the previous
    /// bucket. Merged over ranks and runs; empty if it was not recorded.
    #[serde(default)]
    pub latency: Vec<[u64; 2]>,
    /// Histogram of batch sizes: `[size, count]`, ascending powers of two. `count` WRITEs carried at most `size` messages and more than
    /// the previous bucket. Empty if nothing was sent to another node.
    #[serde(default)]
    pub batches: Vec<[u64; 2]>,

    /// Operations with a wrong response or without a response.
    pub errors: u64,
    /// Operations that failed because the node that owns the key was gone. They count in `ops`, not in `errors`.
    pub node_gone: u64,
    /// Whether the benchmark was interrupted; the figures cover the time until then.
    pub interrupted: bool,
    /// Exact counters, summed over all ranks and runs.
    pub counters: BTreeMap<String, u64>,
    /// The results of each rank.
    #[serde(default)]
    pub per_rank: Vec<Rank>,

    /// Nodes of the cluster.
    pub nodes: u32,
    /// Daemons of each node.
    pub daemons: u32,
    /// Clients of each node.
    pub clients: u32,
    /// Client threads of each node; a client process counts as one. Absent in results that do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_threads: Option<u32>,
    /// Whether clients are separate processes, not threads of their node.
    pub processes: bool,
    /// Operations that each client has in flight.
    pub queue_depth: u32,
    /// Closed or open loop.
    #[serde(rename = "loop")]
    pub loop_kind: LoopKind,
    /// Intended operations per second of all clients in an open loop; absent in a closed loop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// The share of gets, 0 to 1; the rest are puts.
    pub read_ratio: f64,
    /// Keys in the cluster.
    pub keys: u64,
    /// The exponent of the Zipf distribution of keys; 0 is uniform.
    pub zipf: f64,
    /// Bytes of a value.
    pub value_bytes: u64,
    /// The share of operations on keys of the client's own node, 0 to 1; absent if it follows from the distribution of keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_share: Option<f64>,
    /// The seed of the workload.
    pub seed: u64,
    /// The launcher of the ranks: `local`, `mpi` or `tcp`.
    pub launcher: String,
    /// The cores of daemons and client threads, as text; empty if threads were not pinned.
    #[serde(default)]
    pub cores: String,
    /// The processor and its number of cores, as text.
    #[serde(default)]
    pub machine: String,
    /// Round trip of one cache line between two cores; absent if it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ns: Option<f64>,
    /// Operations per second of minimal code for the same requests on the same cores in the same run; absent if there are several
    /// nodes, or if it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ops_per_s: Option<f64>,
    /// `ops_per_s / limit_ops_per_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_to_limit: Option<f64>,
}

/// When a client starts its next operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoopKind {
    /// When a response has come.
    Closed,
    /// At its scheduled time.
    Open,
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Completed operations of all ranks.
    pub ops: u64,
    /// Measured time.
    pub seconds: f64,
    /// Operations per second over all ranks.
    pub ops_per_s: f64,
}

/// One rank, over all runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// Which.
    pub rank: u32,
    /// Operations per second of its clients.
    pub ops_per_s: f64,
    /// Operations of its clients with a wrong response or without a response.
    pub errors: u64,
    /// Memory that its node uses.
    pub memory_bytes: u64,
    /// Upper limit of the memory that its node uses, see [`NodeConfig::memory_bound`](crosstie_kv::node::NodeConfig::memory_bound); absent
    /// if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bound_bytes: Option<u64>,
}

/// A value that no benchmark can have measured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} {what}")]
pub struct InvalidFigure {
    /// The field, as a path into the object.
    pub field: String,
    /// What is wrong with it.
    pub what: String,
}

/// Why a text cannot be read as results.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// It has more than [`MAX_FILE`] bytes.
    #[error("it has more than {MAX_FILE} bytes: split it into several files")]
    TooLarge,
    /// It is not JSON, or not a result.
    #[error("{}{source}", error_prefix(field))]
    Json {
        /// The field, as a path; `.` if the error is not in a field.
        field: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A value is impossible. In an array, the path of the field starts with the index of the result.
    #[error(transparent)]
    InvalidFigure(#[from] InvalidFigure),
    /// The array is empty.
    #[error("it has no results: run `crosstie bench kv --json` first")]
    Empty,
    /// It has more than [`MAX_RESULTS`] results.
    #[error("it has {0} results, but at most {MAX_RESULTS} are read: split it into several files")]
    TooMany(usize),
}

/// The beginning of an error text: the field, or that the text is not a result.
fn error_prefix(field: &str) -> String {
    if field == "." { "not a result of `bench kv --json`: ".to_owned() } else { format!("{field}: ") }
}

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It cannot be opened or read.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Its content is not valid.
    #[error("{path}: {source}", path = path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// The reason.
        source: ParseError,
    },
}

/// Reads the results in a file. There is at least one.
pub fn read(path: &Path) -> Result<Vec<Figures>, ReadError> {
    let mut text = Vec::new();
    // A device or a pipe may be endless.
    let read = File::open(path).and_then(|file| file.take(MAX_FILE as u64 + 1).read_to_end(&mut text));
    read.map_err(|source| ReadError::File { path: path.to_owned(), source })?;
    parse(&text).map_err(|source| ReadError::Parse { path: path.to_owned(), source })
}

/// Reads the results in a text. There is at least one.
pub fn parse(text: &[u8]) -> Result<Vec<Figures>, ParseError> {
    if text.len() > MAX_FILE {
        return Err(ParseError::TooLarge);
    }
    if text.trim_ascii_start().first() != Some(&b'[') {
        let figures: Figures = from_json(text)?;
        figures.check()?;
        return Ok(vec![figures]);
    }
    let results: Vec<Figures> = from_json(text)?;
    if results.is_empty() {
        return Err(ParseError::Empty);
    }
    if results.len() > MAX_RESULTS {
        return Err(ParseError::TooMany(results.len()));
    }
    for (at, figures) in results.iter().enumerate() {
        figures.check().map_err(|InvalidFigure { field, what }| InvalidFigure {
            field: format!("[{at}].{field}"),
            what,
        })?;
    }
    Ok(results)
}

/// Parses JSON. An error has the path of the field.
fn from_json<'a, T: Deserialize<'a>>(text: &'a [u8]) -> Result<T, ParseError> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader)
        .map_err(|error| ParseError::Json { field: error.path().to_string(), source: error.into_inner() })?;
    reader.end().map_err(|source| ParseError::Json { field: ".".into(), source })?;
    Ok(value)
}

impl Figures {
    /// Sets the limit, and the ratio to it.
    pub(crate) fn set_limit(&mut self, ops_per_s: Option<f64>) {
        let limit = ops_per_s.filter(|limit| *limit >= 1.0);
        self.limit_ops_per_s = limit.map(f64::round);
        self.ratio_to_limit = limit.map(|limit| (self.ops_per_s / limit * 1000.0).round() / 1000.0);
    }

    /// Checks that a benchmark can have measured this. Afterwards all figures are finite and not negative, percentiles and buckets are
    /// in ascending order, the sums of counts fit into 64 bits, and texts and lists have a limited length.
    pub fn check(&self) -> Result<(), InvalidFigure> {
        require(self.bench == BENCH, "bench", || format!("is {:?}, not {BENCH:?}", shortened(&self.bench)))?;
        for (name, text) in [
            ("device", &self.device),
            ("launcher", &self.launcher),
            ("cores", &self.cores),
            ("machine", &self.machine),
        ] {
            check_text(name, text)?;
        }
        for (name, figure) in [("seconds", self.seconds), ("ops_per_s", self.ops_per_s), ("zipf", self.zipf)]
        {
            check_figure(name, figure)?;
        }
        for (name, figure) in [
            ("rate", self.rate),
            ("limit_ns", self.limit_ns),
            ("limit_ops_per_s", self.limit_ops_per_s),
            ("ratio_to_limit", self.ratio_to_limit),
        ] {
            figure.map_or(Ok(()), |figure| check_figure(name, figure))?;
        }
        for (name, share) in [("read_ratio", Some(self.read_ratio)), ("local_share", self.local_share)] {
            let is_valid = share.is_none_or(|share| (0.0..=1.0).contains(&share));
            require(is_valid, name, || "is not between 0 and 1".into())?;
        }
        let open = self.loop_kind == LoopKind::Open;
        require(self.rate.is_some() == open, "rate", || {
            "must be given for an open loop, and only then".into()
        })?;
        for (name, count, most) in [
            ("nodes", self.nodes, MAX_NODES),
            ("daemons", self.daemons, MAX_DAEMONS),
            ("clients", self.clients, u32::MAX),
            ("queue_depth", self.queue_depth, u32::MAX),
        ] {
            require((1..=most).contains(&count), name, || format!("is {count}, not between 1 and {most}"))?;
        }
        let times = [
            ("p50_ns", self.p50_ns),
            ("p99_ns", self.p99_ns),
            ("p999_ns", self.p999_ns),
            ("max_ns", self.max_ns),
        ];
        for pair in times.windows(2) {
            let [(lower, less), (name, more)] = *pair else { continue };
            require(less <= more, name, || format!("is less than {lower}"))?;
        }
        check_histogram("latency", &self.latency)?;
        check_histogram("batches", &self.batches)?;
        let powers = self.batches.iter().all(|[size, _]| size.is_power_of_two());
        require(powers, "batches", || "has a size that is not a power of two".into())?;
        check_len("runs", self.runs.len(), MAX_RUNS)?;
        for (at, run) in self.runs.iter().enumerate() {
            check_figure(&format!("runs[{at}].seconds"), run.seconds)?;
            check_figure(&format!("runs[{at}].ops_per_s"), run.ops_per_s)?;
        }
        check_len("per_rank", self.per_rank.len(), MAX_NODES as usize)?;
        for (at, rank) in self.per_rank.iter().enumerate() {
            check_figure(&format!("per_rank[{at}].ops_per_s"), rank.ops_per_s)?;
        }
        check_len("counters", self.counters.len(), MAX_COUNTERS)?;
        self.counters.keys().try_for_each(|name| check_text("counters: a name", name))
    }
}

fn require(is_valid: bool, field: &str, what: impl FnOnce() -> String) -> Result<(), InvalidFigure> {
    if is_valid { Ok(()) } else { Err(InvalidFigure { field: field.into(), what: what() }) }
}

fn check_figure(field: &str, figure: f64) -> Result<(), InvalidFigure> {
    require((0.0..=MAX_FIGURE).contains(&figure), field, || {
        format!("is {figure:e}, not between 0 and {MAX_FIGURE:e}")
    })
}

fn check_len(field: &str, len: usize, most: usize) -> Result<(), InvalidFigure> {
    require(len <= most, field, || format!("has {len} entries, but at most {most} are read"))
}

fn check_text(field: &str, text: &str) -> Result<(), InvalidFigure> {
    require(text.len() <= MAX_TEXT, field, || {
        format!("has {} bytes, but at most {MAX_TEXT} are read", text.len())
    })
}

fn check_histogram(field: &str, buckets: &[[u64; 2]]) -> Result<(), InvalidFigure> {
    check_len(field, buckets.len(), MAX_BUCKETS)?;
    let ascending = buckets.is_sorted_by(|[one, _], [next, _]| one < next);
    require(ascending, field, || "is not in ascending order".into())?;
    let sum = buckets.iter().try_fold(0u64, |sum, [_, count]| sum.checked_add(*count));
    require(sum.is_some(), field, || "has counts whose sum exceeds 64 bits".into())
}

/// The beginning of a text, for an error.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn valid() -> Value {
        json!({
            "bench": "kv", "device": "software", "backend": "meta", "ops": 10, "seconds": 1.0, "ops_per_s": 10.0,
            "runs": [{"ops": 10, "seconds": 1.0, "ops_per_s": 10.0}],
            "p50_ns": 1, "p99_ns": 2, "p999_ns": 3, "max_ns": 4, "latency": [[1, 5], [4, 5]], "batches": [[1, 3], [2, 1]],
            "errors": 0, "node_gone": 0, "interrupted": false, "counters": {"batches": 4},
            "per_rank": [{"rank": 0, "ops_per_s": 10.0, "errors": 0, "memory_bytes": 4096}],
            "nodes": 2, "daemons": 2, "clients": 4, "client_threads": 2, "processes": true, "queue_depth": 4, "loop": "closed",
            "read_ratio": 0.5, "keys": 100, "zipf": 0.99, "value_bytes": 8, "local_share": 0.5, "seed": 7,
            "launcher": "local", "cores": "0 1", "machine": "a machine", "limit_ns": 150.5,
            "limit_ops_per_s": 20.0, "ratio_to_limit": 0.5,
        })
    }

    fn parsed(value: &Value) -> Result<Vec<Figures>, ParseError> {
        parse(value.to_string().as_bytes())
    }

    #[test]
    fn results_are_read_back_alone_and_in_an_array() {
        let one = parsed(&valid()).expect("figures");
        let again = serde_json::to_value(&one[0]).expect("JSON");
        assert_eq!(again, valid());
        assert_eq!(parsed(&json!([valid(), valid()])).expect("figures"), [one[0].clone(), one[0].clone()]);
        let mut later = valid();
        later["a field of a later version"] = json!([1, {"x": null}]);
        assert_eq!(parsed(&later).expect("figures"), one);
    }

    #[test]
    fn error_names_the_field() {
        let impossible: &[(&str, Value)] = &[
            ("bench", json!("ipc")),
            ("backend", json!("both")),
            ("ops", json!(-1)),
            ("ops", json!(1.5)),
            ("ops", json!("1")),
            ("ops", Value::Null),
            ("seconds", json!(-0.5)),
            ("p99_ns", json!(0)),
            ("max_ns", json!(2)),
            ("read_ratio", json!(1.01)),
            ("local_share", json!(-0.1)),
            ("rate", json!(5.0)),
            ("loop", json!("open")),
            ("nodes", json!(0)),
            ("nodes", json!(1_000_000)),
            ("daemons", json!(65)),
            ("clients", json!(0)),
            ("latency", json!([[2, 1], [1, 1]])),
            ("latency", json!([[1, u64::MAX], [2, 1]])),
            ("latency", json!([[1, 2, 3]])),
            ("batches", json!([[1, 1], [1, 1]])),
            ("batches", json!([[1, 1], [3, 1]])),
            ("ops_per_s", json!(1e19)),
            ("limit_ops_per_s", json!(-1.0)),
            ("ratio_to_limit", json!(1e19)),
            ("runs", json!([{"ops": 1, "seconds": 1.0}])),
            ("runs", json!([{"ops": 1, "seconds": 1.0, "ops_per_s": -1.0}])),
            ("device", json!("x".repeat(MAX_TEXT + 1))),
            ("counters", json!({ "x".repeat(MAX_TEXT + 1): 1 })),
            ("counters", json!({ "batches": 0.5 })),
            ("runs", json!(vec![json!({"ops": 1, "seconds": 1.0, "ops_per_s": 1.0}); MAX_RUNS + 1])),
        ];
        for (field, value) in impossible {
            let mut wrong = valid();
            wrong[*field] = value.clone();
            for (text, prefix) in [(wrong.clone(), ""), (json!([valid(), wrong]), "[1].")] {
                let error = parsed(&text).expect_err(field).to_string();
                let named = if *field == "loop" { "rate" } else { field };
                assert!(error.starts_with(&format!("{prefix}{named}")), "{field} = {value}: {error}");
            }
        }
        let mut lacking = valid();
        lacking.as_object_mut().expect("an object").remove("ops_per_s");
        assert!(parsed(&lacking).expect_err("a field is missing").to_string().contains("ops_per_s"));
    }

    #[test]
    fn numbers_that_are_not_finite_are_refused() {
        let text = valid().to_string().replace("\"seconds\":1.0", "\"seconds\":1e999");
        assert!(matches!(parse(text.as_bytes()), Err(ParseError::Json { .. })));
        let figures = Figures { ops_per_s: f64::NAN, ..parsed(&valid()).expect("figures").remove(0) };
        assert_eq!(figures.check().map_err(|error| error.field), Err("ops_per_s".into()));
    }

    #[test]
    fn too_large_or_missing_files_are_errors() {
        assert!(matches!(parse(&vec![b' '; MAX_FILE + 1]), Err(ParseError::TooLarge)));
        assert!(matches!(parse(b"[]"), Err(ParseError::Empty)));
        assert!(matches!(parsed(&json!(vec![valid(); MAX_RESULTS + 1])), Err(ParseError::TooMany(_))));
        assert!(matches!(parse(format!("{} {}", valid(), valid()).as_bytes()), Err(ParseError::Json { .. })));
        let error = read(Path::new("/no/such/file.json")).expect_err("no file").to_string();
        assert!(error.starts_with("/no/such/file.json: "), "{error}");
        assert!(matches!(
            read(Path::new("/dev/zero")),
            Err(ReadError::Parse { source: ParseError::TooLarge, .. })
        ));
    }

    #[test]
    fn deep_nesting_is_an_error() {
        assert!(parse(&vec![b'['; 1 << 20]).is_err());
        let deep = valid().to_string().replacen('{', &format!("{{\"x\":{}", "[".repeat(1 << 20)), 1);
        assert!(parse(deep.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn parsing_any_bytes_returns_valid_figures_or_an_error(bytes: Vec<u8>, at: prop::sample::Index, byte: u8) {
            prop_assert!(parse(&bytes).is_err());
            let mut text = valid().to_string().into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            if let Ok(results) = parse(&text) {
                prop_assert_eq!(results[0].check(), Ok(()));
            }
        }
    }
}
