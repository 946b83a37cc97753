//! Sizes and limits of an endpoint.

use std::time::Duration;

use crosstie_protocol::endpoint::imm_window::MAX_WINDOW;
use crosstie_protocol::endpoint::message::MAX_PARTS;
use crosstie_protocol::endpoint::slots::MAX_SLOTS;

use crate::WaitStrategy;
use crate::device::{ConnectConfig, DeviceAddress, DeviceError};

/// The most operations that an endpoint can have in flight.
pub const MAX_OPERATIONS: u32 = 1 << 20;
/// The most buffers that one side can have announced.
pub const MAX_MESSAGES: u16 = 1024;
/// The most connections of an endpoint that have ended and are not drained, because a peer is stopped inside an operation.
pub const MAX_RETIRED: usize = 16;
/// Work requests that one queue pair can have outstanding.
pub(super) const SEND_DEPTH: u32 = 256;

/// Sizes and limits of an [`Endpoint`](super::Endpoint). Everything that a peer can make us allocate is limited here.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Queue pairs for each of the two purposes (transfers, messages), 1 to 8. Large operations are split over them. The
    /// smaller number of both sides is used.
    pub qps: u8,
    /// The most operations in flight, up to [`MAX_OPERATIONS`]. One more is refused with
    /// [`NotStarted::TooManyOperations`](super::NotStarted::TooManyOperations).
    pub operations: u32,
    /// Slots: how many operations have work requests at the device at the same time, up to 4095. Others wait, in order.
    pub slots: u16,
    /// The most `recv` buffers that the peer knows of at a time, up to [`MAX_MESSAGES`]. The smaller number of both sides is used.
    /// Further `recv`s wait.
    pub messages: u16,
    /// Immediates that can arrive before the program takes them, up to 32768. The peer's `write_imm`s wait when they are used up.
    pub imm_window: u32,
    /// The fewest bytes that are worth a queue pair of their own: an operation is split into parts of at least this size.
    pub min_part: usize,
    /// The deadline of operations for which the caller gives none. `None`: they wait as long as the connection lives. [`recv`] and [`imm_recv`]
    /// wait for the peer's program, so they have a deadline only if the caller asks for one with [`within`].
    ///
    /// [`recv`]: super::Endpoint::recv
    /// [`imm_recv`]: super::Endpoint::imm_recv
    /// [`within`]: super::Endpoint::within
    ///
    /// No operation is ended before its time. The time begins with the call, or up to 64 polls of the endpoint later; less than a second begins with
    /// the next poll at the latest. The end is noticed by a poll, too: with [`Progress::Caller`] an operation that nobody polls for does not end.
    pub deadline: Option<Duration>,
    /// Who polls the device.
    pub progress: Progress,
    /// How `wait` and the progress thread wait.
    pub wait: WaitStrategy,
    /// Which kind of device a connection may use.
    pub path: PathPolicy,
    /// Parameters of the queue pairs. `access` is chosen by the endpoint.
    pub connect: ConnectConfig,
}

/// Who polls the device for completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Progress {
    /// A thread of the endpoint. It sleeps while nothing happens.
    #[default]
    Thread,
    /// The program: [`Endpoint::progress`](super::Endpoint::progress), or `wait` on a future, which polls as well.
    Caller,
}

/// Which kind of device a connection may use. A connection over another one fails with
/// [`ConnectError::Path`](super::ConnectError::Path), instead of running slower than expected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PathPolicy {
    /// Any device.
    #[default]
    Any,
    /// Only an RDMA device (feature `verbs`).
    Verbs,
    /// Only the software device, that is, a peer on the same machine.
    Software,
}

impl PathPolicy {
    pub(super) fn allows(self, provider: u8) -> bool {
        match self {
            PathPolicy::Any => true,
            PathPolicy::Verbs => provider == DeviceAddress::VERBS,
            PathPolicy::Software => provider == DeviceAddress::SOFTWARE,
        }
    }
}

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig {
            qps: 1,
            operations: 1024,
            slots: 256,
            messages: 64,
            imm_window: 256,
            min_part: 64 << 10,
            deadline: Some(Duration::from_secs(30)),
            progress: Progress::default(),
            wait: WaitStrategy::default(),
            path: PathPolicy::default(),
            connect: ConnectConfig::default(),
        }
    }
}

impl EndpointConfig {
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        for (what, asked, limit) in [
            ("queue pairs", u64::from(self.qps), MAX_PARTS as u64),
            ("operations", self.operations.into(), MAX_OPERATIONS.into()),
            // The last index is for requests without a slot.
            ("slots", self.slots.into(), MAX_SLOTS as u64 - 1),
            ("messages", self.messages.into(), MAX_MESSAGES.into()),
            ("immediates", self.imm_window.into(), MAX_WINDOW.into()),
        ] {
            if asked == 0 || asked > limit {
                return Err(DeviceError::Limit { what, asked, limit });
            }
        }
        Ok(())
    }
}
