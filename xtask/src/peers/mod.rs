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
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::compare::{Comparison, LISTS, Row, measurement_names, table, to_json};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
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
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Figures {
    /// Operations or messages per second.
    #[serde(rename = "per_s")]
    per_second: f64,
    p50_ns: f64,
    /// The round trip of one cache line, where it is known.
    #[serde(rename = "limit_ns")]
    cache_line_ns: Option<f64>,
    /// Processor time of all processes for each operation.
    cpu_ns: Option<f64>,
}

impl Figures {
    fn new(per_second: f64, p50_ns: f64) -> Figures {
        Figures { per_second, p50_ns, cache_line_ns: None, cpu_ns: None }
    }
}

/// What to measure: `run` of a measurement in `comparisons.toml`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Measurement {
    /// `crosstie bench` with these arguments.
    Crosstie(String),
    /// iceoryx2 requests and responses of 32 bytes: how many are in flight.
    Iceoryx2(usize),
    /// Barriers and messages of OpenMPI.
    Openmpi,
    /// Barriers and messages of MPICH.
    Mpich,
    /// UCX requests and replies: their size in bytes, and how many are in flight.
    UcxRequests(usize, usize),
    /// A test of `ucx_perftest`: its name, the message size in bytes, and the number of messages per second of measuring.
    UcxPerftest(String, usize, f64),
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

/// The size of a large message, in bytes, in all measurements whose bytes per second are compared.
const LARGE: usize = 65536;

pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    let selected = |peer: Peer| options.only.is_empty() || options.only.contains(&peer);
    let compared: Vec<&Comparison> =
        LISTS.comparisons.iter().filter(|comparison| selected(comparison.peer)).collect();
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
    let names = measurement_names(&compared);
    let mut found: BTreeMap<&str, Vec<Figures>> = BTreeMap::new();
    for round in 1..=options.rounds {
        for (name, measurement) in LISTS.measurements().filter(|(name, _)| names.contains(name)) {
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
        print!("{}", table(options, &versions, &rows));
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
            Measurement::Crosstie(ref arguments) => measure_crosstie(arguments, seconds, cores).map(Some),
            Measurement::Iceoryx2(depth) => {
                iceoryx2.as_ref().map(|iceoryx2| iceoryx2.measure(depth, seconds, cores.0)).transpose()
            }
            Measurement::Openmpi => run_mpi(openmpi),
            Measurement::Mpich => run_mpi(mpich),
            Measurement::Store(depth, size) => measure_store(depth, size, seconds, *cores).map(Some),
            Measurement::UcxRequests(payload, depth) => {
                ucx.as_ref().map(|ucx| ucx.measure_requests(payload, depth, seconds, cores.0)).transpose()
            }
            Measurement::UcxPerftest(ref test, size, per_second) => {
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
fn measure_crosstie(arguments: &str, seconds: f64, cores: &mut Cores) -> Result<Figures, Error> {
    let mut command = with_timeout(crosstie_program(), TIMEOUT);
    command.arg("bench").args(arguments.split(' ')).args(["--json", "--duration", &seconds.to_string()]);
    let (found, figures) = run_program(&mut command, "ops_per_s", "p50_ns")?;
    let used =
        found["cores"].as_array().map(|used| used.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
    let used = used.and_then(|used| used.try_into().ok());
    cores.0 = used.ok_or_else(|| unexpected(&command, &format!("it did not use two cores: {found}")))?;
    Ok(figures)
}

/// Measures Crosstie's store: one node with its daemon on one core, and on the other core one thread with as many clients
/// as the other stores have connections.
fn measure_store(depth: usize, size: usize, seconds: f64, cores: Cores) -> Result<Figures, Error> {
    let mut command = with_timeout("taskset", TIMEOUT);
    command.args(["-c", &cores.to_string()]).arg(crosstie_program());
    command.args("bench kv --backend delegation --nodes 1 --daemons 1 --read-ratio 0.5 --runs 1".split(' '));
    command.args(["--clients", &server::CONNECTIONS.to_string(), "--keys", &server::KEYS.to_string()]);
    command.args(["--queue-depth", &depth.to_string(), "--payload", &size.to_string()]);
    command.args(["--json", "--duration", &seconds.to_string()]);
    run_program(&mut command, "ops_per_s", "p50_ns").map(|(_, figures)| figures)
}

fn crosstie_program() -> std::path::PathBuf {
    workspace::target().join("release/crosstie")
}

/// Runs a program that measures. Returns the JSON object that it prints, and the figures in it: the rate and the median with these names.
fn run_program(command: &mut Command, rate: &str, p50: &str) -> Result<(Value, Figures), Error> {
    let text = run_for_output(command)?;
    let found: Value =
        serde_json::from_str(&text).map_err(|error| unexpected(command, &format!("{error}: {text}")))?;
    let number =
        |name: &str| found[name].as_f64().ok_or_else(|| unexpected(command, &format!("no {name}: {text}")));
    if number("errors")? > 0.0 {
        return Err(unexpected(command, &format!("wrong responses: {text}")));
    }
    let cache_line_ns = found["limit_ns"].as_f64();
    let figures = Figures { cache_line_ns, ..Figures::new(number(rate)?, number(p50)?) };
    Ok((found, figures))
}

fn unexpected(command: &Command, what: &str) -> Error {
    Error::UnexpectedOutput { command: process::command_line(command), what: what.into() }
}

/// Returns the median of each figure.
fn medians_of(all: &[Figures]) -> Option<Figures> {
    let median = |of: fn(&Figures) -> Option<f64>| figures::median(all.iter().filter_map(of).collect());
    Some(Figures {
        per_second: median(|figures| Some(figures.per_second))?,
        p50_ns: median(|figures| Some(figures.p50_ns))?,
        cache_line_ns: median(|figures| figures.cache_line_ns),
        cpu_ns: median(|figures| figures.cpu_ns),
    })
}

#[cfg(test)]
mod tests {
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
        let print = |text: &str| run_program(Command::new("echo").arg(text), "ops_per_s", "p50_ns");
        let found = print(r#"{"ops_per_s": 3.0, "p50_ns": 7, "limit_ns": 2.5, "errors": 0}"#);
        assert_eq!(found.expect("figures").1.cache_line_ns, Some(2.5));
        for wrong in [r#"{"ops_per_s": 3.0, "errors": 0}"#, r#"{"ops_per_s": 3, "p50_ns": 7, "errors": 1}"#] {
            assert!(print(wrong).is_err(), "{wrong}");
        }
        let of = |per_second: f64| Figures::new(per_second, -per_second);
        let medians = medians_of(&[of(3.0), of(1.0), of(2.0)]).expect("a median");
        assert_eq!((medians.per_second, medians.p50_ns, medians.cache_line_ns), (2.0, -2.0, None));
        assert_eq!(medians_of(&[of(1.0), of(2.0)]).map(|figures| figures.per_second), Some(1.5));
    }
}
