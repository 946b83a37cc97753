//! The options of `bench copyrpc`.

use std::ffi::OsString;

use crosstie::copyrpc::EndpointConfig;
use crosstie::device::DeviceSpec;

use crate::error::Error;
use crate::plan::{Devices, MeasureTime};

/// The smallest payload: the 8-byte number by which a response is verified.
const MIN_PAYLOAD: u64 = 8;
const MAX_PAYLOAD: u64 = 16 << 20;
const MAX_DEPTH: u32 = 4096;
const MAX_ENDPOINTS: u32 = 1024;
/// Limit of the memory for messages in flight, and of the memory for the rings of one side.
const MAX_MEMORY: u64 = 256 << 20;
/// With many endpoints the rings are smaller than by default, so that together they take at most this.
const DEFAULT_MEMORY: usize = 64 << 20;
/// Upper limit of what a message needs in a ring in addition to its payload.
const MAX_OVERHEAD: usize = 128;

/// RPC by RDMA writes that batches many calls into one RDMA WRITE with immediate.
///
/// There are one client and one server, each a thread or a process, or started on two hosts by a launcher. If both are on one
/// machine, the result is compared with minimal code that makes the same exchange between the same two cores at the same depth:
/// one ring per direction, with as many slots as the depth or four times that, whichever is faster. Short slices of the benchmark
/// and of that code alternate. Latencies are round trips: of every 32nd request, or of every request from 4 KiB on.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure; measuring the limits of the machine in between takes about as long again.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub(crate) duration: f64,
    /// Device of both sides, or of each: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC[,SPEC]", value_delimiter = ',', default_value = "software")]
    pub(crate) device: Vec<DeviceSpec>,
    /// Bytes of a request, and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: u64,
    /// Bytes of a response, if different from those of a request. The result then has no limits to compare with.
    #[arg(long, value_name = "BYTES")]
    pub(crate) response: Option<u64>,
    /// Requests in flight, over all endpoints.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Endpoints of the client's context; calls use them in turn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) endpoints: u32,
    /// Run the two sides as two processes, not as two threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Also measure the same exchange with one SEND per message over the same device, to show what batching gains.
    #[arg(long)]
    pub(crate) beside_sends: bool,
}

/// Checked options. Whether the device supports them is checked when it is open.
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

    /// Rings of the default size; larger if the calls in flight would not fit, smaller if there are many endpoints.
    pub(super) fn endpoint(&self) -> EndpointConfig {
        let depth = self.depth.div_ceil(self.endpoints);
        // A quarter of the ring is for responses. Their credit counts twice, and the rest is for requests.
        let needed = (4 * depth * (self.payload.max(self.response) + MAX_OVERHEAD)).next_power_of_two();
        let default_size =
            (DEFAULT_MEMORY / self.endpoints.next_power_of_two()).min(EndpointConfig::default().ring);
        let ring = needed.max(default_size);
        EndpointConfig {
            ring,
            credit: ring / 4,
            pending_calls: self.depth,
            bulk: 0,
            ..EndpointConfig::default()
        }
    }

    /// The same options as a command line, for the second process.
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
