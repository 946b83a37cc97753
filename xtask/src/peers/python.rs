//! Systems that PyPI has in a newer release than Debian: their wheels, unpacked into a directory of their own.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, with_path};
use crate::packages::Packages;
use crate::process;
use crate::workspace;

/// Unpacks the wheel of this version, if that was not done before. Returns the directory that has its `bin`, `lib` and `include`.
pub(super) fn install(package: &str, version: &str) -> Result<PathBuf, Error> {
    let directory = workspace::target().join("peers").join(format!("{package}-{version}"));
    let complete = directory.join(".complete");
    if complete.exists() {
        return Ok(directory);
    }
    if process::run_for_output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
        ["python3-pip"].into_iter().collect::<Packages>().install()?;
    }
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        "--no-warn-script-location",
    ]);
    // Without this Debian's pip adds a directory `local` to the prefix.
    pip.env("DEB_PYTHON_INSTALL_LAYOUT", "deb").env("PIP_ROOT_USER_ACTION", "ignore");
    process::run_for_output(pip.arg("--prefix").arg(&directory).arg(format!("{package}=={version}")))?;
    fs::write(&complete, "").map_err(with_path(complete))?;
    Ok(directory)
}

/// The directory of an installed package's Python modules, below the one that [`install`] returned.
pub(super) fn modules(directory: &std::path::Path) -> Result<PathBuf, Error> {
    let lib = directory.join("lib");
    let entries = fs::read_dir(&lib).map_err(with_path(&lib))?;
    let modules =
        entries.flatten().map(|entry| entry.path().join("site-packages")).find(|path| path.is_dir());
    modules.ok_or_else(|| Error::UnexpectedOutput {
        command: "python3 -m pip install".into(),
        what: format!("{} has no site-packages", lib.display()),
    })
}
