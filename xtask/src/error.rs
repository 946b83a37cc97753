//! What can go wrong before or around the work itself. A failed test or a failed guest command is a
//! result, not an error.

use std::io;
use std::path::PathBuf;

use crate::packages::Packages;

/// Why a task could not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },

    /// A program could not be started.
    #[error("cannot start {program}: {source}; is it installed and on PATH?")]
    Start { program: String, source: io::Error },

    /// A program that we depend on ended badly.
    #[error("{command} failed ({status}): {stderr}")]
    Program { command: String, status: String, stderr: String },

    /// Packages are missing and this user may not install them.
    #[error(
        "missing packages, and neither root nor sudo without a password to install them; run: sudo apt-get install --no-install-recommends {0}"
    )]
    Missing(Packages),

    /// Not a Debian or Ubuntu system.
    #[error(
        "this task installs its tools with apt-get, which is not here; run it on Debian or Ubuntu, or in a container of one"
    )]
    NoApt,

    /// apt knows no kernel package.
    #[error(
        "apt knows no dependency of {0} on a linux-image package; the guests boot Debian's kernel on amd64 (check the apt sources, run apt-get update)"
    )]
    NoKernelPackage(&'static str),

    /// The unpacked kernel package lacks what the guest needs.
    #[error("{path} {what}; remove it to fetch the kernel package again", path = path.display())]
    Kernel { path: PathBuf, what: String },

    /// A command or file for the guest that is not on this machine.
    #[error("no such command or file: {0}; name one on PATH, a path, or an applet of busybox")]
    NoSuchFile(String),

    /// A program for the guest needs a library that this machine lacks.
    #[error("{program} needs {library}, which this machine does not have", program = program.display())]
    NoSuchLibrary { program: PathBuf, library: String },

    /// `--only` named no step.
    #[error("no step called {0}; cargo xtask test --list names them")]
    NoSuchStep(String),

    /// The output of cargo was not what this task expects.
    #[error("unexpected answer from {command}: {what}")]
    Answer { command: String, what: String },
}

/// Adds the path to an I/O error.
pub(crate) fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::File { path, source }
}
