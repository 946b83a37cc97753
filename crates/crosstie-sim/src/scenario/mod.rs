//! The scenarios: applications on top of the protocols.

pub(crate) mod barrier;
pub(crate) mod cluster;
pub(crate) mod credits;
pub(crate) mod lock;
pub(crate) mod message;
pub(crate) mod rails;
