//! Benchmarks of crosstie, with their workloads, a linearizability checker, result files and reports.
//!
//! - [`device`], [`local_rpc`], [`copyrpc`] and [`endpoint`] measure one device, RPC on one machine, RPC by RDMA writes, and endpoints. Each compares its result
//!   with what the machine allows, which plain code measures in the same run. `runner` runs them.
//! - [`rails`] measures messages over several devices, and what a failed one costs.
//! - [`group`] measures locks, barriers and messages of a process group.
//! - [`demo`] runs one short benchmark of each part and shows them on one screen.
//! - [`kv`] measures the key-value store on a cluster of nodes. [`workload`] generates the requests, [`history`] checks that the
//!   responses are linearizable, [`figures`] defines the result files, and [`report`] draws results as one HTML page.
//!
//! Programs that use the store depend on `crosstie-kv`, which has none of this.

#![deny(unsafe_code)]

pub mod copyrpc;
pub mod cores;
pub mod demo;
pub mod device;
pub mod endpoint;
mod error;
pub mod figures;
pub mod group;
pub mod history;
pub mod kv;
mod limits;
pub mod local_rpc;
mod median;
mod options;
pub mod output;
mod progress;
pub mod rails;
pub mod report;
mod runner;
#[allow(unsafe_code, reason = "maps shared memory for the plain-code limits; bounds are checked here")]
mod shared_region;
mod slots;
mod spin_wait;
pub mod summary;
pub mod table;
pub mod units;
pub mod wait;
pub mod workload;

pub use error::Error;

/// Whether another process of the same benchmark has started this one.
pub fn is_child() -> bool {
    std::env::var_os(shared_region::VARIABLE).is_some() || std::env::var_os(kv::command::CHILD).is_some()
}
