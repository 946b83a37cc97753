//! What can go wrong while a job comes together, and how the coordinator tells it to everybody.
//!
//! Every fallible call of this module returns [`Error`]. Some causes concern the whole job: the coordinator learns of
//! them and sends them to each rank, so that all survivors report the same thing. Only those have a wire form.

use std::fmt;
use std::time::Duration;

/// Shorthand for results of the bootstrap.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a bootstrap call failed.
///
/// [`TooLarge`](Error::TooLarge) for one's own blob and [`BlobCount`](Error::BlobCount) are raised before anything is
/// sent: the call did not happen. After any other error the job is over, and later calls return the same error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The other side does not know this job's secret, or speaks another version of the protocol.
    #[error(
        "{peer} does not share this job's secret: give every rank the same secret and the same version of crosstie"
    )]
    WrongSecret {
        /// Who was asked.
        peer: String,
    },
    /// Another process already is this rank; it goes on, this one is refused.
    #[error("rank {rank} has already joined: give every process its own rank")]
    DuplicateRank {
        /// The rank claimed twice.
        rank: u32,
    },
    /// This process and the coordinator disagree on how many ranks the job has.
    #[error("this process counts {ours} ranks, rank 0 counts {theirs}: start every rank with the same size")]
    SizeMismatch {
        /// The size this process was started with.
        ours: u32,
        /// The size rank 0 was started with.
        theirs: u32,
    },
    /// Ranks did not come to join, or to an operation that the others had begun, in time.
    #[error("{} did not come to {during} within {waited:?}{}", Ranks(ranks), Note(note))]
    RankMissing {
        /// Who was missing.
        ranks: Vec<u32>,
        /// What the others were waiting in.
        during: Operation,
        /// How long they waited.
        waited: Duration,
        /// What else is known, for a human; may be empty.
        note: String,
    },
    /// A rank's process ended or left the job.
    #[error("rank {rank} is gone: its process ended or left the job; see its output for the reason")]
    RankDisconnected {
        /// Who left.
        rank: u32,
    },
    /// Nothing was heard in time, though no connection closed: from rank 0, or under MPI from any rank.
    #[error(
        "no end of {during} within {waited:?}: is rank 0 (under MPI: any rank) stopped, or the network cut?"
    )]
    Timeout {
        /// What was being waited in.
        during: Operation,
        /// How long.
        waited: Duration,
    },
    /// A blob, or all blobs of one operation together, exceed their limit.
    #[error("{bytes} bytes exceed the limit of {limit} ({name}): send less, or raise it on every rank")]
    TooLarge {
        /// What was to be sent.
        bytes: u64,
        /// What is allowed.
        limit: u64,
        /// The field of [`Limits`](super::Limits) that forbids it.
        name: &'static str,
    },
    /// [`exchange`](super::Bootstrap::exchange) takes one blob per rank.
    #[error("exchange got {given} blobs for {size} ranks: give one per rank, empty ones included")]
    BlobCount {
        /// How many there were.
        given: usize,
        /// How many there must be.
        size: u32,
    },
    /// Ranks called different operations, or `sum` with slices of different lengths.
    #[error(
        "rank {rank} came to {called} while rank {other_rank} was in {other_called}: the ranks' programs differ"
    )]
    OperationMismatch {
        /// One rank.
        rank: u32,
        /// What it called.
        called: Operation,
        /// The other.
        other_rank: u32,
        /// What that one called.
        other_called: Operation,
    },
    /// A sum does not fit into 64 bits.
    #[error("element {index} of the sum exceeds 64 bits")]
    Overflow {
        /// Which element.
        index: u32,
    },
    /// Bytes on an authenticated connection that the protocol forbids.
    #[error("the connection of rank {rank} broke the protocol: {violation}")]
    Protocol {
        /// Whose connection.
        rank: u32,
        /// What was wrong.
        violation: Violation,
    },
    /// The operating system refused something.
    #[error("{doing}: {text}")]
    Io {
        /// What was being done.
        doing: String,
        /// The kind of refusal.
        kind: std::io::ErrorKind,
        /// The system's words.
        text: String,
    },
    /// Configuration or environment variables are missing or contradict each other.
    #[error("{0}")]
    Configuration(String),
    /// A rank that this process spawned ended with a failure.
    #[error("rank {rank} ended with {status}: see its output for the reason")]
    ChildFailed {
        /// Which.
        rank: u32,
        /// Its exit status in words.
        status: String,
    },
}

impl Error {
    pub(super) fn io(doing: impl Into<String>, error: &std::io::Error) -> Self {
        Error::Io { doing: doing.into(), kind: error.kind(), text: error.to_string() }
    }
}

/// A step of a job that ranks can wait in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(u8)]
pub enum Operation {
    /// Coming together at the start.
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
            .find(|step| *step as u8 == byte)
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

/// A rule of the wire protocol that an authenticated connection broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum Violation {
    /// A frame was changed, repeated, left out or reordered on its way.
    #[error("a frame's authentication tag does not match")]
    Tag = 1,
    /// A frame claims more bytes than the limit allows.
    #[error("a frame is longer than the limit")]
    Length = 2,
    /// A frame of unknown kind, or of a kind that is not due.
    #[error("a frame of this kind is not due")]
    Kind = 3,
    /// A frame's payload does not have the layout of its kind.
    #[error("a frame's payload is malformed")]
    Layout = 4,
}

