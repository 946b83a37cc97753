//! `cargo xtask bench-peers`: ours beside others, on the same two cores, interleaved in one run.
//!
//! Every round measures everything once; what is compared are medians over the rounds. Progress goes to standard error.
//! UCX is compared with our calls, Redis and memcached with our store. Whatever was started for it ends with it.

mod compare;
mod memcached;
mod redis;
mod server;
mod ucx;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use serde_json::Value;

use self::compare::{COMPARISONS, Comparison, Row, alone, named, table, to_json};
use self::memcached::Memcached;
use self::redis::Redis;
use self::ucx::Ucx;
use crate::error::{Error, with_path};
use crate::process::{self, run_for_output, run_inheriting_output, with_timeout};
use crate::workspace;

/// No measurement of ours takes longer.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// How often everything is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds for each measurement
    #[arg(long, value_name = "S", default_value_t = 0.3)]
    seconds: f64,
    /// Only beside this one; may be given several times
    #[arg(long, value_name = "PEER")]
    only: Vec<Peer>,
}

/// Whom we are measured beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Peer {
    Ucx,
    Redis,
    Memcached,
}

/// Two cores, those of everybody.
#[derive(Clone, Copy, Debug)]
struct Cores([u64; 2]);

impl Cores {
    /// The first two that we may use; twice the same where it is the only one.
    fn first() -> Result<Cores, Error> {
        let path = "/proc/self/status";
        let status = fs::read_to_string(path).map_err(with_path(path))?;
        let list =
            status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        let mut allowed = list.split(',').flat_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |text: &str| text.trim().parse().unwrap_or(0u64);
            number(first)..=number(last)
        });
        let first = allowed.next().unwrap_or(0);
        Ok(Cores([first, allowed.next().unwrap_or(first)]))
    }
}

impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.0[0], self.0[1])
    }
}

/// What a measurement found.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// Operations or messages.
    per_second: f64,
    p50_ns: f64,
    /// One cache line there and back.
    cache_line_ns: Option<f64>,
}

/// Something to measure.
enum Probe {
    /// `crosstie bench`, with these arguments.
    Ours(&'static [&'static str]),
    /// Requests and replies, of so many bytes, so many in flight.
    UcxCalls(usize, usize),
    /// A test of `ucx_perftest`, with messages of so many bytes, so many of them per second of measuring.
    UcxPerftest(&'static str, usize, f64),
    /// Our store on one node, so many operations in flight on each connection.
    Store(usize),
    /// Redis, so many to a pipeline on each connection.
    Redis(usize),
    /// memcached, so many to a pipeline on each connection.
    Memcached(usize),
}

const LARGE: usize = 65536;

/// Everything that is measured, by name.
const PROBES: &[(&str, Probe)] = &[
    ("copyrpc 32 B depth 1", Probe::Ours(&["copyrpc", "--processes"])),
    ("ucx 32 B depth 1", Probe::UcxCalls(32, 1)),
    ("ucp_am_lat 32 B", Probe::UcxPerftest("ucp_am_lat", 32, 8e5)),
    ("copyrpc 32 B depth 64", Probe::Ours(&["copyrpc", "--processes", "--queue-depth", "64"])),
    ("ucx 32 B depth 16", Probe::UcxCalls(32, 16)),
    ("ucx 32 B depth 64", Probe::UcxCalls(32, 64)),
    ("copyrpc 32 B depth 256", Probe::Ours(&["copyrpc", "--processes", "--queue-depth", "256"])),
    ("ucx 32 B depth 256", Probe::UcxCalls(32, 256)),
    ("copyrpc 64 KiB depth 1", Probe::Ours(&["copyrpc", "--processes", "--payload", "65536"])),
    ("ucx 64 KiB depth 1", Probe::UcxCalls(LARGE, 1)),
    (
        "copyrpc 64 KiB depth 4",
        Probe::Ours(&["copyrpc", "--processes", "--payload", "65536", "--queue-depth", "4"]),
    ),
    ("ucx 64 KiB depth 4", Probe::UcxCalls(LARGE, 4)),
    (
        "copyrpc 64 KiB one way depth 4",
        Probe::Ours(&[
            "copyrpc",
            "--processes",
            "--payload",
            "65536",
            "--response",
            "8",
            "--queue-depth",
            "4",
        ]),
    ),
    ("ucp_am_bw 64 KiB", Probe::UcxPerftest("ucp_am_bw", LARGE, 2e5)),
    ("ipc depth 1", Probe::Ours(&["ipc", "--processes"])),
    ("ipc depth 32", Probe::Ours(&["ipc", "--processes", "--queue-depth", "32"])),
    ("delegation depth 1", Probe::Ours(&["delegation", "--processes"])),
    ("delegation depth 32", Probe::Ours(&["delegation", "--processes", "--queue-depth", "32"])),
    ("flux depth 1", Probe::Ours(&["flux"])),
    ("flux depth 32", Probe::Ours(&["flux", "--queue-depth", "32"])),
    ("store depth 1", Probe::Store(1)),
    ("redis pipeline 1", Probe::Redis(1)),
    ("memcached pipeline 1", Probe::Memcached(1)),
    ("store depth 16", Probe::Store(16)),
    ("redis pipeline 16", Probe::Redis(16)),
    ("memcached pipeline 16", Probe::Memcached(16)),
];

pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let asked = |peer: Peer| options.only.is_empty() || options.only.contains(&peer);
    let compared: Vec<&Comparison> = COMPARISONS.iter().filter(|comparison| asked(comparison.peer)).collect();
    let mut build = Command::new(workspace::cargo());
    build.current_dir(workspace::root()).args(["build", "--release", "-p", "crosstie-cli"]);
    run_inheriting_output(&mut build)?;
    let mut cores = Cores::first()?;
    let peers = Peers {
        ucx: asked(Peer::Ucx).then(Ucx::prepare).transpose()?,
        redis: asked(Peer::Redis).then(|| Redis::start(cores)).transpose()?,
        memcached: asked(Peer::Memcached).then(|| Memcached::start(cores)).transpose()?,
    };
    let has_store = has_store()?;
    if !has_store && options.only != [Peer::Ucx] {
        eprintln!(
            "xtask: this crosstie has no `bench kv`: Redis and memcached are measured without ours beside them"
        );
    }
    let named = named(&compared);
    let mut found: BTreeMap<&str, Vec<Figures>> = BTreeMap::new();
    for round in 1..=options.rounds {
        for (name, probe) in PROBES {
            if !named.contains(name) || (matches!(probe, Probe::Store(_)) && !has_store) {
                continue;
            }
            eprintln!("xtask: round {round} of {}: {name}", options.rounds);
            if let Some(figures) = peers.measure(probe, options.seconds, &mut cores)? {
                found.entry(name).or_default().push(figures);
            }
        }
    }
    let versions = peers.versions();
    drop(peers);
    let medians: BTreeMap<&str, Figures> =
        found.iter().filter_map(|(name, all)| Some((*name, middle(all)?))).collect();
    let rows: Vec<Row> = compared.iter().filter_map(|comparison| Row::new(comparison, &medians)).collect();
    if options.json {
        println!("{}", to_json(options, &versions, &medians, &rows));
    } else {
        print!(
            "{}{}",
            table(options, &versions, &rows),
            if has_store { String::new() } else { alone(&medians) }
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Those that were asked for.
struct Peers {
    ucx: Option<Ucx>,
    redis: Option<Redis>,
    memcached: Option<Memcached>,
}

impl Peers {
    /// `None` of a peer that was not asked for.
    fn measure(&self, probe: &Probe, seconds: f64, cores: &mut Cores) -> Result<Option<Figures>, Error> {
        let Peers { ucx, redis, memcached } = self;
        match *probe {
            Probe::Ours(arguments) => ours(arguments, seconds, cores).map(Some),
            Probe::Store(depth) => our_store(depth, seconds, *cores).map(Some),
            Probe::UcxCalls(payload, depth) => {
                ucx.as_ref().map(|ucx| ucx.calls(payload, depth, seconds, cores.0)).transpose()
            }
            Probe::UcxPerftest(test, size, pace) => {
                let count = (pace * seconds).max(100.0) as u64;
                ucx.as_ref().map(|ucx| ucx.perftest(test, size, count, cores.0)).transpose()
            }
            Probe::Redis(pipeline) => {
                redis.as_ref().map(|redis| redis.measure(pipeline, seconds)).transpose()
            }
            Probe::Memcached(pipeline) => {
                memcached.as_ref().map(|memcached| memcached.measure(pipeline, seconds)).transpose()
            }
        }
    }

    fn versions(&self) -> Versions {
        let Peers { ucx, redis, memcached } = self;
        let all = [
            ("UCX", ucx.as_ref().map(|ucx| &ucx.version)),
            ("Redis", redis.as_ref().map(|redis| &redis.version)),
            ("memcached", memcached.as_ref().map(|memcached| &memcached.version)),
        ];
        all.into_iter().filter_map(|(name, version)| Some((name, version?.clone()))).collect()
    }
}

/// What the peers are called, and their versions.
type Versions = Vec<(&'static str, String)>;

/// One `crosstie bench`. Sets `cores` to those that it used, for the others to use too.
fn ours(arguments: &[&str], seconds: f64, cores: &mut Cores) -> Result<Figures, Error> {
    let mut command = with_timeout(program(), LIMIT);
    command.arg("bench").args(arguments).args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = told(&mut command)?;
    let used =
        found["cores"].as_array().map(|used| used.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
    let used = used.and_then(|used| used.try_into().ok());
    cores.0 = used.ok_or_else(|| unexpected(&command, &format!("it did not have two cores: {found}")))?;
    Ok(figures)
}

/// Our store: one node, its daemon on one of the cores, and on the other one thread with as many clients as others have
/// connections.
fn our_store(depth: usize, seconds: f64, cores: Cores) -> Result<Figures, Error> {
    let mut command = with_timeout("taskset", LIMIT);
    command.args(["-c", &cores.to_string()]).arg(program()).args(["bench", "kv", "--backend", "delegation"]);
    command.args(["--nodes", "1", "--daemons", "1", "--clients", &server::CONNECTIONS.to_string()]);
    command.args(["--queue-depth", &depth.to_string()]);
    command.args(["--read-ratio", "0.5", "--keys", &server::KEYS.to_string(), "--zipf", "0", "--runs", "1"]);
    command.args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = told(&mut command)?;
    match found["errors"].as_u64() {
        Some(0) => Ok(figures),
        _ => Err(unexpected(&command, &format!("wrong answers: {found}"))),
    }
}

/// Whether the program has a store to measure.
fn has_store() -> Result<bool, Error> {
    let program = program();
    let mut help = Command::new(&program);
    let status = help.args(["bench", "kv", "--help"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.map(|status| status.success()).map_err(with_path(&program))
}

fn program() -> std::path::PathBuf {
    workspace::target().join("release/crosstie")
}

/// The JSON object that a benchmark of ours prints, and its figures.
fn told(command: &mut Command) -> Result<(Value, Figures), Error> {
    let text = run_for_output(command)?;
    let found: Value =
        serde_json::from_str(&text).map_err(|error| unexpected(command, &format!("{error}: {text}")))?;
    let figures = read(&found).ok_or_else(|| unexpected(command, &format!("figures are missing: {text}")))?;
    Ok((found, figures))
}

fn unexpected(command: &Command, what: &str) -> Error {
    Error::UnexpectedOutput { command: process::command_line(command), what: what.into() }
}

fn read(found: &Value) -> Option<Figures> {
    Some(Figures {
        per_second: found["ops_per_s"].as_f64()?,
        p50_ns: found["p50_ns"].as_f64()?,
        cache_line_ns: found["limit_ns"].as_f64(),
    })
}

/// The median of each figure.
fn middle(all: &[Figures]) -> Option<Figures> {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
        Some((values.get(low)? + values.get(high)?) / 2.0)
    };
    Some(Figures {
        per_second: median(all.iter().map(|figures| figures.per_second).collect())?,
        p50_ns: median(all.iter().map(|figures| figures.p50_ns).collect())?,
        cache_line_ns: median(all.iter().filter_map(|figures| figures.cache_line_ns).collect()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn there_are_cores() {
        let cores = Cores::first().expect("cores");
        assert_eq!(cores.to_string(), format!("{},{}", cores.0[0], cores.0[1]));
    }

    #[test]
    fn figures_are_read_and_their_medians_taken() {
        let found = json!({ "ops_per_s": 3.0, "p50_ns": 7, "limit_ns": 2.5 });
        assert_eq!(read(&found).map(|figures| figures.cache_line_ns), Some(Some(2.5)));
        assert!(read(&json!({ "ops_per_s": 3.0 })).is_none());
        let of = |per_second| Figures { per_second, p50_ns: -per_second, cache_line_ns: None };
        let middle = self::middle(&[of(3.0), of(1.0), of(2.0)]).expect("a median");
        assert_eq!((middle.per_second, middle.p50_ns, middle.cache_line_ns), (2.0, -2.0, None));
        assert_eq!(self::middle(&[of(1.0), of(2.0)]).map(|figures| figures.per_second), Some(1.5));
    }
}
