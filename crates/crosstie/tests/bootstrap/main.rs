//! Jobs: every operation, failures, and a network that cannot be trusted; threads and processes.

mod collectives;
mod processes;
#[path = "../bootstrap_suite/mod.rs"]
mod suite;
mod untrusted_network;
