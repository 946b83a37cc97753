//! What to measure.

use std::ffi::OsString;

use clap::ValueEnum;

use crate::cores;
use crate::error::Error;
use crate::limits::{RINGS, in_place_len, two_rings_len};
use crate::plan::MeasureTime;

/// The least payload: what a response is verified by is a number of 8 bytes in it.
const MIN_PAYLOAD: u64 = 8;
/// The greatest payload of what carries raw bytes.
const MAX_PAYLOAD: u64 = 1 << 20;
/// Payloads of flux, whose messages are values: types that were compiled in.
pub(super) const FLUX_PAYLOADS: [u64; 8] = [8, 16, 32, 48, 64, 256, 1024, 4096];
const MAX_CLIENTS: u32 = 128;
const MAX_DEPTH: u32 = 1024;
/// Messages of all clients in flight take no more memory than this.
const MAX_MEMORY: u64 = 256 << 20;
/// A roomier pair of plain rings has this many times the depth, unless it takes more memory than caches like.
const ROOMY: usize = 4;
const ROOMY_MEMORY: usize = 16 << 20;

/// Requests and responses inside one node: one server, some clients, each a thread or a process.
///
/// Beside our figure stand, measured in slices in between, those of the plainest code that makes the same exchange between
/// the same two cores at the same depth: request and response in the same cache line ("in place"), and a ring each way
/// ("two rings", of the depth or four times that, whichever is faster). The limit of ipc is the former at depth 1 and the faster
/// one beyond, that of delegation and flux the latter. The limits always have one client: with more, they are shown and
/// no ratio is given. Latencies are round trips of every 32nd request, of every one from 4 KiB on.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure; the limits of the machine, measured in between, take about as long again.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub(crate) duration: f64,
    /// Bytes of a request and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: u64,
    /// Requests that each client has in flight.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Clients; operations are counted together.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) clients: u32,
    /// Put server and clients into processes of their own rather than threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// How a side waits for the other; spin where every side has a core of its own, otherwise adaptive, unless given.
    #[arg(long, value_enum)]
    pub(crate) waiting: Option<Waiting>,
}

/// How a side waits for the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Waiting {
    /// Looks again and again.
    Spin,
    /// Looks for a while, then sleeps.
    Adaptive,
    /// Sleeps at once.
    Park,
}

impl Waiting {
    /// As the command line writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Waiting::Spin => "spin",
            Waiting::Adaptive => "adaptive",
            Waiting::Park => "park",
        }
    }
}

impl From<Waiting> for crosstie::WaitStrategy {
    fn from(waiting: Waiting) -> Self {
        match waiting {
            Waiting::Spin => crosstie::WaitStrategy::Spin,
            Waiting::Adaptive => crosstie::WaitStrategy::Adaptive,
            Waiting::Park => crosstie::WaitStrategy::Park,
        }
    }
}

/// What carries the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`crosstie::ipc`]: a lane of its own for each client.
    Ipc,
    /// [`crosstie::delegation`]: one ring for all clients.
    Delegation,
    /// [`crosstie::flux`]: between threads of one process.
    Flux,
}

impl Kind {
    /// As the command line writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Ipc => "ipc",
            Kind::Delegation => "delegation",
            Kind::Flux => "flux",
        }
    }

    /// What it runs on.
    pub(super) fn device(self) -> &'static str {
        match self {
            Kind::Ipc | Kind::Delegation => "shared-memory",
            Kind::Flux => "threads",
        }
    }
}

/// A measurement that makes sense.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) kind: Kind,
    pub(super) payload: usize,
    pub(super) depth: usize,
    pub(super) clients: usize,
    pub(super) processes: bool,
    pub(super) waiting: Waiting,
    pub(super) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(kind: Kind, arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { duration, payload, queue_depth, clients, processes, waiting, .. } = *arguments;
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
                "--processes: flux is between the threads of one process; leave it out, or measure ipc"
                    .into(),
            );
        }
        if kind == Kind::Flux && !FLUX_PAYLOADS.contains(&payload) {
            let sizes = FLUX_PAYLOADS.map(|size| size.to_string()).join(", ");
            return usage(format!(
                "--payload {payload}: messages of flux are values of a type, and the types here have {sizes} bytes"
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
        let waiting = match waiting {
            Some(waiting) => waiting,
            None if cores::allowed()?.len() > clients as usize => Waiting::Spin,
            None => Waiting::Adaptive,
        };
        Ok(Plan {
            kind,
            payload: payload as usize,
            depth: queue_depth as usize,
            clients: clients as usize,
            processes,
            waiting,
            time,
        })
    }

    /// Server and clients.
    pub(super) fn sides(&self) -> usize {
        self.clients + 1
    }

    /// The command line that measures this.
    pub(super) fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = ["bench", self.kind.name()].map(OsString::from).into();
        line.extend(["--payload".into(), self.payload.to_string().into()]);
        line.extend(["--queue-depth".into(), self.depth.to_string().into()]);
        line.extend(["--clients".into(), self.clients.to_string().into()]);
        line.extend(self.time.to_args());
        line.extend(["--waiting".into(), self.waiting.name().into()]);
        line.extend(self.processes.then(|| "--processes".into()));
        line
    }

    /// The region of the plain exchanges.
    pub(super) fn region_layout(&self) -> RegionLayout {
        RegionLayout::new(self.payload, self.depth)
    }
}

/// Where the plain exchanges have their rings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionLayout {
    pub(super) in_place: usize,
    pub(crate) two_rings: usize,
    /// Where, and with how many places.
    pub(crate) roomy_rings: Option<(usize, usize)>,
    pub(crate) len: usize,
}

impl RegionLayout {
    pub(crate) fn new(payload: usize, depth: usize) -> RegionLayout {
        let roomy = (ROOMY * depth).next_power_of_two();
        let roomy = (two_rings_len(payload, roomy) <= ROOMY_MEMORY).then_some(roomy);
        let in_place = RINGS;
        let two_rings = in_place + in_place_len(payload, depth);
        let roomy_rings = two_rings + two_rings_len(payload, depth);
        let len = roomy_rings + roomy.map_or(0, |places| two_rings_len(payload, places));
        RegionLayout { in_place, two_rings, roomy_rings: roomy.map(|places| (roomy_rings, places)), len }
    }
}
