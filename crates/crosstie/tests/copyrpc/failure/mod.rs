//! A failure ends one connection and no other: faults of the device, malicious peers, killed processes. All memory that was in
//! use is returned.
//!
//! Most tests run in one thread, which polls all sides in turn, so the same seed gives the same run. The seed is
//! printed; `CROSSTIE_SEED` sets it.

mod faults;
mod killed_processes;
mod lifetimes;
mod malicious_bulk;
mod malicious_peer;
mod test_peer;
mod waiting;
