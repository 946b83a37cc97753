//! Rings and lanes in memory that outlives its writers: many write and one reads ([`reservation`]), or one calls and one
//! answers ([`lane`], [`call_table`]).
//!
//! What is here is generic over the words it works on ([`Word`]), so that loom checks the very code that ships.

pub(crate) mod call_table;
pub(crate) mod fence;
pub(crate) mod lane;
pub(crate) mod reservation;
mod word;

pub(crate) use word::Word;
