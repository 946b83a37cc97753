//! `cargo xtask bench-peers`: measures Crosstie and other systems on the same two cores, interleaved in one run.
//!
//! Every round runs every measurement once; the medians over the rounds are compared. Progress goes to standard error. UCX
//! and iceoryx2 are compared with Crosstie's RPC, Redis and memcached with its store, OpenMPI and MPICH with its groups. All programs that this task starts end with it.

mod compare;
mod iceoryx2;
mod memcached;
mod mpi;
mod python;
mod redis;
mod server;
mod ucx;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::compare::{COMPARISONS, Comparison, Row, list_other_stores, measurement_names, table, to_json};
pub(crate) use self::compare::{comparison_table, factors};
use self::iceoryx2::Iceoryx2;
use self::memcached::Memcached;
use self::mpi::{MPICH, Mpi, OPENMPI};
use self::redis::Redis;
use self::ucx::Ucx;
use crate::error::{Error, with_path};
use crate::figures;
use crate::process::{self, run_for_output, run_inheriting_output, with_timeout};
use crate::workspace;

/// The longest time that one measurement of Crosstie may take.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds for each measurement
    #[arg(long, value_name = "S", default_value_t = 0.3)]
    seconds: f64,
    /// Compare only with this system (repeatable)
    #[arg(long, value_name = "PEER")]
    only: Vec<Peer>,
    /// Store what was measured in docs/figures/measured.json, and write the documents that show it
    #[arg(long)]
    record: bool,
}

/// A system to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Peer {
    Ucx,
    Iceoryx2,
    Redis,
    Memcached,
    Openmpi,
    Mpich,
}

/// The two cores that all measurements use.
#[derive(Clone, Copy, Debug)]
struct Cores([u64; 2]);

impl Cores {
    /// Returns the first two cores that this process may use; the same one twice when there is only one.
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

/// The result of one measurement.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// Operations or messages per second.
    per_second: f64,
    p50_ns: f64,
    /// The round trip of one cache line, where it is known.
    cache_line_ns: Option<f64>,
    /// Processor time of all processes for each operation.
    cpu_ns: Option<f64>,
}

/// What to measure.
enum Measurement {
    /// `crosstie bench` with these arguments.
    Crosstie(&'static [&'static str]),
    /// `crosstie bench lock`, `barrier` or `message` with these arguments.
    Group(&'static [&'static str]),
    /// iceoryx2 requests and responses of 32 bytes: how many are in flight.
    Iceoryx2(usize),
    /// Barriers and messages of OpenMPI.
    Openmpi,
    /// Barriers and messages of MPICH.
    Mpich,
    /// UCX requests and replies: their size in bytes, and how many are in flight.
    UcxRequests(usize, usize),
    /// A test of `ucx_perftest`: its name, the message size in bytes, and the number of messages per second of measuring.
    UcxPerftest(&'static str, usize, f64),
    /// Crosstie's store on one node, with this many operations in flight on each connection, and values of this many bytes: 8 are
    /// integers with integer keys, all others are byte strings.
    Store(usize, usize),
    /// Redis, with this many requests per pipeline on each connection.
    Redis(usize),
    /// memcached, with this many requests per pipeline on each connection.
    Memcached(usize),
}

/// The cores that all measurements share, and room for inexact clocks.
const MOST_BUSY_CORES: f64 = 2.2;

/// The size of a large message, in bytes.
const LARGE: usize = 65536;