impl Violation {
    fn from_wire(byte: u8) -> Option<Self> {
        [Violation::Tag, Violation::Length, Violation::Kind, Violation::Layout]
            .into_iter()
            .find(|violation| *violation as u8 == byte)
    }
}

/// A list of ranks in words, cut after 16.
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

struct Note<'a>(&'a str);

impl fmt::Display for Note<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ({})", self.0) }
    }
}

/// The most bytes of a note that cross the wire.
const MAX_NOTE: usize = 512;

impl Error {
    /// The payload of an abort frame. Causes that concern one process only have none.
    pub(super) fn to_wire(&self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        match self {
            Error::RankMissing { ranks, during, waited, note } => {
                out.extend([1, *during as u8]);
                out.extend(u64::try_from(waited.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
                out.extend(u32::try_from(ranks.len()).ok()?.to_le_bytes());
                ranks.iter().for_each(|rank| out.extend(rank.to_le_bytes()));
                out.extend(note.bytes().take(MAX_NOTE));
            }
            Error::RankDisconnected { rank } => {
                out.push(2);
                out.extend(rank.to_le_bytes());
            }
            Error::TooLarge { bytes, limit, .. } => {
                out.push(3);
                out.extend(bytes.to_le_bytes());
                out.extend(limit.to_le_bytes());
            }
            Error::OperationMismatch { rank, called, other_rank, other_called } => {
                out.extend([4, *called as u8, *other_called as u8]);
                out.extend(rank.to_le_bytes());
                out.extend(other_rank.to_le_bytes());
            }
            Error::Overflow { index } => {
                out.push(5);
                out.extend(index.to_le_bytes());
            }
            Error::Protocol { rank, violation } => {
                out.extend([6, *violation as u8]);
                out.extend(rank.to_le_bytes());
            }
            _ => return None,
        }
        Some(out)
    }

    /// Reads an abort frame's payload; `None` when it is not one.
    pub(super) fn from_wire(bytes: &[u8]) -> Option<Self> {
        let mut bytes = Bytes(bytes);
        let error = match bytes.u8()? {
            1 => {
                let during = Operation::from_wire(bytes.u8()?)?;
                let waited = Duration::from_millis(bytes.u64()?);
                let count = bytes.u32()? as usize;
                let listed = bytes.take(count.checked_mul(4)?)?;
                let ranks = listed.as_chunks::<4>().0.iter().map(|rank| u32::from_le_bytes(*rank)).collect();
                let note = bytes.0;
                if note.len() > MAX_NOTE {
                    return None;
                }
                bytes.0 = &[];
                Error::RankMissing { ranks, during, waited, note: String::from_utf8_lossy(note).into_owned() }
            }
            2 => Error::RankDisconnected { rank: bytes.u32()? },
            3 => Error::TooLarge { bytes: bytes.u64()?, limit: bytes.u64()?, name: "max_message" },
            4 => {
                let called = Operation::from_wire(bytes.u8()?)?;
                let other_called = Operation::from_wire(bytes.u8()?)?;
                Error::OperationMismatch { rank: bytes.u32()?, called, other_rank: bytes.u32()?, other_called }
            }
            5 => Error::Overflow { index: bytes.u32()? },
            6 => {
                let violation = Violation::from_wire(bytes.u8()?)?;
                Error::Protocol { rank: bytes.u32()?, violation }
            }
            _ => return None,
        };
        bytes.0.is_empty().then_some(error)
    }
}

/// A reader that takes from the front and never past the end.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn causes_survive_the_wire() {
        for error in [
            Error::RankMissing {
                ranks: vec![3, 7],
                during: Operation::Join,
                waited: Duration::from_millis(1500),
                note: "one was refused".into(),
            },
            Error::RankDisconnected { rank: 9 },
            Error::TooLarge { bytes: 10, limit: 9, name: "max_message" },
            Error::OperationMismatch { rank: 1, called: Operation::Sum, other_rank: 0, other_called: Operation::Barrier },
            Error::Overflow { index: 2 },
            Error::Protocol { rank: 4, violation: Violation::Layout },
        ] {
            let wire = error.to_wire().expect("has a wire form");
            assert_eq!(Error::from_wire(&wire), Some(error));
        }
        assert_eq!(Error::WrongSecret { peer: String::new() }.to_wire(), None);
    }

    #[test]
    fn text_names_who_and_what() {
        let error = Error::RankMissing {
            ranks: (0..20).collect(),
            during: Operation::Barrier,
            waited: Duration::from_secs(2),
            note: String::new(),
        };
        let text = error.to_string();
        assert!(text.starts_with("ranks 0, 1, 2"), "{text}");
        assert!(text.ends_with("and 4 more did not come to barrier within 2s"), "{text}");
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(error) = Error::from_wire(&bytes) {
                prop_assert!(error.to_wire().is_some());
            }
        }
    }
}
