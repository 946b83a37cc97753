//! Why a call of the bootstrap fails.
//!
//! Some causes concern the whole job: the coordinator detects them and sends them to every rank (see
//! [`abort`](super::abort)), so that all remaining ranks report the same cause.

use std::fmt;
use std::time::Duration;

/// The result of a bootstrap call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a bootstrap call failed.
///
/// [`TooLarge`](Error::TooLarge) for the caller's own blob and [`BlobCount`](Error::BlobCount) are returned before
/// anything is sent: the job continues as if the call had not been made. After any other error the job is over, and
/// later calls return the same error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer does not know this job's secret, uses another version of the protocol, or is another program.
    #[error(
        "{peer} does not know this job's secret: give every rank the same secret and the same version of crosstie, and check that no other program listens at this address"
    )]
    WrongSecret {
        /// The peer, as an address or a rank.
        peer: String,
    },
    /// Another process has already joined with this rank. That process continues; this one is rejected.
    #[error("rank {rank} has already joined: give every process its own rank, from 0 to size - 1")]
    DuplicateRank {
        /// The rank that was claimed twice.
        rank: u32,
    },
    /// This process and rank 0 were started with different numbers of ranks.
    #[error(
        "this process was started for {ours} ranks, rank 0 for {theirs}: start every rank with the same size"
    )]
    SizeMismatch {
        /// The size that this process was started with.
        ours: u32,
        /// The size that rank 0 was started with.
        theirs: u32,
    },
    /// Ranks did not join, or did not call an operation that others had called, within the timeout.
    #[error("{} {} within {waited:?}{}: check that every rank is running", Ranks(ranks), Failure(*during), Note(note))]
    RankMissing {
        /// The missing ranks.
        ranks: Vec<u32>,
        /// The operation that the other ranks were waiting in.
        during: Operation,
        /// How long they waited.
        waited: Duration,
        /// More about the cause, for a human; may be empty.
        note: String,
    },
    /// The connection to a rank closed: its process ended, or it dropped its handle on the job.
    #[error("rank {rank} disconnected: its process ended or left the job; see its output for the reason")]
    RankDisconnected {
        /// The rank that left.
        rank: u32,
    },
    /// No message arrived within the timeout although no connection closed: none from rank 0, or under MPI from any rank.
    #[error(
        "{during} did not complete within {waited:?}: check whether rank 0 (under MPI: any rank) is stopped, and whether the network works"
    )]
    Timeout {
        /// The operation that this rank was waiting in.
        during: Operation,
        /// How long it waited.
        waited: Duration,
    },
    /// A blob, or all blobs of one operation together, exceed their limit.
    #[error(
        "{bytes} bytes exceed the limit {name} of {limit} bytes: send less, or raise the limit on every rank"
    )]
    TooLarge {
        /// The bytes that were to be sent.
        bytes: u64,
        /// The bytes that are allowed.
        limit: u64,
        /// The field of [`Limits`](super::Limits), or the constant, that sets the limit.
        name: &'static str,
    },
    /// [`exchange`](super::Bootstrap::exchange) takes one blob per rank.
    #[error(
        "exchange got {given} blobs for {size} ranks: pass one blob per rank, an empty one where there is nothing to send"
    )]
    BlobCount {
        /// The number of blobs that were passed.
        given: usize,
        /// The number of ranks.
        size: u32,
    },
    /// Ranks called different operations, or `sum` with slices of different lengths.
    #[error(
        "rank {rank} called {called} while rank {other_rank} called {other_called}, or their sums differ in length: run the same program with the same arguments on every rank"
    )]
    OperationMismatch {
        /// One rank.
        rank: u32,
        /// The operation that it called.
        called: Operation,
        /// The other rank.
        other_rank: u32,
        /// The operation that the other rank called.
        other_called: Operation,
    },
    /// A sum does not fit into 64 bits.
    #[error("element {index} of the sum exceeds 64 bits: pass smaller numbers")]
    Overflow {
        /// The index of the element.
        index: u32,
    },
    /// Bytes on an authenticated connection that the protocol forbids.
    #[error(
        "the connection of rank {rank} violated the protocol: {violation}; run the same version of crosstie on every rank"
    )]
    Protocol {
        /// The rank at one end of the connection; the coordinator is at the other.
        rank: u32,
        /// The rule that was violated.
        violation: Violation,
    },
    /// A system call failed.
    #[error("{doing}: {text}")]
    Io {
        /// What this process was doing.
        doing: String,
        /// The kind of the failure.
        kind: std::io::ErrorKind,
        /// The operating system's error text.
        text: String,
    },
    /// Configuration or environment variables are missing or contradict each other. The text says what to set.
    #[error("{0}")]
    Configuration(String),
    /// A rank that this process spawned ended with a failure.
    #[error("rank {rank} ended with {status}: see its output for the reason")]
    ChildFailed {
        /// The rank.
        rank: u32,
        /// Its exit status, as text.
        status: String,
    },
}

