//! Messages over several rails: right bytes, exact counters, failover.

#[path = "../allocations/mod.rs"]
mod allocations;
#[path = "../rng/mod.rs"]
mod rng;

mod pair;

mod failover;
mod flush;
mod observe;
mod peers;
mod registrations;
mod transfers;
