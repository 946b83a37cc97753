//! Completions and events.

use core::fmt;

use zerocopy::IntoBytes;

/// The result of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The `wr_id` of the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// The kind of request. [`Opcode::Unspecified`] if `status` is not [`Status::Success`]: hardware does not report it.
    pub opcode: Opcode,
    /// Bytes received (receives, WRITE+IMM included) or read. Exact on success, otherwise unspecified.
    pub byte_len: u32,
    /// The immediate of a SEND+IMM or WRITE+IMM.
    pub imm: Option<u32>,
    /// The local queue pair.
    pub qp_num: u32,
    /// The sender's queue pair, for datagrams.
    pub src_qp: u32,
    pub(crate) data: InlineData,
}

impl Default for Completion {
    /// One for [`Cq::next`](super::Cq::next) to overwrite.
    fn default() -> Completion {
        Completion {
            wr_id: 0,
            status: Status::Success,
            opcode: Opcode::Unspecified,
            byte_len: 0,
            imm: None,
            qp_num: 0,
            src_qp: 0,
            data: InlineData::None,
        }
    }
}

impl Completion {
    /// The completion of a request that failed.
    pub(super) fn failed(wr_id: u64, status: Status, qp_num: u32) -> Completion {
        Completion { wr_id, status, qp_num, ..Completion::default() }
    }

    /// The bytes of the message, if they came with the completion: a device may deliver a short WRITE+IMM or SEND so. They are a
    /// copy of what the message wrote to memory, so a program that takes them from here need not read that memory, which would
    /// move one more cache line.
    ///
    /// `None` says nothing about the message; then the bytes are in memory only. Long messages, failed requests and devices without
    /// this feature have none.
    ///
    /// ```
    /// # use crosstie::device::*;
    /// # fn message(c: &Completion, memory: &Mr, at: usize) -> Result<Vec<u8>, OutOfRegion> {
    /// if let Some(bytes) = c.inline_data() {
    ///     return Ok(bytes.to_vec());
    /// }
    /// let mut bytes = vec![0; c.byte_len as usize];
    /// memory.read(at, &mut bytes)?;
    /// # Ok(bytes) }
    /// ```
    #[inline]
    pub fn inline_data(&self) -> Option<&[u8]> {
        self.data.get()
    }

    /// The bytes that came with the completion, if there are at least `len`, with bytes behind them that have no meaning.
    #[inline]
    pub(crate) fn inline_words(&self, len: usize) -> Option<&[u64; InlineData::MAX / 8]> {
        let InlineData::Bytes { words, len: held } = &self.data else { return None };
        let held = *held as usize;
        Some(words).filter(|_| len <= held && held <= InlineData::MAX)
    }
}

/// The bytes of a short message, or none.
#[derive(Clone, Copy)]
pub(crate) enum InlineData {
    None,
    /// The first `len` bytes of `words`; none if there are not so many.
    Bytes {
        words: [u64; InlineData::MAX / 8],
        len: u32,
    },
}

impl InlineData {
    /// The longest message that a completion can carry.
    pub(crate) const MAX: usize = 48;

    #[inline]
    fn get(&self) -> Option<&[u8]> {
        match self {
            InlineData::None => None,
            InlineData::Bytes { words, len } => words.as_bytes().get(..*len as usize),
        }
    }
}

impl PartialEq for InlineData {
    fn eq(&self, other: &InlineData) -> bool {
        self.get() == other.get()
    }
}

impl Eq for InlineData {}

impl fmt::Debug for InlineData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// The kind of request that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// SEND or SEND+IMM, sender's end.
    Send = 0,
    /// WRITE or WRITE+IMM, sender's end.
    Write = 1,
    /// READ: the bytes are in local memory.
    Read = 2,
    /// Compare-and-swap: the former value is in local memory.
    CompareSwap = 3,
    /// Fetch-and-add: the former value is in local memory.
    FetchAdd = 4,
    /// A SEND or SEND+IMM was received.
    Recv = 5,
    /// A WRITE+IMM was received.
    RecvWriteImm = 6,
    /// Unknown, because the request failed.
    Unspecified = 7,
}

