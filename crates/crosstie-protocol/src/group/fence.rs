//! Fencing tokens: a resource that is given the token of a lock refuses tokens that are older than one it has seen.

use alloc::boxed::Box;

use thiserror::Error;

/// An older fencing token than one that was seen before: its holder has lost the lock without noticing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("fencing token {token:#x} of lock {lock} is older than {newest:#x}: its holder has lost the lock")]
pub struct StaleToken {
    /// The lock.
    pub lock: u32,
    /// The token that was refused.
    pub token: u64,
    /// The newest token that was seen.
    pub newest: u64,
}

/// The newest fencing token of each lock that this member has seen.
///
/// ```
/// use crosstie_protocol::group::FenceTable;
/// let mut fences = FenceTable::new(4);
/// assert!(fences.check(2, 17).is_ok());
/// assert!(fences.check(2, 17).is_ok(), "one holder writes many times");
/// assert!(fences.check(2, 18).is_ok());
/// assert_eq!(fences.check(2, 17).unwrap_err().newest, 18);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FenceTable {
    newest: Box<[u64]>,
    refused: u64,
}

impl FenceTable {
    /// A table for locks 0 to `locks - 1`.
    pub fn new(locks: usize) -> Self {
        FenceTable { newest: (0..locks).map(|_| 0).collect(), refused: 0 }
    }

    /// Accepts a token that is not older than any seen before, and remembers it. A lock that is not in the table is refused.
    pub fn check(&mut self, lock: u32, token: u64) -> Result<(), StaleToken> {
        match self.newest.get_mut(lock as usize) {
            Some(newest) if token >= *newest => {
                *newest = token;
                Ok(())
            }
            other => {
                let newest = other.map_or(u64::MAX, |newest| *newest);
                self.refused += 1;
                Err(StaleToken { lock, token, newest })
            }
        }
    }

    /// How many tokens were refused.
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_that_is_older_by_one_is_refused_for_ever_and_for_its_lock_only() {
        let mut fences = FenceTable::new(2);
        assert_eq!(fences.check(0, 8), Ok(()));
        for token in (0..8).rev() {
            assert_eq!(fences.check(0, token), Err(StaleToken { lock: 0, token, newest: 8 }));
        }
        assert_eq!(fences.check(0, 8), Ok(()), "a refused token changes nothing");
        assert_eq!(fences.check(1, 1), Ok(()));
        assert!(fences.check(2, u64::MAX).is_err(), "not a lock of this group");
        assert_eq!(fences.refused(), 9);
    }
}
