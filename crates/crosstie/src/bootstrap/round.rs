//! One collective operation as the coordinator sees it: contributions in, results out. No I/O and no clock.
//!
//! A list of blobs on the wire is one `u32` length per rank, then the blobs in rank order. How many there are is
//! known from the job's size, not from the bytes.

use std::sync::Arc;

use super::error::{Error, Operation, Violation};
use super::limits::Limits;

/// Joins blobs into one payload, one per rank.
pub(super) fn pack<B: AsRef<[u8]>>(blobs: &[B]) -> Vec<u8> {
    let total: usize = blobs.iter().map(|blob| blob.as_ref().len()).sum();
    let mut out = Vec::with_capacity(total + 4 * blobs.len());
    for blob in blobs {
        let length = u32::try_from(blob.as_ref().len()).expect("limits are below 4 GiB");
        out.extend(length.to_le_bytes());
    }
    blobs.iter().for_each(|blob| out.extend_from_slice(blob.as_ref()));
    out
}

/// Splits a payload into `count` blobs; the lengths must account for every byte.
pub(super) fn unpack(payload: &[u8], count: u32) -> Result<Vec<&[u8]>, Violation> {
    let (lengths, mut data) = payload.split_at_checked(4 * count as usize).ok_or(Violation::Layout)?;
    let mut blobs = Vec::with_capacity(count as usize);
    for length in lengths.as_chunks::<4>().0 {
        let (blob, rest) =
            data.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or(Violation::Layout)?;
        blobs.push(blob);
        data = rest;
    }
    if data.is_empty() { Ok(blobs) } else { Err(Violation::Layout) }
}

pub(super) fn pack_words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn unpack_words(payload: &[u8]) -> Result<Vec<u64>, Violation> {
    let (words, rest) = payload.as_chunks::<8>();
    if rest.is_empty() {
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    } else {
        Err(Violation::Layout)
    }
}

/// Adds `words` to `total`, element by element.
pub(super) fn add(total: &mut [u64], words: &[u64]) -> Result<(), Error> {
    for (index, (total, word)) in total.iter_mut().zip(words).enumerate() {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        *total = total.checked_add(*word).ok_or(Error::Overflow { index })?;
    }
    Ok(())
}

/// An operation that at least one rank has come to.
pub(super) struct Round {
    step: Operation,
    first: u32,
    contributions: Vec<Option<Vec<u8>>>,
    present: u32,
    bytes: usize,
}

impl Round {
    pub(super) fn new(step: Operation, first: u32, size: u32) -> Self {
        Round { step, first, contributions: vec![None; size as usize], present: 0, bytes: 0 }
    }

    pub(super) fn step(&self) -> Operation {
        self.step
    }

