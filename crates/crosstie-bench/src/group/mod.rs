//! `crosstie bench lock|barrier|message`: the primitives of a process group, with a process for each member.

mod slices;

use std::slice;

use crosstie::device::DeviceSpec;
use crosstie::group::{GroupConfig, Transport, TreeOptions};
use crosstie_protocol::group::Limits;

use self::slices::Slices;
use crate::device::{Op, Shape};
use crate::error::Error;
use crate::limits;
use crate::options::{Common, name_of, share_up_to, usage, within};
use crate::runner::{self, Benchmark, Contender, Job, Measured, Rank, Role};
use crate::shared_region::SharedRegion;
use crate::summary::{Report, Summary, fields, round, row};

/// Packets in flight of the plain code: as many as a channel's window.
const WINDOW: usize = 64;
/// Most bytes that memcpy copies between two reads of the clock.
const MAX_COPIED: usize = 64 << 20;

/// Which primitive is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Acquire and release a lock.
    Lock,
    /// Wait in a barrier.
    Barrier,
    /// Send messages to one member, and round trips between two.
    Message,
}

/// Which queue pairs carry messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TransportName {
    Rc,
    Ud,
}

/// How messages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// `send` and `recv` of bytes.
    Bytes,
    /// `isend` and `irecv` with tags; messages travel with their bytes.
    Eager,
    /// `isend` and `irecv` with tags; receivers PULL messages out of the sender's buffer.
    Pull,
}

/// Locks, barriers and messages of a process group. Every member is a process.
///
/// Counters are sums over all members: packets of every kind, and `messages`, the sum of them. In `bench message` all members send to
/// member 0, and slices of round trips between members 0 and 1 give the latencies; minimal code that streams the same messages between the
/// same two processes gives the limit.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Device of all members: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC", default_value = "software")]
    device: DeviceSpec,
    /// Number of members.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within(1..=256))]
    members: usize,
    /// bench message: bytes of a message.
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = within(8..=16 << 20))]
    payload: usize,
    /// bench lock: share of acquisitions that use the one lock that all members want; the others use a lock of their own.
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = share_up_to(1.0))]
    contention: f64,
    /// bench message: share of packets that receivers drop.
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = share_up_to(0.9))]
    loss: f64,
    /// bench message: which queue pairs carry messages.
    #[arg(long, value_name = "NAME", default_value = "rc")]
    transport: TransportName,
    /// bench message: how messages are sent.
    #[arg(long, value_name = "MODE", default_value = "bytes")]
    mode: Mode,
    /// bench barrier: most children of a member in the tree.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within(1..=Limits::MAX_FANOUT as u64))]
    fanout: usize,
}

impl Arguments {
    /// Runs the benchmark. Returns the result in the process that leads.
    pub fn run(&self, kind: Kind) -> Result<Option<Summary>, Error> {
        if kind == Kind::Message && self.members < 2 {
            return usage(format!("--members {}: give 2 or more, one of them receives", self.members));
        }
        runner::run(&GroupBench { kind, plan: self })
    }

    fn config(&self, kind: Kind, rank: usize) -> GroupConfig {
        let Arguments { members, loss, fanout, transport, mode, .. } = *self;
        let config = GroupConfig::new(0x0062_656e_6368)
            .tree(TreeOptions { fanout, ..Default::default() })
            .locks(members + 1)
            .one_sided(kind == Kind::Message && mode != Mode::Bytes)
            .transport(match transport {
                TransportName::Rc => Transport::Rc,
                TransportName::Ud => Transport::Ud,
            });
        if loss > 0.0 { config.receive_loss(loss, 0x5eed + rank as u64) } else { config }
    }
}

/// The benchmark of one primitive.
struct GroupBench<'p> {
    kind: Kind,
    plan: &'p Arguments,
}

impl Benchmark for GroupBench<'_> {
    fn job(&self) -> Job<'_> {
        let Arguments { members, payload, contention, loss, fanout, .. } = *self.plan;
        let (transport, mode) = (name_of(self.plan.transport), name_of(self.plan.mode));
        let over = format!("{members} members, over {transport}, loss {loss}");
        let (bench, what) = match self.kind {
            Kind::Lock => ("lock", format!("lock of {over}, contention {contention}")),
            Kind::Barrier => ("barrier", format!("barrier of {over}, fan-out {fanout}")),
            Kind::Message => ("message", format!("messages of {payload} B between {over}, mode {mode}")),
        };
        Job {
            bench,
            what,
            options: fields([
                ("members", members.into()),
                ("payload", (self.kind == Kind::Message).then_some(payload).into()),
                ("contention", (self.kind == Kind::Lock).then_some(contention).into()),
                ("loss", loss.into()),
                ("transport", transport.into()),
            ]),
            device: self.plan.device.to_string(),
            common: self.plan.common,
            devices: slice::from_ref(&self.plan.device),
            ranks: members,
            processes: true,
            across_machines: true,
            region: limits::PlainDevice::region_len(payload, WINDOW),
        }
    }

    fn open<'a>(&'a self, rank: &mut Rank<'a>) -> Result<Vec<Contender<'a>>, Error> {
        let slices = Slices::open(self.kind, self.plan, rank);
        Ok(vec![Contender::new(Role::Main, rank.collective.agree(slices)?)])
    }

    fn limits<'a>(&'a self, rank: &Rank<'a>, region: &'a SharedRegion) -> Vec<Contender<'a>> {
        let Arguments { members, payload, .. } = *self.plan;
        let mut limits = Vec::new();
        if members > 1 {
            limits.push(limits::cache_line(rank, region));
        }
        if self.kind == Kind::Message {
            // Member 1 sends, as in the measured stream.
            let shape = Shape { op: Op::WriteImm, payload, depth: WINDOW };
            limits.push(limits::plain_device(rank, region, shape, 1));
            limits.extend(limits::memcpy(rank, payload, WINDOW.min(MAX_COPIED / payload)));
        }
        limits
    }

    fn report(&self, measured: &mut Measured) -> Report {
        let limit = measured.rate(Role::PlainDevice);
        let counts = measured.counts();
        let operations = match self.kind {
            Kind::Lock => counts.counter("acquisitions"),
            Kind::Barrier => counts.counter("rounds"),
            Kind::Message => counts.counter("sent"),
        };
        let packets = counts.counter("messages") as f64 / operations.max(1) as f64;
        let payload = if self.kind == Kind::Message { self.plan.payload } else { 0 };
        let mut report = Report::new(payload, None, limit);
        report.figures.insert("messages_per_op", round(packets, 1e3).into());
        report.rows.push(row("packets for one operation", format!("{packets:.3}")));
        report
    }
}
