//! Kernel Soft-RoCE on a machine that has none: commands run in QEMU guests under plain emulation.
//!
//! A guest is Debian's kernel ([`kernel`]) and a file system made on the spot ([`guest`], [`initramfs`]); [`qemu`]
//! boots it, passes the command's output and status out, and never waits for a guest past its time. Files of
//! this machine that are copied in (the command, each `--file`, the libraries they need) keep their paths.
//!
//! ```text
//! one host:   r0 eth0 10.77.0.1 --.    two hosts:  host 0                      host 1
//!                                 |                r0 eth0 10.77.0.1 --------- r0 eth0 10.77.0.2
//!             r1 eth1 10.78.0.1 --'                r1 eth1 10.78.0.1 --------- r1 eth1 10.78.0.2
//! ```
//!
//! With one host a queue pair of r0 reaches those of r0 and those of r1, over the link in the latter case. Interfaces
//! have their IPv6 link-local addresses as well: GID 0 is that one, GID 1 the IPv4 address, both RoCE v2.
//!
//! The command sees `HOST` (0 or 1), `HOSTS`, and with two hosts `PEER`, the other's address on the first link.
//! With two hosts both run the command, started when both are ready; a guest whose command has ended stays up,
//! without that command's processes, until the other's has.

mod check;
mod guest;
mod initramfs;
mod kernel;
mod modules;
mod qemu;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

use clap::Args;

use crate::error::{Error, at};
use crate::packages::Packages;
use crate::workspace;
use kernel::Kernel;
use qemu::Ending;

pub(crate) use check::check;
pub(crate) use guest::PACKAGES;

/// The exit status that stands for a guest without one.
pub(crate) const NO_STATUS: u8 = 97;

/// How many of its last lines a lost guest's report shows of each stream.
const LAST_LINES: usize = 60;

/// How to boot and what to run.
#[derive(Args, Debug, Clone)]
pub(crate) struct Options {
    /// One guest with two rxe devices, or two guests joined by two links
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) hosts: u8,
    /// Another file for the guest, at its own path and with the libraries it needs (repeatable)
    #[arg(long = "file", value_name = "PATH")]
    pub(crate) files: Vec<PathBuf>,
    /// A variable for the command (repeatable)
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) variables: Vec<String>,
    /// Seconds that booting and the command may take together
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub(crate) timeout: u64,
    /// Memory of each guest
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(256..))]
    pub(crate) memory: u32,
    /// Processors of each guest
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(crate) cpus: u8,
    /// The command: a program of this machine, `sh`, or an applet of busybox
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

impl Options {
    /// The defaults, for one host.
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

/// Boots the guests, runs the command, passes its output on, and shows each line of its standard output to `line`.
/// Returns the worst status of all hosts, or [`NO_STATUS`] after a report on the guest that gave none.
pub(crate) fn boot(options: &Options, line: &mut dyn FnMut(&str)) -> Result<u8, Error> {
    let cache = workspace::target().join("xtask-vm");
    let kernel = Kernel::fetch(&cache)?;
    remove_old_runs(&cache)?;
    let directory = cache.join(format!("run-{}", process::id()));
    if directory.exists() {
        fs::remove_dir_all(&directory).map_err(at(&directory))?;
    }
    fs::create_dir_all(&directory).map_err(at(&directory))?;
    let archive = directory.join("initramfs.cpio");
    let initramfs = guest::initramfs(&kernel, &options.files, &options.variables, &options.command)?;
    fs::write(&archive, initramfs).map_err(at(&archive))?;

    let endings = qemu::run(&directory, &kernel.image(), options, line)?;

    fs::remove_file(&archive).map_err(at(&archive))?;
    let mut worst = 0;
    let mut lost = false;
    for (host, ending) in (0..).zip(endings) {
        if let Ending::Exit(status) = ending {
            worst = worst.max(status);
        } else {
            lost = true;
            eprint!(
                "xtask: guest {host}: {ending} ({} s allowed)\n{}",
                options.timeout,
                qemu::last_words(&directory, host, LAST_LINES)
            );
        }
    }
    if lost {
        return Ok(NO_STATUS);
    }
    fs::remove_dir_all(&directory).map_err(at(&directory))?;
    Ok(worst)
}

/// Removes what earlier runs left; those that are still going on keep theirs.
fn remove_old_runs(cache: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(cache).map_err(at(cache))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix("run-").or_else(|| name.strip_prefix("kernel.partial-"));
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            fs::remove_dir_all(entry.path()).map_err(at(entry.path()))?;
        }
    }
    Ok(())
}

fn variable(text: &str) -> Result<String, String> {
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
    fn variables_need_a_name_that_a_shell_accepts() {
        assert!(variable("CROSSTIE_SEED=7").is_ok());
        assert!(variable("EMPTY=").is_ok());
        for wrong in ["SEED", "=7", "1A=7", "A-B=7"] {
            assert!(variable(wrong).is_err(), "{wrong}");
        }
    }
}
