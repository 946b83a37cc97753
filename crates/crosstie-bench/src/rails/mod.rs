//! `crosstie bench rails`: messages over several rails. Bandwidth and latency by message size, the split over links of different
//! speed, what a failed rail costs, and the time of the split decision.
//!
//! Sender and receiver are two threads of this process, each with its own devices. Links of limited speed and failures come from
//! the fault device, which wraps the software device.

mod link;
mod phases;

use std::time::Duration;

use clap::Args;
use crosstie::device::DeviceSpec;
use crosstie::rails::{Counters, MAX_RAILS};
use serde::Serialize;

use crate::error::Error;
use crate::{table, units};

/// The command line.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// The devices, one per rail; both ends open them.
    #[arg(long, value_delimiter = ',', default_value = "software,software", value_name = "DEVICE,...")]
    pub devices: Vec<String>,
    /// Message sizes in bytes.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,4096,65536,1048576,67108864",
        value_name = "BYTES,..."
    )]
    pub sizes: Vec<usize>,
    /// How long each measurement takes, in milliseconds.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    pub duration: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    devices: Vec<DeviceSpec>,
    sizes: Vec<usize>,
    duration: Duration,
}

impl Plan {
    /// Checks the command line.
    pub fn new(arguments: &Arguments) -> Result<Plan, Error> {
        let usage = |text: String| Error::Usage(text);
        if arguments.devices.is_empty() || arguments.devices.len() > MAX_RAILS {
            return Err(usage(format!("--devices needs 1 to {MAX_RAILS} devices")));
        }
        let devices = arguments
            .devices
            .iter()
            .map(|name| name.parse().map_err(|error| usage(format!("--devices: {error}"))))
            .collect::<Result<Vec<DeviceSpec>, Error>>()?;
        if arguments.sizes.iter().any(|size| *size > 1 << 30) {
            return Err(usage("--sizes: a message has at most 1 GiB".to_owned()));
        }
        Ok(Plan {
            devices,
            sizes: arguments.sizes.clone(),
            duration: Duration::from_millis(arguments.duration.clamp(10, 600_000)),
        })
    }
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    bench: &'static str,
    devices: Vec<String>,
    sizes: Vec<SizeResult>,
    throttled: Option<Throttled>,
    failover: Option<Failover>,
    /// Nanoseconds for the decision how to split a message, without the clock.
    split_decision_ns: f64,
}

/// Messages of one size.
#[derive(Clone, Debug, Serialize)]
struct SizeResult {
    bytes: usize,
    /// Up to 16 messages outstanding.
    messages_per_second: f64,
    bytes_per_second: f64,
    /// One message at a time: from `isend` to the end of the receiver's answer, halved.
    half_round_trip_p50_ns: u64,
    half_round_trip_p99_ns: u64,
    /// `memcpy` of the same size on one core.
    memcpy_bytes_per_second: f64,
    counters: CounterResult,
}

/// Two rails with links of different speed.
#[derive(Clone, Debug, Serialize)]
struct Throttled {
    link_bytes_per_second: [u64; 2],
    adaptive_bytes_per_second: f64,
    equal_bytes_per_second: f64,
    /// Shares of the sum of the links.
    adaptive_share: f64,
    equal_share: f64,
    /// The part of the bytes that went over the faster rail with the adaptive split.
    adaptive_fast_rail: f64,
}

/// A rail that fails and returns under load.
#[derive(Clone, Debug, Serialize)]
struct Failover {
    link_bytes_per_second: [u64; 2],
    bytes_per_second_before: f64,
    bytes_per_second_one_rail: f64,
    bytes_per_second_after: f64,
    /// Share of the bandwidth before the failure.
    after_share: f64,
    /// The longest time without a message done, around the failure.
    longest_stall_ms: f64,
    /// From the port being up again to the rail being used.
    return_ms: f64,
    replayed_parts: u64,
    replayed_bytes: u64,
    /// Messages with a wrong byte.
    wrong_messages: u64,
    messages: u64,
}

