//! `crosstie bench rails`: messages over several rails, with the exact counters of each rail; with `--kill-rail`, while a rail fails;
//! with `--links`, also the split over links of different speed, a rail that fails and returns, and the time of the split decision.
//!
//! Sender and receiver are two threads of this process, each with its own devices. Links of limited speed and failures come from
//! the fault device, which wraps the devices.

mod link;
mod links;
mod stream;

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use crosstie::device::DeviceSpec;
use crosstie::rails::{MAX_RAILS, Split};
use serde::Serialize;

use crate::error::Error;
use crate::{table, units};
use links::Links;

/// Messages over several devices: bandwidth, latency, links of different speed, a rail that fails.
///
/// Sender and receiver are two threads of this process, each with its own devices.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure, unless --count is given
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub duration: f64,
    /// The devices, one per rail: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE. Both ends open them
    #[arg(long, value_delimiter = ',', default_value = "software,software", value_name = "SPEC,...")]
    pub device: Vec<DeviceSpec>,
    /// Bytes of a message
    #[arg(long, value_name = "BYTES", default_value_t = 65_536)]
    pub size: usize,
    /// How messages are split: `auto`, or a weight for each rail, as in 3:1
    #[arg(long, value_name = "A:B|auto", default_value = "auto")]
    pub split: SplitOption,
    /// Send so many messages
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Take the port of this rail down during the run; the first rail is 0
    #[arg(long, value_name = "I", requires = "count")]
    pub kill_rail: Option<usize>,
    /// When to take it down: after this share of the messages
    #[arg(long, value_name = "F", default_value_t = 0.5, requires = "kill_rail")]
    pub at: f64,
    /// Also measure two software rails with links of limited speed: the split, and a rail that fails and returns
    #[arg(long)]
    pub links: bool,
}

/// The value of `--split`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitOption {
    split: Split,
    /// How many weights were given; 0 for `auto`.
    weights: usize,
}

impl FromStr for SplitOption {
    type Err = String;

    fn from_str(text: &str) -> Result<SplitOption, String> {
        if text == "auto" {
            return Ok(SplitOption { split: Split::Adaptive, weights: 0 });
        }
        let mut weights = [0; MAX_RAILS];
        let parts: Vec<&str> = text.split(':').collect();
        if parts.len() > MAX_RAILS {
            return Err(format!("there are at most {MAX_RAILS} rails"));
        }
        for (weight, part) in weights.iter_mut().zip(&parts) {
            *weight = part.parse().map_err(|_| "give `auto`, or weights as in 3:1".to_owned())?;
        }
        if weights == [0; MAX_RAILS] {
            return Err("one weight must be above 0".to_owned());
        }
        Ok(SplitOption { split: Split::Fixed(weights), weights: parts.len() })
    }
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    devices: Vec<DeviceSpec>,
    size: usize,
    split: Split,
    duration: Duration,
    count: Option<u64>,
    /// The rail that fails, and after how many messages.
    kill: Option<(usize, u64)>,
    links: bool,
}

impl Plan {
    /// Checks the command line.
    pub fn new(arguments: &Arguments) -> Result<Plan, Error> {
        let usage = |text: String| Err(Error::Usage(text));
        let rails = arguments.device.len();
        if !(1..=MAX_RAILS).contains(&rails) {
            return usage(format!("--device needs 1 to {MAX_RAILS} devices, separated by commas"));
        }
        if arguments.size > 1 << 30 {
            return usage("--size: a message has at most 1 GiB".to_owned());
        }
        if !(0.001..=3600.0).contains(&arguments.duration) {
            return usage("--duration: give 0.001 to 3600 seconds".to_owned());
        }
        if arguments.count == Some(0) {
            return usage("--count: give at least 1".to_owned());
        }
        if ![0, rails].contains(&arguments.split.weights) {
            return usage(format!("--split: give a weight for each of the {rails} rails"));
        }
        if arguments.kill_rail.is_some_and(|rail| rail >= rails) {
            return usage(format!("--kill-rail: the rails are 0 to {}", rails - 1));
        }
        if arguments.kill_rail.is_some() && rails == 1 {
            return usage("--kill-rail: there is only one rail; give two devices".to_owned());
        }
        if !(0.0..=1.0).contains(&arguments.at) {
            return usage("--at: give a share of the messages, 0 to 1".to_owned());
        }
        let at = (arguments.count.unwrap_or(0) as f64 * arguments.at) as u64;
        Ok(Plan {
            devices: arguments.device.clone(),
            size: arguments.size,
            split: arguments.split.split,
            duration: Duration::from_secs_f64(arguments.duration),
            count: arguments.count,
            kill: arguments.kill_rail.map(|rail| (rail, at)),
            links: arguments.links,
        })
    }
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    bench: &'static str,
    device: String,
    payload: usize,
    ops: u64,
    seconds: f64,
    ops_per_s: f64,
    bytes_per_s: f64,
    /// From `isend` until `test` says that the message is sent, with up to 16 messages outstanding.
    p50_ns: u64,
    p99_ns: u64,
    p999_ns: u64,
    /// Messages that arrived with a wrong byte.
    errors: u64,
    /// The longest time without a message that was done.
    longest_pause_ns: u64,
    counters: BTreeMap<&'static str, u64>,
    rails: Vec<RailResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    links: Option<Links>,
}

