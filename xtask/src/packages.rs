//! Debian packages: which are missing, and how they get here.

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
    /// Those that are not installed.
    pub(crate) fn missing(&self) -> Result<Packages, Error> {
        let mut missing = Packages::default();
        for &name in &self.0 {
            // dpkg-query fails for a name that dpkg has never heard of.
            let query = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", name]).output();
            let query = query.map_err(|_| Error::NoApt)?;
            if query.stdout != b"installed" {
                missing.0.insert(name);
            }
        }
        Ok(missing)
    }

    /// Installs those that are missing, when this user may.
    pub(crate) fn install(&self) -> Result<(), Error> {
        let missing = self.missing()?;
        if missing.0.is_empty() {
            return Ok(());
        }
        if !may_install() {
            return Err(Error::Missing(missing));
        }
        eprintln!("xtask: installing {missing}");
        if !lists_exist() {
            update()?;
        }
        let install = || {
            let mut command = apt_get();
            command.args(["install", "--yes", "--no-install-recommends"]).args(&missing.0);
            process::passing_output(command.stdout(std::io::stderr()))
        };
        // Lists that are out of date name packages that the archive no longer has.
        install().or_else(|_| update().and_then(|()| install()))
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

/// Brings apt's lists up to date.
pub(crate) fn update() -> Result<(), Error> {
    process::passing_output(apt_get().args(["update"]).stdout(std::io::stderr()))
}

/// Whether this user is root, or may become it without a password.
pub(crate) fn may_install() -> bool {
    is_root() || quiet_success(Command::new("sudo").args(["-n", "true"]))
}

fn apt_get() -> Command {
    let mut command = if is_root() { Command::new("env") } else { Command::new("sudo") };
    if !is_root() {
        command.args(["-n", "env"]);
    }
    // Another apt may be at work: wait for its lock rather than fail.
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

/// Whether this user is root.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is the effective user.
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|of| of.uid() == 0)
}

fn lists_exist() -> bool {
    let Ok(lists) = fs::read_dir("/var/lib/apt/lists") else { return false };
    lists.flatten().any(|entry| entry.file_name().to_string_lossy().contains("_Packages"))
}

fn quiet_success(command: &mut Command) -> bool {
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
    fn names_are_listed_once_and_in_order() {
        let packages: Packages = ["kmod", "cmake", "kmod"].into_iter().collect();
        assert_eq!(packages.to_string(), "cmake kmod");
    }
}
