//! Two endpoints and virtual links; the traps that the rules close, each reopened once to see the tests notice.

/// A rule to leave out on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Trap {
    /// Metadata carries what was consumed since the last batch instead of the absolute position.
    DeltaPosition,
    /// The skip of a wrap marker is computed from the offset behind it instead of taken from the immediate.
    SkipFromOffset,
    /// Room is checked for metadata and message only, not for the wrap before them.
    RoomWithoutWrap,
    /// No batch of metadata alone, ever.
    SilentWhenIdle,
    /// A side that lacks credit does not tell its peer what it has released.
    NeverTells,
    /// No READ of the peer's consumer position, ever.
    NeverRead,
    /// Ring space counts as free once it was parsed.
    CreditOnParse,
    /// A reply may be longer than its allowance.
    LongReplies,
    /// Each side derives the credit it starts with from its peer's ring instead of its own.
    CreditOfOwnRing,
    /// Calls leave room for the credit that is granted now, not for all that may be.
    CallsEatCredit,
    /// A call whose post failed keeps its credit.
    RollbackKeepsCredit,
}

mod bytes;
mod model;
mod pair;
mod random;
mod traps;
