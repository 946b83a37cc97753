//! Builds with cargo, and finds what was built.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::error::Error;
use crate::process;
use crate::workspace;

/// What cargo says that it has built.
#[derive(Debug, Deserialize)]
pub(crate) struct Artifact {
    pub(crate) target: Target,
    pub(crate) profile: Profile,
    pub(crate) executable: Option<PathBuf>,
    pub(crate) manifest_path: PathBuf,
    filenames: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    kind: Vec<String>,
    pub(crate) name: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Profile {
    /// Whether it was built as a test.
    pub(crate) test: bool,
}

impl Artifact {
    /// Reads one of cargo's messages; `None` if it says something else.
    pub(crate) fn parse(message: &str) -> Option<Artifact> {
        serde_json::from_str(message).ok()
    }

    pub(crate) fn is(&self, kind: &str) -> bool {
        self.target.kind.iter().any(|one| one == kind)
    }

    /// Its shared library.
    pub(crate) fn shared_library(&self) -> Option<PathBuf> {
        self.filenames
            .iter()
            .find(|file| self.is("cdylib") && file.extension() == Some("so".as_ref()))
            .cloned()
    }
}

/// Runs a cargo command that builds and runs nothing. Returns what it has built.
pub(crate) fn build(arguments: &[&str], timeout: Duration) -> Result<Vec<Artifact>, Error> {
    let mut command = cargo(timeout, arguments);
    command.arg("--message-format=json-render-diagnostics");
    let mut found = Vec::new();
    let outcome = process::run_streaming(&mut command, timeout, |line| {
        found.extend(Artifact::parse(line));
        false
    })?;
    match outcome.problem(timeout) {
        None => Ok(found),
        Some(what) => Err(Error::UnexpectedOutput { command: process::command_line(&command), what }),
    }
}

/// Cargo at the root of the repository.
pub(crate) fn cargo(timeout: Duration, arguments: &[&str]) -> Command {
    let mut command = process::with_timeout(workspace::cargo(), timeout);
    command.args(arguments).current_dir(workspace::root());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_from_cargo_messages() {
        let message = |kind: &str, executable: &str, files: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/r/Cargo.toml","target":{{"kind":{kind},"name":"one"}},
                "profile":{{"test":true}},"executable":{executable},"filenames":{files}}}"#
            )
        };
        let test = Artifact::parse(&message(r#"["test"]"#, r#""/t/one-1""#, "[]")).unwrap();
        assert_eq!((test.executable.as_deref(), test.is("test")), (Some("/t/one-1".as_ref()), true));
        assert!(test.profile.test && !test.is("bin") && test.shared_library().is_none());
        let library = message(r#"["cdylib", "rlib"]"#, "null", r#"["/t/libone.rlib", "/t/libone.so"]"#);
        let library = Artifact::parse(&library).unwrap();
        assert_eq!(library.shared_library(), Some("/t/libone.so".into()));
        assert!(Artifact::parse("Compiling").is_none());
        assert!(Artifact::parse(r#"{"reason":"build-finished","success":true}"#).is_none());
    }
}