impl Opcode {
    /// The opcode with this number; [`Opcode::Unspecified`] for all other numbers.
    #[inline]
    pub(crate) fn from_code(code: u8) -> Opcode {
        match code {
            0 => Opcode::Send,
            1 => Opcode::Write,
            2 => Opcode::Read,
            3 => Opcode::CompareSwap,
            4 => Opcode::FetchAdd,
            5 => Opcode::Recv,
            6 => Opcode::RecvWriteImm,
            _ => Opcode::Unspecified,
        }
    }
}

/// How a request ended. The names follow `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// The request succeeded.
    Success = 0,
    /// The message is longer than the receive, or longer than the device supports.
    LocalLength = 1,
    /// The local queue pair cannot execute this request.
    LocalQpOperation = 2,
    /// Local memory is outside its region, in another protection domain, or lacks the access right.
    LocalProtection = 4,
    /// The queue pair went to ERR first. A request behind one that failed may or may not have taken effect.
    Flushed = 5,
    /// The responder sent an invalid response.
    BadResponse = 7,
    /// Local memory could not be accessed during an operation of the peer.
    LocalAccess = 8,
    /// The responder refused the request itself: too long for the receive, atomic misaligned, operation not allowed.
    RemoteInvalidRequest = 9,
    /// The responder refused the address: key, bounds or access right.
    RemoteAccess = 10,
    /// The responder could not execute the request.
    RemoteOperation = 11,
    /// No acknowledgement after all retries: the peer is gone, or its queue pair is not ready.
    RetryExceeded = 12,
    /// The peer had no receive after all retries.
    RnrRetryExceeded = 13,
    /// The responder aborted the request.
    RemoteAborted = 16,
    /// The device failed.
    Fatal = 19,
    /// No response in time.
    ResponseTimeout = 20,
    /// Any other failure.
    General = 21,
}

impl Status {
    /// Whether the request succeeded.
    #[inline]
    pub fn is_success(self) -> bool {
        self == Status::Success
    }

    /// The status with this number in `enum ibv_wc_status`; [`Status::General`] for all other numbers.
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
            Status::LocalLength => "the message is longer than the receive",
            Status::LocalQpOperation => "the local queue pair cannot execute this request",
            Status::LocalProtection => "local memory: wrong bounds, protection domain or access right",
            Status::Flushed => "flushed: the queue pair went to ERR first",
            Status::BadResponse => "the peer sent an invalid response",
            Status::LocalAccess => "local memory could not be accessed",
            Status::RemoteInvalidRequest => "the peer refused the request",
            Status::RemoteAccess => "the peer refused the address: wrong key, bounds or access right",
            Status::RemoteOperation => "the peer could not execute the request",
            Status::RetryExceeded => "no acknowledgement from the peer after all retries",
            Status::RnrRetryExceeded => "the peer had no receive posted after all retries",
            Status::RemoteAborted => "the peer aborted the request",
            Status::Fatal => "the device failed",
            Status::ResponseTimeout => "no response in time",
            Status::General => "unspecified failure",
        })
    }
}

/// An event of a device that belongs to no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The port went down. Requests wait, then fail with [`Status::RetryExceeded`].
    PortDown,
    /// The port is up again.
    PortUp,
    /// A queue pair went to ERR, and no completion of its own says why.
    QpFatal(u32),
    /// A queue pair went to ERR because its peer sent an invalid request or had no access.
    QpAccess(u32),
    /// A completion queue overran: completions were lost and its queue pairs are in ERR.
    CqOverrun,
    /// A queue pair with a shared receive queue is in ERR and takes no more receives.
    LastWqeReached(u32),
    /// The device failed.
    DeviceFatal,
}
