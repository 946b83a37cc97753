//! Communication by remote memory access: on RDMA NICs, on Soft-RoCE, or, with nothing installed, on a software device in
//! shared memory.
//!
//! Start with [`device`]: it explains the contract that everything else stands on. [`bootstrap`] gets the processes of a
//! job to know each other, [`telemetry`] counts and times. [`copyrpc`] carries calls between nodes. On one machine, without any device, [`ipc`] and [`delegation`] carry
//! calls between processes, and [`flux`] between threads.

pub mod bootstrap;
#[cfg(test)]
#[path = "../tests/chance/mod.rs"]
mod chance;
pub mod copyrpc;
pub mod delegation;
pub mod device;
pub mod flux;
pub mod ipc;
mod memory;
mod message;
mod neighbor;
mod ring;
pub mod telemetry;

pub use message::Message;
pub use neighbor::bell::Waiting;
pub use neighbor::caller::Caller;
pub use neighbor::together::{Awaited, wait_any};

/// Compiles and runs the Rust code of the README and of the guide with the documentation tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../README.md")]
    struct CrateReadme;
    #[doc = include_str!("../../../docs/guide/ipc.md")]
    struct Ipc;
    #[doc = include_str!("../../../docs/guide/copyrpc.md")]
    struct Copyrpc;
    #[doc = include_str!("../../../docs/guide/tuning.md")]
    struct Tuning;
}
