//! The options of `bench endpoint`.

use std::ffi::OsString;

use clap::ValueEnum;
use crosstie::device::DeviceSpec;

use crate::device;
use crate::error::Error;
use crate::plan::{Devices, MeasureTime};

/// The smallest payload: the 8-byte number by which it is verified.
const MIN_PAYLOAD: u64 = 8;
const MAX_DEPTH: u32 = 4096;
const MAX_BATCH: u32 = 1 << 20;
const MAX_QPS: u8 = 8;
/// Limit of the memory for payloads of one side.
const MAX_MEMORY: u64 = 1 << 30;

/// READ, WRITE and SEND as futures that own their buffers: the module `endpoint`.
///
/// There are two sides, each a thread or a process, or started on two hosts by a launcher. With one operation in flight, write-imm
/// and send make round trips; with more, they stream in one direction. If both sides are on one machine, short slices of the
/// benchmark alternate with slices of minimal code for the same exchange, and with memcpy for large payloads.
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
    /// Operation.
    #[arg(long, value_enum, default_value_t = Op::Write)]
    pub(crate) op: Op,
    /// Bytes of a message, or of a block of a batch.
    #[arg(long, value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload: u64,
    /// Blocks in one operation. They are scattered on both sides, so that none can be joined with another.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) batch: u32,
    /// Operations in flight.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Queue pairs of the connection; large operations are split over them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) qps: u8,
    /// Run the two sides as two processes, not as two threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Let a thread of each endpoint make progress, and park until an operation has ended, instead of polling.
    #[arg(long)]
    pub(crate) progress_thread: bool,
    /// Also measure the same operation without an endpoint, on the same device in the same run.
    #[arg(long)]
    pub(crate) beside_device: bool,
}

/// An operation of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// Send into a buffer that the other side gave to `recv`.
    Send,
    /// Read from the other side's memory.
    Read,
    /// Write into the other side's memory.
    Write,
    /// Write into the other side's memory and announce it with a number.
    WriteImm,
}

impl Op {
    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Send => "send",
            Op::Read => "read",
            Op::Write => "write",
            Op::WriteImm => "write-imm",
        }
    }

    /// Whether the other side takes part in it.
    pub(crate) fn is_received(self) -> bool {
        matches!(self, Op::Send | Op::WriteImm)
    }

    /// The same operation of a queue pair.
    fn of_device(self) -> device::Op {
        match self {
            Op::Send => device::Op::Send,
            Op::Read => device::Op::Read,
            Op::Write => device::Op::Write,
            Op::WriteImm => device::Op::WriteImm,
        }
    }
}

/// Checked options.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) op: Op,
    pub(super) payload: usize,
    pub(super) batch: usize,
    pub(super) depth: usize,
    pub(super) qps: u8,
    pub(super) processes: bool,
    pub(super) progress_thread: bool,
    pub(super) beside_device: Option<device::Plan>,
    pub(super) devices: Devices,
    pub(super) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { duration, op, payload, batch, queue_depth, qps, processes, .. } = *arguments;
        let usage = |text: String| Err(Error::Usage(text));
        let devices = Devices::new(&arguments.device)?;
        let time = MeasureTime::new(duration)?;
        if queue_depth == 0 || queue_depth > MAX_DEPTH {
            return usage(format!("--queue-depth {queue_depth}: give 1 to {MAX_DEPTH} operations in flight"));
        }
        if batch == 0 || batch > MAX_BATCH {
            return usage(format!("--batch {batch}: give 1 to {MAX_BATCH} blocks"));
        }
        if op == Op::Send && batch > 1 {
            return usage(format!("--batch {batch}: send has no batches, use --queue-depth"));
        }
        if qps == 0 || qps > MAX_QPS {
            return usage(format!("--qps {qps}: give 1 to {MAX_QPS} queue pairs"));
        }
        if payload < MIN_PAYLOAD {
            return usage(format!(
                "--payload {payload}: give at least {MIN_PAYLOAD} bytes (a payload is verified by a number in it)"
            ));
        }
        let memory =
            payload.max(64).saturating_mul(u64::from(batch)).saturating_mul(u64::from(queue_depth) + 5);
        if memory > MAX_MEMORY {
            return usage(format!(
                "--payload {payload} times --batch {batch} times --queue-depth {queue_depth} needs {memory} bytes: keep it \
                 under {MAX_MEMORY}"
            ));
        }
        if arguments.beside_device && batch > 1 {
            return usage("--beside-device: a queue pair has no batches of blocks, leave out --batch".into());
        }
        let beside_device = arguments.beside_device.then(|| {
            device::Plan::of(op.of_device(), payload as usize, queue_depth as usize, devices.clone(), time)
        });
        Ok(Plan {
            op,
            payload: payload as usize,
            batch: batch as usize,
            depth: queue_depth as usize,
            qps,
            processes,
            progress_thread: arguments.progress_thread,
            beside_device,
            devices,
            time,
        })
    }

    /// Bytes that one operation moves.
    pub(super) fn bytes(&self) -> usize {
        self.payload * self.batch
    }

    /// Whether it makes round trips, one at a time, and not a stream.
    pub(super) fn is_ping_pong(&self) -> bool {
        self.op.is_received() && self.depth == 1
    }

    /// The same options as a command line, for the second process.
    pub(super) fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> =
            ["bench", "endpoint", "--op", self.op.name()].map(OsString::from).into();
        line.extend(self.devices.to_args());
        line.extend(["--payload".into(), self.payload.to_string().into()]);
        line.extend(["--batch".into(), self.batch.to_string().into()]);
        line.extend(["--queue-depth".into(), self.depth.to_string().into()]);
        line.extend(["--qps".into(), self.qps.to_string().into()]);
        line.extend(self.time.to_args());
        line.extend(self.processes.then(|| "--processes".into()));
        line.extend(self.progress_thread.then(|| "--progress-thread".into()));
        line.extend(self.beside_device.is_some().then(|| "--beside-device".into()));
        line
    }
}
