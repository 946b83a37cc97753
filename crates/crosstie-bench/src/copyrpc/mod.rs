//! `crosstie bench copyrpc`: RPC between two nodes, compared with what the machine allows.
//!
//! The leading side is the client and uses the measured loop of `bench ipc`. The other side is the server; a last request tells it that
//! the slice is over. With `--beside-sends`, the same exchange with one SEND per message over the same device is measured, too.

mod peer;
mod send_baseline;
mod side;

use crosstie::copyrpc::ConnectionConfig;

pub(crate) use self::peer::COUNTERS;
use self::peer::{CopyrpcPeer, Message};
use self::send_baseline::SendBaseline;
use crate::error::Error;
use crate::limits::{self, PlainRpc};
use crate::local_rpc::rpc_loop::check_all_answered;
use crate::options::{Common, Sides, check_memory, within};
use crate::runner::{self, Benchmark, Contender, Job, Measured, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::summary::{Report, Summary, fields, round, row};
use crate::units::scaled;

/// The smallest payload: the 8-byte number by which a response is verified.
const MIN_PAYLOAD: u64 = 8;
const MAX_PAYLOAD: u64 = 16 << 20;
/// Limit of the memory for messages in flight, and of the memory for the rings of one side.
const MAX_MEMORY: usize = 256 << 20;
/// With many connections the rings are smaller than by default, so that together they take at most this.
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
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sides: Sides,
    /// Bytes of a request, and of its response.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = within(MIN_PAYLOAD..=MAX_PAYLOAD))]
    payload: usize,
    /// Bytes of a response, if different from those of a request. The result then has no limits to compare with.
    #[arg(long, value_name = "BYTES", value_parser = within(MIN_PAYLOAD..=MAX_PAYLOAD))]
    response: Option<usize>,
    /// Requests in flight, over all connections.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=4096))]
    queue_depth: usize,
    /// Connections of the client's context; calls use them in turn.
    #[arg(long = "endpoints", value_name = "N", default_value_t = 1, value_parser = within(1..=1024))]
    connections: usize,
    /// Also measure the same exchange with one SEND per message over the same device, to show what batching gains.
    #[arg(long)]
    beside_sends: bool,
}

impl Arguments {
    /// Runs the benchmark. Returns the result in the process that leads.
    pub fn run(&self) -> Result<Option<Summary>, Error> {
        let Arguments { payload, queue_depth, connections, .. } = *self;
        self.sides.check()?;
        let in_flight = payload.max(self.response()).max(64) * queue_depth;
        let rings = self.connection().ring * connections;
        let options =
            format!("--payload {payload}, --queue-depth {queue_depth} and --endpoints {connections}");
        check_memory(&options, in_flight.max(rings), MAX_MEMORY)?;
        runner::run(self)
    }

    fn response(&self) -> usize {
        self.response.unwrap_or(self.payload)
    }

    /// Rings of the default size; larger if the calls in flight would not fit, smaller if there are many connections.
    fn connection(&self) -> ConnectionConfig {
        let depth = self.queue_depth.div_ceil(self.connections);
        // A quarter of the ring is for responses. Their credit counts twice, and the rest is for requests.
        let needed = (4 * depth * (self.payload.max(self.response()) + MAX_OVERHEAD)).next_power_of_two();
        let default_size =
            (DEFAULT_MEMORY / self.connections.next_power_of_two()).min(ConnectionConfig::default().ring);
        let ring = needed.max(default_size);
        ConnectionConfig {
            ring,
            credit: ring / 4,
            pending_calls: self.queue_depth,
            bulk: 0,
            ..ConnectionConfig::default()
        }
    }

    fn open_peer<'a, M: Message + ?Sized>(&self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        let (device, leads) = (rank.device()?, rank.number == 0);
        let peer = CopyrpcPeer::<M>::open(self, device.clone(), leads);
        let mut contenders = vec![side::connect(Role::Main, self, rank, peer)?];
        if self.beside_sends {
            let sends = SendBaseline::open(self, &device, leads);
            contenders.push(side::connect(Role::Beside, self, rank, sends)?);
        }
        Ok(contenders)
    }
}

impl Benchmark for Arguments {
    fn job(&self) -> Job<'_> {
        let Arguments { payload, queue_depth, connections, beside_sends, .. } = *self;
        let response = self.response.filter(|response| *response != payload);
        let responses = response.map_or_else(String::new, |bytes| format!(" with {bytes} B responses"));
        let beside = if beside_sends { ", beside one SEND per message" } else { "" };
        Job {
            what: format!(
                "copyrpc of {payload} B{responses}, queue depth {queue_depth}, connections {connections}{beside}"
            ),
            options: fields([
                ("payload", payload.into()),
                ("response", response.into()),
                ("queue_depth", queue_depth.into()),
                ("endpoints", connections.into()),
            ]),
            region: PlainRpc::new(payload, queue_depth).region_len(),
            ..Job::of_two("copyrpc", self.common, &self.sides)
        }
    }

    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        // Common payload sizes use fixed-size types, as an application would; other sizes use byte slices.
        match self.payload {
            payload if payload != self.response() => self.open_peer::<[u8]>(rank),
            8 => self.open_peer::<[u8; 8]>(rank),
            32 => self.open_peer::<[u8; 32]>(rank),
            64 => self.open_peer::<[u8; 64]>(rank),
            _ => self.open_peer::<[u8]>(rank),
        }
    }

    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let Arguments { payload, queue_depth, .. } = *self;
        let mut limits = vec![limits::cache_line(rank, region)];
        // In the plain code a response is as long as its request.
        if payload == self.response() {
            limits.extend(PlainRpc::new(payload, queue_depth).with_two_rings(rank, region));
        }
        limits.extend(limits::memcpy(rank, payload, queue_depth));
        limits
    }

    fn report(&self, measured: &mut Measured) -> Report {
        measured.outcomes.iter_mut().for_each(|outcome| check_all_answered(&mut outcome.counts));
        let counts = measured.counts();
        // Those of the library say the same.
        counts.counters.retain(|name, _| !["requests", "refused", "responses"].contains(&name.as_str()));
        let [calls, replies, batches, batched] =
            ["calls", "replies", "batches", "batched"].map(|name| counts.counter(name));
        counts.counters.insert("messages".into(), calls + replies);
        let mut report = Report::new(self.payload, Some(self.queue_depth), measured.rate(Role::TwoRings));
        if batches > 0 {
            let messages = round(batched as f64 / batches as f64, 100.0);
            report.figures.insert("messages_per_batch", messages.into());
            report.rows.push(row("messages per batch", format!("{messages:.1}")));
        }
        if let (Some(rate), Some(sends)) = (measured.rate(Role::Main), measured.rate(Role::Beside)) {
            let gain = round(rate / sends, 100.0);
            report.figures.insert("sends_ops_per_s", sends.round().into());
            report.figures.insert("batching_gain", gain.into());
            report.rows.push(row("one SEND per message", scaled(sends)));
            report.rows.push(row("batching gain", format!("{gain:.1} x")));
        }
        report
    }
}
