//! Why a task could not do its work. A failed test or a failed command in a guest is a result, not an error.

use std::io;
use std::path::PathBuf;

use crate::packages::Packages;

/// See the [module](self).
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },

    /// A program could not be started.
    #[error("cannot start {program}: {source}; is it installed and on PATH?")]
    Start { program: String, source: io::Error },

    /// A program that a task needs exited with a failure.
    #[error("{command} failed ({status}): {stderr}")]
    Program { command: String, status: String, stderr: String },

    /// Packages are missing and this user cannot install them.
    #[error(
        "packages are missing, and this user can install them neither as root nor with sudo without a password; run: sudo apt-get install --no-install-recommends {0}"
    )]
    MissingPackages(Packages),

    /// This is not a Debian or Ubuntu system.
    #[error(
        "this task installs its tools with apt-get, which this machine does not have: run the task on Debian or Ubuntu, or in a container of one"
    )]
    NoApt,

    /// apt does not know a kernel package.
    #[error(
        "apt shows no linux-image package that {0} depends on: the guests boot Debian's kernel for amd64; check the apt sources and run apt-get update"
    )]
    NoKernelPackage(&'static str),

    /// The unpacked kernel package lacks something that the guest needs.
    #[error("{path} {what}: remove that directory to fetch the kernel package again", path = path.display())]
    Kernel { path: PathBuf, what: String },

    /// A command or file for the guest does not exist on this machine.
    #[error("no such command or file: {0}; give a program on PATH, a path, or an applet of busybox")]
    NoSuchFile(String),

    /// A program for the guest needs a library that this machine lacks.
    #[error("{program} needs {library}, which this machine does not have: install the package that contains it", program = program.display())]
    NoSuchLibrary { program: PathBuf, library: String },

    /// `--only` named a step that does not exist.
    #[error("there is no step {0}: cargo xtask test --list shows the steps")]
    NoSuchStep(String),

    /// A program's output was not what this task expects.
    #[error("unexpected output of {command}: {what}")]
    UnexpectedOutput { command: String, what: String },
}

/// Adds the path to an I/O error: `.map_err(with_path(path))`.
pub(crate) fn with_path(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::File { path, source }
}
