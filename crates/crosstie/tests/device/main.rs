//! Devices beyond their contract, which the program `conformance` checks: injected faults, registered memory and its keys.

mod fault;
mod mapped_peer_memory;
mod region_keys;
mod regions;
