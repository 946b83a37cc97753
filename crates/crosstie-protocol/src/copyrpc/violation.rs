//! Errors of the protocol: a violation by the peer, invalid sizes, a refused call, a refused reply. And how checks report them.

use super::message::ReplyToken;

/// How a check reports what is wrong. A rule is written once, in a function that changes nothing. It runs as [`Silent`], which says
/// only whether all is well; if it is not, [`diagnose`] runs it again and names what is wrong.
pub(super) trait Report<E> {
    fn report(error: E) -> Self;
}

/// Something is wrong.
pub(super) struct Silent;

impl<E> Report<E> for Silent {
    #[inline]
    fn report(_: E) -> Silent {
        Silent
    }
}

/// Returns from a check, unless the condition is true.
macro_rules! ensure {
    ($holds:expr, $error:expr) => {
        if !$holds {
            return Err(R::report($error));
        }
    };
}

/// Runs a check that has failed a moment ago once more, to name what is wrong.
#[cold]
#[inline(never)]
pub(super) fn diagnose<T, E>(check: impl FnOnce() -> Result<T, E>) -> E {
    match check() {
        Ok(_) => unreachable!("a check changes nothing, so it fails again"),
        Err(error) => error,
    }
}

/// Lets checks report this error.
macro_rules! report {
    ($error:ty) => {
        impl Report<$error> for $error {
            fn report(error: $error) -> $error {
                error
            }
        }
    };
}

report!(Violation);
report!(Refusal);
report!(ReplyError);

/// The peer broke the protocol. The connection cannot continue, because the two sides no longer agree on positions or
/// credits. Other connections are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The connect information is not of copyrpc.
    #[error(
        "the peer's connect information is not of copyrpc: check that the address belongs to a copyrpc connection"
    )]
    NotCopyrpc,
    /// The connect information is of another version.
    #[error("the peer uses copyrpc version {theirs}, this side {ours}: run the same release on both sides")]
    Version {
        /// The version of the peer.
        theirs: u32,
        /// The version of this side.
        ours: u32,
    },
    /// An immediate announced a batch that is shorter than its metadata.
    #[error("the peer announced a batch of {delta} bytes, which is shorter than its metadata")]
    ShortBatch {
        /// Announced bytes.
        delta: u64,
    },
    /// An immediate announced a compact batch with a payload that is longer than compact batches have.
    #[error(
        "the peer announced a compact batch with {payload_len} bytes of payload, more than such a batch can have"
    )]
    CompactTooLong {
        /// Announced bytes of payload.
        payload_len: u32,
    },
    /// An immediate announced more bytes than the ring has free: unreleased messages were overwritten.
    #[error(
        "the peer announced {delta} bytes when the receive ring had {free} free: unreleased messages are lost"
    )]
    Overrun {
        /// Announced bytes.
        delta: u64,
        /// Free bytes.
        free: u64,
    },
    /// A batch crosses the end of the ring.
    #[error("the peer's batch of {delta} bytes at offset {offset} crosses the end of the receive ring")]
    AcrossEnd {
        /// Where the batch starts.
        offset: u64,
        /// Announced bytes.
        delta: u64,
    },
    /// A wrap marker does not skip exactly to the end of the ring, or skips a whole ring.
    #[error(
        "the peer's wrap marker at offset {offset} skips {delta} bytes, but not exactly the rest of the ring"
    )]
    BadWrap {
        /// Where the marker is.
        offset: u64,
        /// Announced bytes.
        delta: u64,
    },
    /// A batch has no messages, grants no credit, and its consumer position is that of the batch before.
    #[error("the peer sent a batch without messages, credit or a new consumer position")]
    EmptyBatch,
    /// The padding of the flow metadata is not zero.
    #[error(
        "the peer's flow metadata has nonzero padding: it was overwritten, or the peer uses another version"
    )]
    Padding,
    /// A consumer position is not a multiple of the alignment.
    #[error("the peer's consumer position {position} is not a multiple of 32")]
    ConsumerMisaligned {
        /// As received.
        position: u64,
    },
    /// A consumer position is beyond what was sent.
    #[error("the peer announced consumer position {position}, but only {sent} bytes were ever sent")]
    ConsumerBeyondSent {
        /// As received.
        position: u64,
        /// Bytes sent since the connection began.
        sent: u64,
    },
    /// A consumer position is before an earlier one from the same source (batches, or READs).
    #[error("the peer's consumer position went back from {before} to {position}")]
    ConsumerWentBack {
        /// As received.
        position: u64,
        /// The earlier position.
        before: u64,
    },
    /// A grant is not a multiple of the alignment.
    #[error("the peer granted {grant} bytes of credit, not a multiple of 32")]
    GrantMisaligned {
        /// As received.
        grant: u64,
    },
    /// The peer granted more credit than the limit that it announced.
    #[error("the peer has granted {granted} bytes of credit in all, above its own limit of {limit}")]
    GrantOverLimit {
        /// Granted and not got back, with this grant.
        granted: u64,
        /// The limit that the peer announced at connect.
        limit: u64,
    },
    /// The messages of a batch are shorter than the immediate announced.
    #[error("the peer's batch has {unused} bytes after its last message")]
    TrailingBytes {
        /// Bytes that belong to no message.
        unused: u64,
    },
    /// A message is longer than the rest of its batch.
    #[error("a message of the peer takes {needs} bytes, but its batch has {left} left")]
    MessageTooLong {
        /// Bytes of the message with header and padding.
        needs: u64,
        /// Bytes left in the batch.
        left: u64,
    },
    /// A request uses less credit than any response needs.
    #[error("the peer's request uses {blocks} blocks of credit, but a response takes at least two")]
    CreditTooSmall {
        /// As received.
        blocks: u32,
    },
    /// A request uses more credit than the peer had available.
    #[error("the peer's request uses {credit} bytes of credit, but the peer had only {available} available")]
    CreditOverrun {
        /// What the request uses.
        credit: u64,
        /// What the peer had.
        available: u64,
    },
    /// A response to a call that is not pending: never made, or answered before.
    #[error("the peer replied to call {call_id:#x}, which is not pending: never made, or answered before")]
    UnknownCall {
        /// The call id, without the response flag.
        call_id: u32,
    },
    /// A response is longer than its call allowed.
    #[error("the peer's response has {payload_len} bytes, but at most {allowed} were allowed")]
    ResponseTooLong {
        /// As received.
        payload_len: u32,
        /// The longest response that the call allowed.
        allowed: u64,
    },
    /// The descriptor of a bulk message is invalid.
    #[error("a bulk message of the peer names no memory, an invalid address range, or has the wrong length")]
    BulkMalformed,
    /// A bulk payload is longer than was announced or allowed.
    #[error("the peer named a bulk payload of {len} bytes, but at most {limit} were allowed")]
    BulkTooLong {
        /// As received.
        len: u32,
        /// The most that was allowed.
        limit: u32,
    },
    /// A bulk response to a call that named no response buffer.
    #[error("the peer sent a bulk response to a call that named no response buffer")]
    BulkNotRequested,
    /// A response returns more or less credit than its call uses.
    #[error("the peer's response returns {blocks} blocks of credit, but its call uses {used}")]
    CreditMismatch {
        /// As received.
        blocks: u32,
        /// What the call uses.
        used: u32,
    },
}

