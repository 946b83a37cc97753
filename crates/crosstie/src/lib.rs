//! Communication by remote memory access (RDMA): on RDMA NICs, on Soft-RoCE, or, without any installation, on a software
//! device in shared memory.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`device`] | queue pairs, completion queues and memory regions as in verbs, on three providers |
//! | [`region`] | registered memory with an owner: in place, cached, described to peers |
//! | [`copyrpc`] | RPC by RDMA writes that batches many calls into one of them |
//! | [`group`] | process groups: locks with fencing tokens, barriers, messages |
//! | [`rails`] | messages over several devices at once, with failover |
//! | [`endpoint`] | operations on memory of a peer: read, write, send, receive, batches, with futures |
//! | [`ipc`] | RPC between processes of one machine, with an SPSC lane for each client |
//! | [`delegation`] | RPC between processes of one machine, with one MPSC ring that all clients share |
//! | [`flux`] | RPC between the threads of one process |
//! | [`bootstrap`] | connects the processes of a job: local processes, TCP rendezvous, MPI |
//! | [`telemetry`] | counters and histograms |
//!
//! `ipc`, `delegation` and `flux` need no device. [`WaitStrategy`] says how they wait, and [`wait_any`] waits for several
//! connections at once. The other modules take a device by its name ([`device::DeviceSpec`]): `software` reaches processes of this
//! machine, `verbs:NAME` (cargo feature `verbs`) other machines, and `fault:SEED:DEVICE` makes another device fail, for tests.
//! Nothing else in a program depends on the device.
//!
//! A first example: one endpoint reads the memory of another. Here both are in one process; two processes exchange the addresses and
//! the description of the memory, which are plain bytes, over [`bootstrap`] or any other channel.
//!
//! ```
//! use crosstie::endpoint::{Endpoint, EndpointConfig};
//! use crosstie::region::Rights;
//!
//! let device = "software".parse()?;
//! let here = Endpoint::open(&device, &EndpointConfig::default())?;
//! let there = Endpoint::open(&device, &EndpointConfig::default())?;
//! here.connect(&there.address())?;
//! there.connect(&here.address())?;
//!
//! let theirs = there.allocate(4096)?;
//! theirs.write(0, b"remote bytes")?;
//! let remote = here.import(&there.describe(&theirs), Rights { read: true, ..Rights::default() })?;
//! let read = here.read(here.allocate(12)?, .., &remote, 0)?;
//! let done = read.wait()?; // the operation gives its buffer back
//! assert_eq!(done.buffer.to_vec(), b"remote bytes");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cargo features
//!
//! All of these are on by default. Who needs only some of it builds less:
//!
//! | feature | modules |
//! | --- | --- |
//! | `ipc` | [`ipc`], [`delegation`], [`flux`]; alone, it builds no device |
//! | `rpc` | [`copyrpc`], with `device` |
//! | `endpoint` | [`endpoint`], with `device` |
//! | `rails` | [`rails`], with `device` and `bootstrap` |
//! | `group` | [`group`], with `endpoint` and `bootstrap` |
//! | `device`, `bootstrap` | [`device`] and [`region`]; [`bootstrap`] |
//!
//! Off by default:
//!
//! | feature | adds |
//! | --- | --- |
//! | `verbs` | RDMA NICs and Soft-RoCE; needs cmake and libclang |
//! | `mpi` | [`bootstrap`] over MPI; needs an MPI |
//! | `fast-in-place-copies` | software device: WRITEs into memory that another process registered in place are faster. Memory that is written often is mapped, if the process may do that, and helper threads share copies from 128 KiB on. `CROSSTIE_MAP_MEMORY=0` and `CROSSTIE_COPY_HELPERS=0` turn them off in a running program. The NCCL plugin and the benchmarks use it |
//!
//! The repository's guide (`docs/guide/`) has a page for each module, and `examples/` complete programs of two and more processes.

// The low rooms have what any of the others needs. Whether all of it is needed is checked with all features.
#![cfg_attr(
    not(all(feature = "ipc", feature = "rpc", feature = "endpoint", feature = "rails", feature = "group")),
    allow(dead_code, unused_imports, unreachable_pub)
)]

#[cfg(feature = "bootstrap")]
pub mod bootstrap;
#[cfg(feature = "rpc")]
pub mod copyrpc;
#[cfg(feature = "ipc")]
pub mod delegation;
#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "endpoint")]
pub mod endpoint;
#[cfg(feature = "ipc")]
pub mod flux;
#[cfg(all(test, not(loom)))]
#[path = "../tests/fuzzing/mod.rs"]
mod fuzzing;
#[cfg(feature = "group")]
pub mod group;
#[cfg(feature = "ipc")]
pub mod ipc;
mod local;
#[cfg(feature = "ipc")]
mod local_rpc;
mod memory;
#[cfg(feature = "ipc")]
mod message;
mod process;
#[cfg(feature = "rails")]
pub mod rails;
#[cfg(feature = "device")]
pub mod region;
mod ring;
pub mod telemetry;
mod wait;

// What unit tests share with the programs in `tests/` names the library by its name.
#[cfg(test)]
extern crate self as crosstie;
#[cfg(test)]
use crosstie_testkit::rng;
#[cfg(all(test, not(loom)))]
use crosstie_testkit::seccomp;
#[cfg(feature = "ipc")]
pub use local_rpc::caller::Caller;
#[cfg(feature = "ipc")]
pub use message::Message;
pub use wait::{WaitStrategy, Waitable, WakeFlag, Wakeup, park_any, wait_any, yield_core};

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
    #[doc = include_str!("../../../docs/guide/rails.md")]
    struct Rails;
    #[doc = include_str!("../../../docs/guide/endpoint.md")]
    struct Endpoint;
    #[doc = include_str!("../../../docs/guide/groups.md")]
    struct Groups;
    #[doc = include_str!("../../../docs/guide/tuning.md")]
    struct Tuning;
    #[doc = include_str!("../../../docs/guide/async.md")]
    struct Async;
}
