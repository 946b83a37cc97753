//! Groups on virtual networks: exhaustive models, message counts, bytes, and rules that are broken on purpose.

mod barrier_model;
mod broken_rules;
mod combined;
mod costs;
mod lock_model;
mod loss;
mod lost_tokens;
mod message_model;
mod net;
mod wire;

use std::fmt::Debug;
use std::hash::Hash;
use std::vec::Vec;

use stateright::{Checker, Expectation, Model};

/// A rule that a test turns off on purpose. Each variant says what happens instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BrokenRule {
    /// A member hands its lock over while the queue is being rebuilt.
    HandsOverWhileHealing,
    /// A report does not say who got the lock, so a lock on its way counts as lost.
    ForgetsWhoGotTheLock,
    /// A round may end while its outcome is being found out.
    EndsRoundsWhileHealing,
    /// A release that comes while the outcome of a round is being found out is dropped.
    ForgetsReleasesWhileHealing,
    /// The coordinator decides from what it knows itself.
    TrustsTheCoordinatorOnly,
    /// A receiver accepts a packet although one before it is missing.
    AcceptsBehindAGap,
    /// A sender never sends a packet again by itself.
    NeverSendsAgain,
    /// A packet that is held is delivered although one before it is missing.
    DeliversHeldPacketsTooEarly,
    /// A sender sends although the receiver has no room.
    SendsBeyondCredit,
    /// A receiver does not tell a sender without credit that it has room again.
    ForgetsToResume,
}

/// The names of the rules that some state breaks.
fn failed_rules<M>(checker: &impl Checker<M>) -> Vec<&'static str>
where
    M: Model,
    M::State: Clone + Debug + Hash + PartialEq,
    M::Action: Clone + Debug + PartialEq,
{
    let always = checker.model().properties().into_iter().filter(|p| p.expectation == Expectation::Always);
    always.map(|property| property.name).filter(|name| checker.discovery(name).is_some()).collect()
}