    /// Who has not come yet.
    pub(super) fn missing(&self) -> Vec<u32> {
        (0_u32..).zip(&self.contributions).filter(|(_, part)| part.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Takes one rank's contribution; true when it was the last.
    pub(super) fn add(
        &mut self,
        rank: u32,
        step: Operation,
        payload: Vec<u8>,
        limits: &Limits,
    ) -> Result<bool, Error> {
        if step != self.step {
            return Err(Error::OperationMismatch {
                rank,
                called: step,
                other_rank: self.first,
                other_called: self.step,
            });
        }
        let size = u32::try_from(self.contributions.len()).expect("built from a u32");
        let broken = |violation| Error::Protocol { rank, violation };
        match step {
            Operation::Join => return Err(broken(Violation::Kind)),
            Operation::Barrier if payload.is_empty() => {}
            Operation::Barrier => return Err(broken(Violation::Layout)),
            Operation::AllGather => {
                // The whole result goes to everybody and must fit a message.
                self.bytes = self.bytes.saturating_add(payload.len() + 4);
                if self.bytes > limits.max_message {
                    return Err(too_large(self.bytes, limits));
                }
            }
            Operation::Exchange => {
                unpack(&payload, size).map_err(broken)?;
            }
            Operation::Sum => {
                let words = unpack_words(&payload).map_err(broken)?.len() * 8;
                let first = self.contributions.get(self.first as usize).and_then(Option::as_ref);
                if first.is_some_and(|first| first.len() != words) {
                    return Err(Error::OperationMismatch {
                        rank,
                        called: step,
                        other_rank: self.first,
                        other_called: self.step,
                    });
                }
            }
        }
        let place = self.contributions.get_mut(rank as usize).ok_or(broken(Violation::Kind))?;
        if place.is_some() {
            return Err(broken(Violation::Kind));
        }
        *place = Some(payload);
        self.present += 1;
        Ok(self.present == size)
    }

    /// The payload for each rank, in rank order. Call it once everybody is here.
    pub(super) fn results(self, limits: &Limits) -> Result<Vec<Arc<[u8]>>, Error> {
        let size = u32::try_from(self.contributions.len()).expect("built from a u32");
        let parts: Vec<Vec<u8>> = self.contributions.into_iter().map(Option::unwrap_or_default).collect();
        let everybody = |payload: Vec<u8>| vec![Arc::from(payload); size as usize];
        match self.step {
            Operation::Join | Operation::Barrier => Ok(everybody(Vec::new())),
            Operation::AllGather => Ok(everybody(pack(&parts))),
            Operation::Sum => {
                let mut total = Vec::new();
                for (rank, part) in (0_u32..).zip(&parts) {
                    let words =
                        unpack_words(part).map_err(|violation| Error::Protocol { rank, violation })?;
                    if rank == 0 {
                        total = words;
                    } else {
                        add(&mut total, &words)?;
                    }
                }
                Ok(everybody(pack_words(&total)))
            }
            Operation::Exchange => {
                let mut table = Vec::with_capacity(parts.len());
                for (rank, part) in (0_u32..).zip(&parts) {
                    table.push(unpack(part, size).map_err(|violation| Error::Protocol { rank, violation })?);
                }
                let mut results = Vec::with_capacity(parts.len());
                for to in 0..size as usize {
                    let column: Vec<&[u8]> = table.iter().map(|row| row[to]).collect();
                    let payload = pack(&column);
                    if payload.len() > limits.max_message {
                        return Err(too_large(payload.len(), limits));
                    }
                    results.push(Arc::from(payload));
                }
                Ok(results)
            }
        }
    }
}

fn too_large(bytes: usize, limits: &Limits) -> Error {
    Error::TooLarge { bytes: bytes as u64, limit: limits.max_message as u64, name: "max_message" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn different_operations_are_a_disagreement() {
        let limits = Limits::default();
        let mut round = Round::new(Operation::Barrier, 2, 3);
        assert_eq!(round.add(2, Operation::Barrier, Vec::new(), &limits), Ok(false));
        assert!(matches!(
            round.add(1, Operation::Sum, Vec::new(), &limits),
            Err(Error::OperationMismatch {
                rank: 1,
                called: Operation::Sum,
                other_rank: 2,
                other_called: Operation::Barrier
            })
        ));
        assert_eq!(round.missing(), [0, 1]);
    }

    #[test]
    fn sums_of_different_lengths_are_a_disagreement() {
        let limits = Limits::default();
        let mut round = Round::new(Operation::Sum, 0, 2);
        assert_eq!(round.add(0, Operation::Sum, pack_words(&[1, 2]), &limits), Ok(false));
        assert!(matches!(
            round.add(1, Operation::Sum, pack_words(&[1]), &limits),
            Err(Error::OperationMismatch { rank: 1, .. })
        ));
    }

    #[test]
    fn hostile_contributions_are_violations() {
        let limits = Limits::default();
        let violation = |step, payload: &[u8]| {
            let mut round = Round::new(step, 0, 2);
            match round.add(0, step, payload.to_vec(), &limits) {
                Err(Error::Protocol { rank: 0, violation }) => Some(violation),
                _ => None,
            }
        };
        assert_eq!(violation(Operation::Barrier, b"x"), Some(Violation::Layout));
        assert_eq!(violation(Operation::Sum, b"1234567"), Some(Violation::Layout));
        assert_eq!(violation(Operation::Exchange, &[0; 7]), Some(Violation::Layout));
        assert_eq!(violation(Operation::Exchange, &[255; 8]), Some(Violation::Layout));
        assert_eq!(violation(Operation::Join, b""), Some(Violation::Kind));
    }

    #[test]
    fn what_does_not_fit_together_is_too_large() {
        let limits = Limits { max_message: 100, ..Limits::default() };
        let mut round = Round::new(Operation::AllGather, 0, 2);
        assert_eq!(round.add(0, Operation::AllGather, vec![0; 60], &limits), Ok(false));
        assert!(matches!(
            round.add(1, Operation::AllGather, vec![0; 60], &limits),
            Err(Error::TooLarge { bytes: 128, limit: 100, .. })
        ));
    }

    proptest! {
        #[test]
        fn any_payload_unpacks_or_is_refused(payload in proptest::collection::vec(any::<u8>(), 0..64), count in 0_u32..20) {
            if let Ok(blobs) = unpack(&payload, count) {
                prop_assert_eq!(pack(&blobs), payload);
            }
        }

        #[test]
        fn packed_blobs_come_back(blobs in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 0..9)) {
            let packed = pack(&blobs);
            prop_assert_eq!(unpack(&packed, blobs.len() as u32).expect("unpacks"), blobs);
        }
    }
}
