//! The abort frame: how the coordinator tells every rank why the job failed.
//!
//! Only causes that concern the whole job have a wire form. The payload begins with the number of the cause; integers
//! are little-endian:
//!
//! ```text
//! 1 RankMissing        operation u8, waited ms u64, count u32, ranks u32 each, note (UTF-8, at most MAX_NOTE bytes)
//! 2 RankDisconnected   rank u32
//! 3 TooLarge           bytes u64, limit u64
//! 4 OperationMismatch  called u8, other called u8, rank u32, other rank u32
//! 5 Overflow           index u32
//! 6 Protocol           violation u8, rank u32
//! ```

use std::time::Duration;

use super::error::{Error, Operation, Violation};

/// The frame kind of an abort, which only the coordinator sends. All other frames use the number of their [`Operation`].
pub(super) const ABORT: u8 = 16;

/// The most bytes of a note that are sent.
const MAX_NOTE: usize = 512;

/// Returns the payload of an abort frame; `None` for a cause that concerns one process only.
pub(super) fn encode(error: &Error) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match error {
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

/// Reads the payload of an abort frame; `None` when it is malformed.
pub(super) fn decode(payload: &[u8]) -> Option<Error> {
    let mut reader = Reader(payload);
    let error = match reader.u8()? {
        1 => {
            let during = Operation::from_wire(reader.u8()?)?;
            let waited = Duration::from_millis(reader.u64()?);
            let count = reader.u32()? as usize;
            let listed = reader.take(count.checked_mul(4)?)?;
            let ranks = listed.as_chunks::<4>().0.iter().map(|rank| u32::from_le_bytes(*rank)).collect();
            let note = reader.0;
            if note.len() > MAX_NOTE {
                return None;
            }
            reader.0 = &[];
            Error::RankMissing { ranks, during, waited, note: String::from_utf8_lossy(note).into_owned() }
        }
        2 => Error::RankDisconnected { rank: reader.u32()? },
        3 => Error::TooLarge { bytes: reader.u64()?, limit: reader.u64()?, name: "max_message" },
        4 => {
            let called = Operation::from_wire(reader.u8()?)?;
            let other_called = Operation::from_wire(reader.u8()?)?;
            Error::OperationMismatch { rank: reader.u32()?, called, other_rank: reader.u32()?, other_called }
        }
        5 => Error::Overflow { index: reader.u32()? },
        6 => {
            let violation = Violation::from_wire(reader.u8()?)?;
            Error::Protocol { rank: reader.u32()?, violation }
        }
        _ => return None,
    };
    reader.0.is_empty().then_some(error)
}

/// Takes fields from the front of a byte slice and never reads past its end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
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
    fn every_cause_with_a_wire_form_decodes_to_itself() {
        for error in [
            Error::RankMissing {
                ranks: vec![3, 7],
                during: Operation::Join,
                waited: Duration::from_millis(1500),
                note: "one was rejected".into(),
            },
            Error::RankDisconnected { rank: 9 },
            Error::TooLarge { bytes: 10, limit: 9, name: "max_message" },
            Error::OperationMismatch {
                rank: 1,
                called: Operation::Sum,
                other_rank: 0,
                other_called: Operation::Barrier,
            },
            Error::Overflow { index: 2 },
            Error::Protocol { rank: 4, violation: Violation::Layout },
        ] {
            let payload = encode(&error).expect("has a wire form");
            assert_eq!(decode(&payload), Some(error));
        }
        assert_eq!(encode(&Error::WrongSecret { peer: String::new() }), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_decode_to_a_cause_or_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(error) = decode(&bytes) {
                prop_assert!(encode(&error).is_some());
            }
        }
    }
}
