//! `crosstie bench rails`: messages over several rails, with the exact counters of each rail; with `--kill-rail`, while a rail fails.
//!
//! Sender and receiver are two threads of this process, each with its own devices. Failures come from the fault device, which wraps the
//! devices.

mod link;
mod stream;

use std::str::FromStr;

use clap::Args;
use crosstie::device::DeviceSpec;
use crosstie::rails::{MAX_RAILS, Split};
use serde_json::{Value, json};

use crate::error::Error;
use crate::limits::Throughput;
use crate::options::{Common, share_up_to, usage, within};
use crate::runner::{Counts, Job, Measured, Outcome, Role};
use crate::summary::{Report, Summary, fields, row};
use crate::{table, units};

/// Messages over several devices: bandwidth, latency, a rail that fails.
///
/// Sender and receiver are two threads of this process, each with its own devices. It runs until `--duration` is over, or until
/// `--count` messages are sent.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// The devices, one per rail: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE. Both ends open them.
    #[arg(long, value_delimiter = ',', default_value = "software,software", value_name = "SPEC,...")]
    device: Vec<DeviceSpec>,
    /// Bytes of a message.
    // Scripts may use the former name.
    #[arg(long, alias = "size", value_name = "BYTES", default_value_t = 65_536, value_parser = within(0..=1 << 30))]
    payload: usize,
    /// How messages are split: `auto`, or a weight for each rail, as in 3:1.
    #[arg(long, value_name = "A:B|auto", default_value = "auto")]
    split: SplitOption,
    /// Send so many messages.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Take the port of this rail down during the run; the first rail is 0.
    #[arg(long, value_name = "I", requires = "count")]
    kill_rail: Option<usize>,
    /// When to take it down: after this share of the messages.
    #[arg(long, value_name = "F", default_value_t = 0.5, requires = "kill_rail", value_parser = share_up_to(1.0))]
    at: f64,
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

/// The counters of a rail.
type Rail = [(&'static str, u64); 8];

impl Arguments {
    /// Runs the benchmark.
    pub fn run(&self) -> Result<Summary, Error> {
        self.check()?;
        let streamed = stream::measure(self)?;
        // `work_requests` are those with bytes of messages, and `receives` are completions of the receiver for parts of messages.
        let rails: Vec<Rail> = streamed
            .sender
            .rails
            .iter()
            .zip(&streamed.receiver.rails)
            .map(|(sent, received)| {
                [
                    ("bytes", sent.bytes),
                    ("work_requests", sent.payload_requests),
                    ("completions", sent.completions),
                    ("receives", received.receives),
                    ("retries", sent.retries),
                    ("replays", sent.replays),
                    ("failures", sent.failures),
                    ("returns", sent.returns),
                ]
            })
            .collect();
        let messages = [("messages", streamed.receiver.messages)];
        let mut counts = Counts { latency: streamed.sent.latency, ..Counts::new(messages, streamed.wrong) };
        rails.iter().for_each(|rail| counts.add(Counts::new(*rail, 0)));
        let slices = vec![Throughput { operations: streamed.sent.messages, time: streamed.sent.time }];
        let outcomes = vec![Outcome { role: Role::Main, slices, counts }];
        let report = self.report(&rails, streamed.sent.longest_pause.as_nanos() as u64);
        Ok(Summary::new(self.job(), report, &Measured { processes: false, cores: None, outcomes }))
    }

    fn check(&self) -> Result<(), Error> {
        let rails = self.device.len();
        if !(1..=MAX_RAILS).contains(&rails) {
            return usage(format!("--device needs 1 to {MAX_RAILS} devices, separated by commas"));
        }
        if ![0, rails].contains(&self.split.weights) {
            return usage(format!("--split: give a weight for each of the {rails} rails"));
        }
        if self.kill_rail.is_some_and(|rail| rail >= rails) {
            return usage(format!("--kill-rail: the rails are 0 to {}", rails - 1));
        }
        if self.kill_rail.is_some() && rails == 1 {
            return usage("--kill-rail: there is only one rail; give two devices".to_owned());
        }
        Ok(())
    }

    /// The rail that fails, and after how many messages.
    fn failure(&self) -> Option<(usize, u64)> {
        let at = (self.count.unwrap_or(0) as f64 * self.at) as u64;
        self.kill_rail.map(|rail| (rail, at))
    }

    fn job(&self) -> Job<'_> {
        let device: Vec<String> = self.device.iter().map(DeviceSpec::to_string).collect();
        Job {
            bench: "rails",
            what: format!("messages of {} over {} rails", units::bytes(self.payload as u64), device.len()),
            options: fields([("payload", self.payload.into())]),
            device: device.join(","),
            common: self.common,
            devices: &self.device,
            ranks: 2,
            processes: false,
            across_machines: false,
            region: 0,
        }
    }

    fn report(&self, rails: &[Rail], longest_pause_ns: u64) -> Report {
        let as_object = |rail: &Rail| {
            Value::Object(rail.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect())
        };
        let names = rails.iter().take(1).flatten().map(|(name, _)| name.replace('_', " "));
        let mut rows: Vec<Vec<String>> = vec![["rail".to_owned()].into_iter().chain(names).collect()];
        for (number, rail) in rails.iter().enumerate() {
            let counts = rail.iter().map(|(_, count)| count.to_string());
            rows.push([number.to_string()].into_iter().chain(counts).collect());
        }
        Report {
            has_bytes: true,
            figures: fields([
                ("longest_pause_ns", longest_pause_ns.into()),
                ("rails", rails.iter().map(as_object).collect()),
            ]),
            rows: vec![row("longest pause", units::time(longest_pause_ns))],
            details: table::figures(&rows),
            ..Report::new(self.payload, None, None)
        }
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
