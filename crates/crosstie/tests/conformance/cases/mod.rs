//! The cases. Each states what a provider must do; if providers may differ, its comment says how.

mod datagram;
mod flush;
mod lifetime;
mod local_errors;
mod memory;
mod opcodes;
mod ordering;
mod posting;
mod remote_errors;
mod rnr;
mod shapes;
mod srq;
mod states;
mod waiting;

use crate::participant::{Participant, Provider};

/// A case of this suite.
pub(crate) type Case = crate::harness::Case<Participant>;

/// A case that a provider cannot pass.
pub(crate) struct Unsupported {
    pub(crate) case: &'static str,
    pub(crate) provider: Provider,
    pub(crate) reason: &'static str,
}

/// All of them. A run that skips one prints it at the end.
pub(crate) const UNSUPPORTED: &[Unsupported] = &[Unsupported {
    case: "waiting::access_violation_is_an_event",
    provider: Provider::Verbs,
    reason: "Soft-RoCE raises no event for it; flush::receives_of_the_responder_flush sees the queue pair in ERR",
}];

/// Names the functions of a module as cases.
macro_rules! cases {
    ($module:literal: $($name:ident),+ $(,)?) => {
        pub(crate) const CASES: &[$crate::cases::Case] =
            &[$($crate::cases::Case { name: concat!($module, "::", stringify!($name)), run: $name }),+];
    };
}
use cases;

/// Every case, the simple ones first.
pub(crate) fn all() -> impl Iterator<Item = Case> {
    [
        opcodes::CASES,
        shapes::CASES,
        memory::CASES,
        ordering::CASES,
        states::CASES,
        posting::CASES,
        flush::CASES,
        rnr::CASES,
        remote_errors::CASES,
        local_errors::CASES,
        srq::CASES,
        datagram::CASES,
        waiting::CASES,
        lifetime::CASES,
    ]
    .into_iter()
    .flatten()
    .copied()
}
