//! Fencing tokens: a resource that is given the token of a lock refuses tokens that are older than one it has seen.

use alloc::boxed::Box;
use core::fmt;

use thiserror::Error;

/// A fencing token: the view in which the lock was found or made anew, and how often it has changed hands since. Tokens are compared
/// whole, the view first.
///
/// The token of a lock rises with every acquisition: within a view by one, and over a lost token because it is made anew in a later view.
/// It rises over groups that follow each other because the first view of a group is above the views of all groups before
/// ([`Config::first_view`](super::Config::first_view)).
///
/// ```
/// use crosstie_protocol::group::Token;
/// assert!(Token { view: 7, count: 900 } < Token { view: 8, count: 1 });
/// assert_eq!(Token::from_bytes(&Token { view: 7, count: 9 }.to_bytes()), Token { view: 7, count: 9 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token {
    /// The number of the view.
    pub view: u64,
    /// From 1 for each view.
    pub count: u64,
}

impl Token {
    /// Bytes of an encoded token.
    pub const ENCODED: usize = 16;

    /// The token of the next acquisition.
    pub(super) const fn next(self) -> Token {
        Token { view: self.view, count: self.count + 1 }
    }

    /// The bytes of the token: view and count, little-endian.
    pub fn to_bytes(self) -> [u8; Self::ENCODED] {
        let mut bytes = [0; Self::ENCODED];
        bytes[..8].copy_from_slice(&self.view.to_le_bytes());
        bytes[8..].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    /// The token in these bytes.
    pub fn from_bytes(bytes: &[u8; Self::ENCODED]) -> Token {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        Token { view: word(0), count: word(8) }
    }
}

/// View and count, with a dot between them.
impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.view, self.count)
    }
}

/// An older fencing token than one that was seen before: its holder has lost the lock without noticing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("fencing token {token} of lock {lock} is older than {newest}: its holder has lost the lock")]
pub struct StaleToken {
    /// The lock.
    pub lock: u32,
    /// The token that was refused.
    pub token: Token,
    /// The newest token that was seen.
    pub newest: Token,
}

/// The newest fencing token of each lock that this member has seen.
///
/// ```
/// use crosstie_protocol::group::{FenceTable, Token};
/// let mut fences = FenceTable::new(4);
/// let (first, second) = (Token { view: 3, count: 17 }, Token { view: 3, count: 18 });
/// assert!(fences.check(2, first).is_ok());
/// assert!(fences.check(2, first).is_ok(), "one holder writes many times");
/// assert!(fences.check(2, second).is_ok());
/// assert_eq!(fences.check(2, first).unwrap_err().newest, second);
/// assert!(fences.check(2, Token { view: 4, count: 1 }).is_ok());
/// assert!(fences.check(2, second).is_err(), "a token of an older view");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FenceTable {
    newest: Box<[Token]>,
    refused: u64,
}

impl FenceTable {
    /// A table for locks 0 to `locks - 1`.
    pub fn new(locks: usize) -> Self {
        FenceTable { newest: (0..locks).map(|_| Token::default()).collect(), refused: 0 }
    }

    /// Accepts a token that is not older than any seen before, and remembers it. A lock that is not in the table is refused.
    pub fn check(&mut self, lock: u32, token: Token) -> Result<(), StaleToken> {
        match self.newest.get_mut(lock as usize) {
            Some(newest) if token >= *newest => {
                *newest = token;
                Ok(())
            }
            other => {
                let newest = other.map_or(Token { view: u64::MAX, count: u64::MAX }, |newest| *newest);
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
        let newest = Token { view: 5, count: 8 };
        assert_eq!(fences.check(0, newest), Ok(()));
        let older = (0..8).map(|count| Token { view: 5, count }).chain([Token { view: 4, count: 99 }]);
        for token in older {
            assert_eq!(fences.check(0, token), Err(StaleToken { lock: 0, token, newest }));
        }
        assert_eq!(fences.check(0, newest), Ok(()), "a refused token changes nothing");
        assert_eq!(fences.check(1, Token { view: 1, count: 1 }), Ok(()));
        assert!(fences.check(2, Token { view: u64::MAX, count: 0 }).is_err(), "not a lock of this group");
        assert_eq!(fences.refused(), 10);
    }
}
