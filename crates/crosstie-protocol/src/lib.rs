//! The protocols of Crosstie as deterministic state machines: no clock, no I/O, no `unsafe`.
//!
//! A state machine allocates its tables once, when it is created, and nothing after that. The `crosstie` crate runs the
//! protocols on devices; tests and models run them without any device.
//!
//! - [`copyrpc`]: RPC by RDMA writes: wire format, credits and batches.
//! - [`rails`]: messages over several rails: immediates, splits, failover.
//! - [`endpoint`]: operations with owned completions: slots, messages, immediates, batches.
//! - [`group`]: locks, barriers and messages of process groups.
//! - [`signaling`]: which requests of a send queue ask for a completion.
//! - [`lane`]: the word in front of each slot of a lane.
//! - [`key`], [`slab`]: table keys with a generation, and a table of them.
//! - [`region`]: descriptors of registered regions.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod copyrpc;
pub mod endpoint;
pub mod group;
pub mod key;
pub mod lane;
pub mod rails;
pub mod region;
pub mod signaling;
pub mod slab;
