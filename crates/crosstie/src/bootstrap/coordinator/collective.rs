//! One collective operation on the coordinator: takes the ranks' contributions and computes their results. No I/O and no
//! clock.

use std::sync::Arc;

use super::super::error::{Error, Operation, Violation};
use super::super::limits::Limits;
use super::super::payload::{add_words, pack_blobs, pack_words, unpack_blobs, unpack_words};

/// A collective operation that at least one rank has called.
pub(super) struct Collective {
    operation: Operation,
    /// The rank that called first. The calls of other ranks are compared with its call.
    first: u32,
    /// By rank; `None` until the rank has called.
    contributions: Vec<Option<Vec<u8>>>,
    /// How many ranks have called.
    contributed: u32,
    /// The size of the result of an all_gather so far.
    bytes: usize,
}

impl Collective {
    pub(super) fn new(operation: Operation, first: u32, size: u32) -> Self {
        Collective { operation, first, contributions: vec![None; size as usize], contributed: 0, bytes: 0 }
    }

    pub(super) fn operation(&self) -> Operation {
        self.operation
    }

    /// Returns the ranks that have not called yet.
    pub(super) fn missing_ranks(&self) -> Vec<u32> {
        let ranks = (0_u32..).zip(&self.contributions);
        ranks.filter(|(_, contribution)| contribution.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Adds one rank's contribution. Returns true when it was the last one.
    pub(super) fn add(
        &mut self,
        rank: u32,
        operation: Operation,
        payload: Vec<u8>,
        limits: &Limits,
    ) -> Result<bool, Error> {
        if operation != self.operation {
            return Err(self.mismatch(rank, operation));
        }
        let size = u32::try_from(self.contributions.len()).expect("built from a u32");
        let protocol_error = |violation| Error::Protocol { rank, violation };
        if payload.len() > limits.max_message {
            return Err(too_large(payload.len(), limits));
        }
        match operation {
            Operation::Join => return Err(protocol_error(Violation::Kind)),
            Operation::Barrier if payload.is_empty() => {}
            Operation::Barrier => return Err(protocol_error(Violation::Layout)),
            Operation::AllGather => {
                // Every rank receives the whole result, which must fit into one message.
                self.bytes = self.bytes.saturating_add(payload.len() + 4);
                if self.bytes > limits.max_message {
                    return Err(too_large(self.bytes, limits));
                }
            }
            Operation::Exchange => {
                unpack_blobs(&payload, size).map_err(protocol_error)?;
            }
            Operation::Sum => {
                let bytes = unpack_words(&payload).map_err(protocol_error)?.len() * 8;
                let first = self.contributions.get(self.first as usize).and_then(Option::as_ref);
                if first.is_some_and(|first| first.len() != bytes) {
                    return Err(self.mismatch(rank, operation));
                }
            }
        }
        let contribution =
            self.contributions.get_mut(rank as usize).ok_or(protocol_error(Violation::Kind))?;
        if contribution.is_some() {
            return Err(protocol_error(Violation::Kind));
        }
        *contribution = Some(payload);
        self.contributed += 1;
        Ok(self.contributed == size)
    }

    /// Returns the result's payload for each rank, in rank order. Call it when all ranks have contributed.
    pub(super) fn into_results(self, limits: &Limits) -> Result<Vec<Arc<[u8]>>, Error> {
        let size = u32::try_from(self.contributions.len()).expect("built from a u32");
        let contributions: Vec<Vec<u8>> =
            self.contributions.into_iter().map(Option::unwrap_or_default).collect();
        let same_for_all = |payload: Vec<u8>| vec![Arc::from(payload); size as usize];
        match self.operation {
            Operation::Join | Operation::Barrier => Ok(same_for_all(Vec::new())),
            Operation::AllGather => Ok(same_for_all(pack_blobs(&contributions))),
            Operation::Sum => {
                let mut total = Vec::new();
                for (rank, contribution) in (0_u32..).zip(&contributions) {
                    let words = unpack_words(contribution)
                        .map_err(|violation| Error::Protocol { rank, violation })?;
                    if rank == 0 {
                        total = words;
                    } else {
                        add_words(&mut total, &words)?;
                    }
                }
                Ok(same_for_all(pack_words(&total)))
            }
            Operation::Exchange => {
                let mut rows = Vec::with_capacity(contributions.len());
                for (rank, contribution) in (0_u32..).zip(&contributions) {
                    let row = unpack_blobs(contribution, size);
                    rows.push(row.map_err(|violation| Error::Protocol { rank, violation })?);
                }
                let mut results = Vec::with_capacity(contributions.len());
                for to in 0..size as usize {
                    let column: Vec<&[u8]> = rows.iter().map(|row| row[to]).collect();
                    let payload = pack_blobs(&column);
                    if payload.len() > limits.max_message {
                        return Err(too_large(payload.len(), limits));
                    }
                    results.push(Arc::from(payload));
                }
                Ok(results)
            }
        }
    }

    fn mismatch(&self, rank: u32, called: Operation) -> Error {
        Error::OperationMismatch { rank, called, other_rank: self.first, other_called: self.operation }
    }
}

fn too_large(bytes: usize, limits: &Limits) -> Error {
    Error::TooLarge { bytes: bytes as u64, limit: limits.max_message as u64, name: "max_message" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_operations_are_a_mismatch() {
        let limits = Limits::default();
        let mut collective = Collective::new(Operation::Barrier, 2, 3);
        assert_eq!(collective.add(2, Operation::Barrier, Vec::new(), &limits), Ok(false));
        assert!(matches!(
            collective.add(1, Operation::Sum, Vec::new(), &limits),
            Err(Error::OperationMismatch {
                rank: 1,
                called: Operation::Sum,
                other_rank: 2,
                other_called: Operation::Barrier
            })
        ));
        assert_eq!(collective.missing_ranks(), [0, 1]);
    }

    #[test]
    fn sums_of_different_lengths_are_a_mismatch() {
        let limits = Limits::default();
        let mut collective = Collective::new(Operation::Sum, 0, 2);
        assert_eq!(collective.add(0, Operation::Sum, pack_words(&[1, 2]), &limits), Ok(false));
        assert!(matches!(
            collective.add(1, Operation::Sum, pack_words(&[1]), &limits),
            Err(Error::OperationMismatch { rank: 1, .. })
        ));
    }

    #[test]
    fn malformed_contributions_are_violations() {
        let limits = Limits::default();
        let violation = |operation, payload: &[u8]| {
            let mut collective = Collective::new(operation, 0, 2);
            match collective.add(0, operation, payload.to_vec(), &limits) {
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
    fn all_gather_beyond_the_message_limit_is_too_large() {
        let limits = Limits { max_message: 100, ..Limits::default() };
        let mut collective = Collective::new(Operation::AllGather, 0, 2);
        assert_eq!(collective.add(0, Operation::AllGather, vec![0; 60], &limits), Ok(false));
        assert!(matches!(
            collective.add(1, Operation::AllGather, vec![0; 60], &limits),
            Err(Error::TooLarge { bytes: 128, limit: 100, .. })
        ));
    }

    /// Contributions of ranks that know the secret and send anything: a result for every rank, within the limits, or an error.
    ///
    /// Input: `operation, ranks`, then `rank, operation, length, payload` for each contribution.
    #[cfg(not(loom))]
    #[test]
    fn fuzz_bootstrap_collectives() {
        use crate::fuzzing::{Steps, fuzz};

        let contribution = |rank: u8, operation: Operation, payload: &[u8]| {
            [&[rank, operation as u8, payload.len() as u8][..], payload].concat()
        };
        let both = |operation: Operation, payload: &[u8]| {
            let [first, second] = [0, 1].map(|rank| contribution(rank, operation, payload));
            [&[operation as u8, 1][..], &first, &second].concat()
        };
        let examples = [
            both(Operation::Barrier, &[]),
            both(Operation::AllGather, b"blob"),
            both(Operation::Exchange, &pack_blobs(&[&b"xy"[..], b"z"])),
            both(Operation::Sum, &[255; 16]),
            both(Operation::Sum, &[1; 16]),
        ];
        let limits = Limits { max_message: 200, ..Limits::default() };
        fuzz(env!("CARGO_MANIFEST_DIR"), "bootstrap_collectives", examples, |input| {
            let mut steps = Steps(input);
            let Some(operation) = Operation::from_wire(steps.byte()) else { return };
            let size = u32::from(steps.byte() % 5) + 1;
            let mut collective = Collective::new(operation, 0, size);
            let mut is_complete = false;
            while !steps.is_empty() && !is_complete {
                let rank = u32::from(steps.byte() % 8);
                let Some(operation) = Operation::from_wire(steps.byte()) else { return };
                let len = usize::from(steps.byte());
                match collective.add(rank, operation, steps.take(len).to_vec(), &limits) {
                    Ok(complete) => is_complete = complete,
                    Err(_) => return,
                }
                assert_eq!(collective.missing_ranks().is_empty(), is_complete);
            }
            if is_complete && let Ok(results) = collective.into_results(&limits) {
                assert_eq!(results.len(), size as usize);
                for result in &results {
                    assert!(result.len() <= limits.max_message, "{}", result.len());
                    let blobs = matches!(operation, Operation::AllGather | Operation::Exchange);
                    assert!(!blobs || unpack_blobs(result, size).is_ok());
                }
            }
        });
    }
}
