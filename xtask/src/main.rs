//! `cargo xtask`: the tasks of this repository.
//!
//! - `cargo xtask test` installs the packages that the checks need, runs all checks ([`mod@test`]; the list is in
//!   `test/steps.rs`), and ends with one line `N passed, N failed`.
//! - `cargo xtask vm -- COMMAND` runs a command on kernel Soft-RoCE, in a QEMU guest. It needs neither KVM nor an RDMA
//!   NIC nor a kernel module on this machine ([`vm`]).
//! - `cargo xtask fuzz` fuzzes every decoder of peer bytes, guided by coverage ([`fuzz`]).
//! - `cargo xtask soak` runs everything random that the project has, with fresh seeds, until the time is over ([`soak`]).
//! - `cargo xtask split-loads` counts loads that wait for several stores, in an operation that a budget limits ([`split_loads`]).
//! - `cargo xtask bench-peers` measures Crosstie and other systems side by side, and prints the ratios ([`peers`]).
//! - `cargo xtask figures` measures what the documents claim, and writes the figures into them ([`figures`]).
//!
//! Exit status: 0 success, 1 the work failed, 2 the command line is wrong. `vm` exits with the status of the command in the
//! guest, or with 97 when a guest ended without one.

mod build;
mod error;
mod figures;
mod fuzz;
mod packages;
mod peers;
mod process;
mod soak;
mod split_loads;
mod test;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The tasks of this repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install missing packages, then run all checks
    Test(test::Options),
    /// Run a command on kernel Soft-RoCE in one QEMU guest, or in two joined by two links
    Vm(vm::Options),
    /// Fuzz every decoder of peer bytes, guided by coverage
    Fuzz(fuzz::Options),
    /// Run everything random that the project has, with fresh seeds and unkind settings, until the time is over
    Soak(soak::Options),
    /// Count the loads of bytes that were just stored in other pieces, in an operation that a budget limits
    SplitLoads(split_loads::Options),
    /// Measure Crosstie, UCX, iceoryx2, Redis, memcached, OpenMPI and MPICH on the same two cores, interleaved, and print the ratios
    BenchPeers(peers::Options),
    /// Measure what the documents claim, interleaved, and write the figures into them
    Figures(figures::Options),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().task {
        Task::Test(options) => test::run(&options),
        Task::Vm(options) => vm::run(&options),
        Task::Fuzz(options) => fuzz::run(&options),
        Task::Soak(options) => soak::run(&options),
        Task::SplitLoads(options) => split_loads::run(&options),
        Task::BenchPeers(options) => peers::run(&options),
        Task::Figures(options) => figures::run(&options),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    })
}