/// All measurements, by name.
const MEASUREMENTS: &[(&str, Measurement)] = &[
    ("copyrpc 32 B depth 1", Measurement::Crosstie(&["copyrpc", "--processes"])),
    ("ucx 32 B depth 1", Measurement::UcxRequests(32, 1)),
    ("ucp_am_lat 32 B", Measurement::UcxPerftest("ucp_am_lat", 32, 8e5)),
    ("copyrpc 32 B depth 64", Measurement::Crosstie(&["copyrpc", "--processes", "--queue-depth", "64"])),
    ("ucx 32 B depth 16", Measurement::UcxRequests(32, 16)),
    ("ucx 32 B depth 64", Measurement::UcxRequests(32, 64)),
    ("copyrpc 32 B depth 256", Measurement::Crosstie(&["copyrpc", "--processes", "--queue-depth", "256"])),
    ("ucx 32 B depth 256", Measurement::UcxRequests(32, 256)),
    ("copyrpc 64 KiB depth 1", Measurement::Crosstie(&["copyrpc", "--processes", "--payload", "65536"])),
    ("ucx 64 KiB depth 1", Measurement::UcxRequests(LARGE, 1)),
    (
        "copyrpc 64 KiB depth 4",
        Measurement::Crosstie(&["copyrpc", "--processes", "--payload", "65536", "--queue-depth", "4"]),
    ),
    ("ucx 64 KiB depth 4", Measurement::UcxRequests(LARGE, 4)),
    (
        "copyrpc 64 KiB one way depth 4",
        Measurement::Crosstie(&[
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
    ("ucp_am_bw 64 KiB", Measurement::UcxPerftest("ucp_am_bw", LARGE, 2e5)),
    ("iceoryx2 depth 1", Measurement::Iceoryx2(1)),
    ("iceoryx2 depth 32", Measurement::Iceoryx2(32)),
    ("ipc depth 1", Measurement::Crosstie(&["ipc", "--processes"])),
    ("ipc depth 32", Measurement::Crosstie(&["ipc", "--processes", "--queue-depth", "32"])),
    ("delegation depth 1", Measurement::Crosstie(&["delegation", "--processes"])),
    ("delegation depth 32", Measurement::Crosstie(&["delegation", "--processes", "--queue-depth", "32"])),
    ("flux depth 1", Measurement::Crosstie(&["flux"])),
    ("flux depth 32", Measurement::Crosstie(&["flux", "--queue-depth", "32"])),
    ("store depth 1", Measurement::Store(1, 8)),
    ("store, bytes, depth 1", Measurement::Store(1, 9)),
    ("redis pipeline 1", Measurement::Redis(1)),
    ("memcached pipeline 1", Measurement::Memcached(1)),
    ("store depth 16", Measurement::Store(16, 8)),
    ("store, bytes, depth 16", Measurement::Store(16, 9)),
    ("redis pipeline 16", Measurement::Redis(16)),
    ("memcached pipeline 16", Measurement::Memcached(16)),
    ("barrier", Measurement::Group(&["barrier"])),
    ("openmpi", Measurement::Openmpi),
    ("mpich", Measurement::Mpich),
    ("message 64 B", Measurement::Group(&["message"])),
    ("message 64 B, 1 % loss", Measurement::Group(&["message", "--loss", "0.01"])),
    ("lock", Measurement::Group(&["lock"])),
];

pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let selected = |peer: Peer| options.only.is_empty() || options.only.contains(&peer);
    let compared: Vec<&Comparison> =
        COMPARISONS.iter().filter(|comparison| selected(comparison.peer)).collect();
    let mut build = Command::new(workspace::cargo());
    build.current_dir(workspace::root()).args(["build", "--release", "-p", "crosstie-cli"]);
    run_inheriting_output(&mut build)?;
    let mut cores = Cores::first()?;
    let peers = Peers {
        ucx: selected(Peer::Ucx).then(Ucx::prepare).transpose()?,
        iceoryx2: selected(Peer::Iceoryx2).then(Iceoryx2::prepare).transpose()?,
        redis: selected(Peer::Redis).then(|| Redis::start(cores)).transpose()?,
        memcached: selected(Peer::Memcached).then(|| Memcached::start(cores)).transpose()?,
        openmpi: selected(Peer::Openmpi).then(|| Mpi::prepare(&OPENMPI)).transpose()?,
        mpich: selected(Peer::Mpich).then(|| Mpi::prepare(&MPICH)).transpose()?,
    };
    let has_store = has_store()?;
    if !has_store && (selected(Peer::Redis) || selected(Peer::Memcached)) {
        eprintln!(
            "xtask: this build of crosstie has no `bench kv`: Redis and memcached are measured without a comparison"
        );
    }
    let names = measurement_names(&compared);
    let mut found: BTreeMap<&str, Vec<Figures>> = BTreeMap::new();
    for round in 1..=options.rounds {
        for (name, measurement) in MEASUREMENTS {
            if !names.contains(name) || (matches!(measurement, Measurement::Store(..)) && !has_store) {
                continue;
            }
            eprintln!("xtask: round {round} of {}: {name}", options.rounds);
            if let Some(figures) = peers.measure_with_cpu(measurement, options.seconds, &mut cores)? {
                found.entry(name).or_default().push(figures);
            }
        }
    }
    let versions = peers.versions();
    drop(peers);
    let medians: BTreeMap<&str, Figures> =
        found.iter().filter_map(|(name, all)| Some((*name, medians_of(all)?))).collect();
    let rows: Vec<Row> = compared.iter().filter_map(|comparison| Row::new(comparison, &medians)).collect();
    if options.record {
        figures::record_peers(&to_json(options, &versions, &medians, &rows))?;
    }
    if options.json {
        println!("{}", to_json(options, &versions, &medians, &rows));
    } else {
        print!(
            "{}{}",
            table(options, &versions, &rows),
            if has_store { String::new() } else { list_other_stores(&medians) }
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The systems that were selected.
struct Peers {
    ucx: Option<Ucx>,
    iceoryx2: Option<Iceoryx2>,
    redis: Option<Redis>,
    memcached: Option<Memcached>,
    openmpi: Option<Mpi>,
    mpich: Option<Mpi>,
}

impl Peers {
    /// Runs one measurement; `None` when its system was not selected.
    fn measure(
        &self,
        measurement: &Measurement,
        seconds: f64,
        cores: &mut Cores,
    ) -> Result<Option<Figures>, Error> {
        let Peers { ucx, iceoryx2, redis, memcached, openmpi, mpich } = self;
        let run_mpi = |mpi: &Option<Mpi>| mpi.as_ref().map(|mpi| mpi.measure(seconds, cores.0)).transpose();
        match *measurement {
            Measurement::Group(arguments) => measure_group(arguments, seconds).map(Some),
            Measurement::Iceoryx2(depth) => {
                iceoryx2.as_ref().map(|iceoryx2| iceoryx2.measure(depth, seconds, cores.0)).transpose()
            }
            Measurement::Openmpi => run_mpi(openmpi),
            Measurement::Mpich => run_mpi(mpich),
            Measurement::Crosstie(arguments) => measure_crosstie(arguments, seconds, cores).map(Some),
            Measurement::Store(depth, size) => measure_store(depth, size, seconds, *cores).map(Some),
            Measurement::UcxRequests(payload, depth) => {
                ucx.as_ref().map(|ucx| ucx.measure_requests(payload, depth, seconds, cores.0)).transpose()
            }
            Measurement::UcxPerftest(test, size, per_second) => {
                let count = (per_second * seconds).max(100.0) as u64;
                ucx.as_ref().map(|ucx| ucx.run_perftest(test, size, count, cores.0)).transpose()
            }
            Measurement::Redis(pipeline) => {
                redis.as_ref().map(|redis| redis.measure(pipeline, seconds)).transpose()
            }
            Measurement::Memcached(pipeline) => {
                memcached.as_ref().map(|memcached| memcached.measure(pipeline, seconds)).transpose()
            }
        }
    }

    /// Runs a measurement, and once more for three times as long. What the second run takes beyond the first one, it takes while it measures:
    /// what programs do at their start and end does not count. If other work on the machine makes the difference absurd, there is none. A benchmark of Crosstie spends a part of this time on plain code, whose
    /// threads are as busy as ours.
    fn measure_with_cpu(
        &self,
        measurement: &Measurement,
        seconds: f64,
        cores: &mut Cores,
    ) -> Result<Option<Figures>, Error> {
        let mut timed = |seconds| {
            let (began, cpu) = (Instant::now(), cpu_seconds());
            let figures = self.measure(measurement, seconds, cores)?;
            Ok::<_, Error>((figures, began.elapsed().as_secs_f64(), cpu_seconds() - cpu))
        };
        let (Some(figures), time, cpu) = timed(seconds)? else { return Ok(None) };
        let (_, longer_time, longer_cpu) = timed(3.0 * seconds)?;
        let busy_cores = (longer_cpu - cpu) / (longer_time - time);
        let is_possible = busy_cores > 0.0 && busy_cores <= MOST_BUSY_CORES;
        let cpu_ns = is_possible.then(|| 1e9 * busy_cores / figures.per_second);
        Ok(Some(Figures { cpu_ns, ..figures }))
    }

    fn versions(&self) -> Versions {
        let Peers { ucx, iceoryx2, redis, memcached, openmpi, mpich } = self;
        let all = [
            ("UCX", ucx.as_ref().map(|ucx| &ucx.version)),
            ("iceoryx2", iceoryx2.as_ref().map(|iceoryx2| &iceoryx2.version)),
            ("Redis", redis.as_ref().map(|redis| &redis.version)),
            ("memcached", memcached.as_ref().map(|memcached| &memcached.version)),
            ("OpenMPI", openmpi.as_ref().map(|mpi| &mpi.version)),
            ("MPICH", mpich.as_ref().map(|mpi| &mpi.version)),
        ];
        all.into_iter().filter_map(|(name, version)| Some((name, version?.clone()))).collect()
    }
}

/// The names of the systems and their versions.
type Versions = Vec<(&'static str, String)>;

/// Processor time in seconds of this process and of those that it has started: those that have ended, and those that run.
fn cpu_seconds() -> f64 {
    /// `USER_HZ`, which is the same on every Linux.
    const TICKS_PER_SECOND: f64 = 100.0;
    let this = std::process::id();
    let ticks = |stat: String| -> Option<u64> {
        // The name of the program is in parentheses and may contain spaces.
        let (before, after) = stat.rsplit_once(") ")?;
        let fields: Vec<u64> = after.split(' ').skip(1).map(|field| field.parse().unwrap_or(0)).collect();
        let is_ours = before.split(' ').next()?.parse() == Ok(this) || fields.first() == Some(&this.into());
        // utime, stime, cutime, cstime
        is_ours.then(|| fields.iter().skip(10).take(4).sum())
    };
    // Beside the processes there are `self` and `thread-self`, which are this one.
    let is_process =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().filter(is_process);
    // A process that has ended meanwhile has no file.
    let stats = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    stats.filter_map(ticks).sum::<u64>() as f64 / TICKS_PER_SECOND
}

/// Runs `crosstie bench`. Sets `cores` to the cores that it used, so that the other systems use the same.
fn measure_crosstie(arguments: &[&str], seconds: f64, cores: &mut Cores) -> Result<Figures, Error> {
    let mut command = with_timeout(crosstie_program(), TIMEOUT);
    command.arg("bench").args(arguments).args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = run_benchmark(&mut command)?;
    let used =
        found["cores"].as_array().map(|used| used.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
    let used = used.and_then(|used| used.try_into().ok());
    cores.0 = used.ok_or_else(|| unexpected(&command, &format!("it did not use two cores: {found}")))?;
    Ok(figures)
}

/// Runs a benchmark of groups with two members.
fn measure_group(arguments: &[&str], seconds: f64) -> Result<Figures, Error> {
    let mut command = with_timeout(crosstie_program(), TIMEOUT);
    command.arg("bench").args(arguments).args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = run_benchmark(&mut command)?;
    match found["errors"].as_u64() {
        Some(0) => Ok(figures),
        _ => Err(unexpected(&command, &format!("wrong messages: {found}"))),
    }
}

/// Measures Crosstie's store: one node with its daemon on one core, and on the other core one thread with as many clients
/// as the other stores have connections.
fn measure_store(depth: usize, size: usize, seconds: f64, cores: Cores) -> Result<Figures, Error> {
    let mut command = with_timeout("taskset", TIMEOUT);
    command.args(["-c", &cores.to_string()]).arg(crosstie_program()).args([
        "bench",
        "kv",
        "--backend",
        "delegation",
    ]);
    command.args(["--nodes", "1", "--daemons", "1", "--clients", &server::CONNECTIONS.to_string()]);
    command.args(["--queue-depth", &depth.to_string(), "--value-size", &size.to_string()]);
    command.args(["--read-ratio", "0.5", "--keys", &server::KEYS.to_string(), "--zipf", "0", "--runs", "1"]);
    command.args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = run_benchmark(&mut command)?;
    match found["errors"].as_u64() {
        Some(0) => Ok(figures),
        _ => Err(unexpected(&command, &format!("wrong responses: {found}"))),
    }
}

/// Whether the program has the command `bench kv`.
fn has_store() -> Result<bool, Error> {
    let program = crosstie_program();
    let mut help = Command::new(&program);
    let status = help.args(["bench", "kv", "--help"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.map(|status| status.success()).map_err(with_path(&program))
}

fn crosstie_program() -> std::path::PathBuf {
    workspace::target().join("release/crosstie")
}

/// Runs a benchmark of Crosstie. Returns the JSON object that it prints, and the figures in it.
fn run_benchmark(command: &mut Command) -> Result<(Value, Figures), Error> {
    let text = run_for_output(command)?;
    let found: Value =
        serde_json::from_str(&text).map_err(|error| unexpected(command, &format!("{error}: {text}")))?;
    let figures =
        parse_figures(&found).ok_or_else(|| unexpected(command, &format!("figures are missing: {text}")))?;
    Ok((found, figures))
}

fn unexpected(command: &Command, what: &str) -> Error {
    Error::UnexpectedOutput { command: process::command_line(command), what: what.into() }
}

fn parse_figures(found: &Value) -> Option<Figures> {
    Some(Figures {
        per_second: found["ops_per_s"].as_f64()?,
        p50_ns: found["p50_ns"].as_f64()?,
        cache_line_ns: found["limit_ns"].as_f64(),
        cpu_ns: None,
    })
}

/// Returns the median of each figure.
fn medians_of(all: &[Figures]) -> Option<Figures> {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
        Some((values.get(low)? + values.get(high)?) / 2.0)
    };
    Some(Figures {
        per_second: median(all.iter().map(|figures| figures.per_second).collect())?,
        p50_ns: median(all.iter().map(|figures| figures.p50_ns).collect())?,
        cache_line_ns: median(all.iter().filter_map(|figures| figures.cache_line_ns).collect()),
        cpu_ns: median(all.iter().filter_map(|figures| figures.cpu_ns).collect()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn processor_time_of_children_counts() {
        let before = cpu_seconds();
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let limit = Instant::now() + TIMEOUT;
        while cpu_seconds() < before + 0.05 {
            assert!(Instant::now() < limit, "a running child takes no time");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(cpu_seconds() >= before + 0.05, "the time of a child that has ended is kept");
    }

    #[test]
    fn allowed_cores_are_found() {
        let cores = Cores::first().expect("cores");
        assert_eq!(cores.to_string(), format!("{},{}", cores.0[0], cores.0[1]));
    }

    #[test]
    fn figures_are_parsed_and_their_medians_taken() {
        let found = json!({ "ops_per_s": 3.0, "p50_ns": 7, "limit_ns": 2.5 });
        assert_eq!(parse_figures(&found).map(|figures| figures.cache_line_ns), Some(Some(2.5)));
        assert!(parse_figures(&json!({ "ops_per_s": 3.0 })).is_none());
        let of = |per_second| Figures { per_second, p50_ns: -per_second, cache_line_ns: None, cpu_ns: None };
        let medians = medians_of(&[of(3.0), of(1.0), of(2.0)]).expect("a median");
        assert_eq!((medians.per_second, medians.p50_ns, medians.cache_line_ns), (2.0, -2.0, None));
        assert_eq!(medians_of(&[of(1.0), of(2.0)]).map(|figures| figures.per_second), Some(1.5));
    }
}