impl Error {
    pub(super) fn io(doing: impl Into<String>, error: &std::io::Error) -> Self {
        Error::Io { doing: doing.into(), kind: error.kind(), text: error.to_string() }
    }
}

/// An operation of a job in which ranks wait for each other. Its number is the frame kind on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(u8)]
pub enum Operation {
    /// Joining the job at its start.
    Join = 1,
    /// [`Bootstrap::barrier`](super::Bootstrap::barrier).
    Barrier = 2,
    /// [`Bootstrap::all_gather`](super::Bootstrap::all_gather).
    AllGather = 3,
    /// [`Bootstrap::exchange`](super::Bootstrap::exchange).
    Exchange = 4,
    /// [`Bootstrap::sum`](super::Bootstrap::sum).
    Sum = 5,
}

impl Operation {
    pub(super) fn from_wire(byte: u8) -> Option<Self> {
        [Operation::Join, Operation::Barrier, Operation::AllGather, Operation::Exchange, Operation::Sum]
            .into_iter()
            .find(|operation| *operation as u8 == byte)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Operation::Join => "join",
            Operation::Barrier => "barrier",
            Operation::AllGather => "all_gather",
            Operation::Exchange => "exchange",
            Operation::Sum => "sum",
        })
    }
}

/// A rule of the wire protocol that the peer of an authenticated connection violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum Violation {
    /// A frame was changed, repeated, lost or reordered on its way.
    #[error("a frame's authentication tag does not match")]
    Tag = 1,
    /// A frame's header announces more bytes than the limit allows.
    #[error("a frame is longer than the limit")]
    Length = 2,
    /// A frame of unknown kind, or of a kind that is not allowed in this state.
    #[error("a frame of this kind was not expected")]
    Kind = 3,
    /// A frame's payload does not have the layout of its kind.
    #[error("a frame's payload is malformed")]
    Layout = 4,
}

impl Violation {
    pub(super) fn from_wire(byte: u8) -> Option<Self> {
        [Violation::Tag, Violation::Length, Violation::Kind, Violation::Layout]
            .into_iter()
            .find(|violation| *violation as u8 == byte)
    }
}

/// Prints a list of ranks, at most 16 of them.
struct Ranks<'a>(&'a [u32]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (position, rank) in self.0.iter().take(SHOWN).enumerate() {
            if position > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{rank}")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

/// Prints what a missing rank did not do.
struct Failure(Operation);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Operation::Join => f.write_str("did not join"),
            operation => write!(f, "did not call {operation}"),
        }
    }
}

/// Prints a note in parentheses, or nothing when it is empty.
struct Note<'a>(&'a str);

impl fmt::Display for Note<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_rank_missing_names_the_ranks_and_the_operation() {
        let error = Error::RankMissing {
            ranks: (0..20).collect(),
            during: Operation::Barrier,
            waited: Duration::from_secs(2),
            note: String::new(),
        };
        let text = error.to_string();
        assert!(text.starts_with("ranks 0, 1, 2"), "{text}");
        assert!(
            text.ends_with("and 4 more did not call barrier within 2s: check that every rank is running"),
            "{text}"
        );
    }
}
