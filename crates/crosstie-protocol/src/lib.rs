//! The rules of Crosstie as plain state machines.
//!
//! Everything here is deterministic: no clock, no I/O, no `unsafe`, and no memory of its own beyond tables that are
//! allocated once, when a state machine is made. The `crosstie` crate runs these rules on devices; tests and models run
//! them on nothing at all.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod copyrpc;
pub mod key;
pub mod lane;
