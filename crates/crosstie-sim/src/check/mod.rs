//! Checkers: they see what applications ask for and get, and share no code with the protocols.

pub(crate) mod barrier;
pub(crate) mod lock;
pub(crate) mod message;
