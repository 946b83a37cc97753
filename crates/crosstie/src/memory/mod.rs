//! Memory that others touch too: shared segments, what is laid out in them, and copying in and out.

pub(crate) mod copy;
pub(crate) mod heap;
pub(crate) mod prefetch;
pub(crate) mod segment;
