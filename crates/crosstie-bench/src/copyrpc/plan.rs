//! What to measure.

use std::ffi::OsString;

use crosstie::copyrpc::EndpointConfig;
use crosstie::device::DeviceSpec;

use crate::error::Error;
use crate::plan::{Devices, MeasureTime};

/// The least payload: what a response is verified by is a number of 8 bytes in it.
const MIN_PAYLOAD: u64 = 8;
const MAX_PAYLOAD: u64 = 16 << 20;
const MAX_DEPTH: u32 = 4096;
const MAX_ENDPOINTS: u32 = 1024;
/// Messages in flight take no more memory than this, and neither do the rings of one side.
const MAX_MEMORY: u64 = 256 << 20;
/// Rings of many endpoints are smaller than usual, so that together they take no more than this.
const USUAL_MEMORY: usize = 64 << 20;
/// What a message takes in a ring beside its payload, at most.
const AROUND: usize = 128;

/// Calls between two nodes, many to a WRITE with immediate.
///
/// One client, one server, each a thread or a process, or started on two hosts by a launcher. Beside our figure stands,
/// measured in slices in between where both are on one machine, that of the plainest code that makes the same exchange
/// between the same two cores at the same depth: a ring each way, of the depth or four times that, whichever is faster.
/// Latencies are round trips of every 32nd request, of every one from 4 KiB on.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure; the limits of the machine, measured in between, take about as long again.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub(crate) duration: f64,
    /// Device of both sides, or of each: software, verbs:NAME[/PORT[/GID]] or fault:SEED:DEVICE.
    #[arg(long, value_name = "SPEC[,SPEC]", value_delimiter = ',', default_value = "software")]
    pub(crate) device: Vec<DeviceSpec>,
    /// Bytes of a request, and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: u64,
    /// Bytes of a response, if they are not as many. There are no limits to compare with then.
    #[arg(long, value_name = "BYTES")]
    pub(crate) response: Option<u64>,
    /// Requests in flight, over all endpoints.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Endpoints of the client's one context; calls go to each in turn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) endpoints: u32,
    /// Put the two sides into two processes rather than two threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Measure in between the same exchange with one SEND per message over the same device: what batching gains.
    #[arg(long)]
    pub(crate) beside_sends: bool,
}

/// A measurement that makes sense, as far as that is known without the device.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) payload: usize,
    pub(super) response: usize,
    pub(super) depth: usize,
    pub(super) endpoints: usize,
    pub(super) processes: bool,
    pub(super) beside_sends: bool,
    pub(super) devices: Devices,
    pub(super) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { duration, payload, queue_depth, endpoints, processes, beside_sends, .. } = *arguments;
        let usage = |text: String| Err(Error::Usage(text));
        let devices = Devices::new(&arguments.device)?;
        let time = MeasureTime::new(duration)?;
        if queue_depth == 0 || queue_depth > MAX_DEPTH {
            return usage(format!("--queue-depth {queue_depth}: give 1 to {MAX_DEPTH} requests in flight"));
        }
        if endpoints == 0 || endpoints > MAX_ENDPOINTS {
            return usage(format!("--endpoints {endpoints}: give 1 to {MAX_ENDPOINTS}"));
        }
        let response = arguments.response.unwrap_or(payload);
        for (name, bytes) in [("payload", payload), ("response", response)] {
            if !(MIN_PAYLOAD..=MAX_PAYLOAD).contains(&bytes) {
                return usage(format!(
                    "--{name} {bytes}: give {MIN_PAYLOAD} to {MAX_PAYLOAD} bytes (a response is verified by a number in it)"
                ));
            }
        }
        let plan = Plan {
            payload: payload as usize,
            response: response as usize,
            depth: queue_depth as usize,
            endpoints: endpoints as usize,
            processes,
            beside_sends,
            devices,
            time,
        };
        let in_flight = payload.max(response).max(64) * u64::from(queue_depth);
        let rings = plan.endpoint().ring as u64 * u64::from(endpoints);
        if in_flight.max(rings) > MAX_MEMORY {
            return usage(format!(
                "--payload {payload}, --queue-depth {queue_depth} and --endpoints {endpoints} need {} bytes: keep it \
                 under {MAX_MEMORY}",
                in_flight.max(rings)
            ));
        }
        Ok(plan)
    }

    /// Rings of the usual size, larger where the calls in flight would not fit, smaller where there are many.
    pub(super) fn endpoint(&self) -> EndpointConfig {
        let depth = self.depth.div_ceil(self.endpoints);
        // A quarter for responses; their credit counts twice, and the rest is for requests.
        let needed = (4 * depth * (self.payload.max(self.response) + AROUND)).next_power_of_two();
        let fair = (USUAL_MEMORY / self.endpoints.next_power_of_two()).min(EndpointConfig::default().ring);
        let ring = needed.max(fair);
        EndpointConfig {
            ring,
            credit: ring / 4,
            pending_calls: self.depth,
            bulk: 0,
            ..EndpointConfig::default()
        }
    }

    /// The command line that measures this.
    pub(super) fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = ["bench", "copyrpc"].map(OsString::from).into();
        line.extend(self.devices.to_args());
        line.extend(["--payload".into(), self.payload.to_string().into()]);
        line.extend(["--response".into(), self.response.to_string().into()]);
        line.extend(["--queue-depth".into(), self.depth.to_string().into()]);
        line.extend(["--endpoints".into(), self.endpoints.to_string().into()]);
        line.extend(self.time.to_args());
        line.extend(self.processes.then(|| "--processes".into()));
        line.extend(self.beside_sends.then(|| "--beside-sends".into()));
        line
    }
}