/// Two sides cannot connect with these sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowParamsError {
    /// The size of a ring is not a power of two in the valid range.
    #[error("invalid receive ring of {size} bytes: use a power of two from {min} to {max} bytes", min = super::MIN_RING, max = super::MAX_RING)]
    RingSize {
        /// The size, of either side.
        size: u64,
    },
    /// A credit limit is too small for any response.
    #[error("a credit limit of {limit} bytes is too small for any response: use at least 64")]
    CreditLimit {
        /// The limit, of either side.
        limit: u64,
    },
    /// The table of pending calls cannot have this size.
    #[error("invalid limit of {calls} pending calls: use 1 to {max}", max = super::MAX_PENDING_CALLS)]
    PendingCalls {
        /// As requested.
        calls: usize,
    },
}

/// Why a call was refused. Nothing has changed; the call may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request can never fit into the peer's ring.
    #[error(
        "a request of {len} bytes is too long for the peer's ring, which takes at most {max}: configure bulk memory on both sides"
    )]
    TooLong {
        /// As requested.
        len: usize,
        /// The longest possible.
        max: usize,
    },
    /// The peer never grants credit for so long a response.
    #[error("a response of {len} bytes is above the peer's credit limit: allow at most {max}")]
    ResponseTooLong {
        /// As requested.
        len: usize,
        /// The longest possible.
        max: usize,
    },
    /// The peer's ring is full for now: poll and try again.
    #[error("the peer's ring is full for now: poll and try again")]
    RingFull,
    /// The response credit that the peer has granted is used up for now: poll and try again.
    #[error("the response credit is used up for now: poll and try again")]
    NoCredit,
    /// The bulk memory of this side is in use for now: poll and try again.
    #[error("the bulk memory of this side is in use: poll and try again")]
    NoBulkMemory,
    /// The table of pending calls is full for now: poll and try again.
    #[error("the table of pending calls is full: poll and try again")]
    TooManyCalls,
}

/// A call was refused. Nothing has changed, and what the caller attached is returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct CallRefused<U> {
    /// Why it was refused.
    pub cause: Refusal,
    /// What the caller attached.
    pub user: U,
}

/// Why a reply was not placed. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// The reply is longer than the caller allowed.
    #[error("the reply has {len} bytes, but the caller allowed {max}")]
    TooLong {
        /// As requested.
        len: usize,
        /// The longest that the caller allowed.
        max: u64,
    },
    /// The peer of this connection does not expect such a reply.
    #[error("the peer does not expect this reply: the request came through another connection")]
    NotExpected,
}

/// A reply was not placed. Nothing has changed, and the token is returned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct ReplyRefused {
    /// Why it was not placed.
    pub cause: ReplyError,
    /// The right to reply.
    pub token: ReplyToken,
}
