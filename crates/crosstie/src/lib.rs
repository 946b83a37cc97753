//! Communication by remote memory access: on RDMA NICs, on Soft-RoCE, or, with nothing installed, on a software device in
//! shared memory.
//!
//! Start with [`device`]: it explains the contract that everything else stands on. [`bootstrap`] gets the processes of a
//! job to know each other, [`telemetry`] counts and times. [`copyrpc`] carries calls between nodes. On one machine, without any device, [`ipc`] and [`delegation`] carry
//! calls between processes, and [`flux`] between threads.

pub mod bootstrap;
pub mod copyrpc;
pub mod delegation;
pub mod device;
pub mod flux;
pub mod ipc;
mod local;
mod local_rpc;
mod memory;
mod message;
mod ring;
#[cfg(test)]
#[path = "../tests/rng/mod.rs"]
mod rng;
pub mod telemetry;
mod wait;

pub use local_rpc::caller::Caller;
pub use message::Message;
pub use wait::{WaitStrategy, Waitable, wait_any};

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
