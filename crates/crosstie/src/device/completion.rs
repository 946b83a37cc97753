//! What a completion queue says.

use core::fmt;

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The `wr_id` of the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was. [`Opcode::Unspecified`] where `status` is not [`Status::Success`]: hardware does not say.
    pub opcode: Opcode,
    /// Bytes received (receives, WRITE+IMM included) or read. Exact on success, otherwise unspecified.
    pub byte_len: u32,
    /// The 32 bits that came with a SEND+IMM or WRITE+IMM.
    pub imm: Option<u32>,
    /// The local queue pair.
    pub qp_num: u32,
    /// The sender's queue pair, for datagrams.
    pub src_qp: u32,
}

/// What kind of request finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// SEND or SEND+IMM left.
    Send = 0,
    /// WRITE or WRITE+IMM left.
    Write = 1,
    /// READ brought its bytes.
    Read = 2,
    /// Compare-and-swap brought the former value.
    CompareSwap = 3,
    /// Fetch-and-add brought the former value.
    FetchAdd = 4,
    /// A SEND or SEND+IMM arrived.
    Recv = 5,
    /// A WRITE+IMM arrived.
    RecvWriteImm = 6,
    /// The request failed.
    Unspecified = 7,
}

/// How a request ended. The names follow `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// It was done.
    Success = 0,
    /// A message longer than the receive, or longer than the device carries.
    LocalLength = 1,
    /// The local queue pair cannot do this.
    LocalQpOperation = 2,
    /// A local piece is outside its region, of another protection domain, or lacks the right.
    LocalProtection = 4,
    /// The queue pair went to ERR first. A request behind one that failed may or may not have taken effect.
    Flushed = 5,
    /// The responder answered out of protocol.
    BadResponse = 7,
    /// Local memory could not be reached during a remote's operation.
    LocalAccess = 8,
    /// The responder refused the request itself: too long for the receive, atomics misaligned, operation not allowed.
    RemoteInvalidRequest = 9,
    /// The responder refused the address: key, bounds or rights.
    RemoteAccess = 10,
    /// The responder failed on its own side.
    RemoteOperation = 11,
    /// No answer after all retries: the peer is gone or its queue pair not ready.
    RetryExceeded = 12,
    /// The peer had no receive after all retries.
    RnrRetryExceeded = 13,
    /// The responder aborted.
    RemoteAborted = 16,
    /// The device broke.
    Fatal = 19,
    /// No answer in time.
    ResponseTimeout = 20,
    /// Something else.
    General = 21,
}

impl Status {
    /// Whether the request succeeded.
    #[inline]
    pub fn is_success(self) -> bool {
        self == Status::Success
    }

    /// The status with this number in `enum ibv_wc_status`; [`Status::General`] for numbers that have no name here.
    pub fn from_code(code: u8) -> Status {
        use Status::*;
        [
            Success,
            LocalLength,
            LocalQpOperation,
            LocalProtection,
            Flushed,
            BadResponse,
            LocalAccess,
            RemoteInvalidRequest,
            RemoteAccess,
            RemoteOperation,
            RetryExceeded,
            RnrRetryExceeded,
            RemoteAborted,
            Fatal,
            ResponseTimeout,
        ]
        .into_iter()
        .find(|s| *s as u8 == code)
        .unwrap_or(General)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Success => "success",
            Status::LocalLength => "message longer than the receive",
            Status::LocalQpOperation => "operation not possible on this queue pair",
            Status::LocalProtection => "local memory: bounds, protection domain or access right",
            Status::Flushed => "flushed: the queue pair went to ERR first",
            Status::BadResponse => "the peer answered out of protocol",
            Status::LocalAccess => "local memory could not be reached",
            Status::RemoteInvalidRequest => "the peer refused the request",
            Status::RemoteAccess => "the peer refused the address: key, bounds or access right",
            Status::RemoteOperation => "the peer failed on its own side",
            Status::RetryExceeded => "no answer from the peer",
            Status::RnrRetryExceeded => "the peer had no receive posted",
            Status::RemoteAborted => "the peer aborted",
            Status::Fatal => "the device broke",
            Status::ResponseTimeout => "no answer in time",
            Status::General => "unspecified failure",
        })
    }
}

/// What happened to a device outside of any request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The port went down: requests stall, then fail with [`Status::RetryExceeded`].
    PortDown,
    /// The port is up again.
    PortUp,
    /// A queue pair went to ERR without a request of its own to tell why.
    QpFatal(u32),
    /// A queue pair went to ERR because its peer broke the rules of access or of the request.
    QpAccess(u32),
    /// A completion queue overran: completions were lost and its queue pairs are in ERR.
    CqOverrun,
    /// A queue pair on a shared receive queue is in ERR and takes no more receives.
    LastWqeReached(u32),
    /// The device is gone.
    DeviceFatal,
}
