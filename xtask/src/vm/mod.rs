//! Runs commands on kernel Soft-RoCE, on a machine without it: in QEMU guests without KVM.
//!
//! A guest consists of Debian's kernel ([`kernel`]) and a file system that is built for each run ([`guest_image`],
//! [`initramfs`]). [`qemu`] boots it, forwards the command's output and exit status, and kills a guest after its timeout. Files
//! of this machine that are copied into the guest (the command, each `--file`, the libraries that they need) keep their
//! paths.
//!
//! ```text
//! one host:   r0 eth0 10.77.0.1 --.    two hosts:  host 0                      host 1
//!                                 |                r0 eth0 10.77.0.1 --------- r0 eth0 10.77.0.2
//!             r1 eth1 10.78.0.1 --'                r1 eth1 10.78.0.1 --------- r1 eth1 10.78.0.2
//! ```
//!
//! With one host, a queue pair of r0 can connect to queue pairs of r0, and over the link to those of r1. Each interface also has
//! an IPv6 link-local address: GID 0 is that address, GID 1 the IPv4 address, both for RoCE v2.
//!
//! The command has the environment variables `HOST` (0 or 1), `HOSTS`, and with two hosts `PEER`, the other host's address
//! on the first link. With two hosts, both run the command, and it starts when both are ready. A guest whose command has ended
//! kills that command's processes and keeps running until the command of the other guest has ended.

mod check;
mod guest_image;
mod initramfs;
mod kernel;
mod modules;
mod qemu;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

use clap::Args;

use crate::error::{Error, with_path};
use crate::packages::Packages;
use crate::workspace;
use kernel::Kernel;
use qemu::GuestExit;

pub(crate) use check::check;
pub(crate) use guest_image::PACKAGES;

/// The exit status of `cargo xtask vm` when a guest ended without a status.
pub(crate) const NO_STATUS: u8 = 97;

/// How many lines of each output the report on a failed guest shows.
const LOG_TAIL_LINES: usize = 60;

/// The command line of `cargo xtask vm`: how to boot and what to run.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// One guest with two rxe devices, or two guests joined by two links
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) hosts: u8,
    /// Copy this file into the guest, to the same path and with the libraries it needs (repeatable)
    #[arg(long = "file", value_name = "PATH")]
    pub(crate) files: Vec<PathBuf>,
    /// Set an environment variable of the command (repeatable)
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub(crate) variables: Vec<String>,
    /// Kill the guest after so many seconds, boot included
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub(crate) timeout: u64,
    /// Memory of each guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(256..))]
    pub(crate) memory: u32,
    /// Processors of each guest
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) cpus: u8,
    /// Command to run: a program of this machine, `sh`, or an applet of busybox
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

impl Options {
    /// Creates options for one host with the defaults.
    pub(crate) fn new(command: impl IntoIterator<Item = String>) -> Self {
        let command = command.into_iter().collect();
        Options { hosts: 1, files: vec![], variables: vec![], timeout: 300, memory: 1024, cpus: 2, command }
    }
}

/// `cargo xtask vm`.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Error> {
    PACKAGES.iter().copied().collect::<Packages>().install()?;
    boot(options, &mut |_| ()).map(ExitCode::from)
}

/// Boots the guests, runs the command, prints its output, and passes each line of its standard output to `line`. Returns
/// the highest exit status of all hosts. When a guest ended without a status, it prints a report on that guest and returns
/// [`NO_STATUS`].
pub(crate) fn boot(options: &Options, line: &mut dyn FnMut(&str)) -> Result<u8, Error> {
    let cache = workspace::target().join("xtask-vm");
    let kernel = Kernel::fetch(&cache)?;
    remove_old_runs(&cache)?;
    let directory = cache.join(format!("run-{}", process::id()));
    if directory.exists() {
        fs::remove_dir_all(&directory).map_err(with_path(&directory))?;
    }
    fs::create_dir_all(&directory).map_err(with_path(&directory))?;
    let archive = directory.join("initramfs.cpio");
    let initramfs =
        guest_image::build_initramfs(&kernel, &options.files, &options.variables, &options.command)?;
    fs::write(&archive, initramfs).map_err(with_path(&archive))?;

    let exits = qemu::run(&directory, &kernel.image(), options, line)?;

    fs::remove_file(&archive).map_err(with_path(&archive))?;
    let mut highest = 0;
    let mut failed = false;
    for (host, exit) in (0..).zip(exits) {
        if let GuestExit::Status(status) = exit {
            highest = highest.max(status);
        } else {
            failed = true;
            eprint!(
                "xtask: guest {host}: {exit} (timeout {} s)\n{}",
                options.timeout,
                qemu::log_tail(&directory, host, LOG_TAIL_LINES)
            );
        }
    }
    if failed {
        return Ok(NO_STATUS);
    }
    fs::remove_dir_all(&directory).map_err(with_path(&directory))?;
    Ok(highest)
}

/// Removes the directories of earlier runs, except those of runs that are still in progress.
fn remove_old_runs(cache: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(cache).map_err(with_path(cache))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix("run-").or_else(|| name.strip_prefix("kernel.partial-"));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            fs::remove_dir_all(entry.path()).map_err(with_path(entry.path()))?;
        }
    }
    Ok(())
}

fn parse_variable(text: &str) -> Result<String, String> {
    let name = text.split_once('=').map_or("", |(name, _)| name);
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || !name.chars().all(word) || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err("expected NAME=VALUE".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_needs_a_name_that_a_shell_accepts() {
        assert!(parse_variable("CROSSTIE_SEED=7").is_ok());
        assert!(parse_variable("EMPTY=").is_ok());
        for wrong in ["SEED", "=7", "1A=7", "A-B=7"] {
            assert!(parse_variable(wrong).is_err(), "{wrong}");
        }
    }
}
