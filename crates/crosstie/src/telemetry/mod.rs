//! Measurements: exact counters, and a histogram of fixed size for latencies.
//!
//! Counting and recording allocate nothing, take no lock and make no system call, so both may be used on a data path.
//! Each value has one owner. To combine the values of several threads or processes, use `Counters += Counters` and
//! [`Histogram::merge`], or send them as words ([`Counters::to_words`]). This module reads no clock; the caller measures
//! the times that it records.

#![forbid(unsafe_code)]

mod counters;
mod histogram;

pub use counters::Counters;
pub use histogram::Histogram;
