//! `crosstie bench device`: operations of one connected queue pair, compared with what the machine allows.

mod connection;
mod sender;
mod traffic;

use clap::ValueEnum;
use crosstie::device::Device;

pub(crate) use traffic::Traffic;

use crate::error::Error;
use crate::limits;
use crate::options::{Common, Sides, check_memory, usage, within};
use crate::runner::{self, Benchmark, Contender, Job, Measured, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::summary::{Report, Summary, fields};

/// Limit of the memory for messages of one side.
const MAX_MEMORY: usize = 1 << 30;

/// Operations of one connected queue pair: WRITE, READ, SEND, atomics.
///
/// There are two sides, each a thread or a process, or started on two hosts by a launcher. If both are on one machine, short slices
/// of the benchmark alternate with slices of minimal code for the same exchange, and the result has both.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    pub(crate) sides: Sides,
    /// Operation.
    #[arg(long, value_enum, default_value_t = Op::WriteImm)]
    op: Op,
    /// Bytes per operation [default: 8 for cas and faa, 32 otherwise].
    #[arg(long, value_name = "BYTES")]
    payload: Option<usize>,
    /// Operations in flight. With 1, write-imm and send make round trips; with more, they stream in one direction.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=1 << 20))]
    queue_depth: usize,
    /// Use target memory that was registered in place, not allocated by the library.
    #[arg(long)]
    registered_in_place: bool,
}

/// An operation of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// WRITE: one-sided, the other side does not notice it.
    Write,
    /// WRITE with immediate data: completes a receive at the other side.
    WriteImm,
    /// READ.
    Read,
    /// SEND into a receive.
    Send,
    /// Compare-and-swap.
    Cas,
    /// Fetch-and-add.
    Faa,
}

impl Op {
    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Write => "write",
            Op::WriteImm => "write-imm",
            Op::Read => "read",
            Op::Send => "send",
            Op::Cas => "cas",
            Op::Faa => "faa",
        }
    }

    /// Whether the other side must post receives for it.
    pub(crate) fn is_received(self) -> bool {
        matches!(self, Op::WriteImm | Op::Send)
    }

    pub(crate) fn is_atomic(self) -> bool {
        matches!(self, Op::Cas | Op::Faa)
    }
}

/// What is exchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) op: Op,
    pub(crate) payload: usize,
    /// Operations in flight.
    pub(crate) depth: usize,
}

impl Shape {
    /// Whether it makes round trips, one at a time, and not a stream.
    pub(crate) fn is_ping_pong(&self) -> bool {
        self.op.is_received() && self.depth == 1
    }

    /// Checks that the device supports it.
    fn check(&self, device: &Device) -> Result<(), Error> {
        let attr = device.attr();
        let deepest = (attr.max_qp_wr.min(attr.max_cqe) / 2) as usize;
        if self.depth > deepest {
            return usage(format!("--queue-depth {}: this device supports at most {deepest}", self.depth));
        }
        let (payload, max) = (self.payload, attr.max_message);
        if payload as u64 > max {
            return usage(format!("--payload {payload}: this device carries at most {max} bytes"));
        }
        Ok(())
    }
}

impl Arguments {
    /// Runs the benchmark. Returns the result in the process that leads.
    pub fn run(&self) -> Result<Option<Summary>, Error> {
        self.sides.check()?;
        let Shape { op, payload, depth } = self.shape();
        if op.is_atomic() && payload != 8 {
            return usage(format!("--payload {payload}: {} works on 8 bytes, leave it out", op.name()));
        }
        let options = format!("--payload {payload} times --queue-depth {depth}");
        check_memory(&options, payload.max(64).saturating_mul(depth + 1), MAX_MEMORY)?;
        runner::run(self)
    }

    fn shape(&self) -> Shape {
        let payload = self.payload.unwrap_or(if self.op.is_atomic() { 8 } else { 32 });
        Shape { op: self.op, payload, depth: self.queue_depth }
    }
}

impl Benchmark for Arguments {
    fn job(&self) -> Job<'_> {
        let Shape { op, payload, depth } = self.shape();
        Job {
            what: format!("{} of {payload} B, queue depth {depth}", op.name()),
            options: fields([
                ("op", op.name().into()),
                ("payload", payload.into()),
                ("queue_depth", depth.into()),
                ("registered_in_place", self.registered_in_place.into()),
            ]),
            region: limits::PlainDevice::region_len(payload, depth),
            ..Job::of_two("device", self.common, &self.sides)
        }
    }

    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        let device = rank.device()?;
        let traffic = Traffic::open(self.shape(), self.registered_in_place, &device, rank);
        Ok(vec![Contender::new(Role::Main, rank.collective.connect(traffic)?)])
    }

    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let shape = self.shape();
        let memcpy = limits::memcpy(rank, shape.payload, shape.depth);
        [limits::cache_line(rank, region), limits::plain_device(rank, region, shape, 0)]
            .into_iter()
            .chain(memcpy)
            .collect()
    }

    fn report(&self, measured: &mut Measured) -> Report {
        let Shape { payload, depth, .. } = self.shape();
        Report::new(payload, Some(depth), measured.rate(Role::PlainDevice))
    }
}
