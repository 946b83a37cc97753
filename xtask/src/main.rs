//! `cargo xtask`: the checks of this repository and the guests they need.
//!
//! - `cargo xtask test` runs every check there is (`test/steps.rs` is the list), after installing the
//!   packages they need, and ends with one line `N passed, N failed`.
//! - `cargo xtask vm -- COMMAND` runs a command on kernel Soft-RoCE: in a QEMU guest that needs neither
//!   KVM nor an RDMA NIC nor a kernel module of this machine ([`vm`]).
//! - `cargo xtask bench-peers` measures ours beside others, and prints the ratios ([`peers`]).
//!
//! Exit status: 0 done, 1 the work failed, 2 the command line is wrong; `vm` passes on the command's own
//! status, and ends with 97 where a guest gave none.

mod error;
mod packages;
mod peers;
mod process;
mod test;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "The checks of this repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing, then run every check
    Test(test::Options),
    /// Run a command on kernel Soft-RoCE in one QEMU guest, or in two joined by two links
    Vm(vm::Options),
    /// Measure ours beside others on the same two cores, interleaved, and print the ratios
    BenchPeers(peers::Options),
}

fn main() -> ExitCode {
    let ended = match Arguments::parse().task {
        Task::Test(options) => test::run(&options),
        Task::Vm(options) => vm::run(&options),
        Task::BenchPeers(options) => peers::run(&options),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    })
}
