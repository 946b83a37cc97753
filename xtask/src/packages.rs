//! Debian packages: finds out which are missing, and installs them.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::process;

/// A set of Debian package names, in alphabetical order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Packages(BTreeSet<&'static str>);

impl Packages {
    /// Returns the packages that are not installed.
    pub(crate) fn missing(&self) -> Result<Packages, Error> {
        let mut missing = Packages::default();
        for &name in &self.0 {
            // dpkg-query fails for a name that dpkg does not know.
            let query = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", name]).output();
            let query = query.map_err(|_| Error::NoApt)?;
            if query.stdout != b"installed" {
                missing.0.insert(name);
            }
        }
        Ok(missing)
    }

    /// Installs the missing packages; an error when this user cannot.
    pub(crate) fn install(&self) -> Result<(), Error> {
        let missing = self.missing()?;
        if missing.0.is_empty() {
            return Ok(());
        }
        if !can_install() {
            return Err(Error::MissingPackages(missing));
        }
        eprintln!("xtask: installing {missing}");
        if !package_lists_exist() {
            update_package_lists()?;
        }
        let install = || {
            let mut command = apt_get();
            command.args(["install", "--yes", "--no-install-recommends"]).args(&missing.0);
            process::run_inheriting_output(command.stdout(std::io::stderr()))
        };
        // Package lists that are out of date name versions that the archive no longer has: update them and try again.
        install().or_else(|_| update_package_lists().and_then(|()| install()))
    }
}

impl FromIterator<&'static str> for Packages {
    fn from_iter<I: IntoIterator<Item = &'static str>>(names: I) -> Self {
        Packages(names.into_iter().collect())
    }
}

impl fmt::Display for Packages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().copied().collect::<Vec<_>>().join(" "))
    }
}

/// Updates apt's package lists.
pub(crate) fn update_package_lists() -> Result<(), Error> {
    process::run_inheriting_output(apt_get().args(["update"]).stdout(std::io::stderr()))
}

/// Whether this user is root, or can become root without a password.
pub(crate) fn can_install() -> bool {
    is_root() || succeeds_quietly(Command::new("sudo").args(["-n", "true"]))
}

fn apt_get() -> Command {
    let mut command = if is_root() { Command::new("env") } else { Command::new("sudo") };
    if !is_root() {
        command.args(["-n", "env"]);
    }
    // When another apt is running, wait for its lock instead of failing.
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

/// Whether this user is root.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is the effective user of this process.
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|metadata| metadata.uid() == 0)
}

fn package_lists_exist() -> bool {
    let Ok(lists) = fs::read_dir("/var/lib/apt/lists") else { return false };
    lists.flatten().any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

fn succeeds_quietly(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_names_are_listed_once_and_in_order() {
        let packages: Packages = ["kmod", "cmake", "kmod"].into_iter().collect();
        assert_eq!(packages.to_string(), "cmake kmod");
    }
}
