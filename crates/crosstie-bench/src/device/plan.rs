//! The options of `bench device`.

use std::ffi::OsString;

use clap::ValueEnum;
use crosstie::device::{Device, DeviceSpec};

use crate::error::Error;
use crate::plan::{Devices, MeasureTime};

/// Limit of the memory for messages of one side.
const MAX_MEMORY: u64 = 1 << 30;
/// Requests up to this length are inline, if the device can.
const INLINE: u32 = 220;

/// Operations of one connected queue pair: WRITE, READ, SEND, atomics.
///
/// There are two sides, each a thread or a process, or started on two hosts by a launcher. If both are on one machine, short slices
/// of the benchmark alternate with slices of minimal code for the same exchange, and the result has both.
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
    #[arg(long, value_enum, default_value_t = Op::WriteImm)]
    pub(crate) op: Op,
    /// Bytes per operation [default: 8 for cas and faa, 32 otherwise].
    #[arg(long, value_name = "BYTES")]
    pub(crate) payload: Option<u64>,
    /// Operations in flight. With 1, write-imm and send make round trips; with more, they stream in one direction.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) queue_depth: u32,
    /// Run the two sides as two processes, not as two threads.
    #[arg(long)]
    pub(crate) processes: bool,
    /// Use target memory that was registered in place, not allocated by the library.
    #[arg(long)]
    pub(crate) registered_in_place: bool,
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
}

/// Checked options. Whether the device supports them is checked when it is open.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) op: Op,
    pub(crate) payload: usize,
    pub(crate) depth: usize,
    pub(crate) processes: bool,
    pub(crate) in_place: bool,
    pub(crate) devices: Devices,
    pub(crate) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { duration, op, queue_depth, processes, registered_in_place, .. } = *arguments;
        let usage = |text: String| Err(Error::Usage(text));
        let devices = Devices::new(&arguments.device)?;
        let time = MeasureTime::new(duration)?;
        if queue_depth == 0 {
            return usage("--queue-depth 0: at least one operation must be in flight".into());
        }
        let atomic = matches!(op, Op::Cas | Op::Faa);
        let payload = arguments.payload.unwrap_or(if atomic { 8 } else { 32 });
        if atomic && payload != 8 {
            return usage(format!("--payload {payload}: {} works on 8 bytes, leave it out", op.name()));
        }
        let memory = payload.max(64).saturating_mul(u64::from(queue_depth) + 1);
        if memory > MAX_MEMORY {
            return usage(format!(
                "--payload {payload} times --queue-depth {queue_depth} needs {memory} bytes: keep it under {MAX_MEMORY}"
            ));
        }
        Ok(Plan {
            op,
            payload: payload as usize,
            depth: queue_depth as usize,
            processes,
            in_place: registered_in_place,
            devices,
            time,
        })
    }

    /// The plan of another benchmark that measures the device in its run as well.
    pub(crate) fn of(op: Op, payload: usize, depth: usize, devices: Devices, time: MeasureTime) -> Plan {
        Plan { op, payload, depth, processes: false, in_place: false, devices, time }
    }

    /// Checks that the device supports the options.
    pub(crate) fn check(&self, device: &Device) -> Result<(), Error> {
        let attr = device.attr();
        let deepest = (attr.max_qp_wr.min(attr.max_cqe) / 2) as usize;
        if self.depth > deepest {
            return Err(Error::Usage(format!(
                "--queue-depth {}: this device supports at most {deepest}",
                self.depth
            )));
        }
        if self.payload as u64 > attr.max_message {
            let (payload, max) = (self.payload, attr.max_message);
            return Err(Error::Usage(format!(
                "--payload {payload}: this device carries at most {max} bytes"
            )));
        }
        Ok(())
    }

    /// Whether requests are inline.
    pub(crate) fn is_inline(&self, device: &Device) -> bool {
        matches!(self.op, Op::Write | Op::WriteImm | Op::Send)
            && self.payload <= Plan::max_inline(device) as usize
    }

    pub(crate) fn max_inline(device: &Device) -> u32 {
        INLINE.min(device.attr().max_inline)
    }

    /// Whether it makes round trips, one at a time, and not a stream.
    pub(crate) fn is_ping_pong(&self) -> bool {
        self.op.is_received() && self.depth == 1
    }

    /// The same options as a command line, for the second process.
    pub(crate) fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = ["bench", "device", "--op", self.op.name()].map(OsString::from).into();
        line.extend(self.devices.to_args());
        line.extend(["--payload".into(), self.payload.to_string().into()]);
        line.extend(["--queue-depth".into(), self.depth.to_string().into()]);
        line.extend(self.time.to_args());
        line.extend(self.processes.then(|| "--processes".into()));
        line.extend(self.in_place.then(|| "--registered-in-place".into()));
        line
    }
}
