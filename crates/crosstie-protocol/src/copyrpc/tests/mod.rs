//! Two flows joined by virtual links. Each rule of the protocol is also turned off once, to show that the tests
//! detect the failure which the rule prevents.

/// A rule that a test turns off on purpose. Each variant says what happens instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BrokenRule {
    /// Metadata carries the bytes consumed since the last batch instead of the absolute position.
    DeltaPosition,
    /// The skip of a wrap marker is computed from the offset behind it instead of taken from the immediate.
    SkipFromOffset,
    /// Room is checked for metadata and message only, not for the wrap in front of them.
    RoomWithoutWrap,
    /// A side never sends a batch of metadata alone.
    SilentWhenIdle,
    /// A side that lacks credit does not tell its peer what it has released.
    NeverTellsReleases,
    /// A side never READs the peer's consumer position.
    NeverReads,
    /// Ring space counts as free once it was parsed.
    ReleaseOnParse,
    /// A reply may be longer than its credit allows.
    LongReplies,
    /// Each side derives the credit that it starts with from its peer's ring instead of its own.
    CreditOfPeerRing,
    /// Calls leave room only for the credit that is granted now, not for all that may be granted.
    CallsUseCreditRoom,
}

mod broken_rules;
mod invalid_bytes;
mod model;
mod pair;
mod random_schedules;
