//! Every limit of the bootstrap, in one place.

use std::time::Duration;

use super::error::{Error, Result};

/// The most ranks of one job.
pub const MAX_RANKS: u32 = 16_384;
/// Connections that have not yet proved the secret, at one time. The oldest gives way to the newest.
pub const MAX_UNAUTHENTICATED: usize = 256;
/// How long a connection may take to prove the secret.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than the coordinator's own time limit a rank waits for its word.
pub const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// How long a coordinator that ends tries to hand out what it still has to say.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest [`Limits::max_message`].
pub const MAX_MESSAGE: usize = 1 << 30;

/// Times and sizes that a job may choose. Give every rank the same.
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
    /// How long the ranks that are there wait for those that are not, at the start. Default 30 s.
    pub join_timeout: Duration,
    /// How long the ranks that have begun an operation wait for the others. Default 120 s.
    pub operation_timeout: Duration,
    /// The largest blob. Default 1 MiB.
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
            return Err(Error::TooLarge { bytes: bytes as u64, limit: self.max_blob as u64, name: "max_blob" });
        }
        Ok(())
    }

    pub(super) fn check_message(&self, bytes: usize) -> Result<()> {
        if bytes > self.max_message {
            return Err(Error::TooLarge { bytes: bytes as u64, limit: self.max_message as u64, name: "max_message" });
        }
        Ok(())
    }
}

/// A rank that exists in a job of a size that is allowed.
pub(super) fn check_rank(rank: u32, size: u32) -> Result<()> {
    if size == 0 || size > MAX_RANKS {
        return Err(Error::Configuration(format!("a job has 1 to {MAX_RANKS} ranks, not {size}")));
    }
    if rank >= size {
        return Err(Error::Configuration(format!(
            "rank {rank} does not exist in a job of {size}: ranks count from 0"
        )));
    }
    Ok(())
}
