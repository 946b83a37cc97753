//! Why a call was refused. How a *request* ended is told by its completion, see [`Status`](super::Status).

use super::QpState;

/// A device, or an object on it, could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The text of a device is not one.
    #[error("'{0}' is no device: write software, verbs:NAME[/PORT[/GID]] or fault:SEED:DEVICE")]
    Spec(String),
    /// The provider is not part of this build.
    #[error("this build has no verbs: build with `--features verbs`")]
    NoVerbs,
    /// libibverbs or the named device is missing.
    #[error("verbs device '{name}': {reason}")]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// What was found instead, and what to do.
        reason: String,
    },
    /// A limit of the device or of this library.
    #[error("{what}: {asked} asked for, at most {limit} possible")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How much was asked for.
        asked: u64,
        /// How much there is.
        limit: u64,
    },
    /// The device's memory, keys or numbers are used up.
    #[error("out of {what}: free some, or open the device with more")]
    Exhausted {
        /// Of what.
        what: &'static str,
    },
    /// Objects of different devices or protection domains were put together.
    #[error("{0} belongs to another device")]
    WrongDevice(&'static str),
    /// The queue pair is not in the state that this step needs.
    #[error("queue pair {qp_num:#x} is in {state:?}; {step} needs {needs}")]
    WrongState {
        /// Which queue pair.
        qp_num: u32,
        /// Where it is.
        state: QpState,
        /// What was tried.
        step: &'static str,
        /// Where it should have been.
        needs: &'static str,
    },
    /// The peer could not be reached while connecting.
    #[error("peer unreachable: {0}")]
    Unreachable(String),
    /// The peer is not allowed to connect, or does not let us.
    #[error("peer refused: {0}")]
    Refused(String),
    /// The address is not one of this provider, or makes no sense.
    #[error("bad address: {0}")]
    BadAddress(&'static str),
    /// The provider cannot do this at all.
    #[error("{0} is not supported by this device")]
    Unsupported(&'static str),
    /// The operating system said no.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What it answered.
        source: std::io::Error,
    },
}

/// A request was not accepted; nothing of it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full: poll completions, then post again.
    #[error("the queue is full: poll completions, then post again")]
    Full,
    /// The queue pair does not take this kind of request in its state.
    #[error("the queue pair is in {0:?}")]
    WrongState(QpState),
    /// Inline data beyond the queue pair's limit.
    #[error("{len} bytes inline, at most {max}")]
    InlineTooLong {
        /// Bytes given.
        len: usize,
        /// The queue pair's limit.
        max: usize,
    },
    /// More pieces than the queue pair's limit.
    #[error("{count} pieces, at most {max}")]
    TooManySges {
        /// Pieces given.
        count: usize,
        /// The queue pair's limit.
        max: usize,
    },
    /// More bytes than one message may have.
    #[error("message of {0} bytes is longer than the device carries")]
    TooLong(u64),
    /// The request contradicts itself, for example READ into inline data.
    #[error("{0}")]
    Invalid(&'static str),
    /// The device refused for a reason of its own (an errno).
    #[error("the device refused: errno {0}")]
    Device(i32),
}

/// A completion queue no longer works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// More completions arrived than it has room for; some are lost. Destroy it and its queue pairs.
    #[error("the completion queue overran: make it deeper than the requests outstanding")]
    Overrun,
    /// The device refused for a reason of its own (an errno).
    #[error("the device refused: errno {0}")]
    Device(i32),
}

/// A range is not inside its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{offset}+{len} is outside the region of {region} bytes")]
pub struct OutOfRegion {
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
    /// Size of the region.
    pub region: usize,
}
