//! Memory that other processes access, too: shared segments ([`segment`]), allocation in them ([`heap`]), race-tolerant copies
//! in and out ([`copy`], [`shared_bytes`]), and cache hints
//! ([`prefetch`]).

pub(crate) mod copy;
pub(crate) mod heap;
pub(crate) mod prefetch;
pub(crate) mod segment;
pub(crate) mod shared_bytes;
