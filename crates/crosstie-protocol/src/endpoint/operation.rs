//! The state word of an operation.
//!
//! ```text
//!  63            32 31        16 15   4    3       2       1       0
//! +----------------+------------+------+-------+-------+-------+-------+
//! |   generation   |   cause    |  0   | WAKER | HELD  | BACK  | ENDED |
//! +----------------+------------+------+-------+-------+-------+-------+
//!
//!                end: completion, cancel, deadline           return: the device is done with the memory
//!   leased  ----------------------------------->  ended  --------------------------->  ended + back  --->  free
//!      \_________________________________________________________________________________^
//!                             completion: both at once
//! ```
//!
//! - ENDED: the result is known. It is set once; the first to set it decides the cause.
//! - BACK: the device does not touch the operation's memory any more, so that the program can have it. Before it is set, the
//!   memory belongs to the engine; after that, to the future.
//! - HELD: a future (or what is left of it) can still see the operation. When HELD is clear and BACK is set, nobody sees the
//!   operation any more, and the next one may use its entry, with the next generation.
//! - WAKER: a task waits for the next change.
//!
//! Every change is one compare-and-swap of the word; this module computes the new word.

/// The word. See the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationWord(u64);

const ENDED: u64 = 1;
const BACK: u64 = 1 << 1;
const HELD: u64 = 1 << 2;
const WAKER: u64 = 1 << 3;

impl OperationWord {
    /// The word with these bits.
    pub const fn from_bits(bits: u64) -> Self {
        OperationWord(bits)
    }

    /// The word as an integer.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The word of an entry that no operation uses.
    pub const fn free(generation: u32) -> Self {
        OperationWord((generation as u64) << 32 | ENDED | BACK)
    }

    /// The word of a new operation: not ended, held by its future and by the engine.
    pub const fn leased(generation: u32) -> Self {
        OperationWord((generation as u64) << 32 | HELD)
    }

    /// The generation of the entry.
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Why the operation ended; zero before it has ended.
    pub const fn cause(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Whether the result is known.
    pub const fn is_ended(self) -> bool {
        self.0 & ENDED != 0
    }

    /// Whether the memory belongs to the future.
    pub const fn is_back(self) -> bool {
        self.0 & BACK != 0
    }

    /// Whether a future can see the operation.
    pub const fn is_held(self) -> bool {
        self.0 & HELD != 0
    }

    /// Whether a task waits for the next change.
    pub const fn has_waker(self) -> bool {
        self.0 & WAKER != 0
    }

    /// Whether nobody sees the operation any more.
    pub const fn is_unused(self) -> bool {
        self.is_back() && !self.is_held()
    }

    /// Ends the operation, while the device may still touch its memory. `None`: it has ended before, and stays as it is.
    pub const fn end(self, cause: u16) -> Option<Self> {
        if self.is_ended() {
            return None;
        }
        Some(OperationWord((self.0 & !WAKER) | (cause as u64) << 16 | ENDED))
    }

    /// Gives the memory back, and ends the operation with this cause unless it has ended before. `None`: the memory was given
    /// back before.
    pub const fn give_back(self, cause: u16) -> Option<Self> {
        if self.is_back() {
            return None;
        }
        let ended = match self.end(cause) {
            Some(ended) => ended,
            None => self,
        };
        Some(OperationWord((ended.0 & !WAKER) | BACK))
    }

    /// Notes that the future does not look any more.
    pub const fn let_go(self) -> Self {
        OperationWord(self.0 & !(HELD | WAKER))
    }

    /// Notes that a task waits. `None`: what it waits for has happened. `for_back`: it waits for the memory, not only for the
    /// result.
    pub const fn set_waker(self, for_back: bool) -> Option<Self> {
        if self.is_back() || (!for_back && self.is_ended()) {
            return None;
        }
        Some(OperationWord(self.0 | WAKER))
    }

    /// The word of the entry when the next operation may use it.
    pub const fn retire(self) -> Self {
        Self::free(self.generation().wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        End(u16),
        GiveBack(u16),
        LetGo,
        SetWaker(bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u16..9).prop_map(Step::End),
            (1u16..9).prop_map(Step::GiveBack),
            Just(Step::LetGo),
            any::<bool>().prop_map(Step::SetWaker),
        ]
    }

    proptest! {
        /// I1 and "never flips": whatever happens in whatever order, the first cause stays, the memory comes back once, and the
        /// generation stays until the entry is retired.
        #[test]
        fn first_cause_wins_and_memory_comes_back_once(steps in proptest::collection::vec(step(), 0..12), generation in any::<u32>()) {
            let mut word = OperationWord::leased(generation);
            let (mut cause, mut returns, mut held) = (None, 0, true);
            for step in steps {
                match step {
                    Step::End(code) => match word.end(code) {
                        Some(next) => {
                            prop_assert_eq!(cause, None);
                            cause = Some(code);
                            word = next;
                        }
                        None => prop_assert!(cause.is_some()),
                    },
                    Step::GiveBack(code) => match word.give_back(code) {
                        Some(next) => {
                            returns += 1;
                            cause = cause.or(Some(code));
                            word = next;
                        }
                        None => prop_assert_eq!(returns, 1),
                    },
                    Step::LetGo => {
                        held = false;
                        word = word.let_go();
                    }
                    Step::SetWaker(for_back) => {
                        let waits = if for_back { returns == 0 } else { cause.is_none() };
                        let next = word.set_waker(for_back);
                        prop_assert_eq!(next.is_some(), waits);
                        word = next.unwrap_or(word);
                    }
                }
                prop_assert_eq!(word.generation(), generation);
                prop_assert_eq!(word.is_ended(), cause.is_some());
                prop_assert_eq!(word.cause(), cause.unwrap_or(0));
                prop_assert_eq!(word.is_back(), returns == 1);
                prop_assert_eq!(word.is_unused(), returns == 1 && !held);
                prop_assert!(!(word.has_waker() && word.is_back()));
            }
            let free = word.retire();
            prop_assert_eq!(free.generation(), generation.wrapping_add(1));
            prop_assert!(free.end(1).is_none() && free.give_back(1).is_none(), "nothing ends a free entry");
        }
    }
}