/// One rail.
#[derive(Clone, Debug, Serialize)]
struct RailResult {
    /// Bytes that the sender gave to the rail.
    bytes: u64,
    /// Requests with bytes of messages.
    work_requests: u64,
    /// Completions of the sender.
    completions: u64,
    /// Completions of the receiver for parts of messages.
    receives: u64,
    retries: u64,
    replays: u64,
    failures: u64,
    returns: u64,
}

/// Runs the benchmark.
pub fn run(plan: &Plan) -> Result<Summary, Error> {
    let links = plan.links.then(|| Links::measure(plan.duration)).transpose()?;
    let stream::Streamed { messages, wrong, time, latency, longest_pause, sender, receiver } =
        stream::measure(plan)?;
    let rails: Vec<RailResult> = sender
        .rails
        .iter()
        .zip(&receiver.rails)
        .map(|(sent, received)| RailResult {
            bytes: sent.bytes,
            work_requests: sent.payload_requests,
            completions: sent.completions,
            receives: received.receives,
            retries: sent.retries,
            replays: sent.replays,
            failures: sent.failures,
            returns: sent.returns,
        })
        .collect();
    let sum = |field: fn(&RailResult) -> u64| rails.iter().map(field).sum();
    let counters = BTreeMap::from([
        ("messages", receiver.messages),
        ("bytes", sum(|rail| rail.bytes)),
        ("work_requests", sum(|rail| rail.work_requests)),
        ("completions", sum(|rail| rail.completions)),
        ("receives", sum(|rail| rail.receives)),
        ("replays", sum(|rail| rail.replays)),
        ("failures", sum(|rail| rail.failures)),
    ]);
    let quantile = |share| latency.quantile(share).unwrap_or(0);
    let seconds = time.as_secs_f64();
    let device: Vec<String> = plan.devices.iter().map(DeviceSpec::to_string).collect();
    Ok(Summary {
        bench: "rails",
        device: device.join(","),
        payload: plan.size,
        ops: messages,
        seconds,
        ops_per_s: messages as f64 / seconds,
        bytes_per_s: messages as f64 * plan.size as f64 / seconds,
        p50_ns: quantile(0.5),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        errors: wrong,
        longest_pause_ns: longest_pause.as_nanos() as u64,
        counters,
        rails,
        links,
    })
}

impl Summary {
    /// The result for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "rails over {}: {} messages of {}, {}/s, {}B/s, p50 {}, p99 {}, longest pause {}, {} wrong\n",
            self.device,
            self.ops,
            units::bytes(self.payload as u64),
            units::scaled(self.ops_per_s),
            units::scaled(self.bytes_per_s),
            units::time(self.p50_ns),
            units::time(self.p99_ns),
            units::time(self.longest_pause_ns),
            self.errors,
        );
        let head =
            ["rail", "bytes", "work requests", "completions", "receives", "replays", "failures", "returns"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for (number, rail) in self.rails.iter().enumerate() {
            let figures = [
                number as u64,
                rail.bytes,
                rail.work_requests,
                rail.completions,
                rail.receives,
                rail.replays,
                rail.failures,
                rail.returns,
            ];
            rows.push(figures.map(|figure| figure.to_string()).to_vec());
        }
        text += &table::figures(&rows);
        text + &self.links.as_ref().map_or(String::new(), Links::text)
    }

    /// Messages with wrong bytes.
    pub fn errors(&self) -> u64 {
        self.errors + self.links.as_ref().map_or(0, Links::errors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_parsed() {
        let parse = |text: &str| text.parse::<SplitOption>();
        let fixed = |weights, count| Ok(SplitOption { split: Split::Fixed(weights), weights: count });
        assert_eq!(parse("auto"), Ok(SplitOption { split: Split::Adaptive, weights: 0 }));
        assert_eq!(parse("3:1"), fixed([3, 1, 0, 0], 2));
        assert_eq!(parse("100:0"), fixed([100, 0, 0, 0], 2));
        for wrong in ["", "0:0", "a:b", "1:1:1:1:1", "-1:2"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
