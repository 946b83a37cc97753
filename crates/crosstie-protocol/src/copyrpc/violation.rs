//! What can be wrong: with a peer, with a connection's sizes, with a call, with a reply.

/// The peer broke the protocol. The connection cannot go on: its positions or credits no longer mean the same on both
/// sides. No other connection is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Connect information of something else.
    #[error("the peer's connect information is not copyrpc's: is it another service at this address?")]
    NotCopyrpc,
    /// Connect information of another version.
    #[error("the peer speaks copyrpc version {theirs}, this side {ours}: run the same release on both sides")]
    Version {
        /// The peer's.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// An immediate announced no room even for the metadata.
    #[error("the peer announced a batch of {delta} bytes, less than its metadata takes")]
    ShortBatch {
        /// Announced.
        delta: u64,
    },
    /// An immediate announced more than the ring has free: unreleased bytes were overwritten.
    #[error(
        "the peer announced {delta} bytes when the receive ring had {free} free: unreleased messages are lost"
    )]
    Overrun {
        /// Announced.
        delta: u64,
        /// Free at most.
        free: u64,
    },
    /// A batch crosses the end of the ring.
    #[error("the peer's batch of {delta} bytes at offset {offset} crosses the end of the receive ring")]
    AcrossEnd {
        /// Where the batch starts.
        offset: u64,
        /// Announced.
        delta: u64,
    },
    /// A wrap marker does not lead to the end of the ring.
    #[error(
        "the peer's wrap marker at offset {offset} skips {delta} bytes, which is not up to the ring's end"
    )]
    BadWrap {
        /// Where the marker is.
        offset: u64,
        /// Announced.
        delta: u64,
    },
    /// The padding of the flow metadata is not zero.
    #[error(
        "the peer's flow metadata has nonzero padding: other data was written there, or another version speaks"
    )]
    Padding,
    /// A consumer position is no multiple of the alignment.
    #[error("the peer's consumer position {position} is not a multiple of 32")]
    ConsumerMisaligned {
        /// As received.
        position: u64,
    },
    /// A consumer position is beyond what was sent.
    #[error("the peer says it consumed up to {position}, but only {sent} bytes were ever sent")]
    ConsumerBeyondSent {
        /// As received.
        position: u64,
        /// Bytes sent since the start.
        sent: u64,
    },
    /// A consumer position is before one that came the same way earlier.
    #[error("the peer's consumer position went back from {before} to {position}")]
    ConsumerWentBack {
        /// As received.
        position: u64,
        /// What came before.
        before: u64,
    },
    /// A grant is no multiple of the alignment.
    #[error("the peer granted {grant} bytes of credit, not a multiple of 32")]
    GrantMisaligned {
        /// As received.
        grant: u64,
    },
    /// More credit than the peer announced as its limit.
    #[error("the peer has {granted} bytes of credit outstanding, above its own limit of {limit}")]
    GrantOverLimit {
        /// Outstanding with this grant.
        granted: u64,
        /// What it announced at connect.
        limit: u64,
    },
    /// The messages of a batch do not fill what the immediate announced.
    #[error("the peer's batch has {unused} bytes after its last message")]
    TrailingBytes {
        /// Bytes that belong to no message.
        unused: u64,
    },
    /// A message is longer than the rest of its batch.
    #[error("a message of the peer takes {needs} bytes where its batch has {left} left")]
    MessageTooLong {
        /// Bytes with header and padding.
        needs: u64,
        /// Bytes left in the batch.
        left: u64,
    },
    /// A request's allowance is too small for any response.
    #[error("the peer's request allows {blocks} blocks for the response; two are the least")]
    AllowanceTooSmall {
        /// As received.
        blocks: u32,
    },
    /// A request whose allowance the peer had no credit for.
    #[error("the peer's request allows a response of {allowance} bytes, but it had credit for {credit}")]
    CreditOverrun {
        /// Bytes of allowance.
        allowance: u64,
        /// Credit it had.
        credit: u64,
    },
    /// A response to a call that is not pending: foreign, answered before, or never made.
    #[error("the peer answered call {call_id:#x}, which is not pending: foreign, or answered twice")]
    UnknownCall {
        /// The call, without the response flag.
        call_id: u32,
    },
    /// A response that is longer than its call allowed.
    #[error("the peer answered with {payload_len} bytes where at most {allowed} were allowed")]
    ResponseTooLong {
        /// As received.
        payload_len: u32,
        /// What the call allowed.
        allowed: u64,
    },
    /// A bulk message that says nothing that makes sense.
    #[error("a bulk message of the peer has no memory, an address of nothing, or the wrong length")]
    BulkMalformed,
    /// A bulk payload beyond what was announced or allowed.
    #[error("the peer named a bulk payload of {len} bytes where at most {limit} were allowed")]
    BulkTooLong {
        /// As received.
        len: u32,
        /// At most.
        limit: u32,
    },
    /// A bulk response to a call that named no memory for one.
    #[error("the peer answered in bulk where the call named no memory for that")]
    BulkUnasked,
    /// A response that gives back another allowance than its call consumed.
    #[error("the peer's response gives back an allowance of {blocks} blocks where its call took {taken}")]
    AllowanceMismatch {
        /// As received.
        blocks: u32,
        /// What the call took.
        taken: u32,
    },
}

/// Two sides cannot work together with these sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TermsError {
    /// A ring's size is no power of two in the legal range.
    #[error("a receive ring of {size} bytes: rings are powers of two from {min} to {max} bytes", min = super::MIN_RING, max = super::MAX_RING)]
    RingSize {
        /// Whichever side's.
        size: u64,
    },
    /// A credit limit admits no response at all.
    #[error("a credit limit of {limit} bytes admits no response: at least 64 are needed")]
    CreditLimit {
        /// Whichever side's.
        limit: u64,
    },
    /// The table of pending calls cannot have this size.
    #[error("a table of {calls} pending calls: from 1 to {max} are possible", max = super::MAX_PENDING)]
    PendingCalls {
        /// As asked for.
        calls: usize,
    },
}

/// Why a call was not made. Nothing has changed; the call may be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request can never fit into the peer's ring.
    #[error(
        "a request of {len} bytes is too long for the peer's ring: at most {max}; for longer ones allow bulk memory on both sides"
    )]
    TooLong {
        /// As asked for.
        len: u32,
        /// The longest.
        max: u32,
    },
    /// The peer never grants credit for so long a response.
    #[error("a response of {len} bytes is beyond the peer's credit limit: at most {max}")]
    AllowanceTooLong {
        /// As asked for.
        len: u32,
        /// The longest.
        max: u32,
    },
    /// The peer's ring is full for now: poll and try again.
    #[error("the peer's ring is full for now: poll and try again")]
    RingFull,
    /// The peer has not granted enough response credit for now: poll and try again.
    #[error("the response credit is used up for now: poll and try again")]
    NoCredit,
    /// The bulk memory of this side is in use: poll and try again.
    #[error("the bulk memory of this side is in use: poll and try again")]
    NoBulkMemory,
    /// As many calls are pending as the table holds: poll and try again.
    #[error("as many calls are pending as the table holds: poll and try again")]
    TooManyCalls,
}

/// Why a reply was not written. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// Longer than the caller allowed.
    #[error("a reply of {len} bytes, but the caller allowed {max}")]
    TooLong {
        /// As asked for.
        len: u32,
        /// What the caller allowed.
        max: u64,
    },
    /// This endpoint owes no such reply.
    #[error("this endpoint owes no such reply: the request came through another one")]
    NotOwed,
}
