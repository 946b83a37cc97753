//! What happened, in figures: exact counters, and latencies in a histogram of fixed size.
//!
//! Promises: counting and recording allocate nothing, take no lock and make no system call, so both may stand inside a
//! data path. Each value has one owner; what several threads or processes counted is added up with
//! `Counters += Counters` and [`Histogram::merge`], or sent as words ([`Counters::to_words`]). Clocks are the caller's.

#![forbid(unsafe_code)]

mod counters;
mod histogram;

pub use counters::Counters;
pub use histogram::Histogram;
