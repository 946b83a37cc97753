//! Errors of calls. How a *request* ended is in its completion, see [`Status`](super::Status).

use super::QpState;
use super::fault::InvalidOdds;

/// Setting up a device, or an object on it, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text does not name a device.
    #[error(
        "'{0}' is not a valid device name: use software, verbs:NAME[/PORT[/GID]] or fault:SEED[/KIND=N]...:DEVICE"
    )]
    InvalidSpec(String),
    /// The text names a fault device with faults that do not exist.
    #[error("'{spec}': {cause}")]
    InvalidOdds {
        /// The text.
        spec: String,
        /// What is allowed.
        cause: InvalidOdds,
    },
    /// This build does not contain the verbs provider.
    #[error("this build does not support verbs devices: build with `--features verbs`")]
    VerbsNotBuilt,
    /// libibverbs or the named device is missing.
    #[error("verbs device '{name}': {reason}")]
    NoSuchDevice {
        /// The name that was asked for.
        name: String,
        /// What is missing, and what to do.
        reason: String,
    },
    /// A size exceeds a limit of the device or of this library.
    #[error("{what}: {asked} requested, but the device supports at most {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The requested amount.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// The device's memory, keys or numbers are used up.
    #[error("out of {what}: free some, or open the device with larger limits")]
    Exhausted {
        /// What is used up.
        what: &'static str,
    },
    /// Objects of different devices or protection domains were combined.
    #[error("{0} belongs to another device: create both objects on the same device")]
    WrongDevice(&'static str),
    /// The queue pair is not in the state that this step needs.
    #[error("queue pair {qp_num:#x} is in state {state:?}, but {step} needs state {needs}")]
    WrongState {
        /// The queue pair.
        qp_num: u32,
        /// Its state.
        state: QpState,
        /// The step that was tried.
        step: &'static str,
        /// The state that the step needs.
        needs: &'static str,
    },
    /// The peer could not be reached.
    #[error("peer unreachable: {0}")]
    Unreachable(String),
    /// A peer is inside an operation and has not left it in time. Nothing was changed; it can be tried again.
    #[error(
        "the peer{} is inside an operation and does not leave it; it may be stopped: let it continue, or end it",
        process.map_or(String::new(), |process| format!(" in process {process}"))
    )]
    PeerBusy {
        /// The peer's process, if it is known.
        process: Option<u32>,
    },
    /// The peer refuses the connection, or we refuse the peer.
    #[error("peer refused: {0}")]
    Refused(String),
    /// The address belongs to another provider, or is invalid.
    #[error("invalid address: {0}")]
    BadAddress(&'static str),
    /// The provider does not support this.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// The operating system returned an error.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The error.
        source: std::io::Error,
    },
}

/// A request was not accepted; it had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full: poll completions, then post again. If none is to come, because no request in the queue is signaled, it
    /// stays full, see [`QpConfig::max_send_wr`](super::QpConfig::max_send_wr).
    #[error("the queue is full: poll completions, then post again")]
    Full,
    /// The queue pair does not accept this kind of request in its state.
    #[error("the queue pair does not accept this request in state {0:?}")]
    WrongState(QpState),
    /// More inline data than the queue pair's limit.
    #[error("{len} bytes of inline data, but the queue pair allows at most {max}: see QpConfig::max_inline")]
    InlineTooLong {
        /// Bytes given.
        len: usize,
        /// The queue pair's limit.
        max: usize,
    },
    /// More scatter/gather entries than the queue pair's limit.
    #[error("{count} scatter/gather entries, but the queue allows at most {max}: see QpConfig and SrqConfig")]
    TooManySges {
        /// Entries given.
        count: usize,
        /// The queue pair's limit.
        max: usize,
    },
    /// More bytes than one message can have.
    #[error("a message of {0} bytes is longer than the device supports: see DeviceAttr::max_message")]
    TooLong(u64),
    /// The request contradicts itself, for example READ into inline data.
    #[error("{0}")]
    Invalid(&'static str),
    /// The device does not have this operation.
    #[error("the device does not support {0}: see DeviceAttr")]
    Unsupported(&'static str),
    /// The device refused the request; the value is an errno.
    #[error("the device refused the request: errno {0}")]
    Device(i32),
}

/// A completion queue does not work any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// More completions arrived than it can hold; some are lost. Destroy it and its queue pairs.
    #[error("the completion queue overran: create it with a depth above the number of outstanding requests")]
    Overrun,
    /// The device failed; the value is an errno.
    #[error("the device failed to poll the completion queue: errno {0}")]
    Device(i32),
}

/// A range is not inside its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} are not inside the region of {region} bytes")]
pub struct OutOfRegion {
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
    /// Size of the region.
    pub region: usize,
}

/// A region was not deregistered in time, see [`Mr::deregister`](super::Mr::deregister).
#[derive(Debug, thiserror::Error)]
#[error(
    "the region may still be accessed: a peer{} is inside an operation, perhaps stopped (let it continue, or end it), or the driver of the NIC did not deregister it",
    process.map_or(String::new(), |process| format!(" in process {process}"))
)]
pub struct DeregisterError {
    /// The region. No new operation of a peer reaches it; its memory must stay valid until it is deregistered or dropped.
    pub region: super::Mr,
    /// The peer's process, if it is known.
    pub process: Option<u32>,
}
