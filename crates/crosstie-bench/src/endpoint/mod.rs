//! `crosstie bench endpoint`: operations of an endpoint, compared with what the machine allows, and with `--beside-device` also with
//! the same operation on a bare queue pair.

mod peer;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use peer::EndpointPeer;

use crate::device::{Op, Shape, Traffic};
use crate::error::Error;
use crate::limits;
use crate::options::{Common, Sides, check_memory, usage, within};
use crate::runner::{self, Benchmark, Contender, Job, Measured, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::summary::{Report, Summary, fields, round, row};
use crate::table::DASH;
use crate::units::{scaled, time};

/// The smallest payload: the 8-byte number by which it is verified.
const MIN_PAYLOAD: u64 = 8;
/// Limit of the memory for payloads of one side.
const MAX_MEMORY: usize = 1 << 30;

/// READ, WRITE and SEND as futures that own their buffers: the module `endpoint`.
///
/// There are two sides, each a thread or a process, or started on two hosts by a launcher. With one operation in flight, write-imm
/// and send make round trips; with more, they stream in one direction. If both sides are on one machine, short slices of the
/// benchmark alternate with slices of minimal code for the same exchange, and with memcpy for large payloads.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    sides: Sides,
    /// Operation.
    #[arg(long, default_value = "write", value_parser = operations())]
    op: Op,
    /// Bytes of a message, or of a block of a batch.
    #[arg(long, value_name = "BYTES", default_value_t = 32, value_parser = within(MIN_PAYLOAD..=1 << 30))]
    payload: usize,
    /// Blocks in one operation. They are scattered on both sides, so that none can be joined with another.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=1 << 20))]
    batch: usize,
    /// Operations in flight.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=4096))]
    queue_depth: usize,
    /// Queue pairs of the connection; large operations are split over them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=8))]
    qps: usize,
    /// Let a thread of each endpoint make progress, and park until an operation has ended, instead of polling.
    #[arg(long)]
    progress_thread: bool,
    /// Also measure the same operation without an endpoint, on the same device in the same run.
    #[arg(long)]
    beside_device: bool,
}

/// Parses an operation. An endpoint has no atomics.
fn operations() -> impl TypedValueParser<Value = Op> {
    let operations = Op::value_variants().iter().filter(|op| !op.is_atomic());
    PossibleValuesParser::new(operations.filter_map(ValueEnum::to_possible_value))
        .try_map(|name| Op::from_str(&name, false))
}

impl Arguments {
    /// Runs the benchmark. Returns the result in the process that leads.
    pub fn run(&self) -> Result<Option<Summary>, Error> {
        let Arguments { op, payload, batch, queue_depth, .. } = *self;
        self.sides.check()?;
        if op == Op::Send && batch > 1 {
            return usage(format!("--batch {batch}: send has no batches, use --queue-depth"));
        }
        if self.beside_device && batch > 1 {
            return usage("--beside-device: a queue pair has no batches of blocks, leave out --batch".into());
        }
        let options = format!("--payload {payload} times --batch {batch} times --queue-depth {queue_depth}");
        check_memory(&options, payload.max(64) * batch * (queue_depth + 5), MAX_MEMORY)?;
        runner::run(self)
    }

    /// What the plain code and a bare queue pair do: one operation of as many bytes as all blocks of a batch.
    fn shape(&self) -> Shape {
        Shape { op: self.op, payload: self.payload * self.batch, depth: self.queue_depth }
    }
}

impl Benchmark for Arguments {
    fn job(&self) -> Job<'_> {
        let Arguments { op, payload, batch, queue_depth, qps, progress_thread, beside_device, .. } = *self;
        let waiting = if progress_thread { "progress thread" } else { "polling" };
        let batches = if batch > 1 { format!(" in batches of {batch}") } else { String::new() };
        let beside = if beside_device { ", beside a queue pair" } else { "" };
        Job {
            what: format!(
                "{} of {payload} B{batches}, queue depth {queue_depth}, queue pairs {qps}, waiting: {waiting}{beside}",
                op.name()
            ),
            options: fields([
                ("op", op.name().into()),
                ("payload", payload.into()),
                ("batch", batch.into()),
                ("queue_depth", queue_depth.into()),
                ("qps", qps.into()),
                ("waiting", waiting.into()),
            ]),
            region: limits::PlainDevice::region_len(self.shape().payload, queue_depth),
            ..Job::of_two("endpoint", self.common, &self.sides)
        }
    }

    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        let device = rank.device()?;
        let peer = EndpointPeer::open(self, &device, rank);
        let mut contenders = vec![Contender::new(Role::Main, rank.collective.connect(peer)?)];
        if self.beside_device {
            let traffic = Traffic::open(self.shape(), false, &device, rank);
            contenders.push(Contender::new(Role::Beside, rank.collective.connect(traffic)?));
        }
        Ok(contenders)
    }

    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let memcpy = limits::memcpy(rank, self.payload, self.queue_depth * self.batch);
        [limits::cache_line(rank, region), limits::plain_device(rank, region, self.shape(), 0)]
            .into_iter()
            .chain(memcpy)
            .collect()
    }

    fn report(&self, measured: &mut Measured) -> Report {
        // One operation of the plain code is as long as all blocks of a batch.
        let limit = measured.rate(Role::PlainDevice).map(|limit| limit * self.batch as f64);
        let mut report = Report::new(self.payload, Some(self.queue_depth), limit);
        if let Some(ns) = measured.counts().issue.quantile(0.5) {
            report.figures.insert("issue_p50_ns", ns.into());
            report.rows.push(row("starting a batch, p50", time(ns)));
        }
        if let (Some(rate), Some(device)) = (measured.rate(Role::Main), measured.rate(Role::Beside)) {
            let p50 = measured.median_latency(Role::Main).unwrap_or(0);
            let device_p50 = measured.median_latency(Role::Beside).unwrap_or(0);
            let slower = (device_p50 > 0).then(|| round(p50 as f64 / device_p50 as f64, 1e4));
            let ratio = round(rate / device, 1e4);
            report.figures.extend(fields([
                ("device_ops_per_s", device.round().into()),
                ("device_p50_ns", device_p50.into()),
                ("ratio_to_device", ratio.into()),
                ("latency_to_device", slower.into()),
            ]));
            let slower = slower.map_or(DASH.into(), |slower| format!("{slower:.2}"));
            report.rows.push(["device alone".into(), DASH.into(), scaled(device), format!("{ratio:.2}")]);
            report.rows.push(["device alone, p50".into(), DASH.into(), time(device_p50), slower]);
        }
        report
    }
}
