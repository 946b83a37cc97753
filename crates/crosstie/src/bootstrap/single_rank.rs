//! A job of one rank: every operation returns its own input.

use super::error::Result;
use super::job::Bootstrap;
use super::limits::{Limits, check_blob_count};

/// The only rank of its job. It enforces the same limits as a job of several ranks, so that a program that exceeds them
/// fails already when it is tried with one rank.
#[derive(Debug, Clone, Default)]
pub struct SingleRank {
    limits: Limits,
}

impl SingleRank {
    /// Creates a job of one rank.
    pub fn new(limits: Limits) -> Self {
        SingleRank { limits }
    }
}

impl Bootstrap for SingleRank {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.limits.check_blob(blob.len())?;
        Ok(vec![blob.to_vec()])
    }

    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        check_blob_count(blobs, 1)?;
        blobs.iter().try_for_each(|blob| self.limits.check_blob(blob.len()))?;
        Ok(blobs.to_vec())
    }

    fn barrier(&mut self) -> Result<()> {
        Ok(())
    }

    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>> {
        self.limits.check_message(size_of_val(words))?;
        Ok(words.to_vec())
    }
}
