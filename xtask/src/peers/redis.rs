//! Redis, loaded by its own `redis-benchmark`.
//!
//! `redis-benchmark` sends one command over and over, and has no mix. So it sends as many SETs, then as many GETs, and a
//! 1:1 mix would take the time of both: `2 / (1 / sets + 1 / gets)` operations per second. Keys are its own twelve digits,
//! chosen at random, and all of them are there; values have 8 bytes.

use std::time::Duration;

use super::server::{CONNECTIONS, Connection, KEYS, Server, version};
use super::{Cores, Figures};
use crate::error::Error;
use crate::packages::Packages;
use crate::process::{self, run_for_output, with_timeout};

/// No measurement takes longer.
const LIMIT: Duration = Duration::from_secs(120);

/// Keys that are stored with one round trip before measuring.
const BATCH: usize = 64;

/// A Redis that runs.
pub(super) struct Redis {
    pub(super) version: String,
    server: Server,
    cores: Cores,
}

impl Redis {
    /// Installs it if it is missing, starts it, and stores all keys.
    pub(super) fn start(cores: Cores) -> Result<Redis, Error> {
        ["redis-server", "redis-tools"].into_iter().collect::<Packages>().install()?;
        let server = Server::start("redis-server", cores, |socket| {
            ["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
                .map(str::to_owned)
                .into()
        })?;
        let mut connection = Connection::new(server.socket(), "redis-server")?;
        for first in (0..KEYS).step_by(BATCH) {
            let keys = first..KEYS.min(first + BATCH as u32);
            let set = |key: u32| format!("*3\r\n$3\r\nSET\r\n$12\r\n{key:012}\r\n$8\r\n{key:08}\r\n");
            connection.send(keys.clone().map(set).collect::<String>().as_bytes())?;
            connection.expect(&b"+OK\r\n".repeat(keys.len()))?;
        }
        Ok(Redis { version: version("redis-server")?, server, cores })
    }

    /// SETs and GETs, half of the time each, so many to a pipeline.
    pub(super) fn measure(&self, pipeline: usize, seconds: f64) -> Result<Figures, Error> {
        // About what it makes in a second: the benchmark counts, and knows no clock.
        let pace = 60e3 * pipeline as f64;
        let count = (pace * seconds).max(1000.0) as u64;
        let sets = self.command(pipeline, count, &["SET", "__rand_int__", "12345678"])?;
        let gets = self.command(pipeline, count, &["GET", "__rand_int__"])?;
        Ok(mixed(sets, gets))
    }

    fn command(&self, pipeline: usize, count: u64, command: &[&str]) -> Result<Figures, Error> {
        let mut benchmark = with_timeout("taskset", LIMIT);
        benchmark.args(["-c", &self.cores.to_string(), "redis-benchmark", "-s"]).arg(self.server.socket());
        benchmark.args(["-c", &CONNECTIONS.to_string(), "-P", &pipeline.to_string()]);
        benchmark.args(["-n", &count.to_string(), "-r", &KEYS.to_string(), "--csv"]).args(command);
        let text = run_for_output(&mut benchmark)?;
        figures(&text)
            .ok_or_else(|| Error::UnexpectedOutput { command: process::command_line(&benchmark), what: text })
    }
}

/// As many of one as of the other. The median of both together lies between the two; their mean stands for it.
fn mixed(one: Figures, other: Figures) -> Figures {
    Figures {
        per_second: 2.0 / (1.0 / one.per_second + 1.0 / other.per_second),
        p50_ns: f64::midpoint(one.p50_ns, other.p50_ns),
        cache_line_ns: None,
    }
}

/// Names in one line, figures in the next, all in quotes.
fn figures(text: &str) -> Option<Figures> {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("\"test\","));
    let cells = |line: &str| -> Vec<String> {
        line.split("\",\"").map(|cell| cell.trim_matches('"').to_owned()).collect()
    };
    let (names, values) = (cells(lines.next()?), cells(lines.next()?));
    let number = |name: &str| -> Option<f64> {
        let at = names.iter().position(|found| found == name)?;
        values.get(at)?.parse().ok().filter(|number: &f64| number.is_finite())
    };
    let per_second = number("rps").filter(|rate| *rate > 0.0)?;
    Some(Figures { per_second, p50_ns: 1e6 * number("p50_latency_ms")?, cache_line_ns: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_redis_benchmark_prints_is_read() {
        let text = "WARNING: something\n\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\"\n\
                    \"SET __rand_int__ 12345678\",\"18001.80\",\"0.191\",\"0.000\",\"0.023\"\n";
        let found = figures(text).expect("figures");
        assert_eq!((found.per_second, found.p50_ns.round()), (18001.8, 23_000.0));
        assert!(figures("").is_none());
        assert!(figures("\"test\",\"rps\"\n\"SET\",\"1\"\n").is_none(), "no latency");
        assert!(figures("\"test\",\"rps\",\"p50_latency_ms\"\n\"SET\",\"nan\",\"1\"\n").is_none());
    }

    #[test]
    fn a_mix_takes_the_time_of_both() {
        let of = |per_second| Figures { per_second, p50_ns: 1e9 / per_second, cache_line_ns: None };
        let mixed = mixed(of(100.0), of(300.0));
        assert!((mixed.per_second - 150.0).abs() < 1e-9, "{mixed:?}");
    }
}
