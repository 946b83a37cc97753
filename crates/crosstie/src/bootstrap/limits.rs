//! Every limit of the bootstrap, in one place, and the checks against them.

use std::time::Duration;

use super::error::{Error, Result};

/// The maximum number of ranks in one job.
pub const MAX_RANKS: u32 = 16_384;
/// The maximum number of connections that have not yet proved the secret. Another one replaces the oldest.
pub const MAX_UNAUTHENTICATED: usize = 256;
/// How long a new connection may take to prove the secret.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than the coordinator's own timeout a rank waits for the coordinator's message, so that the
/// coordinator, which knows the cause, reports it first.
pub const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// How long a coordinator that ends keeps trying to write its queued messages.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// The upper bound of [`Limits::max_message`].
pub const MAX_MESSAGE: usize = 1 << 30;

/// Timeouts and sizes that a job may choose. All ranks must use the same values.
///
/// ```
/// use crosstie::bootstrap::Limits;
/// use std::time::Duration;
///
/// let patient = Limits { join_timeout: Duration::from_secs(300), ..Limits::default() };
/// assert_eq!(patient.max_blob, 1 << 20);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long the first ranks wait at the start for the others to join. Default 30 s.
    pub join_timeout: Duration,
    /// How long the ranks that have called an operation wait for the others to call it. Default 120 s.
    pub operation_timeout: Duration,
    /// The largest blob, in bytes. Default 1 MiB.
    pub max_blob: usize,
    /// The most bytes that one rank sends or receives in one operation. Default 64 MiB.
    pub max_message: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            join_timeout: Duration::from_secs(30),
            operation_timeout: Duration::from_secs(120),
            max_blob: 1 << 20,
            max_message: 64 << 20,
        }
    }
}

impl Limits {
    pub(super) fn check(&self) -> Result<()> {
        if self.max_message > MAX_MESSAGE {
            let (bytes, limit) = (self.max_message as u64, MAX_MESSAGE as u64);
            return Err(Error::TooLarge { bytes, limit, name: "MAX_MESSAGE" });
        }
        Ok(())
    }

    pub(super) fn check_blob(&self, bytes: usize) -> Result<()> {
        if bytes > self.max_blob {
            return Err(Error::TooLarge {
                bytes: bytes as u64,
                limit: self.max_blob as u64,
                name: "max_blob",
            });
        }
        Ok(())
    }

    pub(super) fn check_message(&self, bytes: usize) -> Result<()> {
        if bytes > self.max_message {
            return Err(Error::TooLarge {
                bytes: bytes as u64,
                limit: self.max_message as u64,
                name: "max_message",
            });
        }
        Ok(())
    }
}

/// Checks that the job's size is allowed and that `rank` is one of its ranks.
pub(super) fn check_rank(rank: u32, size: u32) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::Configuration(format!(
            "the job has {size} ranks, but a job has 1 to {MAX_RANKS}: start it with another size"
        )));
    }
    if rank >= size {
        return Err(Error::Configuration(format!(
            "rank {rank} does not exist in a job of {size} ranks: ranks are numbered from 0 to {}",
            size - 1
        )));
    }
    Ok(())
}

/// Checks that an exchange has one blob per rank.
pub(super) fn check_blob_count(blobs: &[Vec<u8>], size: u32) -> Result<()> {
    if blobs.len() == size as usize { Ok(()) } else { Err(Error::BlobCount { given: blobs.len(), size }) }
}