/// The counters of a sender.
#[derive(Clone, Debug, Serialize)]
struct CounterResult {
    messages: u64,
    /// Messages by mask of rails, from mask 1.
    masks: Vec<u64>,
    rails: Vec<RailResult>,
}

#[derive(Clone, Debug, Serialize)]
struct RailResult {
    bytes: u64,
    work_requests: u64,
    completions: u64,
    retries: u64,
    replays: u64,
    p50_ns: u64,
    p99_ns: u64,
}

impl From<Counters> for CounterResult {
    fn from(counters: Counters) -> CounterResult {
        let rails = counters.rails.len();
        CounterResult {
            messages: counters.messages,
            masks: counters.masks[1..1 << rails].to_vec(),
            rails: counters
                .rails
                .iter()
                .map(|rail| RailResult {
                    bytes: rail.bytes,
                    work_requests: rail.work_requests,
                    completions: rail.completions,
                    retries: rail.retries,
                    replays: rail.replays,
                    p50_ns: rail.p50_ns,
                    p99_ns: rail.p99_ns,
                })
                .collect(),
        }
    }
}

/// Runs the benchmark.
pub fn run(plan: &Plan) -> Result<Summary, Error> {
    let mut sizes = Vec::new();
    for size in &plan.sizes {
        sizes.push(phases::measure_size(plan, *size)?);
    }
    // Both need links whose speed is known.
    let is_software = plan.devices.iter().all(|device| *device == DeviceSpec::Software);
    let links = is_software && plan.devices.len() == 2;
    Ok(Summary {
        bench: "rails",
        devices: plan.devices.iter().map(DeviceSpec::to_string).collect(),
        sizes,
        throttled: links.then(|| phases::measure_throttled(plan)).transpose()?,
        failover: links.then(|| phases::measure_failover(plan)).transpose()?,
        split_decision_ns: phases::measure_split(),
    })
}

impl Summary {
    /// The result for people.
    pub fn table(&self) -> String {
        let mut rows = vec![
            ["message", "messages/s", "bytes/s", "half round trip p50", "p99", "memcpy"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for size in &self.sizes {
            rows.push(vec![
                units::bytes(size.bytes as u64),
                units::scaled(size.messages_per_second),
                units::scaled(size.bytes_per_second),
                units::time(size.half_round_trip_p50_ns),
                units::time(size.half_round_trip_p99_ns),
                units::scaled(size.memcpy_bytes_per_second),
            ]);
        }
        let mut text = format!("rails over {}\n{}", self.devices.join(" and "), table::figures(&rows));
        if let Some(throttled) = &self.throttled {
            text += &format!(
                "links of {} and {} bytes/s: adaptive split {} of the sum, equal split {}\n",
                units::scaled(throttled.link_bytes_per_second[0] as f64),
                units::scaled(throttled.link_bytes_per_second[1] as f64),
                units::percent((throttled.adaptive_share * 1000.0).round() / 1000.0),
                units::percent((throttled.equal_share * 1000.0).round() / 1000.0),
            );
        }
        if let Some(failover) = &self.failover {
            text += &format!(
                "a rail fails: longest stall {:.1} ms, {} parts sent again, {} of {} messages wrong; {} of the bandwidth {:.0} ms after its link is up\n",
                failover.longest_stall_ms,
                failover.replayed_parts,
                failover.wrong_messages,
                failover.messages,
                units::percent((failover.after_share * 1000.0).round() / 1000.0),
                failover.return_ms,
            );
        }
        text += &format!("split decision: {:.0} ns\n", self.split_decision_ns);
        text
    }

    /// Messages with wrong bytes.
    pub fn errors(&self) -> u64 {
        self.failover.as_ref().map_or(0, |failover| failover.wrong_messages)
    }
}
