//! Devices beyond their contract, which the program `conformance` checks: injected faults, registered memory and its keys.

#[path = "../harness/ends.rs"]
mod ends;
mod fault;
#[cfg(feature = "fast-in-place-copies")]
mod mapped_peer_memory;
mod region_keys;
mod regions;
