//! The options of `bench lock`, `bench barrier` and `bench message`.

use std::ffi::OsString;

use crosstie::device::DeviceSpec;
use crosstie::group::{GroupConfig, Transport};
use crosstie_protocol::group::Limits;

use crate::error::Error;
use crate::plan::MeasureTime;

const MAX_MEMBERS: u32 = 256;
const MAX_PAYLOAD: u64 = 16 << 20;

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

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Lock => "lock",
            Kind::Barrier => "barrier",
            Kind::Message => "message",
        }
    }
}

/// Which queue pairs carry messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TransportName {
    Rc,
    Ud,
}

/// How messages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// `send` and `recv` of bytes.
    Bytes,
    /// `isend` and `irecv` with tags; messages travel with their bytes.
    Eager,
    /// `isend` and `irecv` with tags; receivers PULL messages out of the sender's buffer.
    Pull,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Bytes => "bytes",
            Mode::Eager => "eager",
            Mode::Pull => "pull",
        }
    }
}

/// Locks, barriers and messages of a process group. Every member is a process.
///
/// Counters are sums over all members: packets of every kind, and `messages`, the sum of them. In `bench message` all members send to
/// member 0, and slices of round trips between members 0 and 1 give the latencies; minimal code that streams the same messages between the
/// same two processes gives the limit.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Seconds to measure.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub(crate) duration: f64,
    /// Device of all members: software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE.
    #[arg(long, value_name = "SPEC", default_value = "software")]
    pub(crate) device: DeviceSpec,
    /// Number of members.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) members: u32,
    /// bench message: bytes of a message.
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(crate) payload: u64,
    /// bench lock: share of acquisitions that use the one lock that all members want; the others use a lock of their own.
    #[arg(long, value_name = "F", default_value_t = 1.0)]
    pub(crate) contention: f64,
    /// bench message: share of packets that receivers drop.
    #[arg(long, value_name = "F", default_value_t = 0.0)]
    pub(crate) loss: f64,
    /// bench message: which queue pairs carry messages.
    #[arg(long, value_name = "NAME", default_value = "rc")]
    pub(crate) transport: TransportName,
    /// bench message: how messages are sent.
    #[arg(long, value_name = "MODE", default_value = "bytes")]
    pub(crate) mode: Mode,
    /// bench barrier: most children of a member in the tree.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) fanout: usize,
}

/// Checked options.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) kind: Kind,
    pub(super) arguments: Arguments,
    pub(super) time: MeasureTime,
}

impl Plan {
    /// Checks what the command line asks for.
    pub fn new(kind: Kind, arguments: &Arguments) -> Result<Plan, Error> {
        let Arguments { members, payload, contention, loss, fanout, .. } = *arguments;
        let usage = |text: String| Err(Error::Usage(text));
        let least = if kind == Kind::Message { 2 } else { 1 };
        if !(least..=MAX_MEMBERS).contains(&members) {
            return usage(format!("--members {members}: give {least} to {MAX_MEMBERS}"));
        }
        if !(8..=MAX_PAYLOAD).contains(&payload) {
            return usage(format!("--payload {payload}: give 8 to {MAX_PAYLOAD} bytes"));
        }
        if !(0.0..=1.0).contains(&contention) {
            return usage(format!("--contention {contention}: give a share from 0 to 1"));
        }
        if !(0.0..=0.9).contains(&loss) {
            return usage(format!("--loss {loss}: give a share from 0 to 0.9"));
        }
        if !(1..=Limits::MAX_FANOUT).contains(&fanout) {
            return usage(format!("--fanout {fanout}: give 1 to {}", Limits::MAX_FANOUT));
        }
        Ok(Plan { kind, arguments: arguments.clone(), time: MeasureTime::new(arguments.duration)? })
    }

    pub(super) fn config(&self, rank: usize) -> GroupConfig {
        let Arguments { loss, fanout, transport, mode, .. } = self.arguments;
        let config = GroupConfig::new(0x0062_656e_6368)
            .tree(crosstie::group::TreeOptions { fanout, ..Default::default() })
            .locks(self.arguments.members as usize + 1)
            .one_sided(self.kind == Kind::Message && mode != Mode::Bytes)
            .transport(match transport {
                TransportName::Rc => Transport::Rc,
                TransportName::Ud => Transport::Ud,
            });
        if loss > 0.0 { config.receive_loss(loss, 0x5eed + rank as u64) } else { config }
    }

    /// The same options as a command line, for the other processes.
    pub(super) fn command_line(&self) -> Vec<OsString> {
        let Arguments { device, members, payload, contention, loss, transport, mode, fanout, .. } =
            &self.arguments;
        let mut line: Vec<OsString> = vec!["bench".into(), self.kind.name().into()];
        let transport = match transport {
            TransportName::Rc => "rc",
            TransportName::Ud => "ud",
        };
        for (name, value) in [
            ("--device", device.to_string()),
            ("--members", members.to_string()),
            ("--payload", payload.to_string()),
            ("--contention", contention.to_string()),
            ("--loss", loss.to_string()),
            ("--transport", transport.to_string()),
            ("--mode", mode.name().to_string()),
            ("--fanout", fanout.to_string()),
        ] {
            line.extend([name.into(), value.into()]);
        }
        line.extend(self.time.to_args());
        line
    }
}
