//! The rules of Crosstie as plain state machines.
//!
//! Everything here is deterministic: no clock, no I/O, no memory of its own beyond what a caller hands in, and no
//! `unsafe`. The `crosstie` crate runs these rules on devices; tests and models run them on nothing at all.
#![no_std]
#![forbid(unsafe_code)]

pub mod key;
pub mod lane;
