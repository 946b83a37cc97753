//! The options of `bench ipc`, `bench delegation` and `bench flux`.

use std::ffi::OsString;

use crate::cores;
use crate::error::Error;
use crate::limits::{RINGS, in_place_len, two_rings_len};
use crate::plan::MeasureTime;
use crate::wait::Wait;

/// The smallest payload: the 8-byte number by which a response is verified.
const MIN_PAYLOAD: u64 = 8;
/// The largest payload of ipc and delegation.
const MAX_PAYLOAD: u64 = 1 << 20;
/// Payloads of flux. Its messages are values of a type, so each size is a type in this program.
pub(super) const FLUX_PAYLOADS: [u64; 8] = [8, 16, 32, 48, 64, 256, 1024, 4096];
const MAX_CLIENTS: u32 = 128;
const MAX_DEPTH: u32 = 1024;
/// Limit of the memory for all messages in flight.
const MAX_MEMORY: u64 = 256 << 20;
/// The limit "two rings" is also measured with rings of this many times the depth, unless they need more memory than usual caches have.
const LARGE_RINGS_FACTOR: usize = 4;
const MAX_LARGE_RINGS: usize = 16 << 20;

/// RPC on one machine: one server and one or more clients, each a thread or a process.
///
/// The result is compared with minimal code that makes the same exchange between the same two cores at the same depth. Short
/// slices of the benchmark and of that code alternate. Two variants are measured: "in place" (request and response use the same
/// cache line) and "two rings" (one ring per direction, with as many slots as the depth or four times that, whichever is faster).
/// The limit of ipc is "in place" at depth 1, and the faster variant at larger depths. The limit of delegation and flux is "two
/// rings". The limits are always measured with one client; with more clients they are shown without a ratio. Latencies are round
/// trips: of every 32nd request, or of every request from 4 KiB on.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure; measuring the limits of the machine in between takes about as long again.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub(crate) duration: f64,
    /// Bytes of a request and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: u64,
    /// Requests that each client has in flight.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Number of clients; the result is the sum of their operations.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) clients: u32,
    /// Run the server and the clients as processes, not as threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// How a thread waits for messages [default: spin if each has its own core, otherwise adaptive].
    // Scripts may use the former name.
    #[arg(long, value_enum, alias = "waiting")]
    pub(crate) wait: Option<Wait>,
}

/// The RPC to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`crosstie::ipc`]: each client has its own lane.
    Ipc,
    /// [`crosstie::delegation`]: all clients share one ring.
    Delegation,
    /// [`crosstie::flux`]: between threads of one process.
    Flux,
}

impl Kind {
    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Ipc => "ipc",
            Kind::Delegation => "delegation",
            Kind::Flux => "flux",
        }
    }

    /// The value of the field `device` in the result.
    pub(super) fn device(self) -> &'static str {
        match self {
            Kind::Ipc | Kind::Delegation => "shared-memory",
            Kind::Flux => "threads",
        }
    }
}

/// Checked options.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) kind: Kind,
    pub(super) payload: usize,
    pub(super) depth: usize,
    pub(super) clients: usize,
    pub(super) processes: bool,
    pub(super) wait: Wait,
    pub(super) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(kind: Kind, arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { duration, payload, queue_depth, clients, processes, wait, .. } = *arguments;
        let usage = |text: String| Err(Error::Usage(text));
        let time = MeasureTime::new(duration)?;
        if queue_depth == 0 || queue_depth > MAX_DEPTH {
            return usage(format!("--queue-depth {queue_depth}: give 1 to {MAX_DEPTH} requests in flight"));
        }
        if clients == 0 || clients > MAX_CLIENTS {
            return usage(format!("--clients {clients}: give 1 to {MAX_CLIENTS}"));
        }
        if kind == Kind::Flux && processes {
            return usage(
                "--processes: flux works between threads of one process; leave the option out, or measure ipc"
                    .into(),
            );
        }
        if kind == Kind::Flux && !FLUX_PAYLOADS.contains(&payload) {
            let sizes = FLUX_PAYLOADS.map(|size| size.to_string()).join(", ");
            return usage(format!(
                "--payload {payload}: for flux give one of {sizes} bytes (its messages are values of types that were compiled in)"
            ));
        }
        if !(MIN_PAYLOAD..=MAX_PAYLOAD).contains(&payload) {
            return usage(format!(
                "--payload {payload}: give {MIN_PAYLOAD} to {MAX_PAYLOAD} bytes (a response is verified by a number in it)"
            ));
        }
        let memory = payload.max(64) * u64::from(queue_depth) * u64::from(clients);
        if memory > MAX_MEMORY {
            return usage(format!(
                "--payload {payload} times --queue-depth {queue_depth} times --clients {clients} is {memory} bytes: keep it \
                 under {MAX_MEMORY}"
            ));
        }
        let wait = match wait {
            Some(wait) => wait,
            None if cores::allowed()?.len() > clients as usize => Wait::Spin,
            None => Wait::Adaptive,
        };
        Ok(Plan {
            kind,
            payload: payload as usize,
            depth: queue_depth as usize,
            clients: clients as usize,
            processes,
            wait,
            time,
        })
    }

    /// Number of ranks: the server and the clients.
    pub(super) fn ranks(&self) -> usize {
        self.clients + 1
    }

    /// The same options as a command line, for the other processes.
    pub(super) fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = ["bench", self.kind.name()].map(OsString::from).into();
        line.extend(["--payload".into(), self.payload.to_string().into()]);
        line.extend(["--queue-depth".into(), self.depth.to_string().into()]);
        line.extend(["--clients".into(), self.clients.to_string().into()]);
        line.extend(self.time.to_args());
        line.extend(["--wait".into(), self.wait.name().into()]);
        line.extend(self.processes.then(|| "--processes".into()));
        line
    }

    /// The layout of the shared region.
    pub(super) fn region_layout(&self) -> RegionLayout {
        RegionLayout::new(self.payload, self.depth)
    }
}

/// The offsets of the rings of the plain code in the shared region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionLayout {
    pub(super) in_place: usize,
    pub(crate) two_rings: usize,
    /// Offset and number of slots.
    pub(crate) large_rings: Option<(usize, usize)>,
    pub(crate) len: usize,
}

impl RegionLayout {
    pub(crate) fn new(payload: usize, depth: usize) -> RegionLayout {
        let large_slots = (LARGE_RINGS_FACTOR * depth).next_power_of_two();
        let large_slots = (two_rings_len(payload, large_slots) <= MAX_LARGE_RINGS).then_some(large_slots);
        let in_place = RINGS;
        let two_rings = in_place + in_place_len(payload, depth);
        let large_rings = two_rings + two_rings_len(payload, depth);
        let len = large_rings + large_slots.map_or(0, |slots| two_rings_len(payload, slots));
        RegionLayout { in_place, two_rings, large_rings: large_slots.map(|slots| (large_rings, slots)), len }
    }
}
