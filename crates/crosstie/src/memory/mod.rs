//! Memory that others touch too: shared segments, and copying in and out of them.

pub(crate) mod copy;
