//! The trait that every implementation of a job provides.

use super::error::Result;

/// The collective operations of a job.
///
/// All ranks call the same operations in the same order; each call returns when all ranks have made it.
///
/// A blob larger than [`Limits::max_blob`](super::Limits::max_blob) and a wrong number of blobs are refused before
/// anything is sent, and the caller may call again. After any other error the job is over, and every later call
/// returns the same error.
pub trait Bootstrap {
    /// This process's rank, counted from 0.
    fn rank(&self) -> u32;

    /// The number of ranks in the job.
    fn size(&self) -> u32;

    /// Sends `blob` to every rank and returns the blobs of all ranks, in rank order. The blobs may differ in length
    /// and may be empty.
    fn all_gather(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Sends `blobs[r]` to rank `r` and returns the blob that each rank sent to this one, in rank order. `blobs` holds one
    /// blob per rank, this one included; they may differ in length and may be empty.
    fn exchange(&mut self, blobs: &[Vec<u8>]) -> Result<Vec<Vec<u8>>>;

    /// Waits until all ranks have called `barrier`.
    fn barrier(&mut self) -> Result<()>;

    /// Returns the element-wise sum of the `words` of all ranks. All ranks pass the same number of words. When a sum
    /// exceeds 64 bits, all ranks get [`Error::Overflow`](super::Error::Overflow).
    fn sum(&mut self, words: &[u64]) -> Result<Vec<u64>>;

    /// Ends the job in an orderly way; it is the last call of a job. It waits for all ranks. A process that spawned ranks
    /// also waits for them to exit, and returns an error when one of them failed.
    fn finish(&mut self) -> Result<()> {
        self.barrier()
    }
}
