//! A distributed in-memory key-value store.
//!
//! A cluster is a fixed list of *nodes*. A node is one process; its number in the list is its *rank*. Each *daemon* of a node
//! is a thread that owns one *shard* of the keys. A key belongs to exactly one shard, which [`sharding`] computes from the
//! key alone. A *client* is a thread or a process on the same machine as a node. It attaches to that node through shared
//! memory and reaches the keys of all nodes through it.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`wire`] | the messages: layouts, limits, decoding |
//! | [`sharding`] | which shard owns a key |
//! | [`store`] | one shard: the hash tables and their memory limit |
//! | [`node`] | the daemons, and their connections with clients, each other and other nodes |
//! | [`client`] | the client library |
//!
//! Start with [`node`] and [`client`].

// Fuzzing builds contain the functions that LLVM calls.
#![cfg_attr(not(crosstie_fuzz), forbid(unsafe_code))]

pub mod client;
#[cfg(test)]
#[path = "../../crosstie/tests/fuzzing/mod.rs"]
mod fuzzing;
pub mod node;
pub mod sharding;
pub mod store;
pub mod wire;

mod backend;
mod service_names;

pub use backend::Backend;
#[cfg(test)]
use crosstie_testkit::rng;

/// Compiles and runs the Rust code of the guide with the documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct CrateReadme;
    #[doc = include_str!("../../../docs/guide/store.md")]
    struct Store;
}
