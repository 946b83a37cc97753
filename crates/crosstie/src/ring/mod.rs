//! Rings that many write and one reads, in memory that outlives its writers.
//!
//! What is here is generic over the words it works on ([`Word`]), so that loom checks the very code that ships.

pub(crate) mod fence;
pub(crate) mod reservation;
mod word;

pub(crate) use word::Word;
