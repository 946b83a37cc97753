//! Redis, loaded by its own `redis-benchmark`.
//!
//! `redis-benchmark` repeats one command and cannot mix commands. So it sends SETs, then the same number of GETs. A 1:1 mix
//! takes the time of both: `2 / (1 / sets + 1 / gets)` operations per second. The keys are random numbers of twelve digits,
//! the form that `redis-benchmark` generates, and all of them exist; the values have 8 bytes.

use std::time::Duration;

use super::server::{CONNECTIONS, Connection, KEYS, Server, package_version};
use super::{Cores, Figures};
use crate::error::Error;
use crate::packages::Packages;
use crate::process::{self, run_for_output, with_timeout};

/// The longest time that one measurement may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How many keys are stored per round trip before measuring.
const BATCH: usize = 64;

/// A running Redis.
pub(super) struct Redis {
    pub(super) version: String,
    server: Server,
    cores: Cores,
}

impl Redis {
    /// Installs Redis if it is missing, starts it, and stores all keys.
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
        Ok(Redis { version: package_version("redis-server")?, server, cores })
    }

    /// Measures SETs and GETs, `pipeline` of them per round trip.
    pub(super) fn measure(&self, pipeline: usize, seconds: f64) -> Result<Figures, Error> {
        // redis-benchmark takes a number of requests, not a duration: this is about what it does in a second.
        let per_second = 60e3 * pipeline as f64;
        let count = (per_second * seconds).max(1000.0) as u64;
        let sets = self.run_benchmark(pipeline, count, &["SET", "__rand_int__", "12345678"])?;
        let gets = self.run_benchmark(pipeline, count, &["GET", "__rand_int__"])?;
        Ok(mix_figures(sets, gets))
    }

    fn run_benchmark(&self, pipeline: usize, count: u64, command: &[&str]) -> Result<Figures, Error> {
        let mut benchmark = with_timeout("taskset", TIMEOUT);
        benchmark.args(["-c", &self.cores.to_string(), "redis-benchmark", "-s"]).arg(self.server.socket());
        benchmark.args(["-c", &CONNECTIONS.to_string(), "-P", &pipeline.to_string()]);
        benchmark.args(["-n", &count.to_string(), "-r", &KEYS.to_string(), "--csv"]).args(command);
        let text = run_for_output(&mut benchmark)?;
        parse_figures(&text)
            .ok_or_else(|| Error::UnexpectedOutput { command: process::command_line(&benchmark), what: text })
    }
}

/// Combines the figures of two halves of a 1:1 mix. The median of the mix lies between the two medians; their mean is used
/// for it.
fn mix_figures(one: Figures, other: Figures) -> Figures {
    let per_second = 2.0 / (1.0 / one.per_second + 1.0 / other.per_second);
    Figures::new(per_second, f64::midpoint(one.p50_ns, other.p50_ns))
}

/// Parses CSV output: names in one line, figures in the next, all in quotes.
fn parse_figures(text: &str) -> Option<Figures> {
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
    Some(Figures::new(per_second, 1e6 * number("p50_latency_ms")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_redis_benchmark_output() {
        let text = "WARNING: something\n\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\"\n\
                    \"SET __rand_int__ 12345678\",\"18001.80\",\"0.191\",\"0.000\",\"0.023\"\n";
        let found = parse_figures(text).expect("figures");
        assert_eq!((found.per_second, found.p50_ns.round()), (18001.8, 23_000.0));
        assert!(parse_figures("").is_none());
        assert!(parse_figures("\"test\",\"rps\"\n\"SET\",\"1\"\n").is_none(), "no latency");
        assert!(parse_figures("\"test\",\"rps\",\"p50_latency_ms\"\n\"SET\",\"nan\",\"1\"\n").is_none());
    }

    #[test]
    fn mix_takes_the_time_of_both_halves() {
        let of = |per_second: f64| Figures::new(per_second, 1e9 / per_second);
        let mixed = mix_figures(of(100.0), of(300.0));
        assert!((mixed.per_second - 150.0).abs() < 1e-9, "{mixed:?}");
    }
}
