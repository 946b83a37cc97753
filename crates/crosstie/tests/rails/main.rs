//! Messages over several rails: right bytes, exact counters, failover.

#[path = "../rng/mod.rs"]
mod rng;

mod pair;

mod failover;
mod transfers;
